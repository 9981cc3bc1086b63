"""How do all answers of one engine server come over one connection?

In: what is asked, with somebody who hears each answer. Out: calls of theirs, in the callback of the connection, so that
no task wakes for a token. A connection that breaks, or speaks otherwise than it should, ends all of its answers; it is
not mended but replaced.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import Context, copy_context
from typing import Protocol, cast

from segue.engine_sessions.frames import (
    HEAD_BYTES_MAX,
    PROTOCOL,
    Incoming,
    ProtocolBroken,
    SessionAsk,
    SessionCancel,
    SessionEnd,
    SessionFailed,
    SessionHello,
    SessionRefused,
    SessionSaid,
    SessionTaken,
    SessionTokens,
    accepted,
    binary_message,
    pong,
    read_said,
)

log = logging.getLogger(__name__)

SessionAnswered = SessionTaken | SessionTokens | SessionEnd | SessionRefused | SessionFailed
# After one of these nothing more comes.
_LAST = (SessionEnd, SessionRefused, SessionFailed)


class Hearer(Protocol):
    """Who hears one answer."""

    def hear(self, said: SessionAnswered) -> None:
        """One message for this answer."""

    def lost(self) -> None:
        """The connection has ended before the answer did."""


class SessionLink(asyncio.Protocol):
    """One connection."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._transport: asyncio.Transport
        self._head = bytearray()
        self._is_upgraded = self.is_lost = False
        self._incoming = Incoming()
        self._hearers: dict[int, tuple[Hearer, Context]] = {}
        self._last = 0
        # The first message; an exception where it is none.
        self.hello: asyncio.Future[SessionHello] = asyncio.get_running_loop().create_future()
        self.reason = "the connection was lost"

    def begin(self, hearer: Hearer) -> int:
        """The number of a new answer."""
        self._last += 1
        self._hearers[self._last] = hearer, copy_context()
        return self._last

    def send(self, message: SessionAsk | SessionCancel) -> None:
        """Ask, or take it back."""
        if not self.is_lost:
            self._transport.write(binary_message(message))

    def end(self, stream: int) -> None:
        """Nobody hears this answer any longer."""
        if self._hearers.pop(stream, None) is not None:
            self.send(SessionCancel(stream))

    def close(self, reason: str = "the connection was closed") -> None:
        if not self.is_lost:
            self.reason = reason
            self._transport.abort()
            self._lose()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.is_lost:
            return
        try:
            if not self._is_upgraded:
                data = self._upgrade(data)
            incoming = self._incoming
            for message in incoming.feed(data) if data else ():
                for said in read_said(message):
                    self._hear(said)
            for ping in incoming.pings:
                self._transport.write(pong(ping))
            incoming.pings.clear()
            if incoming.is_closed:
                self.close("the engine closed the connection")
        except ProtocolBroken as error:
            self.close(str(error))

    def _upgrade(self, data: bytes) -> bytes:
        self._head += data
        head, found, rest = bytes(self._head).partition(b"\r\n\r\n")
        if not found:
            if len(head) > HEAD_BYTES_MAX:
                raise ProtocolBroken("the headers are too long")
            return b""
        if not accepted(head, self._key):
            line = head.partition(b"\r\n")[0][:80].decode("latin-1")
            raise ProtocolBroken(f"no WebSocket: {line}")
        self._is_upgraded = True
        return rest

    def _hear(self, said: SessionSaid) -> None:
        if isinstance(said, SessionHello):
            if said.protocol != PROTOCOL or self.hello.done():
                raise ProtocolBroken(f"protocol {said.protocol} is not {PROTOCOL}")
            self.hello.set_result(said)
            return
        # None: it was cancelled while this was on the way.
        found = self._hearers.get(said.stream)
        if found is None:
            return
        hearer, context = found
        if isinstance(said, _LAST):
            del self._hearers[said.stream]
        context.run(hearer.hear, said)

    def connection_lost(self, error: Exception | None) -> None:
        self._lose()

    def _lose(self) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        if not self.hello.done():
            self.hello.set_exception(ConnectionError(self.reason))
            # Whoever waits for it hears it; nobody may.
            self.hello.exception()
        hearers, self._hearers = self._hearers, {}
        for hearer, context in hearers.values():
            context.run(hearer.lost)
