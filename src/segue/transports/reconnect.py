"""Who comes back after a loss? What the connections remembered that were lost a moment ago."""

from __future__ import annotations

import asyncio
from collections import deque

from segue.transports.services import NearTurns
from segue.turn.values import Owner, Turn

# Caches of lost connections; beyond this the oldest goes.
LOST_MAX = 256


class LostCaches:
    """What connections remembered that were lost a moment ago, for whoever comes back (off by default).

    In memory only, and only for the same owner.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._caches: deque[tuple[Owner, NearTurns]] = deque()

    @property
    def bytes(self) -> int:
        """What is held."""
        return sum(cache.bytes for _, cache in self._caches)

    def keep(self, owner: Owner, cache: NearTurns) -> bool:
        """Keep a lost connection's cache for a moment; False if it is not worth it."""
        if self._keep_s <= 0 or not cache.bytes:
            return False
        if len(self._caches) >= LOST_MAX:
            self._drop(self._caches[0])
        kept = (owner, cache)
        self._caches.append(kept)
        asyncio.get_running_loop().call_later(self._keep_s, self._drop, kept)
        return True

    def find(self, owner: Owner, turn_id: str) -> Turn | None:
        """A turn that a lost connection of this owner remembered."""
        for whose, cache in self._caches:
            if whose == owner and (turn := cache.held(owner, turn_id)) is not None:
                return turn
        return None

    async def erase(self, owner: Owner, turn_id: str) -> None:
        """A turn was deleted."""
        for whose, cache in tuple(self._caches):
            if whose == owner:
                await cache.delete(owner, turn_id)

    def _drop(self, kept: tuple[Owner, NearTurns]) -> None:
        if kept in self._caches:
            self._caches.remove(kept)
            kept[1].leave()
