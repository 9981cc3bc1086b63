"""What does the server pass on at the edge? Two paths, switched together with Chat Completions.

Everything else of this room is loaded by the first request for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from segue.completions.api import find_secret
from segue.listener.api import Api, Route
from segue.listener.exchange import Exchange, plain_error
from segue.listener.services import Services

if TYPE_CHECKING:
    from segue.passthrough.routes import Forward

SCOPE = "responses"


def passthrough_api(forward: Forward) -> Api:
    """The API; `forward` sends a request to a server of an engine."""

    def routes(services: Services) -> Sequence[Route]:
        async def call(exchange: Exchange) -> None:
            from segue.passthrough.routes import pass_on

            await pass_on(exchange, services, forward)

        return [Route("POST", path, call, SCOPE, is_turn=True) for path in paths]

    paths = {"/v1/completions": ("/completions",), "/v1/embeddings": ("/embeddings",)}
    return Api(
        # Clients of OpenAI's older APIs use all of them.
        name="chat",
        paths=paths,
        routes=routes,
        error_answer=plain_error,
        find_secret=find_secret,
        label="passthrough_",
    )
