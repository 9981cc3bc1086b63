"""How does a sandbox reach an allowed host, and nothing else? The proxy, for all doors.

A door is a listening socket that one sandbox alone can reach, and the domains that its container may reach. A
connection has one request, and ends with it:

    CONNECT host:443     a tunnel, once the client's first TLS message names the same host
    GET http://host/…    a request of any method to port 80; read and written again by h11, so that both sides agree
                         where it ends

The name must be allowed by the door and by the operator. It is looked up once, by the fetcher's rules: only public
addresses are connected to, and no other address than those that were checked. Addresses in place of names are refused.
A redirect is the client's own next request. What is counted: bytes each way. What is logged: host, verdict, bytes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import cast

import h11

from segue.egress.domains import allows, normal
from segue.egress.hello import NoName, server_name
from segue.errors import ApiError
from segue.web.fetch import Fetcher

log = logging.getLogger(__name__)

# Of one door, and of all: the rest is closed unread. A door has at most a part of what is free, so that some always is.
DOOR_CONNECTIONS_MAX = 128
CONNECTIONS_MAX = 2_048
FREE_SHARE = 8
# The request's head, and the client's first TLS message; a connection to the host.
HEAD_S_MAX = 15.0
CONNECT_S_MAX = 10.0
# Without a byte either way.
IDLE_S_MAX = 120.0
PIECE_BYTES = 64 * 1024
# Lines that one door may log in a minute; a program inside decides how many connections there are.
LINES_MAX, LINES_S = 60, 60.0
TLS_PORT, PLAIN_PORT = 443, 80

# What concerns one connection and not the request (RFC 9110, 7.6.1).
HOP_HEADERS = frozenset(
    b"connection proxy-connection keep-alive proxy-authenticate proxy-authorization te trailer upgrade "
    b"transfer-encoding content-length expect host".split()
)


class Denied(Exception):
    """Why a request is not sent on: a status and words for the program inside."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status
        self.words = words


@dataclass(slots=True)
class OpenDoor:
    """A door: whose it is, what may be reached through it, and what went through."""

    number: int
    container_id: str
    domains: tuple[str, ...]
    sent_bytes: int = 0
    received_bytes: int = 0
    requests: int = 0
    refused: int = 0
    connections: set[asyncio.Task[None]] = field(default_factory=set)
    lines: int = 0
    lines_at: float = 0.0


@dataclass(slots=True)
class Passage:
    """One connection: where it leads, and what went through it."""

    door: OpenDoor
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    host: str = "-"
    sent_bytes: int = 0
    received_bytes: int = 0
    used_at: float = field(default_factory=time.monotonic)

    def sent(self, size: int) -> None:
        self.sent_bytes += size
        self.door.sent_bytes += size
        self.used_at = time.monotonic()

    def received(self, size: int) -> None:
        self.received_bytes += size
        self.door.received_bytes += size
        self.used_at = time.monotonic()


Dial = Callable[[str, int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def dial(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to an address; nothing is looked up."""
    return await asyncio.open_connection(
        address, port, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV, limit=PIECE_BYTES
    )


class EgressProxy:
    """Serves all doors. `operator`: what the operator allows, whatever a door says."""

    def __init__(
        self,
        operator: tuple[str, ...],
        fetcher: Fetcher,
        *,
        dial: Dial = dial,
        idle_s: float = IDLE_S_MAX,
        head_s: float = HEAD_S_MAX,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._operator = operator
        self._fetcher = fetcher
        self._dial = dial
        self._idle_s = idle_s
        self._head_s = head_s
        self._connections_max = connections_max
        self.doors: dict[int, OpenDoor] = {}
        self._servers: dict[int, asyncio.Server] = {}
        self._connections = 0

    async def open(
        self, number: int, container_id: str, domains: tuple[str, ...], listener: socket.socket
    ) -> None:
        """Serve a door."""
        door = self.doors[number] = OpenDoor(number, container_id, domains)

        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            free = self._connections_max - self._connections
            most = min(DOOR_CONNECTIONS_MAX, -(-free // FREE_SHARE))
            if task is None or len(door.connections) >= most:
                writer.transport.abort()
                return
            door.connections.add(task)
            self._connections += 1
            # What was written has left when a write returns: a connection may be aborted then.
            writer.transport.set_write_buffer_limits(high=0)
            try:
                await self._serve(Passage(door, reader, writer))
            finally:
                self._connections -= 1
                door.connections.discard(task)
                writer.transport.abort()

        self._servers[number] = await asyncio.start_unix_server(
            on_connection, sock=listener, limit=PIECE_BYTES
        )

    async def close(self, number: int) -> None:
        """End a door and what goes through it."""
        server, door = self._servers.pop(number, None), self.doors.pop(number, None)
        if server is not None:
            server.close()
        if door is not None:
            tasks = [*door.connections]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- one connection ---

    async def _serve(self, passage: Passage) -> None:
        began, verdict = time.monotonic(), "allowed"
        client = h11.Connection(h11.SERVER)
        try:
            await self._follow(passage, client)
        except Denied as refusal:
            verdict = f"refused ({refusal.words})"
            passage.door.refused += 1
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._head_s):
                    await _answer(passage, client, refusal)
        except TimeoutError:
            verdict = "closed (it took too long)"
        except (OSError, EOFError, h11.ProtocolError) as error:
            verdict = f"ended ({type(error).__name__})"
        finally:
            self._note(passage, verdict, time.monotonic() - began)

    async def _follow(self, passage: Passage, client: h11.Connection) -> None:
        async with asyncio.timeout(self._head_s):
            request = await _read_request(passage, client)
        if request is None:
            return
        passage.door.requests += 1
        is_tunnel = request.method == b"CONNECT"
        host = _target(request, is_tunnel=is_tunnel)
        passage.host = host
        if not (allows(passage.door.domains, host) and allows(self._operator, host)):
            raise Denied(403, f"{host} is not among the allowed domains")
        outer = await self._connect(host, TLS_PORT if is_tunnel else PLAIN_PORT)
        try:
            if is_tunnel:
                await self._tunnel(passage, client, host, outer)
            else:
                await self._exchange(passage, client, request, host, outer)
        finally:
            outer[1].transport.abort()

    async def _connect(
        self, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        scheme = "https" if port == TLS_PORT else "http"
        try:
            _, addresses = await self._fetcher.check(f"{scheme}://{host}/")
        except ApiError:
            raise Denied(403, f"{host} has no public address") from None
        except TimeoutError:
            raise Denied(504, f"{host} could not be looked up in time") from None
        for address in addresses:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S_MAX):
                    reader, writer = await self._dial(address, port)
                    writer.transport.set_write_buffer_limits(high=0)
                    return reader, writer
        raise Denied(502, f"{host} cannot be reached")

    async def _tunnel(
        self,
        passage: Passage,
        client: h11.Connection,
        host: str,
        outer: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        reply = h11.Response(status_code=200, headers=[], reason=b"Connection established")
        await _write(passage.writer, client.send(reply))
        async with asyncio.timeout(self._head_s):
            hello = await _read_hello(passage, host, client.trailing_data[0])
        await _write(outer[1], hello)
        passage.sent(len(hello))
        await self._both_ways(
            passage,
            _copy(passage.reader, outer[1], passage.sent),
            _copy(outer[0], passage.writer, passage.received),
        )

    async def _exchange(
        self,
        passage: Passage,
        client: h11.Connection,
        request: h11.Request,
        host: str,
        outer: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        """A request without TLS: taken apart on one side and put together on the other."""
        server = h11.Connection(h11.CLIENT)
        head = server.send(_sent_on(request, host))
        await _write(outer[1], head)
        passage.sent(len(head or b""))
        await self._both_ways(
            passage,
            _send_body(passage, client, server, outer[1]),
            _send_answer(passage, client, server, outer[0]),
        )

    async def _both_ways(
        self, passage: Passage, out: Awaitable[None], back: Awaitable[None]
    ) -> None:
        """Until the answer has ended, or nothing has moved for too long."""
        tasks = {asyncio.ensure_future(out), answer := asyncio.ensure_future(back)}
        passage.used_at = time.monotonic()
        try:
            while not answer.done():
                idle_s = self._idle_s - (time.monotonic() - passage.used_at)
                if idle_s <= 0:
                    raise TimeoutError
                waited = {task for task in tasks if not task.done()}
                done, _ = await asyncio.wait(
                    waited, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _note(self, passage: Passage, verdict: str, took_s: float) -> None:
        door, now = passage.door, time.monotonic()
        if now - door.lines_at > LINES_S:
            door.lines, door.lines_at = 0, now
        door.lines += 1
        if door.lines > LINES_MAX:
            if door.lines == LINES_MAX + 1:
                log.info("%s: more connections are not logged for a minute", door.container_id)
            return
        log.info(
            "%s: host %s, %s, %d bytes out, %d bytes in, %.1f s",
            *(door.container_id, passage.host, verdict),
            *(passage.sent_bytes, passage.received_bytes, took_s),
        )


# --- requests -------------------------------------------------------------------------------------------


async def _read_request(passage: Passage, client: h11.Connection) -> h11.Request | None:
    """The head of the request; None where the client leaves without one."""
    while True:
        try:
            event = client.next_event()
        except h11.RemoteProtocolError as error:
            raise Denied(error.error_status_hint, "the request cannot be read") from None
        if isinstance(event, h11.Request):
            if event.method == b"CONNECT" and not isinstance(client.next_event(), h11.EndOfMessage):
                raise Denied(400, "CONNECT has no body")
            return event
        if event is not h11.NEED_DATA:
            return None
        client.receive_data(await passage.reader.read(PIECE_BYTES))


def _target(request: h11.Request, *, is_tunnel: bool) -> str:
    """The host that a request is for; everything unusual is refused."""
    raw = bytes(request.target).decode("latin-1")
    if is_tunnel:
        name, _, port = raw.rpartition(":")
        if port != str(TLS_PORT):
            raise Denied(403, f"CONNECT is for port {TLS_PORT} only")
        authority = {raw, name}
    else:
        if not raw.lower().startswith("http://"):
            raise Denied(400, "the target must be a whole http URL; for https use CONNECT")
        # `?`, `#` and `\` end the host to some readers of URLs, and not to others.
        place = raw[len("http://") :].split("/", 1)[0]
        name = place.removesuffix(f":{PLAIN_PORT}")
        authority = {place, name, f"{name}:{PLAIN_PORT}"}
    host = normal(name)
    if host is None or host.startswith("*."):
        raise Denied(403, "the target must name a public host, not an address, and no other port")
    hosts = [value.decode("latin-1").lower() for key, value in request.headers if key == b"host"]
    if any(value not in {each.lower() for each in authority} for value in hosts):
        raise Denied(400, "the Host header is not the target's host")
    names = [key for key, _ in request.headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise Denied(400, "the request has two lengths")
    return host


def _sent_on(request: h11.Request, host: str) -> h11.Request:
    """The request as the host gets it: of its framing nothing is the client's."""
    raw = bytes(request.target)
    path = b"/" + raw[len(b"http://") :].partition(b"/")[2]
    headers = [(key, value) for key, value in request.headers if key not in _dropped(request)]
    headers += [(b"host", host.encode()), (b"connection", b"close")]
    for key, value in request.headers:
        if key == b"transfer-encoding":
            headers.append((b"transfer-encoding", b"chunked"))
        elif key == b"content-length":
            headers.append((b"content-length", value))
    return h11.Request(method=request.method, target=path, headers=headers)


def _dropped(message: h11.Request | h11.Response) -> frozenset[bytes]:
    """The headers that are not passed on: those of the connection, and those that it names itself."""
    named = b",".join(value for key, value in message.headers if key == b"connection")
    return HOP_HEADERS | {name.strip().lower() for name in named.split(b",")}


async def _events(
    reader: asyncio.StreamReader, connection: h11.Connection, note: Callable[[int], None]
) -> AsyncGenerator[object, None]:
    """What one side says, to the end of its message."""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            data = await reader.read(PIECE_BYTES)
            note(len(data))
            connection.receive_data(data)
            continue
        yield event
        if isinstance(event, h11.EndOfMessage | h11.ConnectionClosed) or event is h11.PAUSED:
            return


async def _send_body(
    passage: Passage, client: h11.Connection, server: h11.Connection, writer: asyncio.StreamWriter
) -> None:
    if client.they_are_waiting_for_100_continue:
        go_on = h11.InformationalResponse(status_code=100, headers=[])
        await _write(passage.writer, client.send(go_on))
    async with aclosing(_events(passage.reader, client, lambda size: None)) as events:
        async for event in events:
            if isinstance(event, h11.Data):
                data = server.send(h11.Data(data=bytes(event.data))) or b""
            elif isinstance(event, h11.EndOfMessage):
                data = server.send(h11.EndOfMessage()) or b""
            else:
                raise EOFError
            await _write(writer, data)
            passage.sent(len(data))


async def _send_answer(
    passage: Passage, client: h11.Connection, server: h11.Connection, reader: asyncio.StreamReader
) -> None:
    async with aclosing(_events(reader, server, passage.received)) as events:
        async for event in events:
            if isinstance(event, h11.Response):
                dropped = _dropped(event) - {b"content-length"}
                if any(key == b"transfer-encoding" for key, _ in event.headers):
                    dropped |= {b"content-length"}
                headers = [pair for pair in event.headers if pair[0] not in dropped]
                headers.append((b"connection", b"close"))
                answer = h11.Response(
                    status_code=event.status_code, headers=headers, reason=event.reason
                )
                await _write(passage.writer, client.send(answer))
            elif isinstance(event, h11.Data):
                await _write(passage.writer, client.send(h11.Data(data=bytes(event.data))))
            elif isinstance(event, h11.EndOfMessage):
                await _write(passage.writer, client.send(h11.EndOfMessage()))
            elif not isinstance(event, h11.InformationalResponse):
                raise EOFError
    await _finish(passage.writer)


# --- tunnels --------------------------------------------------------------------------------------------


async def _read_hello(passage: Passage, host: str, before: bytes) -> bytes:
    """The client's first TLS message, with what came along; refused where it names another host. The answer to CONNECT
    has left: the tunnel only closes."""
    data = before
    while True:
        try:
            name = server_name(data)
        except NoName as error:
            raise _Closed(str(error)) from None
        if name is not None:
            if name.removesuffix(".") != host:
                raise _Closed("TLS names another host than CONNECT")
            return data
        piece = await passage.reader.read(PIECE_BYTES)
        if not piece:
            raise EOFError
        data += piece


class _Closed(Denied):
    """Refused where there is no way left to say so."""

    def __init__(self, words: str) -> None:
        super().__init__(0, words)


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Callable[[int], None]
) -> None:
    while data := await reader.read(PIECE_BYTES):
        await _write(writer, data)
        note(len(data))
    await _finish(writer)


async def _finish(writer: asyncio.StreamWriter) -> None:
    """All that was written has left, and nothing follows."""
    with suppress(OSError):
        writer.write_eof()
        await writer.drain()


async def _write(writer: asyncio.StreamWriter, data: bytes | None) -> None:
    if data:
        writer.write(data)
        await writer.drain()


async def _answer(passage: Passage, client: h11.Connection, refusal: Denied) -> None:
    """Say why a request is refused: in the status line too, all that many programs show of a refused CONNECT."""
    if refusal.status == 0 or client.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    domains = ", ".join(passage.door.domains)
    body = f"{refusal.words}. This container may reach: {domains}.\n".encode()
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    reply = h11.Response(
        status_code=refusal.status, headers=headers, reason=refusal.words.encode("ascii", "replace")
    )
    for event in (reply, h11.Data(data=body), h11.EndOfMessage()):
        await _write(passage.writer, client.send(cast("h11.Event", event)))
    await _finish(passage.writer)
