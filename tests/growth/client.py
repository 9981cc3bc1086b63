"""A client that costs little: blocking sockets, frames by hand, nothing decoded but what is asked for."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.support import MODEL, Served

WAIT_S = 120
TERMINAL = (b'"response.completed"', b'"response.failed"', b'"response.incomplete"', b'"error"')
Json = Any


class Client:
    """Speaks to one server."""

    def __init__(self, served: Served) -> None:
        self.port = served.port

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), WAIT_S)

    def head(self, method: str, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        """The head of a request without the empty line after it."""
        named = {"Host": f"127.0.0.1:{self.port}", "Connection": "close", **(headers or {})}
        lines = [
            f"{method} {path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in named.items()),
        ]
        return "\r\n".join([*lines, ""]).encode()

    def request(
        self,
        method: str,
        path: str,
        body: bytes | Json = b"",
        headers: Mapping[str, str] | None = None,
        status: int = 200,
    ) -> bytes:
        """The body of the answer, whose status must be this."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = self.head(method, path, headers) + b"Content-Length: %d\r\n\r\n" % len(data)
        return self.exchange([head + data], status)

    def exchange(self, chunks: list[bytes], status: int) -> bytes:
        """Send these bytes in these pieces; the body of the answer."""
        with self.connect() as connection:
            for chunk in chunks:
                connection.sendall(chunk)
            received = bytearray()
            while part := connection.recv(1 << 20):
                received += part
        head, _, rest = bytes(received).partition(b"\r\n\r\n")
        assert head.split(b" ")[1] == b"%d" % status, received[:1000]
        return rest

    def post(self, path: str, body: bytes | Json, status: int = 200) -> bytes:
        return self.request("POST", path, body, status=status)

    def turn(self, status: int = 200, **fields: Json) -> Json:
        """One turn over HTTP; the response."""
        return json.loads(self.post("/v1/responses", create(**fields), status))

    @contextmanager
    def socket(self, headers: Mapping[str, str] | None = None) -> Iterator[WebSocket]:
        """An open WebSocket."""
        with self.connect() as connection:
            upgrade = {
                "Connection": "Upgrade",
                "Upgrade": "websocket",
                "Sec-WebSocket-Version": "13",
                "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
            }
            head = self.head("GET", "/v1/responses", {**upgrade, **(headers or {})})
            connection.sendall(head + b"\r\n")
            received = b""
            while b"\r\n\r\n" not in received:
                received += connection.recv(65536)
            assert received.startswith(b"HTTP/1.1 101"), received
            yield WebSocket(connection)


class WebSocket:
    """One WebSocket after its upgrade."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def send(self, data: bytes) -> None:
        """These bytes as they are."""
        self._connection.sendall(data)

    def message(self) -> bytes:
        """The next text message."""
        while True:
            opcode, payload = self._frame()
            if opcode == 1:
                return payload
            assert opcode in (9, 10), (opcode, payload)

    def ended(self, count: int = 1) -> None:
        """Wait for so many terminal events or errors."""
        while count:
            message = self.message()
            count -= any(kind in message[:200] for kind in TERMINAL)

    def closed(self) -> int:
        """Wait for the close frame; its code."""
        while True:
            opcode, payload = self._frame()
            if opcode == 8:
                return int.from_bytes(payload[:2], "big")

    def _frame(self) -> tuple[int, bytes]:
        first, length = self._take(2)
        if length == 126:
            (length,) = struct.unpack("!H", self._take(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", self._take(8))
        return first & 15, self._take(length)

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            part = self._connection.recv(1 << 18)
            assert part, "the server has closed the connection"
            self._buffer += part
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def frame(payload: bytes, opcode: int = 1, *, is_last: bool = True) -> bytes:
    """A masked frame; with a mask of zeros the payload stays as it is."""
    first = (0x80 if is_last else 0) | opcode
    size = len(payload)
    if size < 126:
        head = struct.pack("!BB", first, 0x80 | size)
    elif size < 65536:
        head = struct.pack("!BBH", first, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", first, 0x80 | 127, size)
    return head + b"\0\0\0\0" + payload


def create(**fields: Json) -> bytes:
    """A create; unstored, with the shortest answer, unless it says otherwise."""
    usual = {"model": MODEL, "store": False, "max_output_tokens": 16, "input": "Hello."}
    return json.dumps({**usual, **fields}).encode()


def create_frame(**fields: Json) -> bytes:
    return frame(create(type="response.create", **fields))


def unique() -> str:
    return os.urandom(16).hex()
