"""A TCP proxy between a client and Segue: it sees what clients really send, and can break connections.

It takes the offer of compression out of a handshake, so that frames can be read; everything else passes as it is.
While there is no backend, connections wait, as behind a balancer.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

# The first event of a response, or the beginning of a whole one, on each API.
CREATED = re.compile(
    rb'"type":"response\.created"|"type":"message","role":"assistant"'
    rb'|"delta":\{"role":"assistant"|"object":"chat\.completion"'
)
CREATED_BYTES_MAX = 40
CHUNK = 1 << 16
BACKEND_S_MAX = 30


@dataclass
class Proxy:
    """What passed, and what to do about it."""

    backend: int | None
    port: int = 0
    # Statuses of handshakes, in order: 101 is an open socket.
    handshakes: list[int] = field(default_factory=list)
    # Client frames: the number of the socket, and the event.
    frames: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    # The first lines of requests that are not upgrades; those on a kept connection are seen as well.
    requests: list[str] = field(default_factory=list)
    created: int = 0
    # Responses, counted over all connections from one, that are cut right behind their first event.
    cut_at: frozenset[int] = frozenset()
    on_created: Callable[[int], None] = lambda number: None
    has_backend: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def sockets(self) -> int:
        return self.handshakes.count(101)

    def point(self, port: int | None) -> None:
        """Send new connections there; with nowhere to go they wait."""
        self.backend = port
        if port is None:
            self.has_backend.clear()
        else:
            self.has_backend.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        upward: asyncio.StreamWriter | None = None
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            async with asyncio.timeout(BACKEND_S_MAX):
                await self.has_backend.wait()
            assert self.backend is not None
            downward, upward = await asyncio.open_connection("127.0.0.1", self.backend)
            is_upgrade = re.search(rb"(?im)^upgrade: *websocket", head) is not None
            upward.write(re.sub(rb"(?im)^sec-websocket-extensions:.*\r\n", b"", head))
            if is_upgrade:
                answer = await downward.readuntil(b"\r\n\r\n")
                self.handshakes.append(int(answer.split()[1]))
                writer.write(answer)
                observe = Frames(self, len(self.handshakes)).feed
            else:
                self.note_request(head)
                observe = self.note_request
            await self._pump(reader, writer, downward, upward, observe)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            pass
        finally:
            for one in (writer, upward):
                if one is not None:
                    one.transport.abort()

    def note_request(self, data: bytes) -> None:
        self.requests += [
            one.decode() for one in re.findall(rb"(?m)^((?:POST|GET) \S+) HTTP/1.1\r$", data)
        ]

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        downward: asyncio.StreamReader,
        upward: asyncio.StreamWriter,
        observe: Callable[[bytes], None],
    ) -> None:
        async def up() -> None:
            while data := await reader.read(CHUNK):
                observe(data)
                upward.write(data)
                await upward.drain()
            upward.write_eof()

        async def down() -> None:
            tail = b""
            while data := await downward.read(CHUNK):
                passed, is_cut = self._watch(tail, data)
                writer.write(passed)
                await writer.drain()
                if is_cut:
                    return
                tail = (tail + data)[-CREATED_BYTES_MAX:]
            # What has passed is read by the client before it sees the end.
            writer.write_eof()

        upping = asyncio.create_task(up())
        try:
            await down()
        finally:
            upping.cancel()
            await asyncio.gather(upping, return_exceptions=True)

    def _watch(self, tail: bytes, data: bytes) -> tuple[bytes, bool]:
        """How much of this may pass, and whether the connection ends there."""
        for found in CREATED.finditer(tail + data):
            # What ends in the part before this one has been counted.
            if found.end() <= len(tail):
                continue
            self.created += 1
            self.on_created(self.created)
            if self.created in self.cut_at:
                return data[: max(found.end() - len(tail), 0)], True
        return data, False


class Frames:
    """Reads the frames of a client, masked as they are."""

    def __init__(self, proxy: Proxy, socket: int) -> None:
        self._proxy = proxy
        self._socket = socket
        self._rest = b""
        self._message = b""

    def feed(self, data: bytes) -> None:
        self._rest += data
        while (frame := _frame(self._rest)) is not None:
            opcode, is_last, payload, size = frame
            self._rest = self._rest[size:]
            if opcode in (0, 1):
                self._message += payload
                if is_last:
                    self._proxy.frames.append((self._socket, json.loads(self._message)))
                    self._message = b""


def _frame(data: bytes) -> tuple[int, bool, bytes, int] | None:
    """The first whole frame: its kind, whether its message ends, its payload and its size."""
    if len(data) < 2:
        return None
    length, at = data[1] & 127, 2
    if length > 125:
        width = 2 if length == 126 else 8
        if len(data) < at + width:
            return None
        length, at = int.from_bytes(data[at : at + width]), at + width
    end = at + 4 + length
    if len(data) < end:
        return None
    mask = data[at : at + 4] * (length // 4 + 1)
    payload = int.from_bytes(data[at + 4 : end]) ^ int.from_bytes(mask[:length])
    return data[0] & 15, bool(data[0] & 128), payload.to_bytes(length), end


@asynccontextmanager
async def proxied(backend: int | None, **options: Any) -> AsyncIterator[Proxy]:
    """A proxy in front of a port."""
    proxy = Proxy(backend, **options)
    proxy.point(backend)
    tasks: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(proxy.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(begin, "127.0.0.1", 0, limit=CHUNK)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
