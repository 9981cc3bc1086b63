"""Whose history goes when memory is short? That of whoever holds more than a fair share, the longest unused first.

In: the caches of all connections, each under the key that opened it. Every key may have a limit of its own, and all
together have one. Beyond a key's limit its own caches let go; beyond the limit of all, those of keys that hold more
than all divided by the number of keys. So nobody loses anything because somebody else is greedy. What was let go of is
answered with `previous_response_not_found`, never with less history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol


class Cache(Protocol):
    """A cache that can be made smaller."""

    @property
    def bytes(self) -> int:
        """What it holds."""

    def shed(self) -> bool:
        """Let go of the turn that was unused for longest; False if there is none."""


class Budget:
    """What the caches of this process may hold together."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._by_key: dict[str, int] = {}
        self._shares: dict[Cache, Share] = {}
        self._ticks = count()

    @property
    def bytes(self) -> int:
        """What they hold."""
        return self._bytes

    def bytes_of(self, key: str) -> int:
        """What the caches of this key hold."""
        return self._by_key.get(key, 0)

    def enter(self, cache: Cache, key: str, key_bytes_max: Callable[[], int]) -> Share:
        """Count this cache as this key's, whose limit may change; 0: the key has none of its own."""
        share = self._shares[cache] = Share(self, cache, key, key_bytes_max)
        share.used_at = next(self._ticks)
        return share

    def leave(self, share: Share) -> None:
        """The cache is gone."""
        if self._shares.pop(share.cache, None) is not None:
            self._count(share, 0)

    def settle(self, share: Share) -> None:
        """The cache was used, and has perhaps grown: let go of what is too much."""
        share.used_at = next(self._ticks)
        self._count(share, share.cache.bytes)
        self._trim(share.key, share.key_bytes_max())
        if self._bytes > self._bytes_max:
            self._shrink_fairly()

    def trim(self, key: str) -> None:
        """The limit of this key may be another one now."""
        share = next((one for one in self._shares.values() if one.key == key), None)
        if share is not None:
            self._trim(key, share.key_bytes_max())

    def _trim(self, key: str, most: int) -> None:
        if most and self._by_key.get(key, 0) > most:
            self._shrink(lambda: self._by_key.get(key, 0) - most, self._of(key))

    def _shrink_fairly(self) -> None:
        self._count_all()
        while self._bytes > self._bytes_max and self._by_key:
            part = self._bytes_max / len(self._by_key)
            greedy = [one for one in self._shares.values() if self._by_key.get(one.key, 0) > part]
            if not self._shrink(lambda: self._bytes - self._bytes_max, greedy, part):
                return

    def _shrink(
        self, excess: Callable[[], float], shares: Sequence[Share], part: float = 0.0
    ) -> bool:
        """Let go of what keys hold beyond this part, from the cache that was unused for longest on; False if there was
        nothing to let go of."""
        has_shed = False
        for share in sorted(shares, key=lambda one: one.used_at):
            while excess() > 0 and self._by_key.get(share.key, 0) > part and share.cache.shed():
                has_shed = True
                self._count(share, share.cache.bytes)
        return has_shed

    def _of(self, key: str) -> list[Share]:
        found = [share for share in self._shares.values() if share.key == key]
        for share in found:
            self._count(share, share.cache.bytes)
        return found

    def _count_all(self) -> None:
        # Caches that have shrunk by themselves have not said so.
        for share in self._shares.values():
            self._count(share, share.cache.bytes)

    def _count(self, share: Share, held: int) -> None:
        change, share.bytes = held - share.bytes, held
        self._bytes += change
        self._by_key[share.key] = self._by_key.get(share.key, 0) + change
        if not self._by_key[share.key]:
            del self._by_key[share.key]


class Share:
    """What one cache holds of the budget."""

    __slots__ = ("_budget", "bytes", "cache", "key", "key_bytes_max", "used_at")

    def __init__(
        self, budget: Budget, cache: Cache, key: str, key_bytes_max: Callable[[], int]
    ) -> None:
        self._budget = budget
        self.cache = cache
        self.key = key
        self.key_bytes_max = key_bytes_max
        self.bytes = 0
        self.used_at = 0

    def settle(self) -> None:
        """The cache was used."""
        self._budget.settle(self)

    def leave(self) -> None:
        """The cache is gone."""
        self._budget.leave(self)
