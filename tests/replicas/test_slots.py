"""Do several processes keep to the limit of a replica together, and does each get its part?"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from segue.cluster.local import LocalBus
from segue.cluster.peers import Peers
from segue.engines.fair_queue import FairQueue
from segue.engines.queued import QueuedEngine
from segue.engines.scripted import ScriptedEngine
from segue.limits import Draw, Grant, HeldPlaces, share_out
from segue.replicas import slots
from segue.replicas.slots import SharedSlots, SlotShare
from segue.seams.access import SharedLimits
from segue.server.storage import open_store
from segue.settings.values import Settings
from tests.contracts.engine import chatml
from tests.support import until


class CountingLimits:
    """The limits of one process, counted together with those of the others as a store does."""

    def __init__(self, held: dict[str, int], worker: str) -> None:
        self._held = held
        self._worker = worker

    async def draw(self, draw: Draw) -> Grant:
        others = sum(count for worker, count in self._held.items() if worker != self._worker)
        _, grant = share_out(draw, None, HeldPlaces(lanes=others), 0.0)
        self._held[self._worker] = grant.held.lanes
        return grant


@dataclass
class Process:
    queue: FairQueue
    share: SlotShare

    async def work(self, permits: asyncio.Semaphore) -> None:
        await self.queue.acquire("ada", "")
        await permits.acquire()
        self.queue.release()


@asynccontextmanager
async def processes(count: int, limit: int) -> AsyncIterator[tuple[list[Process], dict[str, int]]]:
    bus, held = LocalBus(), dict[str, int]()
    async with AsyncExitStack() as stack:
        found = []
        for number in range(count):
            peers = Peers(bus)
            shared = SharedSlots(peers, CountingLimits(held, str(number)))
            await stack.enter_async_context(peers.joined())
            stack.push_async_callback(shared.give_back)
            server = QueuedEngine("http://replica", ScriptedEngine(chatml()), limit)
            found.append(Process(server.queue, shared.share("m", server)))
        await asyncio.sleep(0)
        yield found, held


@pytest.mark.parametrize("limit", [1, 4])
async def test_a_process_with_many_jobs_leaves_one_that_comes_later_its_part(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "LOOK_S", 0.001)
    monkeypatch.setattr(slots, "SAY_S", 0.001)
    monkeypatch.setattr(slots, "SHORT_S", 0.1)
    async with processes(2, limit) as ((busy, other), held):
        permits, none = asyncio.Semaphore(0), asyncio.Semaphore(0)
        jobs = [asyncio.create_task(busy.work(permits)) for _ in range(40)]
        await until(lambda: busy.queue.running == limit)
        late = asyncio.create_task(other.work(none))
        await until(lambda: busy.queue.slots < limit)
        assert other.queue.running == 0
        for _ in range(limit):
            permits.release()
        # As soon as those end that run, and not when all have had their turn.
        await until(lambda: other.queue.running == 1)
        assert busy.queue.waiting >= 40 - 2 * limit
        assert sum(held.values()) <= limit
        for _ in range(40):
            permits.release()
        none.release()
        await asyncio.gather(late, *jobs)


async def test_what_is_not_needed_is_given_to_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots, "LOOK_S", 0.001)
    async with processes(2, 4) as ((first, second), held):
        await asyncio.gather(*(first.work(asyncio.Semaphore(1)) for _ in range(4)))
        assert first.share.held == 4
        permits = asyncio.Semaphore(0)
        jobs = [asyncio.create_task(second.work(permits)) for _ in range(4)]
        await until(lambda: second.queue.running == 4)
        assert (first.share.held, sum(held.values())) == (0, 4)
        for _ in jobs:
            permits.release()
        await asyncio.gather(*jobs)


HOLDS = """
import asyncio, sys
from segue.limits import Draw, HeldPlaces, KeyLimits
from segue.settings.values import Settings
from segue.server.storage import open_store

async def hold():
    async with open_store(Settings(store=sys.argv[1])) as store:
        draw = Draw("engine m http://replica", KeyLimits(lanes_max=4), held=HeldPlaces(lanes=3))
        print((await store.shared_limits.draw(draw)).held.lanes, flush=True)
        await asyncio.Event().wait()

asyncio.run(hold())
"""


async def hold(limits: SharedLimits, slots: int) -> int:
    return await SharedSlots(Peers(LocalBus()), limits).draw("m http://replica", slots, 4)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_slots_of_a_killed_process_come_back(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the times that are documented: tests/reliability/test_dead_slots.py."""
    url = f"sqlite:///{tmp_path / 's.db'}"
    if kind == "postgres":
        url = await request.getfixturevalue("postgres").make_database()
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLDS, url, stdout=-1)
    try:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"3\n"
        async with open_store(Settings(store=url)) as store:
            assert await hold(store.shared_limits, 4) == 1
            await store.maintenance.recover()
            assert await hold(store.shared_limits, 4) == 1
            child.kill()
            await child.wait()
            monkeypatch.setattr("segue.stores.postgres.LEASE_S", -1)
            await store.maintenance.recover()
            assert await hold(store.shared_limits, 4) == 4
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def test_store_that_has_forgotten_what_is_held_hears_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a restart of PostgreSQL, or when this process was taken for dead."""
    monkeypatch.setattr(slots, "KEEP_S", 0.001)
    async with processes(2, 4) as ((busy, other), held):
        permits = asyncio.Semaphore(0)
        jobs = [asyncio.create_task(busy.work(permits)) for _ in range(4)]
        await until(lambda: busy.queue.running == 4)
        held.clear()
        monkeypatch.setattr(slots, "REPEAT_S", 0.001)
        await until(lambda: held)
        late = asyncio.create_task(other.work(permits))
        await until(lambda: other.queue.waiting)
        assert (busy.queue.running, other.queue.running) == (4, 0)
        for _ in range(5):
            permits.release()
        await asyncio.gather(late, *jobs)
