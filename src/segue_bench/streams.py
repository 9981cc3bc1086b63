"""What does one client of a load do? A WebSocket with its lanes, and how late each event was.

Frames are cut by hand and nothing is decoded, so that one core can hear more than another can say. What is heard is
counted in one tally that all connections share.
"""

from __future__ import annotations

import asyncio
import socket
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

import msgspec

from segue_bench.line import frame

MODEL = "stream"
LATE_STEP_S = 0.0001
LATE_STEPS = 200_000
TEXT, CLOSE, PING = 0x81, 0x88, 0x89
CLOSE_KIND, PONG_KIND = 8, 10


@dataclass(slots=True)
class Tally:
    """What the client counts while it counts."""

    is_counting: bool = False
    is_over: bool = False
    tokens: int = 0
    answers: int = 0
    drops: int = 0
    late: array[int] | None = None


class Listener(Protocol):
    """What a client does with what its connection hears."""

    def hear(self, event: bytes, now: float) -> None:
        """One text message, undecoded."""

    def lost(self, code: int | None) -> None:
        """The connection is over, by a close frame with this code, or without one."""


class Connection(asyncio.Protocol):
    """One WebSocket; frames are cut by hand, nothing is decoded."""

    def __init__(self, port: int, listener: Listener) -> None:
        self._port = port
        self._listener = listener
        self._buffer = b""
        self._close_code: int | None = None
        self._transport: asyncio.Transport | None = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, *, receive_bytes: int = 0) -> None:
        """Connect and be let in; with a receive buffer of about this size, if one is named."""
        loop = asyncio.get_running_loop()
        line = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        line.setblocking(False)
        if receive_bytes:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            await loop.sock_connect(line, ("127.0.0.1", self._port))
        except OSError:
            line.close()
            raise
        await loop.create_connection(lambda: self, sock=line)
        await self._opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the upgrade."""
        # uvloop's transports are none of asyncio's, and do the same.
        self._transport = cast(asyncio.Transport, transport)
        self.write(
            (
                f"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nUpgrade: websocket\r\n"
                "Connection: Upgrade\r\nSec-WebSocket-Key: c2VndWUtYmVuY2gtbG9hZA==\r\n"
                "Sec-WebSocket-Version: 13\r\n\r\n"
            ).encode()
        )

    def write(self, data: bytes) -> None:
        """Send these bytes."""
        assert self._transport is not None
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Cut frames and pass them on."""
        buffer = self._buffer + data if self._buffer else data
        if not self._opened.done():
            head, mark, rest = buffer.partition(b"\r\n\r\n")
            self._buffer = buffer
            if not mark:
                return
            if b" 101 " not in head[:20]:
                self._opened.set_exception(Refused(head[:80].decode("latin-1")))
                return
            self._opened.set_result(None)
            buffer = rest
        self._buffer = self._cut(buffer, time.perf_counter())

    def _cut(self, buffer: bytes, now: float) -> bytes:
        at, end = 0, len(buffer)
        while end - at >= 2:
            size, start = buffer[at + 1], at + 2
            if size == 126:
                size, start = int.from_bytes(buffer[at + 2 : at + 4], "big"), at + 4
            elif size == 127:
                size, start = int.from_bytes(buffer[at + 2 : at + 10], "big"), at + 10
            if start + size > end:
                break
            if buffer[at] == TEXT:
                self._listener.hear(buffer[start : start + size], now)
            elif buffer[at] == PING:
                self.write(frame(buffer[start : start + size], PONG_KIND))
            elif buffer[at] == CLOSE:
                self._close_code = int.from_bytes(buffer[start : start + 2], "big") or None
                self.write(frame(buffer[start : start + 2], CLOSE_KIND))
            at = start + size
        return buffer[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        if not self._opened.done():
            self._opened.set_exception(exc or ConnectionError("closed before it was open"))
        else:
            self._listener.lost(self._close_code)

    def stop_reading(self) -> None:
        """Take nothing any more."""
        assert self._transport is not None
        self._transport.pause_reading()

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Be gone, as by a broken network."""
        if self._transport is not None:
            self._transport.abort()


class Refused(ConnectionError):
    """The server did not let us in."""


@dataclass(slots=True)
class Lane:
    """One stream: asks, listens, asks again."""

    request: bytes
    arrivals: list[float] = field(default_factory=list)


class Lanes:
    """The streams of one connection."""

    def __init__(self, port: int, lanes: int, tally: Tally, tokens_per_s: float) -> None:
        self._tally = tally
        self._tokens_per_s = tokens_per_s
        names = [b"lane-%d" % number for number in range(lanes)]
        self._lanes = {name: Lane(frame(request(name))) for name in names}
        self.connection = Connection(port, self)

    def start(self) -> list[Callable[[], None]]:
        """One call for each lane that makes it begin."""
        return [partial(self.connection.write, lane.request) for lane in self._lanes.values()]

    def hear(self, event: bytes, now: float) -> None:
        """Count what came."""
        place = event.rfind(b'"stream_id":"') + 13
        lane = self._lanes.get(event[place : event.find(b'"', place)])
        if event.startswith(b'{"type":"response.output_text.delta"'):
            if lane is not None:
                lane.arrivals.append(now)
            self._tally.tokens += self._tally.is_counting
        elif event.startswith((b'{"type":"response.completed"', b'{"type":"response.incomplete"')):
            if lane is not None:
                self._ended(lane)
        elif event.startswith((b'{"type":"error"', b'{"type":"response.failed"')):
            # A lane that was refused does not ask again: that would be another load.
            self._tally.drops += 1

    def _ended(self, lane: Lane) -> None:
        tally = self._tally
        if tally.is_counting:
            tally.answers += 1
            if tally.late is not None:
                note_late(tally.late, lane.arrivals, self._tokens_per_s)
        lane.arrivals = []
        if not tally.is_over:
            self.connection.write(lane.request)

    def lost(self, code: int | None) -> None:
        """A connection that goes before it is told to is a drop."""
        if not self._tally.is_over:
            self._tally.drops += len(self._lanes)


def request(lane: bytes) -> bytes:
    """What a lane asks for."""
    return msgspec.json.encode(
        {
            "type": "response.create",
            "model": MODEL,
            "input": "Tell me.",
            "store": False,
            "stream_id": lane.decode(),
        }
    )


def note_late(late: array[int], arrivals: list[float], tokens_per_s: float) -> None:
    """Count, by tenths of a millisecond, how late each event of an answer was."""
    step = 1 / tokens_per_s
    offsets = [at - number * step for number, at in enumerate(arrivals)]
    if not offsets:
        return
    anchor = min(offsets)
    for offset in offsets:
        late[min(LATE_STEPS - 1, int((offset - anchor) / LATE_STEP_S))] += 1


def late_ms(late: array[int], share: float) -> float:
    """The lateness that so many events do not exceed."""
    wanted, seen = sum(late) * share, 0
    for step, count in enumerate(late):
        seen += count
        if seen >= wanted:
            return round((step + 1) * LATE_STEP_S * 1e3, 1)
    return 0.0
