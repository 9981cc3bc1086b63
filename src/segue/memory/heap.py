"""How does freed memory go back to the system?

The C library keeps freed blocks for later: after a crowd has left, that may be most of what the process has. Large
blocks are mapped one by one here, so that they go back when they are freed; the rest goes back by a trim, after much
was freed. Elsewhere than with glibc nothing happens.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from functools import cache

from segue.memory.budget import resident_bytes

MIB = 1024 * 1024
# Options of mallopt. Set by hand, the first one stays: otherwise it rises to 32 MiB with the blocks that are freed.
MMAP_THRESHOLD, ARENA_MAX = -3, -8
MAPPED_BYTES_MIN = MIB
# Threads inflate, hash and write; each arena more is one more to fragment.
ARENAS = 2
# Python's own, but for full collections, which are ten times as seldom.
COLLECT_AT = (700, 10, 100)
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


def free_bytes() -> int:
    """What the C library has of freed blocks, whether their pages have gone back or not."""
    library = _glibc()
    return 0 if library is None else int(library.mallinfo2().fordblks)


async def trim_heap(kept_bytes: int) -> int:
    """Give memory back, if much is free and the process has that much more than after the last time. Returns what it
    has now. What is free alone says nothing: pages that have gone back count as free too."""
    library = _glibc()
    has_more = resident_bytes() - kept_bytes >= FREED_BYTES_MIN
    if library is not None and has_more and free_bytes() >= FREED_BYTES_MIN:
        await asyncio.to_thread(library.malloc_trim, 0)
        return resident_bytes()
    return min(kept_bytes, resident_bytes())


async def keep_trimmed() -> None:
    """Give memory back whenever much of it was freed."""
    kept_bytes = resident_bytes()
    while True:
        await asyncio.sleep(LOOK_S)
        kept_bytes = await trim_heap(kept_bytes)
