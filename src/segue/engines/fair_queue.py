"""Which of the jobs that wait for a server of an engine gets its next slot?

A `FairQueue` is fair between owners, and for each owner between its lanes, so that a hundred jobs of one owner do not
delay the one job of another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from segue.errors import Unavailable

# Jobs that wait for one server. At one job a second this is already minutes of waiting.
WAITING_MAX = 1024
# So many slots in a row go to jobs of the highest priority, then one to a job of a lower one.
PRIORITY_SLOTS = 4


class QueueFull(Unavailable):
    """More jobs wait for this server than make sense."""


class _Waiting:
    """Jobs of one priority that wait: they go round between owners, and for each owner between its lanes."""

    def __init__(self) -> None:
        # By owner, then by lane. The first owner, and its first lane, get the next slot.
        self.owners: dict[str, dict[str, deque[asyncio.Future[None]]]] = {}

    def add(self, owner: str, lane: str, slot: asyncio.Future[None]) -> None:
        self.owners.setdefault(owner, {}).setdefault(lane, deque()).append(slot)

    def next(self) -> asyncio.Future[None]:
        """The first job of the first lane of the first owner; lane and owner go to the end of their queues."""
        owner = next(iter(self.owners))
        lanes = self.owners.pop(owner)
        lane = next(iter(lanes))
        slots = lanes.pop(lane)
        slot = slots.popleft()
        if slots:
            lanes[lane] = slots
        if lanes:
            self.owners[owner] = lanes
        return slot


class FairQueue:
    """A limited number of slots, for jobs of a higher priority first; jobs of lower ones get every fifth slot."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.running = 0
        self.waiting = 0
        # Called with the slot that a job has to wait for.
        self.on_wait: Callable[[asyncio.Future[None]], None] = lambda slot: None
        # By priority.
        self._waiting: dict[int, _Waiting] = {}
        # How many slots in a row went to the highest priority while others waited, and how often another had its turn.
        self._in_a_row = 0
        self._turns_of_others = 0

    def resize(self, slots: int) -> None:
        """So many slots from now on; jobs that wait get those that are new."""
        self.slots = slots
        while self._waiting and self.running < self.slots:
            self.running += 1
            self.release()

    async def acquire(self, owner: str, lane: str, priority: int = 0) -> None:
        """Wait for a slot."""
        if self.running < self.slots:
            self.running += 1
            return
        if self.waiting >= WAITING_MAX:
            raise QueueFull("Too many requests wait for this model. Please retry later.")
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(priority, _Waiting()).add(owner, lane, slot)
        self.waiting += 1
        self.on_wait(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self.release()
            raise
        finally:
            self.waiting -= 1

    def release(self) -> None:
        """Give the slot to the next job, if one waits and there are not fewer slots now."""
        while self._waiting and self.running <= self.slots:
            slot = self._next()
            if not slot.done():
                slot.set_result(None)
                return
        self.running -= 1

    def _next(self) -> asyncio.Future[None]:
        highest, *others = sorted(self._waiting, reverse=True)
        chosen, self._in_a_row = highest, self._in_a_row + 1
        if not others:
            self._in_a_row = 0
        elif self._in_a_row > PRIORITY_SLOTS:
            chosen = others[self._turns_of_others % len(others)]
            self._in_a_row, self._turns_of_others = 0, self._turns_of_others + 1
        waiting = self._waiting[chosen]
        slot = waiting.next()
        if not waiting.owners:
            del self._waiting[chosen]
        return slot
