"""What is remembered nearby and far away, as one: a cache before a store, or a connection's cache
before both.

In: two `Turns`. Out: a `Turns`. A turn is looked for near, then far, and what was found far is kept
near, unless it still runs: another process may be at it, and its end would not be seen here. A turn
that is not to be stored never reaches the far one, nor does the key of one (`LayeredIdempotencyKeys`). If
the far one cannot be reached its error passes through: never "not found".
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from segue.stores.memory import MemoryIdempotencyKeys, MemoryTurns
from segue.turn.seams import IdempotencyKeys, Maintenance, Turns
from segue.turn.values import Claim, Owner, Retention, Turn
from segue.wire.response import ENDED


class LayeredTurns:
    """Near, then far."""

    def __init__(self, near: Turns, far: Turns) -> None:
        self._near = near
        self._far = far

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn with its chain, near or far. Near takes in nothing that was deleted meanwhile."""
        turn = await self._near.find(owner, turn_id)
        if turn is None:
            turn = await self._fetch(owner, turn_id)
            if turn is not None and turn.response.status in ENDED:
                await self._near.save(turn)
        return turn

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn, near or far; reading keeps nothing."""
        turn = await self._near.read(owner, turn_id)
        return turn if turn is not None else await self._far.read(owner, turn_id)

    async def save(self, turn: Turn) -> None:
        """Far first, so that near never knows a stored turn that is not durable."""
        if turn.is_stored:
            await self._far.save(turn)
        await self._near.save(turn)

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        """Erase it in both."""
        was_far = await self._far.delete(owner, turn_id)
        was_near = await self._near.delete(owner, turn_id)
        return was_far or was_near

    async def _fetch(self, owner: Owner, turn_id: str) -> Turn | None:
        """From far: the one row if its parent is near, which then lends its chain; else the whole
        chain."""
        turn = await self._far.read(owner, turn_id)
        if turn is None or turn.parent_id is None or turn.parent is not None:
            return turn
        parent = await self._near.find(owner, turn.parent_id)
        if parent is None:
            return await self._far.find(owner, turn_id)
        return replace(turn, parent=parent, is_whole=parent.is_whole)


class LayeredIdempotencyKeys:
    """The keys of unstored turns in this process only, those of stored turns far away."""

    def __init__(self, near: MemoryIdempotencyKeys, far: IdempotencyKeys) -> None:
        self._near = near
        self._far = far

    async def claim(self, claim: Claim) -> Claim:
        """Take the key where it belongs. One that an unstored turn holds here is not free for a
        stored one."""
        if not claim.is_stored:
            return await self._near.claim(claim)
        return self._near.held(claim) or await self._far.claim(claim)

    async def release(self, claim: Claim) -> None:
        """Let go of the key where it is."""
        await (self._far if claim.is_stored else self._near).release(claim)


class LayeredMaintenance:
    """A store that is kept up, and the process's cache in front of it with it."""

    def __init__(self, near: MemoryTurns, far: Maintenance) -> None:
        self._near = near
        self._far = far

    async def recover(self) -> int:
        """End as failed what dead processes left running. They are never near."""
        return await self._far.recover()

    async def erasures(self) -> Sequence[tuple[Owner, str]]:
        """Turns that anybody has erased since the last call."""
        return await self._far.erasures()

    async def sweep(self, retention: Retention) -> bool:
        """Erase some far, and let go near of what is that old."""
        if retention.turns_s:
            self._near.expire(int(time.time()) - retention.turns_s)
        return await self._far.sweep(retention)
