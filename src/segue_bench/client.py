"""How do bytes leave and arrive on the client's side? One connection, used with as little work as possible.

A client that works hard would measure itself. So this is a plain blocking socket, frames and chunks are cut by hand,
and only the last event of a turn is decoded. What that still costs is reported as the client's share.
"""

from __future__ import annotations

import base64
import os
import socket
import ssl
import struct
from dataclasses import dataclass
from urllib.parse import urlsplit

READ_BYTES = 1 << 18
# No turn of a benchmark is silent for longer; the server sends a heartbeat every 15 s.
SILENCE_S_MAX = 60.0
HEAD_BYTES_MAX = 65_536


class ConnectionFailed(Exception):
    """The server cannot be reached, or its answer is neither HTTP nor a WebSocket."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server is, and the key for it."""

    url: str
    key: str = ""
    tls: ssl.SSLContext | None = None

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def path(self) -> str:
        """The path of the responses: `/v1` is added unless the URL has it."""
        path = urlsplit(self.url).path.rstrip("/")
        return f"{path if path.endswith('/v1') else path + '/v1'}/responses"

    def headers(self) -> str:
        """The headers of every request."""
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        return f"Host: {self.host}:{self.port}\r\n{key}"


def local(port: int) -> ServerAddress:
    """A server on this machine."""
    return ServerAddress(f"http://127.0.0.1:{port}")


@dataclass(slots=True)
class Traffic:
    """Bytes of one connection, or of several that are counted together."""

    sent: int = 0
    received: int = 0


class ClientConnection:
    """A blocking connection that counts its bytes."""

    def __init__(self, address: ServerAddress, traffic: Traffic | None = None) -> None:
        self.address = address
        self._traffic = traffic or Traffic()
        self._buffer = b""
        self._at = 0
        self.socket = self._connect()

    def _connect(self) -> socket.socket:
        address = self.address
        try:
            raw = socket.create_connection((address.host, address.port), SILENCE_S_MAX)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.tls is not None:
                raw = address.tls.wrap_socket(raw, server_hostname=address.host)
        except OSError as error:
            raise ConnectionFailed(f"{address.url} cannot be reached: {error}.") from None
        return raw

    def send(self, data: bytes) -> None:
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise ConnectionFailed(f"{self.address.url} closed the connection: {error}.") from None
        self._traffic.sent += len(data)

    def _receive(self) -> None:
        """Wait for more bytes and put them after those that are not read yet."""
        try:
            data = self.socket.recv(READ_BYTES)
        except OSError as error:
            raise ConnectionFailed(f"{self.address.url} does not answer: {error}.") from None
        if not data:
            raise ConnectionFailed(f"{self.address.url} closed the connection.")
        self._traffic.received += len(data)
        self._buffer = self._buffer[self._at :] + data
        self._at = 0

    def read(self, size: int) -> bytes:
        """Exactly this many bytes."""
        while len(self._buffer) - self._at < size:
            self._receive()
        data = self._buffer[self._at : self._at + size]
        self._at += size
        return data

    def read_until(self, mark: bytes) -> bytes:
        """Everything before this mark; the mark is taken too."""
        while (end := self._buffer.find(mark, self._at)) < 0:
            if len(self._buffer) - self._at > HEAD_BYTES_MAX:
                raise ConnectionFailed(f"{self.address.url} does not answer in HTTP.")
            self._receive()
        data = self._buffer[self._at : end]
        self._at = end + len(mark)
        return data

    def read_frame(self) -> tuple[int, bytes]:
        """First byte and payload of the next WebSocket frame."""
        while (found := next_frame(self._buffer, self._at)) is None:
            self._receive()
        first, start, self._at = found
        return first, self._buffer[start : self._at]

    def close(self) -> None:
        self.socket.close()


# --- HTTP -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HttpHead:
    """Status and headers; the body is still to be read."""

    status: int
    headers: dict[str, str]


def post(connection: ClientConnection, body: bytes, *, is_last: bool) -> HttpHead:
    """Send a request; read the head of its response."""
    address = connection.address
    close = "Connection: close\r\n" if is_last else ""
    head = (
        f"POST {address.path} HTTP/1.1\r\n{address.headers()}{close}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.send(head.encode() + body)
    return read_head(connection)


def get(address: ServerAddress, path: str) -> tuple[int, bytes]:
    """Status and body of a page, fetched on a connection of its own."""
    connection = ClientConnection(address)
    try:
        request = f"GET {path} HTTP/1.1\r\n{address.headers()}Connection: close\r\n\r\n"
        connection.send(request.encode())
        head = read_head(connection)
        return head.status, read_body(connection, head)
    finally:
        connection.close()


def read_head(connection: ClientConnection) -> HttpHead:
    first, *rest = connection.read_until(b"\r\n\r\n").decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdigit():
        raise ConnectionFailed(f"{connection.address.url} does not answer in HTTP.")
    pairs = (header.partition(":") for header in rest)
    return HttpHead(int(words[1]), {name.lower(): value.strip() for name, _, value in pairs})


def read_body(connection: ClientConnection, head: HttpHead) -> bytes:
    if head.headers.get("transfer-encoding", "").lower() != "chunked":
        return connection.read(int(head.headers.get("content-length", "0")))
    chunks = []
    while chunk := read_chunk(connection):
        chunks.append(chunk)
    return b"".join(chunks)


def read_chunk(connection: ClientConnection) -> bytes:
    """The next chunk; an empty one is the end."""
    size = int(connection.read_until(b"\r\n").partition(b";")[0], 16)
    return connection.read(size + 2)[:-2]


# --- WebSocket ------------------------------------------------------------------------------------


def upgrade_request(address: ServerAddress) -> bytes:
    """The request that makes a connection a WebSocket."""
    key = base64.b64encode(os.urandom(16)).decode()
    return (
        f"GET {address.path} HTTP/1.1\r\n{address.headers()}Upgrade: websocket\r\n"
        f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()


def open_websocket(address: ServerAddress, traffic: Traffic | None = None) -> ClientConnection:
    """Connect and upgrade."""
    connection = ClientConnection(address, traffic)
    connection.send(upgrade_request(address))
    status = read_head(connection).status
    if status != 101:
        raise ConnectionFailed(f"{address.url} refused a WebSocket with status {status}.")
    return connection


def frame(data: bytes, opcode: int = 1) -> bytes:
    """A whole message. A mask of zeros is legal and costs the client nothing."""
    size = len(data)
    if size < 126:
        head = bytes([0x80 | opcode, 0x80 | size])
    elif size < 65536:
        head = struct.pack(">BBH", 0x80 | opcode, 0xFE, size)
    else:
        head = struct.pack(">BBQ", 0x80 | opcode, 0xFF, size)
    return head + b"\0\0\0\0" + data


def next_frame(buffer: bytes, at: int) -> tuple[int, int, int] | None:
    """First byte, and start and end of the payload, of the server's frame at this place; None until it is whole."""
    if len(buffer) - at < 2:
        return None
    size = buffer[at + 1]
    start = at + 2
    if size == 126:
        size = int.from_bytes(buffer[at + 2 : at + 4], "big")
        start = at + 4
    elif size == 127:
        size = int.from_bytes(buffer[at + 2 : at + 10], "big")
        start = at + 10
    return None if len(buffer) < start + size else (buffer[at], start, start + size)


def read_message(connection: ClientConnection) -> bytes:
    """The next text message; pings are answered on the way."""
    parts: list[bytes] = []
    while True:
        first, data = connection.read_frame()
        match first & 0x0F:
            case 0 | 1 | 2:
                parts.append(data)
                if first & 0x80:
                    return data if len(parts) == 1 else b"".join(parts)
            case 8:
                url = connection.address.url
                reason = data[2:].decode()
                raise ConnectionFailed(f"{url} closed the WebSocket: {reason!r}.")
            case 9:
                connection.send(frame(data, 10))
            case _:
                pass
