"""How do requests arrive and answers leave by HTTP? One ASGI application with one table of routes.

A request is checked in this order: where it comes from, which route it is for, who sends it; then its handler runs.
Every answer carries `x-request-id`. An error anywhere before the first byte of an answer becomes a status.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from msgspec import UNSET

from segue.errors import ApiError, NotFound, Refused, model_not_found
from segue.ids import current_request
from segue.listener.auth import bearer
from segue.listener.exchange import ClientGone, Exchange, Receive, Scope, Send, answerable
from segue.listener.services import Services
from segue.openapi.pages import asyncapi, openapi
from segue.responses.conversations import ConversationRoutes
from segue.responses.routes import ResponseRoutes
from segue.turn.plan import Model
from segue.wire.codec import encode
from segue.wire.response import ModelCard, ModelList

log = logging.getLogger(__name__)

# Agents leave the version out, or use the path of their own product; all of them mean the same.
RESPONSES = r"(?:/v1|/v1/codex)?/responses"
HEALTH = "/health"
# Paths of APIs that clients try and Segue does not have: Chat Completions, Completions, Messages.
OTHER_APIS = ("/completions", "/messages")
OTHER_APIS_HINT = " Segue serves the Responses API: POST /v1/responses."
METRICS_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")

Handler = Callable[[Exchange], Awaitable[None]]


class Route(NamedTuple):
    """A method and a path, the handler, and the scope that a key needs; without a scope no key is needed."""

    verb: str
    path: str
    call: Handler
    scope: str | None
    # Whether its handler counts it as a request for a turn.
    is_turn: bool = False


class HttpApp:
    """The ASGI application: routes each request to its handler."""

    def __init__(self, services: Services, more: Sequence[Route] = ()) -> None:
        self._services = services
        responses, conversations = ResponseRoutes(services), ConversationRoutes(services)
        response = r"/v1/responses/(?P<id>[^/]+)"
        conversation = r"/v1/conversations/(?P<id>[^/]+)"
        item = conversation + r"/items/(?P<item_id>[^/]+)"
        self.table = (
            *more,
            Route("GET", r"/health", self._health, None),
            Route("GET", r"/ready", self._ready, None),
            Route("GET", r"/metrics", self._metrics, "metrics"),
            Route("POST", r"/v1/responses", responses.create, "responses", True),
            Route("POST", r"/v1/responses/compact", responses.compact, "responses", True),
            Route("POST", r"/v1/responses/input_tokens", responses.count_tokens, "responses", True),
            Route("GET", response, responses.retrieve, "responses"),
            Route("DELETE", response, responses.delete, "responses"),
            Route("POST", response + r"/cancel", responses.cancel, "responses"),
            Route("GET", response + r"/input_items", responses.list_input, "responses"),
            Route("GET", response + r"/cache", responses.explain, "responses"),
            Route("POST", r"/v1/conversations", conversations.create, "responses"),
            Route("GET", conversation, conversations.get, "responses"),
            Route("POST", conversation, conversations.update, "responses"),
            Route("DELETE", conversation, conversations.delete, "responses"),
            Route("GET", conversation + r"/items", conversations.list_items, "responses"),
            Route("POST", conversation + r"/items", conversations.add_items, "responses"),
            Route("GET", item, conversations.get_item, "responses"),
            Route("DELETE", item, conversations.delete_item, "responses"),
            Route("GET", r"/v1/models", self._models, "models"),
            Route("GET", r"/v1/models/(?P<id>.+)", self._model, "models"),
            Route("GET", r"/openapi\.json", self._openapi, None),
            Route("GET", r"/asyncapi\.json", self._asyncapi, None),
        )
        self.routes = tuple((route.verb, route.path) for route in self.table)
        # How a route is called in metrics.
        self._names = {route.path: _name(route.path) for route in self.table}
        self._patterns = [
            (re.compile(route.path.replace("/v1/responses", RESPONSES) + r"/?\Z"), route)
            for route in self.table
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's entry point."""
        assert scope["type"] == "http", "WebSockets have their own class, and there is no lifespan"
        body_s_max, memory = self._services.limits.body_s_max, self._services.memory
        exchange = Exchange(scope, receive, send, body_s_max, memory)
        current_request.set(exchange.request_id)
        try:
            await self._serve(exchange)
        except ClientGone:
            exchange.reason = "client_left"
        except ApiError as error:
            if not exchange.response_id:
                self._services.note_refusal("http", error.code, exchange.request_id)
            log.debug("request refused: %d %s", error.status, error.code)
            await exchange.refuse(error)
        except Exception as fault:
            answer = answerable(fault, "request failed", exchange.request_id)
            if exchange.has_started:
                raise
            await exchange.refuse(answer)
        finally:
            exchange.release()
            self._note(exchange)

    def _note(self, exchange: Exchange) -> None:
        services = self._services
        services.count_request(exchange.scope["method"], exchange.route, exchange.status)
        if services.write_access is not None:
            services.write_access(exchange.access_line())

    async def _serve(self, exchange: Exchange) -> None:
        policy, origin = self._services.origin_policy, exchange.header(b"origin")
        if exchange.scope["path"] != HEALTH:
            policy.check(exchange.header(b"host"), origin)
        if exchange.scope["method"] == "OPTIONS" and policy.is_listed(origin):
            wanted = exchange.header(b"access-control-request-headers")
            exchange.origin_headers = policy.preflight_headers(origin, wanted)
            await exchange.start(204, ())
            await exchange.write(b"", is_last=True)
            return
        exchange.origin_headers = policy.answer_headers(origin)
        route = self._find_route(exchange)
        if route.scope is not None:
            await self._authenticate(exchange, route.scope)
            if not route.is_turn:
                exchange.account.quota.take_other_request()
        await route.call(exchange)

    def _find_route(self, exchange: Exchange) -> Route:
        verb, path = exchange.scope["method"], exchange.scope["path"]
        allowed: set[str] = set()
        is_literal = False
        for pattern, route in self._patterns:
            match = pattern.match(path)
            # A literal path, such as /v1/responses/compact, is not an id.
            if match is None or (is_literal and match.groupdict()):
                continue
            if route.verb == verb or (route.verb == "GET" and verb == "HEAD"):
                exchange.arguments = match.groupdict()
                exchange.route = self._names[route.path]
                return route
            is_literal = not match.groupdict()
            allowed.add(route.verb)
        if not allowed:
            hint = OTHER_APIS_HINT if path.endswith(OTHER_APIS) else ""
            raise NotFound(f"Unknown request URL: {verb} {path[:256]}.{hint}", code="unknown_url")
        raise Refused(
            f"{verb} is not allowed here.",
            status=405,
            code="method_not_allowed",
            allow=", ".join(sorted(allowed)),
        )

    async def _authenticate(self, exchange: Exchange, scope: str) -> None:
        secret = bearer(exchange.header(b"authorization"))
        exchange.account = await self._services.accounts.find(secret)
        exchange.account.check_scope(scope)
        exchange.owner = exchange.account.owner
        exchange.key_name = exchange.account.key_name

    # --- models ---

    async def _models(self, exchange: Exchange) -> None:
        models = self._services.runner.models.items()
        cards = [_model_card(name, model) for name, model in models]
        await exchange.answer(200, encode(ModelList(data=cards)))

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.arguments["id"]
        models = self._services.runner.models
        model = models.get(name)
        if model is None:
            raise model_not_found(name, models)
        await exchange.answer(200, encode(_model_card(name, model)))

    # --- the server itself ---

    async def _health(self, exchange: Exchange) -> None:
        await exchange.answer(200, b'{"status":"ok"}')

    async def _ready(self, exchange: Exchange) -> None:
        checks = await self._services.is_ready()
        checks["accepting"] = not self._services.runner.is_draining
        is_ready = all(checks.values())
        body: dict[str, object] = {"status": "ready" if is_ready else "not ready"}
        if await self._may_see_checks(exchange):
            body["checks"] = checks
        await exchange.answer(200 if is_ready else 503, encode(body))

    async def _may_see_checks(self, exchange: Exchange) -> bool:
        """A load balancer has no key and needs only the status; the names of engines need the scope `metrics`."""
        try:
            await self._authenticate(exchange, "metrics")
        except ApiError:
            return False
        return True

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.answer(200, await self._services.write_metrics(), [METRICS_TYPE])

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.answer(200, openapi(self.routes))

    async def _asyncapi(self, exchange: Exchange) -> None:
        await exchange.answer(200, asyncapi())


def _name(path: str) -> str:
    """The pattern of a route as people write it: `/v1/responses/{id}`."""
    return re.sub(r"\(\?P<(\w+)>[^)]*\)", r"{\1}", path).replace("\\", "")


def _model_card(name: str, model: Model) -> ModelCard:
    return ModelCard(
        id=name,
        created=model.created_at,
        context_window=model.context_tokens or UNSET,
        input_modalities=["text", "image"] if model.sees_images else ["text"],
    )
