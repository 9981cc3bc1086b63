"""How long may an HTTP connection take, and how much may it hold, before and after its requests?

uvicorn's HTTP, with an end to what would otherwise have none: a request head that never comes or never ends, trailers
and other bytes that are neither head nor body, a connection too many, a client that asks and does not read the answer.
What is refused here is refused before anything is known of it, in a few bytes. An offer to speak HTTP/2 is passed over.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket as net
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from segue.ids import new_id
from segue.transports.exchange import CUT

log = logging.getLogger(__name__)

# No client of ours sends more in a request line and its headers; servers in front allow 8 to 64 KiB. The same is
# enough for all that is no body: trailers, what chunks are called, empty lines between requests.
HEAD_BYTES_MAX = 64 * 1024
# Over how many seconds those who were turned away come back.
CROWDED_S_MAX = 5
# A client that says nothing is asked for a sign of life, and given up after a minute without one, or without taking
# anything in (docs/hazards.md F5). Not every system knows all of these.
LINE_OPTIONS = {
    "TCP_KEEPIDLE": 20,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": 60_000,
}
# A slow reader that takes this much each time may go on.
PROGRESS_BYTES_MIN = 64 * 1024


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one HTTP connection may take, and how many there may be."""

    head_s_max: float = 10
    write_s_max: float = 30
    connections_max: int = 10_000


class HttpProtocol(HttpToolsProtocol):
    """One HTTP connection, and a way to break it off."""

    limits = HttpLimits()
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    # What has come since the last byte of a body, or since a head was complete.
    _dry_bytes = 0
    _unread_bytes = 0
    _is_in_head = True
    # Whether the last request has come to its end.
    _is_whole = True
    _chunk = b""
    # Requests that are still answered while others wait behind them.
    _earlier: Sequence[RequestResponseCycle] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come, perhaps one too many."""
        super().connection_made(transport)
        _watch_line(transport)
        if len(self.connections) > self.limits.connections_max:
            self._turn_away(
                503, code="server_is_overloaded", message="Too many connections. Please retry."
            )
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._stop_timers()
        for cycle in self._earlier:
            # uvicorn tells only the newest request that its client has left.
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self.transport.is_closing():
            return
        self._dry_bytes += len(data)
        if self._is_whole and self._head_timer is None:
            self._wait_for_head()
        self._chunk = data
        super().data_received(data)
        self._chunk = b""
        if self._dry_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._turn_away(
                431, code="headers_too_large", message="The headers of the request are too large."
            )

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_in_head = True
        self._is_whole = False
        if self._head_timer is None:
            self._wait_for_head()
        self.scope["extensions"] = {CUT: {"call": self.transport.abort}}

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; or a trailer, which nobody may take for one (RFC 9110, 6.5.1)."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its head is here."""
        self._is_in_head = False
        self._dry_bytes = 0
        self._stop_waiting()
        if self._is_foreign_upgrade:
            return
        if self.cycle is not None:
            self._earlier = [
                one for one in (*self._earlier, self.cycle) if not one.response_complete
            ]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        self._dry_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Nothing more belongs to it."""
        if self._is_foreign_upgrade:
            return
        self._is_whole = True
        self._dry_bytes = 0
        self._stop_waiting()
        super().on_message_complete()

    @property
    def _is_foreign_upgrade(self) -> bool:
        """Whether the client would like another protocol, of which we know nothing: Java's own client asks for h2c."""
        return bool(self.parser.should_upgrade()) and not self._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        """Go on as if the client had not asked (RFC 9110, 7.8): the parser has given up, and another one reads on."""
        asked, method = sys.exception(), self.parser.get_method()
        assert isinstance(asked, httptools.HttpParserUpgrade)
        if method == b"CONNECT":
            self.send_400_response("This is no proxy.")
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % one for one in self.headers if one[0] != b"upgrade"]
        head = b"\r\n".join([*lines, b"", b""])
        self.parser = httptools.HttpRequestParser(self)
        super().data_received(head + self._chunk[asked.args[0] :])

    def handle_websocket_upgrade(self) -> None:
        """The connection is a socket's from now on."""
        self._stop_timers()
        super().handle_websocket_upgrade()

    def pause_writing(self) -> None:
        """The client does not read as fast as we write."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None

    def on_response_complete(self) -> None:
        """An answer is written, but perhaps not read."""
        super().on_response_complete()
        self._watch_reader()
        if not self._is_whole and self._head_timer is None:
            # Nobody waits for the rest of a request that is answered.
            self._head_timer = self.loop.call_later(self.limits.head_s_max, self.transport.close)

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.head_s_max, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_answering:
            # The next request may wait until this one is answered.
            self._wait_for_head()
        elif not self.transport.is_closing():
            self._turn_away(
                408, code="request_timeout", message="The request did not come in time."
            )

    def _turn_away(self, status: int, *, code: str, message: str) -> None:
        """The shortest answer, and nothing more is read."""
        self._stop_timers()
        if self.cycle is not None and self.cycle.response_started and self._is_answering:
            # It would stand in the middle of another answer.
            self.transport.abort()
            return
        self.connections.discard(self)
        self.transport.write(_plain(status, code, message))
        self.transport.close()
        # A peer that does not read the answer is not waited for.
        self._write_timer = self.loop.call_later(self.limits.head_s_max, self.transport.abort)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch_reader(self) -> None:
        """Only falls from here on: a paused client is written nothing, and an answer that is complete has no more."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self._unread_bytes = self._left_bytes()
        if self._unread_bytes:
            self._write_timer = self.loop.call_later(self.limits.write_s_max, self._read_is_late)

    def _read_is_late(self) -> None:
        left_bytes = self._left_bytes()
        if left_bytes and self._unread_bytes - left_bytes < PROGRESS_BYTES_MIN:
            log.warning("a client that does not read was cut")
            self.transport.abort()
        else:
            self._watch_reader()

    def _left_bytes(self) -> int:
        try:
            return self.transport.get_write_buffer_size()
        except RuntimeError:  # uvloop forbids questions to a transport that has ended
            return 0

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = None


def http_class(limits: HttpLimits) -> Callable[..., asyncio.Protocol]:
    """The class for uvicorn's `http=`."""

    class ServedHttp(HttpProtocol):
        pass

    ServedHttp.limits = limits
    return ServedHttp


def _watch_line(transport: asyncio.Transport) -> None:
    """Let the system find out that a client is gone without a word: nobody pings over HTTP."""
    line: net.socket | None = transport.get_extra_info("socket")
    if line is None or line.family not in (net.AF_INET, net.AF_INET6):
        return
    line.setsockopt(net.SOL_SOCKET, net.SO_KEEPALIVE, 1)
    for name, value in LINE_OPTIONS.items():
        if hasattr(net, name):
            line.setsockopt(net.IPPROTO_TCP, getattr(net, name), value)


def _plain(status: int, code: str, message: str) -> bytes:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = f'{{"error":{{"message":"{message}","type":"{kind}","param":null,"code":"{code}"}}}}'
    # Not all at the same time: those who were turned away come back over a few seconds (docs/hazards.md T15).
    later = f"Retry-After: {random.randint(1, CROWDED_S_MAX)}\r\n" if status == 503 else ""
    head = (
        f"HTTP/1.1 {status} {PHRASES[status]}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{later}x-request-id: {new_id('req')}\r\n"
        "Connection: close\r\n\r\n"
    )
    return (head + body).encode()


PHRASES = {
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
