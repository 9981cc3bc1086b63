"""What does the network add? A relay in front of a loopback port: TLS in user space, and a delay on every byte.

    python -m segue_bench.relay PORT RTT_S [CERTIFICATE]

Each direction takes half of the round trip. A connection costs one round trip more before its first byte, as TCP
does, and with TLS 1.3 a second one. Order is kept, bandwidth is not limited. It runs in a process of its own, so that
neither client nor server pays for it; a timer of an event loop is accurate to about a millisecond.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path

READ_BYTES = 1 << 16
# What may be on its way in one direction: much bandwidth, and a bound on our memory.
FLYING_MAX = 4096


class DelayedPipe:
    """One direction of a connection: what comes in leaves again, later."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._delay_s = delay_s
        self._flying: deque[tuple[float, bytes]] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._is_over = False

    async def run(self) -> None:
        """Carry bytes until one end has closed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take())
            group.create_task(self._give())

    async def _take(self) -> None:
        loop = asyncio.get_running_loop()
        data = b"-"
        while data:
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError:
                data = b""
            while len(self._flying) >= FLYING_MAX:
                self._room.clear()
                await self._room.wait()
            if self._is_over:
                break
            self._flying.append((loop.time() + self._delay_s, data))
            self._news.set()

    async def _give(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._flying:
                self._news.clear()
                await self._news.wait()
            due, data = self._flying.popleft()
            self._room.set()
            if (wait_s := due - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            if not data:
                break
            try:
                self._writer.write(data)
                await self._writer.drain()
            except OSError:
                break
        self._writer.close()
        # The other end will notice and close too; what is still on its way cannot be delivered.
        self._is_over = True
        self._flying.clear()
        self._room.set()


class DelayRelay:
    """Accepts connections and forwards each to the server's port."""

    def __init__(self, port: int, rtt_s: float, certificate: Path | None) -> None:
        self._port = port
        self._rtt_s = rtt_s
        self._tls: ssl.SSLContext | None = None
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(certificate)

    async def serve(self) -> None:
        """Listen on a free port, print it, and run until the process ends."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        print(f"relay at {server.sockets[0].getsockname()[1]}", flush=True)
        async with server:
            await server.serve_forever()

    async def _accept(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, forth = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            back.close()
            return
        # The handshakes of TCP and TLS, which on loopback take no time.
        await asyncio.sleep(self._rtt_s * (2 if self._tls else 1))
        half_s = self._rtt_s / 2
        async with asyncio.TaskGroup() as group:
            group.create_task(DelayedPipe(near, forth, half_s).run())
            group.create_task(DelayedPipe(far, back, half_s).run())


def main(arguments: list[str]) -> None:
    port, rtt_s, *certificate = arguments
    relay = DelayRelay(int(port), float(rtt_s), Path(certificate[0]) if certificate else None)
    with suppress(KeyboardInterrupt):
        asyncio.run(relay.serve())


if __name__ == "__main__":
    main(sys.argv[1:])
