"""A real PgBouncer in front of the tests' PostgreSQL: `make test-pgbouncer` puts one under `.cache/pgbouncer`.

`SEGUE_TEST_PGBOUNCER` names the program; without it no test asks for one. It runs as the user of PostgreSQL.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tests.postgres import START_S, PostgresServer, other_user, temporary_folder

PROGRAM = os.environ.get("SEGUE_TEST_PGBOUNCER", "")
# A further kind of store for the suites that every store passes.
POOLED = ["pooled"] if PROGRAM else []
# Fewer than one process of ours asks for.
POOL_SIZE = 3


@dataclass(frozen=True)
class Pooler:
    """A pooler that takes connections."""

    folder: Path
    port: int = 6432

    def url(self, direct: str) -> str:
        """The address of this database behind the pooler."""
        start, _, _ = direct.partition("?")
        return f"{start}?host={quote(str(self.folder), safe='/')}&port={self.port}"


@contextmanager
def running_pgbouncer(server: PostgresServer, *settings: str) -> Iterator[Pooler]:
    """A pooler for this server for as long as this lasts; it pools transactions unless `settings` say otherwise."""
    with temporary_folder() as name:
        folder = Path(name)
        lines = [
            "[databases]", f"* = host={server.folder} user=segue",
            "[pgbouncer]", "pool_mode = transaction", "listen_port = 6432", f"unix_socket_dir = {folder}",
            "auth_type = any", f"default_pool_size = {POOL_SIZE}", "max_client_conn = 500", f"logfile = {folder}/log",
            *settings,
        ]  # fmt: skip
        (folder / "pgbouncer.ini").write_text("\n".join(lines) + "\n")
        program = reachable_program(folder)
        process = subprocess.Popen(
            [program, "-q", folder / "pgbouncer.ini"], cwd=folder, **other_user(),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_for(folder / ".s.PGSQL.6432", process)
            yield Pooler(folder)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(START_S)


def reachable_program(folder: Path) -> Path:
    """The program, or a copy of it and of its libraries where the other user may not go."""
    found = Path(PROGRAM).absolute()
    if found.is_symlink() or not (found.parent / "unpacked").is_dir():
        return found
    copied = folder / "program"
    shutil.copytree(found.parent, copied, symlinks=True)
    return copied / found.name


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while True:
        assert process.poll() is None, "PgBouncer ended"
        assert time.monotonic() < until, "PgBouncer did not start"
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                time.sleep(0.02)
            else:
                return
