"""Who writes the events of a turn to the log, for clients that follow it later?

Events are written in the background, in batches: at the end of an item and after a moment, never for each token. If the
log cannot be written, that is logged once, a client that follows later learns that events are missing, and the turn
itself goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from segue.seams.history import Owner
from segue.seams.store import EventLog
from segue.wire.events import Event

log = logging.getLogger(__name__)

# How long an event may wait to be written, and how much may wait.
FLUSH_S = 1.0
FLUSH_BYTES = 256 * 1024
BOUNDARIES = frozenset({"response.output_item.done", "response.done"})


class EventWriter:
    """Writes the events of one turn, in order."""

    def __init__(self, events: EventLog, owner: Owner, turn_id: str) -> None:
        self._log = events
        self._owner = owner
        self._turn_id = turn_id
        self._waiting: list[Event] = []
        self._waiting_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_broken = False

    def deliver(self, events: Sequence[Event]) -> None:
        """Take these events; they are written at the next boundary."""
        if self._is_broken or not events:
            return
        self._waiting += events
        self._waiting_bytes += sum(len(event.data) for event in events)
        is_boundary = any(event.type in BOUNDARIES for event in events)
        if is_boundary or self._waiting_bytes > FLUSH_BYTES:
            self._begin()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._begin)

    async def finish(self) -> None:
        """Everything is written when this returns."""
        self._begin()
        if self._task is not None:
            await self._task

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while self._waiting and not self._is_broken:
            batch, self._waiting, self._waiting_bytes = self._waiting, [], 0
            try:
                await self._log.append(self._owner, self._turn_id, batch)
            except Exception:
                log.exception(
                    "could not write the events of turn %s to the event log", self._turn_id
                )
                self._is_broken = True
