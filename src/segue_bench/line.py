"""How do bytes leave and arrive on the client's side? One connection, spoken with as little work as possible.

A client that works hard would be measured itself. So this is a plain blocking socket, frames and chunks are cut by
hand, and of all events only the last one of a turn is decoded. What it costs all the same is the client's share.
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


class LineFailed(Exception):
    """The server cannot be spoken to, or says something that is not HTTP or a WebSocket."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and how to be let in."""

    url: str
    key: str = ""
    tls: ssl.SSLContext | None = None

    @property
    def host(self) -> str:
        """Its host name."""
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def port(self) -> int:
        """Its port."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def path(self) -> str:
        """Where the responses are: `/v1` is added unless the address has it."""
        path = urlsplit(self.url).path.rstrip("/")
        return f"{path if path.endswith('/v1') else path + '/v1'}/responses"

    def headers(self) -> str:
        """What every request carries."""
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        return f"Host: {self.host}:{self.port}\r\n{key}"


class Line:
    """A connection that counts its bytes."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.bytes_sent = 0
        self.bytes_received = 0
        self._buffer = b""
        self._at = 0
        self._socket = self._connect()

    def _connect(self) -> socket.socket:
        address = self.address
        try:
            raw = socket.create_connection((address.host, address.port), SILENCE_S_MAX)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.tls is not None:
                raw = address.tls.wrap_socket(raw, server_hostname=address.host)
        except OSError as error:
            raise LineFailed(f"{address.url} cannot be reached: {error}.") from None
        return raw

    def send(self, data: bytes) -> None:
        """All of these bytes."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise LineFailed(f"{self.address.url} hung up: {error}.") from None
        self.bytes_sent += len(data)

    def _more(self) -> None:
        """Wait for more bytes and put them behind those that are not read yet."""
        try:
            data = self._socket.recv(READ_BYTES)
        except OSError as error:
            raise LineFailed(f"{self.address.url} is silent: {error}.") from None
        if not data:
            raise LineFailed(f"{self.address.url} closed the connection.")
        self.bytes_received += len(data)
        self._buffer = self._buffer[self._at :] + data
        self._at = 0

    def read(self, size: int) -> bytes:
        """Exactly so many bytes."""
        while len(self._buffer) - self._at < size:
            self._more()
        data = self._buffer[self._at : self._at + size]
        self._at += size
        return data

    def read_until(self, mark: bytes) -> bytes:
        """Everything before this mark; the mark is taken too."""
        while (end := self._buffer.find(mark, self._at)) < 0:
            if len(self._buffer) - self._at > HEAD_BYTES_MAX:
                raise LineFailed(f"{self.address.url} does not speak HTTP.")
            self._more()
        data = self._buffer[self._at : end]
        self._at = end + len(mark)
        return data

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


# --- HTTP -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and headers; the body is still to be read."""

    status: int
    headers: dict[str, str]

    @property
    def is_chunked(self) -> bool:
        """Whether the body comes in chunks."""
        return self.headers.get("transfer-encoding", "").lower() == "chunked"


def post(line: Line, body: bytes, *, is_last: bool) -> Answer:
    """Send a request; the head of its answer."""
    address = line.address
    close = "Connection: close\r\n" if is_last else ""
    head = (
        f"POST {address.path} HTTP/1.1\r\n{address.headers()}{close}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    line.send(head.encode() + body)
    return read_head(line)


def get(address: Address, path: str) -> tuple[int, bytes]:
    """Fetch a page on a connection of its own."""
    line = Line(address)
    try:
        line.send(f"GET {path} HTTP/1.1\r\n{address.headers()}Connection: close\r\n\r\n".encode())
        answer = read_head(line)
        return answer.status, read_body(line, answer)
    finally:
        line.close()


def read_head(line: Line) -> Answer:
    """Status and headers."""
    first, *rest = line.read_until(b"\r\n\r\n").decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdigit():
        raise LineFailed(f"{line.address.url} does not speak HTTP.")
    pairs = (one.partition(":") for one in rest)
    return Answer(int(words[1]), {name.lower(): value.strip() for name, _, value in pairs})


def read_body(line: Line, answer: Answer) -> bytes:
    """The whole body."""
    if not answer.is_chunked:
        return line.read(int(answer.headers.get("content-length", "0")))
    chunks = []
    while chunk := read_chunk(line):
        chunks.append(chunk)
    return b"".join(chunks)


def read_chunk(line: Line) -> bytes:
    """The next chunk; nothing is the end."""
    size = int(line.read_until(b"\r\n").partition(b";")[0], 16)
    return line.read(size + 2)[:-2]


# --- WebSocket ------------------------------------------------------------------------------------


def upgrade(line: Line) -> None:
    """Make a WebSocket of it."""
    address = line.address
    key = base64.b64encode(os.urandom(16)).decode()
    line.send(
        (
            f"GET {address.path} HTTP/1.1\r\n{address.headers()}Upgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
        ).encode()
    )
    answer = read_head(line)
    if answer.status != 101:
        raise LineFailed(f"{address.url} refused a WebSocket with status {answer.status}.")


def frame(data: bytes, kind: int = 1) -> bytes:
    """A whole message. A mask of zeros is legal and costs the client nothing."""
    size = len(data)
    if size < 126:
        head = bytes([0x80 | kind, 0x80 | size])
    elif size < 65536:
        head = struct.pack(">BBH", 0x80 | kind, 0xFE, size)
    else:
        head = struct.pack(">BBQ", 0x80 | kind, 0xFF, size)
    return head + b"\0\0\0\0" + data


def read_message(line: Line) -> bytes:
    """The next text message; pings are answered on the way."""
    parts: list[bytes] = []
    while True:
        first, size = line.read(2)
        if size == 126:
            size = int.from_bytes(line.read(2), "big")
        elif size == 127:
            size = int.from_bytes(line.read(8), "big")
        data = line.read(size)
        match first & 0x0F:
            case 0 | 1 | 2:
                parts.append(data)
                if first & 0x80:
                    return data if len(parts) == 1 else b"".join(parts)
            case 8:
                raise LineFailed(f"{line.address.url} closed the socket: {data[2:].decode()!r}.")
            case 9:
                line.send(frame(data, 10))
            case _:
                pass
