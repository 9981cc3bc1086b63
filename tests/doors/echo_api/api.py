"""What is the echo API at the edge? An echo of Responses in other words: a room that exports one `Api`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from segue.errors import ApiError
from segue.listener.api import Api, Route
from segue.listener.exchange import ErrorAnswer, Exchange, ReadHeader
from segue.listener.services import Services
from segue.listener.turns import open_stream, receive, run_to_end, stream
from segue.wire.response import Response
from tests.doors.echo_api.request import decode_shout
from tests.doors.echo_api.stream import EchoWriter

OVERLOADED = 529


class ShoutRoutes:
    """The handlers of the echo API."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def shout(self, exchange: Exchange) -> None:
        arrival = await receive(exchange, self._services, decode_shout)
        if arrival.create.stream:
            subscriber = open_stream(self._services, EchoWriter().write)
            await stream(exchange, self._services, arrival, subscriber)
        else:
            running = await run_to_end(exchange, self._services, arrival)
            await exchange.answer(200, encode_echo(running.visible))

    async def voices(self, exchange: Exchange) -> None:
        """The models in the API's own shape, for clients that send its header."""
        await exchange.answer(200, msgspec.json.encode({"voices": [*self._services.runner.models]}))


def encode_echo(response: Response) -> bytes:
    items = [msgspec.json.decode(item) for item in response.output]
    texts = [part["text"] for item in items for part in item.get("content", ())]
    return msgspec.json.encode({"echo": response.id, "sounds": texts})


def routes(services: Services) -> Sequence[Route]:
    shouts = ShoutRoutes(services)
    return (
        Route("POST", "/v1/shouts", shouts.shout, "responses", is_turn=True),
        Route("GET", "/v1/models", shouts.voices, "models", header=b"echo-version"),
    )


def error_answer(error: ApiError, request_id: str) -> ErrorAnswer:
    """Errors have another shape, another header and, where the server has too much to do, another status."""
    fault = {"fault": {"kind": error.code, "words": error.message}, "shout": request_id}
    status = OVERLOADED if error.status == 503 else error.status
    headers = ((b"echo-request", request_id.encode()),)
    return ErrorAnswer(status, msgspec.json.encode(fault), headers)


def find_secret(header: ReadHeader) -> str | None:
    return header(b"x-echo-key") or None


ECHO = Api(
    name="echo",
    paths={"/v1/shouts": ("/shouts",)},
    routes=routes,
    error_answer=error_answer,
    find_secret=find_secret,
    label="echo_",
)
