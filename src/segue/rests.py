"""How does long work in a thread let others go first?

A thread that never waits has the interpreter for every other half millisecond, so that whatever runs beside it takes
twice as long, or more. So long work rests between its slices for as long as they took. To copy megabytes is such work
too: each page of the copy is asked of the system, a millisecond for two megabytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from io import BytesIO
from time import sleep, thread_time
from typing import TypeAlias, TypeVar

from msgspec import Raw

T = TypeVar("T")
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


def rested(values: Iterable[T]) -> Iterator[T]:
    """These, with rests between them."""
    rests = Rests()
    for value in values:
        yield value
        rests.take()


def copied(parts: Iterable[Copied]) -> bytes:
    """The bytes of these in a row."""
    copy = BytesIO()
    for part in parts:
        view = memoryview(part)
        for at in rested(range(0, len(view), PIECE)):
            copy.write(view[at : at + PIECE])
    return copy.getvalue()


def joined(slices: Iterable[str]) -> str:
    """The text of these slices."""
    text = ""
    for part in rested(slices):
        # It grows in place.
        text += part
    return text
