"""What does one client of a load do? A WebSocket with its lanes, and how late each event was.

Frames are cut by hand and nothing is decoded, so that one core can hear more than another can say. What is heard is
counted in one tally that all connections share.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import msgspec

from segue.bench.line import frame

MODEL = "stream"
LATE_STEP_S = 0.0001
LATE_STEPS = 200_000
TEXT, PING, PONG_KIND = 0x81, 0x89, 10


@dataclass(slots=True)
class Tally:
    """What the client counts while it counts."""

    is_counting: bool = False
    is_over: bool = False
    tokens: int = 0
    answers: int = 0
    drops: int = 0
    late: array[int] | None = None


class Lane:
    """One stream: asks, listens, asks again."""

    __slots__ = ("arrivals", "name", "request")

    def __init__(self, name: bytes, request: bytes) -> None:
        self.name = name
        self.request = request
        self.arrivals: list[float] = []


class Connection(asyncio.Protocol):
    """One WebSocket with its lanes; frames are cut by hand, nothing is decoded."""

    def __init__(self, port: int, lanes: int, tally: Tally, tokens_per_s: float) -> None:
        self._port = port
        self._tally = tally
        self._tokens_per_s = tokens_per_s
        self._lanes: dict[bytes, Lane] = {}
        for number in range(lanes):
            name = b"lane-%d" % number
            self._lanes[name] = Lane(name, frame(request(name)))
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the upgrade."""
        # uvloop's transports are none of asyncio's, and do the same.
        self._transport = cast(asyncio.Transport, transport)
        self._write(
            (
                f"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nUpgrade: websocket\r\n"
                "Connection: Upgrade\r\nSec-WebSocket-Key: c2VndWUtYmVuY2gtbG9hZA==\r\n"
                "Sec-WebSocket-Version: 13\r\n\r\n"
            ).encode()
        )

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def start(self) -> list[Callable[[], None]]:
        """One call for each lane that makes it begin."""
        return [partial(self._write, lane.request) for lane in self._lanes.values()]

    def data_received(self, data: bytes) -> None:
        """Cut frames and count them."""
        buffer = self._buffer + data if self._buffer else data
        if not self.opened.done():
            head, mark, rest = buffer.partition(b"\r\n\r\n")
            self._buffer = buffer
            if not mark:
                return
            if b" 101 " not in head[:20]:
                self.opened.set_exception(ConnectionError(head[:80].decode("latin-1")))
                return
            self.opened.set_result(None)
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
                self._hear(buffer[start : start + size], now)
            elif buffer[at] == PING:
                self._write(frame(buffer[start : start + size], PONG_KIND))
            at = start + size
        return buffer[at:]

    def _hear(self, event: bytes, now: float) -> None:
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
            self._write(lane.request)

    def connection_lost(self, exc: Exception | None) -> None:
        """A connection that goes before it is told to is a drop."""
        if not self._tally.is_over:
            self._tally.drops += len(self._lanes)
        if not self.opened.done():
            self.opened.set_exception(exc or ConnectionError("closed before it was open"))

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()


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
