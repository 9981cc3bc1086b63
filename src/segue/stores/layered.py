"""How do a cache and a store look like one store? Near is the cache, far is the store after it.

In: two `Turns`, or the cache of a process and a whole `Store`. Out: the same again. A turn is looked for near, then
far, and what was found far is kept near, unless it still runs: another process may be running it, and its end would
not be seen here. A turn that is not to be stored never reaches the far store, nor does its idempotency key. If the far
store cannot be reached its error passes through: never "not found".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

from segue.seams.history import Owner, Turn
from segue.seams.store import Claim, IdempotencyKeys, Maintenance, Retention
from segue.stores.memory import MemoryIdempotencyKeys
from segue.stores.memory_turns import LayeredTurns, MemoryTurns
from segue.stores.store import Store

# How often what is stored is in memory while it is read: in the database's buffers, as the rows, as the bytes of items,
# and as their values.
READ_COST = 4


class LayeredStore:
    """A store with the cache of this process in front."""

    def __init__(self, far: Store, bytes_max: int) -> None:
        near = MemoryTurns(bytes_max, stored_only=True)
        unstored = MemoryIdempotencyKeys()
        self.far_turns = WeighedTurns(far)
        self.turns = LayeredTurns(near, self.far_turns)
        self.idempotency_keys = LayeredIdempotencyKeys(unstored, far.idempotency_keys)
        self.maintenance = LayeredMaintenance(near, far.maintenance)
        self.listing = far.listing
        self.ledger = far.ledger
        self.events = far.events
        self.conversations = far.conversations
        self.keys = far.keys
        self.files = far.files
        self.skills = far.skills
        self.shared_limits = far.shared_limits
        self.ring = far.ring
        self.is_ready = far.is_ready
        self.close = far.close
        # The turns in the memory of this process, and what else is there.
        self.state = near
        self.beside = (unstored,)


class WeighedTurns:
    """The turns of a far store. What is read of them is weighed before it is in memory."""

    def __init__(self, far: Store) -> None:
        self._turns = far.turns
        self._listing = far.listing
        self.save = far.turns.save
        self.delete = far.turns.delete
        # Sets so many bytes aside, while inside.
        self.reserve: Callable[[int], AbstractAsyncContextManager[object]] = nullcontext

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        async with self.reserve(await self._cost(owner, turn_id, with_chain=True)):
            return await self._turns.find(owner, turn_id)

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        async with self.reserve(await self._cost(owner, turn_id, with_chain=False)):
            return await self._turns.read(owner, turn_id)

    async def _cost(self, owner: Owner, turn_id: str, *, with_chain: bool) -> int:
        return READ_COST * await self._listing.stored_bytes(owner, turn_id, with_chain=with_chain)


class LayeredIdempotencyKeys:
    """The keys of unstored turns in this process only, the keys of stored turns in the store."""

    def __init__(self, near: MemoryIdempotencyKeys, far: IdempotencyKeys) -> None:
        self._near = near
        self._far = far

    async def claim(self, claim: Claim) -> Claim:
        """A key that an unstored turn holds here is not free for a stored one."""
        if not claim.is_stored:
            return await self._near.claim(claim)
        return self._near.held(claim) or await self._far.claim(claim)

    async def release(self, claim: Claim) -> None:
        await (self._far if claim.is_stored else self._near).release(claim)


class LayeredMaintenance:
    """Maintenance of a store and of the process's cache in front of it."""

    def __init__(self, near: MemoryTurns, far: Maintenance) -> None:
        self._near = near
        self._far = far
        self.beat = far.beat
        self.recover = far.recover
        self.take_over = far.take_over
        self.erasures = far.erasures

    async def sweep(self, retention: Retention) -> bool:
        """Erase a few far, and drop near everything that is too old."""
        if retention.turns_s:
            self._near.expire(int(time.time()) - retention.turns_s)
        return await self._far.sweep(retention)
