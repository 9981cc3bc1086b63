"""A process that holds all slots of a replica is killed: do the others get the slots back, and how soon?"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from segue.stores.maintenance import BEAT_S
from segue.stores.postgres_database import LEASE_S
from segue_fleet.blocks import ReplicaShape
from segue_fleet.replica import Replica, serve
from segue_fleet.words import known_words, tokenizer_path
from tests.postgres import PostgresServer
from tests.support import ServedProcess, fetch, served_process, until, wire

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(180)]

MODEL = "counted"
SLOTS = 2
# A token a second: who asks for many holds a slot until killed.
SHAPE = ReplicaShape(kv_tokens=100_000, slots=64, prefill_tps=50_000, decode_tps=1, block_tokens=16)
# On a machine that has other things to do.
SLACK_S = 10.0


@pytest.fixture
async def replica() -> AsyncIterator[tuple[Replica, list[str]]]:
    """It, and the words of a command that serves it."""
    replica = Replica(SHAPE, model=MODEL, words=known_words().words)
    server = await serve(replica, 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    flags = ["--engine", "vllm", "--engine-url", url, "--model", MODEL]
    flags += ["--tokenizer", str(tokenizer_path()), "--engine-parallel", str(SLOTS)]
    yield replica, flags
    server.close()


async def ask(served: ServedProcess, tokens: int) -> int:
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": tokens, "store": False}
    return (await fetch(served, "POST", "/v1/responses", body)).status


async def holders(served: ServedProcess) -> list[int]:
    """The processes that run a response."""
    view: dict[str, Any] = (await fetch(served, "GET", "/dashboard/fleet")).json
    return [one["pid"] for one in view["processes"] if one["responses_running"]]


async def free_again_s(served: ServedProcess, limit_s: float) -> float:
    """How long it takes until both slots can be used; an error after this time."""
    began = time.monotonic()
    async with asyncio.timeout(limit_s + SLACK_S):
        statuses = await asyncio.gather(*(ask(served, 1) for _ in range(SLOTS)))
    assert statuses == [200] * SLOTS
    return time.monotonic() - began


async def test_slots_of_a_killed_worker_are_free_after_its_heartbeat(
    tmp_path: Path, replica: tuple[Replica, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    counted, flags = replica
    store = f"sqlite:///{tmp_path / 'shared.db'}"
    with served_process(*flags, "--workers", "2", "--store", store, cwd=tmp_path) as served:
        # One connection, and so one worker, has them all.
        async with wire(served) as socket:
            for number in range(SLOTS):
                lane = {"model": MODEL, "stream_id": f"lane{number}", "store": False}
                await socket.create(**lane, input="Hi", max_output_tokens=1_000)
            await until(lambda: len(counted.arrivals) == SLOTS)
            (victim,) = await holders(served)
            os.kill(victim, signal.SIGKILL)
        took = await free_again_s(served, BEAT_S)
    with capsys.disabled():
        print(f"\nSQLite, two workers: free after {took:.1f} s")


async def test_slots_of_a_killed_machine_are_free_after_its_lease(
    tmp_path: Path,
    replica: tuple[Replica, list[str]],
    postgres: PostgresServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    counted, flags = replica
    store = await postgres.make_database()
    words = [*flags, "--store", store, "--seal-keys", str(tmp_path / "seals")]
    with (
        served_process(*words, cwd=tmp_path) as victim,
        served_process(*words, cwd=tmp_path) as other,
    ):
        asking = [asyncio.create_task(ask(victim, 1_000)) for _ in range(SLOTS)]
        await until(lambda: len(counted.arrivals) == SLOTS)
        victim.process.kill()
        await asyncio.gather(*asking, return_exceptions=True)
        took = await free_again_s(other, LEASE_S + BEAT_S)
    with capsys.disabled():
        print(f"\nPostgreSQL, two servers: free after {took:.1f} s")
    await postgres.drop_database(store)
