"""Which turns were deleted while others ran that could bring them back?

A turn that ran at that time may hold the deleted one, or quote it, when it ends. The caches of a process share one
memory of it. A mark goes when all that ran then has ended, so that nothing is left of what was deleted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from time import perf_counter

from segue.seams.history import Owner

TurnKey = tuple[Owner, str]

# While a turn runs for hours, others may be deleted by the thousand; the oldest of these are its own.
MARKS_MAX = 10_000
# What is being prepared, or read from a store, is not known as running. It takes less.
KEPT_S_MIN = 600.0


class ErasedTurns:
    """The turns that were deleted lately, the first first."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._marks: OrderedDict[TurnKey, float] = OrderedDict()
        # When the turn was received that has run for longest; the present where none runs. The process says it.
        self.oldest_at: Callable[[], float] = clock

    def __contains__(self, key: object) -> bool:
        return key in self._marks

    def add(self, key: TurnKey) -> None:
        """This turn was deleted now."""
        now = self._clock()
        self._marks.setdefault(key, now)
        until = min(self.oldest_at(), now - KEPT_S_MIN)
        while self._marks and (
            len(self._marks) > MARKS_MAX or next(iter(self._marks.values())) < until
        ):
            self._marks.popitem(last=False)
