"""Long work in a thread gives way; an event loop never sleeps."""

from __future__ import annotations

import asyncio
import time

from segue.rests import SLICE_S, Rests


def work(times: int) -> tuple[float, float]:
    """Slices of work with rests between them: processor time, and time by the clock."""
    rests, began, began_cpu = Rests(), time.perf_counter(), time.thread_time()
    for _ in range(times):
        until = time.thread_time() + 2 * SLICE_S
        while time.thread_time() < until:
            pass
        rests.take()
    return time.thread_time() - began_cpu, time.perf_counter() - began


async def test_work_in_a_thread_rests_as_long_as_it_has_worked() -> None:
    cpu_s, wall_s = await asyncio.to_thread(work, 10)
    assert wall_s >= 1.8 * cpu_s


async def test_event_loop_does_not_sleep() -> None:
    rests, until = Rests(), time.thread_time() + 100 * SLICE_S
    while time.thread_time() < until:
        pass
    began = time.perf_counter()
    rests.take()
    assert time.perf_counter() - began < 50 * SLICE_S
