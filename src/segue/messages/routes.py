"""How are messages created and counted by HTTP, and which models are there? The handlers of this API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

from segue.aio import off_loop
from segue.errors import ApiError, InvalidRequest, NotFound, cut_name
from segue.limits import permitted
from segue.listener.exchange import Exchange
from segue.listener.services import Services
from segue.listener.subscribers import LastSubscriber
from segue.listener.turns import name_turn, open_stream, receive, stream, wait_for_end
from segue.messages.answer import SealText, answer_of, refused_answer
from segue.messages.errors import REQUEST_ID
from segue.messages.models import encode_model, encode_page
from segue.messages.reading import MessageReading
from segue.messages.request import AskedTurn, Surroundings
from segue.messages.stream import INPUT_BLOCKED, MessageEvents
from segue.messages.threads import enter_thread
from segue.resent.memo import Memo
from segue.seams.access import open_text
from segue.turn.plan import Arrival, Caller, Receipt
from segue.wire.codec import LARGE_BYTES, decode_tools, encode
from segue.wire.effects import NO_EFFECTS

# What clients say of their conversation, in the order in which it is believed. A hint for the routing, no more.
SESSION_HEADERS = (b"x-claude-code-session-id", b"x-session-affinity", b"x-session-id")
BETA = b"anthropic-beta"
REPAIRS = b"x-segue-repairs"


class MessageRoutes:
    """The handlers of `/v1/messages`, and of models for clients of this API."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._runner = services.runner

    async def create(self, exchange: Exchange) -> None:
        """A new message: as a stream of events, or as one object."""
        reading = self._reading(exchange)
        arrival = await receive(exchange, self._services, reading.decode)
        if reading.body.thread is not None:
            arrival = await enter_thread(reading, arrival, exchange, self._services)
        asked = reading.asked
        if asked.served:
            await self._check_served(arrival)
        with _answering(exchange, asked):
            if asked.create.stream:
                await self._stream(exchange, asked, arrival)
            else:
                await self._answer(exchange, asked, arrival)

    def _reading(self, exchange: Exchange, *, counts: bool = False) -> MessageReading:
        session = next(filter(None, map(exchange.header, SESSION_HEADERS)), None)
        # All APIs share it: the beginning of a key says whose value it has.
        memo = cast("Memo[object]", self._services.memo)
        seals = self._runner.resources.seals
        unseal = partial(open_text, seals, exchange.owner, path="messages")
        is_beta = bool(exchange.header(BETA)) or "beta" in exchange.query
        return MessageReading(memo, exchange.owner, Surroundings(session, is_beta, counts), unseal)

    async def _stream(self, exchange: Exchange, asked: AskedTurn, arrival: Arrival) -> None:
        events = MessageEvents(asked, self._seal(exchange), exchange.request_id)
        events.subscriber = open_stream(self._services, events.write)
        await stream(exchange, self._services, arrival, events.subscriber)

    async def _answer(self, exchange: Exchange, asked: AskedTurn, arrival: Arrival) -> None:
        subscriber = LastSubscriber()
        running = await self._runner.begin(arrival, subscriber)
        exchange.release_body()
        name_turn(exchange, running)
        await wait_for_end(exchange, running, subscriber)
        error, response = running.error, running.response
        if error is None:
            body = answer_of(response, asked, self._seal(exchange), running.tally)
        elif error.code == INPUT_BLOCKED:
            body = refused_answer(response, asked, error.message)
        else:
            raise error
        await exchange.answer(200, body)

    def _seal(self, exchange: Exchange) -> SealText:
        return partial(self._runner.resources.seals.seal, exchange.owner)

    async def _check_served(self, arrival: Arrival) -> None:
        """A tool that the server cannot run is refused: the model would make up what it returns."""
        hosted = self._runner.resources.hosted
        listed = arrival.create.tools or b"null"
        tools, _ = await off_loop(len(listed) > LARGE_BYTES, decode_tools, listed, None)
        if hosted is not None:
            tools = hosted.load().offer(tools, NO_EFFECTS, None, arrival.caller.may)
        if tools.unserved:
            names = ", ".join(f"'{name}'" for name in tools.unserved)
            problem = f"{names} is not set up on this server, or not allowed for this key"
            raise InvalidRequest(f"tools: {problem}", code="unsupported_value", param="tools")

    async def count_tokens(self, exchange: Exchange) -> None:
        """The length of a prompt. It is no turn, and counts as none: clients ask for many at once."""
        reading = self._reading(exchange, counts=True)
        body = await exchange.text(self._services.limits.body_bytes_max)
        create = await off_loop(len(body) > LARGE_BYTES, reading.decode, body)
        account = exchange.account
        caller = Caller(
            exchange.owner,
            self._services.turns,
            may=account.scopes,
            models=account.limits.models,
        )
        receipt = Receipt(exchange.label + "http", bytes_received=exchange.body_bytes)
        arrival = Arrival(create, caller, receipt)
        if reading.body.thread is not None:
            arrival = await enter_thread(reading, arrival, exchange, self._services)
        with _answering(exchange, reading.asked):
            count = await self._runner.count_tokens(arrival)
            await exchange.answer(200, encode({"input_tokens": count}))

    async def list_models(self, exchange: Exchange) -> None:
        with _answering(exchange):
            models = permitted(self._runner.models, exchange.account.limits.models)
            await exchange.answer(200, encode_page(models, exchange.query))

    async def model(self, exchange: Exchange) -> None:
        name = exchange.arguments["id"]
        models = permitted(self._runner.models, exchange.account.limits.models)
        model = models.get(name)
        if model is None:
            raise _not_served(name)
        with _answering(exchange):
            await exchange.answer(200, encode_model(name, model))


@contextmanager
def _answering(exchange: Exchange, asked: AskedTurn | None = None) -> Iterator[None]:
    """An answer has the headers of this API; an error that comes before it brings its own."""
    usual = exchange.more_headers
    headers = [*usual, (REQUEST_ID, exchange.request_id.encode())]
    if asked is not None and asked.repairs:
        headers.append((REPAIRS, ", ".join(asked.repairs).encode()))
    exchange.more_headers = headers
    try:
        yield
    except ApiError as error:
        exchange.more_headers = usual
        if error.code == "model_not_found" and asked is not None:
            raise _not_served(asked.create.model or "") from None
        raise


def _not_served(name: str) -> NotFound:
    return NotFound(f"model: {cut_name(name)}", code="model_not_found", param="model")
