"""Servers that lie: raw answers on a loopback port, for the commands that read them."""

from __future__ import annotations

import base64
import hashlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from tests.support import WAIT_S

MODELS = b'{"data":[{"id":"m"}]}'
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


@dataclass
class Liar:
    """What it answers with, whatever it is asked: once, or again and again until the client has left."""

    head: bytes
    again: bytes = b""
    # Frames, once a WebSocket is open: then the list of models is an honest one.
    frames: bytes = b""
    frames_again: bytes = b""
    heads: list[bytes] = field(default_factory=list)
    url: str = ""

    def serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            client.settimeout(WAIT_S)
            head = b""
            while b"\r\n\r\n" not in head:
                part = client.recv(65_536)
                if not part:
                    return
                head += part
            self.heads.append(head)
            if b"upgrade: websocket" in head.lower():
                self._open(client, head)
                first, again = self.frames, self.frames_again
            elif self.frames or self.frames_again:
                first, again = ok(MODELS), b""
            else:
                first, again = self.head, self.again
            client.sendall(first)
            while again:
                client.sendall(again)
            client.shutdown(socket.SHUT_WR)
            client.recv(65_536)

    def _open(self, client: socket.socket, head: bytes) -> None:
        lines = (line.partition(b":") for line in head.split(b"\r\n"))
        key = next(
            value.strip() for name, _, value in lines if name.lower() == b"sec-websocket-key"
        )
        accept = base64.b64encode(hashlib.sha1(key + _GUID).digest())
        client.sendall(
            b"HTTP/1.1 101 Switching\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-accept: %b\r\n\r\n" % accept
        )
        client.recv(65_536)


def ok(body: bytes) -> bytes:
    """An honest head around it."""
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def frame(text: bytes) -> bytes:
    """A WebSocket message, short or long."""
    size = len(text)
    short = bytes([size]) if size < 126 else b"\x7e" + size.to_bytes(2, "big")
    return b"\x81" + short + text


@contextmanager
def lying(liar: Liar) -> Iterator[Liar]:
    """Serves it while inside."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        liar.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    threading.Thread(target=liar.serve, args=(client,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield liar
        finally:
            listener.shutdown(socket.SHUT_RDWR)
