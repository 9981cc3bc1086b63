"""How does a queued turn outlive its process?

A turn in the background is saved with its request, and is queued until its engine begins. A process that stops lets go
of such turns, and one that dies leaves them; the store keeps them, and another process, or the next one on the same
store, takes each of them over once and runs it under its own id, for the same key. Its events go on where they ended.
The request may hold secrets of the client (`authorization` of an MCP server): it is kept sealed for its owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from segue.aio import cancel_all, in_background, spawn
from segue.errors import ApiError, ServerFault, TryLater
from segue.seams.access import Seals
from segue.seams.history import Owner, Turn
from segue.seams.store import Maintenance, Turns
from segue.turn.plan import Caller
from segue.wire.codec import decode_create, encode
from segue.wire.requests import Create

if TYPE_CHECKING:
    from segue.process.runner import Runner

log = logging.getLogger(__name__)

# How often a process asks for turns that no process owns, and tries again to run one that it could not run yet.
TAKE_S = 2.0

# A request is sealed in parts of this size, with pauses between them: some milliseconds each.
SEALED_BYTES_MAX = 1024 * 1024
PART_END = "."

# The caller of a turn, from its owner and the name of its key.
FindCaller = Callable[[Owner, str], Awaitable[Caller]]

_decode_request = msgspec.msgpack.Decoder(tuple[str, bytes]).decode


async def with_request(turn: Turn, create: Create, key: str, seals: Seals) -> Turn:
    """The turn with what is needed to run it elsewhere."""
    body = encode(create)
    parts: list[str] = []
    for start in range(0, len(body), SEALED_BYTES_MAX):
        if parts:
            await asyncio.sleep(0)
        parts.append(seals.seal(turn.owner, body[start : start + SEALED_BYTES_MAX]))
    return replace(turn, request=msgspec.msgpack.encode((key, PART_END.join(parts).encode())))


def asked_of(turn: Turn, seals: Seals) -> tuple[str, Create]:
    """The key and the request of a queued turn; one that cannot be read here is an error that ends the turn."""
    try:
        key, body = _decode_request(turn.request)
    except msgspec.DecodeError:
        raise ServerFault("This response was queued by a newer version of the server.") from None
    # Versions before 0.3.0 have written the request as it came. They refuse one that is sealed, as no JSON.
    if not body.startswith(b"{"):
        sealed = body.decode(errors="replace").split(PART_END)
        parts = [seals.open(turn.owner, part) for part in sealed]
        if None in parts:
            raise ServerFault("This response was queued by a server with other seal keys.")
        body = b"".join(filter(None, parts))
    return key, decode_create(body)


class QueuedTurns:
    """Runs the turns that other processes have left queued."""

    def __init__(
        self, runner: Runner, maintenance: Maintenance, turns: Turns, find_caller: FindCaller
    ) -> None:
        self._runner = runner
        self._maintenance = maintenance
        self._turns = turns
        self._find_caller = find_caller
        # Those that were taken over and do not run yet.
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def taken_over(self) -> AsyncIterator[None]:
        """Take over queued turns that no process owns while inside."""
        try:
            async with in_background("queued_turns", self._keep):
                yield
        finally:
            await cancel_all(self._tasks)

    async def _keep(self) -> None:
        """Take over as many as there is room for, again and again."""
        while True:
            room = 0 if self._runner.is_draining else self._runner.background_room
            try:
                taken = await self._maintenance.take_over(room)
            except ApiError:
                log.warning("queued responses of other processes could not be taken over")
                taken = ()
            if taken:
                log.info("%d queued responses were taken over", len(taken))
            for name in taken:
                spawn(self._run(*name), self._tasks)
            await asyncio.sleep(TAKE_S)

    async def _run(self, owner: Owner, turn_id: str) -> None:
        """Run one as soon as its key has a place for it; one that is refused now ends as failed."""
        while not self._runner.is_draining:
            try:
                turn = await self._turns.read(owner, turn_id)
                if turn is None or not turn.request:
                    # It was deleted meanwhile, or has begun.
                    return
                if self._runner.find(owner, turn_id) is None:
                    await self._resume(turn)
                    return
                # This process was paused, its turn was taken over, and has come back to it.
                await asyncio.sleep(TAKE_S)
            except TryLater:
                await asyncio.sleep(TAKE_S)
            except Exception:
                log.exception("turn %s was taken over and could not be run", turn_id)
                return

    async def _resume(self, turn: Turn) -> None:
        try:
            key, create = asked_of(turn, self._runner.resources.seals)
            caller = await self._find_caller(turn.owner, key)
            await self._runner.resume(turn, create, caller)
        except TryLater:
            raise
        except ApiError as error:
            await self._runner.refuse(turn, error, self._turns)
