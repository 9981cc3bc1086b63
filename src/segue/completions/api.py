"""What is Chat Completions at the edge? Its paths, its errors, where a client's key is.

Everything else of this room is loaded by the first request for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from segue.errors import NotFound
from segue.listener.api import Api, Route, late
from segue.listener.auth import bearer_key
from segue.listener.exchange import Exchange, ReadHeader, plain_error
from segue.listener.services import Services

if TYPE_CHECKING:
    from segue.completions.routes import ChatRoutes

SCOPE = "responses"
PATH = "/v1/chat/completions"


async def find(exchange: Exchange) -> None:
    """There is nothing to list or to find."""
    message = "Chat completions are not stored by this server, also where 'store' is true."
    raise NotFound(f"{message} Stored responses are at /v1/responses/{{id}}.")


def routes(services: Services) -> Sequence[Route]:
    """All routes of the API."""

    def handlers() -> ChatRoutes:
        from segue.completions.routes import ChatRoutes

        return ChatRoutes(services)

    return (
        Route("POST", PATH, late(handlers)("create"), SCOPE, is_turn=True),
        Route("GET", PATH, find, SCOPE),
        Route("GET", PATH + "/{id}", find, SCOPE),
    )


def find_secret(header: ReadHeader) -> str | None:
    """The key: as a bearer token or, from clients that speak Messages as well, in its header."""
    secret = bearer_key(header)
    return secret or header(b"x-api-key").strip() or secret


CHAT = Api(
    name="chat",
    # Clients differ in whether their base URL has the version.
    paths={PATH: ("/chat/completions", "/v1/v1/chat/completions")},
    routes=routes,
    error_answer=plain_error,
    find_secret=find_secret,
    label="chat_",
)
