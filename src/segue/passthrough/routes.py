"""How does a request reach the engine as it came, and its answer the client?

It counts as a turn against the limits of its key, and its usage is recorded where the engine reports it; but it is no
turn: nothing is rendered, kept or looked at. So a model with guards does not take it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import perf_counter
from typing import Protocol

from segue.aio import off_loop
from segue.errors import ApiError, CallerError, Forbidden, model_not_found
from segue.limits import permitted
from segue.listener.auth import client_name
from segue.listener.exchange import Exchange, listening
from segue.listener.services import Services
from segue.listener.subscribers import SSE_HEADERS
from segue.listener.turns import count_turn
from segue.passthrough.body import PassedUsage, StreamedAnswer, WholeAnswer, decode_passed
from segue.process.afterwards import EndedTurn
from segue.process.beginnings import shutting_down
from segue.seams.history import Owner, UsageEntry
from segue.seams.model import Engine
from segue.turn.plan import Model, Receipt, Tally
from segue.wire.codec import LARGE_BYTES

SSE = "text/event-stream"
JSON_HEADERS = (
    (b"content-type", b"application/json"),
    (b"x-content-type-options", b"nosniff"),
)


class Forwarded(Protocol):
    """The answer of a server of an engine."""

    @property
    def content_type(self) -> str:
        """What it is."""

    async def read(self) -> bytes:
        """What has arrived, as soon as there is something; empty at the end."""


class Forward(Protocol):
    """Sends a request to a server of an engine."""

    def __call__(
        self, engine: Engine, owner: Owner, path: str, body_for: Callable[[str], bytes]
    ) -> AbstractAsyncContextManager[Forwarded]:
        """The answer to a body, which is made for the name that the server has for the model. A refusal is raised."""


async def pass_on(exchange: Exchange, services: Services, forward: Forward) -> None:
    """Send the request to the engine of its model, and its answer to the client."""
    await count_turn(exchange)
    body = await exchange.text(services.limits.body_bytes_max)
    passed = await off_loop(len(body) > LARGE_BYTES, decode_passed, body)
    model = _model(services, exchange, passed.model)
    path, request = exchange.route, passed.request
    # Only an answer of text has a length.
    tokens_max = model.output_tokens_max if path == "/v1/completions" else None

    def body_for(name: str) -> bytes:
        return passed.encoded(name, tokens_max)

    reader = StreamedAnswer(wants_usage=request.wants_usage) if request.stream else WholeAnswer()
    # An engine may take its time: others need not wait with what they send.
    with exchange.holding_body():
        async with (
            _counted(exchange, services, model, reader.usage),
            listening(exchange),
            forward(model.engine, exchange.owner, path, body_for) as answer,
        ):
            await _copy(exchange, services, answer, reader)


def _model(services: Services, exchange: Exchange, name: str) -> Model:
    runner = services.runner
    if runner.is_draining:
        raise shutting_down()
    models = permitted(runner.models, exchange.account.limits.models)
    model = models.get(name)
    if model is None:
        raise model_not_found(name, models)
    guards = runner.resources.guards.get(exchange.owner, model.guards)
    if guards.inputs or guards.outputs:
        raise Forbidden(
            f"The model '{model.name}' has guards, which do not see requests that are passed on to its engine. "
            "Use /v1/responses, /v1/messages or /v1/chat/completions.",
            code="unsupported_value",
        )
    return model


async def _copy(
    exchange: Exchange, services: Services, answer: Forwarded, reader: StreamedAnswer | WholeAnswer
) -> None:
    """Write the answer as it comes, at the pace of the client."""
    # Whatever the engine calls it: a browser must take it for nothing else.
    headers = SSE_HEADERS if answer.content_type == SSE else JSON_HEADERS
    while data := await answer.read():
        data = reader.feed(data)
        if not exchange.has_started:
            await exchange.start(200, headers)
        async with asyncio.timeout(services.limits.write_s_max):
            await exchange.write(data, is_last=False)
    if not exchange.has_started:
        await exchange.start(200, headers)
    await exchange.write(reader.end(), is_last=True)


@asynccontextmanager
async def _counted(
    exchange: Exchange, services: Services, model: Model, usage: Callable[[int], PassedUsage]
) -> AsyncIterator[None]:
    """Hold a place of the key while inside; then count what was used against its limits and into the ledger."""
    quota = exchange.account.turn_quota
    if quota is not None:
        await quota.hold()
    status, error = "failed", None
    exchange.response_id = services.runner.registry.new_id()
    try:
        yield
        status = "completed"
    except ApiError as refusal:
        error = refusal
        raise
    finally:
        size = exchange.body_bytes
        prompt, cached, completion = usage(size).counts(size)
        if quota is not None:
            quota.release(exchange.response_id, prompt + completion)
        entry = UsageEntry(
            turn_id=exchange.response_id,
            owner=exchange.owner,
            model=model.name,
            status=status,
            input_tokens=prompt,
            cached_tokens=cached,
            output_tokens=completion,
            ended_at=int(time.time()),
            key_id=exchange.account.key_id,
        )
        receipt = Receipt(
            exchange.label + "http",
            request_id=exchange.request_id,
            client=client_name(exchange.header(b"user-agent")),
            bytes_received=exchange.body_bytes,
            received_at=exchange.received_at,
        )
        tally = Tally(bytes_received=exchange.body_bytes)
        ended = EndedTurn(
            entry,
            tally,
            receipt,
            sent_at=perf_counter(),
            error=None if error is None else error.code,
            error_status=0 if error is None else error.status,
            is_callers_fault=isinstance(error, CallerError),
        )
        await services.runner.records.afterwards.put(ended)
