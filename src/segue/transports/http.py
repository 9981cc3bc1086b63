"""How do requests arrive and answers leave by HTTP? One ASGI application, one table of routes.

A turn is the same here as on a socket: `prepare` may refuse with a status, `perform` is heard through a sink. A client
that drops its request has cancelled it. Every answer carries `x-request-id`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from msgspec import UNSET, structs

from segue.errors import (
    ApiError,
    Conflict,
    InvalidRequest,
    NotFound,
    Refused,
    ServerFault,
    model_not_found,
    response_not_found,
)
from segue.ids import given_id, new_id
from segue.transports.auth import bearer
from segue.transports.conversations import ConversationRoutes
from segue.transports.exchange import (
    ClientGone,
    Exchange,
    Receive,
    Scope,
    Send,
    heard_by,
    listening,
)
from segue.transports.openapi import asyncapi, openapi
from segue.transports.paging import page_of
from segue.transports.services import Services
from segue.transports.subscribers import LastSubscriber, SseSubscriber
from segue.turn.compact import window
from segue.turn.plan import Caller, Model, Tally
from segue.turn.running import Running
from segue.turn.values import Cancel, Owner, Turn
from segue.wire.codec import decode_create, decode_traceparent, encode
from segue.wire.items import Item
from segue.wire.requests import Create
from segue.wire.response import (
    ENDED,
    CompactionWindow,
    Deleted,
    InputTokens,
    ModelCard,
    ModelList,
)

log = logging.getLogger(__name__)

SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx buffers a stream unless it is told not to.
    (b"x-accel-buffering", b"no"),
)
# As long as `idempotency_key` in a body may be.
KEY_CHARS_MAX = 255
# Agents leave the version out, or name their own product: all of it is one place.
RESPONSES = r"(?:/v1|/v1/codex)?/responses"
HEALTH = "/health"

Handler = Callable[[Exchange], Awaitable[None]]


class Route(NamedTuple):
    """A verb and a path, who answers, and what a key must be good for; without a scope everybody may ask."""

    verb: str
    path: str
    call: Handler
    scope: str | None


class HttpApp:
    """The routes of the contract."""

    def __init__(self, services: Services, more: Sequence[Route] = ()) -> None:
        self._services = services
        talks = ConversationRoutes(services)
        one = r"/v1/responses/(?P<id>[^/]+)"
        talk = r"/v1/conversations/(?P<id>[^/]+)"
        said = talk + r"/items/(?P<item_id>[^/]+)"
        self.table = (
            *more,
            Route("GET", r"/health", self._health, None),
            Route("GET", r"/ready", self._ready, None),
            Route("GET", r"/metrics", self._metrics, "metrics"),
            Route("POST", r"/v1/responses", self._create, "responses"),
            Route("POST", r"/v1/responses/compact", self._compact, "responses"),
            Route("POST", r"/v1/responses/input_tokens", self._input_tokens, "responses"),
            Route("GET", one, self._retrieve, "responses"),
            Route("DELETE", one, self._delete, "responses"),
            Route("POST", one + r"/cancel", self._cancel, "responses"),
            Route("GET", one + r"/input_items", self._input_items, "responses"),
            Route("POST", r"/v1/conversations", talks.create, "responses"),
            Route("GET", talk, talks.get, "responses"),
            Route("POST", talk, talks.update, "responses"),
            Route("DELETE", talk, talks.delete, "responses"),
            Route("GET", talk + r"/items", talks.list_items, "responses"),
            Route("POST", talk + r"/items", talks.add_items, "responses"),
            Route("GET", said, talks.get_item, "responses"),
            Route("DELETE", said, talks.delete_item, "responses"),
            Route("GET", r"/v1/models", self._models, "models"),
            Route("GET", r"/v1/models/(?P<id>.+)", self._model, "models"),
            Route("GET", r"/openapi\.json", self._openapi, None),
            Route("GET", r"/asyncapi\.json", self._asyncapi, None),
        )
        self.routes = tuple((route.verb, route.path) for route in self.table)
        self._patterns = [
            (re.compile(route.path.replace("/v1/responses", RESPONSES) + r"/?\Z"), route)
            for route in self.table
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's one entry."""
        assert scope["type"] == "http", (
            "sockets have a class of their own, and there is no lifespan"
        )
        exchange = Exchange(scope, receive, send, self._services.limits.body_s_max)
        try:
            await self._serve(exchange)
        except ClientGone:
            return
        except ApiError as error:
            self._services.note_refusal("http", error.code)
            await exchange.refuse(error)
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            if exchange.has_started:
                raise
            await exchange.refuse(ServerFault("The server had an error."))

    async def _serve(self, exchange: Exchange) -> None:
        """From where, to what, by whom; and only then is anything done."""
        gate, origin = self._services.gate, exchange.header(b"origin")
        if exchange.scope["path"] != HEALTH:
            gate.check(exchange.header(b"host"), origin)
        exchange.origin_headers = gate.answer_headers(origin)
        if exchange.scope["method"] == "OPTIONS" and gate.is_listed(origin):
            await self._preflight(exchange, origin)
            return
        route = self._route(exchange)
        if route.scope is not None:
            await self._admit(exchange, route.scope)
        await route.call(exchange)

    async def _preflight(self, exchange: Exchange, origin: str) -> None:
        asked = exchange.header(b"access-control-request-headers")
        exchange.origin_headers = self._services.gate.preflight_headers(origin, asked)
        await exchange.start(204, ())
        await exchange.write(b"", is_last=True)

    async def _admit(self, exchange: Exchange, scope: str) -> None:
        """Whose request this is, if that one may do it."""
        exchange.account = await self._services.accounts.find(
            bearer(exchange.header(b"authorization"))
        )
        exchange.account.check_scope(scope)
        exchange.owner = exchange.account.owner

    def _route(self, exchange: Exchange) -> Route:
        verb, path = exchange.scope["method"], exchange.scope["path"]
        allowed: set[str] = set()
        is_literal = False
        for pattern, route in self._patterns:
            found = pattern.match(path)
            # A path of its own, such as /v1/responses/compact, is nobody's id.
            if found is None or (is_literal and found.groupdict()):
                continue
            if route.verb == verb or (route.verb == "GET" and verb == "HEAD"):
                exchange.arguments = found.groupdict()
                return route
            is_literal = not found.groupdict()
            allowed.add(route.verb)
        if not allowed:
            raise NotFound(f"Unknown request URL: {verb} {path[:256]}.", code="unknown_url")
        raise Refused(
            f"{verb} is not allowed here.",
            status=405,
            code="method_not_allowed",
            allow=", ".join(sorted(allowed)),
        )

    async def _decode(self, exchange: Exchange) -> tuple[Create, Tally]:
        await exchange.account.quota.take_request()
        body = await exchange.text(self._services.limits.body_bytes_max)
        create = decode_create(body)
        trace = exchange.header(b"traceparent") or decode_traceparent(create)
        return create, Tally(bytes_received=len(body), traceparent=trace)

    def _asker(self, exchange: Exchange) -> Caller:
        account = exchange.account
        return Caller(exchange.owner, self._services.turns, may=account.scopes, quota=account.quota)

    async def _create(self, exchange: Exchange) -> None:
        create, tally = await self._decode(exchange)
        for name, value in (("stream_id", create.stream_id), ("rollout", create.rollout or UNSET)):
            if value is not UNSET:
                raise InvalidRequest(
                    f"'{name}' belongs to WebSocket mode.",
                    code="unsupported_parameter",
                    param=name,
                )
        key = exchange.header(b"idempotency-key")
        if key:
            create = structs.replace(create, idempotency_key=key[:KEY_CHARS_MAX])
        await (self._stream if create.stream else self._reply)(exchange, create, tally)

    async def _stream(self, exchange: Exchange, create: Create, tally: Tally) -> None:
        """Every event, as it comes."""
        subscriber = SseSubscriber(self._services.limits.outbox_bytes_max)
        caller = self._asker(exchange)
        running = await self._services.runner.begin(create, caller, tally, subscriber, "sse")
        async with heard_by(exchange, running, subscriber):
            await self._write(exchange, subscriber)

    async def _write(self, exchange: Exchange, subscriber: SseSubscriber) -> None:
        while not subscriber.is_over:
            data = await subscriber.take()
            if not exchange.has_started:
                await exchange.start(200, SSE_HEADERS)
            async with asyncio.timeout(self._services.limits.write_s_max):
                await exchange.write(data, is_last=subscriber.is_over)

    async def _reply(self, exchange: Exchange, create: Create, tally: Tally) -> None:
        """The last event alone, as a response object or as the status of its failure; in the background, the first."""
        subscriber = LastSubscriber()
        caller = self._asker(exchange)
        running = await self._services.runner.begin(create, caller, tally, subscriber, "http")
        if running.is_background:
            running.detach(subscriber)
        else:
            async with heard_by(exchange, running, subscriber):
                await subscriber.ended()
        if running.error is not None:
            raise running.error
        await exchange.answer(200, encode(running.visible))

    async def _compact(self, exchange: Exchange) -> None:
        """A window: a turn that nobody keeps, and that makes a summary instead of an answer."""
        services = self._services
        create, tally = await self._decode(exchange)
        if create.model is None:
            raise InvalidRequest("You must provide a model parameter.", param="model")
        create = structs.replace(create, store=False, generate=None, background=None)
        plan = await services.runner.prepare(
            create, self._asker(exchange), tally, compacts="window"
        )
        subscriber = LastSubscriber()
        running = services.runner.start(plan, services.turns, subscriber, "http")
        async with heard_by(exchange, running, subscriber):
            await subscriber.ended()
        if running.error is not None:
            raise running.error
        resolved, response = plan.resolved, running.response
        kept = window(resolved.parent, resolved.given, plan.model.context_tokens, new_id)
        answer = CompactionWindow(
            id=response.id,
            created_at=response.created_at,
            output=[*kept, *response.output],
            usage=response.usage,
        )
        await exchange.answer(200, encode(answer))

    async def _input_tokens(self, exchange: Exchange) -> None:
        """How long a prompt would be; nothing is generated."""
        create, tally = await self._decode(exchange)
        caller = await self._services.runner.joining(create, self._asker(exchange))
        plan = await self._services.runner.prepare(create, caller, tally)
        try:
            count = await self._services.runner.count_tokens(plan)
        finally:
            plan.quota.release()
        await exchange.answer(200, encode(InputTokens(input_tokens=count)))

    async def _retrieve(self, exchange: Exchange) -> None:
        turn_id, query = exchange.arguments["id"], exchange.query
        if query.get("stream") == "true":
            await self._follow(exchange, query.get("starting_after", "-1"))
            return
        running = self._running(exchange)
        if running is not None:
            await exchange.answer(200, encode(running.visible))
            return
        turn = await self._services.turns.read(exchange.owner, turn_id)
        if turn is None or turn.response.status not in ENDED:
            # Another worker may be at it, and knows how far it is.
            seen = await self._services.runner.look(exchange.owner, turn_id)
            if seen is not None:
                await exchange.answer(200, seen)
                return
            turn = await self._read(exchange.owner, turn_id)
        await exchange.answer(200, encode(turn.response))

    def _running(self, exchange: Exchange) -> Running | None:
        """The turn that the path names while it runs; what is not to be stored cannot be named, not even then."""
        running = self._services.runner.find(exchange.owner, exchange.arguments["id"])
        return running if running is not None and running.is_stored else None

    async def _reach(self, exchange: Exchange) -> Running | None:
        """The same, also while it runs in another worker."""
        turn_id = exchange.arguments["id"]
        running = await self._services.runner.reach(exchange.owner, turn_id, self._services.turns)
        return running if running is not None and running.is_stored else None

    async def _follow(self, exchange: Exchange, after: str) -> None:
        """The events behind this number: what was written down, and what is still to come."""
        if not re.fullmatch("-1|[0-9]{1,15}", after):
            raise InvalidRequest("'starting_after' must be a number.", param="starting_after")
        turn_id = exchange.arguments["id"]
        if await self._reach(exchange) is None:
            await self._read(exchange.owner, turn_id)
        subscriber = SseSubscriber(self._services.limits.outbox_bytes_max)
        if not await self._services.runner.follow(exchange.owner, turn_id, subscriber, int(after)):
            raise InvalidRequest(
                "The events of this response are not kept, or not that far back.",
                code="unsupported_value",
                param="stream",
            )
        running = self._running(exchange)
        if running is None or running.is_ended:
            subscriber.end()
        try:
            async with listening(exchange):
                await self._write(exchange, subscriber)
        finally:
            if running is not None:
                running.detach(subscriber)

    async def _cancel(self, exchange: Exchange) -> None:
        """Stop a turn that runs in the background, and answer with what has become of it."""
        turn_id, running = exchange.arguments["id"], await self._reach(exchange)
        response = (
            running.response
            if running is not None
            else (await self._read(exchange.owner, turn_id)).response
        )
        if not response.background:
            raise InvalidRequest(
                "Only a response that was created with 'background' can be cancelled.",
                code="unsupported_value",
                param="response_id",
            )
        if running is None and response.status in ("queued", "in_progress"):
            raise Conflict(
                f"Response with id '{turn_id}' runs in another process.", param="response_id"
            )
        if running is not None:
            subscriber = LastSubscriber()
            running.attach_to_rest(subscriber)
            running.notify(Cancel())
            async with listening(exchange):
                await subscriber.ended()
            response = running.response
        await exchange.answer(200, encode(response))

    async def _delete(self, exchange: Exchange) -> None:
        turn_id, running = exchange.arguments["id"], await self._reach(exchange)
        if running is not None and not running.is_ended:
            raise Conflict(
                f"Response with id '{turn_id}' is still in progress.", param="response_id"
            )
        if not await self._services.erase(exchange.owner, turn_id):
            raise response_not_found(turn_id)
        await exchange.answer(200, encode(Deleted(id=turn_id)))

    async def _input_items(self, exchange: Exchange) -> None:
        turn = await self._read(exchange.owner, exchange.arguments["id"])
        named = [(_item_id(turn, index, item), item) for index, item in enumerate(turn.given)]
        await exchange.answer(200, page_of(named, exchange.query))

    async def _read(self, owner: Owner, turn_id: str) -> Turn:
        turn = await self._services.turns.read(owner, turn_id)
        if turn is None:
            raise response_not_found(turn_id)
        return turn

    async def _models(self, exchange: Exchange) -> None:
        models = [_model_object(name, one) for name, one in self._services.runner.models.items()]
        await exchange.answer(200, encode(ModelList(data=models)))

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.arguments["id"]
        model = self._services.runner.models.get(name)
        if model is None:
            raise model_not_found(name)
        await exchange.answer(200, encode(_model_object(name, model)))

    async def _health(self, exchange: Exchange) -> None:
        await exchange.answer(200, b'{"status":"ok"}')

    async def _ready(self, exchange: Exchange) -> None:
        checks = await self._services.is_ready()
        checks["accepting"] = not self._services.runner.is_draining
        is_ready = all(checks.values())
        answer: dict[str, object] = {"status": "ready" if is_ready else "not ready"}
        if await self._may_see_checks(exchange):
            answer["checks"] = checks
        await exchange.answer(200 if is_ready else 503, encode(answer))

    async def _may_see_checks(self, exchange: Exchange) -> bool:
        """A load balancer has no key and needs only the status; the names of engines are for those who may look."""
        try:
            await self._admit(exchange, "metrics")
        except ApiError:
            return False
        return True

    async def _metrics(self, exchange: Exchange) -> None:
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        await exchange.answer(200, await self._services.write_metrics(), [kind])

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.answer(200, openapi(self.routes))

    async def _asyncapi(self, exchange: Exchange) -> None:
        await exchange.answer(200, asyncapi())


def _model_object(name: str, model: Model) -> ModelCard:
    return ModelCard(id=name, created=model.created_at, context_window=model.context_tokens)


def _item_id(turn: Turn, index: int, item: Item) -> str:
    """The item's own id, or one that is always the same for this item of this turn."""
    return item.value.id or given_id(turn.id, index)
