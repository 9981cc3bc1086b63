"""How is an API key issued, and how is its secret stored? Not at all: only its hash is, keyed with a seal key, and how
it starts.

A secret has 256 random bits, so it cannot be found from its hash. The hash is keyed as well, so that an intruder who
can write to the store, but not read the seal keys, cannot add an API key. Hashes with every seal key are looked up, so
that rotating the seal keys revokes no API key. docs/decisions/0012 says why.
"""

from __future__ import annotations

import base64
import hmac
import secrets
import time
from collections.abc import Sequence

from segue.accounts.scopes import API_SCOPES
from segue.ids import new_id
from segue.limits import Key, KeyLimits
from segue.seams.access import Keys, RingKey
from segue.seams.history import Owner

PREFIX = "sk-segue-"
SECRET_BYTES = 32
# What of a secret is kept to recognize it: four characters, 24 of its 256 bits.
SHOWN_CHARS = len(PREFIX) + 4
# So that a digest, a salt and a sealed text never come from the same bits.
PURPOSE = b"segue api keys"
SALT_PURPOSE = b"segue cache salts"


def new_secret() -> str:
    """A new secret, to be shown once."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


class KeyHashes:
    """Hashes secrets with all seal keys, the newest first."""

    def __init__(self, ring: Sequence[RingKey]) -> None:
        self._secrets = {key.name.hex(): hmac.digest(key.secret, PURPOSE, "sha256") for key in ring}
        self._salt_key = hmac.digest(ring[0].secret, SALT_PURPOSE, "sha256")

    @property
    def newest(self) -> str:
        """The name of the seal key that new API keys are hashed with."""
        return next(iter(self._secrets))

    def knows(self, ring: str) -> bool:
        """Whether there is a seal key of this name."""
        return ring in self._secrets

    def digests(self, secret: str) -> list[str]:
        """Every digest that this secret may be stored under, the newest first."""
        body = secret.encode(errors="replace")
        return [hmac.digest(key, body, "sha256").hex() for key in self._secrets.values()]

    def salt(self, owner: str) -> str:
        """What stands for this owner elsewhere: the same in every process and after a restart, never guessed."""
        digest = hmac.digest(self._salt_key, owner.encode(), "sha256")
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


async def issue_key(
    keys: Keys,
    hashes: KeyHashes,
    name: str,
    owner: Owner,
    scopes: Sequence[str] = API_SCOPES,
    limits: KeyLimits | None = None,
    *,
    expires_at: int | None = None,
) -> tuple[Key, str]:
    """A new API key in this store, and its secret, which is not kept anywhere."""
    secret = new_secret()
    key = Key(
        new_id("key"),
        name,
        owner,
        tuple(scopes),
        limits or KeyLimits(),
        hashes.newest,
        created_at=int(time.time()),
        secret_start=secret[:SHOWN_CHARS],
        expires_at=expires_at,
    )
    await keys.add(key, hashes.digests(secret)[0])
    return key, secret
