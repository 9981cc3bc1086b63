"""What is the Messages API at the edge? Its paths, its errors, where a client's key is.

Everything else of this room is loaded by the first request for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from segue.aio import off_loop
from segue.listener.api import Api, Route
from segue.listener.auth import bearer_key
from segue.listener.exchange import Exchange, ReadHeader
from segue.listener.services import Services
from segue.messages.errors import error_answer

if TYPE_CHECKING:
    from segue.messages.routes import MessageRoutes

SCOPE = "responses"
# Clients of this API send it with every request; `/v1/models` has two shapes, and this header chooses.
VERSION = b"anthropic-version"


class LateRoutes:
    """The handlers of the API, loaded by the first request, and beside the event loop: that takes a while."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._loaded: MessageRoutes | None = None

    async def _routes(self) -> MessageRoutes:
        if self._loaded is None:
            self._loaded = await off_loop(True, _load, self._services)
        return self._loaded

    async def create(self, exchange: Exchange) -> None:
        await (await self._routes()).create(exchange)

    async def count_tokens(self, exchange: Exchange) -> None:
        await (await self._routes()).count_tokens(exchange)

    async def list_models(self, exchange: Exchange) -> None:
        await (await self._routes()).list_models(exchange)

    async def model(self, exchange: Exchange) -> None:
        await (await self._routes()).model(exchange)


def _load(services: Services) -> MessageRoutes:
    from segue.messages.routes import MessageRoutes

    return MessageRoutes(services)


def routes(services: Services) -> Sequence[Route]:
    """All routes of the API."""
    late = LateRoutes(services)
    return (
        Route("POST", "/v1/messages", late.create, SCOPE, is_turn=True),
        # Clients ask for many counts at once; a count is no turn.
        Route("POST", "/v1/messages/count_tokens", late.count_tokens, SCOPE),
        Route("GET", "/v1/models", late.list_models, "models", header=VERSION),
        Route("GET", "/v1/models/{id:.+}", late.model, "models", header=VERSION),
    )


def find_secret(header: ReadHeader) -> str | None:
    """The key; where both headers have one, that of the API's own header."""
    return header(b"x-api-key").strip() or bearer_key(header)


MESSAGES = Api(
    name="messages",
    # The SDKs add the version to their base URL; people add it once more, or leave it out.
    paths={"/v1/messages": ("/messages", "/v1/v1/messages")},
    routes=routes,
    error_answer=error_answer,
    find_secret=find_secret,
    label="messages_",
)
