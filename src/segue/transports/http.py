"""How do requests arrive and answers leave by HTTP? One ASGI application, one table of routes.

A turn is the same here as on a socket: `prepare` may refuse with a status, `perform` is heard through a sink. A client
that drops its request has cancelled it (product.md 3). Every answer carries `x-request-id`.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import parse_qs

from msgspec import UNSET
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from segue.errors import (
    ApiError,
    Conflict,
    InvalidRequest,
    NotFound,
    Refused,
    ServerFault,
    model_not_found,
    response_not_found,
    too_large,
)
from segue.ids import new_id
from segue.transports.desk import LOCAL, Desk
from segue.transports.inflate import inflate
from segue.transports.sinks import LastSink, SseSink
from segue.turn.admit import Model, Plan
from segue.turn.running import Running, Sink
from segue.turn.values import Cancel, Tally, Turn
from segue.wire.codec import decode_create, encode, encode_error_body, list_object, listed_item
from segue.wire.items import Item

log = logging.getLogger(__name__)

# The three words of ASGI, which is untyped by design.
Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = (b"content-type", b"application/json")
SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx buffers a stream unless it is told not to.
    (b"x-accel-buffering", b"no"),
)
# A refused upload that takes longer than this is cut off instead.
DISCARD_S_MAX = 10.0
PAGE_MAX = 100
PAGE_DEFAULT = 20

# What plain JSON answers for a response that failed after it had started.
FAILED_STATUS = {
    "context_length_exceeded": 400,
    "invalid_prompt": 400,
    "rate_limit_exceeded": 429,
    "server_is_overloaded": 503,
}


# Our extension of ASGI, which has no word for it.
CUT = "segue.cut"


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP, with a way to break a connection off."""

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self.scope["extensions"] = {CUT: {"call": self.transport.abort}}


class ClientGone(Exception):
    """The client dropped its request."""


class Exchange:
    """One HTTP request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.request_id = new_id("req")
        self.has_started = False
        self._is_read = False
        self.arguments: dict[str, str] = {}

    @property
    def query(self) -> dict[str, str]:
        """The query's parameters, the last of each name."""
        pairs = parse_qs(self.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        return {name: values[-1] for name, values in pairs.items()}

    def header(self, name: bytes) -> str:
        """A header's value, or nothing."""
        return next((v.decode("latin-1") for k, v in self.scope["headers"] if k == name), "")

    async def body(self, bytes_max: int) -> bytes:
        """The whole body, decompressed, within the limit."""
        chunks: list[bytes] = []
        size = 0
        while not self._is_read:
            chunks.append(await self._receive_part())
            size += len(chunks[-1])
            if size > bytes_max:
                chunks.clear()
                raise too_large(max(size, self._declared_bytes), bytes_max)
        encoding = self.header(b"content-encoding").strip().lower()
        return await inflate(b"".join(chunks), encoding, bytes_max)

    @property
    def _declared_bytes(self) -> int:
        return int(self.header(b"content-length") or 0)

    async def _receive_part(self) -> bytes:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._is_read = not message.get("more_body")
        part: bytes = message.get("body", b"")
        return part

    async def _discard_rest(self) -> None:
        """Read the rest of the body: to close on unread bytes would reset the connection, and our answer with it."""
        with suppress(TimeoutError, ClientGone):
            async with asyncio.timeout(DISCARD_S_MAX):
                while not self._is_read:
                    await self._receive_part()

    async def left(self) -> None:
        """Wait until the client is gone."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def cut(self) -> None:
        """Break the connection off: a close would wait for a peer that does not read."""
        self.scope["extensions"][CUT]["call"]()
        await self.left()

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Status and headers; they leave together with the first bytes of the body."""
        self.has_started = True
        named = [*headers, (b"x-request-id", self.request_id.encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": named})

    async def write(self, data: bytes, *, is_last: bool) -> None:
        """A part of the body."""
        await self.send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def answer(
        self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = (JSON,)
    ) -> None:
        """A whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [*headers, length])
        await self.write(body, is_last=True)

    async def refuse(self, error: ApiError) -> None:
        """An error as a status and its one body."""
        headers = [JSON]
        if isinstance(error, Refused) and error.allow is not None:
            headers.append((b"allow", error.allow.encode()))
        if error.wait_s is not None:
            headers.append((b"retry-after", str(math.ceil(error.wait_s)).encode()))
        await self._discard_rest()
        await self.answer(error.status, encode_error_body(error), headers)


Handler = Callable[[Exchange], Awaitable[None]]


class HttpApp:
    """The routes of the contract."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        one = r"/v1/responses/(?P<id>[^/]+)"
        routes: list[tuple[str, str, Handler]] = [
            ("GET", r"/", self._welcome),
            ("GET", r"/health", self._health),
            ("GET", r"/ready", self._ready),
            ("GET", r"/metrics", self._metrics),
            ("POST", r"/v1/responses", self._create),
            ("GET", one, self._retrieve),
            ("DELETE", one, self._delete),
            ("GET", one + r"/input_items", self._input_items),
            ("GET", r"/v1/models", self._models),
            ("GET", r"/v1/models/(?P<id>.+)", self._model),
        ]
        self._routes = [(verb, re.compile(path + r"/?\Z"), call) for verb, path, call in routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's one entry."""
        if scope["type"] != "http":
            raise NotImplementedError(f"this application does not speak {scope['type']}")
        exchange = Exchange(scope, receive, send)
        try:
            await self._route(exchange)(exchange)
        except ClientGone:
            return
        except ApiError as error:
            self._desk.note_refusal("http", error.code)
            await exchange.refuse(error)
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            if exchange.has_started:
                raise
            await exchange.refuse(ServerFault("The server had an error."))

    def _route(self, exchange: Exchange) -> Handler:
        verb, path = exchange.scope["method"], exchange.scope["path"]
        allowed: set[str] = set()
        for known, pattern, call in self._routes:
            if found := pattern.match(path):
                if known == verb or (known == "GET" and verb == "HEAD"):
                    exchange.arguments = found.groupdict()
                    return call
                allowed.add(known)
        if not allowed:
            raise NotFound(f"Unknown request URL: {verb} {path[:256]}.", code="unknown_url")
        raise Refused(
            f"{verb} is not allowed here.",
            status=405,
            code="method_not_allowed",
            allow=", ".join(sorted(allowed)),
        )

    async def _create(self, exchange: Exchange) -> None:
        desk = self._desk
        body = await exchange.body(desk.limits.body_bytes_max)
        tally = Tally(bytes_received=len(body))
        create = decode_create(_checked(body))
        if create.stream_id is not UNSET:
            raise InvalidRequest(
                "'stream_id' belongs to WebSocket mode.",
                code="unsupported_parameter",
                param="stream_id",
            )
        plan = await desk.runner.prepare(create, owner=LOCAL, turns=desk.turns, tally=tally)
        await (self._stream if create.stream else self._reply)(exchange, plan)

    async def _stream(self, exchange: Exchange, plan: Plan) -> None:
        """Every event, as it comes."""
        sink = SseSink(self._desk.limits.outbox_bytes_max)
        running = self._desk.runner.start(plan, self._desk.turns, sink, "sse")
        async with _heard_by(exchange, running, sink):
            while not sink.is_over:
                data = await sink.take(running)
                if not exchange.has_started:
                    await exchange.start(200, SSE_HEADERS)
                async with asyncio.timeout(self._desk.limits.write_s_max):
                    await exchange.write(data, is_last=sink.is_over)

    async def _reply(self, exchange: Exchange, plan: Plan) -> None:
        """The last event alone, as a response object or as the status of its failure."""
        sink = LastSink()
        running = self._desk.runner.start(plan, self._desk.turns, sink, "http")
        async with _heard_by(exchange, running, sink):
            await sink.ended()
        fault = running.response.error
        if fault is None:
            await exchange.answer(200, encode(running.response))
        else:
            error = ServerFault(fault.message, code=fault.code, param=fault.param or None)
            error.status = FAILED_STATUS.get(fault.code, 500)
            error.type = "invalid_request_error" if error.status == 400 else error.type
            await exchange.refuse(error)

    async def _retrieve(self, exchange: Exchange) -> None:
        turn_id = exchange.arguments["id"]
        if exchange.query.get("stream") == "true":
            raise InvalidRequest(
                "This response cannot be streamed again.", code="unsupported_value", param="stream"
            )
        running = self._desk.runner.find(LOCAL, turn_id)
        # What is not to be stored cannot be fetched, not even while it runs.
        if running is not None and running.is_stored:
            await exchange.answer(200, encode(running.response))
        else:
            await exchange.answer(200, encode((await self._read(turn_id)).response))

    async def _delete(self, exchange: Exchange) -> None:
        turn_id = exchange.arguments["id"]
        running = self._desk.runner.find(LOCAL, turn_id)
        if running is not None and running.is_stored:
            raise Conflict(
                f"Response with id '{turn_id}' is still in progress.", param="response_id"
            )
        if not await self._desk.erase(LOCAL, turn_id):
            raise response_not_found(turn_id)
        await exchange.answer(200, encode({"id": turn_id, "object": "response", "deleted": True}))

    async def _input_items(self, exchange: Exchange) -> None:
        turn = await self._read(exchange.arguments["id"])
        await exchange.answer(200, page_of(turn, exchange.query))

    async def _read(self, turn_id: str) -> Turn:
        turn = await self._desk.turns.read(LOCAL, turn_id)
        if turn is None:
            raise response_not_found(turn_id)
        return turn

    async def _models(self, exchange: Exchange) -> None:
        models = [_model_object(name, one) for name, one in self._desk.runner.models.items()]
        await exchange.answer(200, encode({"object": "list", "data": models}))

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.arguments["id"]
        model = self._desk.runner.models.get(name)
        if model is None:
            raise model_not_found(name)
        await exchange.answer(200, encode(_model_object(name, model)))

    async def _health(self, exchange: Exchange) -> None:
        await exchange.answer(200, b'{"status":"ok"}')

    async def _ready(self, exchange: Exchange) -> None:
        checks = await self._desk.is_ready()
        checks["accepting"] = not self._desk.runner.is_draining
        is_ready = all(checks.values())
        body = encode({"status": "ready" if is_ready else "not ready", "checks": checks})
        await exchange.answer(200 if is_ready else 503, body)

    async def _metrics(self, exchange: Exchange) -> None:
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        await exchange.answer(200, await self._desk.write_metrics(), [kind])

    async def _welcome(self, exchange: Exchange) -> None:
        names = ", ".join(self._desk.runner.models)
        text = f"Segue serves {names} at /v1/responses. See /health, /ready and /metrics.\n"
        await exchange.answer(200, text.encode(), [(b"content-type", b"text/plain; charset=utf-8")])


@asynccontextmanager
async def _heard_by(exchange: Exchange, running: Running, sink: Sink) -> AsyncIterator[None]:
    """While inside, the client is listening; if it leaves, or we do, an unfinished turn is cancelled."""
    listener = asyncio.current_task()
    assert listener is not None

    async def watch() -> None:
        await exchange.left()
        is_gone.append(True)
        listener.cancel()

    is_gone: list[bool] = []
    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not is_gone:
            raise
        listener.uncancel()
        raise ClientGone from None
    except TimeoutError:
        log.warning("request %s: cut, because the client does not read", exchange.request_id)
        watcher.cancel()
        await exchange.cut()
        raise ClientGone from None
    finally:
        watcher.cancel()
        running.detach(sink)
        if not running.is_ended:
            running.tell(Cancel())


def _checked(body: bytes) -> bytes:
    """The body, if it is text at all: undecoded parts of it are kept as bytes."""
    try:
        codecs.utf_8_decode(body, "strict", True)
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"We could not parse the JSON of your request: it is not valid UTF-8 at byte {error.start}.",
            code="invalid_json",
        ) from None
    return body


def _model_object(name: str, model: Model) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": model.created_at, "owned_by": "segue"}


def page_of(turn: Turn, query: Mapping[str, str]) -> bytes:
    """A page of a turn's input items (protocol.md 1)."""
    limit = query.get("limit", str(PAGE_DEFAULT))
    order = query.get("order", "desc")
    if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= PAGE_MAX:
        raise InvalidRequest(f"'limit' must be from 1 to {PAGE_MAX}.", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' must be 'asc' or 'desc'.", param="order")
    named = [(_item_id(turn, index, item), item) for index, item in enumerate(turn.given)]
    if order == "desc":
        named.reverse()
    ids = [item_id for item_id, _ in named]
    after = query.get("after")
    if after is not None and after not in ids:
        raise InvalidRequest(f"No item with id '{after[:128]}' found.", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = named[start : start + int(limit)]
    return list_object(
        [listed_item(item, item_id) for item_id, item in page],
        [item_id for item_id, _ in page],
        has_more=start + len(page) < len(named),
    )


def _item_id(turn: Turn, index: int, item: Item) -> str:
    """The item's own id, or one that is always the same for this item of this turn."""
    return item.value.id or f"item_{turn.id.removeprefix('resp_')}_{index}"
