"""What is remembered while the process lives: turns, events and keys within budgets of bytes, usage, API keys.

In: turns, saved one by one, each linked to its parent. Out: the very same objects. It serves as the
cache of one connection, as the process's cache before a database, and as the store of a server that
has none.

**What the budget counts.** A turn keeps all its ancestors alive, so letting go of an ancestor frees
nothing while a descendant is held. Therefore every ancestor of a held turn is held too, once,
however many forks share it, and `bytes` is the sum over held turns of `Turn.bytes` and the slot
around it: what would be freed if all of it went. Eviction only ever takes a *leaf*, the least
recently used one, and its parent is a leaf next: the line that was longest out of use is peeled
from its tip, and nothing that is still needed is counted or dropped by mistake. Where several
owners share the budget, only leaves of those are taken who hold more than their part of it.

A slot that is not *named* is held for its descendants only and is not found: it was forgotten, or
it came along as the unstored ancestor of a turn saved here.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec

from segue.stores.budget import Budget, Share
from segue.stores.maintenance import CLAIM_S
from segue.stores.records import digest_key
from segue.turn.commit import entry_of
from segue.turn.values import Claim, Key, Owner, Retention, Turn, UsageEntry, UsageTotal
from segue.wire.events import Event

Name = tuple[Owner, str]

# A slot, its key and its places in the two dictionaries; so that turns of no weight are bounded as
# well.
SLOT_BYTES = 600
# Rows of about 300 bytes each, for a server without a database: some 30 MB, then the oldest go.
ENTRIES_MAX = 100_000
# Deletions that are remembered; only turns that ran while one happened can still refer to it.
ERASED_MAX = 10_000
# An event beside its bytes, and a log beside its events.
EVENT_BYTES = 200
LOG_BYTES = 600
# A claim with its two digests and its places in two dictionaries.
CLAIM_BYTES = 1_000
# Enough for a hundred thousand keys; keys of a day are let go of earlier only under a flood.
REPEATS_BYTES_MAX = 100_000 * CLAIM_BYTES
DAY_S = 86_400

Clock = Callable[[], float]
# Where a claim lies: its owner, and the digest of its key.
Place = tuple[Owner, bytes]


@dataclass(slots=True)
class Slot:
    """A held turn, and the ids of the held turns that name it as their parent."""

    turn: Turn
    is_named: bool
    children: set[str] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        return SLOT_BYTES + self.turn.bytes


class MemoryLedger:
    """Usage in memory: the latest rows, each turn once."""

    def __init__(self, entries_max: int = ENTRIES_MAX) -> None:
        self._entries: dict[str, UsageEntry] = {}
        self._entries_max = entries_max

    @property
    def entries(self) -> list[UsageEntry]:
        """The rows that are still held, oldest first."""
        return list(self._entries.values())

    async def settle(self, entries: Sequence[UsageEntry]) -> None:
        """Record these turns, each at most once."""
        for entry in entries:
            self.record(entry)

    async def report(self, owner: Owner | None, since: int) -> Sequence[UsageTotal]:
        """What was used since then, by day, owner and model, as far as rows are still held."""
        found: dict[tuple[str, Owner, str], UsageTotal] = {}
        for entry in self._entries.values():
            if entry.ended_at >= since and owner in (None, entry.owner):
                used = used_by(entry)
                key = (used.day, used.owner, used.model)
                found[key] = plus(found[key], used) if key in found else used
        return [found[key] for key in sorted(found)]

    def record(self, entry: UsageEntry) -> None:
        """Record one turn unless it is recorded already."""
        self._entries.setdefault(entry.turn_id, entry)
        if len(self._entries) > self._entries_max:
            del self._entries[next(iter(self._entries))]


class MemoryTurns:
    """Turns in memory, bounded in bytes.

    With `stored_only` it behaves as a store does: a turn that was not to be stored is not kept, not
    even as an ancestor. Given a ledger, it records the usage of stored turns as they are saved, as
    a database would; and `on_erase` is told of every turn that is deleted.
    """

    def __init__(
        self,
        bytes_max: int,
        *,
        stored_only: bool = False,
        ledger: MemoryLedger | None = None,
        on_erase: Sequence[Callable[[Owner, str], None]] = (),
    ) -> None:
        self._bytes_max = bytes_max
        self._stored_only = stored_only
        self._ledger = ledger
        self._on_erase = on_erase
        self._slots: dict[Name, Slot] = {}
        # Turns without held children, by owner, least recently used first, each with the tick of its last use.
        self._leaves: dict[Owner, OrderedDict[str, int]] = {}
        self._owner_bytes: dict[Owner, int] = {}
        self._ticks = count()
        self._share: Share | None = None
        # What was deleted here, so that a turn which still runs on it does not bring it back.
        self._erased: OrderedDict[Name, None] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """What is held now; at most the budget."""
        return self._bytes

    def enter(self, budget: Budget, key: str, key_bytes_max: Callable[[], int]) -> None:
        """Share a budget with other caches."""
        self._share = budget.enter(self, key, key_bytes_max)

    def leave(self) -> None:
        """Nobody uses it any more: what it holds counts no longer."""
        if self._share is not None:
            self._share.leave()

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn as it was saved, chain and warmth included."""
        return self.held(owner, turn_id)

    def held(self, owner: Owner, turn_id: str) -> Turn | None:
        """The same at once, for a session that cannot wait."""
        key = (owner, turn_id)
        slot = self._slots.get(key)
        if slot is None or not slot.is_named:
            return None
        self._touch(key)
        return slot.turn

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        """The same as `find`: in memory the parents cost nothing."""
        return await self.find(owner, turn_id)

    async def save(self, turn: Turn) -> None:
        """Hold the turn and its ancestors, and let go of what no longer fits."""
        if (self._stored_only and not turn.is_stored) or (turn.owner, turn.id) in self._erased:
            return
        self._hold(turn)
        while self._bytes > self._bytes_max and self.shed():
            pass
        if self._share is not None:
            self._share.settle()
        entry = entry_of(turn.owner, turn.response)
        if self._ledger is not None and turn.is_stored and entry is not None:
            self._ledger.record(entry)

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        """Erase the turn; what came after it keeps its own items and is no longer whole."""
        key = (owner, turn_id)
        self._erased[key] = None
        if len(self._erased) > ERASED_MAX:
            self._erased.popitem(last=False)
        slot = self._slots.get(key)
        if slot is None:
            return False
        for tell in self._on_erase:
            tell(owner, turn_id)
        self._orphan(owner, slot)
        self._drop(key, is_cold=False)
        return slot.is_named

    def forget(self, owner: Owner, turn_id: str) -> None:
        """Find it here no more. What came after it stays as it is (a failed turn's parent)."""
        key = (owner, turn_id)
        slot = self._slots.get(key)
        if slot is None:
            return
        slot.is_named = False
        if not slot.children:
            self._drop(key, is_cold=False)

    def shed(self) -> bool:
        """Let go of the leaf that was unused for longest among those of owners who hold more than their part; False if
        nothing is held."""
        if not self._leaves:
            return False
        part = self._bytes / len(self._owner_bytes)
        greedy = [owner for owner in self._leaves if self._owner_bytes[owner] >= part]
        owner = min(greedy or self._leaves, key=lambda one: next(iter(self._leaves[one].values())))
        self._drop((owner, next(iter(self._leaves[owner]))), is_cold=True)
        return True

    def bytes_of(self, owner: Owner) -> int:
        """What is held of this owner."""
        return self._owner_bytes.get(owner, 0)

    def trim(self, owner: Owner, bytes_max: int) -> None:
        """Let go of what this owner has beyond so much, the longest unused first."""
        while self.bytes_of(owner) > bytes_max and owner in self._leaves:
            self._drop((owner, next(iter(self._leaves[owner]))), is_cold=True)

    def expire(self, before: int) -> None:
        """Let go of turns that began before this time, from the tips of their chains on."""
        names = [(owner, tip) for owner, tips in self._leaves.items() for tip in tips]
        for key in names:
            while self._is_old_tip(key, before):
                for tell in self._on_erase:
                    tell(*key)
                above = self._slots[key].turn.parent_id
                self._drop(key, is_cold=True)
                if above is None:
                    break
                key = (key[0], above)

    def _is_old_tip(self, key: Name, before: int) -> bool:
        return self._is_leaf(key) and self._slots[key].turn.response.created_at < before

    def _is_leaf(self, key: Name) -> bool:
        return key[1] in self._leaves.get(key[0], ())

    def _hold(self, turn: Turn) -> None:
        slot = self._slots.get((turn.owner, turn.id))
        if slot is not None and slot.children:
            # Others stand on the held object already, and turns that were continued do not change.
            slot.is_named = True
            return
        new = [turn]
        while (parent := new[-1].parent) is not None and self._brings(parent):
            new.append(parent)
        while new:
            node = new.pop()
            self._put(node, is_named=node is turn or node.is_stored)
        self._touch((turn.owner, turn.id))

    def _brings(self, ancestor: Turn) -> bool:
        """Whether this ancestor is not held yet and may come along with its descendant."""
        key = (ancestor.owner, ancestor.id)
        is_new = key not in self._slots and key not in self._erased
        return is_new and (ancestor.is_stored or not self._stored_only)

    def _put(self, turn: Turn, *, is_named: bool) -> None:
        """Hold one turn, linked to what is held under its parent's id."""
        key = (turn.owner, turn.id)
        above = self._slots.get((turn.owner, turn.parent_id)) if turn.parent_id else None
        slot = self._slots.get(key)
        if slot is not None:
            self._count(turn.owner, -slot.bytes)
        self._slots[key] = fresh = Slot(linked(turn, above.turn if above else None), is_named)
        self._count(turn.owner, fresh.bytes)
        self._leaves.setdefault(turn.owner, OrderedDict())[turn.id] = next(self._ticks)
        if above is not None and turn.parent_id is not None:
            above.children.add(turn.id)
            self._unleaf((turn.owner, turn.parent_id))

    def _touch(self, key: Name) -> None:
        if self._is_leaf(key):
            leaves = self._leaves[key[0]]
            leaves[key[1]] = next(self._ticks)
            leaves.move_to_end(key[1])

    def _unleaf(self, key: Name) -> int:
        """It is a leaf no more; when it was last used."""
        leaves = self._leaves.get(key[0], OrderedDict())
        tick = leaves.pop(key[1], 0)
        if not leaves:
            self._leaves.pop(key[0], None)
        return tick

    def _count(self, owner: Owner, change: int) -> None:
        self._bytes += change
        held = self._owner_bytes.get(owner, 0) + change
        if held:
            self._owner_bytes[owner] = held
        else:
            self._owner_bytes.pop(owner, None)

    def _drop(self, key: Name, *, is_cold: bool) -> None:
        """Let go of a turn without children, and of ancestors that were held only for it. Its
        parent is a leaf now: the next to go if the line is cold."""
        tick = 0
        while (slot := self._slots.pop(key, None)) is not None:
            tick = self._unleaf(key) or tick
            self._count(key[0], -slot.bytes)
            if slot.turn.parent_id is None:
                return
            key = (slot.turn.owner, slot.turn.parent_id)
            above = self._slots.get(key)
            if above is None:
                return
            above.children.discard(slot.turn.id)
            if above.children:
                return
            if above.is_named:
                leaves = self._leaves.setdefault(key[0], OrderedDict())
                leaves[key[1]] = tick if is_cold else next(self._ticks)
                leaves.move_to_end(key[1], last=not is_cold)
                return

    def _orphan(self, owner: Owner, slot: Slot) -> None:
        """Cut all descendants loose from a turn that is being erased. Their warmth goes too: it
        contains the erased turn's tokens."""
        below: list[tuple[str, Turn | None]] = [(child, None) for child in slot.children]
        slot.children.clear()
        while below:
            turn_id, parent = below.pop()
            child = self._slots[(owner, turn_id)]
            child.turn = replace(child.turn, parent=parent, is_whole=False, warm=None)
            below.extend((grandchild, child.turn) for grandchild in child.children)


@dataclass(slots=True)
class Log:
    """The events of one turn that are still held, and when the last of them came."""

    events: list[Event] = field(default_factory=list)
    bytes: int = LOG_BYTES
    logged_at: float = 0.0


class MemoryEventLog:
    """Events in memory, bounded in bytes. The log that was longest without news goes first."""

    def __init__(self, bytes_max: int, clock: Clock = time.time) -> None:
        self._bytes_max = bytes_max
        self._clock = clock
        # By the time of their last event.
        self._logs: OrderedDict[Name, Log] = OrderedDict()
        # Turns that were deleted while they ran.
        self._erased: OrderedDict[Name, None] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """What is held now; at most the budget."""
        return self._bytes

    async def append(self, owner: Owner, turn_id: str, events: Sequence[Event]) -> None:
        """Hold the next events; those that are here already are not held twice."""
        key = (owner, turn_id)
        if key in self._erased or not events:
            return
        if key not in self._logs:
            self._logs[key] = Log()
            self._bytes += LOG_BYTES
        log = self._logs[key]
        last = log.events[-1].number if log.events else -1
        fresh = [event for event in events if event.number > last]
        size = sum(EVENT_BYTES + len(event.data) for event in fresh)
        log.events.extend(fresh)
        log.bytes += size
        log.logged_at = self._clock()
        self._bytes += size
        self._logs.move_to_end(key)
        while self._bytes > self._bytes_max:
            self._drop(next(iter(self._logs)))

    async def read_after(self, owner: Owner, turn_id: str, number: int) -> Sequence[Event] | None:
        """Every held event with a higher number; None if some of them are not there."""
        log = self._logs.get((owner, turn_id))
        if log is None:
            return None
        found = [event for event in log.events if event.number > number]
        has_gap = any(event.number != number + 1 + at for at, event in enumerate(found))
        return None if has_gap else found

    async def delete(self, owner: Owner, turn_id: str) -> None:
        """Let go of them."""
        self._drop((owner, turn_id))

    def erase(self, owner: Owner, turn_id: str) -> None:
        """Let go of them for good: their turn was deleted, and may still be running."""
        self._erased[(owner, turn_id)] = None
        if len(self._erased) > ERASED_MAX:
            self._erased.popitem(last=False)
        self._drop((owner, turn_id))

    def expire(self, before: float) -> None:
        """Let go of logs that have had no news since then."""
        while self._logs and next(iter(self._logs.values())).logged_at < before:
            self._drop(next(iter(self._logs)))

    def _drop(self, key: Name) -> None:
        log = self._logs.pop(key, None)
        if log is not None:
            self._bytes -= log.bytes


class MemoryIdempotencyKeys:
    """Idempotency keys in memory, for a day, bounded in bytes; the oldest go first."""

    def __init__(self, bytes_max: int = REPEATS_BYTES_MAX, clock: Clock = time.time) -> None:
        self._count_max = max(1, bytes_max // CLAIM_BYTES)
        self._clock = clock
        # By digests of their keys, oldest first; and the same by turn.
        self._claims: OrderedDict[Place, tuple[Claim, float]] = OrderedDict()
        self._by_turn: dict[Name, Place] = {}

    @property
    def bytes(self) -> int:
        """What is held now; at most the budget."""
        return len(self._claims) * CLAIM_BYTES

    async def claim(self, claim: Claim) -> Claim:
        """Take the key if it is free or its time is over; returns whoever holds it now."""
        self.expire()
        holder = self.held(claim)
        if holder is not None:
            return holder
        place = (claim.owner, digest_key(claim.key))
        # The key itself is with the caller; it may be long.
        self._claims[place] = (msgspec.structs.replace(claim, key=""), self._clock())
        self._by_turn[(claim.owner, claim.turn_id)] = place
        while len(self._claims) > self._count_max:
            self._drop(next(iter(self._claims)))
        return claim

    async def release(self, claim: Claim) -> None:
        """Let go of the key, if it is this turn's."""
        self.erase(claim.owner, claim.turn_id)

    def held(self, claim: Claim) -> Claim | None:
        """Whoever holds this key; None if it is free."""
        found = self._claims.get((claim.owner, digest_key(claim.key)))
        if found is None or found[1] < self._clock() - CLAIM_S:
            return None
        return msgspec.structs.replace(found[0], key=claim.key)

    def erase(self, owner: Owner, turn_id: str) -> None:
        """Let go of the key of a turn that is deleted."""
        place = self._by_turn.get((owner, turn_id))
        if place is not None:
            self._drop(place)

    def expire(self) -> None:
        """Let go of the keys whose time is over."""
        while self._claims:
            place, (_, claimed_at) = next(iter(self._claims.items()))
            if claimed_at >= self._clock() - CLAIM_S:
                return
            self._drop(place)

    def _drop(self, place: Place) -> None:
        claim, _ = self._claims.pop(place)
        self._by_turn.pop((claim.owner, claim.turn_id), None)


class MemoryKeys:
    """API keys in memory; they die with their process."""

    def __init__(self, clock: Clock = time.time) -> None:
        self._clock = clock
        self._keys: dict[str, tuple[str, Key]] = {}

    async def add(self, key: Key, digest: str) -> None:
        """Give out a key."""
        self._keys.setdefault(key.id, (digest, key))

    async def find(self, digests: Sequence[str]) -> Mapping[str, Key]:
        """Those of these that are somebody's and not revoked."""
        asked = set(digests)
        return {
            digest: key
            for digest, key in self._keys.values()
            if digest in asked and key.revoked_at is None
        }

    async def given_out(self) -> Sequence[Key]:
        """Every key that was ever given out, the oldest first."""
        return sorted(
            (key for _, key in self._keys.values()), key=lambda key: (key.created_at, key.id)
        )

    async def revoke(self, key_id: str) -> bool:
        """Take it back for good."""
        digest, key = self._keys.get(key_id, ("", None))
        if key is None or key.revoked_at is not None:
            return False
        revoked = msgspec.structs.replace(key, revoked_at=int(self._clock()))
        self._keys[key_id] = (digest, revoked)
        return True


class MemoryMaintenance:
    """What is done beside turns in memory. Nobody shares them, and they die with their process."""

    def __init__(
        self,
        turns: MemoryTurns,
        log: MemoryEventLog,
        idempotency_keys: MemoryIdempotencyKeys,
        clock: Clock = time.time,
    ) -> None:
        self._turns = turns
        self._log = log
        self._repeats = idempotency_keys
        self._clock = clock

    async def recover(self) -> int:
        """Nothing can be left over."""
        return 0

    async def erasures(self) -> Sequence[tuple[Owner, str]]:
        """Nobody else erases."""
        return []

    async def sweep(self, retention: Retention) -> bool:
        """Let go of all that is too old, at once."""
        self._repeats.expire()
        if retention.events_s:
            self._log.expire(self._clock() - retention.events_s)
        if retention.turns_s:
            self._turns.expire(int(self._clock()) - retention.turns_s)
        return False


def used_by(entry: UsageEntry) -> UsageTotal:
    """One turn's row as a day's."""
    return UsageTotal(
        time.strftime("%Y-%m-%d", time.gmtime(entry.ended_at)),
        entry.owner,
        entry.model,
        1,
        entry.input_tokens,
        entry.cached_tokens,
        entry.output_tokens,
        entry.tool_calls,
    )


def plus(some: UsageTotal, more: UsageTotal) -> UsageTotal:
    """Both together."""
    return msgspec.structs.replace(
        some,
        turns=some.turns + more.turns,
        input_tokens=some.input_tokens + more.input_tokens,
        cached_tokens=some.cached_tokens + more.cached_tokens,
        output_tokens=some.output_tokens + more.output_tokens,
        tool_calls=some.tool_calls + more.tool_calls,
    )


def linked(turn: Turn, parent: Turn | None) -> Turn:
    """The turn with this parent: the same object if it has it already."""
    is_whole = turn.parent_id is None if parent is None else parent.is_whole
    if turn.parent is parent and turn.is_whole == is_whole:
        return turn
    return replace(turn, parent=parent, is_whole=is_whole, warm=turn.warm if is_whole else None)
