"""How does a request by HTTP become a turn, and how do the turn's events reach its client?

What every API does in the same way, whatever its requests and events look like: the body within the limits of the key,
who asks and how it was received, then either the end of the turn or a stream that goes at the client's pace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing

from msgspec import structs

from segue.aio import off_loop
from segue.errors import ApiError
from segue.ids import shown_id
from segue.listener.auth import client_name
from segue.listener.exchange import ClientGone, Exchange, listening, text_header
from segue.listener.services import Services
from segue.listener.subscribers import SSE_HEADERS, LastSubscriber, SseSubscriber, WriteEvents
from segue.turn.notices import Cancel
from segue.turn.plan import Arrival, Caller, Receipt
from segue.turn.running import Running
from segue.wire.codec import LARGE_BYTES, decode_traceparent
from segue.wire.requests import Create

WARNINGS = b"x-segue-warnings"
NOT_OFFERED = "The model was not offered the tool '%s': it is not set up here, or not allowed for this API key."


async def receive(
    exchange: Exchange, services: Services, decode: Callable[[bytes | bytearray], Create]
) -> Arrival:
    """What this exchange asks for, by whom, and how it was received. It counts against the limits of its key, and a
    large body is decoded beside the event loop."""
    account = exchange.account
    await count_turn(exchange)
    body = await exchange.text(services.limits.body_bytes_max)
    create = await off_loop(len(body) > LARGE_BYTES, decode, body)
    caller = Caller(
        exchange.owner,
        services.turns,
        may=account.scopes,
        quota=account.turn_quota,
        key=account.digest,
        key_id=account.key_id,
        models=account.limits.models,
    )
    receipt = Receipt(
        exchange.label + "http",
        request_id=exchange.request_id,
        client=client_name(exchange.header(b"user-agent")),
        traceparent=exchange.header(b"traceparent") or decode_traceparent(create),
        bytes_received=exchange.body_bytes,
    )
    return Arrival(create, caller, receipt)


async def count_turn(exchange: Exchange) -> None:
    """Count it against the limits of its key, or refuse it; the headers of the answer say what is left."""
    account = exchange.account
    if not account.is_limited:
        return
    quota = account.quota
    try:
        await quota.count_request()
        warnings = () if quota.budget is None else quota.budget.warnings
    finally:
        headers = exchange.rate_headers(quota.rates)
        exchange.more_headers = (*exchange.more_headers, *headers)
    if warnings:
        told = text_header(WARNINGS, " ".join(warnings))
        exchange.more_headers = (*exchange.more_headers, told)


async def run_to_end(exchange: Exchange, services: Services, arrival: Arrival) -> Running:
    """A turn that has ended, or that runs in the background; its failure is raised."""
    subscriber = LastSubscriber()
    running = await services.runner.begin(arrival, subscriber)
    exchange.release_body()
    name_turn(exchange, running)
    if running.is_background:
        running.detach(subscriber)
    else:
        await wait_for_end(exchange, running, subscriber)
    if running.error is not None:
        raise running.error
    return running


def name_turn(exchange: Exchange, running: Running) -> None:
    """The exchange has become this turn; its headers say what was left out of it."""
    exchange.response_id = shown_id(running.id, exchange.label)
    if kinds := running.tally.unserved_tools:
        sentences = " ".join(NOT_OFFERED % kind for kind in kinds)
        exchange.more_headers = (*exchange.more_headers, text_header(WARNINGS, sentences))


@asynccontextmanager
async def subscribed(
    exchange: Exchange, running: Running, subscriber: SseSubscriber | LastSubscriber
) -> AsyncIterator[None]:
    """Watch the client of a turn while inside; if it leaves before the end, that is a cancel, unless the turn has other
    subscribers or runs in the background, or the client was cut to come back for the rest."""
    try:
        async with listening(exchange):
            yield
    finally:
        running.detach(subscriber)
        goes_on = running.has_subscribers or running.is_background or subscriber.is_lost
        if not (running.is_ended or goes_on):
            running.notify(Cancel())


async def wait_for_end(exchange: Exchange, running: Running, subscriber: LastSubscriber) -> None:
    """Wait for the end of a turn; a client that leaves earlier has cancelled it."""
    async with subscribed(exchange, running, subscriber):
        await subscriber.ended()


def open_stream(services: Services, write: WriteEvents, last: bytes = b"") -> SseSubscriber:
    """A subscriber for a stream of server-sent events, within the limits of a client."""
    return SseSubscriber(write, services.limits.outbox_bytes_max, services.memory.unread, last)


async def stream(
    exchange: Exchange, services: Services, arrival: Arrival, subscriber: SseSubscriber
) -> None:
    """Every event of a turn, as it comes. A turn that fails before anything was written is answered with a status."""
    receipt = structs.replace(arrival.receipt, transport=exchange.label + "sse", is_streamed=True)
    running = await services.runner.begin(structs.replace(arrival, receipt=receipt), subscriber)
    exchange.release_body()
    name_turn(exchange, running)
    if arrival.create.idempotency_key is not None:
        # A repeat that is refused leaves the turn alone.
        subscriber.check()
    async with subscribed(exchange, running, subscriber):
        await write_stream(exchange, services, subscriber)
    if running.error is not None:
        exchange.reason = running.error.code
        if not exchange.has_started:
            raise running.error


async def write_stream(exchange: Exchange, services: Services, subscriber: SseSubscriber) -> None:
    """Write what the subscriber gets until its turn has ended, at the pace of the client."""
    with closing(subscriber):
        while not subscriber.is_over:
            data = await subscriber.read()
            if subscriber.is_lost:
                # The client comes back for the rest, to the process that has the turn then.
                await exchange.cut()
                raise ClientGone
            if subscriber.missed_after is not None and not data:
                await _catch_up(exchange, services, subscriber, subscriber.missed_after)
                continue
            if not exchange.has_started:
                if not data:
                    continue
                await exchange.start(200, SSE_HEADERS)
            async with asyncio.timeout(services.limits.write_s_max):
                await exchange.write(data, is_last=subscriber.is_over)


async def _catch_up(
    exchange: Exchange, services: Services, subscriber: SseSubscriber, after: int
) -> None:
    """Follow a turn again that went on while the client did not read. Where its events are not kept, or too much waits
    to be read, the client has to come back."""
    assert subscriber.running is not None, "only who follows a turn misses its events"
    registry, turn_id = services.runner.registry, subscriber.running.id
    try:
        is_followed = await registry.follow(exchange.owner, turn_id, subscriber, after)
        subscriber.check()
    except ApiError:
        is_followed = False
    if is_followed and subscriber.missed_after is not None:
        # Nothing was missed yet, or the end of the turn is in no log.
        is_followed = not subscriber.running.is_ended
        subscriber.missed_after = None
    if not is_followed:
        subscriber.lose()
