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
from contextlib import suppress
from pathlib import Path

from segue.printable import say

READ_BYTES = 1 << 16
# What may be on its way in one direction: much bandwidth, and a bound on our memory.
FLYING_MAX = 4096


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """One direction of a connection: what comes in leaves again, later, until one end has closed."""
    loop = asyncio.get_running_loop()
    flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(FLYING_MAX)

    async def receive() -> None:
        data = b"-"
        while data:
            try:
                data = await reader.read(READ_BYTES)
            except OSError:
                data = b""
            await flying.put((loop.time() + delay_s, data))

    receiving = loop.create_task(receive())
    with suppress(OSError):
        while True:
            due, data = await flying.get()
            if (wait_s := due - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            if not data:
                break
            writer.write(data)
            await writer.drain()
    # The other end will notice and close too; what is still on its way cannot be delivered.
    receiving.cancel()
    writer.close()


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
        say(f"relay at {server.sockets[0].getsockname()[1]}")
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
            group.create_task(carry(near, forth, half_s))
            group.create_task(carry(far, back, half_s))


def main(arguments: list[str]) -> None:
    port, rtt_s, *certificate = arguments
    relay = DelayRelay(int(port), float(rtt_s), Path(certificate[0]) if certificate else None)
    with suppress(KeyboardInterrupt):
        asyncio.run(relay.serve())


if __name__ == "__main__":
    main(sys.argv[1:])
