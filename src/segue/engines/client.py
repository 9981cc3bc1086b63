"""How do bytes reach an engine behind HTTP/1.1, and come back as they are said?

In: a method, a path, a body. Out: an `Answer` whose body is read as it comes, everything that has arrived at once.
Connections are kept for the next request. The parser is httptools, which the server's side has too; a client library
for everything spends more on each small chunk of a stream than we spend on its event (docs/decisions/0007). No
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

# What may wait for its reader before the engine is slowed down.
UNREAD_BYTES_MAX = 256 * 1024
# What the head of an answer may have.
HEAD_BYTES_MAX = 64 * 1024


class Broken(ConnectionError):
    """The connection ended, or stopped making sense, before the answer was whole."""


class Answer:
    """One answer, from its head on: filled by its connection, until it is whole, and emptied by its reader."""

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

    def __init__(self, connection: Connection, status: int, headers: dict[str, str]) -> None:
        # Until it is whole, or broken.
        self._connection: Connection | None = connection
        self._error: Exception | None = None
        self._reading: asyncio.Future[None] | None = None
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self.status = status
        self.content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        self.retry_after = headers.get("retry-after", "")

    async def read(self) -> bytes:
        """What has come, as soon as something has; nothing at the end."""
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
        """All of it, or as much as may be, and then no more."""
        parts, size = [], 0
        while size < bytes_max and (part := await self.read()):
            parts.append(part)
            size += len(part)
        self.close()
        return b"".join(parts)[:bytes_max]

    def close(self) -> None:
        """Hear no more: an answer that is not whole costs its connection, which every engine takes as a stop."""
        if self._connection is not None:
            self._connection.abort()

    @property
    def is_full(self) -> bool:
        """Whether its reader is too far behind."""
        return self._unread_bytes > UNREAD_BYTES_MAX

    def feed(self, data: bytes) -> None:
        """More of its body."""
        self._unread.append(data)
        self._unread_bytes += len(data)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """It is whole, or will never be."""
        if self._connection is not None:
            self._connection, self._error = None, error
            self._wake()

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)


class Client:
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
        # The one that was used last is asked first.
        self._idle: deque[Connection] = deque()
        self._busy: set[Connection] = set()

    async def ask(
        self, method: Literal["GET", "POST"], path: str, body: bytes, connect_s: float
    ) -> Answer:
        """Ask, and return when the answer begins. `OSError` where nobody is there, `Broken` where somebody was."""
        connection = self._take() or await self._connect(connect_s)
        self._busy.add(connection)
        line = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode("latin-1")
        head = b"%b%bcontent-length: %d\r\n\r\n" % (line, self._head, len(body))
        try:
            return await connection.ask(head, body)
        except BaseException:
            connection.abort()
            raise

    def close(self) -> None:
        """Close all connections."""
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()

    def give_back(self, connection: Connection) -> None:
        """An answer is whole, and its connection free."""
        self._busy.discard(connection)
        self._idle.append(connection)

    def lose(self, connection: Connection) -> None:
        """A connection is gone."""
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _take(self) -> Connection | None:
        """A connection that is free; those that have waited too long are about to be closed by the engine."""
        now = asyncio.get_running_loop().time()
        while self._idle and self._idle[0].idle_since + self._keep_s < now:
            self._idle[0].abort()
        return self._idle.pop() if self._idle else None

    async def _connect(self, connect_s: float) -> Connection:
        if self._is_secure and self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        async with asyncio.timeout(connect_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(self), self._host, self._port, ssl=self._tls
            )
        return connection


class Connection(asyncio.Protocol):
    """One connection: a request at a time, and its answer."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self.idle_since = 0.0
        self._asked: asyncio.Future[Answer] | None = None
        self._answer: Answer | None = None
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._is_paused = False
        self._error: Exception | None = None

    async def ask(self, head: bytes, body: bytes) -> Answer:
        """Send a request; its answer, as soon as that begins."""
        if self._error is not None:
            raise self._error
        # A fresh one each time: it must never go on with what an earlier answer has left.
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._head_bytes = {}, 0
        self._asked = self._loop.create_future()
        self._transport.writelines([head, body])
        return await self._asked

    def resume(self) -> None:
        """The reader has caught up."""
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """End it now."""
        self._end(Broken("the connection was closed"))
        self._transport.abort()

    # What the transport says.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It begins."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer; or nobody's, and then the engine and we do not understand each other."""
        if self._asked is None and self._answer is None:
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(Broken(f"the answer cannot be read: {error}"))
            self._transport.abort()
            return
        if self._answer is not None and self._answer.is_full and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """It is over, which may be how an answer without a length ends."""
        has_length = {"content-length", "transfer-encoding"} & self._headers.keys()
        if error is None and self._answer is not None and not has_length:
            self._answer.end()
        self._end(Broken("the connection was lost"))

    def _end(self, error: Exception) -> None:
        self._client.lose(self)
        self._error = self._error or error
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(self._error)
        if self._answer is not None:
            self._answer.end(self._error)
        self._asked = self._answer = None

    # What the parser says.

    def on_message_begin(self) -> None:
        """An answer begins, and it must be one that was asked for."""
        if self._asked is None:
            raise ValueError("nobody has asked")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header of the answer."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES_MAX:
            raise ValueError("the head is too long")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head is whole; one that only says to go on is none."""
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = {}
            return
        self._answer = Answer(self, status, self._headers)
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(self._answer)
        self._asked = None

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._answer is not None:
            self._answer.feed(data)

    def on_message_complete(self) -> None:
        """The answer is whole: the connection may serve the next request."""
        if self._answer is None:
            return
        self._answer.end()
        self._answer = None
        if self._parser.should_keep_alive():
            self.resume()
            self.idle_since = self._loop.time()
            self._client.give_back(self)
        else:
            self.abort()
