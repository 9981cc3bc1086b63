"""How many turns may begin at once? A few in each pass of the event loop, in the order in which they came.

Preparing and rendering take processor time that nobody else gets meanwhile. When thousands of clients come back in the
same moment, all of them would be worked on in one long pass, in which nothing streams and nobody hears that we are
well. Here those that are too many wait for the next pass. What already runs is not held up, and whoever is let in may
wait for a store or a network as long as it takes: nobody stands behind it.
"""

from __future__ import annotations

import asyncio
from collections import deque

# Some ten milliseconds of work.
BEGIN_MAX = 8


class StartLimit:
    """Lets a few in at a time."""

    def __init__(self, few: int = BEGIN_MAX) -> None:
        self._few = few
        self._left = few
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    async def enter(self) -> None:
        """Wait for one's turn; at once where few have come."""
        self._turn_soon()
        if self._left and not self._waiting:
            self._left -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        await place

    def _turn_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """The next pass: let as many in again."""
        self._is_due = False
        self._left = self._few
        while self._left and self._waiting:
            place = self._waiting.popleft()
            # Whoever has left meanwhile takes no place.
            if not place.done():
                place.set_result(None)
                self._left -= 1
        if self._waiting:
            self._turn_soon()
