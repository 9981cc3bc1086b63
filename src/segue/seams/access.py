"""Who may come in, how much may they use, and what only this server can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from segue.errors import InvalidRequest
from segue.limits import Draw, Grant, Key, KeyLimits
from segue.seams.history import Owner


class RingKey(Struct, frozen=True):
    """A key that encrypts what clients keep for us and hashes API keys, with its name."""

    name: bytes
    secret: bytes


class Keys(Protocol):
    """Who may come in. Secrets never get here: keys are known by digests of them."""

    async def add(self, key: Key, digest: str) -> None:
        """Give out a key."""

    async def find(self, digests: Sequence[str]) -> Mapping[str, Key]:
        """The keys among these digests that are neither revoked nor expired, in one query."""

    async def expired(self, digests: Sequence[str]) -> int | None:
        """When the key with one of these digests has expired; None if there is no such key, or it was revoked."""

    async def given_out(self) -> Sequence[Key]:
        """Every key that was ever given out, the oldest first."""

    async def limit(self, key_id: str, limits: KeyLimits) -> bool:
        """Give it these limits; False if there is no such key, or it was taken back."""

    async def revoke(self, key_id: str) -> bool:
        """Take it back for good; False if there is no such key, or it was taken back before."""

    async def note_use(self, key_ids: Sequence[str]) -> None:
        """These keys were used just now."""


class SharedLimits(Protocol):
    """What all processes together use of the limits of keys, and of the slots of engine servers. Not durable; nothing
    counts twice."""

    async def draw(self, draw: Draw) -> Grant:
        """Take note of what this process has used and would hold; what it is given of these limits."""


class Room(Protocol):
    """Memory for what a request names and has not sent: files, URLs, a stored history."""

    async def take(self, size: int) -> None:
        """Set so much aside, before it is read: waits while others have it, and is refused after a while."""

    def give(self, size: int) -> None:
        """So much is not needed any more."""


class Quota(Protocol):
    """What a caller may still use."""

    async def hold(self) -> None:
        """Take a slot for a turn, or refuse it."""

    def release(self, turn_id: str = "", tokens: int = 0) -> None:
        """Give the slot back: this turn is over and has used this many tokens, which the ledger will have. Without an
        id no turn has run."""


class Seals(Protocol):
    """Encryption of data that clients keep for us: only this server can read or change it."""

    def seal(self, owner: Owner, body: bytes) -> str:
        """An opaque text that holds these bytes for this owner."""

    def open(self, owner: Owner, sealed: str) -> bytes | None:
        """The bytes; None if this is not ours, not this owner's, or under a key that is gone."""


def open_text(seals: Seals, owner: Owner, sealed: str, path: str) -> str | None:
    """A text that was sealed; None as `open` says. What was sealed as something else is refused."""
    body = seals.open(owner, sealed)
    try:
        return None if body is None else body.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(
            "The encrypted content could not be verified: it is not of this kind of item.",
            code="invalid_encrypted_content",
            param=path,
        ) from None
