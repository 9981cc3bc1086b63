"""How cheap could a gateway be? One that does no work: a chunk in, its words out as events, nothing else.

The floor beneath `python -m bench paced`: one process with uvloop, a WebSocket on one side, `/v1/chat/completions` on
the other, no parser, no state, no checks. What it costs is the event loop and the kernel. It serves one request a
connection, and only that benchmark. Run as a process of its own (`python -m bench.bare ENGINE_PORT`), it prints its
port.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import sys
from typing import cast

import uvloop

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
BODY = json.dumps(
    {"model": "scripted", "messages": [{"role": "user", "content": "Tell me."}], "stream": True}
).encode()
ASKING = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bare\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)
WORD = re.compile(rb'"content":"([^"]+)"')
DELTA = (
    b'{"type":"response.output_text.delta","item_id":"msg_0123456789abcdef0123456789abcdef",'
    b'"output_index":0,"content_index":0,"logprobs":[],"delta":"%b","sequence_number":%d}'
)
LAST = b'{"type":"response.completed"}'


def frame(message: bytes) -> bytes:
    """One text frame of a server."""
    size = len(message)
    header = bytes((0x81, size)) if size < 126 else b"\x81\x7e" + size.to_bytes(2, "big")
    return header + message


class Engine(asyncio.Protocol):
    """The engine's side of one answer."""

    def __init__(self, client: asyncio.Transport) -> None:
        self._client = client
        self._number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(ASKING)

    def data_received(self, data: bytes) -> None:
        words = WORD.findall(data)
        frames = [frame(DELTA % (word, self._number + at)) for at, word in enumerate(words)]
        self._number += len(words)
        if b"[DONE]" in data:
            frames.append(frame(LAST))
        self._client.write(b"".join(frames))


class Client(asyncio.Protocol):
    """The client's side: an upgrade, then one request."""

    def __init__(self, engine_port: int) -> None:
        self._engine_port = engine_port
        self._is_open = False
        self._asking: asyncio.Task[object] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._is_open:
            if self._asking is None:
                self._asking = asyncio.ensure_future(self._ask())
            return
        self._is_open = True
        key = re.search(rb"(?i)sec-websocket-key: *(\S+)", data)
        assert key is not None, "this is no upgrade"
        accepted = base64.b64encode(hashlib.sha1(key[1] + GUID).digest())
        self._transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: %b\r\n\r\n" % accepted
        )

    async def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(
            lambda: Engine(self._transport), "127.0.0.1", self._engine_port
        )


async def serve(engine_port: int) -> None:
    """Print the port, and serve until the process ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(engine_port), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
