"""What does this process remember, for whom, and within which limits?"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from segue.accounts.account import Account, Accounts
from segue.accounts.hashes import KeyHashes
from segue.accounts.quota import Meter
from segue.listener.services import NearTurns
from segue.memory.budget import Memory
from segue.process.afterwards import EndedTurn
from segue.process.runner import Runner
from segue.reports.watch import ReuseWatch
from segue.resent.memo import Memo
from segue.resent.render_cache import RenderCache
from segue.seams.access import RingKey
from segue.seams.history import Owner
from segue.seams.store import Turns
from segue.server.cluster import Cluster
from segue.server.storage import ServerStore, check_public, check_ring, load_ring
from segue.settings.values import Settings
from segue.stores.layered import LayeredStore
from segue.stores.memory_turns import Budget, LayeredTurns, MemoryTurns
from segue.stores.threads import Threads
from segue.turn.plan import Caller

if TYPE_CHECKING:
    from segue.cluster.peers import Peers

log = logging.getLogger(__name__)

# What memos may hold of the bytes that are for clients that resend everything.
MEMO_SHARE = 4

Forget = Callable[[Owner, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class State:
    """The store, the caches in front of it, and who may use them."""

    settings: Settings
    store: ServerStore
    # None where one process serves alone.
    cluster: Cluster | None
    # The keys that encrypt what clients keep for us, and that hash API keys.
    ring: Sequence[RingKey]
    hashes: KeyHashes
    accounts: Accounts
    meter: Meter
    # The memory of all connections together.
    budget: Budget
    render_cache: RenderCache
    # The items that messages of other APIs became.
    memo: Memo[tuple[Raw, ...]]
    # Unstored turns that can be continued by name.
    threads: Threads
    # What of the prompts was reused.
    reuse: ReuseWatch
    # What all of it may hold.
    memory: Memory

    @property
    def peers(self) -> Peers | None:
        """The other processes; None where one process serves alone."""
        return None if self.cluster is None else self.cluster.peers

    async def caller_of(self, owner: Owner, key: str) -> Caller:
        """Who asked for a turn that outlived its process: its owner, with the key of this digest."""
        account = await self.accounts.find_digest(key)
        return Caller(
            owner,
            self.store.turns,
            may=account.scopes,
            quota=account.turn_quota,
            key=key,
            key_id=account.key_id,
            models=account.limits.models,
        )

    def open_cache(self, account: Account) -> tuple[NearTurns, Turns]:
        """A fresh cache for a connection, and the same cache in front of the store."""
        near = MemoryTurns(self.settings.connection_state_bytes_max, erased=self.store.state.erased)
        quota = account.quota
        limit = (lambda: quota.state_bytes_max) if quota.limits.state_bytes_max else None
        self.budget.add(near, account.key_id, limit)
        return near, LayeredTurns(near, self.store.turns)

    def open_threads(self, account: Account) -> Turns:
        """The threads of an account."""
        quota = account.quota
        return self.threads.open(account.owner, account.key_id, lambda: quota.state_bytes_max)

    def cache_salt(self, owner: Owner) -> str | None:
        """What keeps this owner's prompts apart in an engine's prefix cache, where others could learn of them there."""
        wanted = self.settings.cache_salt
        is_salted = wanted == "on" or (wanted == "auto" and self.accounts.has_several_owners)
        return self.hashes.salt(owner) if is_salted else None

    async def forget_owner(self, owner: Owner) -> None:
        """Everything of the owner was erased: let go of it, besides its connections."""
        self.threads.drop_owner(owner)
        self.render_cache.trim(owner, 0)
        self.memo.trim(owner, 0)
        await self.reuse.forget_owner(owner)

    def trim(self, turn: EndedTurn) -> None:
        """After each turn: what its owner has in the process's caches, besides connections, counts for each key."""
        owner, cached = turn.entry.owner, self.store.state
        for account in self.accounts.bounded.get(owner, ()):
            left = max(0, account.quota.state_bytes_max - self.budget.bytes_of(account.key_id))
            # A report is only shown; rendering again is cheaper than reading from the store again.
            spare = left - cached.bytes_of(owner)
            for cache in (self.render_cache, self.memo, self.reuse):
                cache.trim(owner, max(0, spare))
                spare -= cache.bytes_of(owner)
            cached.trim(owner, left)


async def build_state(settings: Settings, store: ServerStore, cluster: Cluster | None) -> State:
    """The store with its keys checked, and empty caches."""
    await check_public(store.keys, settings)
    ring = await load_ring(settings, store)
    hashes = KeyHashes(ring)
    await check_ring(store.keys, hashes, settings)
    budget = Budget(settings.connections_state_bytes_max)
    store.state.dropped = budget.dropped
    memory = Memory(settings.memory_bytes_max, settings.body_bytes_max)
    if isinstance(store, LayeredStore):
        store.far_turns.reserve = memory.reading
    peers = None if cluster is None else cluster.peers
    memo_bytes = settings.render_cache_bytes_max // MEMO_SHARE
    meter = Meter(store.shared_limits, peers, budget.trim)
    accounts = Accounts(store.keys, hashes.digests, settings.auth, meter)
    return State(
        settings=settings,
        store=store,
        cluster=cluster,
        ring=ring,
        hashes=hashes,
        accounts=accounts,
        meter=meter,
        budget=budget,
        threads=Threads(budget, settings.connections_state_bytes_max),
        render_cache=RenderCache(settings.render_cache_bytes_max - memo_bytes),
        memo=Memo(memo_bytes),
        reuse=ReuseWatch(settings.reuse_bytes_max, store.state.erased),
        memory=memory,
    )


class Eraser:
    """Deletes a turn everywhere: in the store, in the caches of this process, and in those of other processes."""

    def __init__(self, state: State, runner: Runner) -> None:
        self._store = state.store
        self._runner = runner
        # Further caches that forget erased turns.
        self.caches: list[Forget] = []
        # What else lets go of an owner.
        self.owners: list[Callable[[Owner], Awaitable[object] | None]] = []
        self._peers = state.peers
        if self._peers is not None:
            self._peers.on_message("erased", self._erased_elsewhere)

    async def erase(self, owner: Owner, turn_id: str) -> bool:
        """Delete a turn; False if there is none."""
        if not await self._store.turns.delete(owner, turn_id):
            # What was not there is in no cache: no process is informed, whatever ids a client makes up.
            return False
        await self._forget(owner, turn_id)
        if self._peers is not None:
            # Sooner than the store would tell them.
            await self._peers.send("erased", msgspec.msgpack.encode((owner, turn_id)))
        return True

    async def forget(self, owner: Owner, turn_id: str) -> None:
        """Drop a turn that is no longer in the store from the caches of this process; without a name, all of the
        owner."""
        if not turn_id:
            await self._forget_owner(owner)
            return
        await self._store.state.delete(owner, turn_id)
        await self._forget(owner, turn_id)

    async def _forget_owner(self, owner: Owner) -> None:
        log.info(
            "everything of an owner is erased: its connections are closed, and its caches emptied"
        )
        self._store.state.trim(owner, 0)
        for forget in (self._runner.registry.forget_owner, *self.owners):
            if (forgetting := forget(owner)) is not None:
                await forgetting

    async def _forget(self, owner: Owner, turn_id: str) -> None:
        self._runner.registry.remove_ended(owner, turn_id)
        for forget in self.caches:
            await forget(owner, turn_id)

    async def _erased_elsewhere(self, worker: str, body: bytes) -> None:
        owner, turn_id = msgspec.msgpack.decode(body, type=tuple[str, str])
        await self.forget(owner, turn_id)
