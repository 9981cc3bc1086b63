"""How is what clients keep for us encrypted? Authenticated encryption, bound to the owner, with a ring of seal keys.

In: bytes. Out: an opaque text, and back. The newest key encrypts, every key decrypts, so that what was sealed
survives restarts and rotation. The ring is a file that only its owner may read, or a table of the database that several
machines share; a server with neither has a key of its own, and what it seals cannot be read after it has stopped.
"""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from segue.errors import Misconfigured
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


def open_ring(path: Path) -> list[RingKey]:
    """The seal keys in this file, the newest first; a missing file is created with one new key."""
    if not path.exists():
        _create(path)
    keys = read_ring(path)
    # Even if another process has created it: it may not have synced the folder yet.
    sync_folder(path)
    return keys


def rotate_ring(path: Path) -> int:
    """Add a new key, which seals from now on; the older ones still decrypt. Returns how many there are."""
    keys = [new_key(), *(read_ring(path) if path.exists() else [])]
    beside = path.with_name(path.name + ".new")
    write_ring(beside, keys)
    os.replace(beside, path)
    sync_folder(path)
    return len(keys)


def read_ring(path: Path) -> list[RingKey]:
    """The keys in this file, the newest first."""
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=list[RingKey])
    except OSError as error:
        raise Misconfigured(f"seal_keys: {path} cannot be read: {error.strerror}.") from None
    except msgspec.MsgspecError:
        keys = []
    if not keys or any(len(key.secret) != KEY_BYTES for key in keys):
        raise Misconfigured(
            f"seal_keys: {path} is not a file of seal keys. Restore it from a backup, or name another file."
        )
    return keys


def _create(path: Path) -> None:
    """Written under another name and then linked, so that of several processes one wins and all read the same."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    write_ring(beside, [new_key()])
    try:
        os.link(beside, path)
    except FileExistsError:
        pass
    except OSError as error:
        raise Misconfigured(f"seal_keys: {path} cannot be created: {error.strerror}.") from None
    finally:
        beside.unlink()


def write_ring(path: Path, keys: Sequence[RingKey]) -> None:
    """A file of seal keys, the newest first, which only its owner may read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(list(keys)))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise Misconfigured(f"seal_keys: {path} cannot be written: {error.strerror}.") from None


def sync_folder(path: Path) -> None:
    """A file survives a power cut once it is synced, its name once the folder is. Some file systems cannot sync one."""
    with suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
