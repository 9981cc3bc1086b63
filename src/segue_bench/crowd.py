"""Who comes in numbers? A process of guests at one server, so that they cost whoever measures nothing.

    python -m segue_bench.crowd PORT KIND COUNT TPS

    idle       hold a connection open and say nothing
    stalled    ask for one answer after the other and never read a byte
    streams    ask for one answer after the other, and note how late each event is
    herd       have one stored turn each; when they are out, all come back at once and go on from it

It writes one line of JSON when all have come, and one for every line that it reads: `tell`, `count SECONDS` (streams),
`drop` and `back` (herd). It leaves when nobody is there to ask.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec
import uvloop

from segue_bench.guests import Told, gather
from segue_bench.server import NotServing

Kind = Literal["idle", "stalled", "streams", "herd"]


class Crowd:
    """A crowd in a process of its own."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        self.pid = child.pid

    def ask(self, words: str = "tell") -> Told:
        """Tell them something and wait for their answer."""
        assert self._child.stdin is not None
        self._child.stdin.write(words.encode() + b"\n")
        self._child.stdin.flush()
        return self.hear()

    def hear(self) -> Told:
        """The next thing that they say."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise NotServing("a crowd of clients ended too early; see above")
        return msgspec.json.decode(line, type=Told)


@contextmanager
def crowd(port: int, kind: Kind, count: int, tokens_per_s: float = 0.0) -> Iterator[Crowd]:
    """So many guests at this port; all have come."""
    command = [sys.executable, "-m", "segue_bench.crowd", str(port), kind, str(count)]
    child = subprocess.Popen(
        [*command, str(tokens_per_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        found = Crowd(child)
        found.hear()
        yield found
    finally:
        # They leave when nobody is there to ask; no wait of theirs may be longer than this one.
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


# --- in the process -------------------------------------------------------------------------------


async def attend(kind: str, port: int, count: int, tokens_per_s: float) -> None:
    """Come, do what is asked, leave when nobody asks any more."""
    party = gather(kind, port, count, tokens_per_s)
    await party.come()
    _say(party.tell())
    while words := await asyncio.to_thread(sys.stdin.readline):
        word, _, amount = words.strip().partition(" ")
        if word != "tell":
            await party.heed(word, float(amount or 0))
        _say(party.tell())
    # Threads and transports need no farewell.
    os._exit(0)


def _say(told: Told) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()


def main(arguments: list[str]) -> None:
    """Attend."""
    port, kind, count, tokens_per_s = arguments
    allow_files(int(count))
    uvloop.run(attend(kind, int(port), int(count), float(tokens_per_s)))


def allow_files(connections: int) -> None:
    """As many open files as this takes, where the operator lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + 64
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


if __name__ == "__main__":
    main(sys.argv[1:])
