"""Which processes that share a SQLite file are alive?

In: the path of the file. Out: a lease for this process, and whether another one's still holds. A
lease is an empty file beside the database that its process keeps locked. The kernel lets go of the
lock when the process ends, however it ends, so a dead process is known at once, and one that is
merely slow or stopped is never taken for dead. SQLite's own files must lie on one machine as well.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Lease:
    """What this process holds while it lives."""

    database: Path
    worker: str
    descriptor: int

    @classmethod
    def take(cls, database: Path, worker: str) -> Self:
        """Make the file and lock it."""
        path = lease_path(database, worker)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cls(database, worker, descriptor)

    def end(self) -> None:
        """Say that this process no longer uses the database."""
        with suppress(OSError):
            lease_path(self.database, self.worker).unlink()
        os.close(self.descriptor)

    def is_alive(self, worker: str) -> bool:
        """Whether that process lives."""
        if worker == self.worker:
            return True
        try:
            descriptor = os.open(lease_path(self.database, worker), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # It lives, or somebody asks this very question at this moment and will act on the answer.
            return True
        finally:
            os.close(descriptor)
        return False

    def remove(self, worker: str) -> None:
        """Remove the file of a dead process, once nothing of it is left."""
        lease_path(self.database, worker).unlink(missing_ok=True)

    def others(self) -> set[str]:
        """Everybody who has left a file here, dead or alive."""
        prefix = lease_path(self.database, "").name
        return {
            path.name.removeprefix(prefix)
            for path in self.database.parent.iterdir()
            if path.name.startswith(prefix)
        } - {self.worker}


def lease_path(database: Path, worker: str) -> Path:
    """Where a worker's lease lies: beside the database, as its log does."""
    return database.with_name(f"{database.name}-lease-{worker}")
