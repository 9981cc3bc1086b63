"""How does something leave that nobody waits for? In batches, in the background, bounded, and not lost at a stop.

In: values, one at a time and at once. Out: batches, to a function that says whether it could take them. What it could
not take is offered again. When too much waits, what comes is dropped and counted: the server goes on. At a stop the
rest is handed over, within a time limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

# Minutes of a busy server; a value is a few hundred bytes.
WAITING_MAX = 10_000
BATCH_MAX = 500
# How long values gather, and how long whoever could not take them is left alone.
GATHER_S = 0.5
RETRY_S = 5.0
# What a stop may take.
DRAIN_S_MAX = 5.0

Take = Callable[[list[T]], Awaitable[bool]]


class Batches(Generic[T]):
    """Values on their way out; a context that owns its task."""

    def __init__(self, what: str, take: Take[T]) -> None:
        self._what = what
        self._take = take
        self._waiting: deque[T] = deque()
        self._dropped = 0
        self._has_more = asyncio.Event()
        self._is_ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, value: T) -> None:
        """Hand it over; does not wait."""
        if len(self._waiting) >= WAITING_MAX:
            if not self._dropped:
                log.warning("too many %s wait: some are dropped", self._what)
            self._dropped += 1
            return
        self._waiting.append(value)
        self._has_more.set()

    async def __aenter__(self) -> Batches[T]:
        self._task = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._is_ending.set()
        self._has_more.set()
        await asyncio.wait([self._task], timeout=DRAIN_S_MAX)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._waiting or self._dropped:
            log.warning("%d %s were lost", len(self._waiting) + self._dropped, self._what)

    async def _work(self) -> None:
        while self._waiting or not self._is_ending.is_set():
            await self._has_more.wait()
            await self._pause(GATHER_S)
            batch = list(islice(self._waiting, BATCH_MAX))
            if batch and not await self._taken(batch):
                if self._is_ending.is_set():
                    return
                await self._pause(RETRY_S)
                continue
            for _ in batch:
                self._waiting.popleft()
            if not self._waiting and not self._is_ending.is_set():
                self._has_more.clear()

    async def _taken(self, batch: list[T]) -> bool:
        try:
            return await self._take(batch)
        except Exception:
            log.exception("%s could not be handed over", self._what)
            return True

    async def _pause(self, seconds: float) -> None:
        """A while, or until it is time to end."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_ending.wait(), seconds)
