"""What do stored turns cost when there are millions of them? A real PostgreSQL, filled by COPY.

    python -m bench state                        100,000 turns against 10,000: a minute or two
    python -m bench state --turns 10000000       14 GB on the disk, half an hour to load
    … --folder DIR                               keep the data there, and use them again

Two databases in one server of our own, each with a server of Segue on it; the two take turns, so that a noisy machine
is noisy for both. A turn is about 1 KB of the table. *Cold*: neither the turns nor their prompts are in Segue's memory,
which has next to none here; "first" reads a chain for the first time, so that its pages may come from the disk, "again"
the same chain once more. An expiry run deletes a fifth of the turns, or as many as it can in `--expire-s`, beside a
client that stores turns. Then Segue and PostgreSQL are killed.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.peer import Client, server
from bench.state_load import NEWEST_S, OLDEST_S, SCRIPT, load
from segue.seams.store import Retention
from segue.stores.maintenance import PAUSE_S
from segue.stores.postgres import PostgresStore
from segue_bench.rounds import print_table
from tests.postgres import PostgresServer, other_user, programs, reachable, temporary_folder

SERVE = {
    "listen_addresses": "",
    "shared_buffers": "1GB",
    "max_wal_size": "4GB",
    "log_min_messages": "fatal",
}
# Rows of an empty table need no log; see `state_load`.
LOAD = SERVE | {"wal_level": "minimal", "max_wal_senders": "0", "autovacuum": "off"}
# Next to no memory for turns, none for prompts.
COLD = ("--process-state-bytes-max", "1", "--render-cache-bytes-max", "0")
SLOW = {"turns": [{"text": "x", "pad_tokens": 20_000}]}
RUNNING = 20
RESTART_S_MAX = 120.0

Times = dict[str, dict[str, list[float]]]


class Http:
    """One connection that is kept."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(self, method: str, path: str, **body: Any) -> tuple[int, dict[str, Any], float]:
        """The status, the body, and how long it took."""
        try:
            return self._ask(method, path, json.dumps(body) if body else None)
        except (http.client.HTTPException, OSError):
            # The server has closed it, because nothing was asked for a while.
            self._connection.close()
            return self._ask(method, path, json.dumps(body) if body else None)

    def _ask(self, method: str, path: str, body: str | None) -> tuple[int, dict[str, Any], float]:
        began = time.perf_counter()
        self._connection.request(method, path, body, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        data = answer.read()
        return answer.status, json.loads(data), time.perf_counter() - began

    def turn(self, **body: Any) -> tuple[str, float]:
        """The id of a stored turn, and how long it took."""
        fields = {"model": "scripted", "input": "And tomorrow?", **body}
        status, response, took_s = self.ask("POST", "/v1/responses", **fields)
        if status != 200:
            raise SystemExit(f"bench: a turn was refused: {response}")
        return str(response["id"]), took_s


# --- the databases --------------------------------------------------------------------------------


@contextmanager
def running(folder: Path, options: dict[str, str]) -> Iterator[PostgresServer]:
    """A server on these files."""
    postgres = PostgresServer(folder, reachable(programs(), folder), options)
    if not (folder / "data").exists():
        postgres.make()
    postgres.start()
    try:
        yield postgres
    finally:
        postgres.stop(signal.SIGINT)


def fill(folder: Path, sizes: dict[str, int]) -> None:
    """Load the databases that are not there yet."""
    with running(folder, LOAD) as postgres, Progress() as progress:
        there = {row[0] for row in asyncio.run(postgres.ask("SELECT datname FROM pg_database"))}
        for name, turns in sizes.items():
            if name not in there:
                asyncio.run(postgres.ask(f"CREATE DATABASE {name}"))
                asyncio.run(load(postgres.url(name), turns, progress))


def print_sizes(postgres: PostgresServer, sizes: dict[str, int]) -> None:
    rows = []
    for name, turns in sizes.items():
        query = """SELECT pg_database_size(current_database()), pg_table_size('turns'), pg_indexes_size('turns'),
            pg_total_relation_size('usage'), (SELECT count(*) FROM conversations)"""
        (found,) = asyncio.run(postgres.ask(query, postgres.url(name)))
        each = [size / turns for size in found[:4]]
        rows.append((turns, found[4], found[0] / 1e9, *each))
    each_of = "bytes a turn, all {:.0f}|table {:.0f}|indexes {:.0f}|usage {:.0f}"
    print_table("turns {:,}|conversations {:,}|GB {:.2f}|" + each_of, rows)


# --- turns ----------------------------------------------------------------------------------------


def measure(postgres: PostgresServer, names: Sequence[str], samples: int) -> Times:
    """Seconds of each kind of request, by kind and database; the databases take turns."""
    times: Times = {}
    with ExitStack() as stack:
        asked: dict[str, Callable[[int], Iterator[tuple[str, float]]]] = {}
        for name in names:
            url = postgres.url(name)
            process = stack.enter_context(server(SCRIPT, "--store", url, *COLD, is_pinned=False))
            asked[name] = Asked(process.port, postgres, url, samples).round
        for number in range(-3, samples):
            for name in names if number % 2 else reversed(names):
                for kind, took_s in asked[name](number):
                    if number >= 0:
                        times.setdefault(kind, {}).setdefault(name, []).append(took_s)
    return times


class Asked:
    """A client of one server: each kind of request once a round."""

    def __init__(self, port: int, postgres: PostgresServer, url: str, samples: int) -> None:
        self._http, self._socket = Http(port), Client(port)
        self._last: str | None = None
        self._tips: dict[int, list[str]] = {}
        for depth in (10, 100):
            query = f"SELECT tip FROM chains WHERE depth = {depth} ORDER BY md5(tip) LIMIT {samples + 3}"
            self._tips[depth] = [row[0] for row in asyncio.run(postgres.ask(query, url))]
        query = f"SELECT id FROM conversations ORDER BY md5(id) LIMIT {samples + 3}"
        self._conversations = [row[0] for row in asyncio.run(postgres.ask(query, url))]

    def round(self, number: int) -> Iterator[tuple[str, float]]:
        yield "a turn, HTTP", self._http.turn()[1]
        began = time.perf_counter()
        self._socket.send(input="And tomorrow?", previous_response_id=self._last, store=True)
        self._last = json.loads(self._socket.receive()[-1])["response"]["id"]
        yield "a turn, socket", time.perf_counter() - began
        for depth, tips in self._tips.items():
            tip = tips[number % len(tips)]
            for what in ("first", "again"):
                yield (
                    f"cold continuation, {depth} turns, {what}",
                    self._http.turn(previous_response_id=tip)[1],
                )
            path = f"/v1/responses/{tip}/input_items?limit=20"
            if depth == 100:
                yield "list: input items, 100 turns", self._http.ask("GET", path)[2]
        name = self._conversations[number % len(self._conversations)]
        yield (
            "list: items of a conversation",
            self._http.ask("GET", f"/v1/conversations/{name}/items")[2],
        )


def print_times(times: Times, sizes: dict[str, int]) -> None:
    small, large = sizes
    rows = []
    for kind, by_name in times.items():
        one, other = ([1e3 * took for took in by_name[name]] for name in (small, large))
        middles = statistics.median(one), statistics.median(other)
        rows.append((kind, middles[0], p95(one), middles[1], p95(other), middles[1] / middles[0]))
    at, beyond = (f"{turns:,}" for turns in sizes.values())
    print_table(
        f"ms {{}}|{at}: median {{:.1f}}|p95 {{:.1f}}|{beyond}: median {{:.1f}}|p95 {{:.1f}}|ratio {{:.2f}}x",
        rows,
    )


def p95(numbers: Sequence[float]) -> float:
    return sorted(numbers)[int(0.95 * (len(numbers) - 1))]


# --- expiry ---------------------------------------------------------------------------------------


def expire(postgres: PostgresServer, name: str, span_s: float) -> tuple[object, ...]:
    """Rows a second of an expiry run, and the turns of a client without it and beside it."""
    url, deleted = (
        postgres.url(name),
        "SELECT n_tup_del FROM pg_stat_user_tables WHERE relname = 'turns'",
    )
    before = asyncio.run(postgres.ask(deleted, url))[0][0]
    with server(SCRIPT, "--store", url, "--retention-s", "0", is_pinned=False) as process:
        alone = turns_until(process.port, lambda began: time.perf_counter() - began > span_s / 3)
        is_over = threading.Event()
        took: list[float] = []

        def run() -> None:
            try:
                took.append(asyncio.run(sweep(url, span_s)))
            finally:
                is_over.set()

        sweeper = threading.Thread(target=run)
        sweeper.start()
        beside = turns_until(process.port, lambda _: is_over.is_set())
        sweeper.join()
        if not took:
            raise SystemExit("bench: the expiry run failed")
    gone = asyncio.run(postgres.ask(deleted, url))[0][0] - before
    both = [
        1e3 * one
        for turns in (alone, beside)
        for one in (statistics.median(turns), p99(turns), max(turns))
    ]
    return (name, gone, took[0], gone / took[0], *both)


def p99(numbers: Sequence[float]) -> float:
    return sorted(numbers)[int(0.99 * (len(numbers) - 1))]


async def sweep(url: str, span_s: float) -> float:
    """Delete a fifth of the turns as a server does, for this long at most; how long it took."""
    began = time.perf_counter()
    store = await PostgresStore.open(url)
    retention = Retention(turns_s=OLDEST_S - (OLDEST_S - NEWEST_S) // 5)
    is_more = True
    while is_more and time.perf_counter() - began < span_s:
        at = time.perf_counter()
        is_more = await store.maintenance.sweep(retention)
        await asyncio.sleep(max(PAUSE_S, time.perf_counter() - at))
    took_s = time.perf_counter() - began
    await store.close()
    return took_s


def turns_until(port: int, is_over: Callable[[float], bool]) -> list[float]:
    """Stored turns, one after the other."""
    http_, began, took = Http(port), time.perf_counter(), []
    while not is_over(began) or len(took) < 3:
        took.append(http_.turn()[1])
    return took


# --- crashes --------------------------------------------------------------------------------------


def crash_segue(postgres: PostgresServer, name: str) -> tuple[object, ...]:
    """Kill a server with running turns; seconds until the next one answers, and until all have ended: as failed, or
    as completed where they had not begun."""
    flags = ("--store", postgres.url(name))
    with server(SLOW, *flags, "--tps", "20", is_pinned=False) as process:
        client = Http(process.port)
        ids = [client.turn(background=True)[0] for _ in range(RUNNING)]
        os.kill(process.pid, signal.SIGKILL)
    killed = time.perf_counter()
    with server(SCRIPT, *flags, is_pinned=False) as process:
        client = Http(process.port)
        client.turn()
        answered_s = time.perf_counter() - killed
        while (
            ends := [client.ask("GET", f"/v1/responses/{one}")[1].get("status") for one in ids]
        ) and ({"queued", "in_progress"} & set(ends)):
            if time.perf_counter() - killed > RESTART_S_MAX:
                raise SystemExit(f"bench: turns of a dead process have not ended: {ends}")
            time.sleep(0.5)
        ended_s = time.perf_counter() - killed
        return name, answered_s, ended_s, ends.count("failed"), ends.count("completed")


def crash_postgres(postgres: PostgresServer, name: str, span_s: float = 5.0) -> tuple[object, ...]:
    """Kill PostgreSQL beside a client that stores turns; seconds until it takes connections, and until a turn is stored
    again; how many acknowledged turns there were, and how many of them are there."""
    kept: list[str] = []
    with server(SCRIPT, "--store", postgres.url(name), is_pinned=False) as process:
        client, until = Http(process.port), time.perf_counter() + span_s
        while time.perf_counter() < until:
            kept.append(client.turn()[0])
        assert postgres.process is not None
        postgres.process.kill()
        postgres.process.wait()
        killed = time.perf_counter()
        while True:
            # Its children end by themselves; before that a new one refuses to start.
            with suppress(AssertionError):
                postgres.start()
                break
            time.sleep(0.1)
        recovered_s = time.perf_counter() - killed
        while client.ask("POST", "/v1/responses", model="scripted", input="x")[0] != 200:
            if time.perf_counter() - killed > RESTART_S_MAX:
                raise SystemExit("bench: the server has not found PostgreSQL again")
            time.sleep(0.1)
        stored_s = time.perf_counter() - killed
        found = sum(client.ask("GET", f"/v1/responses/{one}")[0] == 200 for one in kept)
    return name, recovered_s, stored_s, len(kept), found


def main(arguments: Sequence[str] | None = None) -> int:
    """Load, measure, print. 1 if a turn or a cold continuation is more than 1.3 times slower."""
    parser = argparse.ArgumentParser(
        prog="python -m bench state",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--turns", type=int, default=100_000, help="turns of the large database (100000)"
    )
    parser.add_argument("--small", type=int, default=10_000, help="turns of the small one (10000)")
    parser.add_argument("--folder", type=Path, help="keep the data in this folder")
    parser.add_argument("--samples", type=int, default=60, help="requests of each kind (60)")
    parser.add_argument("--expire-s", type=float, default=60.0, help="longest expiry run (60)")
    options = parser.parse_args(arguments)
    sizes = {f"turns_{turns}": turns for turns in (options.small, options.turns)}
    with nullcontext(options.folder) if options.folder else temporary_folder() as name:
        folder = Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        if user := other_user():
            os.chown(folder, user["user"], user["group"])
        fill(folder, sizes)
        with running(folder, SERVE) as postgres:
            print_sizes(postgres, sizes)
            times = measure(postgres, list(sizes), options.samples)
            print_times(times, sizes)
            print("\nexpiry beside a client that stores turns")
            rows = [expire(postgres, name, options.expire_s) for name in sizes]
            print_table(
                "database {}|deleted {:,}|s {:.1f}|a second {:,.0f}|alone: median ms {:.1f}|p99 {:.1f}|most {:.1f}"
                "|beside: median ms {:.1f}|p99 {:.1f}|most {:.1f}", rows,
            )  # fmt: skip
            print(f"\nSegue is killed with {RUNNING} running turns: seconds until")
            rows = [crash_segue(postgres, name) for name in sizes]
            print_table(
                "database {}|a turn is answered {:.1f}|all have ended {:.1f}|failed {}|taken over {}",
                rows,
            )
            print("\nPostgreSQL is killed while turns are stored: seconds until")
            rows = [crash_postgres(postgres, name) for name in sizes]
            print_table(
                "database {}|it takes connections {:.1f}|a turn is stored {:.1f}|acknowledged {}|found {}",
                rows,
            )
    kinds = (
        "a turn, HTTP",
        "a turn, socket",
        "cold continuation, 10 turns, again",
        "cold continuation, 100 turns, again",
    )
    small, large = sizes
    worst = max(
        statistics.median(times[kind][large]) / statistics.median(times[kind][small])
        for kind in kinds
    )
    return int(worst > 1.3)
