"""The growth fuzzer itself: it finds what grows too fast and what holds the loop, and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.growth.client import Client
from tests.growth.measure import Bench, Cost, Finding, bench, judge, sizes_to


def spend(cpu_s: float) -> None:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass


def timed(work: Callable[[int], None]) -> Callable[[int], Cost]:
    def cost(size: int) -> Cost:
        began = time.thread_time()
        work(size)
        return Cost(size, time.thread_time() - began, 0.0)

    return cost


def walk(size: int) -> None:
    for _ in range(size * 400):
        pass


def pair_up(size: int) -> None:
    names = list(range(size))
    for name in range(size):
        _ = name + size in names


@pytest.mark.parametrize(("work", "size", "is_bad"), [(walk, 2_000, False), (pair_up, 4_000, True)])
def test_quadratic_function_is_found_and_a_linear_one_is_not(
    work: Callable[[int], None], size: int, is_bad: bool
) -> None:
    assert judge("work", timed(work), sizes_to(size, 3)).is_bad == is_bad


def test_what_takes_no_time_has_no_ratio() -> None:
    costs = [Cost(1, 0.0001, 0.0), Cost(2, 0.0009, 0.0), Cost(4, 0.009, 0.0)]
    assert not Finding("noise", costs).is_bad


@pytest.mark.parametrize(
    ("held_s", "steps", "is_thread", "is_bad"),
    [(0.060, 1, False, True), (0.004, 20, False, False), (0.004, 20, True, False)],
    ids=["one step", "many steps", "a thread"],
)
def test_hold_of_the_loop_is_seen(
    held_s: float, steps: int, *, is_thread: bool, is_bad: bool
) -> None:
    """One long step is a hold; as much work in short steps, or in a thread that gives way, is none."""
    with bench() as server:
        cost = server.cost(lambda client, size: lambda: held(server, held_s, steps, is_thread), 1)
        assert cost.cpu_s > held_s * steps * 0.9
        assert Finding("hold", [cost]).is_bad == is_bad


def held(server: Bench, held_s: float, steps: int, is_thread: bool) -> None:
    async def work() -> None:
        for _ in range(steps):
            if is_thread:
                await asyncio.to_thread(spend, held_s)
            else:
                spend(held_s)
                await asyncio.sleep(0.002)

    server.run(work())


def test_client_itself_counts_for_nothing() -> None:
    def case(client: Client, size: int) -> Callable[[], object]:
        return lambda: spend(0.1)

    with bench() as server:
        assert server.cost(case, 1).cpu_s < 0.02
