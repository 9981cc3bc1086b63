"""Which turns are held in memory, and which of them go when the budget is full?

In: turns, saved one by one, each linked to its parent. Out: the same objects. It is the cache of one connection, the
cache of the process in front of a database, and the turns of a server without a database.

**What the budget counts.** A turn keeps all its ancestors alive, so dropping an ancestor frees
nothing while a descendant is held. Therefore every ancestor of a held turn is held too, once,
however many forks share it, and `bytes` is the sum over held turns of `Turn.bytes` and the slot
around it: what would be freed if all of it went. Eviction only ever takes a *leaf*, the least
recently used one, and its parent is a leaf next: the chain that was unused for longest is removed
from its tip, and nothing that is still needed is counted or dropped by mistake. Where several
owners share the budget, only owners that hold more than an equal share lose leaves.

**The connections together.** A `Budget` bounds the caches of all connections, each under the API key
that opened it. Above a key's own limit its caches shrink; above the limit of all, the caches of keys
that hold more than the limit divided by the number of keys: the chain that was unused for longest goes first,
whichever cache holds it. So no key loses anything because another one holds too much, and no connection the chain
that it is using because of old threads. A turn that was dropped is answered with
`previous_response_not_found`, never with less history. What running turns still use of it goes on counting.

A slot that is not *named* is held for its descendants only and is not found: it was forgotten, or
it came along as the unstored ancestor of a turn saved here.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import dropwhile, islice
from math import inf
from weakref import ref

from msgspec import Struct, structs

from segue.seams.history import Owner, Turn, ancestors
from segue.seams.store import Turns
from segue.stores.erased import ErasedTurns, TurnKey
from segue.wire.response import ENDED

# A slot, its key and its entries in the two dictionaries; so that turns of no weight are bounded as
# well.
SLOT_BYTES = 600
# Once a limit is reached, a little more is dropped: that costs as much as there are caches or owners, and must not be
# done for each save. Not much more, because dropping takes time too.
SLACK_PART = 128
SLACK_BYTES_MAX = 4 * 1024 * 1024
# Comparing this few owners costs next to nothing.
OWNERS_FEW = 16


class _Slot(Struct):
    """A held turn, and the ids of the held turns that name it as their parent."""

    turn: Turn
    is_named: bool
    bytes: int
    children: set[str] = set()


class MemoryTurns:
    """Turns in memory, bounded in bytes.

    With `stored_only` it behaves as a store does: a turn that was not to be stored is not kept, not
    even as an ancestor. `clock` is the time of a use. `on_save` is called with every turn that was
    kept, `on_erase` with the name of every turn that was deleted or is too old.
    """

    def __init__(
        self,
        bytes_max: int,
        *,
        stored_only: bool = False,
        clock: Callable[[], float] | None = None,
        on_save: Callable[[Turn], None] | None = None,
        on_erase: Sequence[Callable[[Owner, str], None]] = (),
        erased: ErasedTurns | None = None,
    ) -> None:
        # How much is held; at most `bytes_max` after each save.
        self.bytes = 0
        self._bytes_max = bytes_max
        self._stored_only = stored_only
        self._on_save = on_save
        self._on_erase = on_erase
        self._slots: dict[TurnKey, _Slot] = {}
        # Turns without held children, by owner, least recently used first, each with its last use.
        self._leaves: dict[Owner, OrderedDict[str, float]] = {}
        self._owner_bytes: Counter[Owner] = Counter()
        self._now: Callable[[], float] = clock or time.monotonic
        # Shared with other caches.
        self.budget: Budget | None = None
        self.dropped = DroppedTurns()
        # So that a turn that still runs after it was deleted, or one that goes on from it, does not bring it back.
        self.erased = erased or ErasedTurns()

    def close(self) -> None:
        """The cache is no longer used: what it holds stops counting, unless it is used elsewhere."""
        if self.budget is not None:
            self.budget.remove(self)
        for slot in self._slots.values():
            self.dropped.remove(slot.turn)
        self.dropped = DroppedTurns()

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        return self.held(owner, turn_id)

    def held(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn as it was saved, chain and warmth included; without waiting, for a connection's own use."""
        slot = self._slots.get((owner, turn_id))
        if slot is None or not slot.is_named:
            return None
        if not slot.children:
            leaves = self._leaves[owner]
            leaves[turn_id] = self._now()
            leaves.move_to_end(turn_id)
        return slot.turn

    def tips(self) -> Iterator[Turn]:
        """The newest turn of each chain that is held."""
        for owner, leaves in self._leaves.items():
            for turn_id in reversed(leaves):
                yield self._slots[(owner, turn_id)].turn

    async def newest(
        self, owner: Owner, before: str | None, count: int, *, is_tips: bool
    ) -> Sequence[str]:
        """As `Listing` does, of what is held here."""
        slots = reversed(self._slots.items())
        held: Iterator[tuple[str, _Slot]]
        held = ((id, slot) for (its_owner, id), slot in slots if its_owner == owner)
        if before is not None:
            held = dropwhile(lambda entry: entry[0] != before, held)
            next(held, None)
        wanted = (id for id, slot in held if slot.is_named and not (is_tips and slot.children))
        return list(islice(wanted, count))

    async def stored_bytes(self, owner: Owner, turn_id: str, *, with_chain: bool) -> int:
        """As `Listing` does, as our own measure."""
        turn = self.held(owner, turn_id)
        links = [] if turn is None else ancestors(turn) if with_chain else [turn]
        return sum(link.bytes for link in links)

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        # With its parents: in memory they cost nothing.
        return self.held(owner, turn_id)

    async def save(self, turn: Turn) -> None:
        if (self._stored_only and not turn.is_stored) or (turn.owner, turn.id) in self.erased:
            return
        self._hold(turn)
        if self.bytes > self._bytes_max:
            is_slow = len(self._leaves) > OWNERS_FEW
            self._shrink(_below(self._bytes_max) if is_slow else self._bytes_max)
        if self.budget is not None:
            self.budget.settle(self)
        if self._on_save is not None:
            self._on_save(turn)

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        """Erase the turn; its descendants keep their own items and are no longer whole."""
        key = (owner, turn_id)
        self.erased.add(key)
        slot = self._slots.get(key)
        if slot is None:
            return False
        for notify in self._on_erase:
            notify(owner, turn_id)
        self._orphan(owner, slot)
        self._evict(owner, turn_id, is_cold=False)
        return slot.is_named

    def forget(self, owner: Owner, turn_id: str) -> None:
        """No longer find this turn (a failed turn's parent); its descendants stay as they are."""
        slot = self._slots.get((owner, turn_id))
        if slot is not None:
            slot.is_named = False
            if not slot.children:
                self._evict(owner, turn_id, is_cold=False)

    def next_use(self) -> float:
        """When what `shed` would drop was last used; infinity if there is nothing."""
        return self._oldest_use(self._next_owner()) if self._leaves else inf

    def shed(self) -> None:
        """Drop the least recently used leaf of owners that hold at least an equal share."""
        owner = self._next_owner()
        self._evict(owner, next(iter(self._leaves[owner])), is_cold=True)

    def _next_owner(self) -> Owner:
        share = self.bytes / len(self._owner_bytes)
        above = [owner for owner in self._leaves if self._owner_bytes[owner] >= share]
        return min(above or self._leaves, key=self._oldest_use)

    def _shrink(self, bytes_max: int) -> None:
        """Shed until no more than this is left, looking at all owners once."""
        while self.bytes > bytes_max and self._leaves:
            share = self.bytes / len(self._owner_bytes)
            owners = [owner for owner in self._leaves if self._owner_bytes[owner] >= share]
            oldest = [(self._oldest_use(owner), owner) for owner in owners or self._leaves]
            heapify(oldest)
            while oldest and self.bytes > bytes_max:
                _, owner = oldest[0]
                self._evict(owner, next(iter(self._leaves[owner])), is_cold=True)
                if owner in self._leaves and self._owner_bytes[owner] >= share:
                    heapreplace(oldest, (self._oldest_use(owner), owner))
                else:
                    heappop(oldest)

    def shrink(self, size: int) -> None:
        """Drop so many bytes."""
        self._shrink(self.bytes - size)

    def _oldest_use(self, owner: Owner) -> float:
        return next(iter(self._leaves[owner].values()))

    def bytes_of(self, owner: Owner) -> int:
        """How much is held for this owner."""
        return self._owner_bytes[owner]

    def trim(self, owner: Owner, bytes_max: int) -> None:
        """Drop what this owner has beyond this limit, the least recently used first."""
        while self._owner_bytes[owner] > bytes_max and owner in self._leaves:
            self._evict(owner, next(iter(self._leaves[owner])), is_cold=True)

    def expire(self, before: int) -> None:
        """Drop turns that began before this time, from the tips of their chains on."""
        for owner, tip in [(owner, tip) for owner, tips in self._leaves.items() for tip in tips]:
            above: str | None = tip
            while above is not None and self._is_old_tip(owner, above, before):
                parent_id = self._slots[owner, above].turn.parent_id
                for notify in self._on_erase:
                    notify(owner, above)
                self._evict(owner, above, is_cold=True)
                above = parent_id

    def drop_unused(self, since: float) -> None:
        """Drop turns that were last used before this time of the clock, from the tips of their chains on."""
        before = self.bytes
        for owner in tuple(self._leaves):
            while owner in self._leaves and self._oldest_use(owner) < since:
                self._evict(owner, next(iter(self._leaves[owner])), is_cold=True)
        if self.budget is not None and self.bytes < before:
            self.budget.settle(self)

    def _is_old_tip(self, owner: Owner, turn_id: str, before: int) -> bool:
        slot = self._slots.get((owner, turn_id))
        return slot is not None and not slot.children and slot.turn.response.created_at < before

    def _hold(self, turn: Turn) -> None:
        """Hold this turn, and its ancestors that are not held yet and may come along."""
        slot = self._slots.get((turn.owner, turn.id))
        if slot is not None and slot.children:
            # Children link to the held object already, and turns that were continued do not change.
            slot.is_named = True
            return
        missing = [turn]
        while (parent := missing[-1].parent) is not None:
            key = (parent.owner, parent.id)
            is_barred = key in self.erased or (self._stored_only and not parent.is_stored)
            if key in self._slots or is_barred:
                break
            missing.append(parent)
        for node in reversed(missing):
            self._put(node, is_named=node is turn or node.is_stored)

    def _put(self, turn: Turn, *, is_named: bool) -> None:
        """Hold one turn, linked to what is held under its parent's id."""
        owner = turn.owner
        above = self._slots.get((owner, turn.parent_id or ""))
        parent = None if above is None else above.turn
        is_whole = turn.parent_id is None if parent is None else parent.is_whole
        if turn.parent is not parent or turn.is_whole != is_whole:
            warm = turn.warm if is_whole else None
            turn = structs.replace(turn, parent=parent, is_whole=is_whole, warm=warm)
        before = self._slots.get((owner, turn.id))
        size = SLOT_BYTES + turn.bytes
        self._slots[owner, turn.id] = _Slot(turn, is_named, size)
        self.dropped.add(turn)
        if before is not None:
            self.dropped.remove(before.turn)
        self._count(owner, size - (0 if before is None else before.bytes))
        leaves = self._leaves.setdefault(owner, OrderedDict())
        leaves[turn.id] = self._now()
        leaves.move_to_end(turn.id)
        if above is not None:
            above.children.add(turn.id)
            leaves.pop(above.turn.id, None)

    def _count(self, owner: Owner, change: int) -> None:
        self.bytes += change
        self._owner_bytes[owner] += change
        if not self._owner_bytes[owner]:
            del self._owner_bytes[owner]

    def _evict(self, owner: Owner, turn_id: str, *, is_cold: bool) -> None:
        """Drop a turn without children, and ancestors that were held only for it. Its parent is a
        leaf now: the next to go if the chain is cold."""
        leaves = self._leaves[owner]
        used_at = leaves.pop(turn_id, 0)
        while (slot := self._slots.pop((owner, turn_id), None)) is not None:
            self._count(owner, -slot.bytes)
            self.dropped.remove(slot.turn)
            above_id = slot.turn.parent_id or ""
            above = self._slots.get((owner, above_id))
            if above is None:
                break
            above.children.discard(turn_id)
            if above.children:
                break
            if above.is_named:
                leaves[above_id] = used_at if is_cold else self._now()
                leaves.move_to_end(above_id, last=not is_cold)
                break
            turn_id = above_id
        if not leaves:
            del self._leaves[owner]

    def _orphan(self, owner: Owner, slot: _Slot) -> None:
        """Unlink all descendants of a turn that is being erased. Their warmth goes too: it contains
        the erased turn's tokens."""
        below: list[tuple[str, Turn | None]] = [(child, None) for child in slot.children]
        slot.children.clear()
        while below:
            turn_id, parent = below.pop()
            child = self._slots[owner, turn_id]
            self.dropped.remove(child.turn)
            child.turn = structs.replace(child.turn, parent=parent, is_whole=False, warm=None)
            self.dropped.add(child.turn)
            below.extend((grandchild, child.turn) for grandchild in child.children)


def _below(bytes_max: int) -> int:
    """What is left once this limit was reached."""
    return bytes_max - min(bytes_max // SLACK_PART, SLACK_BYTES_MAX)


class DroppedTurns:
    """Turns that no cache holds any more and that are in use all the same: a running turn stands on its history."""

    def __init__(self) -> None:
        # How much they hold.
        self.bytes = 0
        # By identity: in how many caches a turn is, and those that are in none.
        self._caches: dict[int, int] = {}
        self._used: dict[int, ref[Turn]] = {}

    def add(self, turn: Turn) -> None:
        """One more cache holds this turn."""
        self._caches[id(turn)] = self._caches.get(id(turn), 0) + 1
        self._end(id(turn), turn.bytes)

    def remove(self, turn: Turn) -> None:
        """One cache less holds this turn; without any it counts until nothing uses it."""
        key = id(turn)
        size = turn.bytes
        left = self._caches.pop(key, 0) - 1
        if left > 0:
            self._caches[key] = left
        elif key not in self._used:
            self.bytes += size
            self._used[key] = ref(turn, lambda _: self._end(key, size))

    def _end(self, key: int, size: int) -> None:
        if self._used.pop(key, None) is not None:
            self.bytes -= size


@dataclass(slots=True)
class _Share:
    """How much of the budget one cache held when it was last counted."""

    cache: MemoryTurns
    key: str
    key_bytes_max: Callable[[], int] | None
    bytes: int = 0


class Budget:
    """How much the caches of all connections of this process may hold together."""

    def __init__(self, bytes_max: int) -> None:
        # How much they hold.
        self.bytes = 0
        self.dropped = DroppedTurns()
        self._bytes_max = bytes_max
        self._by_key: Counter[str] = Counter()
        self._shares: dict[MemoryTurns, _Share] = {}

    def bytes_of(self, key: str) -> int:
        """How much the caches of this key hold."""
        return self._by_key[key]

    def add(self, cache: MemoryTurns, key: str, key_bytes_max: Callable[[], int] | None) -> None:
        """Count this cache as this key's, whose limit may change; None or 0: the key has none of its own."""
        cache.budget = self
        cache.dropped = self.dropped
        self._shares[cache] = _Share(cache, key, key_bytes_max)

    def remove(self, cache: MemoryTurns) -> None:
        """Stop counting the cache."""
        share = self._shares.pop(cache, None)
        if share is not None:
            self._count(share, 0)

    def settle(self, cache: MemoryTurns) -> None:
        """The cache may have grown: shrink what is above its limit."""
        share = self._shares.get(cache)
        if share is None:
            return
        self._count(share, cache.bytes)
        if share.key_bytes_max is not None:
            self._trim(share.key, share.key_bytes_max())
        if self.bytes > self._bytes_max:
            self._shrink_fairly()

    def shrink(self, size: int) -> None:
        """Drop so many bytes, the least recently used first."""
        self._count_all()
        target = self.bytes - size
        self._shrink(lambda: self.bytes - target, tuple(self._shares.values()))

    def trim(self, key: str) -> None:
        """The limit of this key may have changed: shrink its caches to it."""
        for share in self._shares.values():
            if share.key == key and share.key_bytes_max is not None:
                self._trim(key, share.key_bytes_max())
                return

    def _trim(self, key: str, bytes_max: int) -> None:
        if bytes_max and self._by_key[key] > bytes_max:
            self._count_all()
            shares = [share for share in self._shares.values() if share.key == key]
            self._shrink(lambda: self._by_key[key] - _below(bytes_max), shares)

    def _shrink_fairly(self) -> None:
        self._count_all()
        target = _below(self._bytes_max)
        while self.bytes > target and self._by_key:
            equal = self._bytes_max / len(self._by_key)
            above = [share for share in self._shares.values() if self._by_key[share.key] > equal]
            if not self._shrink(lambda: self.bytes - target, above, equal):
                return

    def _shrink(
        self, excess: Callable[[], float], shares: Sequence[_Share], floor: float = 0.0
    ) -> bool:
        """Drop what keys hold above this floor, the least recently used first; False if there was nothing."""
        has_shed = False
        uses = [(share.cache.next_use(), place) for place, share in enumerate(shares)]
        heapify(uses)
        while uses and uses[0][0] < inf and excess() > 0:
            place = uses[0][1]
            share = shares[place]
            if self._by_key[share.key] <= floor:
                heappop(uses)
                continue
            share.cache.shed()
            self._count(share, share.cache.bytes)
            heapreplace(uses, (share.cache.next_use(), place))
            has_shed = True
        return has_shed

    def _count_all(self) -> None:
        # Caches that have shrunk by themselves have not reported it.
        for share in self._shares.values():
            self._count(share, share.cache.bytes)

    def _count(self, share: _Share, size: int) -> None:
        change = size - share.bytes
        share.bytes = size
        self.bytes += change
        self._by_key[share.key] += change
        if not self._by_key[share.key]:
            del self._by_key[share.key]


class LayeredTurns:
    """Near, then far."""

    def __init__(self, near: Turns, far: Turns) -> None:
        self._near = near
        self._far = far

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        turn = await self._near.find(owner, turn_id)
        if turn is None:
            turn = await self._fetch(owner, turn_id)
            if turn is not None and turn.response.status in ENDED:
                # Near keeps nothing that was deleted there while far was read.
                await self._near.save(turn)
        return turn

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn, near or far; what was read far is not kept near."""
        turn = await self._near.read(owner, turn_id)
        return turn if turn is not None else await self._far.read(owner, turn_id)

    async def save(self, turn: Turn) -> None:
        """Far first, so that near never has a stored turn that is not durable, nor one that others may still end."""
        if turn.is_stored:
            await self._far.save(turn)
        if not turn.is_stored or turn.response.status in ENDED:
            await self._near.save(turn)

    async def delete(self, owner: Owner, turn_id: str) -> bool:
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
        return structs.replace(turn, parent=parent, is_whole=parent.is_whole)
