"""Which tasks does this process run beside each other? A group whose members fail alone.

`asyncio.TaskGroup` ends all its tasks when one of them raises; a turn that fails must not end its neighbours. Every
task that is started here is kept until it is done, waited for or cancelled at the end, and an exception is logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """Tasks that run until they are done, or until they are cancelled together."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("a task failed", exc_info=fault)

    @property
    def running(self) -> tuple[asyncio.Task[Any], ...]:
        return tuple(self._tasks)

    async def wait(self, timeout_s: float) -> None:
        """Wait for those that run now, at most this long."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=timeout_s)

    async def cancel(self) -> None:
        """End those that run now."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
