"""Which turns ended recently in this process, and what did they add up to?

In: every turn that ended and every refused request, watched or not. Out: the last turns in a ring buffer, totals for
the process and for each owner, and how often each error code was returned. Everything here is bounded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import takewhile

from segue.process.afterwards import EndedTurn
from segue.seams.history import Owner
from segue_dashboard.views import RefusalCount, Totals

# A few minutes of a busy agent, under a megabyte; what a page shows of the past is less.
RING_MAX = 1_000
# Codes are our own and few, but transports pass them on as text.
REFUSALS_MAX = 64
# As many as there may be keys with a page of their own; the first ones stay.
OWNERS_MAX = 10_000


class RecentTurns:
    """The recent past of a process."""

    def __init__(self) -> None:
        # The number of turns that ended; a reader uses it as its position.
        self.count = 0
        self.totals = Totals()
        # When the last turn ended, by the clock of the process.
        self.ended_at = float("-inf")
        self.started_ms = time.time() * 1000
        # Wall clock in milliseconds at the zero of the clock of the process.
        self.wall_ms = self.started_ms - time.perf_counter() * 1000
        self._ring: deque[tuple[int, EndedTurn]] = deque(maxlen=RING_MAX)
        self._owners: dict[Owner, Totals] = {}
        self._refusals: dict[tuple[str, str], RefusalCount] = {}

    def observe(self, turn: EndedTurn) -> None:
        """Add a turn that ended."""
        self.count += 1
        self._ring.append((self.count, turn))
        entry = turn.entry
        tally = turn.tally
        counted = [self.totals]
        if entry.owner in self._owners or len(self._owners) < OWNERS_MAX:
            counted.append(self._owners.setdefault(entry.owner, Totals()))
        for totals in counted:
            totals.turns += 1
            totals.failed += entry.status == "failed"
            totals.tokenized += tally.tokens_tokenized
            totals.reused += tally.tokens_reused
            totals.input += entry.input_tokens
            totals.output += entry.output_tokens
            totals.bytes += tally.bytes_received
        self.ended_at = time.perf_counter()

    def note_refusal(self, transport: str, code: str, request_id: str) -> None:
        """Count a request that was refused before it became a turn."""
        now_ms = round(self.wall_ms + time.perf_counter() * 1000)
        row = self._refusals.get((transport, code))
        if row is not None:
            row.count += 1
            row.at_ms = now_ms
        elif len(self._refusals) < REFUSALS_MAX:
            self._refusals[transport, code] = RefusalCount(transport, code, 1, now_ms)

    @property
    def refusals(self) -> Sequence[RefusalCount]:
        return list(self._refusals.values())

    def totals_of(self, owner: Owner) -> Totals:
        return self._owners.get(owner, Totals())

    def after(self, number: int, owner: Owner) -> list[tuple[int, EndedTurn]]:
        """The turns of this owner after this position, the newest first."""
        newer = takewhile(lambda row: row[0] > number, reversed(self._ring))
        return [row for row in newer if row[1].entry.owner == owner]
