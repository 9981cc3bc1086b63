"""Which connection caches shrink when memory is short? Those of API keys above an equal share, least used first.

In: the caches of all connections, each under the API key that opened it. Every key may have a limit of its own, and all
together have one. Above a key's limit its own caches shrink; above the limit of all, the caches of keys that hold more
than the limit divided by the number of keys. So no key loses anything because another one holds too much. A turn that
was dropped is answered with `previous_response_not_found`, never with less history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol


class ShrinkableCache(Protocol):
    """A cache that can be made smaller."""

    @property
    def bytes(self) -> int:
        """How much it holds."""

    def shed(self) -> bool:
        """Drop the least recently used turn; False if there is none."""


class Budget:
    """How much the caches of all connections of this process may hold together."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._by_key: dict[str, int] = {}
        self._shares: dict[ShrinkableCache, BudgetShare] = {}
        self._ticks = count()

    @property
    def bytes(self) -> int:
        """How much they hold."""
        return self._bytes

    def bytes_of(self, key: str) -> int:
        """How much the caches of this key hold."""
        return self._by_key.get(key, 0)

    def enter(
        self, cache: ShrinkableCache, key: str, key_bytes_max: Callable[[], int]
    ) -> BudgetShare:
        """Count this cache as this key's, whose limit may change; 0: the key has none of its own."""
        share = self._shares[cache] = BudgetShare(self, cache, key, key_bytes_max)
        share.used_at = next(self._ticks)
        return share

    def leave(self, share: BudgetShare) -> None:
        """Stop counting the cache."""
        if self._shares.pop(share.cache, None) is not None:
            self._count(share, 0)

    def settle(self, share: BudgetShare) -> None:
        """The cache was used and may have grown: shrink what is above its limit."""
        share.used_at = next(self._ticks)
        self._count(share, share.cache.bytes)
        self._trim(share.key, share.key_bytes_max())
        if self._bytes > self._bytes_max:
            self._shrink_fairly()

    def trim(self, key: str) -> None:
        """The limit of this key may have changed: shrink its caches to it."""
        share = next((share for share in self._shares.values() if share.key == key), None)
        if share is not None:
            self._trim(key, share.key_bytes_max())

    def _trim(self, key: str, bytes_max: int) -> None:
        if bytes_max and self._by_key.get(key, 0) > bytes_max:
            self._shrink(lambda: self._by_key.get(key, 0) - bytes_max, self._of(key))

    def _shrink_fairly(self) -> None:
        self._count_all()
        while self._bytes > self._bytes_max and self._by_key:
            equal = self._bytes_max / len(self._by_key)
            above = [share for share in self._shares.values() if self.bytes_of(share.key) > equal]
            if not self._shrink(lambda: self._bytes - self._bytes_max, above, equal):
                return

    def _shrink(
        self, excess: Callable[[], float], shares: Sequence[BudgetShare], floor: float = 0.0
    ) -> bool:
        """Drop what keys hold above this floor, from the least recently used cache on; False if there was nothing."""
        has_shed = False
        for share in sorted(shares, key=lambda share: share.used_at):
            while excess() > 0 and self.bytes_of(share.key) > floor and share.cache.shed():
                has_shed = True
                self._count(share, share.cache.bytes)
        return has_shed

    def _of(self, key: str) -> list[BudgetShare]:
        shares = [share for share in self._shares.values() if share.key == key]
        for share in shares:
            self._count(share, share.cache.bytes)
        return shares

    def _count_all(self) -> None:
        # Caches that have shrunk by themselves have not reported it.
        for share in self._shares.values():
            self._count(share, share.cache.bytes)

    def _count(self, share: BudgetShare, size: int) -> None:
        change, share.bytes = size - share.bytes, size
        self._bytes += change
        self._by_key[share.key] = self._by_key.get(share.key, 0) + change
        if not self._by_key[share.key]:
            del self._by_key[share.key]


class BudgetShare:
    """How much of the budget one cache holds."""

    __slots__ = ("_budget", "bytes", "cache", "key", "key_bytes_max", "used_at")

    def __init__(
        self, budget: Budget, cache: ShrinkableCache, key: str, key_bytes_max: Callable[[], int]
    ) -> None:
        self._budget = budget
        self.cache = cache
        self.key = key
        self.key_bytes_max = key_bytes_max
        self.bytes = 0
        self.used_at = 0

    def settle(self) -> None:
        self._budget.settle(self)

    def leave(self) -> None:
        self._budget.leave(self)
