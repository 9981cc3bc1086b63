"""What does a server of an engine answer to a request that is passed on as it came?

In: a path and a body. Out: the answer, as it arrives. Of several servers a healthy one with the least to do takes it,
and another one where that cannot be reached; it waits in the same fair queue as jobs do. Only a failed connection says
something about the health of a server: what it answers here says nothing about jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from typing import Protocol, runtime_checkable

from segue.border.refusals import EngineLost, NotServed
from segue.engines.client import HttpResponse
from segue.engines.queued import QueuedEngine, refusal, servers_of
from segue.engines.upstream import DEFAULT_TIMEOUTS
from segue.errors import ApiError, NotFound, Unavailable
from segue.seams.history import Owner
from segue.seams.model import Engine


@runtime_checkable
class ForwardingEngine(Protocol):
    """An engine that is a server over HTTP."""

    async def forward(self, path: str, body_for: Callable[[str], bytes]) -> HttpResponse:
        """The answer to this body, which is made for the name that the server has for the model."""


class ForwardedAnswer:
    """The answer to a request that was passed on."""

    def __init__(self, response: HttpResponse) -> None:
        self._response = response
        self.content_type = response.content_type

    async def read(self) -> bytes:
        """What has arrived, as soon as there is something; empty at the end."""
        try:
            async with asyncio.timeout(DEFAULT_TIMEOUTS.silence_s):
                return await self._response.read()
        except OSError as error:
            raise EngineLost("The engine broke off in the middle of its answer.") from error


@asynccontextmanager
async def forwarded(
    engine: Engine, owner: Owner, path: str, body_for: Callable[[str], bytes]
) -> AsyncIterator[ForwardedAnswer]:
    """The answer of a server of this engine while inside; a refusal is raised."""
    failed: set[QueuedEngine] = set()
    while True:
        server = _choose(engine, owner, path, failed)
        assert isinstance(server.engine, ForwardingEngine)
        await server.queue.acquire(owner, "")
        try:
            try:
                response = await server.engine.forward(path, body_for)
            except (Unavailable, EngineLost) as error:
                server.note_error(error, owner)
                failed.add(server)
                continue
            except NotServed as error:
                raise _not_there(path) from error
            with closing(response):
                yield ForwardedAnswer(response)
            return
        finally:
            server.queue.release()


def _choose(engine: Engine, owner: Owner, path: str, failed: set[QueuedEngine]) -> QueuedEngine:
    """The server with the least to do, of those that take requests now."""
    servers = [each for each in servers_of(engine) if isinstance(each.engine, ForwardingEngine)]
    if not servers:
        raise _not_there(path)
    now = asyncio.get_running_loop().time()
    usable = [each for each in servers if each.is_open and each.usable_at(owner) <= now]
    left = [each for each in usable if each not in failed]
    if not left:
        raise refusal(servers, 0.0)
    return min(left, key=lambda server: server.queue.running + server.queue.waiting)


def _not_there(path: str) -> ApiError:
    message = f"The engine of this model does not have {path}."
    return NotFound(message, code="unknown_url", param="model")
