"""Peers that are slow, endless or deaf are cut, each in its own way, and say nothing of it to others."""

from __future__ import annotations

import asyncio

import pytest
import websockets

from tests.support import MODEL, WAIT_S, Served, fetch, serving, wire

# More than the buffers of a loopback connection take.
SIZE = 16_000_000


async def read_all(served: Served, *parts: bytes) -> bytes:
    """Send these and read until the server ends the connection."""
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


async def test_head_that_does_not_come_is_not_waited_for() -> None:
    async with serving(handshake_s_max=0.05) as served:
        for start in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-A: "):
            answer = await read_all(served, start)
            assert answer.startswith(b"HTTP/1.1 408 "), start
            assert b'"code":"request_timeout"' in answer
        assert (await fetch(served, "GET", "/health")).status == 200


async def test_head_of_a_second_request_is_not_waited_for_either() -> None:
    async with serving(handshake_s_max=0.1) as served:
        whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        answer = await read_all(served, whole + b"GET /health HT")
        assert b"200 OK" in answer
        assert b"408 Request Timeout" in answer


async def test_endless_head_is_refused() -> None:
    async with serving() as served:
        filler = b"X-A: " + b"a" * 1_000 + b"\r\n"
        answer = await read_all(served, b"GET / HTTP/1.1\r\n" + filler * 400)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
        answer = await read_all(served, b"GET / HTTP/1.1\r\nX-A: " + b"a" * 70_000)
        assert answer.startswith(b"HTTP/1.1 431 ")


async def test_body_that_trickles_is_not_waited_for() -> None:
    async with serving(body_s_max=0.1) as served:
        head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
        answer = await read_all(served, head + b'{"model"')
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer
        assert b"connection: close" in answer


async def test_client_that_asks_and_does_not_read_is_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * SIZE}
    asked = {"model": MODEL, "input": [{"role": "user", "content": [picture]}]}
    async with serving(write_s_max=0.2) as served:
        made = await fetch(served, "POST", "/v1/responses", asked)
        path = f"/v1/responses/{made.json['id']}/input_items"
        lines = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        async with asyncio.timeout(WAIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1_024)
            writer.write(lines.encode())
            while "does not read" not in caplog.text:  # noqa: ASYNC110 (nobody sets an event)
                await asyncio.sleep(0.02)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(SIZE)
            writer.close()


async def test_one_connection_too_many_is_told_so_in_a_few_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("segue.port.SPARE_CONNECTIONS", 0)
    async with serving(connections_max=1) as served, wire(served):
        answer = await read_all(served)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: " in answer


@pytest.mark.parametrize("flood", ["pings", "fragments", "messages"])
async def test_flood_of_frames_ends_the_connection_and_no_other(flood: str) -> None:
    async with (
        serving(frames_per_s=10, frames_burst_max=50) as served,
        wire(served) as healthy,
        wire(served) as bad,
    ):
        for _ in range(49):
            await bad.socket.ping()
        codes = []
        with pytest.raises(websockets.ConnectionClosed):
            for _ in range(400):
                if flood == "pings":
                    await bad.socket.ping()
                elif flood == "fragments":
                    await bad.socket.send(iter(["", "", ""]))
                else:
                    await bad.socket.send("{}")
            while True:
                codes.append((await bad.next())["error"]["code"])
        assert bad.socket.close_code == 1008
        assert (await healthy.turn(input="hi", store=False))["type"] == "response.completed"
        if flood == "pings":
            assert codes == ["rate_limit_exceeded"]
