"""What is the Messages API at the edge? Its paths, its errors, where a client's key is.

Everything else of this room is loaded by the first request for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from segue.budgets.headers import anthropic_headers
from segue.listener.api import Api, Route, late
from segue.listener.auth import bearer_key
from segue.listener.exchange import ReadHeader
from segue.listener.services import Services
from segue.messages.errors import error_answer

if TYPE_CHECKING:
    from segue.messages.routes import MessageRoutes

SCOPE = "responses"
# Clients of this API send it with every request; `/v1/models` has two shapes, and this header chooses.
VERSION = b"anthropic-version"


def routes(services: Services) -> Sequence[Route]:
    """All routes of the API."""

    def handlers() -> MessageRoutes:
        from segue.messages.routes import MessageRoutes

        return MessageRoutes(services)

    to = late(handlers)
    return (
        Route("POST", "/v1/messages", to("create"), SCOPE, is_turn=True),
        # Clients ask for many counts at once; a count is no turn.
        Route("POST", "/v1/messages/count_tokens", to("count_tokens"), SCOPE),
        Route("GET", "/v1/models", to("list_models"), "models", header=VERSION),
        Route("GET", "/v1/models/{id:.+}", to("model"), "models", header=VERSION),
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
    rate_headers=anthropic_headers,
)
