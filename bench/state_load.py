"""How does a database get millions of turns? By COPY, from rows that a real server has written.

A server answers one chain of `DEPTH_MAX` turns; each of its rows becomes a template, whose ids are replaced. A loaded
chain is what the server itself would have stored, and can be continued. A hundred chains grow at a time, so that
turns of one chain lie apart on the disk, as they do where many clients are served. Indexes are built after the rows.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import islice

import asyncpg
from rich.progress import Progress

from bench.peer import server
from segue.stores.records import compress_response, expand_response

# Of a hundred chains, one has `DEPTH_MAX` turns and the others have `DEPTH`.
DEPTH, DEPTH_MAX = 10, 100
# Ten million turns in 24 days are 4.8 a second; where a turn of an agent takes 20 s, a hundred chains grow at a time.
GROWING_MAX = 100
# Turns for each conversation, and the items of one.
PER_CONVERSATION, ITEMS = 100, 4
# The turns are of the last days, the newest an hour old: nothing expires by the default of 30 days.
OLDEST_S, NEWEST_S = 25 * 86_400, 3_600
CHUNK_ROWS = 2_000
# Chains whose last turn is noted, for the measurements to continue.
NOTED_MAX = 4_000

SCRIPT = {
    "turns": [
        {
            "text": "It rains in Paris: twelve degrees, wind from the west. Take an umbrella with you."
        }
    ]
}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
INSTRUCTIONS = (
    "You are a helpful assistant. Answer in one sentence, and use the tools where they help. " * 4
)
QUESTION = (
    "What is the weather in Paris today, and what should I take with me when I leave the house?"
)

TURN_COLUMNS = (
    "seq", "owner", "id", "parent_id", "history", "response", "instructions", "tools", "saved_at", "saved_by",
)  # fmt: skip
USAGE_COLUMNS = (
    "turn_id", "owner", "model", "status", "input_tokens", "cached_tokens", "output_tokens", "ended_at", "tool_calls",
)  # fmt: skip


@dataclass(frozen=True)
class Template:
    """One row of a real chain, cut where ids and numbers stand; its response by itself, because it is compressed."""

    turn: list[bytes]
    response: list[bytes]
    usage: list[bytes]


@dataclass
class Grown:
    """A chain that grows."""

    number: int
    length: int
    depth: int = 0
    last: bytes = b""


def answer(port: int, path: str, body: dict[str, object]) -> dict[str, object]:
    """What a server at this port answers."""
    url, data = f"http://127.0.0.1:{port}{path}", json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        found: dict[str, object] = json.load(response)
        return found


def make_chain(url: str) -> tuple[list[str], str]:
    """Real turns, one after the other, and a conversation; their ids."""
    ids: list[str] = []
    with server(SCRIPT, "--store", url, is_pinned=False) as process:
        for _ in range(DEPTH_MAX):
            body: dict[str, object] = {
                "input": QUESTION, "instructions": INSTRUCTIONS, "tools": [TOOL] * 3,
                "model": "scripted", "previous_response_id": ids[-1] if ids else None,
            }  # fmt: skip
            body["tools"] = [TOOL | {"name": f"weather_{at}"} for at in range(3)]
            ids.append(str(answer(process.port, "/v1/responses", body)["id"]))
        items = [{"type": "message", "role": "user", "content": QUESTION}] * ITEMS
        conversation = str(answer(process.port, "/v1/conversations", {"items": items})["id"])
    return ids, conversation


async def load(url: str, turns: int, progress: Progress) -> None:
    """Fill an empty database with this many turns."""
    ids, conversation = await asyncio.to_thread(make_chain, url)
    connection = await asyncpg.connect(url, timeout=60)
    try:
        begin_at = int(time.time()) - OLDEST_S
        templates = [await _template(connection, turn_id) for turn_id in ids]
        # No foreign keys, no triggers: the rows are right.
        await connection.execute(
            "SET session_replication_role = replica; SET maintenance_work_mem = '1GB'"
        )
        async with connection.transaction():
            await connection.execute(
                "CREATE TABLE chains (number bigint PRIMARY KEY, depth int, tip text)"
            )
            for table, columns in (("turns", TURN_COLUMNS), ("usage", USAGE_COLUMNS)):
                indexes = await _drop_indexes(connection, table)
                # With nothing in it the rows need no log (wal_level = minimal).
                await connection.execute(f"TRUNCATE {table}")
                task = progress.add_task(f"{table}: rows", total=turns)
                noted: list[tuple[int, int, str]] | None = [] if table == "turns" else None
                source = _stream(
                    table,
                    templates,
                    turns,
                    begin_at,
                    noted,
                    lambda n, task=task: progress.advance(task, n),
                )
                await connection.copy_to_table(
                    table,
                    source=source,
                    columns=columns,
                    format="binary",
                    freeze=True,
                    timeout=None,
                )
                if noted is not None:
                    await connection.copy_records_to_table("chains", records=noted)
                task = progress.add_task(f"{table}: indexes", total=len(indexes))
                for index in indexes:
                    await connection.execute(index, timeout=None)
                    progress.advance(task)
            await connection.execute(
                "SELECT setval(pg_get_serial_sequence('turns', 'seq'), max(seq)) FROM turns"
            )
        await _copy_conversations(connection, conversation, turns // PER_CONVERSATION)
        task = progress.add_task("vacuum", total=1)
        await connection.execute("VACUUM (ANALYZE)", timeout=None)
        progress.advance(task)
    finally:
        await connection.close()


async def _template(connection: asyncpg.Connection, turn_id: str) -> Template:
    row = await connection.fetchrow("SELECT * FROM turns WHERE id = $1", turn_id)
    used = await connection.fetchrow("SELECT * FROM usage WHERE turn_id = $1", turn_id)
    own, parent = turn_id[5:].encode(), (row["parent_id"] or "")[5:].encode()
    turn = b"".join([
        struct.pack("!h", len(TURN_COLUMNS)), _field(b"SEQUENCE"), _field(row["owner"].encode()),
        _field(turn_id.encode()), _field(None if row["parent_id"] is None else row["parent_id"].encode()),
        _field(row["history"]), b"RESPONSE", _field(row["instructions"]), _field(row["tools"]),
        _field(b"SAVED_AT"), _field(row["saved_by"].encode()),
    ])  # fmt: skip
    numbers = [struct.pack("!q", used[name]) for name in USAGE_COLUMNS[4:7]]
    usage = b"".join([
        struct.pack("!h", len(USAGE_COLUMNS)), _field(turn_id.encode()),
        *(_field(used[name].encode()) for name in ("owner", "model", "status")),
        *map(_field, numbers), _field(b"SAVED_AT"), _field(struct.pack("!q", 0)),
    ])  # fmt: skip
    response = expand_response(row["response"])
    return Template(*(_cut(one, own, parent) for one in (turn, response, usage)))


def _field(value: bytes | None) -> bytes:
    return struct.pack("!i", -1) if value is None else struct.pack("!i", len(value)) + value


def _cut(row: bytes, own: bytes, parent: bytes) -> list[bytes]:
    """The row in parts; between two of them stands an id or a number, named by its part."""
    parts = [row]
    for name in filter(None, (own, parent, b"SEQUENCE", b"SAVED_AT", b"RESPONSE")):
        mark = {own: b"OWN", parent: b"PARENT"}.get(name, name)
        cut: list[bytes] = []
        for part in parts:
            pieces = part.split(name)
            for piece in pieces[:-1]:
                cut += [piece, mark]
            cut.append(pieces[-1])
        parts = cut
    return parts


def chains(turns: int, begin_at: int) -> Iterator[tuple[int, int, bool, int, bytes, bytes]]:
    """The turns of all chains in the order in which they are saved: number of the chain, depth, whether it is the last,
    time, id and parent; the same each time."""
    dice = random.Random(turns)
    numbers = iter(range(turns))

    def begin() -> Grown:
        number = next(numbers)
        return Grown(number, DEPTH_MAX if number % 100 == 99 else DEPTH)

    growing = [begin() for _ in range(max(1, min(GROWING_MAX, turns // (5 * DEPTH_MAX))))]
    number = 0
    while True:
        for at, chain in enumerate(growing):
            if chain.depth == chain.length:
                chain = growing[at] = begin()
            saved_at = begin_at + number * (OLDEST_S - NEWEST_S) // turns
            parent = chain.last
            # As `segue.ids` makes them: one of eight workers, the time, and chance.
            chain.last = b"%08x%08x%b" % (
                chain.number % 8,
                saved_at,
                dice.randbytes(8).hex().encode(),
            )
            number += 1
            chain.depth += 1
            is_last = chain.depth == chain.length
            yield chain.number, chain.depth, is_last, saved_at, chain.last, parent


async def _stream(table, templates, turns, begin_at, noted, advance) -> AsyncIterator[bytes]:  # type: ignore[no-untyped-def]
    yield b"PGCOPY\n\xff\r\n\0" + bytes(8)
    is_turn = table == "turns"
    rows = enumerate(islice(chains(turns, begin_at), turns))
    step = max(1, turns // (12 * NOTED_MAX))
    while chunk := list(islice(rows, CHUNK_ROWS)):
        out: list[bytes] = []
        for number, (chain, depth, is_last, saved_at, own, parent) in chunk:
            values = {b"OWN": own, b"PARENT": parent}
            values |= {
                b"SAVED_AT": struct.pack("!q", saved_at),
                b"SEQUENCE": struct.pack("!q", number + 1),
            }
            get, template = values.get, templates[depth - 1]
            if is_turn:
                response = b"".join([get(part, part) for part in template.response])
                values[b"RESPONSE"] = _field(compress_response(response))
            out += [get(part, part) for part in (template.turn if is_turn else template.usage)]
            if noted is not None and is_last and (depth == DEPTH_MAX or chain % step == 0):
                noted.append((chain, depth, "resp_" + own.decode()))
        yield b"".join(out)
        advance(len(chunk))
    yield struct.pack("!h", -1)


async def _drop_indexes(connection: asyncpg.Connection, table: str) -> list[str]:
    """Drop what is kept up with each row; the statements that make it again."""
    constraints = await connection.fetch(
        "SELECT conname, pg_get_constraintdef(oid) AS made FROM pg_constraint"
        " WHERE conrelid = $1::text::regclass AND contype IN ('p', 'u')", table,
    )  # fmt: skip
    again = [
        f"ALTER TABLE {table} ADD CONSTRAINT {one['conname']} {one['made']}" for one in constraints
    ]
    for one in constraints:
        await connection.execute(f"ALTER TABLE {table} DROP CONSTRAINT {one['conname']}")
    for one in await connection.fetch(
        "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = $1", table
    ):
        again.append(one["indexdef"])
        await connection.execute(f"DROP INDEX {one['indexname']}")
    return again


async def _copy_conversations(connection: asyncpg.Connection, name: str, count: int) -> None:
    """This many more conversations like this one."""
    made = "'conv_' || substr(md5(number::text), 1, 32)"
    await connection.execute(
        f"INSERT INTO conversations (owner, id, created_at, metadata, tip_id, tip_items, count, version)"
        f" SELECT owner, {made}, created_at, metadata, tip_id, tip_items, count, version"
        f" FROM conversations, generate_series(1, {count - 1}) AS number WHERE id = '{name}'", timeout=None,
    )  # fmt: skip
    await connection.execute(
        f"INSERT INTO shelved (owner, conversation_id, position, item_id, body)"
        f" SELECT owner, {made}, position, item_id, body"
        f" FROM shelved, generate_series(1, {count - 1}) AS number WHERE conversation_id = '{name}'", timeout=None,
    )  # fmt: skip
