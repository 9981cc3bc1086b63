"""What is a store? Everything that one backend remembers, as one value with an attribute for each seam.

A backend is one class that implements `Store`: `MemoryStore`, `SqliteStore`, `PostgresStore`. `LayeredStore` puts a
process's cache in front of one and is a `Store` too. What each seam promises is in `seams/`.
"""

from __future__ import annotations

from typing import Protocol

from segue.seams.access import Keys, RingKey, SharedLimits
from segue.seams.files import FileRows
from segue.seams.skills import SkillRows
from segue.seams.store import (
    Conversations,
    EventLog,
    IdempotencyKeys,
    Ledger,
    Listing,
    Maintenance,
    Turns,
)


class StoredRing(Protocol):
    """The seal keys of a store that several machines share, kept in the store itself."""

    async def load(self) -> list[RingKey]:
        """The keys, the newest first; the first call makes one."""

    async def rotate(self) -> int:
        """Add a new key, which seals from now on; returns how many keys there are."""


class Store(Protocol):
    """One backend."""

    @property
    def turns(self) -> Turns: ...
    @property
    def listing(self) -> Listing: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def events(self) -> EventLog: ...
    @property
    def idempotency_keys(self) -> IdempotencyKeys: ...
    @property
    def conversations(self) -> Conversations: ...
    @property
    def keys(self) -> Keys: ...
    @property
    def files(self) -> FileRows: ...
    @property
    def skills(self) -> SkillRows: ...
    @property
    def shared_limits(self) -> SharedLimits: ...
    @property
    def maintenance(self) -> Maintenance: ...

    @property
    def ring(self) -> StoredRing | None:
        """The seal keys, where the store keeps them; None where they are in a file or in memory."""

    async def is_ready(self) -> bool:
        """Whether a write would be accepted now."""

    async def close(self) -> None:
        """Finish the writes that wait, then free what the store holds."""
