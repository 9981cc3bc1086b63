"""Do several processes keep to the limit of a replica together, and does each get its part?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from segue.cluster import slots
from segue.cluster.local import LocalBus
from segue.cluster.peers import Peers
from segue.cluster.slots import ReplicaShare, SharedSlots
from segue.engines.routes import FairQueue
from segue.limits import Draw, Grant, HeldPlaces, share_out
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
    share: ReplicaShare

    async def work(self, permits: asyncio.Semaphore) -> None:
        await self.queue.enter("ada", "")
        await permits.acquire()
        self.queue.leave()


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
            queue = FairQueue(0)
            share = shared.share("m", "http://replica", queue)
            queue.on_wait = share.look
            share.fit(limit, is_open=True)
            found.append(Process(queue, share))
        await asyncio.sleep(0)
        yield found, held


@pytest.mark.parametrize("limit", [1, 4])
async def test_a_process_with_many_jobs_leaves_one_that_comes_later_its_part(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "LOOK_S", 0.001)
    monkeypatch.setattr(slots, "SAY_S", 0.001)
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
