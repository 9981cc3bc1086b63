"""The other end of a measurement: a server process whose CPU can be read, and a client that costs little.

The client speaks WebSocket by hand on a blocking socket, so that what is measured is the server.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TERMINAL = tuple(
    b'{"type":"%b"' % kind
    for kind in (b"response.completed", b"response.failed", b"response.incomplete", b"error")
)


@dataclass(frozen=True)
class Server:
    """A `segue serve` on a free port."""

    port: int
    pid: int

    def cpu_s(self) -> float:
        """Processor time of the process so far, its threads included."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def rss_bytes(self) -> int:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def server(
    script: Mapping[str, Any] | None = None, *flags: str, module: str = "segue.cli"
) -> Iterator[Server]:
    """Run a server, pinned to the first core where there are two; another module may change it before it serves."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, "serve", "--port", "0", *flags]
        if "--engine" not in flags:
            command += ["--engine", "scripted"]
        if "--store" not in flags:
            command += ["--store", f"sqlite:///{folder}/bench.db"]
        if script is not None:
            path = Path(folder) / "script.json"
            path.write_text(json.dumps(script))
            command += ["--script", str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            found = re.search(r" at http://\S+:(\d+)/v1", line)
            assert found, line
            if (os.cpu_count() or 1) > 1 and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(process.pid, {0})
                os.sched_setaffinity(0, {1})
            yield Server(int(found[1]), process.pid)
        finally:
            process.terminate()
            process.wait(30)
            process.stdout.close()


class Client:
    """One WebSocket: whole messages in, whole turns out."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            (
                f"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
                f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
            ).encode()
        )
        self._buffer, self._at = b"", 0
        while b"\r\n\r\n" not in self._buffer:
            more = self._socket.recv(65536)
            assert more, "the server closed the connection"
            self._buffer += more
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        assert b" 101 " in head, head

    def send(self, **event: Any) -> int:
        """A `response.create`; its size."""
        data = json.dumps({"type": "response.create", "model": "scripted", **event}).encode()
        size = len(data)
        head = b"\x81" + (
            bytes([0x80 | size])
            if size < 126
            else struct.pack(">BH", 0xFE, size)
            if size < 65536
            else struct.pack(">BQ", 0xFF, size)
        )
        # A mask of zeros is legal and costs the client nothing.
        self._socket.sendall(head + b"\0\0\0\0" + data)
        return size

    def receive(self) -> list[bytes]:
        """The events of one turn, undecoded, up to its terminal one."""
        found: list[bytes] = []
        while not found or not found[-1].startswith(TERMINAL):
            found.append(self.next_event())
        return found

    def turn(self, **event: Any) -> tuple[dict[str, Any], int]:
        """One whole turn: its terminal event, and how many events there were."""
        self.send(**event)
        events = self.receive()
        return json.loads(events[-1]), len(events)

    def next_event(self) -> bytes:
        """The next text message; the server never fragments."""
        while True:
            buffer, at = self._buffer, self._at
            if len(buffer) - at >= 10 or (len(buffer) - at >= 2 and buffer[at + 1] < 126):
                size, start = buffer[at + 1], at + 2
                if size == 126:
                    size, start = int.from_bytes(buffer[at + 2 : at + 4], "big"), at + 4
                elif size == 127:
                    size, start = int.from_bytes(buffer[at + 2 : at + 10], "big"), at + 10
                if len(buffer) >= start + size:
                    self._at = start + size
                    if buffer[at] == 0x81:
                        return buffer[start : start + size]
                    continue
            more = self._socket.recv(1 << 18)
            assert more, "the server closed the connection"
            self._buffer, self._at = buffer[at:] + more, 0

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
