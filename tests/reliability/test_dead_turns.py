"""A server dies while another one on the same PostgreSQL is busy: its turns end within 30 seconds all the same."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import pytest

from tests.postgres import PostgresServer
from tests.support import MODEL, ServedProcess, fetch, served_process, until

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(300)]

# From the kill to the end of the last turn that was left, as the database has it.
ENDED_S = 30.0
# Clients of the survivor, each with one request after the other: more than it has connections to the database.
CLIENTS = 64
LEFT = 150
# The survivor writes its own turns, which are not in the background, once they have ended.
RUNNING = "SELECT count(*) FROM turns WHERE worker IS NOT NULL"


async def keep_busy(served: ServedProcess, is_over: asyncio.Event) -> int:
    count = 0
    while not is_over.is_set():
        body = {"model": MODEL, "input": "word " * 2_000, "max_output_tokens": 50}
        assert (await fetch(served, "POST", "/v1/responses", body)).status == 200
        count += 1
    return count


async def test_turns_of_a_dead_server_end_while_the_other_one_is_busy(
    tmp_path: Path, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = await postgres.make_database()
    words = ["--store", url, "--seal-keys", str(tmp_path / "seals")]
    with (
        served_process(*words, "--tps", "100000", cwd=tmp_path) as living,
        served_process(*words, "--tps", "1", cwd=tmp_path) as dying,
    ):
        begin = {"model": MODEL, "input": "Go on.", "background": True}
        left = [
            answer.json["id"]
            for answer in await asyncio.gather(
                *(fetch(dying, "POST", "/v1/responses", begin) for _ in range(LEFT))
            )
        ]
        async with asyncio.timeout(60):
            while {*await statuses(dying, left)} != {"in_progress"}:
                pass
        is_over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            busy = [group.create_task(keep_busy(living, is_over)) for _ in range(CLIENTS)]
            dying.process.kill()
            dying.process.wait(30)
            died_at = time.monotonic()
            try:
                await until(partial(all_ended, postgres, url))
            finally:
                is_over.set()
            ended_s = time.monotonic() - died_at
        assert {*await statuses(living, left)} == {"failed"}
        with capsys.disabled():
            served = sum(task.result() for task in busy)
            print(
                f"\n{LEFT} turns of a dead server ended after {ended_s:.1f} s; the other one served {served}"
            )
        assert ended_s < ENDED_S
    await postgres.drop_database(url)


async def all_ended(postgres: PostgresServer, url: str) -> bool:
    return (await postgres.ask(RUNNING, url))[0][0] == 0


async def statuses(served: ServedProcess, names: list[str]) -> list[str]:
    found = [await fetch(served, "GET", f"/v1/responses/{name}") for name in names]
    return [answer.json["status"] for answer in found]
