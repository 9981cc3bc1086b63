"""How is the secret of an API key remembered? Not at all: as a keyed hash, under the keys of the seal ring.

A secret has 256 random bits, so nobody finds it from its hash. The hash is keyed as well, so that whoever can write to
the store, but not read the ring, cannot put a key of his own there. Hashes under every key of the ring are
looked for, so that rotating the ring takes no API key back. docs/decisions/0012 says why.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from pathlib import Path

from segue.stores.seals import RingKey, new_key, open_ring, read_ring

PREFIX = "sk-segue-"
SECRET_BYTES = 32
# So that a digest of ours and a sealed text of ours never come from the same bits.
PURPOSE = b"segue api keys"


def new_secret() -> str:
    """A fresh secret, to be shown once."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


class KeyHashes:
    """Hashes secrets under a ring of keys, the newest one first."""

    def __init__(self, ring: Sequence[RingKey]) -> None:
        self._secrets = {key.name.hex(): hmac.digest(key.secret, PURPOSE, "sha256") for key in ring}

    @property
    def newest(self) -> str:
        """The name of the ring's key that new API keys are hashed with."""
        return next(iter(self._secrets))

    def knows(self, ring: str) -> bool:
        """Whether a key of this name is on the ring."""
        return ring in self._secrets

    def digests(self, secret: str) -> list[str]:
        """Every digest that this secret may be known by, the newest first."""
        return [
            hmac.digest(key, secret.encode(errors="replace"), "sha256").hex()
            for key in self._secrets.values()
        ]


def open_hashes(path: Path | None) -> KeyHashes:
    """Hashes under the ring in this file; without a file, under a ring that dies with the process."""
    if path is None:
        return KeyHashes([new_key()])
    open_ring(path)
    return KeyHashes(read_ring(path))
