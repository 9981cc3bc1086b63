"""Memory that was freed goes back to the system."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from segue.aio import in_background
from segue.memory import heap
from segue.memory.heap import FREED_BYTES_MIN, trim_heap

STATM = Path("/proc/self/statm")
BLOCK_BYTES = 64 * 1024


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not STATM.exists(), reason="/proc is needed")
def test_what_lies_free_between_blocks_in_use_goes_back() -> None:
    """In a process of its own: this one has free blocks enough of what other tests have left."""
    subprocess.run([sys.executable, __file__], check=True, timeout=60)


class Left:
    """Something that refers to itself."""

    itself: Left


async def test_what_refers_to_itself_is_freed_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a server with few turns the collector would come by itself after hours."""
    monkeypatch.setattr(heap, "COLLECT_S", 0.0)
    monkeypatch.setattr(heap, "LOOK_S", 0.001)
    gc.disable()
    try:
        left = Left()
        left.itself = left
        is_freed = asyncio.Event()
        weakref.finalize(left, is_freed.set)
        del left
        assert not is_freed.is_set()
        async with asyncio.timeout(10), in_background("memory_trim", heap.keep_trimmed):
            await is_freed.wait()
    finally:
        gc.enable()


async def check_trim() -> None:
    kept_bytes = await trim_heap(0)
    blocks = [bytes(BLOCK_BYTES) for _ in range(4 * FREED_BYTES_MIN // BLOCK_BYTES)]
    # Every eighth block stays: the free ones between them are no top of the heap, which shrinks by itself.
    kept = blocks[::8]
    most = resident_bytes()
    blocks.clear()
    kept_bytes = await trim_heap(kept_bytes)

    assert most - resident_bytes() > 2 * FREED_BYTES_MIN
    assert len(kept) == 4 * FREED_BYTES_MIN // BLOCK_BYTES // 8
    # Pages that are gone still count as free; those that came back go again.
    again = [bytes(BLOCK_BYTES) for _ in range(3 * FREED_BYTES_MIN // BLOCK_BYTES)]
    most = resident_bytes()
    again.clear()
    kept_bytes = await trim_heap(kept_bytes)
    assert most - resident_bytes() > 2 * FREED_BYTES_MIN
    # What was in use then, and is free now, goes too: the process has no more than after the last time.
    blocks = [bytes(BLOCK_BYTES) for _ in range(8 * FREED_BYTES_MIN // BLOCK_BYTES)]
    used = blocks[::2]
    blocks.clear()
    kept_bytes = await trim_heap(kept_bytes)
    most = resident_bytes()
    # The last ones stay, or the top of the heap shrinks by itself.
    del used[:-8]
    await trim_heap(kept_bytes)
    assert most - resident_bytes() > 2 * FREED_BYTES_MIN


if __name__ == "__main__":
    asyncio.run(check_trim())
