"""What does a server answer whatever its APIs are? Its health, its metrics, its models and what describes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec

from msgspec import UNSET

from segue.errors import ApiError, model_not_found
from segue.limits import permitted
from segue.listener.api import Route
from segue.listener.auth import authenticate, bearer_key
from segue.listener.exchange import Exchange
from segue.listener.services import Services
from segue.settings.values import API_NAMES
from segue.turn.plan import Model
from segue.wire.codec import encode
from segue.wire.response import ModelCard, ModelList

METRICS_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


def has_dashboard() -> bool:
    """Whether the package with the dashboard is installed."""
    return find_spec("segue_dashboard") is not None


class ServerPages:
    """The routes of the server itself."""

    def __init__(
        self,
        services: Services,
        check_health: Callable[[], Awaitable[dict[str, bool]]],
        write_metrics: Callable[[], Awaitable[bytes]],
        apis: Sequence[Route],
    ) -> None:
        """`apis`: the routes of the APIs, which the documents describe."""
        self._services = services
        self._check_health = check_health
        self._write_metrics = write_metrics
        self.routes = (
            Route("GET", "/health", self._health, None),
            # Claude Code looks here first.
            Route("GET", "/api/hello", self._health, None),
            Route("GET", "/ready", self._ready, None),
            Route("GET", "/metrics", self._metrics, "metrics"),
            Route("GET", "/v1/models", self._models, "models"),
            Route("GET", "/v1/models/{id:.+}", self._model, "models"),
            Route("GET", "/openapi.json", self._openapi, None),
            Route("GET", "/asyncapi.json", self._asyncapi, None),
        )
        # Where there is no dashboard.
        self.welcome = Route("GET", "/", self._welcome, None)
        # Where turns are asked for: the first path of each API.
        first: dict[str, str] = {}
        for route in apis:
            if route.is_turn and route.api is not None and route.api.name in API_NAMES:
                first.setdefault(route.api.name, route.path)
        self._paths = ", ".join(first.values())
        self.described = tuple((route.verb, route.name) for route in (*apis, *self.routes))

    @property
    def greeting(self) -> str:
        """What is served, and where."""
        return f"Segue serves {', '.join(self._services.runner.models)} at {self._paths}"

    async def _welcome(self, exchange: Exchange) -> None:
        text = f"{self.greeting}. See /health, /ready and /metrics.\n"
        await exchange.answer(200, text.encode(), [(b"content-type", b"text/plain; charset=utf-8")])

    async def _health(self, exchange: Exchange) -> None:
        await exchange.answer(200, b'{"status":"ok"}')

    async def _ready(self, exchange: Exchange) -> None:
        checks = await self._check_health()
        checks["accepting"] = not self._services.runner.is_draining
        is_ready = all(checks.values())
        body: dict[str, object] = {"status": "ready" if is_ready else "not ready"}
        if await self._may_see_checks(exchange):
            body["checks"] = checks
        await exchange.answer(200 if is_ready else 503, encode(body))

    async def _may_see_checks(self, exchange: Exchange) -> bool:
        """A load balancer has no key and needs only the status; the names of engines need the scope `metrics`."""
        secret = bearer_key(exchange.header)
        try:
            await authenticate(exchange, self._services.accounts, secret, "metrics")
        except ApiError:
            return False
        return True

    async def _metrics(self, exchange: Exchange) -> None:
        await exchange.answer(200, await self._write_metrics(), [METRICS_TYPE])

    async def _models(self, exchange: Exchange) -> None:
        models = permitted(self._services.runner.models, exchange.account.limits.models)
        cards = [_model_card(name, model) for name, model in models.items()]
        await exchange.answer(200, encode(ModelList(data=cards)))

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.arguments["id"]
        models = permitted(self._services.runner.models, exchange.account.limits.models)
        model = models.get(name)
        if model is None:
            raise model_not_found(name, models)
        await exchange.answer(200, encode(_model_card(name, model)))

    async def _openapi(self, exchange: Exchange) -> None:
        # Imported here and below: few servers are asked.
        from segue.openapi.pages import openapi

        await exchange.answer(200, openapi(self.described))

    async def _asyncapi(self, exchange: Exchange) -> None:
        from segue.openapi.pages import asyncapi

        await exchange.answer(200, asyncapi())


def _model_card(name: str, model: Model) -> ModelCard:
    return ModelCard(
        id=name,
        created=model.created_at,
        context_window=model.context_tokens or UNSET,
        input_modalities=["text", "image"] if model.sees_images else ["text"],
    )
