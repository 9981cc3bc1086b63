"""How are responses created, read, followed and cancelled by HTTP? The handlers of `/v1/responses`.

A turn is the same here as on a WebSocket: preparing it may refuse the request with a status, then its events go to a
subscriber. A client that drops its request has cancelled it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import UNSET, structs

from segue.aio import off_loop
from segue.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    cut_name,
    response_not_found,
)
from segue.ids import given_id, new_id, turn_id_of
from segue.listener.exchange import Exchange, listening
from segue.listener.services import Services
from segue.listener.subscribers import LastSubscriber
from segue.listener.turns import (
    open_stream,
    receive,
    run_to_end,
    stream,
    wait_for_end,
    write_stream,
)
from segue.responses.paging import ListPage, choose_page, encode_page
from segue.seams.history import Owner, Turn
from segue.turn.compact import ASSUMED_CONTEXT_TOKENS, window
from segue.turn.notices import Cancel
from segue.turn.plan import Arrival
from segue.turn.running import Running
from segue.wire.codec import decode_create, encode
from segue.wire.events import Event
from segue.wire.response import ENDED, CompactionWindow, Deleted, InputTokens, Response

# Naming so many items takes some milliseconds.
MANY_ITEMS = 2_000
# As long as `idempotency_key` in a body may be.
KEY_CHARS_MAX = 255
# What follows the last event of a stream.
DONE = b"data: [DONE]\n\n"


def write_sse(events: Sequence[Event]) -> list[bytes]:
    """Events in SSE framing; the name of an event equals its type (docs/protocol.md 1.3)."""
    return [b"event: %b\ndata: %b\n\n" % (event.type.encode(), event.data) for event in events]


class ResponseRoutes:
    """The handlers of `/v1/responses`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._runner = services.runner
        self._registry = services.runner.registry

    # --- creating ---

    async def create(self, exchange: Exchange) -> None:
        """A new response: as a stream of events, or as one object."""
        arrival = await self._receive(exchange)
        create = arrival.create
        for name, value in (("stream_id", create.stream_id), ("rollout", create.rollout or UNSET)):
            if value is not UNSET:
                message = f"'{name}' is supported over WebSocket only."
                raise InvalidRequest(message, code="unsupported_parameter", param=name)
        key = exchange.header(b"idempotency-key")
        if key and len(key) > KEY_CHARS_MAX:
            message = f"'Idempotency-Key' may have at most {KEY_CHARS_MAX} characters."
            raise InvalidRequest(message, code="invalid_value", param="Idempotency-Key")
        if key:
            create = structs.replace(create, idempotency_key=key)
            arrival = structs.replace(arrival, create=create)
        if create.stream:
            subscriber = open_stream(self._services, write_sse, DONE)
            await stream(exchange, self._services, arrival, subscriber)
        else:
            running = await run_to_end(exchange, self._services, arrival)
            # In the background it has only begun.
            await exchange.answer(200, encode(running.visible))

    async def _receive(self, exchange: Exchange) -> Arrival:
        return await receive(exchange, self._services, decode_create)

    async def compact(self, exchange: Exchange) -> None:
        """A compaction window: from an unstored turn that writes a summary instead of an answer."""
        arrival = await self._receive(exchange)
        if arrival.create.model is None:
            raise InvalidRequest("You must provide a model parameter.", param="model")
        create = structs.replace(arrival.create, store=False, generate=None, background=None)
        subscriber = LastSubscriber()
        arrival = structs.replace(arrival, create=create, compacts="window")
        plan, running = await self._runner.compact(arrival, subscriber)
        exchange.response_id = running.id
        await wait_for_end(exchange, running, subscriber)
        if running.error is not None:
            raise running.error
        resolved = plan.resolved
        response = running.response
        bytes_max = plan.model.context_tokens or ASSUMED_CONTEXT_TOKENS
        kept = window(resolved.parent, resolved.given, bytes_max, new_id)
        answer = CompactionWindow(
            id=response.id,
            created_at=response.created_at,
            output=[*kept, *response.output],
            usage=response.usage,
        )
        await exchange.answer(200, encode(answer))

    async def count_tokens(self, exchange: Exchange) -> None:
        """The length of a prompt; nothing is generated."""
        count = await self._runner.count_tokens(await self._receive(exchange))
        await exchange.answer(200, encode(InputTokens(input_tokens=count)))

    # --- reading ---

    async def retrieve(self, exchange: Exchange) -> None:
        """A stored response as it stands, or the stream of its events."""
        turn_id, query = exchange.arguments["id"], exchange.query
        if query.get("stream") == "true":
            await self._follow(exchange, query.get("starting_after", "-1"))
            return
        running = self._running(exchange)
        if running is not None and turn_id not in self._registry.fenced:
            await exchange.answer(200, encode(running.visible))
            return
        turn = await self._services.turns.read(exchange.owner, turn_id)
        if turn is None or turn.response.status not in ENDED:
            # It may run in another worker, which knows its state.
            seen = await self._registry.snapshot(exchange.owner, turn_id, is_known=turn is not None)
            if seen is not None:
                await exchange.answer(200, seen)
                return
            turn = await self._read(exchange.owner, turn_id)
        await exchange.answer(200, encode(turn.response))

    async def _follow(self, exchange: Exchange, after: str) -> None:
        """The events after this number: those that were logged, and those still to come."""
        if not re.fullmatch("-1|[0-9]{1,15}", after):
            raise InvalidRequest("'starting_after' must be a number.", param="starting_after")
        turn_id = exchange.arguments["id"]
        ended: Response | None = None
        if await self._reach(exchange) is None:
            ended = (await self._read(exchange.owner, turn_id)).response
        subscriber = open_stream(self._services, write_sse, DONE)
        owner, follow = exchange.owner, self._registry.follow
        running: Running | None = None
        try:
            if not await follow(owner, turn_id, subscriber, int(after), ended):
                message = "The events of this response are not kept, or not that far back."
                raise InvalidRequest(message, code="unsupported_value", param="stream")
            running = self._running(exchange)
            if running is not None:
                # A client that does not keep up with another one gets the rest from there.
                self._runner.log_events(running)
            subscriber.check()
            if running is None or running.is_ended:
                subscriber.end()
            async with listening(exchange):
                await write_stream(exchange, self._services, subscriber)
        finally:
            if running is not None:
                running.detach(subscriber)

    async def list_input(self, exchange: Exchange) -> None:
        """A page of the input items of a stored response."""
        turn = await self._read(exchange.owner, exchange.arguments["id"])
        page = await off_loop(len(turn.given) > MANY_ITEMS, _choose_page, turn, exchange.query)
        items = turn.given[page.positions.start : page.positions.stop]
        await exchange.answer(200, encode_page(page, items))

    async def explain(self, exchange: Exchange) -> None:
        """What of the prompt of a response was reused, and what was not; also of one that is not stored."""
        asked_id = exchange.arguments["id"]
        report = await self._services.find_report(exchange.owner, turn_id_of(asked_id))
        if report is None:
            message = f"No cache report is kept for response '{cut_name(asked_id)}'."
            raise NotFound(message, param="response_id")
        await exchange.answer(200, encode(structs.replace(report, response_id=asked_id)))

    # --- ending ---

    async def cancel(self, exchange: Exchange) -> None:
        """Stop a turn that runs in the background, and answer with the response as it ended."""
        turn_id, running = exchange.arguments["id"], await self._reach(exchange)
        response = (
            running.response
            if running is not None
            else (await self._read(exchange.owner, turn_id)).response
        )
        if not response.background:
            message = "Only a response that was created with 'background' can be cancelled."
            raise InvalidRequest(message, code="unsupported_value", param="response_id")
        if running is None and response.status in ("queued", "in_progress"):
            message = f"Response with id '{turn_id}' runs in another process."
            raise Conflict(message, param="response_id")
        if running is not None:
            subscriber = LastSubscriber()
            running.attach_to_rest(subscriber)
            running.notify(Cancel())
            async with listening(exchange):
                await subscriber.ended()
            response = running.response
        await exchange.answer(200, encode(response))

    async def delete(self, exchange: Exchange) -> None:
        """Erase a stored response that has ended."""
        turn_id, running = exchange.arguments["id"], await self._reach(exchange)
        if running is not None and not running.is_ended:
            message = f"Response with id '{turn_id}' is still in progress."
            raise Conflict(message, param="response_id")
        if not await self._services.erase(exchange.owner, turn_id):
            raise response_not_found(turn_id)
        await exchange.answer(200, encode(Deleted(id=turn_id)))

    # --- finding ---

    def _running(self, exchange: Exchange) -> Running | None:
        """The running turn that the path names; an unstored turn cannot be named, not even while it runs."""
        return _stored(self._registry.find(exchange.owner, exchange.arguments["id"]))

    async def _reach(self, exchange: Exchange) -> Running | None:
        """The same, also while it runs in another worker."""
        turn_id = exchange.arguments["id"]
        return _stored(await self._registry.reach(exchange.owner, turn_id, self._services.turns))

    async def _read(self, owner: Owner, turn_id: str) -> Turn:
        turn = await self._services.turns.read(owner, turn_id)
        if turn is None:
            raise response_not_found(turn_id)
        return turn


def _choose_page(turn: Turn, query: dict[str, str]) -> ListPage:
    # An item without an id gets one that is always the same for this item of this turn.
    names = [item.value.id or given_id(turn.id, at) for at, item in enumerate(turn.given)]
    return choose_page(names, query)


def _stored(running: Running | None) -> Running | None:
    return running if running is not None and running.is_stored else None
