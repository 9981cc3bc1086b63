"""At what pace do turns begin, and when has one been silent for too long?

A few turns begin in each pass of the event loop, in the order in which they came. Preparing and rendering take CPU
time that holds the loop: when thousands of clients come back in the same moment, they would all be prepared in one
long pass in which nothing streams and no health check is answered. Turns that run are not held up.

Silence is a fault: some clients give up after minutes, some proxies after one (docs/inside/hazards.md F1, F3). A turn
that has sent nothing for a while sends a heartbeat. A turn whose client was lost ends after a while, and one in the
background after its longest running time, however many follow or poll it; what it waits in the queue does not count.
"""

from __future__ import annotations

import asyncio
from collections import deque

from segue.errors import ServerFault
from segue.turn.notices import Abort, Cancel
from segue.turn.running import Running

HEARTBEAT_S = 15.0
# A stored turn whose client was lost may go on this long.
UNHEARD_S_MAX = 1800.0
# Turns in the background work for hours where tools do; an engine that never ends is to be noticed.
BACKGROUND_S_MAX = 21_600.0


# Turns that begin in one pass of the event loop: some ten milliseconds of work.
BEGIN_MAX = 8


class StartLimit:
    """Lets a few requests begin at a time."""

    def __init__(self, count_max: int = BEGIN_MAX) -> None:
        self._count_max = count_max
        self._left = count_max
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    async def enter(self) -> None:
        """Wait for the next pass; at once where few have come."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_pass)
        if self._left and not self._waiting:
            self._left -= 1
            return
        entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(entered)
        await entered

    def _next_pass(self) -> None:
        self._is_due = False
        self._left = self._count_max
        while self._left and self._waiting:
            entered = self._waiting.popleft()
            # A request that was cancelled meanwhile does not count.
            if not entered.done():
                entered.set_result(None)
                self._left -= 1
        if self._waiting:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_pass)


class Heartbeat:
    """The timer of one running turn."""

    __slots__ = ("_end_timer", "_every_s", "_running", "_timer", "_unheard_since")

    def __init__(self, running: Running, every_s: float) -> None:
        self._running = running
        self._every_s = every_s
        self._unheard_since: float | None = None
        self._timer = asyncio.get_running_loop().call_later(every_s, self._beat)
        self._end_timer: asyncio.TimerHandle | None = None

    def end_after(self, s_max: float) -> None:
        """End the turn as failed if it still runs then."""
        message = f"The response ran in the background for {s_max:g} s, which is the limit."
        notice = Abort(ServerFault(message, code="background_timeout"))
        notify = self._running.notify
        self._end_timer = asyncio.get_running_loop().call_later(s_max, notify, notice)

    def stop(self) -> None:
        self._timer.cancel()
        if self._end_timer is not None:
            self._end_timer.cancel()

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due_at = self._running.published_at + self._every_s
        if due_at <= loop.time():
            # A subscriber that does not read needs no sign of life, and its buffer must not grow.
            if not self._running.is_stalled:
                self._running.publish([self._running.assembler.heartbeat()])
            due_at = loop.time() + self._every_s
        if self._running.has_subscribers or self._running.is_background:
            self._unheard_since = None
        elif self._unheard_since is None:
            self._unheard_since = loop.time()
        elif loop.time() - self._unheard_since > UNHEARD_S_MAX:
            self._running.notify(Cancel())
        self._timer = loop.call_at(due_at, self._beat)
