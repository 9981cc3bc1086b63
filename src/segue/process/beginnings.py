"""Which requests are not turns yet? A stop waits for them, and refuses those that take too long.

A request that is being prepared has had no answer. When the process stops, each of them still gets one: preparing it
ends, and it is refused; or it is broken off where it waits, and refused.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from segue.errors import Unavailable


class Beginnings:
    """The requests of this process that are being prepared."""

    def __init__(self) -> None:
        self._all: set[Beginning] = set()

    def enter(self) -> Beginning:
        """Count a request of the current task while inside."""
        return Beginning(self._all)

    @property
    def settled(self) -> list[asyncio.Future[None]]:
        """One for each request, done when it is a turn or refused."""
        return [beginning.is_settled for beginning in self._all]

    def refuse(self) -> None:
        """Break off all that wait."""
        for beginning in self._all:
            beginning.refuse()


class Beginning:
    """One request."""

    __slots__ = ("_all", "_is_refused", "_task", "is_settled")

    def __init__(self, all_: set[Beginning]) -> None:
        self._all = all_
        self._is_refused = False
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[object] = task
        self.is_settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> None:
        self._all.add(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._all.discard(self)
        self.is_settled.set_result(None)
        if self._is_refused and kind is asyncio.CancelledError:
            self._task.uncancel()
            raise shutting_down() from None

    def refuse(self) -> None:
        if not self._is_refused:
            self._is_refused = True
            self._task.cancel()


def shutting_down() -> Unavailable:
    return Unavailable("The server is shutting down. Please retry elsewhere or later.")
