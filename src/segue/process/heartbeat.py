"""When has a turn been silent for too long? Sends heartbeats, and ends a turn that has had no subscriber for too long.

Silence is a fault: some clients give up after minutes, some proxies after one (docs/hazards.md F1, F3).
"""

from __future__ import annotations

import asyncio

from segue.turn.running import Running
from segue.turn.values import Cancel

HEARTBEAT_S = 15.0
# A stored turn whose client was lost may go on this long.
UNHEARD_S_MAX = 1800.0


class Heartbeat:
    """The timer of one running turn."""

    __slots__ = ("_every_s", "_running", "_timer", "_unheard_since")

    def __init__(self, running: Running, every_s: float) -> None:
        self._running = running
        self._every_s = every_s
        self._unheard_since: float | None = None
        self._timer = asyncio.get_running_loop().call_later(every_s, self._beat)

    def stop(self) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due_at = self._running.published_at + self._every_s
        if due_at <= loop.time():
            # A subscriber that does not read needs no sign of life, and its buffer must not grow.
            if not self._running.is_stalled:
                self._running.publish([self._running.assembler.heartbeat()])
            due_at = loop.time() + self._every_s
        if self._running.has_subscribers:
            self._unheard_since = None
        elif self._unheard_since is None:
            self._unheard_since = loop.time()
        elif loop.time() - self._unheard_since > UNHEARD_S_MAX:
            self._running.notify(Cancel())
        self._timer = loop.call_at(due_at, self._beat)
