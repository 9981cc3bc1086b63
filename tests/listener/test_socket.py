"""Real connections to a real server: what the listener hears, what the peer reads, how it ends."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import inspect
import json
import logging
import socket as net
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Literal, cast

import pytest
import uvicorn
import uvloop
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request

from segue.errors import ApiError, Unavailable
from segue.listener.edge_limits import EdgeLimits
from segue.listener.socket import Socket, SocketClosed, SocketListener, socket_class
from segue.memory.budget import Unread
from segue.memory.intake import Inflow, Intake
from segue.wire.codec import encode_error_body
from tests.support import until

TEXT, BINARY, CONT, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10
WAIT_S = 10  # longer than any story takes; only a broken one waits that long


def on_both_loops(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the story on asyncio's loop and on uvloop: their transports differ where it hurts."""

    def test(loop: str, **values: Any) -> None:
        factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(story(**values), 3 * WAIT_S))

    test.__name__, test.__doc__ = story.__name__, story.__doc__
    test.__dict__.update(story.__dict__)
    own = inspect.Parameter("loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [own, *inspect.signature(story).parameters.values()]
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return pytest.mark.parametrize("loop", ["asyncio", "uvloop"])(test)


class Heard:
    """A listener that writes down what it receives, and answers as the test asks."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.refusals: list[tuple[str, int]] = []
        self.ends: list[SocketClosed] = []
        self.resumed_count = 0
        self.opened_count = 0
        self.answer: Callable[[Socket, bytes], None] = lambda socket, text: None
        self.event: bytes | None = b'{"type":"error"}'
        self.changed = asyncio.Event()
        self.inflow = Inflow(Intake(1 << 30), "")
        self._socket: Socket | None = None

    @property
    def socket(self) -> Socket:
        assert self._socket is not None
        return self._socket

    def opened(self, socket: Socket) -> None:
        self._socket = socket
        self.opened_count += 1
        self.changed.set()

    def received(self, text: bytes) -> None:
        assert not self.ends, "a message after the end"
        self.texts.append(text)
        self.answer(self.socket, text)
        self.changed.set()

    def refused(self, kind: Literal["binary", "too_big", "invalid"], size: int) -> bytes | None:
        self.refusals.append((kind, size))
        return self.event

    def resumed(self) -> None:
        self.resumed_count += 1
        self.changed.set()

    def closed(self, how: SocketClosed) -> None:
        self.ends.append(how)
        self._socket = None
        self.changed.set()

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_so():
                self.changed.clear()
                await self.changed.wait()

    async def end(self) -> SocketClosed:
        await self.until(lambda: self.ends)
        return self.ends[0]


class Connections(set[Any]):
    """The server's set of connections, with an event for when the last one leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.are_gone = asyncio.Event()

    def discard(self, connection: object) -> None:
        super().discard(connection)
        if not any(isinstance(one, Socket) for one in self):
            self.are_gone.set()


class Peer:
    """A client that may break every rule."""

    def __init__(self, connection: net.socket) -> None:
        self.connection = connection
        self.loop = asyncio.get_running_loop()
        self.unread = b""

    async def send(self, data: bytes) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.loop.sock_sendall(self.connection, data)

    async def more(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self.loop.sock_recv(self.connection, 1 << 16)

    async def read(self, size: int) -> bytes:
        while len(self.unread) < size:
            data = await self.more()
            if not data:
                raise EOFError
            self.unread += data
        data, self.unread = self.unread[:size], self.unread[size:]
        return data

    async def frame(self) -> tuple[int, bytes]:
        first, size = await self.read(2)
        assert first & 0x80, "our frames are whole"
        if size == 126:
            (size,) = struct.unpack("!H", await self.read(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", await self.read(8))
        return first & 0x0F, await self.read(size)

    async def rest(self) -> list[tuple[int, bytes]]:
        """All frames up to the end of the stream."""
        frames = []
        with contextlib.suppress(EOFError):
            while True:
                frames.append(await self.frame())
        return frames

    async def upgrade(self, **changes: str) -> bytes:
        key = base64.b64encode(bytes(16)).decode()
        headers = {
            "Host": "localhost",
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": key,
            "Sec-WebSocket-Version": "13",
        }
        headers |= {name.replace("_", "-"): value for name, value in changes.items()}
        lines = ["GET /v1/responses HTTP/1.1", *(f"{n}: {v}" for n, v in headers.items())]
        await self.send("\r\n".join([*lines, "", ""]).encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await self.read(1)
        return head

    def reset(self) -> None:
        self.connection.setsockopt(net.SOL_SOCKET, net.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


class Running:
    """A server on a loopback port, and the listener of its connections."""

    def __init__(self, server: uvicorn.Server, port: int, heard: Heard) -> None:
        self.server, self.port, self.heard = server, port, heard
        self.url = f"ws://127.0.0.1:{port}/v1/responses"

    @contextlib.asynccontextmanager
    async def dial(self, *, receive_bytes: int | None = None) -> AsyncIterator[Peer]:
        connection = net.socket()
        connection.setblocking(False)
        if receive_bytes is not None:
            connection.setsockopt(net.SOL_SOCKET, net.SO_RCVBUF, receive_bytes)
        loop = asyncio.get_running_loop()
        with connection:
            await loop.sock_connect(connection, ("127.0.0.1", self.port))
            yield Peer(connection)

    @contextlib.asynccontextmanager
    async def peer(self, *, receive_bytes: int | None = None) -> AsyncIterator[Peer]:
        async with self.dial(receive_bytes=receive_bytes) as peer:
            head = await peer.upgrade()
            assert head.startswith(b"HTTP/1.1 101 "), head
            await self.heard.until(lambda: self.heard.opened_count)
            yield peer


async def no_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no request of these tests is for the app")


@contextlib.asynccontextmanager
async def serving(
    accept: Callable[[Request, Socket], SocketListener | ApiError] | None = None,
    *,
    send_bytes: int | None = None,
    **limits: Any,
) -> AsyncIterator[Running]:
    """A server; on the way out each opened socket must have ended once and be freed."""
    heard = Heard()
    listening = net.create_server(("127.0.0.1", 0))
    if send_bytes is not None:
        listening.setsockopt(net.SOL_SOCKET, net.SO_SNDBUF, send_bytes)
    kind = socket_class(accept or (lambda request, socket: heard), EdgeLimits(**limits), Unread())
    config = uvicorn.Config(
        no_app,
        ws=kind,
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=WAIT_S,
    )
    server = uvicorn.Server(config)
    connections = server.server_state.connections = Connections()
    task = asyncio.create_task(server.serve(sockets=[listening]))
    yield Running(server, listening.getsockname()[1], heard)
    async with asyncio.timeout(WAIT_S):
        if any(isinstance(one, Socket) for one in connections):
            await connections.are_gone.wait()
    server.should_exit = True
    await task
    listening.close()
    assert len(heard.ends) == heard.opened_count
    if sockets_of(kind):  # maybe only in a cycle; a full collection is dear
        gc.collect()
        assert not sockets_of(kind), "a timer holds a socket"


def sockets_of(kind: type[Socket]) -> list[object]:
    return [thing for thing in gc.get_objects() if type(thing) is kind]


def frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, masked: bool = True
) -> bytes:
    """One frame, masked with zeros: the mask bit is what counts."""
    size, mask = len(payload), 0x80 if masked else 0
    if size < 126:
        length = bytes((mask | size,))
    elif size < 65536:
        length = struct.pack("!BH", mask | 126, size)
    else:
        length = struct.pack("!BQ", mask | 127, size)
    first = bytes(((0x80 if fin else 0) | rsv << 4 | opcode,))
    return first + length + (bytes(4) if masked else b"") + payload


def close(code: int, reason: bytes = b"") -> bytes:
    return frame(CLOSE, struct.pack("!H", code) + reason)


def close_code(payload: bytes) -> int:
    code: int = struct.unpack("!H", payload[:2])[0]
    return code


# The upgrade.


@on_both_loops
async def test_refused_upgrade_is_plain_http_with_json() -> None:
    refusal = Unavailable("Too many connections.", wait_s=0.5)
    async with serving(lambda request, socket: refusal) as running:
        with pytest.raises(InvalidStatus) as caught:
            await connect(running.url)
        assert caught.value.response.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.response.headers["x-request-id"].startswith("req_")
        assert caught.value.response.headers["content-type"] == "application/json"
        assert caught.value.response.body == encode_error_body(refusal)


@on_both_loops
async def test_accept_sees_path_and_headers() -> None:
    seen: list[tuple[str, str]] = []
    async with serving() as running:
        heard = running.heard

        def accept(request: Request, socket: Socket) -> Heard:
            seen.append((request.path, request.headers["Authorization"]))
            return heard

    async with serving(accept) as running:
        headers = {"Authorization": "Bearer k"}
        async with connect(running.url + "?a=1", additional_headers=headers) as client:
            await heard.until(lambda: heard.opened_count)
            assert client.subprotocol is None
        await heard.end()
    assert seen == [("/v1/responses?a=1", "Bearer k")]


@pytest.mark.parametrize(
    "change", [{"Sec_WebSocket_Key": "short"}, {"Sec_WebSocket_Version": "12"}]
)
@on_both_loops
async def test_invalid_upgrade_is_answered_with_the_reason_in_json(change: dict[str, str]) -> None:
    async with serving() as running, running.dial() as peer:
        head = await peer.upgrade(**change)
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b"Sec-WebSocket-Version: 13\r\n" in head
        body = peer.unread
        while data := await peer.more():
            body += data
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


@on_both_loops
async def test_too_many_headers_are_refused() -> None:
    async with serving() as running, running.dial() as peer:
        head = await peer.upgrade(**{f"x{number}": "y" for number in range(200)})
        assert head.startswith(b"HTTP/1.1 400 ")


@on_both_loops
async def test_broken_accept_is_an_internal_error() -> None:
    def accept(request: Request, socket: Socket) -> Heard:
        raise RuntimeError("broken")

    lines = Lines()
    with lines.kept():
        async with serving(accept) as running, running.dial() as peer:
            head = await peer.upgrade()
            assert head.startswith(b"HTTP/1.1 500 ")
    assert lines.messages == ["a WebSocket upgrade could not be decided"]


# Messages.


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 3_000_000])
@on_both_loops
async def test_message_of_any_length_comes_back(size: int) -> None:
    async with serving() as running:
        running.heard.answer = lambda socket, text: socket.send([text])
        async with connect(running.url, max_size=None, compression=None) as client:
            text = "é" * (size // 2) + "x" * (size % 2)
            await client.send(text)
            assert await client.recv() == text


@on_both_loops
async def test_client_that_offers_compression_gets_none() -> None:
    async with serving() as running:
        running.heard.answer = lambda socket, text: socket.send([text])
        async with connect(running.url, compression="deflate") as client:
            assert client.response is not None
            assert "Sec-WebSocket-Extensions" not in client.response.headers
            await client.send("hello")
            assert await client.recv() == "hello"


@on_both_loops
async def test_input_cut_at_every_point_means_the_same() -> None:
    data = (
        frame(TEXT, "grüße".encode())
        + frame(TEXT, b"a\xc3", fin=False)
        + frame(PING, b"?")
        + frame(CONT, b"\xa9b", fin=False)
        + frame(CONT)
        + frame(TEXT, b"z" * 130)
    )
    expected = ["grüße".encode(), "aéb".encode(), b"z" * 130]
    for cut in range(1, len(data)):
        heard, transport = Heard(), FakeTransport()
        socket = fake_socket(heard, transport)
        socket.data_received(data[:cut])
        socket.data_received(data[cut:])
        assert heard.texts == expected
        assert transport.written[1:] == [frame(PONG, b"?", masked=False)]
        socket.connection_lost(None)


@on_both_loops
async def test_peer_that_sends_many_frames_at_once_lets_others_go_first() -> None:
    heard, transport = Heard(), FakeTransport()
    socket = fake_socket(heard, transport)
    texts = [b"%d" % number for number in range(1_500)]
    socket.data_received(b"".join(frame(TEXT, text) for text in texts))
    assert len(heard.texts) < len(texts) / 2
    assert not transport.read_on.is_set()
    await asyncio.wait_for(transport.read_on.wait(), WAIT_S)
    assert heard.texts == texts
    socket.connection_lost(None)


@on_both_loops
async def test_peer_that_sends_much_in_many_reads_lets_others_go_first() -> None:
    """uvloop reads up to 32 times from one connection before it turns to another."""
    heard, transport = Heard(), FakeTransport()
    socket = fake_socket(heard, transport)
    texts = [b"%d" % number for number in range(1_500)]
    while len(heard.texts) < len(texts) and transport.read_on.is_set():
        at = len(heard.texts)
        socket.data_received(b"".join(frame(TEXT, text) for text in texts[at : at + 5]))
    assert len(heard.texts) < len(texts) / 2
    socket.connection_lost(None)


@on_both_loops
async def test_first_messages_of_a_tick_leave_at_once_and_the_others_in_one_write() -> None:
    heard, transport = Heard(), FakeTransport()
    socket = fake_socket(heard, transport)
    socket._loop = cast(asyncio.AbstractEventLoop, StoppedClock())
    socket.send([b"a", b"b"])
    first = b"\x81\x01a\x81\x01b"
    assert transport.written[1:] == [first]  # after the upgrade's answer
    socket.send([b"c" * 200])
    socket.send([b"d"])
    assert transport.written[1:] == [first]
    await asyncio.sleep(0)
    assert transport.written[1:] == [first, b"\x81\x7e\x00\xc8" + b"c" * 200 + b"\x81\x01d"]
    socket.connection_lost(None)


@on_both_loops
async def test_nothing_is_delivered_after_our_close() -> None:
    async with serving() as running, running.peer() as peer:
        running.heard.answer = lambda socket, text: socket.close(1000)
        await peer.send(frame(TEXT, b"1") + frame(TEXT, b"2") + frame(BINARY, b"3"))
        assert await peer.frame() == (CLOSE, struct.pack("!H", 1000))
        await peer.send(frame(TEXT, b"4") + close(1000))
        assert await running.heard.end() == SocketClosed(1000, False, "")
        assert running.heard.texts == [b"1"]
        assert running.heard.refusals == []


# The end.


@pytest.mark.parametrize(
    "last, how",
    [
        (close(1000, b"bye"), SocketClosed(1000, False, "bye")),
        (close(4000), SocketClosed(4000, False, "")),
        (frame(CLOSE), SocketClosed(1005, False, "")),
        (frame(TEXT, b"half", fin=False) + close(1001), SocketClosed(1001, False, "")),
        (frame(TEXT, b"half", fin=False) + frame(CLOSE), SocketClosed(1005, False, "")),
    ],
)
@on_both_loops
async def test_close_frame_is_a_close_and_is_echoed(last: bytes, how: SocketClosed) -> None:
    async with serving() as running, running.peer() as peer:
        await peer.send(last)
        opcode, payload = await peer.frame()
        assert opcode == CLOSE
        assert (close_code(payload) if payload else 1005) == how.code
        assert await peer.more() == b""
        assert await running.heard.end() == how


@on_both_loops
async def test_end_of_stream_is_a_loss() -> None:
    async with serving() as running, running.peer() as peer:
        await peer.send(frame(TEXT, b"half", fin=False))
        peer.connection.shutdown(net.SHUT_WR)
        how = await running.heard.end()
        assert (how.code, how.is_lost) == (None, True)


@on_both_loops
async def test_reset_is_a_loss() -> None:
    async with serving() as running, running.peer() as peer:
        peer.reset()
        how = await running.heard.end()
        assert (how.code, how.is_lost) == (None, True)


@on_both_loops
async def test_our_close_sends_what_is_queued_and_waits_for_the_peer() -> None:
    async with serving() as running, connect(running.url) as client:
        await running.heard.until(lambda: running.heard.opened_count)
        running.heard.socket.send([b"last words"])
        running.heard.socket.close(1001, "ü" * 100)
        running.heard.socket.send([b"too late"])
        assert await client.recv() == "last words"
        with pytest.raises(ConnectionClosed) as caught:
            await client.recv()
        assert caught.value.rcvd is not None
        assert (caught.value.rcvd.code, caught.value.rcvd.reason) == (1001, "ü" * 61)
        assert (await running.heard.end()).code == 1001


@on_both_loops
async def test_close_frames_that_cross_are_both_sent() -> None:
    async with serving() as running, running.peer() as peer:
        await peer.send(close(1000))
        running.heard.socket.close(1001)
        opcode, payload = await peer.frame()
        assert opcode == CLOSE
        assert close_code(payload) == 1001
        assert await running.heard.end() == SocketClosed(1000, False, "")


@on_both_loops
async def test_peer_that_never_answers_our_close_is_lost() -> None:
    async with serving(close_s_max=0.05) as running, running.peer() as peer:
        running.heard.socket.close(1000)
        how = await running.heard.end()
        assert how == SocketClosed(None, True, "no close frame within 0.05 s of ours")
        assert await peer.frame() == (CLOSE, struct.pack("!H", 1000))


@on_both_loops
async def test_server_that_stops_closes_with_1012() -> None:
    async with serving() as running, connect(running.url) as client:
        await running.heard.until(lambda: running.heard.opened_count)
        running.server.should_exit = True
        with pytest.raises(ConnectionClosed) as caught:
            await client.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1012
        assert await running.heard.end() == SocketClosed(1012, False, "the server is restarting")


# Refused messages.


@pytest.mark.parametrize(
    "data, size",
    [
        (frame(TEXT, b"x" * 1025), 1025),
        (frame(TEXT, b"x" * 1000, fin=False) + frame(CONT, b"x" * 25), 1025),
        (frame(TEXT, b"x" * 1000, fin=False) + frame(CONT, b"x" * 9, fin=False) * 3, 1027),
    ],
)
@on_both_loops
async def test_oversize_message_is_answered_in_band_then_closed_1009(
    data: bytes, size: int
) -> None:
    async with serving(body_bytes_max=1024) as running, running.peer() as peer:
        await peer.send(frame(PING) + data)
        [*events, (opcode, payload)] = await peer.rest()
        assert sorted(events) == [(TEXT, b'{"type":"error"}'), (PONG, b"")]
        assert (opcode, close_code(payload)) == (CLOSE, 1009)
        assert running.heard.refusals == [("too_big", size)]
        assert (await running.heard.end()).is_lost


@on_both_loops
async def test_message_at_the_limit_is_taken() -> None:
    async with serving(body_bytes_max=1024) as running, running.peer() as peer:
        await peer.send(frame(TEXT, b"x" * 1000, fin=False) + frame(CONT, b"x" * 24))
        await running.heard.until(lambda: running.heard.texts)


@on_both_loops
async def test_client_in_the_middle_of_a_large_upload_reads_why_it_is_refused() -> None:
    """Closing on unread bytes would reset the connection and lose the event."""
    async with serving(body_bytes_max=1024) as running:
        async with connect(running.url, compression=None) as client:
            await client.send("x" * 20_000_000)
            assert await client.recv() == '{"type":"error"}'
            with pytest.raises(ConnectionClosed) as caught:
                await client.recv()
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1009
        assert running.heard.refusals == [("too_big", 20_000_000)]


@pytest.mark.parametrize("event", [b'{"type":"error"}', None])
@on_both_loops
async def test_binary_message_is_refused_with_1003(event: bytes | None) -> None:
    async with serving() as running, running.peer() as peer:
        running.heard.event = event
        await peer.send(frame(BINARY, b"abc"))
        [*events, (opcode, payload)] = await peer.rest()
        assert events == ([(TEXT, event)] if event else [])
        assert (opcode, close_code(payload)) == (CLOSE, 1003)
        assert running.heard.refusals == [("binary", 3)]


@on_both_loops
async def test_invalid_text_is_refused_with_1007() -> None:
    async with serving() as running, running.peer() as peer:
        await peer.send(frame(TEXT, b"ok") + frame(TEXT, b"\xff") + frame(TEXT, b"never"))
        [event, (opcode, payload)] = await peer.rest()
        assert event == (TEXT, b'{"type":"error"}')
        assert (opcode, close_code(payload)) == (CLOSE, 1007)
        assert running.heard.texts == [b"ok"]
        assert running.heard.refusals == [("invalid", 1)]


# RFC 6455, in the order of its sections.
VIOLATIONS: list[tuple[str, bytes, int]] = [
    ("5.1 not masked", frame(TEXT, b"a", masked=False), 1002),
    ("5.1 control frame not masked", frame(PING, b"a", masked=False), 1002),
    *((f"5.2 rsv {rsv}", frame(TEXT, b"a", rsv=rsv), 1002) for rsv in range(1, 8)),
    ("5.2 rsv on a control frame", frame(PING, rsv=4), 1002),
    *((f"5.2 opcode {code}", frame(code), 1002) for code in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)),
    ("5.4 continuation of nothing", frame(CONT, b"a"), 1002),
    ("5.4 new message inside", frame(TEXT, b"a", fin=False) + frame(TEXT, b"b"), 1002),
    ("5.4 continuation after the last", frame(TEXT, b"a") + frame(CONT, b"b"), 1002),
    *((f"5.5 fragmented {code}", frame(code, fin=False), 1002) for code in (CLOSE, PING, PONG)),
    *((f"5.5 long {code}", frame(code, b"\x03\xe8" + b"a" * 124), 1002) for code in (CLOSE, PING)),
    ("5.5.1 close with one byte", frame(CLOSE, b"\x03"), 1002),
    ("5.5.1 reason not UTF-8", close(1000, b"\xff"), 1007),
    *((f"7.4 code {c}", close(c), 1002) for c in (0, 999, 1004, 1005, 1006, 1015, 1016, 2999)),
    *((f"7.4 code {code}", close(code), 1002) for code in (5000, 65535)),
    ("8.1 bad byte", frame(TEXT, b"a\xffb"), 1007),
    ("8.1 overlong", frame(TEXT, b"\xc0\xaf"), 1007),
    ("8.1 surrogate", frame(TEXT, b"\xed\xa0\x80"), 1007),
    ("8.1 above U+10FFFF", frame(TEXT, b"\xf4\x90\x80\x80"), 1007),
    ("8.1 cut character", frame(TEXT, b"\xe2\x82"), 1007),
    ("8.1 cut in the last fragment", frame(TEXT, b"a", fin=False) + frame(CONT, b"\xc3"), 1007),
    ("8.1 bad across", frame(TEXT, b"\xe2\x82", fin=False) + frame(CONT, b"\x28"), 1007),
    ("8.1 fails before the last fragment", frame(TEXT, b"\xff", fin=False), 1007),
]


@pytest.mark.parametrize("data, code", [pytest.param(d, c, id=name) for name, d, c in VIOLATIONS])
@on_both_loops
async def test_violation_is_closed_with_its_code(data: bytes, code: int) -> None:
    async with serving() as running, running.peer() as peer:
        running.heard.event = None
        await peer.send(data)
        *_, (opcode, payload) = await peer.rest()
        assert (opcode, close_code(payload)) == (CLOSE, code)
        assert (await running.heard.end()).is_lost


ALLOWED: list[tuple[str, bytes, list[tuple[int, bytes]]]] = [
    ("empty text", frame(TEXT), [(TEXT, b"")]),
    ("ping of 125 bytes", frame(PING, b"p" * 125), [(PONG, b"p" * 125)]),
    ("ping not UTF-8", frame(PING, b"\xff\x00"), [(PONG, b"\xff\x00")]),
    ("ten pings", b"".join(frame(PING, b"%d" % n) for n in range(10)),
     [(PONG, b"%d" % n) for n in range(10)]),
    ("pong without a ping", frame(PONG, b"?") + frame(TEXT, b"a"), [(TEXT, b"a")]),
    ("ping between fragments", frame(TEXT, b"a", fin=False) + frame(PING) + frame(CONT, b"b"),
     [(PONG, b""), (TEXT, b"ab")]),
    ("empty fragments", frame(TEXT, fin=False) + frame(CONT, fin=False) * 9 + frame(CONT, b"a"),
     [(TEXT, b"a")]),
    ("character across fragments", frame(TEXT, b"\xe2\x82", fin=False) + frame(CONT, b"\xac"),
     [(TEXT, b"\xe2\x82\xac")]),
    ("noncharacters", frame(TEXT, "\ufffe\U0010ffff".encode()),
     [(TEXT, "\ufffe\U0010ffff".encode())]),
    ("length longer than needed", b"\x81\xfe\x00\x01" + bytes(4) + b"a", [(TEXT, b"a")]),
]  # fmt: skip


@pytest.mark.parametrize("data, frames", [pytest.param(d, f, id=name) for name, d, f in ALLOWED])
@on_both_loops
async def test_allowed_input_is_answered(data: bytes, frames: list[tuple[int, bytes]]) -> None:
    async with serving() as running, running.peer() as peer:
        running.heard.answer = lambda socket, text: socket.send([text])
        await peer.send(data)
        assert [await peer.frame() for _ in frames] == frames


@pytest.mark.parametrize("code", [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1011, 3000, 4999])
@on_both_loops
async def test_valid_close_codes_are_echoed(code: int) -> None:
    async with serving() as running, running.peer() as peer:
        await peer.send(close(code))
        assert await peer.rest() == [(CLOSE, struct.pack("!H", code))]
        assert await running.heard.end() == SocketClosed(code, False, "")


# Back-pressure and time.


def fill(heard: Heard, message: bytes = b"m" * 1000) -> int:
    """Send in one go until the outbox is full; the number of messages."""
    count = 0
    while not heard.socket.is_full:
        heard.socket.send([message])
        count += 1
        assert count < 10_000
    return count


async def stuff(heard: Heard) -> int:
    """Send to a peer that does not read until nothing moves: all buffers are full."""
    count = 0
    while not heard.socket.is_full or not heard.socket._is_paused:
        if heard.socket.is_full:
            await heard.until(lambda: not heard.socket.is_full or heard.socket._is_paused)
        count += fill(heard)
        await asyncio.sleep(0)
    return count


@on_both_loops
async def test_full_outbox_resumes_when_the_peer_reads() -> None:
    small = {"send_bytes": 16384, "outbox_bytes_max": 100_000}
    async with serving(**small) as running, running.peer(receive_bytes=16384) as peer:
        count = await stuff(running.heard)
        before = running.heard.resumed_count
        assert running.heard.socket.is_full
        for _ in range(count):
            assert await peer.frame() == (TEXT, b"m" * 1000)
        await running.heard.until(lambda: running.heard.resumed_count > before)
        assert not running.heard.socket.is_full


@on_both_loops
async def test_small_frames_that_wait_become_blocks_and_arrive_as_they_were() -> None:
    small = {"send_bytes": 16384, "outbox_bytes_max": 400_000}
    async with serving(**small) as running, running.peer(receive_bytes=16384) as peer:
        stuffed = await stuff(running.heard)
        for number in range(1_000):
            running.heard.socket.send([b"%d" % number])
        assert len(running.heard.socket._queue) < 300
        for _ in range(stuffed):
            await peer.frame()
        assert [await peer.frame() for _ in range(1_000)] == [
            (TEXT, b"%d" % number) for number in range(1_000)
        ]


@on_both_loops
async def test_ping_is_answered_ahead_of_a_full_outbox() -> None:
    small = {"send_bytes": 16384, "outbox_bytes_max": 400_000}
    async with serving(**small) as running, running.peer(receive_bytes=16384) as peer:
        await stuff(running.heard)
        running.heard.socket.send([b"last"])
        await peer.send(frame(PING, b"are you there") + frame(TEXT, b"mark"))
        await running.heard.until(lambda: running.heard.texts)
        order = []
        while (TEXT, b"last") not in order:
            order.append(await peer.frame())
        assert (PONG, b"are you there") in order


@on_both_loops
async def test_peer_that_never_reads_is_cut_and_logged() -> None:
    lines = Lines()
    small = {"send_bytes": 16384, "outbox_bytes_max": 100_000, "write_s_max": 0.1}
    with lines.kept():
        async with serving(**small) as running, running.peer(receive_bytes=16384):
            await stuff(running.heard)
            socket = running.heard.socket
            how = await running.heard.end()
            assert how == SocketClosed(None, True, "the peer has not read for 0.1 s")
            assert not socket.is_full
            socket.send([b"into the void"])
            socket.close(1000)
            del socket
    assert lines.messages == ["WebSocket connection cut: the peer has not read for 0.1 s"]


@on_both_loops
async def test_silent_peer_is_lost_after_its_pongs_are_missed() -> None:
    lines = Lines()
    with lines.kept():
        async with serving(ping_s=0.02, pong_s_max=0.05) as running, running.peer() as peer:
            how = await running.heard.end()
            assert how == SocketClosed(None, True, "no bytes for 0.05 s after a ping")
            assert await peer.frame() == (PING, b"")
    assert lines.messages == ["WebSocket connection cut: no bytes for 0.05 s after a ping"]


@on_both_loops
async def test_uploading_peer_is_not_lost_without_pongs() -> None:
    """Any byte is a sign of life: a pong cannot overtake the frame that is being sent."""
    async with serving(ping_s=0.05, pong_s_max=0.2) as running, running.peer() as peer:
        message = frame(TEXT, b"slow upload")
        for byte in message:
            assert await peer.frame() == (PING, b"")
            await peer.send(bytes((byte,)))
        await running.heard.until(lambda: running.heard.texts)
        assert running.heard.texts == [b"slow upload"]
        assert running.heard.ends == []


@on_both_loops
async def test_message_that_is_never_whole_is_not_waited_for() -> None:
    limits = {"ping_s": 0.02, "pong_s_max": 5, "body_s_max": 0.1}
    async with serving(**limits) as running, running.peer() as peer:
        await peer.send(frame(TEXT, b"a" * 100)[:20])
        with contextlib.suppress(ConnectionError, EOFError):
            while True:
                await peer.frame()
                await peer.send(b"a")
        how = await running.heard.end()
        assert how == SocketClosed(None, True, "a message was not complete after 0.1 s")
        assert running.heard.refusals == [("late", 0)]


@on_both_loops
async def test_half_message_is_not_read_while_there_is_no_room_and_is_not_lost() -> None:
    limits = {"ping_s": 0.02, "pong_s_max": 0.1}
    async with serving(**limits) as running, running.peer() as peer:
        intake = Intake(1 << 20)
        older, running.heard.socket._inflow = Inflow(intake, ""), Inflow(intake, "")
        older.count(1 << 20, 0)
        message = b"m" * (8 << 20)
        sending = asyncio.create_task(peer.send(frame(TEXT, message)))
        # Longer than a silent peer would be waited for.
        for _ in range(10):
            assert (await peer.frame())[0] == PING
        assert not sending.done()
        assert intake.bytes < 4 << 20
        older.count(0, 0)
        await running.heard.until(lambda: running.heard.texts)
        await sending
        assert running.heard.texts == [message]
        assert intake.bytes == 0


@on_both_loops
async def test_half_message_of_a_peer_that_left_is_not_kept() -> None:
    async with serving() as running, running.peer() as peer:
        await peer.send(frame(TEXT, b"m" * 1000)[:900])
        reader = running.heard.socket._parser.reader
        await until(lambda: reader.buffer)
        peer.reset()
        await running.heard.end()
    assert not reader.buffer


@on_both_loops
async def test_upgrade_may_be_decided_later() -> None:
    """Nothing is read meanwhile, and nothing that was sent meanwhile is lost."""
    heard, decided = Heard(), asyncio.Event()

    async def decide() -> Heard | ApiError:
        await decided.wait()
        return heard

    async with serving(lambda request, socket: decide()) as running:
        connecting = asyncio.create_task(connect(running.url).__aenter__())
        await until(lambda: running.server.server_state.connections)
        assert not connecting.done()
        decided.set()
        async with await connecting as client:
            await client.send("hello")
            await heard.until(lambda: heard.texts)
        await heard.end()


@on_both_loops
async def test_client_library_keeps_an_idle_connection_alive() -> None:
    async with serving(ping_s=0.02, pong_s_max=0.5) as running, connect(running.url) as client:
        await running.heard.until(lambda: running.heard.opened_count)
        for _ in range(3):
            await (await client.ping())
        assert running.heard.ends == []


# What no real peer shows on demand: a transport whose buffer the test sets.


class StoppedClock:
    """A loop whose tick does not end by itself."""

    def time(self) -> float:
        return 5.0

    def call_soon(self, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(call)


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.buffer_bytes: list[int] = [0]
        self.is_aborted = False
        self.read_on = asyncio.Event()
        self.read_on.set()

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.buffer_bytes.pop(0) if len(self.buffer_bytes) > 1 else self.buffer_bytes[0]

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        pass

    def pause_reading(self) -> None:
        self.read_on.clear()

    def resume_reading(self) -> None:
        self.read_on.set()

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


def fake_socket(heard: Heard, transport: FakeTransport, **limits: Any) -> Socket:
    socket = Socket(lambda request, socket: heard, EdgeLimits(**limits), set(), Unread())
    socket.connection_made(transport)
    socket.data_received(
        b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    return socket


@on_both_loops
async def test_slow_reader_is_not_cut_while_it_reads() -> None:
    heard, transport = Heard(), FakeTransport()
    socket = fake_socket(heard, transport, write_s_max=0.01)
    transport.buffer_bytes = [10_000_000, 9_000_000, 8_000_000, 7_999_999]
    socket.pause_writing()
    assert (await heard.end()).reason == "the peer has not read for 0.01 s"
    assert transport.buffer_bytes == [7_999_999], "it was cut when it stopped, not before"
    assert transport.is_aborted
    socket.connection_lost(None)


@on_both_loops
async def test_flood_of_pings_from_a_peer_that_does_not_read_takes_no_memory() -> None:
    heard, transport = Heard(), FakeTransport()
    socket = fake_socket(heard, transport)
    socket.pause_writing()
    socket.send([b"queued"])
    for number in range(1000):
        socket.data_received(frame(PING, b"%d" % number))
        await asyncio.wait_for(transport.read_on.wait(), WAIT_S)
    assert len(transport.written) == 1  # the upgrade's answer
    socket.resume_writing()
    assert transport.written[1:] == [b"\x8a\x03999\x81\x06queued"]
    socket.connection_lost(None)
    assert len(heard.ends) == 1


class Lines(logging.Handler):
    """The log lines of the socket as text; pytest's own capture would keep the tracebacks alive."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        logger = logging.getLogger("segue.listener.socket")
        logger.addHandler(self)
        logger.propagate = False
        try:
            yield
        finally:
            logger.propagate = True
            logger.removeHandler(self)
