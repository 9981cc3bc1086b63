"""How does long work in a thread let others go first?

A thread that never waits has the interpreter for every other half millisecond, so that whatever runs beside it takes
twice as long, or more. So long work rests between its slices for as long as they took, and goes on resting while the
event loop works, for a while: what the loop has to do for others is over in a millisecond as a rule, and is then not
interrupted. To copy megabytes is such work too: each page of the copy is asked of the system, a millisecond for two
megabytes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator
from io import BytesIO
from time import sleep, thread_time
from typing import TypeAlias, TypeVar

from msgspec import Raw

T = TypeVar("T")
# Less is not worth a pause.
SLICE_S = 0.00025
# A turn that was interrupted is over after so many rests; beside a loop that always works, the next slice begins then.
RESTS_MAX = 4
# A loop that worked for less during a rest has nothing to do.
IDLE_PART = 0.2
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
            _rest(spent_s)
            self._began_s = thread_time()


def _rest(rest_s: float) -> None:
    """Rest until the main thread, which has the event loop, has done nothing for this long."""
    for _ in range(RESTS_MAX):
        worked_s = _worked_s()
        sleep(rest_s)
        if _worked_s() - worked_s < rest_s * IDLE_PART:
            return


def _worked_s() -> float:
    """Processor time of the main thread; of all where the system does not say (macOS)."""
    main = threading.main_thread().ident
    if main is None or not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time()
    return time.clock_gettime(time.pthread_getcpuclockid(main))


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
