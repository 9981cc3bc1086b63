"""What did the same bytes mean last time?

A client that resends its history sends most of it to the byte as before. What an API made of these bytes is remembered
here, so that it is made once. In memory, per owner, bounded in bytes; the longest unused goes first. Requests that are
large are read beside the event loop, so it may be used from several threads.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b
from threading import Lock
from typing import Generic, TypeVar

from msgspec import Raw

from segue.seams.history import Owner

V = TypeVar("V")
# As they came.
Sent = bytes
# Longer ones are known by their digest: a copy would hold other threads up, and be kept.
LONG_BYTES = 64 * 1024

# What an entry costs beside its key and its value.
MEMO_BYTES = 400
# What is longer is read each time: it would push out too much else.
MEMO_PART = 4


def key_of(kind: bytes, raw: Raw) -> Sent:
    """What these bytes are known by, among those of their kind."""
    return kind + (bytes(raw) if len(raw) <= LONG_BYTES else blake2b(raw).digest())


class Memo(Generic[V]):
    """What bytes of an owner became. `bytes_max` of 0 switches it off."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._values: OrderedDict[tuple[Owner, Sent], tuple[V, int]] = OrderedDict()
        self._bytes = 0
        self._owner_bytes: Counter[Owner] = Counter()
        self._lock = Lock()

    @property
    def bytes(self) -> int:
        """What it holds."""
        return self._bytes

    def bytes_of(self, owner: Owner) -> int:
        """What it holds of this owner."""
        return self._owner_bytes[owner]

    def find(self, owner: Owner, raw: Sent) -> V | None:
        """What these bytes became; None if that is not known."""
        return self.find_all(owner, (raw,))[0]

    def find_all(self, owner: Owner, raws: Iterable[Sent]) -> list[V | None]:
        """What each of these became."""
        values, found = self._values, list[V | None]()
        with self._lock:
            for raw in raws:
                key = (owner, raw)
                if (known := values.get(key)) is None:
                    found.append(None)
                else:
                    values.move_to_end(key)
                    found.append(known[0])
        return found

    def put(self, owner: Owner, raw: Sent, value: V, size: int) -> None:
        """Remember what these bytes became; `size`: what the value alone holds in memory."""
        size += len(raw) + MEMO_BYTES
        if size * MEMO_PART > self._bytes_max:
            return
        key = (owner, raw)
        with self._lock:
            if key in self._values:
                self._drop(key)
            self._values[key] = (value, size)
            self._count(owner, size)
            self._shrink(self._bytes - self._bytes_max)

    def trim(self, owner: Owner, bytes_max: int) -> None:
        """Let go of what this owner has beyond so much, the longest unused first."""
        with self._lock:
            if self._owner_bytes[owner] <= bytes_max:
                return
            for key in [key for key in self._values if key[0] == owner]:
                self._drop(key)
                if self._owner_bytes[owner] <= bytes_max:
                    return

    def shrink(self, size: int) -> None:
        """Let go of so many bytes, the longest unused first."""
        with self._lock:
            self._shrink(size)

    def _shrink(self, size: int) -> None:
        target = self._bytes - size
        while self._values and self._bytes > target:
            self._drop(next(iter(self._values)))

    def _drop(self, key: tuple[Owner, Sent]) -> None:
        self._count(key[0], -self._values.pop(key)[1])

    def _count(self, owner: Owner, change: int) -> None:
        self._bytes += change
        self._owner_bytes[owner] += change
        if not self._owner_bytes[owner]:
            del self._owner_bytes[owner]
