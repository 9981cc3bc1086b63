"""A real PostgreSQL for the tests: one server for a test run, a database of its own for each test.

The server comes from a wheel, listens on a socket in a temporary folder only, and is ended with the run. The folder is
in memory where there is room. PostgreSQL refuses to run as root; there it runs as `nobody`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg

from segue_fleet.postgres import other_user, reachable
from segue_fleet.programs import wheel_postgres

START_S = 60
# Tests care for what is committed, not for what survives a power cut; no test may wait for a disk.
OPTIONS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "60",
    "shared_buffers": "32MB",
    "max_wal_size": "128MB",
    "log_min_messages": "panic",
    "log_min_error_statement": "panic",
}


def programs() -> Path:
    """Where the wheel keeps the server's programs."""
    found = wheel_postgres()
    assert found is not None
    return found


@dataclass
class PostgresServer:
    """A server that can be stopped and started again, and makes databases."""

    folder: Path
    programs: Path
    options: dict[str, str] = field(default_factory=lambda: dict(OPTIONS))
    process: subprocess.Popen[bytes] | None = None
    numbers: Iterator[int] = field(default_factory=count)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://segue@/{database}?host={self.folder}"

    def make(self) -> None:
        """Make the files of the server."""
        asked = ["-D", str(self.folder / "data"), "-A", "trust", "-U", "segue", "-N", "-E", "UTF8"]
        program = str(self.programs / "bin" / "initdb")
        subprocess.run(
            [program, *asked, "--locale=C"], cwd=self.folder, check=True, timeout=START_S,
            stdout=subprocess.DEVNULL, **other_user(),
        )  # fmt: skip

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        options = [
            word for name, value in self.options.items() for word in ("-c", f"{name}={value}")
        ]
        self.process = subprocess.Popen(
            [self.programs / "bin" / "postgres", "-D", self.folder / "data", "-k", self.folder, *options],
            cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **other_user(),
        )  # fmt: skip
        until = time.monotonic() + START_S
        ready = [self.programs / "bin" / "pg_isready", "-q", "-h", self.folder]
        while subprocess.run(ready, check=False).returncode != 0:
            assert self.process.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server did not start"

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """End it; by default at once and with all its connections."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(START_S)
            self.process = None

    async def make_database(self) -> str:
        """A fresh, empty database; its address."""
        name = f"test{next(self.numbers)}"
        # By default its 7 MB would go through the log.
        await self.ask(f"CREATE DATABASE {name} STRATEGY FILE_COPY")
        return self.url(name)

    async def drop_database(self, url: str) -> None:
        """Remove one, even while it is used; a test run makes hundreds."""
        name = url.removeprefix("postgresql://segue@/").partition("?")[0]
        await self.ask(f"DROP DATABASE {name} WITH (FORCE)")

    async def ask(self, query: str, url: str | None = None) -> list[Any]:
        """Run something on a connection of its own."""
        connection = await asyncpg.connect(url or self.url(), timeout=START_S)
        try:
            return list(await connection.fetch(query))
        finally:
            await connection.close()


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A server for as long as this lasts."""
    with temporary_folder(in_memory=True) as name:
        folder = Path(name)
        server = PostgresServer(folder, reachable(programs(), folder))
        server.make()
        server.start()
        try:
            yield server
        finally:
            server.stop()


# A file system in memory, where making a database takes a sixth of the CPU; and what a server may come to need of it.
IN_MEMORY = "/dev/shm"
IN_MEMORY_BYTES_MIN = 1 << 30


def temporary_folder(*, in_memory: bool = False) -> tempfile.TemporaryDirectory[str]:
    """A folder of the other user, in a place where it may go: root's own temporary directory may be closed to it."""
    user = other_user()
    places = [tempfile.gettempdir(), "/tmp", "/var/tmp"]
    if (
        in_memory
        and os.path.isdir(IN_MEMORY)
        and shutil.disk_usage(IN_MEMORY).free >= IN_MEMORY_BYTES_MIN
    ):
        places.insert(0, IN_MEMORY)
    open_to_it = (
        place
        for place in places
        if subprocess.run(["test", "-w", place], check=False, **user).returncode == 0
    )
    folder = tempfile.TemporaryDirectory(
        prefix="segue-pg-", dir=next(open_to_it, None), ignore_cleanup_errors=True
    )
    if user:
        os.chown(folder.name, user["user"], user["group"])
    return folder


if __name__ == "__main__":
    with running_postgres() as one:
        print(one.url(), asyncio.run(one.ask("SELECT version()")))
