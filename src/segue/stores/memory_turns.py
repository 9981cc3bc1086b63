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

A slot that is not *named* is held for its descendants only and is not found: it was forgotten, or
it came along as the unstored ancestor of a turn saved here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from segue.stores.budget import Budget, BudgetShare
from segue.turn.values import Owner, Turn

TurnKey = tuple[Owner, str]

# A slot, its key and its entries in the two dictionaries; so that turns of no weight are bounded as
# well.
SLOT_BYTES = 600
# Deletions that are remembered; only turns that ran while one happened can still refer to it.
ERASED_MAX = 10_000


@dataclass(slots=True)
class _Slot:
    """A held turn, and the ids of the held turns that name it as their parent."""

    turn: Turn
    is_named: bool
    children: set[str] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        return SLOT_BYTES + self.turn.bytes


class MemoryTurns:
    """Turns in memory, bounded in bytes.

    With `stored_only` it behaves as a store does: a turn that was not to be stored is not kept, not
    even as an ancestor. `on_save` is called with every turn that was kept, `on_erase` with the name
    of every turn that was deleted or is too old.
    """

    def __init__(
        self,
        bytes_max: int,
        *,
        stored_only: bool = False,
        on_save: Callable[[Turn], None] | None = None,
        on_erase: Sequence[Callable[[Owner, str], None]] = (),
    ) -> None:
        self._bytes_max = bytes_max
        self._stored_only = stored_only
        self._on_save = on_save
        self._on_erase = on_erase
        self._slots: dict[TurnKey, _Slot] = {}
        # Turns without held children, by owner, least recently used first, each with the tick of its last use.
        self._leaves: dict[Owner, OrderedDict[str, int]] = {}
        self._owner_bytes: dict[Owner, int] = {}
        self._ticks = count()
        self._share: BudgetShare | None = None
        # What was deleted here, so that a turn that still runs after it does not bring it back.
        self._erased: OrderedDict[TurnKey, None] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """How much is held; at most the budget."""
        return self._bytes

    def enter(self, budget: Budget, key: str, key_bytes_max: Callable[[], int]) -> None:
        """Share a budget with other caches."""
        self._share = budget.enter(self, key, key_bytes_max)

    def leave(self) -> None:
        """The cache is no longer used: what it holds stops counting."""
        if self._share is not None:
            self._share.leave()

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        return self.held(owner, turn_id)

    def held(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn as it was saved, chain and warmth included; without waiting, for a connection's own use."""
        key = (owner, turn_id)
        slot = self._slots.get(key)
        if slot is None or not slot.is_named:
            return None
        self._touch(key)
        return slot.turn

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        # With its parents: in memory they cost nothing.
        return self.held(owner, turn_id)

    async def save(self, turn: Turn) -> None:
        if (self._stored_only and not turn.is_stored) or (turn.owner, turn.id) in self._erased:
            return
        self._hold(turn)
        while self._bytes > self._bytes_max and self.shed():
            pass
        if self._share is not None:
            self._share.settle()
        if self._on_save is not None:
            self._on_save(turn)

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        """Erase the turn; its descendants keep their own items and are no longer whole."""
        key = (owner, turn_id)
        self._erased[key] = None
        if len(self._erased) > ERASED_MAX:
            self._erased.popitem(last=False)
        slot = self._slots.get(key)
        if slot is None:
            return False
        for notify in self._on_erase:
            notify(owner, turn_id)
        self._orphan(owner, slot)
        self._drop(key, is_cold=False)
        return slot.is_named

    def forget(self, owner: Owner, turn_id: str) -> None:
        """No longer find this turn (a failed turn's parent); its descendants stay as they are."""
        key = (owner, turn_id)
        slot = self._slots.get(key)
        if slot is None:
            return
        slot.is_named = False
        if not slot.children:
            self._drop(key, is_cold=False)

    def shed(self) -> bool:
        """Drop the least recently used leaf of owners that hold at least an equal share; False if there is none."""
        if not self._leaves:
            return False
        share = self._bytes / len(self._owner_bytes)
        above = [owner for owner in self._leaves if self._owner_bytes[owner] >= share]
        owner = min(above or self._leaves, key=lambda name: next(iter(self._leaves[name].values())))
        self._drop((owner, next(iter(self._leaves[owner]))), is_cold=True)
        return True

    def bytes_of(self, owner: Owner) -> int:
        """How much is held for this owner."""
        return self._owner_bytes.get(owner, 0)

    def trim(self, owner: Owner, bytes_max: int) -> None:
        """Drop what this owner has beyond this limit, the least recently used first."""
        while self.bytes_of(owner) > bytes_max and owner in self._leaves:
            self._drop((owner, next(iter(self._leaves[owner]))), is_cold=True)

    def expire(self, before: int) -> None:
        """Drop turns that began before this time, from the tips of their chains on."""
        names = [(owner, tip) for owner, tips in self._leaves.items() for tip in tips]
        for key in names:
            while self._is_old_tip(key, before):
                for notify in self._on_erase:
                    notify(*key)
                above = self._slots[key].turn.parent_id
                self._drop(key, is_cold=True)
                if above is None:
                    break
                key = (key[0], above)

    def _is_old_tip(self, key: TurnKey, before: int) -> bool:
        return self._is_leaf(key) and self._slots[key].turn.response.created_at < before

    def _is_leaf(self, key: TurnKey) -> bool:
        return key[1] in self._leaves.get(key[0], ())

    def _hold(self, turn: Turn) -> None:
        slot = self._slots.get((turn.owner, turn.id))
        if slot is not None and slot.children:
            # Children link to the held object already, and turns that were continued do not change.
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
        self._slots[key] = fresh = _Slot(_linked(turn, above.turn if above else None), is_named)
        self._count(turn.owner, fresh.bytes)
        self._leaves.setdefault(turn.owner, OrderedDict())[turn.id] = next(self._ticks)
        if above is not None and turn.parent_id is not None:
            above.children.add(turn.id)
            self._unleaf((turn.owner, turn.parent_id))

    def _touch(self, key: TurnKey) -> None:
        if self._is_leaf(key):
            leaves = self._leaves[key[0]]
            leaves[key[1]] = next(self._ticks)
            leaves.move_to_end(key[1])

    def _unleaf(self, key: TurnKey) -> int:
        """Take it off the leaves; returns the tick of its last use."""
        leaves = self._leaves.get(key[0], OrderedDict())
        tick = leaves.pop(key[1], 0)
        if not leaves:
            self._leaves.pop(key[0], None)
        return tick

    def _count(self, owner: Owner, change: int) -> None:
        self._bytes += change
        owned = self._owner_bytes.get(owner, 0) + change
        if owned:
            self._owner_bytes[owner] = owned
        else:
            self._owner_bytes.pop(owner, None)

    def _drop(self, key: TurnKey, *, is_cold: bool) -> None:
        """Drop a turn without children, and ancestors that were held only for it. Its parent is a
        leaf now: the next to go if the chain is cold."""
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

    def _orphan(self, owner: Owner, slot: _Slot) -> None:
        """Unlink all descendants of a turn that is being erased. Their warmth goes too: it contains
        the erased turn's tokens."""
        below: list[tuple[str, Turn | None]] = [(child, None) for child in slot.children]
        slot.children.clear()
        while below:
            turn_id, parent = below.pop()
            child = self._slots[(owner, turn_id)]
            child.turn = replace(child.turn, parent=parent, is_whole=False, warm=None)
            below.extend((grandchild, child.turn) for grandchild in child.children)


def _linked(turn: Turn, parent: Turn | None) -> Turn:
    """The turn with this parent: the same object if it has it already."""
    is_whole = turn.parent_id is None if parent is None else parent.is_whole
    if turn.parent is parent and turn.is_whole == is_whole:
        return turn
    return replace(turn, parent=parent, is_whole=is_whole, warm=turn.warm if is_whole else None)
