"""What do grouped commits buy? Stored turns per second, grouped against one by one.

    python -m bench.commits                64 writers, delays of 0, 1 and 3 ms, then this disk
    python -m bench.commits --writers 16
    python -m bench.commits --postgres postgresql://…    the same saves in a database that may be filled

Each writer saves turns of an agent loop (2 KB of tool output, 19 KB of tools) one after another, as a
lane does: the next save begins when the last one is durable. The same store does both; "single" is the
store with groups of one. The time of an fsync is simulated: `durability = "relaxed"`, which does not
wait for the disk, and a sleep of the given length in the writing thread just before each commit. The
row "disk" has no sleep and `synchronous = FULL` on the folder for temporary files. Rounds alternate
between the two so that a noisy machine is noisy for both; the figure is the median round. PostgreSQL
groups the commits of its connections itself: there "single" is one connection, "grouped" the whole pool.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Raw

from segue.ids import new_id
from segue.seams.history import Round, Turn
from segue.seams.prompt import id_array
from segue.stores.postgres import PostgresStore
from segue.stores.postgres_database import CONNECTIONS_MAX, PostgresDatabase
from segue.stores.sqlite import SqliteStore
from segue.stores.sqlite_database import GROUP_MAX, SqliteDatabase
from segue.wire.items import Item, ItemValue
from segue.wire.response import InputDetails, OutputDetails, ReasoningEcho, Response, Usage
from segue_bench.rounds import interleaved, print_table

TOOLS = Raw(json.dumps([{"type": "function", "name": "f", "description": "x" * 19_000}]).encode())
DELAYS_S = (0.0, 0.001, 0.003)


def item(body: dict[str, object]) -> Item:
    raw = json.dumps(body).encode()
    return Item(raw, msgspec.json.decode(raw, type=ItemValue))


GIVEN = item({"type": "function_call_output", "call_id": "c", "output": "x" * 2_000})
WROTE = item({"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"path":"a"}'})


def next_turn(parent: Turn | None) -> Turn:
    """One turn of an agent loop after this one."""
    turn_id = new_id("resp")
    parent_id = parent.id if parent else None
    response = Response(
        id=turn_id,
        created_at=0,
        completed_at=1,
        status="completed",
        instructions=Raw(b"null"),
        max_output_tokens=None,
        max_tool_calls=None,
        model="bench",
        output=[Raw(WROTE.raw)],
        parallel_tool_calls=True,
        previous_response_id=parent_id,
        prompt_cache_key=None,
        reasoning=ReasoningEcho(),
        safety_identifier=None,
        store=True,
        temperature=1.0,
        text=Raw(b"{}"),
        tool_choice=Raw(b'"auto"'),
        tools=TOOLS,
        top_logprobs=0,
        top_p=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        truncation="disabled",
        usage=Usage(1, InputDetails(), 1, OutputDetails(), 2),
        user=None,
        metadata={},
    )
    rounds = (Round((GIVEN,), (WROTE,), (id_array(range(100)),), did_sample=True),)
    return Turn(turn_id, "bench", parent_id, parent, rounds, response, True, {}, 1)


async def saves_per_s(
    path: Path, on_commit: Callable[[int], None] | None, group_max: int, writers: int, span_s: float
) -> float:
    """Stored turns per second while this many writers save for this long."""
    durability = "full" if on_commit is None else "relaxed"
    database = await SqliteDatabase.open(
        path,
        durability=durability,  # type: ignore[arg-type]  # one of the two literals
        on_commit=on_commit,
        group_max=group_max,
    )
    figure = await drive(SqliteStore(database).turns.save, writers, span_s)
    await database.close()
    return figure


async def postgres_saves_per_s(
    url: str, connections_max: int, writers: int, span_s: float
) -> float:
    """The same in PostgreSQL, over this many connections."""
    database = await PostgresDatabase.open(url, connections_max=connections_max)
    figure = await drive(PostgresStore(database).turns.save, writers, span_s)
    await database.close()
    return figure


async def drive(save: Callable[[Turn], Awaitable[None]], writers: int, span_s: float) -> float:
    """This many writers, each saving the next turn when the last one is durable."""
    start = time.perf_counter()

    async def write() -> int:
        saved, turn = 0, None
        while time.perf_counter() - start < span_s:
            turn = next_turn(turn)
            await save(turn)
            saved += 1
        return saved

    saved = sum(await asyncio.gather(*[write() for _ in range(writers)]))
    return saved / (time.perf_counter() - start)


def wait(delay_s: float, _: int) -> None:
    """An fsync that takes this long."""
    if delay_s:
        time.sleep(delay_s)


def sqlite_way(delay_s: float | None, group_max: int, writers: int, span_s: float) -> float:
    """One round in a new file."""
    on_commit = None if delay_s is None else partial(wait, delay_s)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.sqlite"
        return asyncio.run(saves_per_s(path, on_commit, group_max, writers, span_s))


def postgres_way(url: str, connections_max: int, writers: int, span_s: float) -> float:
    """One round over this many connections."""
    return asyncio.run(postgres_saves_per_s(url, connections_max, writers, span_s))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.commits", description=__doc__)
    parser.add_argument("--writers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--span-s", type=float, default=2.0)
    parser.add_argument("--postgres", metavar="URL", help="measure this database instead")
    options = parser.parse_args(arguments)
    load = (options.writers, options.span_s)
    disks: dict[str, dict[str, Callable[[], float]]] = {}
    if options.postgres:
        sizes = {"single": 1, "grouped": CONNECTIONS_MAX}
        disks["server"] = {
            name: partial(postgres_way, options.postgres, size, *load)
            for name, size in sizes.items()
        }
    else:
        for delay_s in (*DELAYS_S, None):
            disks["disk" if delay_s is None else f"{delay_s * 1000:g} ms"] = {
                name: partial(sqlite_way, delay_s, size, *load)
                for name, size in {"single": 1, "grouped": GROUP_MAX}.items()
            }
    rows = []
    for disk, ways in disks.items():
        results = interleaved(ways, options.rounds, warm_ups=0)
        single, grouped = map(statistics.median, results.values())
        rows.append((disk, single, grouped, grouped / single))
    print(
        f"stored turns/s, {options.writers} writers, median of {options.rounds} x {options.span_s:g} s"
    )
    print_table("fsync {}|single {:.0f}|grouped {:.0f}|ratio {:.1f}x", rows)


if __name__ == "__main__":
    main()
