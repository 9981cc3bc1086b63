"""How are values delivered that no request waits for? In batches, in the background, bounded, and drained at shutdown.

In: values, without waiting. Out: batches, to a function that returns whether it took them; if not, the batch is
retried. When the queue is full, new values are dropped and counted. At shutdown the rest is delivered, within a time
limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from itertools import islice
from typing import Generic, TypeVar

from segue.aio import in_background

T = TypeVar("T")

log = logging.getLogger(__name__)

# Minutes of a busy server; a value is a few hundred bytes.
WAITING_MAX = 10_000
BATCH_MAX = 500
# How long values are collected into a batch, and the pause before a retry.
GATHER_S = 0.5
RETRY_S = 5.0
# How long draining at shutdown may take.
DRAIN_S_MAX = 5.0

Take = Callable[[list[T]], Awaitable[bool]]


class Batches(Generic[T]):
    """A bounded queue with a task that delivers it in batches; a context manager that owns the task."""

    def __init__(self, what: str, take: Take[T]) -> None:
        self._what = what
        self._take = take
        self._waiting: deque[T] = deque()
        self._dropped = 0
        self._has_more = asyncio.Event()
        self._is_ending = asyncio.Event()
        self._stack = AsyncExitStack()

    def add(self, value: T) -> None:
        """Add a value without waiting; a full queue drops it."""
        if len(self._waiting) >= WAITING_MAX:
            if not self._dropped:
                log.warning("queue of %s is full (%d): dropping more", self._what, WAITING_MAX)
            self._dropped += 1
            return
        self._waiting.append(value)
        self._has_more.set()

    async def __aenter__(self) -> Batches[T]:
        delivery = in_background("delivery", self._work)
        self._task = await self._stack.enter_async_context(delivery)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._is_ending.set()
        self._has_more.set()
        await asyncio.wait([self._task], timeout=DRAIN_S_MAX)
        await self._stack.aclose()
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
            log.exception("%s: delivery of a batch failed", self._what)
            return True

    async def _pause(self, seconds: float) -> None:
        """Sleep; shutdown ends the sleep."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_ending.wait(), seconds)
