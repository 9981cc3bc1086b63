"""How do bytes reach an engine over HTTP/1.1, and come back as they arrive?

In: a method, a path, a body. Out: an `HttpResponse` whose body is read as it comes, everything that has arrived at
once. Connections are kept for the next request. The parser is httptools, which the server's side has too; a general
client library spends more on each small chunk of a stream than we spend on its event (docs/decisions/0007). No
redirects, no cookies, no compression, no proxies: an engine needs none.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections import deque
from typing import Literal, cast
from urllib.parse import unquote, urlsplit

import httptools

# How much may be unread before the engine is slowed down.
UNREAD_BYTES_MAX = 256 * 1024
# Status line and headers of a response.
HEAD_BYTES_MAX = 64 * 1024


class ConnectionBroken(ConnectionError):
    """The connection ended, or sent something that is not HTTP, before the response was complete."""


class HttpResponse:
    """One response, from its headers on: filled by its connection until it is complete, and emptied by its reader."""

    __slots__ = (
        "_connection",
        "_error",
        "_reading",
        "_unread",
        "_unread_bytes",
        "content_type",
        "retry_after",
        "status",
    )

    def __init__(self, connection: HttpConnection, status: int, headers: dict[str, str]) -> None:
        # Until it is complete, or broken.
        self._connection: HttpConnection | None = connection
        self._error: Exception | None = None
        self._reading: asyncio.Future[None] | None = None
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self.status = status
        self.content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        self.retry_after = headers.get("retry-after", "")

    async def read(self) -> bytes:
        """What has arrived, as soon as there is something; empty at the end."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._connection is None:
                return b""
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading
        data = b"".join(self._unread) if len(self._unread) > 1 else self._unread[0]
        self._unread, self._unread_bytes = [], 0
        if self._connection is not None:
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

    def close(self) -> None:
        """Stop reading. If the response is not complete, its connection is closed, which stops the job."""
        if self._connection is not None:
            self._connection.abort()

    @property
    def is_full(self) -> bool:
        return self._unread_bytes > UNREAD_BYTES_MAX

    def feed(self, data: bytes) -> None:
        self._unread.append(data)
        self._unread_bytes += len(data)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """The response is complete, or never will be."""
        if self._connection is not None:
            self._connection, self._error = None, error
            self._wake()

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)


class HttpClient:
    """One engine's address, and the connections to it."""

    def __init__(self, url: str, headers: dict[str, str], keep_s: float) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._is_secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_secure else 80)
        self._prefix = parts.path.rstrip("/")
        self._keep_s = keep_s
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers = {
                "authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"
            } | headers
        at = parts.netloc.rpartition("@")[2]
        lines = [f"{name}: {value}\r\n" for name, value in {"host": at, **headers}.items()]
        self._head = "".join(lines).encode("latin-1")
        self._tls: ssl.SSLContext | None = None
        # The one that was used last is used first.
        self._idle: deque[HttpConnection] = deque()
        self._busy: set[HttpConnection] = set()

    async def send(
        self, method: Literal["GET", "POST"], path: str, body: bytes, connect_s: float
    ) -> HttpResponse:
        """Send a request, and return when its response begins.

        Raises `OSError` where no connection can be made, `ConnectionBroken` where it ends too early.
        """
        connection = self._take() or await self._connect(connect_s)
        self._busy.add(connection)
        line = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode("latin-1")
        head = b"%b%bcontent-length: %d\r\n\r\n" % (line, self._head, len(body))
        try:
            return await connection.send(head, body)
        except BaseException:
            connection.abort()
            raise

    def close(self) -> None:
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()

    def give_back(self, connection: HttpConnection) -> None:
        """The connection can serve the next request."""
        self._busy.discard(connection)
        self._idle.append(connection)

    def lose(self, connection: HttpConnection) -> None:
        """The connection has ended."""
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _take(self) -> HttpConnection | None:
        """An idle connection. After `keep_s` the engine is about to close it, and it is not used again."""
        now = asyncio.get_running_loop().time()
        while self._idle and self._idle[0].idle_since + self._keep_s < now:
            self._idle[0].abort()
        return self._idle.pop() if self._idle else None

    async def _connect(self, connect_s: float) -> HttpConnection:
        if self._is_secure and self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        async with asyncio.timeout(connect_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: HttpConnection(self), self._host, self._port, ssl=self._tls
            )
        return connection


class HttpConnection(asyncio.Protocol):
    """One connection: one request at a time, and its response."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self.idle_since = 0.0
        # Of the request that was sent, until its headers are here; then the response, until it is complete.
        self._pending: asyncio.Future[HttpResponse] | None = None
        self._response: HttpResponse | None = None
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._is_paused = False
        self._error: Exception | None = None

    async def send(self, head: bytes, body: bytes) -> HttpResponse:
        """Send a request; returns when its response begins."""
        if self._error is not None:
            raise self._error
        # A new parser each time: it must never go on with the rest of an earlier response.
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._head_bytes = {}, 0
        self._pending = self._loop.create_future()
        self._transport.writelines([head, body])
        return await self._pending

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        self._end(ConnectionBroken("the connection was closed"))
        self._transport.abort()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        # Bytes that no request asked for: the engine and we do not understand each other.
        if self._pending is None and self._response is None:
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionBroken(f"the response cannot be read: {error}"))
            self._transport.abort()
            return
        if self._response is not None and self._response.is_full and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        # A response without a length ends with its connection.
        has_length = {"content-length", "transfer-encoding"} & self._headers.keys()
        if error is None and self._response is not None and not has_length:
            self._response.end()
        self._end(ConnectionBroken("the connection was lost"))

    def _end(self, error: Exception) -> None:
        self._client.lose(self)
        self._error = self._error or error
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(self._error)
        if self._response is not None:
            self._response.end(self._error)
        self._pending = self._response = None

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._pending is None:
            raise ValueError("a response without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES_MAX:
            raise ValueError("the headers are too long")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            # 100 Continue and the like: the response is still to come.
            self._headers = {}
            return
        self._response = HttpResponse(self, status, self._headers)
        if self._pending is not None and not self._pending.done():
            self._pending.set_result(self._response)
        self._pending = None

    def on_body(self, data: bytes) -> None:
        if self._response is not None:
            self._response.feed(data)

    def on_message_complete(self) -> None:
        if self._response is None:
            return
        self._response.end()
        self._response = None
        if self._parser.should_keep_alive():
            self.resume()
            self.idle_since = self._loop.time()
            self._client.give_back(self)
        else:
            self.abort()
