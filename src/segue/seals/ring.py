"""Where are the seal keys of a server without PostgreSQL?

In a file that only its owner may read. Several processes that start together read the same keys, and a key that was
used once survives a power cut. Several machines share a table of their database instead (stores/postgres.py); a server
with neither has a key of its own, and what it seals cannot be read after it has stopped.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from segue.errors import Misconfigured
from segue.seals.cipher import KEY_BYTES, new_key
from segue.seams.access import RingKey


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
