"""How do all answers of one engine server come over one connection?

In: what is asked, with somebody who hears each answer. Out: calls of theirs, in callbacks of the event loop, so that no
task wakes for a token. Whatever an answer has got when its turn comes, be it of many steps, is one call and one piece.
A few answers are served at a time, and then what they have written leaves before the next ones are: a step has tokens
for all answers, and nobody is to wait for all others. A connection that breaks, speaks otherwise than it should, or
says nothing when it is asked whether it is there, ends all of its answers; it is not mended but replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextvars import Context, copy_context
from itertools import islice
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
    SessionForget,
    SessionHello,
    SessionRefused,
    SessionSaid,
    SessionTaken,
    SessionTokens,
    accepted,
    binary_message,
    ping,
    pong,
    read_said,
)

log = logging.getLogger(__name__)

SessionAnswered = SessionTaken | SessionTokens | SessionEnd | SessionRefused | SessionFailed
# After one of these nothing more comes.
_LAST = (SessionEnd, SessionRefused, SessionFailed)

# So much is read at once, a few milliseconds; then others have their time.
READ_BYTES_MAX = 32 * 1024
# How much may be unread before the engine is slowed down.
UNREAD_BYTES_MAX = 256 * 1024
# How many answers are served at once.
HEARERS_MAX = 8
# So long nothing may come before the engine is asked whether it is there, and so often; then it is gone. A machine
# without power ends no connection, and a vLLM that computes still answers, because its API server does.
PING_S, PINGS_MAX = 15.0, 2


class Hearer(Protocol):
    """Who hears one answer."""

    def hear(self, said: Sequence[SessionAnswered]) -> None:
        """What has come for this answer, in order; tokens of several steps stand together."""

    def lost(self) -> None:
        """The connection has ended before the answer did."""


class SessionLink(asyncio.Protocol):
    """One connection."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._head = bytearray()
        self._is_upgraded = self.is_lost = False
        self._incoming = Incoming()
        # What has come and was not looked at, and what was not heard by then.
        self._unread = bytearray()
        self._unheard: dict[int, list[SessionAnswered]] = {}
        self._is_paused = self._is_due = False
        self._hearers: dict[int, tuple[Hearer, Context]] = {}
        self._last = 0
        # Whether something has come since that was last looked at, and how often it was asked for since.
        self._has_come = False
        self._pings = 0
        self._timer = self._loop.call_later(PING_S, self._check)
        # The first message; an exception where it is none.
        self.hello: asyncio.Future[SessionHello] = self._loop.create_future()
        self.reason = "the connection was lost"

    def begin(self, hearer: Hearer) -> int:
        """The number of a new answer."""
        self._last += 1
        if self.is_lost:
            hearer.lost()
        else:
            self._hearers[self._last] = hearer, copy_context()
        return self._last

    def send(self, message: SessionAsk | SessionCancel | SessionForget) -> None:
        """Ask, or take back."""
        if not self.is_lost:
            self._transport.write(binary_message(message))

    def end(self, stream: int) -> None:
        """Nobody hears this answer any longer."""
        self._unheard.pop(stream, None)
        if self._hearers.pop(stream, None) is not None:
            self.send(SessionCancel(stream))

    def close(self, reason: str = "the connection was closed") -> None:
        """No more is read; what was read is still heard."""
        if not self.is_lost:
            self.reason, self.is_lost = reason, True
            self._unread.clear()
            self._timer.cancel()
            self._transport.abort()
            self._work_soon()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.is_lost:
            return
        self._has_come = True
        self._unread += data
        if not self._is_due:
            self._work()
        if len(self._unread) > UNREAD_BYTES_MAX and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._timer.cancel()
        self._work_soon()

    def _check(self) -> None:
        """Is the engine there?"""
        if self._has_come or self._is_paused:
            self._pings = 0
        elif self._pings == PINGS_MAX:
            self.close(f"the engine did not answer to {PINGS_MAX} pings")
            return
        else:
            self._pings += 1
            self._transport.write(ping())
        self._has_come = False
        self._timer = self._loop.call_later(PING_S, self._check)

    def _work_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._work)

    def _work(self) -> None:
        """Read some, serve some, and go on as soon as others had their time."""
        self._is_due = False
        if self._unread:
            data = bytes(self._unread[:READ_BYTES_MAX])
            del self._unread[: len(data)]
            try:
                self._read(data)
            except ProtocolBroken as error:
                self.close(str(error))
        if self._is_paused and len(self._unread) <= UNREAD_BYTES_MAX:
            self._is_paused = False
            if not self.is_lost:
                self._transport.resume_reading()
        # Those that wait longest. One that is served may end another.
        for stream in list(islice(self._unheard, HEARERS_MAX)):
            if (unheard := self._unheard.pop(stream, None)) is None:
                continue
            hearer, context = self._hearers[stream]
            if isinstance(unheard[-1], _LAST):
                del self._hearers[stream]
            context.run(hearer.hear, unheard)
        if self._unread or self._unheard:
            self._work_soon()
        elif self.is_lost:
            self._lose()

    def _read(self, data: bytes) -> None:
        if not self._is_upgraded:
            data = self._upgrade(data)
        incoming = self._incoming
        hearers, unheard = self._hearers, self._unheard
        for message in incoming.feed(data) if data else ():
            for said in read_said(message):
                # The way of nearly every token.
                if type(said) is SessionTokens and said.stream not in unheard:
                    if said.stream in hearers:
                        unheard[said.stream] = [said]
                else:
                    self._sort(said)
        if incoming.pings and not self.is_lost:
            # A peer wants to hear its latest one again (RFC 6455, 5.5.3).
            self._transport.write(pong(incoming.pings[-1]))
        incoming.pings.clear()
        if incoming.is_closed:
            self.close("the engine closed the connection")

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

    def _sort(self, said: SessionSaid) -> None:
        """To what its answer has not heard."""
        if isinstance(said, SessionHello):
            if said.protocol != PROTOCOL or self.hello.done():
                raise ProtocolBroken(f"protocol {said.protocol} is not {PROTOCOL}")
            self.hello.set_result(said)
            return
        stream = said.stream
        if stream not in self._hearers:
            # It was cancelled while this was on the way.
            return
        unheard = self._unheard.setdefault(stream, [])
        last = unheard[-1] if unheard else None
        if isinstance(said, SessionTokens) and isinstance(last, SessionTokens):
            last.ids.extend(said.ids)
        elif not isinstance(last, _LAST):
            unheard.append(said)

    def _lose(self) -> None:
        """Nothing more comes."""
        if not self.hello.done():
            self.hello.set_exception(ConnectionError(self.reason))
            # Whoever waits for it hears it; nobody may.
            self.hello.exception()
        hearers, self._hearers = self._hearers, {}
        for hearer, context in hearers.values():
            context.run(hearer.lost)
