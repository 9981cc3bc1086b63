"""A server that is wrong in one way: what stands between the suite and a server, and changes what passes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from socket import SHUT_RDWR
from typing import Any, Literal

import aiohttp
from aiohttp import WSCloseCode, web

Json = dict[str, Any]
Transport = Literal["sse", "socket"]

# Not passed on: they belong to one connection.
HOPS = {"content-length", "transfer-encoding", "connection", "host", "content-encoding"}


@dataclass(frozen=True)
class Mutant:
    """What is changed; all of it is optional."""

    request: Callable[[Json], None] | None = None
    answer: Callable[[Json], None] | None = None
    # Instead of the status that the server has sent.
    status: int | None = None
    # The requests that are changed, and their answers: those of this verb alone.
    verb: str | None = None
    # Instead of the verb of the client.
    method: str | None = None
    event: Callable[[Json], None] | None = None
    # Of which transport; of both.
    only: Transport | None = None
    drops: str | None = None
    # The first of a type is sent twice.
    doubles: str | None = None
    name: str | None = None
    path: Callable[[str], str] = lambda path: path
    hides: tuple[str, ...] = ()
    forgets: tuple[str, ...] = ()
    has_no_end_mark: bool = False
    # Sends a key with every request, whether the client has one or not.
    adds_key: bool = False
    key: str | None = None
    # How long a connection to the server outlives the client's.
    lingers_s: float = 0.0

    def with_key(self, key: str) -> Mutant:
        return replace(self, key=key) if self.adds_key else self


class Proxy:
    """Relays to a server, with a mutant's changes."""

    def __init__(self, session: aiohttp.ClientSession, server: str, mutant: Mutant) -> None:
        self._session, self._server, self._mutant = session, server, mutant
        self._doubled = False

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in HOPS | set(self._mutant.forgets)
        }
        if self._mutant.key:
            headers["Authorization"] = f"Bearer {self._mutant.key}"
        if request.headers.get("upgrade", "").lower() == "websocket":
            return await self._socket(request, headers)
        return await self._http(request, headers)

    async def _http(self, request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        if self._mutant.verb in (None, request.method):
            return await self._changed(request, headers)
        return await Proxy(self._session, self._server, Mutant())._changed(request, headers)

    async def _changed(self, request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        mutant, data = self._mutant, self._sent(await request.read())
        method = mutant.method or request.method
        url = self._server + mutant.path(str(request.rel_url))
        async with self._session.request(method, url, data=data, headers=headers) as found:
            kept = {
                name: value
                for name, value in found.headers.items()
                if name.lower() not in HOPS | set(mutant.hides)
            }
            if found.headers.get("Content-Type", "").startswith("text/event-stream"):
                return await self._stream(request, found, kept)
            body = self._answered(await found.read())
            return web.Response(body=body, status=mutant.status or found.status, headers=kept)

    def _sent(self, data: bytes) -> bytes:
        if self._mutant.request is None or not data:
            return data
        try:
            body = json.loads(data)
        except ValueError:
            return data
        self._mutant.request(body)
        return json.dumps(body).encode()

    def _answered(self, data: bytes) -> bytes:
        if self._mutant.answer is None or not data:
            return data
        body = json.loads(data)
        self._mutant.answer(body)
        return json.dumps(body).encode()

    def _events(self, event: Json, transport: Transport) -> list[Json]:
        """What is passed on instead of an event."""
        mutant = self._mutant
        if mutant.only not in (None, transport):
            return [event]
        if mutant.drops is not None and event.get("type", "").startswith(mutant.drops):
            return []
        if mutant.event is not None:
            mutant.event(event)
        if event.get("type") == mutant.doubles and not self._doubled:
            self._doubled = True
            return [event, event]
        return [event]

    async def _stream(
        self, request: web.Request, found: aiohttp.ClientResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=found.status, headers=headers)
        await response.prepare(request)
        async for line in found.content:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                written = b"" if self._mutant.has_no_end_mark else b"data: [DONE]\n\n"
                await response.write(written)
                continue
            for event in self._events(json.loads(data), "sse"):
                name = self._mutant.name or event.get("type", "")
                await response.write(f"event: {name}\ndata: {json.dumps(event)}\n\n".encode())
        await response.write_eof()
        return response

    async def _socket(self, request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        wanted = {n: v for n, v in headers.items() if not n.lower().startswith(("sec-", "upgrade"))}
        url = self._server + str(request.rel_url)
        try:
            server = await self._session.ws_connect(url, headers=wanted)
        except aiohttp.WSServerHandshakeError as error:
            return web.Response(status=error.status)
        client = web.WebSocketResponse()
        await client.prepare(request)
        back = asyncio.create_task(self._back(server, client))
        async for message in client:
            await server.send_str(self._sent(message.data.encode()).decode())
        await asyncio.sleep(self._mutant.lingers_s)
        if client.close_code == WSCloseCode.ABNORMAL_CLOSURE:
            # Lost, as the client's was: without a close frame.
            server.get_extra_info("socket").shutdown(SHUT_RDWR)
        await server.close()
        await back
        return client

    async def _back(
        self, server: aiohttp.ClientWebSocketResponse, client: web.WebSocketResponse
    ) -> None:
        async for message in server:
            for event in self._events(json.loads(message.data), "socket"):
                if not client.closed:
                    await client.send_str(json.dumps(event))


@asynccontextmanager
async def listening(app: web.Application, *, notices_loss: bool = True) -> AsyncIterator[str]:
    """A server of aiohttp on a free port; its address."""
    runner = web.AppRunner(app, handler_cancellation=notices_loss, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def mutated(server: str, mutant: Mutant) -> AsyncIterator[str]:
    """The address of a server that is wrong in one way."""
    async with aiohttp.ClientSession(auto_decompress=True) as session:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", Proxy(session, server, mutant).__call__)
        async with listening(app, notices_loss=False) as address:
            yield address
