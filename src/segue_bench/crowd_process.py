"""Where do many clients run? In a process of their own, so that they cost the measuring process nothing.

    python -m segue_bench.crowd_process PORT KIND COUNT TPS

    idle       hold a connection open and send nothing
    stalled    ask for one answer after the other and never read a byte
    streams    ask for one answer after the other, and note how late each event is
    herd       have one stored turn each; when disconnected, all reconnect at once and go on from it

It writes its counts as one line of JSON when all are connected, and again after every command that it reads: `report`,
`count SECONDS` (streams), `drop` and `back` (herd). It ends when its input does.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import uvloop

from segue_bench.clients import ClientKind, CrowdCounts, make_group
from segue_bench.server import ServerNotStarted


class CrowdProcess:
    """A group of clients in a process of its own."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    def command(self, command: str = "report") -> CrowdCounts:
        """Send a command and wait for the counts after it."""
        assert self._child.stdin is not None
        self._child.stdin.write(command.encode() + b"\n")
        self._child.stdin.flush()
        return self.read_counts()

    def read_counts(self) -> CrowdCounts:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise ServerNotStarted("a process of clients ended too early; its error is above")
        return msgspec.json.decode(line, type=CrowdCounts)


@contextmanager
def crowd(
    port: int, kind: ClientKind, count: int, tokens_per_s: float = 0.0
) -> Iterator[CrowdProcess]:
    """This many clients at this port, all connected."""
    module = [sys.executable, "-m", "segue_bench.crowd_process"]
    child = subprocess.Popen(
        [*module, str(port), kind, str(count), str(tokens_per_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        process = CrowdProcess(child)
        process.read_counts()
        yield process
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


# --- in the process -------------------------------------------------------------------------------


async def serve_commands(kind: str, port: int, count: int, tokens_per_s: float) -> None:
    """Connect, run each command, end with the input."""
    group = make_group(kind, port, count, tokens_per_s)
    await group.connect()
    _write(group.counts())
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, _, amount = line.strip().partition(" ")
        if command != "report":
            await group.run(command, float(amount or 0))
        _write(group.counts())
    # Nothing here needs to be closed in order.
    os._exit(0)


def _write(counts: CrowdCounts) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(counts) + b"\n")
    sys.stdout.buffer.flush()


def main(arguments: list[str]) -> None:
    port, kind, count, tokens_per_s = arguments
    allow_files(int(count))
    uvloop.run(serve_commands(kind, int(port), int(count), float(tokens_per_s)))


def allow_files(connections: int) -> None:
    """Raise the limit of open files as far as this needs and the operator allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + 64
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


if __name__ == "__main__":
    main(sys.argv[1:])
