"""What does one client of a load do? A WebSocket with its lanes, and how late each event was.

Nothing is decoded, so that one core of clients can receive more than another core of the server can send. What arrives
is counted in one place that all connections share.
"""

from __future__ import annotations

import asyncio
import socket
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

import msgspec

from segue_bench.client import frame, local, next_frame, upgrade_request
from segue_bench.server import ScriptedModel, ServerOptions

MODEL = "stream"
# An answer lasts about this long, so that ends and beginnings are part of the load.
ANSWER_S = 1.0
ANSWER_TOKENS_MIN = 10
LATE_STEP_S = 0.0001
LATE_STEPS = 200_000
TEXT = 0x81
CLOSE = 0x88
PING = 0x89
CLOSE_OPCODE = 8
PONG_OPCODE = 10


def stream_server(tokens: float, tokens_per_s: float, flags: Sequence[str] = ()) -> ServerOptions:
    """A server whose one model writes this many tokens, at this speed, as often as it is asked."""
    turn = {"text": "Once", "pad_tokens": max(ANSWER_TOKENS_MIN, int(tokens))}
    script = msgspec.json.encode({"turns": [turn]})
    return ServerOptions([ScriptedModel(MODEL, script, tokens_per_s)], flags)


def create_frame(**fields: object) -> bytes:
    """A frame that asks for a turn."""
    event = {"type": "response.create", "model": MODEL, "input": "Tell me.", **fields}
    return frame(msgspec.json.encode(event))


@dataclass(slots=True)
class StreamCounts:
    """What all streams received while `is_counting` was set."""

    is_counting: bool = False
    is_over: bool = False
    tokens: int = 0
    answers: int = 0
    drops: int = 0
    late: array[int] | None = None


class EventListener(Protocol):
    """What a client does with the events of its connection."""

    def event(self, data: bytes, now: float) -> None:
        """One text message, undecoded."""

    def lost(self, code: int | None) -> None:
        """The connection has ended, by a close frame with this code, or without a close frame."""


class StreamConnection(asyncio.Protocol):
    """One WebSocket of many."""

    def __init__(self, port: int, listener: EventListener) -> None:
        self._port = port
        self._listener = listener
        self._buffer = b""
        self._close_code: int | None = None
        self._transport: asyncio.Transport | None = None
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self, *, receive_bytes: int = 0) -> None:
        """Connect and upgrade; with a receive buffer of about this size, if given."""
        loop = asyncio.get_running_loop()
        connecting = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connecting.setblocking(False)
        if receive_bytes:
            connecting.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            await loop.sock_connect(connecting, ("127.0.0.1", self._port))
        except OSError:
            connecting.close()
            raise
        await loop.create_connection(lambda: self, sock=connecting)
        await self._opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not inherit from asyncio's, and do the same.
        self._transport = cast(asyncio.Transport, transport)
        self.write(upgrade_request(local(self._port)))

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        if not self._opened.done():
            head, mark, rest = buffer.partition(b"\r\n\r\n")
            self._buffer = buffer
            if not mark:
                return
            if b" 101 " not in head[:20]:
                self._opened.set_exception(ServerRefused(head[:80].decode("latin-1")))
                return
            self._opened.set_result(None)
            buffer = rest
        self._buffer = self._cut(buffer, time.perf_counter())

    def _cut(self, buffer: bytes, now: float) -> bytes:
        """Pass whole frames on; return the rest."""
        at = 0
        while (found := next_frame(buffer, at)) is not None:
            first, start, at = found
            data = buffer[start:at]
            if first == TEXT:
                self._listener.event(data, now)
            elif first == PING:
                self.write(frame(data, PONG_OPCODE))
            elif first == CLOSE:
                self._close_code = int.from_bytes(data[:2], "big") or None
                self.write(frame(data[:2], CLOSE_OPCODE))
        return buffer[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._opened.done():
            self._opened.set_exception(exc or ConnectionError("closed before it was open"))
        else:
            self._listener.lost(self._close_code)

    def stop_reading(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End without a close frame, as a broken network does."""
        if self._transport is not None:
            self._transport.abort()


class ServerRefused(ConnectionError):
    """The server did not accept the WebSocket, or the turn."""


@dataclass(slots=True)
class _Lane:
    """One stream: asks, receives, asks again."""

    request: bytes
    arrivals: list[float] = field(default_factory=list)


class StreamLanes:
    """The streams of one connection."""

    def __init__(self, port: int, lanes: int, counts: StreamCounts, tokens_per_s: float) -> None:
        self._counts = counts
        self._tokens_per_s = tokens_per_s
        names = [f"lane-{number}" for number in range(lanes)]
        self._lanes = {
            name.encode(): _Lane(create_frame(store=False, stream_id=name)) for name in names
        }
        self.connection = StreamConnection(port, self)

    def starts(self) -> list[Callable[[], None]]:
        """For each lane the call that starts it."""
        return [partial(self.connection.write, lane.request) for lane in self._lanes.values()]

    def event(self, data: bytes, now: float) -> None:
        place = data.rfind(b'"stream_id":"') + 13
        lane = self._lanes.get(data[place : data.find(b'"', place)])
        if data.startswith(b'{"type":"response.output_text.delta"'):
            if lane is not None:
                lane.arrivals.append(now)
            self._counts.tokens += self._counts.is_counting
        elif data.startswith((b'{"type":"response.completed"', b'{"type":"response.incomplete"')):
            if lane is not None:
                self._ended(lane)
        elif data.startswith((b'{"type":"error"', b'{"type":"response.failed"')):
            # A lane that was refused does not ask again: that would be another load.
            self._counts.drops += 1

    def _ended(self, lane: _Lane) -> None:
        counts = self._counts
        if counts.is_counting:
            counts.answers += 1
            if counts.late is not None:
                note_late(counts.late, lane.arrivals, self._tokens_per_s)
        lane.arrivals = []
        if not counts.is_over:
            self.connection.write(lane.request)

    def lost(self, code: int | None) -> None:
        """A connection that ends before the run does is a drop."""
        if not self._counts.is_over:
            self._counts.drops += len(self._lanes)


def note_late(late: array[int], arrivals: list[float], tokens_per_s: float) -> None:
    """Count, by tenths of a millisecond, how late each event of an answer was."""
    step = 1 / tokens_per_s
    offsets = [at - number * step for number, at in enumerate(arrivals)]
    if not offsets:
        return
    anchor = min(offsets)
    for offset in offsets:
        late[min(LATE_STEPS - 1, int((offset - anchor) / LATE_STEP_S))] += 1


def late_ms(late: array[int] | None, share: float) -> float | None:
    """The delay that this share of the events does not exceed; None where none were counted."""
    wanted = sum(late or ()) * share
    seen = 0
    if not wanted:
        return None
    assert late is not None
    for step, count in enumerate(late):
        seen += count
        if seen >= wanted:
            return round((step + 1) * LATE_STEP_S * 1e3, 1)
    return None
