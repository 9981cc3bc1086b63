"""How does a request for a chat completion become a turn? The handlers of `/v1/chat/completions`.

The turn is the same as that of the Responses API. It is never stored, so no completion can be asked for later.
"""

from __future__ import annotations

from segue.completions.answer import encode_completion
from segue.completions.reading import ChatReading
from segue.completions.stream import ChunkWriter
from segue.errors import ApiError, InvalidRequest
from segue.listener.exchange import Exchange
from segue.listener.services import Services
from segue.listener.turns import open_stream, receive, run_to_end, stream
from segue.turn.plan import Arrival

# By which headers clients name their session. A hint for the routing, never an identity.
SESSION_HEADERS = (b"x-session-affinity", b"x-session-id", b"session-id", b"x-conversation-id")
# As much of it is kept with the turn.
SESSION_CHARS_MAX = 256


class ChatRoutes:
    """The handlers of the API."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, exchange: Exchange) -> None:
        """A completion: as a stream of chunks, or as one object."""
        session = next(filter(None, map(exchange.header, SESSION_HEADERS)), None)
        hint = session and session[:SESSION_CHARS_MAX]
        reading = ChatReading(self._services.memo, exchange.owner, hint)
        arrival = await receive(exchange, self._services, reading.decode)
        if reading.form.wants_search:
            self._check_search(exchange)
        try:
            if arrival.create.stream:
                await self._stream(exchange, arrival, reading)
            else:
                await self._answer(exchange, arrival, reading)
        except ApiError as error:
            raise reading.in_clients_words(error) from None

    def _check_search(self, exchange: Exchange) -> None:
        """A search that the server cannot run is refused: the model would make up what it finds."""
        if "web_search" not in self._services.set_up_tools(exchange.account.scopes):
            message = "'web_search_options': web search is not set up on this server, or not for this key."
            raise InvalidRequest(message, code="unsupported_value", param="web_search_options")

    async def _stream(self, exchange: Exchange, arrival: Arrival, reading: ChatReading) -> None:
        writer = ChunkWriter(reading.form)
        await stream(exchange, self._services, arrival, open_stream(self._services, writer.write))

    async def _answer(self, exchange: Exchange, arrival: Arrival, reading: ChatReading) -> None:
        running = await run_to_end(exchange, self._services, arrival)
        await exchange.answer(200, encode_completion(running.visible, reading.form))
