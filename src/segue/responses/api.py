"""What is the Responses API at the edge? Its paths, its routes, its errors, and its WebSocket.

The routes of conversations belong to it: they are a part of the same API.
"""

from __future__ import annotations

from collections.abc import Sequence

from segue.listener.api import Api, Route, Upgrade
from segue.listener.auth import bearer_key
from segue.listener.exchange import plain_error
from segue.listener.services import Services
from segue.responses.conversations import ConversationRoutes
from segue.responses.routes import ResponseRoutes
from segue.responses.websocket import SocketSession

SCOPE = "responses"


def routes(services: Services) -> Sequence[Route]:
    """All routes of the API."""
    responses, conversations = ResponseRoutes(services), ConversationRoutes(services)
    response, conversation = "/v1/responses/{id}", "/v1/conversations/{id}"
    items, item = conversation + "/items", conversation + "/items/{item_id}"
    return (
        Route("POST", "/v1/responses", responses.create, SCOPE, is_turn=True),
        Route("POST", "/v1/responses/compact", responses.compact, SCOPE, is_turn=True),
        Route("POST", "/v1/responses/input_tokens", responses.count_tokens, SCOPE, is_turn=True),
        Route("GET", response, responses.retrieve, SCOPE),
        Route("DELETE", response, responses.delete, SCOPE),
        Route("POST", response + "/cancel", responses.cancel, SCOPE),
        Route("GET", response + "/input_items", responses.list_input, SCOPE),
        Route("GET", response + "/cache", responses.explain, SCOPE),
        Route("POST", "/v1/conversations", conversations.create, SCOPE),
        Route("GET", conversation, conversations.get, SCOPE),
        Route("POST", conversation, conversations.update, SCOPE),
        Route("DELETE", conversation, conversations.delete, SCOPE),
        Route("GET", items, conversations.list_items, SCOPE),
        Route("POST", items, conversations.add_items, SCOPE),
        Route("GET", item, conversations.get_item, SCOPE),
        Route("DELETE", item, conversations.delete_item, SCOPE),
    )


RESPONSES = Api(
    name="responses",
    # Agents leave the version out, or use the path of their own product; all of them mean the same.
    paths={"/v1/responses": ("/responses", "/v1/codex/responses"), "/v1/conversations": ()},
    routes=routes,
    error_answer=plain_error,
    find_secret=bearer_key,
    # Its transports are called "http", "sse" and "websocket": they are older than other APIs.
    label="",
    upgrade=Upgrade("/v1/responses", SocketSession, SCOPE),
)
