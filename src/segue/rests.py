"""How does long work in a thread let others go first?

A thread that never waits has the interpreter for every other half millisecond, so that whatever runs beside it takes
twice as long, or more. So long work rests between its slices for as long as they took. To copy megabytes is such work
too: each page of the copy is asked of the system, a millisecond for two megabytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from io import BytesIO
from time import sleep, thread_time
from typing import TypeAlias

from msgspec import Raw

# Less is not worth a pause.
SLICE_S = 0.00025
# So much is copied at once.
PIECE = 64 * 1024

Copied: TypeAlias = bytes | bytearray | memoryview | Raw


class Rests:
    """The rests of one piece of work; the thread of an event loop takes none."""

    def __init__(self) -> None:
        self._is_beside = asyncio._get_running_loop() is None
        self._began_s = thread_time()

    def take(self) -> None:
        """Rest, if it is time; called between slices."""
        spent_s = thread_time() - self._began_s if self._is_beside else 0.0
        if spent_s > SLICE_S:
            sleep(spent_s)
            self._began_s = thread_time()


def copied(parts: Iterable[Copied]) -> bytes:
    """The bytes of these in a row."""
    copy, rests = BytesIO(), Rests()
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(view), PIECE):
            copy.write(view[at : at + PIECE])
            rests.take()
    return copy.getvalue()


def joined(slices: Iterable[str]) -> str:
    """The text of these slices."""
    text, rests = "", Rests()
    for part in slices:
        # It grows in place.
        text += part
        rests.take()
    return text
