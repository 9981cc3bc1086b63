"""How does a queued turn outlive its process?

A turn in the background is saved with its request, and is queued until its engine begins. A process that stops lets go
of such turns, and one that dies leaves them; the store keeps them, and another process, or the next one on the same
store, takes each of them over once and runs it under its own id, for the same key. Its events go on where they ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from segue.aio import cancel_all, in_background, spawn
from segue.errors import ApiError, TryLater
from segue.process.runner import Runner
from segue.process.sealed_requests import asked_of
from segue.seams.history import Owner, Turn
from segue.seams.store import Maintenance, Turns
from segue.turn.plan import Caller

log = logging.getLogger(__name__)

# How often a process asks for turns that no process owns, and tries again to run one that it could not run yet.
TAKE_S = 2.0

# The caller of a turn, from its owner and the name of its key.
FindCaller = Callable[[Owner, str], Awaitable[Caller]]


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
            async with in_background("queued_turns", self._run_forever):
                yield
        finally:
            await cancel_all(self._tasks)

    async def _run_forever(self) -> None:
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
            for owner, turn_id in taken:
                spawn(self._run(owner, turn_id), self._tasks)
            await asyncio.sleep(TAKE_S)

    async def _run(self, owner: Owner, turn_id: str) -> None:
        """Run one as soon as its key has a place for it; one that is refused now ends as failed."""
        while not self._runner.is_draining:
            try:
                turn = await self._turns.read(owner, turn_id)
                if turn is None or not turn.request:
                    # It was deleted meanwhile, or has begun.
                    return
                if self._runner.registry.find(owner, turn_id) is None:
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
