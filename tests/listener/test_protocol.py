"""Peers that are slow, endless or deaf are cut, each in its own way, and say nothing of it to others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import websockets

from segue.accounts.hashes import issue_key
from segue.listener.protocol import LISTENERS, UPGRADE_S_MAX, UPGRADES_MAX, UpgradeQueue
from tests.support import MODEL, WAIT_S, Served, fetch, serving, until, wire

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


def post(*headers: str) -> bytes:
    lines = ["POST /v1/responses HTTP/1.1", "Host: localhost", *headers, "", ""]
    return "\r\n".join(lines).encode()


ASK = json.dumps({"model": MODEL, "input": "x"}).encode()
CHUNKED = post("Transfer-Encoding: chunked", "Connection: close")


def in_chunks(*chunks: bytes, trailers: bytes = b"") -> bytes:
    parts = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
    return b"".join(parts) + b"0\r\n" + trailers + b"\r\n"


ENDLESS = {
    "trailers": b"0\r\n" + b"X-A: aaaaaaaaaaaaaaaa\r\n" * 100_000,
    "one trailer": b"0\r\nX-A: " + b"a" * 2_000_000,
    "extension": b"1;" + b"a" * 2_000_000,
    "empty lines": b"0\r\n\r\n" + b"\r\n" * 1_000_000,
}


async def test_endless_bytes_that_are_no_body_are_refused() -> None:
    """docs/inside/hazards.md T7: none of them is kept, and no key is needed to send them."""
    async with serving(auth="keys") as served:
        for name, filler in ENDLESS.items():
            answer = await read_all(served, post("Transfer-Encoding: chunked") + filler)
            is_refused = b"431 Request Header Fields Too Large" in answer
            assert answer == b"" or is_refused, name
        assert (await fetch(served, "GET", "/health")).status == 200


async def test_trailer_is_no_header() -> None:
    """A proxy that looks at headers in front of us has not seen it (RFC 9110, 6.5.1)."""
    async with serving(auth="keys") as served:
        app = served.app
        _, secret = await issue_key(app.state.store.keys, app.state.hashes, "test", "ada")
        key = f"Authorization: Bearer {secret}"
        body = in_chunks(ASK, trailers=key.encode() + b"\r\n")
        assert b" 401 " in await read_all(served, CHUNKED + body)
        head = post("Transfer-Encoding: chunked", "Connection: close", key)
        for trailer in (b"Content-Encoding: gzip\r\n", b"Idempotency-Key: one\r\n"):
            answers = [
                await read_all(served, head + in_chunks(ASK, trailers=trailer)) for _ in range(2)
            ]
            first, second = (answer.partition(b'"id":"')[2][:37] for answer in answers)
            assert first.startswith(b"resp_")
            assert first != second


async def test_empty_lines_between_requests_do_not_keep_a_connection() -> None:
    async with serving(handshake_s_max=0.1) as served, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.read(1_000)).startswith(b"HTTP/1.1 200 ")
        writer.write(b"\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
async def test_rest_of_a_request_that_is_answered_is_not_waited_for(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segue.listener.exchange.DISCARD_S_MAX", 0.1)
    async with serving(handshake_s_max=0.2, auth="keys") as served:
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        async with asyncio.timeout(WAIT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(head.encode())
            answer = await reader.read(1_000)
            # It goes on sending, as slowly as it likes, and is left.
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                while True:
                    writer.write(b"1\r\nx\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            writer.transport.abort()
        assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 401 "))


async def test_slow_next_request_does_not_break_into_an_answer(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"text": "x", "pad_tokens": 60}]}))
    body = json.dumps({"model": MODEL, "input": "x", "stream": True}).encode()
    async with serving(handshake_s_max=0.05, script=str(script), tps=200) as served:
        whole = post(f"Content-Length: {len(body)}") + body
        answer = await read_all(served, whole + b"GET /health HT")
        streamed, _, late = answer.partition(b"data: [DONE]")
        assert b"response.completed" in streamed
        assert b"HTTP/1.1 408 " not in streamed
        assert b"HTTP/1.1 408 " in late


async def test_turn_ends_when_a_client_leaves_that_has_asked_for_more(tmp_path: Path) -> None:
    """docs/inside/hazards.md F33: a second request after the first must not hide that no client is there any more."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"text": "x", "pad_tokens": 100_000}]}))
    body = json.dumps({"model": MODEL, "input": "x", "stream": True}).encode()
    async with serving(script=str(script), tps=500) as served, asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        whole = post(f"Content-Length: {len(body)}") + body
        writer.write(whole + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"response.output_text.delta")
        writer.transport.abort()
        await until(lambda: not served.app.runner.running_count)


# Each says in two ways, or in none that is allowed, where the body ends; proxies in front may believe another one.
AMBIGUOUS = {
    "length and chunks": post("Content-Length: 4", "Transfer-Encoding: chunked") + b"0\r\n\r\n",
    "chunks and length": post("Transfer-Encoding: chunked", "Content-Length: 4") + b"0\r\n\r\n",
    "two lengths": post("Content-Length: 4", "Content-Length: 5") + b"abcde",
    "a length twice": post("Content-Length: 5", "Content-Length: 5") + b"abcde",
    "list of lengths": post("Content-Length: 5, 5") + b"abcde",
    "length with a sign": post("Content-Length: +5") + b"abcde",
    "negative length": post("Content-Length: -5") + b"abcde",
    "length in hex": post("Content-Length: 0x5") + b"abcde",
    "unknown coding": post("Transfer-Encoding: xchunked") + in_chunks(b"abcde"),
    "chunks not last": post("Transfer-Encoding: chunked, identity") + in_chunks(b"abcde"),
    "two codings": post("Transfer-Encoding: chunked", "Transfer-Encoding: identity")
    + in_chunks(b"abcde"),
    "odd space in a coding": post("Transfer-Encoding:\x0bchunked") + in_chunks(b"abcde"),
    "space before the colon": post("Transfer-Encoding : chunked") + in_chunks(b"abcde"),
    "folded line": post("X-A: a", " Transfer-Encoding: chunked", "Content-Length: 5") + b"abcde",
    "bare line feeds": post("Content-Length: 5").replace(b"\r\n", b"\n") + b"abcde",
    "bare line feeds in chunks": CHUNKED + b"5\nabcde\n0\n\n",
    "line feed in an extension": CHUNKED + b"5;\nabcde\r\n0\r\n\r\n",
    "endless chunk size": CHUNKED + b"10000000000000005\r\nabcde\r\n0\r\n\r\n",
    "chunk without its end": CHUNKED + b"5\r\nabcde0\r\n\r\n",
    "NUL in a header": post("X-A: a\0b", "Content-Length: 5") + b"abcde",
    "carriage return in a header": post("X-A: a\rb", "Content-Length: 5") + b"abcde",
}


async def test_request_whose_end_is_in_doubt_is_refused_with_all_after_it() -> None:
    """docs/inside/hazards.md T16: what is smuggled after it is never taken for a request."""
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with serving() as served:
        for name, doubtful in AMBIGUOUS.items():
            answer = await read_all(served, doubtful + smuggled)
            assert answer.startswith(b"HTTP/1.1 400 "), name
            assert answer.count(b"HTTP/1.1") == 1, name
            assert MODEL.encode() not in answer, name
        assert (await fetch(served, "GET", "/v1/models")).status == 200


async def test_offer_of_another_protocol_is_passed_over() -> None:
    """Java's own client asks for HTTP/2 with its first request, whatever is in it."""
    asking = (
        "Connection: Upgrade, HTTP2-Settings, close",
        "Upgrade: h2c",
        "HTTP2-Settings: AAMAAA",
    )
    async with serving() as served:
        whole = post(*asking, f"Content-Length: {len(ASK)}") + ASK
        chunked = post(*asking, "Transfer-Encoding: chunked") + in_chunks(ASK[:9], ASK[9:])
        cut = whole.index(b"{") + 5
        for parts in ((whole,), (whole[:20], whole[20:cut], whole[cut:]), (chunked,)):
            answer = await read_all(served, *parts)
            assert answer.startswith(b"HTTP/1.1 200 "), answer
            assert b'"status":"completed"' in answer
        tunnel = b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert (await read_all(served, tunnel)).startswith(b"HTTP/1.1 400 ")


async def test_upgrade_of_http_1_0_is_refused() -> None:
    async with serving() as served:
        head = (
            b"GET /v1/responses HTTP/%s\r\nHost: localhost\r\nConnection: Upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        answer = await read_all(served, head % b"1.0")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b'"code":"invalid_upgrade"' in answer
        assert b"HTTP/1.1" in answer.partition(b"\r\n\r\n")[2]
        async with wire(served) as socket:
            assert (await socket.turn(input="x"))["type"] == "response.completed"


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
            await until(lambda: "does not read" in caplog.text)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(SIZE)
            writer.close()


async def test_one_connection_too_many_is_refused_in_a_few_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("segue.listener.protocol.SPARE_CONNECTIONS", 0)
    async with serving(connections_max=1) as served, wire(served):
        waits = set()
        for _ in range(20):
            answer = await read_all(served)
            assert answer.startswith(b"HTTP/1.1 503 ")
            waits.add(int(answer.partition(b"retry-after: ")[2][:1]))
        # They do not all come back at once (docs/inside/hazards.md T15).
        assert len(waits) > 1
        assert waits <= {1, 2, 3, 4, 5}


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


async def test_upgrades_of_a_herd_happen_a_few_in_each_pass_and_in_order() -> None:
    queue, done = UpgradeQueue(), list[int]()
    for number in range(3 * UPGRADES_MAX):
        queue.put(lambda number=number: done.append(number))
    assert done == list(range(UPGRADES_MAX))
    for passes in (2, 3):
        await asyncio.sleep(0)
        assert done == list(range(passes * UPGRADES_MAX))
    await asyncio.sleep(0)
    assert queue.put(lambda: done.append(-1))
    assert done[-1] == -1


async def test_upgrades_wait_while_connections_come_faster_than_they_are_accepted() -> None:
    queue, done = UpgradeQueue(), list[int]()
    for _ in range(3):
        queue.accepted = LISTENERS
        assert not queue.put(lambda: done.append(1))
        await asyncio.sleep(0)
    assert done == []
    # It is quiet now; and where it never is, they do not wait for ever.
    await asyncio.sleep(0)
    assert done == [1, 1, 1]
    queue.accepted, queue._held_at = LISTENERS, asyncio.get_running_loop().time() - UPGRADE_S_MAX
    assert queue.put(lambda: done.append(2))
