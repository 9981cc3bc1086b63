"""The proxy in one process: slow clients, idle connections, both ends; the rest is in tests/escapes/test_network.py."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from segue.egress import proxy as proxy_module
from segue.egress.proxy import EgressProxy
from segue.web.fetch import Fetcher, Policy
from tests.support import until

HOST = "allowed.example.com"


class Near:
    """A proxy with one door, and a server behind it that echoes lines."""

    def __init__(self, proxy: EgressProxy, path: str) -> None:
        self.proxy = proxy
        self.path = path
        self.open_outside = 0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.path)


@asynccontextmanager
async def near_in(
    folder: Path, idle_s: float = 30, head_s: float = 30, **more: int
) -> AsyncIterator[Near]:
    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near.open_outside += 1
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n2\r\nhi\r\n"
            )
            await reader.read()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            near.open_outside -= 1
            writer.close()

    async def resolve(host: str) -> list[str]:
        return ["93.184.216.34"]

    async with await asyncio.start_server(on_connection, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]

        async def dial(
            address: str, asked: int
        ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await proxy_module.dial("127.0.0.1", port)

        fetcher = Fetcher(Policy("public"), resolve)
        proxy = EgressProxy((HOST,), fetcher, dial=dial, idle_s=idle_s, head_s=head_s, **more)
        near = Near(proxy, str(folder / "door"))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(near.path)
        await proxy.open(1, "cntr_a", (HOST,), listener)
        try:
            yield near
        finally:
            await proxy.close(1)
            fetcher.close()


REQUEST = f"GET http://{HOST}/ HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()


async def test_client_that_sends_no_head_is_closed(tmp_path: Path) -> None:
    async with near_in(tmp_path, head_s=0.05) as near:
        reader, writer = await near.connect()
        writer.write(b"GET http://")
        assert await reader.read() == b""
        writer.close()
        await until(lambda: not near.proxy.doors[1].connections)


async def test_connection_on_which_nothing_moves_is_closed_on_both_sides(tmp_path: Path) -> None:
    async with near_in(tmp_path, idle_s=0.1) as near:
        reader, writer = await near.connect()
        writer.write(REQUEST)
        # What has come is passed on at once, and the rest never comes.
        assert (await reader.read()).endswith(b"2\r\nhi\r\n")
        await until(lambda: near.open_outside == 0)
        writer.close()


async def test_door_that_closes_ends_what_goes_through(tmp_path: Path) -> None:
    async with near_in(tmp_path) as near:
        reader, writer = await near.connect()
        writer.write(REQUEST)
        await reader.readuntil(b"hi")
        await near.proxy.close(1)
        assert await reader.read() == b"\r\n"
        await until(lambda: near.open_outside == 0)
        writer.close()


async def test_more_connections_than_a_door_may_have_are_closed(tmp_path: Path) -> None:
    async with near_in(tmp_path) as near:
        held = [await near.connect() for _ in range(proxy_module.DOOR_CONNECTIONS_MAX)]
        await until(lambda: len(near.proxy.doors[1].connections) == len(held))
        reader, writer = await near.connect()
        assert await reader.read() == b""
        for _, each in (*held, (reader, writer)):
            each.close()
        await until(lambda: not near.proxy.doors[1].connections)


async def test_doors_that_take_all_they_get_leave_some_for_the_next_one(tmp_path: Path) -> None:
    async with near_in(tmp_path, connections_max=64) as near:
        held = []
        for number in range(2, 14):
            listener = socket.socket(socket.AF_UNIX)
            near.path = str(tmp_path / f"door-{number}")
            listener.bind(near.path)
            await near.proxy.open(number, "cntr_b", (HOST,), listener)
            first, *more = [await near.connect() for _ in range(16)]
            first[1].write(b"GET")
            # Those that are too many are closed, the first one is not.
            assert await more[-1][0].read() == b""
            assert near.proxy.doors[number].connections
            held += [first, *more]
        for _, writer in held:
            writer.close()
        for number in range(2, 14):
            await near.proxy.close(number)


async def test_operators_list_holds_whatever_a_door_says(tmp_path: Path) -> None:
    async with near_in(tmp_path) as near:
        near.proxy.doors[1].domains = ("other.example.com",)
        reader, writer = await near.connect()
        writer.write(REQUEST.replace(b"allowed", b"other"))
        assert (await reader.read()).startswith(b"HTTP/1.1 403 ")
        writer.close()
