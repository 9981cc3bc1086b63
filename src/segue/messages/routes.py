"""How are messages created and counted by HTTP, and which models are there? The handlers of this API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from msgspec import UNSET, Raw, structs

from segue.aio import off_loop
from segue.errors import InvalidRequest, NotFound, cut_name
from segue.listener.exchange import Exchange
from segue.listener.services import Services
from segue.listener.subscribers import LastSubscriber
from segue.listener.turns import (
    arrive,
    open_stream,
    read_body,
    stream,
    wait_for_end,
)
from segue.messages import history, request
from segue.messages.answer import answer_of, refused_answer
from segue.messages.history import System, Translated
from segue.messages.models import encode_model, encode_page
from segue.messages.request import NONE_SHOWN, AskedTurn, MessagesBody, Shown, compile_request
from segue.messages.stream import INPUT_BLOCKED, MessageEvents
from segue.messages.threads import enter, inherit, open_thread
from segue.messages.tools import NO_TOOLING, Tooling, translate_tools, with_servers
from segue.seams.history import Owner
from segue.turn.plan import Arrival
from segue.wire.codec import LARGE_BYTES, decode_tools, encode
from segue.wire.effects import NO_EFFECTS

T = TypeVar("T")

# What the memo keeps under the bytes of a message, of the system prompt and of tools.
MESSAGE, SYSTEM, TOOLS = b"m", b"s", b"t"
# What clients say of their conversation, in the order in which it is believed.
SESSION_HEADERS = (b"x-claude-code-session-id", b"x-session-affinity", b"x-session-id")
REPAIRS = b"x-segue-repairs"


class MessageRoutes:
    """The handlers of `/v1/messages`, and of models for clients of this API."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._runner = services.runner

    async def create(self, exchange: Exchange) -> None:
        """A new message: as a stream of events, or as one object."""
        if exchange.account.is_limited:
            await exchange.account.quota.count_request()
        asked, arrival = await self._receive(exchange)
        if asked.repairs:
            repairs = (REPAIRS, ", ".join(asked.repairs).encode())
            exchange.origin_headers = (*exchange.origin_headers, repairs)
        try:
            if asked.create.stream:
                await self._stream(exchange, asked, arrival)
            else:
                await exchange.answer(200, await self._run(exchange, asked, arrival))
        except NotFound as error:
            raise _unknown_model(error, asked.create.model) from None

    async def _stream(self, exchange: Exchange, asked: AskedTurn, arrival: Arrival) -> None:
        writer = MessageEvents(asked, exchange.request_id)
        writer.subscriber = open_stream(self._services, writer.write)
        await stream(exchange, self._services, arrival, writer.subscriber)

    async def _run(self, exchange: Exchange, asked: AskedTurn, arrival: Arrival) -> bytes:
        subscriber = LastSubscriber()
        running = await self._runner.begin(arrival, subscriber)
        exchange.release_body()
        exchange.response_id = running.id
        await wait_for_end(exchange, running, subscriber)
        error = running.error
        if error is not None and error.code != INPUT_BLOCKED:
            raise error
        if error is not None:
            return refused_answer(running.response, asked, error.message)
        return answer_of(running.response, asked, running.tally.stop_string)

    async def count_tokens(self, exchange: Exchange) -> None:
        """The length of a prompt. It is no turn, and holds no slot of its key: clients ask for many at once."""
        asked, arrival = await self._receive(exchange, counts=True)
        caller = replace(arrival.caller, quota=None)
        try:
            count = await self._runner.count_tokens(structs.replace(arrival, caller=caller))
        except NotFound as error:
            raise _unknown_model(error, asked.create.model) from None
        await exchange.answer(200, encode({"input_tokens": count}))

    async def list_models(self, exchange: Exchange) -> None:
        await exchange.answer(200, encode_page(self._runner.models, exchange.query))

    async def model(self, exchange: Exchange) -> None:
        name = exchange.arguments["id"]
        model = self._runner.models.get(name)
        if model is None:
            raise _not_served(name)
        await exchange.answer(200, encode_model(name, model))

    # --- receiving ---

    async def _receive(
        self, exchange: Exchange, *, counts: bool = False
    ) -> tuple[AskedTurn, Arrival]:
        reading = _Reading(self._services, exchange.owner, counts=counts)
        body = await read_body(exchange, self._services, request.read_body)
        thread = None
        if body.thread is not None:
            thread = await open_thread(body, body.thread, exchange.account, self._services)
            body = inherit(body, thread)
        before = NONE_SHOWN if thread is None else thread.shown
        is_large = exchange.body_bytes > LARGE_BYTES
        asked = await off_loop(is_large, reading.compile, body, before)
        session = next(filter(None, map(exchange.header, SESSION_HEADERS)), None)
        if session is not None:
            create = structs.replace(asked.create, prompt_cache_key=session)
            asked = structs.replace(asked, create=create)
        arrival = arrive(exchange, self._services, asked.create)
        if thread is not None:
            arrival = enter(arrival, thread, body, asked.shown)
        if "web_search" in asked.served:
            self._check_search(arrival)
        return asked, arrival

    def _check_search(self, arrival: Arrival) -> None:
        """A search that the server cannot run is refused: the model would make up what it finds."""
        hosted = self._runner.resources.hosted
        tools, _ = decode_tools(arrival.create.tools or b"null", None)
        if hosted is not None:
            tools = hosted.load().offer(tools, NO_EFFECTS, None, arrival.caller.may)
        if not any(offer.builtin == "web_search" for offer in tools.hosted):
            problem = "the tool 'web_search' is not set up on this server, or not for this key"
            raise InvalidRequest(f"tools: {problem}", code="unsupported_tool", param="tools")


class _Reading:
    """Reads the body of one request. What has come before is not translated again."""

    def __init__(self, services: Services, owner: Owner, *, counts: bool) -> None:
        self._memo = services.memo
        self._owner = owner
        self._counts = counts

    def compile(self, body: MessagesBody, before: Shown) -> AskedTurn:
        """What the body asks for; `before`: what earlier turns of its thread have shown. Slow work if it is large."""
        messages = [self._message(raw, index) for index, raw in enumerate(body.messages)]
        system, tooling = self._system(body), self._tools(body)
        return compile_request(body, messages, system, tooling, counts=self._counts, before=before)

    def _message(self, raw: Raw, index: int) -> Translated:
        translate = partial(history.translate, index=index)
        return self._recall(MESSAGE, raw, Translated, translate)

    def _system(self, body: MessagesBody) -> System:
        if body.system is UNSET:
            return System()
        return self._recall(SYSTEM, body.system, System, history.translate_system)

    def _tools(self, body: MessagesBody) -> Tooling:
        tooling = NO_TOOLING
        if body.tools is not UNSET:
            tooling = self._recall(TOOLS, body.tools, Tooling, translate_tools)
        return with_servers(tooling, body.mcp_servers or ())

    def _recall(self, kind: bytes, raw: Raw, type_: type[T], translate: Callable[[Raw], T]) -> T:
        key = kind + bytes(raw)
        known = self._memo.find(self._owner, key)
        if isinstance(known, type_):
            return known
        value = translate(raw)
        self._memo.put(self._owner, key, value, 2 * len(key))
        return value


def _unknown_model(error: NotFound, name: str | None) -> NotFound:
    return _not_served(name or "") if error.code == "model_not_found" else error


def _not_served(name: str) -> NotFound:
    return NotFound(f"model: {cut_name(name)}", code="model_not_found", param="model")
