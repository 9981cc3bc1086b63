"""How is what clients keep for us encrypted? Authenticated encryption, bound to the owner, with a ring of seal keys.

In: bytes. Out: an opaque text, and back. The newest key encrypts, every key decrypts, so that what was sealed
survives restarts and rotation.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from segue.seams.access import RingKey
from segue.seams.history import Owner
from segue.wire.files import from_base64

VERSION = b"\x01"
KEY_BYTES = 32
NAME_BYTES = 4
NONCE_BYTES = 12


def new_key() -> RingKey:
    return RingKey(secrets.token_bytes(NAME_BYTES), secrets.token_bytes(KEY_BYTES))


class RingSeals:
    """Seals with a ring of keys, the newest first."""

    def __init__(self, keys: Sequence[RingKey]) -> None:
        self._newest = keys[0].name
        self._ciphers = {key.name: AESGCM(key.secret) for key in keys}

    def seal(self, owner: Owner, body: bytes) -> str:
        return base64.urlsafe_b64encode(self.seal_bytes(owner, body)).decode()

    def open(self, owner: Owner, sealed: str) -> bytes | None:
        try:
            data = from_base64(sealed.replace("-", "+").replace("_", "/"))
        except ValueError:
            return None
        return self.open_bytes(owner, data)

    def seal_bytes(self, owner: Owner, body: bytes) -> bytes:
        """The same for what this server keeps itself, without the letters."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = self._ciphers[self._newest].encrypt(nonce, body, _bound_to(owner))
        return VERSION + self._newest + nonce + sealed

    def open_bytes(self, owner: Owner, data: bytes) -> bytes | None:
        """The bytes; None if this is not ours, not this owner's, or under a key that is gone."""
        name_end = len(VERSION) + NAME_BYTES
        cipher = self._ciphers.get(data[len(VERSION) : name_end])
        if data[: len(VERSION)] != VERSION or cipher is None:
            return None
        nonce_end = name_end + NONCE_BYTES
        try:
            return cipher.decrypt(data[name_end:nonce_end], data[nonce_end:], _bound_to(owner))
        except (InvalidTag, ValueError):
            return None


def _bound_to(owner: Owner) -> bytes:
    return b"segue:" + owner.encode()
