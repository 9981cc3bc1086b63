"""Which requests are not turns yet? A stop waits for them, and refuses those that take too long.

A request that is being prepared has had no answer. When the process stops, each of them still gets one: preparing it
ends, and it is refused; or it is broken off where it waits, and refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from segue.errors import Unavailable


class Beginnings:
    """The requests of this process that are being prepared, each by a task of its own."""

    def __init__(self) -> None:
        # Each done when its request is a turn or refused.
        self._settled: dict[asyncio.Task[object], asyncio.Future[None]] = {}
        self._refused: set[asyncio.Task[object]] = set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count the request of the current task while inside."""
        task = asyncio.current_task()
        assert task is not None
        settled = self._settled[task] = asyncio.get_running_loop().create_future()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._refused:
                raise
            task.uncancel()
            raise shutting_down() from None
        finally:
            settled.set_result(None)
            self._refused.discard(task)
            del self._settled[task]

    @property
    def settled(self) -> list[asyncio.Future[None]]:
        """A future for each request, done when it is a turn or refused."""
        return list(self._settled.values())

    def refuse(self) -> None:
        """Break off all that wait."""
        for task in self._settled:
            if task not in self._refused:
                self._refused.add(task)
                task.cancel()


def shutting_down() -> Unavailable:
    return Unavailable("The server is shutting down. Please retry elsewhere or later.")
