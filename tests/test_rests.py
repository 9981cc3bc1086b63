"""Long work in a thread gives way; an event loop never sleeps."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec import Raw

from segue.rests import PIECE, RESTS_MAX, SLICE_S, Rests, copied, joined


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


async def test_work_in_a_thread_rests_on_while_the_event_loop_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rests: list[float] = []

    def counted(rest_s: float) -> None:
        rests.append(rest_s)
        time.sleep(rest_s)

    monkeypatch.setattr("segue.rests.sleep", counted)
    worked = asyncio.create_task(asyncio.to_thread(work, 20))
    while not worked.done():
        until = time.thread_time() + 20 * SLICE_S
        while time.thread_time() < until:
            pass
        await asyncio.sleep(0)
    assert 20 < len(rests) <= 20 * RESTS_MAX


async def test_event_loop_does_not_sleep() -> None:
    rests, until = Rests(), time.thread_time() + 100 * SLICE_S
    while time.thread_time() < until:
        pass
    began = time.perf_counter()
    rests.take()
    assert time.perf_counter() - began < 50 * SLICE_S


SIZES = (0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE)


def test_long_bytes_are_copied_as_they_are() -> None:
    parts = [bytes(range(256)) * (size // 256) + bytes(size % 256) for size in SIZES]
    given = [parts[0], bytearray(parts[1]), memoryview(parts[2]), Raw(parts[3]), *parts[4:]]
    assert copied(given) == b"".join(parts)


def test_long_texts_are_joined_as_they_are() -> None:
    parts = [letter * size for letter, size in zip("aäa€😀a", SIZES, strict=True)]
    assert joined(parts) == "".join(parts)
