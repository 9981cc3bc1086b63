"""How do bytes reach an engine over HTTP/1.1, and come back as they arrive?

In: a method, a path, a body. Out: an `HttpResponse` whose body is read as it comes, everything that has arrived at
once; where its reader wants that, in the callback of the connection, so that no task wakes for it. Connections are
kept for the next request. The parser is httptools, which the server's side has too; a general client library spends
more on each small chunk of a stream than we spend on its event (docs/decisions/0007). No redirects, no cookies, no
compression, no proxies: an engine needs none.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Literal, TypeVar, cast
from urllib.parse import unquote, urlsplit
from weakref import WeakSet

import httptools

P = TypeVar("P", bound=asyncio.Protocol)

# How much may be unread before the engine is slowed down.
UNREAD_BYTES_MAX = 256 * 1024
# So much is used at once, less than a millisecond; then others have their time.
USED_BYTES_MAX = 8 * 1024
# Status line and headers of a response, or whatever else comes between two parts of its body.
HEAD_BYTES_MAX = 64 * 1024


class ConnectionBroken(ConnectionError):
    """The connection ended, or sent something that is not HTTP, before the response was complete."""


class HttpResponse:
    """One response: filled by the parser of its connection until it is complete, and emptied by its reader."""

    def __init__(self, connection: HttpConnection, arrived: asyncio.Future[bool]) -> None:
        # Until it is complete, or broken.
        self._connection: HttpConnection | None = connection
        self._error: Exception | None = None
        self._headers: dict[str, str] = {}
        # What has come since the last part of the body.
        self.dry_bytes = 0
        # What the reader waits for: first for the headers, then for the next bytes of the body.
        self.arrived = arrived
        # Takes the body as it arrives, and says when that is enough.
        self._use: Callable[[bytes], bool] | None = None
        self._context: Context
        self._unread: list[bytes] = []
        self.unread_bytes = 0
        # For the parser: a part for each token, and so nothing but what `fed` does once for all of them.
        self.on_body = self._unread.append
        # Whether more has arrived than is used at once.
        self._has_more = False
        self.status = 0
        self.content_type = self.retry_after = ""

    async def read(self) -> bytes:
        """What has arrived, as soon as there is something; empty at the end."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._connection is None:
                return b""
            self.arrived = asyncio.get_running_loop().create_future()
            await self.arrived
        return self._pop_unread()

    async def read_until(self, use: Callable[[bytes], bool]) -> bool:
        """Give the body to `use` as it arrives, until that says it is enough; False at the end."""
        while True:
            if self._has_more:
                await asyncio.sleep(0)
            if self._unread and use(self._pop_unread()):
                return True
            if self._unread:
                continue
            if self._error is not None:
                raise self._error
            if self._connection is None:
                return False
            self.arrived = asyncio.get_running_loop().create_future()
            self._use, self._context = use, copy_context()
            try:
                if await self.arrived:
                    return True
            finally:
                self._use = None

    def feed(self, parser: httptools.HttpResponseParser, data: bytes) -> None:
        """This has come for it."""
        known = len(self._unread)
        self.dry_bytes += len(data)
        try:
            parser.feed_data(data)
        finally:
            if parts := self._unread[known:]:
                self.unread_bytes += sum(map(len, parts))
                self.dry_bytes = 0
                self._wake()

    def flow(self) -> None:
        """Something may have arrived: let it be used, and wake the reader only when that is enough or the end."""
        if self._use is None or self.arrived.done():
            return
        try:
            is_enough = bool(self._unread) and self._context.run(self._use, self._pop_unread())
        except Exception as error:
            self.arrived.set_exception(error)
            return
        if is_enough or self._has_more or self._connection is None:
            self.arrived.set_result(is_enough)

    def _pop_unread(self) -> bytes:
        data = b"".join(self._unread) if len(self._unread) > 1 else self._unread[0]
        self._unread.clear()
        self._has_more = len(data) > USED_BYTES_MAX
        if self._has_more:
            self._unread.append(data[USED_BYTES_MAX:])
            data = data[:USED_BYTES_MAX]
        self.unread_bytes -= len(data)
        if self._connection is not None and self._connection.is_paused and not self._has_more:
            self._connection.resume()
        return data

    async def read_whole(self, bytes_max: int) -> bytes:
        """The whole body, cut at `bytes_max`."""
        parts, size = [], 0
        while size < bytes_max and (part := await self.read()):
            parts.append(part)
            size += len(part)
        self.close()
        return b"".join(parts)[:bytes_max]

    def close(self, linger_s: float = 0.0) -> None:
        """Stop reading. If the response is not complete by then, its connection is closed, which stops the job."""
        if self._connection is not None and linger_s:
            asyncio.get_running_loop().call_later(linger_s, self.close)
        elif self._connection is not None:
            self._connection.abort()

    def lose(self, error: Exception, *, is_closed_by_engine: bool) -> None:
        """Its connection has ended. A response without a length is complete then."""
        has_length = {"content-length", "transfer-encoding"} & self._headers.keys()
        is_complete = is_closed_by_engine and self.status and not has_length
        self._connection, self._error = None, None if is_complete else error
        if self.arrived.done():
            return
        if self.status:
            self.arrived.set_result(False)
        else:
            self.arrived.set_exception(error)

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._connection is None:
            raise ValueError("a response without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._connection is not None
        status = self._connection.parser.get_status_code()
        if status < 200:
            # 100 Continue and the like: the response is still to come.
            self._headers = {}
            return
        self.status = status
        self.content_type = self._headers.get("content-type", "").partition(";")[0].strip().lower()
        self.retry_after = self._headers.get("retry-after", "")
        self._wake()

    def on_message_complete(self) -> None:
        if self.status and self._connection is not None:
            connection, self._connection = self._connection, None
            connection.complete()
            self._wake()

    def _wake(self) -> None:
        # A reader that uses the body as it arrives is woken by `flow`.
        if self._use is None and not self.arrived.done():
            self.arrived.set_result(False)


class HttpClient:
    """One engine's address, and the connections to it."""

    def __init__(self, url: str, headers: dict[str, str], keep_s: float, host: str = "") -> None:
        """`host` is what it is called in requests and in its certificate, where that is not in the URL."""
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._is_secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_secure else 80)
        self._prefix = parts.path.rstrip("/")
        self._keep_s = keep_s
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            basic = f"Basic {base64.b64encode(pair.encode()).decode()}"
            headers = {"authorization": basic} | headers
        at = host or parts.netloc.rpartition("@")[2]
        self._name = urlsplit(f"//{at}").hostname or ""
        lines = [f"{name}: {value}\r\n" for name, value in {"host": at, **headers}.items()]
        self._head = "".join(lines).encode("latin-1")
        self._tls: ssl.SSLContext | None = None
        # The connection that was used last is used first.
        self.idle: deque[HttpConnection] = deque()
        self.busy: set[HttpConnection] = set()
        # Those that speak another protocol by now.
        self._upgraded: WeakSet[asyncio.Transport] = WeakSet()

    async def send(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: bytes,
        connect_s: float,
        headers: bytes = b"",
    ) -> HttpResponse:
        """Send a request, and return when its response begins. `headers` are lines of its own, each with its end.

        Raises `OSError` where no connection can be made, `ConnectionBroken` where it ends too early.
        """
        # After `keep_s` the engine is about to close an idle connection: it is not used again.
        since = asyncio.get_running_loop().time() - self._keep_s
        while self.idle and self.idle[0].idle_since < since:
            self.idle[0].abort()
        connection = self.idle.pop() if self.idle else await self._connect(connect_s)
        self.busy.add(connection)
        line = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode("latin-1")
        head = b"%b%b%bcontent-length: %d\r\n\r\n" % (line, self._head, headers, len(body))
        try:
            return await connection.send(head, body)
        except BaseException:
            connection.abort()
            raise

    def close(self) -> None:
        for connection in (*self.idle, *self.busy):
            connection.abort()
        for transport in self._upgraded:
            transport.abort()

    async def upgrade(
        self, path: str, headers: bytes, make: Callable[[], P], connect_s: float
    ) -> P:
        """Ask for another protocol on a connection of its own; the answer is for that protocol to read."""
        transport, protocol = await self._connected(make, connect_s)
        line = f"GET {self._prefix}{path} HTTP/1.1\r\n".encode("latin-1")
        self._upgraded.add(transport)
        transport.write(b"%b%b%b\r\n" % (line, self._head, headers))
        return protocol

    async def _connect(self, connect_s: float) -> HttpConnection:
        _, connection = await self._connected(lambda: HttpConnection(self), connect_s)
        return connection

    async def _connected(
        self, make: Callable[[], P], connect_s: float
    ) -> tuple[asyncio.Transport, P]:
        if self._is_secure and self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        async with asyncio.timeout(connect_s):
            return await asyncio.get_running_loop().create_connection(
                make,
                self._host,
                self._port,
                ssl=self._tls,
                server_hostname=self._name if self._tls else None,
            )


class HttpConnection(asyncio.Protocol):
    """One connection: one request at a time, and its response."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self.parser: httptools.HttpResponseParser
        self.idle_since = 0.0
        self.is_paused = False
        # To the request that was sent, until it is complete.
        self._response: HttpResponse | None = None
        self._error: Exception | None = None

    async def send(self, head: bytes, body: bytes) -> HttpResponse:
        """Send a request; returns when its response begins."""
        if self._error is not None:
            raise self._error
        response = self._response = HttpResponse(self, self._loop.create_future())
        # A new parser each time: it must never go on with the rest of an earlier response.
        self.parser = httptools.HttpResponseParser(response)
        self._transport.writelines([head, body])
        await response.arrived
        return response

    def complete(self) -> None:
        """The response is complete: the connection can serve the next request, unless the engine closes it."""
        self._response = None
        if not self.parser.should_keep_alive():
            self.abort()
            return
        if self.is_paused:
            self.resume()
        self.idle_since = self._loop.time()
        self._client.busy.discard(self)
        self._client.idle.append(self)

    def resume(self) -> None:
        self.is_paused = False
        self._transport.resume_reading()

    def abort(self, reason: str = "the connection was closed") -> None:
        self._end(ConnectionBroken(reason))
        self._transport.abort()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        # Bytes that no request asked for: the engine and we do not understand each other.
        response = self._response
        if response is None:
            self.abort()
            return
        try:
            response.feed(self.parser, data)
        except httptools.HttpParserError as error:
            self.abort(f"the response cannot be read: {error}")
            return
        if response.dry_bytes > HEAD_BYTES_MAX and self._response:
            self.abort("the headers are too long")
            return
        response.flow()
        if response.unread_bytes > UNREAD_BYTES_MAX and not self.is_paused and self._response:
            self.is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(ConnectionBroken("the connection was lost"), is_closed_by_engine=error is None)

    def _end(self, error: Exception, *, is_closed_by_engine: bool = False) -> None:
        self._client.busy.discard(self)
        if self in self._client.idle:
            self._client.idle.remove(self)
        self._error = self._error or error
        if self._response is not None:
            self._response.lose(self._error, is_closed_by_engine=is_closed_by_engine)
        self._response = None
