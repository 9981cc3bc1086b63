"""The client of engines, against a server that says these very bytes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.engines.client import (
    HEAD_BYTES_MAX,
    UNREAD_BYTES_MAX,
    USED_BYTES_MAX,
    ConnectionBroken,
    HttpClient,
    HttpConnection,
    HttpResponse,
)
from tests.support import until

WAIT_S = 10.0
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
SAID = CHUNKED + b"5\r\nHello\r\n7\r\n, world\r\n0\r\n\r\n"
MEASURED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nHello"


class Raw:
    """A server that answers each request on a connection with the next of its lines of bytes."""

    def __init__(self, answers: Sequence[Sequence[bytes]], *, hangs_up: bool = False) -> None:
        self._answers = answers
        self._hangs_up = hangs_up
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.lost = asyncio.Event()
        # Set to let it go on with the next piece.
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        try:
            for pieces in self._answers:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(size))
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
            if not self._hangs_up:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.lost.set()
            writer.close()


@asynccontextmanager
async def asked(
    *answers: Sequence[bytes], hangs_up: bool = False, path: str = "", login: str = ""
) -> AsyncIterator[tuple[HttpClient, Raw]]:
    """A client in front of such a server."""
    raw = Raw(answers, hangs_up=hangs_up)
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
    raw.port = server.sockets[0].getsockname()[1]
    client = HttpClient(f"http://{login}127.0.0.1:{raw.port}{path}", {"x-mine": "1"}, keep_s=60.0)
    async with asyncio.timeout(WAIT_S), server:
        yield client, raw
        client.close()


async def whole(client: HttpClient, body: bytes = b"{}") -> bytes:
    answer = await client.send("POST", "/v1/x", body, 5.0)
    return await answer.read_whole(1 << 20)


# --- the same bytes, cut anywhere -------------------------------------------------------------------

CLOSES = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nHello"
RESPONSES = {
    "chunked": SAID,
    "with a length": MEASURED,
    "without a length": b"HTTP/1.0 200 OK\r\n\r\nHello",
    "empty": b"HTTP/1.1 204 No Content\r\n\r\n",
    "after 100 Continue": b"HTTP/1.1 100 Continue\r\n\r\n" + MEASURED,
    "refused": b"HTTP/1.1 429 No\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nbusy",
    "last on its connection": CLOSES,
    "broken off": CHUNKED + b"5\r\nHel",
    "with a wrong chunk": CHUNKED + b"5\r\nHello\r\nzz\r\n",
    "not HTTP": b"SSH-2.0-OpenSSH\r\n",
    "with too long headers": b"HTTP/1.1 200 OK\r\nx: " + b"y" * HEAD_BYTES_MAX + b"\r\n\r\n",
    "followed by another": MEASURED + MEASURED,
}


class Transport(asyncio.Transport):
    """A connection to nobody."""

    is_aborted = False

    def __init__(self) -> None:
        super().__init__()
        self.is_reading_paused: list[bool] = []

    def pause_reading(self) -> None:
        self.is_reading_paused.append(True)

    def resume_reading(self) -> None:
        self.is_reading_paused.append(False)

    def writelines(self, list_of_data: object) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True


async def outcome(pieces: Sequence[bytes]) -> tuple[object, ...]:
    """What becomes of a response that arrives in these pieces, after which the engine hangs up."""
    client, transport = HttpClient("http://127.0.0.1:1", {}, 60.0), Transport()
    connection = HttpConnection(client)
    connection.connection_made(transport)
    sending = asyncio.ensure_future(connection.send(b"", b""))
    await asyncio.sleep(0)
    for piece in pieces:
        if not transport.is_aborted:
            connection.data_received(piece)
    is_kept = connection in client.idle
    connection.connection_lost(None)
    body = b""
    try:
        response = await sending
        while part := await response.read():
            body += part
    except ConnectionBroken:
        return "broken", body, is_kept
    return response.status, response.content_type, response.retry_after, body, is_kept


@pytest.mark.parametrize("name", RESPONSES)
async def test_response_does_not_depend_on_where_its_bytes_are_cut(name: str) -> None:
    raw = RESPONSES[name]
    expected = await outcome([raw])
    for at in range(min(len(raw), 400)):
        assert await outcome([raw[:at], raw[at:]] if at else [raw]) == expected
    assert await outcome([raw[n : n + 1] for n in range(len(raw))]) == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    raw=st.sampled_from(list(RESPONSES.values())), cuts=st.lists(st.integers(1, 300), max_size=8)
)
def test_response_does_not_depend_on_how_often_its_bytes_are_cut(
    raw: bytes, cuts: list[int]
) -> None:
    ends = [0, *sorted({cut for cut in cuts if cut < len(raw)}), len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(ends)]

    async def both() -> tuple[object, object]:
        return await outcome([raw]), await outcome(pieces)

    whole, cut = asyncio.run(both())
    assert cut == whole


# --- over a real socket -------------------------------------------------------------------------------


async def test_response_in_single_bytes_is_read_whole() -> None:
    async with asked([SAID[n : n + 1] for n in range(len(SAID))]) as (client, _):
        assert await whole(client) == b"Hello, world"


async def test_request_says_what_it_must() -> None:
    async with asked([MEASURED], path="/openai/", login="me:se%20cret@") as (client, raw):
        assert await whole(client, b"body") == b"Hello"
        lines = raw.heads[0].split(b"\r\n")
        assert lines[0] == b"POST /openai/v1/x HTTP/1.1"
        assert f"host: 127.0.0.1:{raw.port}".encode() in lines
        assert b"authorization: Basic bWU6c2UgY3JldA==" in lines
        assert b"x-mine: 1" in lines
        assert raw.bodies == [b"body"]


async def test_answer_is_heard_as_it_comes_and_the_connection_serves_the_next() -> None:
    async with asked([SAID], [MEASURED], [SAID]) as (client, raw):
        for expected in (b"Hello, world", b"Hello", b"Hello, world"):
            assert await whole(client) == expected
        assert raw.connections == 1


async def test_next_request_does_not_touch_what_is_still_unread() -> None:
    """The connection is free as soon as the answer is whole, and its reader may be slow."""
    async with asked([SAID], [MEASURED]) as (client, raw):
        first = await client.send("POST", "/v1/x", b"{}", 5.0)
        begun = await first.read()
        await until(lambda: client.idle)
        assert await whole(client) == b"Hello"
        assert begun + await first.read_whole(100) == b"Hello, world"
        assert raw.connections == 1


async def test_answer_without_a_length_ends_with_its_connection() -> None:
    async with asked([b"HTTP/1.0 200 OK\r\n\r\n", b"Hello"], hangs_up=True) as (client, _):
        assert await whole(client) == b"Hello"


async def test_word_to_go_on_is_no_answer() -> None:
    async with asked([b"HTTP/1.1 100 Continue\r\n\r\n" + MEASURED]) as (client, _):
        assert await whole(client) == b"Hello"


@pytest.mark.parametrize(
    "said",
    [
        CHUNKED + b"5\r\nHel",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nHello",
        b"HTTP/1.1 200 OK\r\nContent-",
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        CHUNKED + b"zz\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * HEAD_BYTES_MAX + b"\r\n\r\n",
    ],
)
async def test_answer_that_is_not_whole_is_broken(said: bytes) -> None:
    async with asked([said], hangs_up=True) as (client, _):
        with pytest.raises(ConnectionBroken):
            await whole(client)
        assert not client.idle
        assert not client.busy


async def test_leaving_an_answer_closes_its_connection() -> None:
    async with asked([CHUNKED + b"5\r\nHello\r\n"]) as (client, raw):
        answer = await client.send("POST", "/v1/x", b"{}", 5.0)
        assert await answer.read() == b"Hello"
        answer.close()
        await raw.lost.wait()
        with pytest.raises(ConnectionBroken):
            await answer.read()


async def test_cancelled_request_closes_its_connection() -> None:
    async with asked([b"HTTP/1.1 2"]) as (client, raw):
        task = asyncio.create_task(client.send("POST", "/v1/x", b"{}", 5.0))
        await until(lambda: raw.bodies)
        task.cancel()
        await raw.lost.wait()
        assert not client.busy


async def test_connection_that_says_something_unasked_is_not_used_again() -> None:
    async with asked([MEASURED + b"HTTP/1.1 200 OK\r\n"], [MEASURED]) as (client, raw):
        assert await whole(client) == b"Hello"
        await until(lambda: not client.idle)
        assert await whole(client) == b"Hello"
        assert raw.connections == 2


async def test_connection_that_has_waited_too_long_is_not_used_again() -> None:
    async with asked([MEASURED], [MEASURED]) as (client, raw):
        client._keep_s = 0.0
        assert await whole(client) == b"Hello"
        assert await whole(client) == b"Hello"
        assert raw.connections == 2


async def test_slow_reader_slows_the_engine() -> None:
    """What nobody has read is bounded; it all arrives once it is read."""
    part = b"x" * 65_536
    chunks = [b"10000\r\n" + part + b"\r\n"] * 100
    async with asked([CHUNKED, *chunks, b"0\r\n\r\n"]) as (client, _):
        answer: HttpResponse = await client.send("POST", "/v1/x", b"{}", 5.0)
        await until(lambda: answer.unread_bytes > UNREAD_BYTES_MAX)
        for _ in range(100):
            await asyncio.sleep(0)
        assert answer.unread_bytes < UNREAD_BYTES_MAX + 2 * 262_144
        assert len(await answer.read_whole(1 << 24)) == 100 * 65_536


async def test_nobody_there_is_an_ordinary_error() -> None:
    server = await asyncio.start_server(Raw([]).serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await HttpClient(f"http://127.0.0.1:{port}", {}, 1.0).send("GET", "/", b"", 5.0)


@pytest.mark.parametrize("is_enough", [False, True])
async def test_burst_is_used_with_pauses(is_enough: bool) -> None:
    """An engine or a proxy that sends much at once does not hold up everybody else, however it is read."""
    body = b"".join(b"%d" % n * (UNREAD_BYTES_MAX // 8) for n in range(10)) + b"!"
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    passes, used = 0, list[tuple[int, bytes]]()

    async def other() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    def use(data: bytes) -> bool:
        used.append((passes, data))
        return is_enough

    client, transport = HttpClient("http://127.0.0.1:1", {}, 60.0), Transport()
    connection = HttpConnection(client)
    connection.connection_made(transport)
    beside = asyncio.create_task(other())
    sending = asyncio.ensure_future(connection.send(b"", b""))
    await asyncio.sleep(0)
    connection.data_received(head)
    response = await sending
    reading = asyncio.ensure_future(response.read_until(use))
    await asyncio.sleep(0)
    # As by a loop that reads its full buffer several times before it does anything else.
    for at in range(0, len(body), 100_000):
        connection.data_received(body[at : at + 100_000])
    await reading
    while sum(len(data) for _, data in used) < len(body):
        await response.read_until(use)
    beside.cancel()
    assert b"".join(data for _, data in used) == body
    assert max(len(data) for _, data in used) <= USED_BYTES_MAX
    when = [at for at, _ in used]
    assert when == sorted(set(when))
    assert transport.is_reading_paused == [True, False]
