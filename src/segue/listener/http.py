"""How do requests arrive and answers leave by HTTP? One ASGI application over one table of routes.

A request is checked in this order: where it comes from, which route it is for, who sends it; then its handler runs.
Every answer carries `x-request-id`. An error anywhere before the first byte of an answer becomes a status, in the words
of the API that the path belongs to.
"""

from __future__ import annotations

import logging

from segue.errors import ApiError
from segue.ids import current_request
from segue.listener.auth import authenticate, bearer_key
from segue.listener.exchange import ClientGone, Exchange, Receive, Scope, Send, answerable
from segue.listener.services import Services
from segue.listener.table import RouteTable

log = logging.getLogger(__name__)

HEALTH = "/health"


class HttpApp:
    """The ASGI application: leads each request to its handler."""

    def __init__(self, services: Services, table: RouteTable) -> None:
        self._services = services
        self.table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's entry point."""
        assert scope["type"] == "http", "WebSockets have their own class, and there is no lifespan"
        services = self._services
        exchange = Exchange(scope, receive, send, services.limits.body_s_max, services.memory)
        current_request.set(exchange.request_id)
        try:
            await self._serve(exchange)
        except ClientGone:
            exchange.reason = "client_left"
        except ApiError as error:
            error.kept()
            self._choose_words(exchange)
            if not exchange.response_id:
                label = exchange.label + "http"
                services.note_refusal(label, error.code, exchange.request_id)
            log.debug("request refused: %d %s", error.status, error.code)
            await exchange.refuse(error)
        except Exception as fault:
            self._choose_words(exchange)
            answer = answerable(fault, "request failed", exchange.request_id)
            if exchange.has_started:
                raise
            await exchange.refuse(answer)
        finally:
            exchange.release_body()
            services.count_request(scope["method"], exchange.route, exchange.status)
            if services.write_access is not None:
                services.write_access(exchange.access_line())

    def _choose_words(self, exchange: Exchange) -> None:
        """An error of a request that has found no route is the error of the API that its path belongs to."""
        api = self.table.owner(exchange.scope["path"])
        if not exchange.route and api is not None:
            exchange.label = api.label
            exchange.error_answer = api.error_answer

    async def _serve(self, exchange: Exchange) -> None:
        policy, origin = self._services.origin_policy, exchange.header(b"origin")
        method, path = exchange.scope["method"], exchange.scope["path"]
        if path != HEALTH:
            policy.check(exchange.header(b"host"), origin)
        if method == "OPTIONS" and policy.is_listed(origin):
            wanted = exchange.header(b"access-control-request-headers")
            exchange.more_headers = policy.preflight_headers(origin, wanted)
            await exchange.start(204, ())
            await exchange.write(b"", is_last=True)
            return
        exchange.more_headers = policy.answer_headers(origin)
        route, exchange.arguments = self.table.find(method, path, exchange.header)
        exchange.route = route.name
        api = route.api
        if api is not None:
            exchange.label = api.label
            exchange.error_answer = api.error_answer
            exchange.rate_headers = api.rate_headers
        if route.scope is not None:
            find_secret = bearer_key if api is None else api.find_secret
            secret = find_secret(exchange.header)
            await authenticate(exchange, self._services.accounts, secret, route.scope)
            if not route.is_turn:
                exchange.account.quota.count_other_request()
        await route.call(exchange)
