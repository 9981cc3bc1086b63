"""What does a server without a database remember? Everything, within budgets of bytes, while the process lives.

In: turns, events, usage, conversations, keys. Out: the same objects. `MemoryStore` has all of them; the turns, which
are also the cache of a connection and of a process, are in `memory_turns`.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any

from msgspec import structs

from segue.limits import Draw, Grant, HeldPlaces, Key, KeyLimits, Level, Spent, share_out
from segue.seams.history import CONTAINERS, Owner, Turn, UsageEntry
from segue.seams.store import (
    POSITION_MAX,
    SECONDS_MAX,
    Claim,
    Conversation,
    ConversationItem,
    Retention,
    UsageTotal,
)
from segue.stores.erased import ErasedTurns, TurnKey
from segue.stores.maintenance import CLAIM_S, SPENDING_S
from segue.stores.memory_turns import MemoryTurns
from segue.stores.records import digest_key, usage_of
from segue.stores.shelves import FileTable, MemoryTables, SkillTable
from segue.wire.events import Event

# Rows of about 300 bytes each, for a server without a database: some 30 MB, then the oldest go.
ENTRIES_MAX = 100_000
# No turns, no tokens of three kinds, no tool calls, nothing of containers.
NOTHING = (0,) * 8
# An event beside its bytes, and the log of a turn beside its events.
EVENT_BYTES = 200
LOG_BYTES = 600
# A claim with its two digests and its entries in two dictionaries.
CLAIM_BYTES = 1_000
# Enough for a hundred thousand keys; keys of a day are dropped earlier only under a flood.
CLAIMS_BYTES_MAX = 100_000 * CLAIM_BYTES
# What a conversation costs beside its items, and an item beside its bytes.
CONVERSATION_BYTES = 1_000
ITEM_BYTES = 600

_Clock = Callable[[], float]
# The owner of a claim, and the digest of its idempotency key.
_ClaimKey = tuple[Owner, bytes]
# An item that was erased leaves its position empty.
_Conversation = tuple[Conversation, list[ConversationItem | None]]


class MemoryStore:
    """A whole store in memory."""

    ring: None = None

    def __init__(self, bytes_max: int, clock: _Clock = time.time) -> None:
        self.ledger = MemoryLedger()
        # Turns have the whole budget; events and conversations a quarter more each. Idempotency keys are small.
        erased = ErasedTurns()
        self.events = MemoryEventLog(bytes_max // 4, clock, erased)
        self.idempotency_keys = MemoryIdempotencyKeys(clock=clock)
        self.conversations = MemoryConversations(bytes_max // 4)
        erase = [self.events.erase, self.idempotency_keys.erase]
        self.turns = MemoryTurns(
            bytes_max, stored_only=True, on_save=self._record, on_erase=erase, erased=erased
        )
        self.listing = self.turns
        self.keys = MemoryKeys(clock)
        tables = MemoryTables()
        self.files = FileTable(tables)
        self.skills = SkillTable(tables)
        self.shared_limits = MemorySharedLimits(clock)
        self.maintenance = _Maintenance(self, clock)
        # The turns in the memory of this process, and what else is there.
        self.state = self.turns
        self.beside = (self.events, self.idempotency_keys, self.conversations)

    async def is_ready(self) -> bool:
        return True

    async def close(self) -> None:
        pass

    def _record(self, turn: Turn) -> None:
        entry = usage_of(turn)
        if entry is not None:
            self.ledger.record(entry)


class MemoryLedger:
    """Usage in memory: the latest rows, each turn once."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries: dict[str, UsageEntry] = {}
        self._entries_max = entries_max
        # Tokens of each key and owner on each day; counted on after their rows are gone, until the month is over.
        self._spent: Counter[tuple[str, str, int]] = Counter()
        self._newest_day = 0

    @property
    def entries(self) -> list[UsageEntry]:
        """The rows that are still held, oldest first."""
        return list(self._entries.values())

    async def settle(self, entries: Sequence[UsageEntry]) -> None:
        for entry in entries:
            self.record(entry)

    async def report(
        self, owner: Owner | None, since: int, until: int = SECONDS_MAX
    ) -> Sequence[UsageTotal]:
        totals: dict[tuple[str, Owner, str, str], tuple[Any, ...]] = {}
        for entry in self._entries.values():
            if since <= entry.ended_at < until and owner in (None, entry.owner):
                day = time.strftime("%Y-%m-%d", time.gmtime(entry.ended_at))
                key = (day, entry.owner, entry.model, entry.key_id)
                counts = structs.astuple(entry)
                used = (entry.status != CONTAINERS, *counts[4:7], *counts[8:12])
                totals[key] = tuple(map(add, totals.get(key, NOTHING), used))
        rows = ((*key[:3], *totals[key], key[3]) for key in sorted(totals))
        return [UsageTotal(*row) for row in rows]

    async def spent(self, owner: Owner, key_id: str, day: int, month: int) -> Spent:
        return Spent(
            self._spent["key", key_id, day],
            sum(self._spent["key", key_id, each] for each in range(month, day + 1)),
            self._spent["owner", owner, day],
            sum(self._spent["owner", owner, each] for each in range(month, day + 1)),
        )

    def record(self, entry: UsageEntry) -> None:
        """Record one turn unless it is recorded already; of containers the latest row counts."""
        is_known = entry.turn_id in self._entries
        if is_known and entry.status != CONTAINERS:
            return
        self._entries[entry.turn_id] = entry
        day, tokens = entry.ended_at // 86_400, entry.input_tokens + entry.output_tokens
        if day > self._newest_day:
            self._newest_day = day
            oldest = day - SPENDING_S // 86_400
            self._spent = Counter({key: n for key, n in self._spent.items() if key[2] >= oldest})
        self._spent["owner", entry.owner, day] += tokens
        if entry.key_id:
            self._spent["key", entry.key_id, day] += tokens
        if len(self._entries) > self._entries_max:
            del self._entries[next(iter(self._entries))]


@dataclass(slots=True)
class _TurnLog:
    """The events of one turn that are still held, and when the last of them came."""

    events: list[Event] = field(default_factory=list)
    bytes: int = LOG_BYTES
    logged_at: float = 0.0


class MemoryEventLog:
    """Events in memory, bounded in bytes. The log that was longest without a new event goes first."""

    def __init__(
        self, bytes_max: int, clock: _Clock = time.time, erased: ErasedTurns | None = None
    ) -> None:
        self._bytes_max = bytes_max
        self._clock = clock
        # By the time of their last event.
        self._logs: OrderedDict[TurnKey, _TurnLog] = OrderedDict()
        # Turns that were deleted while they ran.
        self._erased = erased or ErasedTurns()
        # How much is held; at most the budget.
        self.bytes = 0

    async def append(self, owner: Owner, turn_id: str, events: Sequence[Event]) -> None:
        key = (owner, turn_id)
        if key in self._erased or not events:
            return
        if key not in self._logs:
            self._logs[key] = _TurnLog()
            self.bytes += LOG_BYTES
        log = self._logs[key]
        last = log.events[-1].number if log.events else -1
        fresh = [event for event in events if event.number > last]
        size = sum(EVENT_BYTES + len(event.data) for event in fresh)
        log.events.extend(fresh)
        log.bytes += size
        log.logged_at = self._clock()
        self.bytes += size
        self._logs.move_to_end(key)
        while self.bytes > self._bytes_max:
            self._remove(next(iter(self._logs)))

    async def read_after(self, owner: Owner, turn_id: str, number: int) -> Sequence[Event] | None:
        log = self._logs.get((owner, turn_id))
        if log is None:
            return None
        events = [event for event in log.events if event.number > number]
        has_gap = any(event.number != number + 1 + at for at, event in enumerate(events))
        return None if has_gap else events

    async def delete(self, owner: Owner, turn_id: str) -> None:
        self._remove((owner, turn_id))

    def erase(self, owner: Owner, turn_id: str) -> None:
        """Drop them and take no more: their turn was deleted, and may still be running."""
        self._erased.add((owner, turn_id))
        self._remove((owner, turn_id))

    def expire(self, before: float) -> None:
        """Drop logs that have had no new event since then."""
        while self._logs and next(iter(self._logs.values())).logged_at < before:
            self._remove(next(iter(self._logs)))

    def _remove(self, key: TurnKey) -> None:
        log = self._logs.pop(key, None)
        if log is not None:
            self.bytes -= log.bytes


class MemoryIdempotencyKeys:
    """Idempotency keys in memory, for a day, bounded in bytes; the oldest go first."""

    def __init__(self, bytes_max: int = CLAIMS_BYTES_MAX, clock: _Clock = time.time) -> None:
        self._count_max = max(1, bytes_max // CLAIM_BYTES)
        self._clock = clock
        # By digests of their keys, oldest first; and the same by turn.
        self._claims: OrderedDict[_ClaimKey, tuple[Claim, float]] = OrderedDict()
        self._by_turn: dict[TurnKey, _ClaimKey] = {}

    @property
    def bytes(self) -> int:
        """How much is held; at most the budget."""
        return len(self._claims) * CLAIM_BYTES

    async def claim(self, claim: Claim) -> Claim:
        self.expire()
        holder = self.held(claim)
        if holder is not None:
            return holder
        key = (claim.owner, digest_key(claim.key))
        # The key itself is with the caller; it may be long.
        self._claims[key] = (structs.replace(claim, key=""), self._clock())
        self._by_turn[(claim.owner, claim.turn_id)] = key
        while len(self._claims) > self._count_max:
            self._remove(next(iter(self._claims)))
        return claim

    async def release(self, claim: Claim) -> None:
        self.erase(claim.owner, claim.turn_id)

    def held(self, claim: Claim) -> Claim | None:
        """The claim that holds this key now; None if the key is free."""
        holder = self._claims.get((claim.owner, digest_key(claim.key)))
        if holder is None or holder[1] < self._clock() - CLAIM_S:
            return None
        return structs.replace(holder[0], key=claim.key)

    def erase(self, owner: Owner, turn_id: str) -> None:
        """Free the key of a turn that is deleted."""
        key = self._by_turn.get((owner, turn_id))
        if key is not None:
            self._remove(key)

    def expire(self) -> None:
        """Free the keys whose time is over."""
        while self._claims:
            key, (_, claimed_at) = next(iter(self._claims.items()))
            if claimed_at >= self._clock() - CLAIM_S:
                return
            self._remove(key)

    def _remove(self, key: _ClaimKey) -> None:
        claim, _ = self._claims.pop(key)
        self._by_turn.pop((claim.owner, claim.turn_id), None)


class MemoryConversations:
    """Conversations in memory, bounded in bytes; the least recently used goes first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._rows: OrderedDict[tuple[Owner, str], _Conversation] = OrderedDict()
        # How much is held.
        self.bytes = 0

    async def find(self, owner: Owner, conversation_id: str) -> Conversation | None:
        row = self._rows.get((owner, conversation_id))
        if row is None:
            return None
        self._rows.move_to_end((owner, conversation_id))
        return row[0]

    async def read(
        self, owner: Owner, conversation_id: str, since: int = 0, until: int = POSITION_MAX
    ) -> Sequence[ConversationItem]:
        row = self._rows.get((owner, conversation_id))
        return [] if row is None else [item for item in row[1][since:until] if item is not None]

    async def names(self, owner: Owner, conversation_id: str) -> Sequence[tuple[int, str, int]]:
        _, items = self._rows.get((owner, conversation_id), (None, ()))
        places = enumerate(items)
        return [(at, item.id, len(item.item.raw)) for at, item in places if item is not None]

    async def save(
        self,
        conversation: Conversation,
        added: Sequence[ConversationItem] = (),
        turn: Turn | None = None,
    ) -> bool:
        # The turn is saved by `Turns`: no crash leaves a memory half written.
        key = (conversation.owner, conversation.id)
        row = self._rows.get(key)
        if (row[0].version if row else 0) != conversation.version:
            return False
        items = row[1] if row else []
        items += added
        self.bytes += sum(map(_size, added)) + (0 if row else CONVERSATION_BYTES)
        saved = structs.replace(conversation, count=len(items), version=conversation.version + 1)
        self._rows[key] = (saved, items)
        self._rows.move_to_end(key)
        while self.bytes > self._bytes_max and len(self._rows) > 1:
            self._remove(next(iter(self._rows)))
        return True

    async def delete(self, owner: Owner, conversation_id: str, item_id: str | None = None) -> bool:
        key = (owner, conversation_id)
        row = self._rows.get(key)
        if row is None:
            return False
        if item_id is None:
            self._remove(key)
            return True
        conversation, items = row
        erased = [(at, item) for at, item in enumerate(items) if item and item.id == item_id]
        for at, item in erased:
            self.bytes -= _size(item)
            items[at] = None
        if erased:
            version = conversation.version + 1
            unlinked = structs.replace(conversation, tip_id=None, tip_items=0, version=version)
            self._rows[key] = (unlinked, items)
        return bool(erased)

    def _remove(self, key: tuple[Owner, str]) -> None:
        _, items = self._rows.pop(key)
        self.bytes -= CONVERSATION_BYTES + sum(_size(item) for item in items if item is not None)


def _size(added: ConversationItem) -> int:
    return ITEM_BYTES + 3 * len(added.item.raw)


class MemoryKeys:
    """API keys in memory."""

    def __init__(self, clock: _Clock = time.time) -> None:
        self._clock = clock
        self._keys: dict[str, tuple[str, Key]] = {}

    async def add(self, key: Key, digest: str) -> None:
        self._keys.setdefault(key.id, (digest, key))

    async def find(self, digests: Sequence[str]) -> Mapping[str, Key]:
        wanted = set(digests)
        found = [(digest, key) for digest, key in self._keys.values() if digest in wanted]
        return {digest: key for digest, key in found if key.state(self._clock()) == "valid"}

    async def expired(self, digests: Sequence[str]) -> int | None:
        held = [key for digest, key in self._keys.values() if digest in {*digests}]
        expired = (key.expires_at for key in held if key.state(self._clock()) == "expired")
        return next(expired, None)

    async def given_out(self) -> Sequence[Key]:
        keys = (key for _, key in self._keys.values())
        return sorted(keys, key=lambda key: (key.created_at, key.id))

    async def limit(self, key_id: str, limits: KeyLimits) -> bool:
        return self._change(key_id, limits=limits)

    async def revoke(self, key_id: str) -> bool:
        return self._change(key_id, revoked_at=int(self._clock()))

    def _change(self, key_id: str, **fields: KeyLimits | int) -> bool:
        digest, key = self._keys.get(key_id, ("", None))
        if key is None or key.revoked_at is not None:
            return False
        self._keys[key_id] = (digest, structs.replace(key, **fields))
        return True

    async def note_use(self, key_ids: Sequence[str]) -> None:
        for key_id in key_ids:
            if key_id in self._keys:
                digest, key = self._keys[key_id]
                self._keys[key_id] = (digest, structs.replace(key, used_at=int(self._clock())))


class MemorySharedLimits:
    """The limits of a process that shares them with no other."""

    def __init__(self, clock: _Clock = time.time) -> None:
        self._clock = clock
        self._levels: dict[str, Level] = {}

    async def draw(self, draw: Draw) -> Grant:
        level = self._levels.get(draw.key_id)
        self._levels[draw.key_id], grant = share_out(draw, level, HeldPlaces(), self._clock())
        return grant


@dataclass(frozen=True, slots=True)
class _Maintenance:
    """No other process shares a memory store, and nothing in it outlives its process."""

    store: MemoryStore
    clock: _Clock

    async def beat(self) -> bool:
        return True

    async def recover(self) -> int:
        return 0

    async def take_over(self, count_max: int) -> Sequence[tuple[Owner, str]]:
        return []

    async def erasures(self) -> Sequence[tuple[Owner, str]]:
        return []

    async def sweep(self, retention: Retention) -> bool:
        """Drop everything that is too old, at once."""
        self.store.idempotency_keys.expire()
        if retention.events_s:
            self.store.events.expire(self.clock() - retention.events_s)
        if retention.turns_s:
            self.store.turns.expire(int(self.clock()) - retention.turns_s)
        return False
