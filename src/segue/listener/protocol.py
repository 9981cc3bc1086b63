"""How long may an HTTP connection take, and how much may it hold, before and after its requests?

uvicorn's HTTP with limits that it lacks: for a request head that never comes or never ends, for trailers and other
bytes that are neither head nor body, for the number of connections, for a client that does not read its answer. Such a
connection is refused in a few bytes, before routing. An offer to upgrade to HTTP/2 is ignored.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket as net
import sys
from collections import deque
from collections.abc import Callable, Sequence

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_remote_addr, is_ssl

from segue.errors import ApiError, Refused, Unavailable
from segue.listener.edge_limits import EdgeLimits
from segue.listener.exchange import CUT, raw_refusal
from segue.memory.budget import UNREAD_BYTES_MIN, Unread

log = logging.getLogger(__name__)

# No client sends more in a request line and its headers; reverse proxies allow 8 to 64 KiB. The same limit holds for
# everything outside a body: trailers, chunk extensions, empty lines between requests.
HEAD_BYTES_MAX = 64 * 1024
# For health checks and 503 answers when all WebSocket connections are taken.
SPARE_CONNECTIONS = 100
# Refused clients are asked to retry within this many seconds, not all at once (docs/inside/hazards.md T15).
RETRY_S_MAX = 5
# TCP keep-alive for a silent client, dropped after a minute without an acknowledgement (docs/inside/hazards.md F5).
# Not every system knows all of these.
TCP_OPTIONS = {
    "TCP_KEEPIDLE": 20,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": 60_000,
    "TCP_NODELAY": 1,
}
# Sockets accepted in one pass of the event loop, which accepts one for each listener.
LISTENERS = 8
# Upgrades in one pass, and how long they wait at most while connections come faster than they are accepted.
UPGRADES_MAX, UPGRADE_S_MAX = 4, 0.5
# A slow reader that takes this much within the time limit may go on.
PROGRESS_BYTES_MIN = 64 * 1024


class UpgradeQueue:
    """Lets a few upgrades happen in each pass of the event loop, in the order in which they came.

    When thousands of clients come back in the same moment, all of them are accepted first: a health check comes
    after them in the same queue of the kernel.
    """

    def __init__(self) -> None:
        # Connections that were accepted in this pass.
        self.accepted = 0
        self._left = UPGRADES_MAX
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False
        self._held_at: float | None = None

    def put(self, upgrade: Callable[[], None]) -> bool:
        """Call this now, or soon; whether it was called."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_pass)
        if self._waiting or not self._left or self._is_busy():
            self._waiting.append(upgrade)
            return False
        self._left -= 1
        upgrade()
        return True

    def _is_busy(self) -> bool:
        """Whether more connections wait to be accepted."""
        if self.accepted < LISTENERS:
            self._held_at = None
            return False
        now = asyncio.get_running_loop().time()
        self._held_at = self._held_at or now
        return now - self._held_at < UPGRADE_S_MAX

    def _next_pass(self) -> None:
        is_busy, self.accepted = self._is_busy(), 0
        self._left = 0 if is_busy else UPGRADES_MAX
        while self._left and self._waiting:
            self._left -= 1
            self._waiting.popleft()()
        self._is_due = bool(self._waiting)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_pass)
        else:
            self._left = UPGRADES_MAX


class HttpProtocol(HttpToolsProtocol):
    """One HTTP connection."""

    limits = EdgeLimits()
    unread = Unread()
    upgrades = UpgradeQueue()
    has_addresses = False
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    # Bytes since the last byte of a body, or since a head was complete.
    _overhead_bytes = 0
    _watched_bytes = 0
    _is_in_head = True
    _is_upgrading = False
    # Whether the last request has been received completely.
    _is_complete = True
    _chunk = b""
    # Requests that are still being answered while later ones of the connection wait.
    _earlier: Sequence[RequestResponseCycle] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # As uvicorn does it, but for the addresses of both ends: each is a system call. The access log needs one.
        self.connections.add(self)
        self.transport, self.flow = transport, FlowControl(transport)
        self.scheme = "https" if is_ssl(transport) else "http"
        if self.has_addresses:
            self.client = get_remote_addr(transport)
        self.upgrades.accepted += 1
        if len(self.connections) > self.limits.connections_max + SPARE_CONNECTIONS:
            wait_s = random.randint(1, RETRY_S_MAX)
            self._refuse(Unavailable("Too many connections. Please retry.", wait_s=wait_s))
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        self.unread.writers.discard(self)
        for cycle in self._earlier:
            # uvicorn notifies only the newest request that its client has left.
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._is_upgrading:
            return
        self._overhead_bytes += len(data)
        if self._is_complete and self._head_timer is None:
            self._wait_for_head()
        self._chunk = data
        super().data_received(data)
        self._chunk = b""
        if self._overhead_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            message = "The headers of the request are too large."
            self._refuse(Refused(message, status=431, code="headers_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._is_complete = False
        if self._head_timer is None:
            self._wait_for_head()
        self.scope["extensions"] = {CUT: {"call": self.transport.abort}}

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; trailers are dropped, because they must not count as headers (RFC 9110, 6.5.1)."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._overhead_bytes = 0
        self._stop_waiting()
        if self._is_foreign_upgrade:
            return
        if self.cycle is not None:
            cycles = (*self._earlier, self.cycle)
            self._earlier = [cycle for cycle in cycles if not cycle.response_complete]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_foreign_upgrade:
            return
        self._is_complete = True
        self._overhead_bytes = 0
        self._stop_waiting()
        super().on_message_complete()

    @property
    def _is_foreign_upgrade(self) -> bool:
        """Whether the client offers a protocol that we do not speak: Java's own client offers h2c."""
        return bool(self.parser.should_upgrade()) and not self._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore the offer (RFC 9110, 7.8): the parser has stopped, and a fresh one reads the request without it."""
        upgrade, method = sys.exception(), self.parser.get_method()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        if method == b"CONNECT":
            self.send_400_response("This server is not a proxy.")
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        head = b"\r\n".join([*lines, b"", b""])
        self.parser = httptools.HttpRequestParser(self)
        super().data_received(head + self._chunk[upgrade.args[0] :])

    def handle_websocket_upgrade(self) -> None:
        if self.parser.get_http_version() == "1.0":
            message = (
                "A WebSocket upgrade needs HTTP/1.1 (RFC 6455, 4.1); this request is HTTP/1.0."
            )
            self._refuse(Refused(message, status=400, code="invalid_upgrade"))
            return
        self._stop_timers()
        self._is_upgrading = True
        if not self.upgrades.put(self._upgrade):
            self.transport.pause_reading()

    def _upgrade(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()
            super().handle_websocket_upgrade()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None and not self.transport.is_closing():
            self._write_timer.cancel()
            self._write_timer = None
            self.unread.writers.discard(self)

    def on_response_complete(self) -> None:
        """The answer is written, but perhaps not read."""
        super().on_response_complete()
        self._watch_reader()
        if not self._is_complete and self._head_timer is None:
            # The rest of a request that is answered already has a time limit.
            self._head_timer = self.loop.call_later(
                self.limits.handshake_s_max, self.transport.close
            )

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.handshake_s_max, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_answering:
            # The time of the next request counts from the end of this answer.
            self._wait_for_head()
        elif not self.transport.is_closing():
            message = "The request was not received in time."
            self._refuse(Refused(message, status=408, code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer with the error, and read nothing more."""
        self._stop_timers()
        if self.cycle is not None and self.cycle.response_started and self._is_answering:
            # The error would stand in the middle of another answer.
            self.transport.abort()
            return
        self.connections.discard(self)
        self.transport.write(raw_refusal(error))
        self.transport.close()
        # A client that does not read the answer is not waited for.
        self._write_timer = self.loop.call_later(self.limits.handshake_s_max, self.transport.abort)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch_reader(self) -> None:
        """Set the time limit for unread bytes. None are added: writing is paused, or the answer is complete."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        self._watched_bytes = self.unread_bytes
        self.unread.writers.discard(self)
        if self._watched_bytes > UNREAD_BYTES_MIN:
            self.unread.writers.add(self)
        if self._watched_bytes:
            self._write_timer = self.loop.call_later(self.limits.write_s_max, self._read_is_late)

    def _read_is_late(self) -> None:
        left_bytes = self.unread_bytes
        if left_bytes and self._watched_bytes - left_bytes < PROGRESS_BYTES_MIN:
            log.warning("HTTP connection cut: the client does not read")
            self.transport.abort()
        else:
            self._watch_reader()

    @property
    def unread_bytes(self) -> int:
        try:
            return self.transport.get_write_buffer_size()
        except RuntimeError:  # uvloop raises on a transport that has ended
            return 0

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = None


def http_class(
    limits: EdgeLimits, unread: Unread, *, has_addresses: bool = False
) -> Callable[..., asyncio.Protocol]:
    """The class for uvicorn's `http=`; `has_addresses`: requests carry the address of their client."""

    class ServedHttp(HttpProtocol):
        pass

    ServedHttp.limits, ServedHttp.unread, ServedHttp.upgrades = limits, unread, UpgradeQueue()
    ServedHttp.has_addresses = has_addresses
    return ServedHttp


def set_tcp_options(port: net.socket) -> None:
    """Let the system notice clients that are gone without closing: HTTP has no ping. Connections inherit it from their
    port."""
    if port.family in (net.AF_INET, net.AF_INET6):
        port.setsockopt(net.SOL_SOCKET, net.SO_KEEPALIVE, 1)
        for name, value in TCP_OPTIONS.items():
            if hasattr(net, name):
                port.setsockopt(net.IPPROTO_TCP, getattr(net, name), value)
