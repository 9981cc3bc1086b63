"""Which processes that share a SQLite file are alive?

In: the path of the file. Out: a lease for this process, and whether the lease of another process is
still held. A lease is a file beside the database that its process keeps locked; in it stands what that
process knows, nothing before 0.3.0. The kernel frees the lock when the process ends, however it ends,
so a dead process is known at once, and one that is only slow or stopped is never taken for dead.
SQLite's own files must be on one machine too.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from segue.stores.sql_files import Abilities

# How often a lease is checked that would keep a process from starting, and the pause after each.
CHECKS = 5
CHECK_S = 0.01

# What a process without a word knows: less than any database needs that this version has opened.
UNKNOWN = Abilities(0, 0)


@dataclass(frozen=True, slots=True)
class Lease:
    """What this process holds while it is alive."""

    database: Path
    worker: str
    descriptor: int

    @classmethod
    def acquire(cls, database: Path, worker: str, abilities: Abilities) -> Self:
        # It gets its name when it is locked and whole: no process sees half a lease.
        path = database.with_name(f"{database.name}-taking-{worker}")
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, msgspec.json.encode(abilities))
        os.replace(path, lease_path(database, worker))
        return cls(database, worker, descriptor)

    def release(self) -> None:
        """This process no longer uses the database."""
        with suppress(OSError):
            lease_path(self.database, self.worker).unlink()
        os.close(self.descriptor)

    def is_alive(self, worker: str) -> bool:
        """Whether that process is alive."""
        return worker == self.worker or _is_locked(lease_path(self.database, worker))

    def remove(self, worker: str) -> None:
        """Remove the lease of a dead process, once its turns have ended."""
        lease_path(self.database, worker).unlink(missing_ok=True)

    def older(self, needed: Abilities) -> list[str]:
        """The versions of living processes that know less than this."""
        paths = [lease_path(self.database, worker) for worker in self.others()]
        less = [
            (path, known.version)
            for path in paths
            if not (known := _known(path)).are_enough(needed)
        ]
        return [version for path, version in less if _stays_locked(path)]

    def others(self) -> set[str]:
        """Every other process with a lease here, dead or alive."""
        prefix = lease_path(self.database, "").name
        return {path.name.removeprefix(prefix) for path in _leases(self.database)} - {self.worker}


def has_live_lease(database: Path) -> bool:
    """Whether any process that is alive uses the database."""
    return any(map(_is_locked, _leases(database)))


def _leases(database: Path) -> list[Path]:
    prefix = lease_path(database, "").name
    return [path for path in database.parent.iterdir() if path.name.startswith(prefix)]


def _known(path: Path) -> Abilities:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Abilities)
    except (OSError, msgspec.MsgspecError):
        return UNKNOWN


def _stays_locked(path: Path) -> bool:
    """Whether its process is alive: who only checks the lease lets go of it at once."""
    for _ in range(CHECKS):
        if not _is_locked(path):
            return False
        time.sleep(CHECK_S)
    return True


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # It is alive, or another process checks it at this moment and will act on the result.
        return True
    finally:
        os.close(descriptor)
    return False


def lease_path(database: Path, worker: str) -> Path:
    """The file of a worker's lease: beside the database, like its log."""
    return database.with_name(f"{database.name}-lease-{worker}")
