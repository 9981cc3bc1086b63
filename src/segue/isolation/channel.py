"""How does the keeper speak with the supervisor inside a sandbox? Frames as `supervisor.py` has them.

What comes from inside is not trusted: a frame that is too long, or of a kind that does not exist, closes the sandbox,
and one sandbox is not read faster than `ReadingPace` allows.
"""

from __future__ import annotations

import asyncio
import struct
import time
from typing import NamedTuple

HEADER = struct.Struct("<IcI")
FRAME_BYTES_MAX = 128 * 1024
RUN, SOURCE, NETWORK, CODE, TERMINATE, KILL = b"r", b"s", b"n", b"p", b"k", b"f"
READY, STDOUT, STDERR, DONE, EXITED, IDLE = b"+", b"o", b"e", b"d", b"x", b"i"
SAID = (READY, STDOUT, STDERR, DONE, EXITED, IDLE)
_code = struct.Struct("<i")
# What is read of one sandbox in a second, a frame counted as at least so much; and how much at once.
BYTES_S, FRAME_BYTES, BURST_BYTES = 16 * 1024 * 1024, 4 * 1024, 256 * 1024


class BadFrame(Exception):
    """The other side speaks another language: something inside has taken its place."""


class SandboxFrame(NamedTuple):
    """What the supervisor says: of which command, and what."""

    kind: bytes
    number: int
    body: bytes

    @property
    def exit_code(self) -> int:
        """How a command has ended."""
        if len(self.body) != _code.size:
            raise BadFrame("an exit without a code")
        return int(_code.unpack(self.body)[0])


class ReadingPace:
    """How fast one sandbox is read: what its keeper can bear of many. The supervisor is a little slower by itself."""

    def __init__(self) -> None:
        self._ahead = self._then = 0.0

    async def hold(self, size: int) -> None:
        """Wait as long as it takes after a frame of this size."""
        now = time.monotonic()
        since, self._then = now - self._then, now
        self._ahead = max(0.0, self._ahead - since * BYTES_S) + FRAME_BYTES + size
        if self._ahead > BURST_BYTES:
            await asyncio.sleep(self._ahead / BYTES_S)


def pack(kind: bytes, number: int, body: bytes = b"") -> bytes:
    """A frame for the supervisor."""
    return HEADER.pack(len(body), kind, number) + body


async def read_frame(reader: asyncio.StreamReader) -> SandboxFrame:
    """The next frame; `IncompleteReadError` or `OSError` where the sandbox has ended."""
    size, kind, number = HEADER.unpack(await reader.readexactly(HEADER.size))
    if size > FRAME_BYTES_MAX or kind not in SAID:
        raise BadFrame(f"a frame of kind {kind!r} with {size} bytes")
    return SandboxFrame(kind, number, await reader.readexactly(size))
