"""How long may an HTTP connection take, and how much may it hold, before and after its requests?

uvicorn's HTTP, with an end to what would otherwise have none: a request head that never comes or never ends, a
connection too many, a client that asks and does not read the answer. What is refused here is refused before anything is
known of it, in a few bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from segue.ids import new_id
from segue.transports.exchange import CUT

log = logging.getLogger(__name__)

# No client of ours sends more in a request line and its headers; servers in front allow 8 to 64 KiB.
HEAD_BYTES_MAX = 64 * 1024
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
    _head_bytes = 0
    _unread_bytes = 0
    _is_in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come, perhaps one too many."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections_max:
            self._turn_away(
                503, code="server_is_overloaded", message="Too many connections. Please retry."
            )
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self.transport.is_closing():
            return
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > HEAD_BYTES_MAX:
            self._turn_away(
                431, code="headers_too_large", message="The headers of the request are too large."
            )

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_in_head = True
        if self._head_timer is None:
            self._wait_for_head()
        self.scope["extensions"] = {CUT: {"call": self.transport.abort}}

    def on_headers_complete(self) -> None:
        """Its head is here."""
        self._is_in_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

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

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.head_s_max, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._turn_away(
                408, code="request_timeout", message="The request did not come in time."
            )

    def _turn_away(self, status: int, *, code: str, message: str) -> None:
        """The shortest answer, and nothing more is read."""
        self._stop_timers()
        self.connections.discard(self)
        self.transport.write(_plain(status, code, message))
        self.transport.close()
        # A peer that does not read the answer is not waited for.
        self._write_timer = self.loop.call_later(self.limits.head_s_max, self.transport.abort)

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


def _plain(status: int, code: str, message: str) -> bytes:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = f'{{"error":{{"message":"{message}","type":"{kind}","param":null,"code":"{code}"}}}}'
    later = "Retry-After: 1\r\n" if status == 503 else ""
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
