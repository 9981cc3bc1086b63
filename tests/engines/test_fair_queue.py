"""Who gets the next slot, when many wait?"""

from __future__ import annotations

import asyncio

import pytest

from segue.engines import fair_queue
from segue.engines.fair_queue import FairQueue, QueueFull
from tests.engines.asking import WAIT_S
from tests.support import until


async def order_of(callers: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """In which order these owners and lanes get the one slot that there is."""
    queue = FairQueue(1)
    await queue.acquire("first", "")
    served: list[tuple[str, str]] = []

    async def run(owner: str, lane: str) -> None:
        await queue.acquire(owner, lane)
        served.append((owner, lane))
        queue.release()

    tasks = [asyncio.create_task(run(*caller)) for caller in callers]
    await asyncio.sleep(0)
    assert queue.waiting == len(callers)
    queue.release()
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*tasks)
    assert (queue.running, queue.waiting) == (0, 0)
    return served


async def test_owner_with_one_job_does_not_wait_for_anothers_hundred() -> None:
    served = await order_of([("ada", "")] * 100 + [("bob", "")])
    assert served.index(("bob", "")) == 1


async def test_places_go_round_between_lanes_within_an_owners_share() -> None:
    callers = [("ada", "x")] * 3 + [("ada", "y")] * 2 + [("bob", "z")] * 4
    assert await order_of(callers) == [
        ("ada", "x"),
        ("bob", "z"),
        ("ada", "y"),
        ("bob", "z"),
        ("ada", "x"),
        ("bob", "z"),
        ("ada", "y"),
        ("bob", "z"),
        ("ada", "x"),
    ]


async def test_higher_priority_goes_first_and_lower_ones_get_every_fifth_slot() -> None:
    queue, order = FairQueue(1), list[str]()

    async def work(name: str, priority: int) -> None:
        await queue.acquire("ada", "", priority)
        order.append(name)
        queue.release()

    await queue.acquire("ada", "")
    jobs = [asyncio.create_task(work("low", 0)) for _ in range(3)]
    jobs += [asyncio.create_task(work("high", 5)) for _ in range(8)]
    await until(lambda: queue.waiting == 11)
    queue.release()
    await asyncio.gather(*jobs)
    assert order == [*["high"] * 4, "low", *["high"] * 4, "low", "low"]
    assert (queue.running, queue.waiting) == (0, 0)


async def test_new_slots_go_to_jobs_that_wait() -> None:
    queue = FairQueue(1)
    await queue.acquire("ada", "")
    waiting = [asyncio.create_task(queue.acquire("ada", "")) for _ in range(3)]
    await asyncio.sleep(0)
    queue.resize(3)
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0)
    assert (queue.running, queue.waiting) == (3, 1)
    queue.release()
    await asyncio.wait(waiting)


async def test_queue_that_is_too_long_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "WAITING_MAX", 1)
    queue = FairQueue(1)
    await queue.acquire("ada", "")
    waiting = asyncio.create_task(queue.acquire("ada", ""))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="Too many requests wait for this model"):
        await queue.acquire("ada", "")
    queue.release()
    await waiting
