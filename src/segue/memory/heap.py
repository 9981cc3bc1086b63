"""How does freed memory go back to the system?

The C library keeps freed blocks for later: after a crowd has left, that may be most of what the process has. Large
blocks are mapped one by one here, so that they go back when they are freed; the rest goes back by a trim, after much
was freed. Elsewhere than with glibc nothing happens.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from functools import cache
from time import perf_counter

from segue.memory.budget import resident_bytes

MIB = 1024 * 1024
# Options of mallopt. Set by hand, the first one stays: otherwise it rises to 32 MiB with the blocks that are freed.
MMAP_THRESHOLD, ARENA_MAX = -3, -8
MAPPED_BYTES_MIN = MIB
# Threads inflate, hash and write; each arena more is one more to fragment.
ARENAS = 2
# A turn leaves some 150 objects that live on, and none that need the collector. To look at 2,000 takes up to a
# millisecond, in which everybody waits. Full collections are ten times as seldom as Python's own,
COLLECT_AT = (1_000, 0, 375)
# and in a small server also made by the clock: what failed connections leave would stay for hours where there are few
# turns. So many blocks more than at the start are looked at in some 20 ms.
COLLECT_S, COLLECTED_BLOCKS_MAX = 600.0, 500_000
LOOK_S = 5.0
# A trim holds other threads up, for about a millisecond for each 5 MiB.
FREED_BYTES_MIN = 16 * MIB


class HeapInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it can do what is needed here."""
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = HeapInfo
        library.malloc_trim.argtypes = [ctypes.c_size_t]
        library.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    except (AttributeError, OSError, TypeError):
        return None
    return library


def tune_heap() -> None:
    """Call it once, when everything is loaded: the garbage collector does not look at that again.

    A full collection stops the loop, for a quarter of a second with 2,000 connections. Connections and turns are freed
    without it, so it is made seldom.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AT)
    if (library := _glibc()) is not None:
        library.mallopt(MMAP_THRESHOLD, MAPPED_BYTES_MIN)
        library.mallopt(ARENA_MAX, ARENAS)


def unused_bytes(library: ctypes.CDLL) -> int:
    """What the process has besides the blocks of the C library that are in use. What is free alone says nothing: pages
    that have gone back count as free too."""
    info = library.mallinfo2()
    return resident_bytes() - int(info.uordblks) - int(info.hblkhd)


async def trim_heap(kept_bytes: int) -> int:
    """Give memory back, if that much more is unused than after the last time. Returns what is unused now."""
    library = _glibc()
    if library is None:
        return kept_bytes
    if unused_bytes(library) - kept_bytes >= FREED_BYTES_MIN:
        await asyncio.to_thread(library.malloc_trim, 0)
        return unused_bytes(library)
    return min(kept_bytes, unused_bytes(library))


async def keep_trimmed() -> None:
    """Give memory back whenever much of it was freed, and free now and then what refers to itself."""
    kept_bytes, collect_at = resident_bytes(), perf_counter() + COLLECT_S
    blocks_max = sys.getallocatedblocks() + COLLECTED_BLOCKS_MAX
    while True:
        if perf_counter() > collect_at and sys.getallocatedblocks() < blocks_max:
            gc.collect()
            collect_at = perf_counter() + COLLECT_S
        kept_bytes = await trim_heap(kept_bytes)
        await asyncio.sleep(LOOK_S)
