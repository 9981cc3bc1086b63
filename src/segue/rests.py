"""How does long work in a thread let others go first?

A thread that never waits has the interpreter for every other half millisecond, so that whatever runs beside it takes
twice as long, or more. So long work rests between its slices for as long as they took.
"""

from __future__ import annotations

import asyncio
from time import sleep, thread_time

# Less is not worth a pause.
SLICE_S = 0.001


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
