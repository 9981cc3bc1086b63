"""What did a connection remember that was lost a moment ago? Its cache, for the client that reconnects."""

from __future__ import annotations

import asyncio
from collections import deque

from segue.listener.services import NearTurns
from segue.seams.history import Owner, Turn

# Caches of lost connections; beyond this the oldest goes.
LOST_MAX = 256


class LostCaches:
    """The caches of lost connections, kept for a moment (off by default).

    In memory only, and only for the same owner.
    """

    def __init__(self, reconnect_s: float) -> None:
        self._reconnect_s = reconnect_s
        self._caches: deque[tuple[Owner, NearTurns]] = deque()

    @property
    def bytes(self) -> int:
        """What they hold."""
        return sum(cache.bytes for _, cache in self._caches)

    def add(self, owner: Owner, cache: NearTurns) -> bool:
        """Keep the cache of a lost connection; False if it is not kept: switched off, or empty."""
        if self._reconnect_s <= 0 or not cache.bytes:
            return False
        if len(self._caches) >= LOST_MAX:
            self._drop(self._caches[0])
        entry = (owner, cache)
        self._caches.append(entry)
        asyncio.get_running_loop().call_later(self._reconnect_s, self._drop, entry)
        return True

    def find(self, owner: Owner, turn_id: str) -> Turn | None:
        """A turn in the cache of a lost connection of this owner."""
        for cache_owner, cache in self._caches:
            if cache_owner == owner and (turn := cache.held(owner, turn_id)) is not None:
                return turn
        return None

    async def erase(self, owner: Owner, turn_id: str) -> None:
        """Forget a deleted turn."""
        for cache_owner, cache in tuple(self._caches):
            if cache_owner == owner:
                await cache.delete(owner, turn_id)

    def drop(self, owner: Owner) -> None:
        """Everything of the owner was erased."""
        for entry in tuple(self._caches):
            if entry[0] == owner:
                self._drop(entry)

    def _drop(self, entry: tuple[Owner, NearTurns]) -> None:
        if entry in self._caches:
            self._caches.remove(entry)
            entry[1].close()
