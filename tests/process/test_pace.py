from __future__ import annotations

import asyncio

from segue.process.pace import StartLimit


async def passes(limit: StartLimit, count: int) -> list[int]:
    """In which pass of the loop each of so many was let in."""
    number, found = 0, []

    async def enter() -> None:
        await limit.enter()
        found.append(number)

    tasks = [asyncio.create_task(enter()) for _ in range(count)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        number += 1
    return found


async def test_few_are_let_in_at_once() -> None:
    assert await passes(StartLimit(8), 8) == [0] * 8


async def test_of_many_a_few_are_let_in_at_each_pass_in_their_order() -> None:
    limit = StartLimit(4)
    entered: list[int] = []

    async def enter(number: int) -> None:
        await limit.enter()
        entered.append(number)

    tasks = [asyncio.create_task(enter(number)) for number in range(40)]
    while len(entered) < 40:
        before = len(entered)
        await asyncio.sleep(0)
        assert len(entered) - before <= 4
    await asyncio.gather(*tasks)
    assert entered == list(range(40))


async def test_whoever_leaves_takes_no_place() -> None:
    limit = StartLimit(1)
    first = asyncio.create_task(limit.enter())
    gone = [asyncio.create_task(limit.enter()) for _ in range(5)]
    last = asyncio.create_task(limit.enter())
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(first, last)
