"""A server that is killed at random moments while clients write, and a PostgreSQL that is killed under it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.crashes import HALVES, UNUSED_PARTS, Book, check, halves, writing
from tests.kills import LOAD_S, Victim, new_seed, until_whole
from tests.postgres import PostgresServer, running_postgres
from tests.support import WAIT_S, ServedProcess, fetch, served_process

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(3_600)]

KILLS = 300
POSTGRES_KILLS = 20
# Processor time from nothing to listening, interpreter and recovery included: what it takes on a machine that has
# nothing else to do. Others may be at work on this one.
START_S = 2.0


async def test_three_hundred_kills_lose_nothing_that_was_acknowledged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "turns.db"

    async def look() -> list[str]:
        return halves(path) if path.exists() else []

    words = ["--store", f"sqlite:///{path}", "--tps", "3000"]
    tally = await Victim(words, tmp_path, random.Random(new_seed()), look).run(KILLS)
    with capsys.disabled():
        print(f"\nSQLite: {tally}")
    assert sorted(tally.cpu_s)[len(tally.cpu_s) // 2] < START_S


def looking(server: PostgresServer, url: str) -> Callable[[], Awaitable[list[str]]]:
    """How to see what is half there in a PostgreSQL database."""
    queries = {**HALVES, "parts without a turn": UNUSED_PARTS.format(key="digest")}

    async def look() -> list[str]:
        return [
            f"{name}: {tuple(row)}"
            for name, query in queries.items()
            for row in await server.ask(query, url)
        ]

    return look


async def test_kills_on_postgresql_lose_nothing_that_was_acknowledged(
    tmp_path: Path, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = await postgres.make_database()
    words = ["--store", url, "--tps", "3000"]
    chance = random.Random(new_seed())
    victim = Victim(words, tmp_path, chance, looking(postgres, url), is_lease_long=True)
    # The tables are there before the first kill, so that they can be looked at.
    with served_process(*words, cwd=tmp_path) as served:
        assert served.stop() == 0
    tally = await victim.run(POSTGRES_KILLS)
    with capsys.disabled():
        print(f"\nPostgreSQL: {tally}")
    await postgres.drop_database(url)


def kill_postgres(server: PostgresServer) -> None:
    """All of its processes; the parent is held first, so that it neither makes more nor tidies up after those."""
    assert server.process is not None
    parent = server.process.pid
    server.process.send_signal(signal.SIGSTOP)
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], check=True, capture_output=True)
    pairs = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    server.process.kill()
    for pid, its_parent in pairs:
        if its_parent == parent:
            os.kill(pid, signal.SIGKILL)
    server.process.wait(WAIT_S)
    server.process = None


async def test_killed_postgresql_loses_nothing_that_was_acknowledged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Segue lives on, and goes on when its database has recovered. What failed meanwhile has said so."""
    chance = random.Random(new_seed())
    book = Book()
    with running_postgres() as server:
        url = await server.make_database()
        look = looking(server, url)
        words = ["--store", url, "--tps", "3000"]
        with served_process(*words, cwd=tmp_path) as served:
            for _ in range(POSTGRES_KILLS):
                before = len(book.facts)
                async with writing(served, book):
                    await asyncio.sleep(chance.uniform(*LOAD_S))
                    kill_postgres(server)
                    await start_again(server)
                    await ready(served)
                found = await check(served, book.facts, book.facts[before:])
                assert not found, found
                await until_whole(look)
            assert await check(served, book.facts) == []
            assert served.stop() == 0
    with capsys.disabled():
        print(f"\nPostgreSQL itself: {POSTGRES_KILLS} kills, {len(book.facts)} things acknowledged")


async def start_again(server: PostgresServer) -> None:
    """Start it on what is left. It refuses while the kernel still counts a dead one's memory as used."""
    until = time.monotonic() + WAIT_S
    while True:
        try:
            return await asyncio.to_thread(server.start)
        except AssertionError:
            assert time.monotonic() < until
            await asyncio.sleep(0.1)


async def ready(served: ServedProcess) -> None:
    """Wait until the store answers again."""
    async with asyncio.timeout(WAIT_S):
        while (await fetch(served, "GET", "/ready")).status != 200:
            pass
