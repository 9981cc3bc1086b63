"""What is remembered while the process lives: turns within a budget of bytes, and usage.

In: turns, saved one by one, each linked to its parent. Out: the very same objects. It serves as the
cache of one connection, as the process's cache before a database, and as the store of a server that
has none.

**What the budget counts.** A turn keeps all its ancestors alive, so letting go of an ancestor frees
nothing while a descendant is held. Therefore every ancestor of a held turn is held too, once,
however many forks share it, and `bytes` is the sum over held turns of `Turn.bytes` and the slot
around it: what would be freed if all of it went. Eviction only ever takes a *leaf*, the least
recently used one, and its parent is a leaf next: the line that was longest out of use is peeled
from its tip, and nothing that is still needed is counted or dropped by mistake.

A slot that is not *named* is held for its descendants only and is not found: it was forgotten, or
it came along as the unstored ancestor of a turn saved here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from segue.turn.settle import entry_of
from segue.turn.values import Entry, Owner, Turn

Key = tuple[Owner, str]

# A slot, its key and its places in the two dictionaries; so that turns of no weight are bounded as
# well.
SLOT_BYTES = 600
# Rows of about 300 bytes each, for a server without a database: some 30 MB, then the oldest go.
ENTRIES_MAX = 100_000
# Deletions that are remembered; only turns that ran while one happened can still refer to it.
ERASED_MAX = 10_000


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
        self._entries: dict[str, Entry] = {}
        self._entries_max = entries_max

    @property
    def entries(self) -> list[Entry]:
        """The rows that are still held, oldest first."""
        return list(self._entries.values())

    async def settle(self, entries: Sequence[Entry]) -> None:
        """Record these turns, each at most once."""
        for entry in entries:
            self.record(entry)

    def record(self, entry: Entry) -> None:
        """Record one turn unless it is recorded already."""
        self._entries.setdefault(entry.turn_id, entry)
        if len(self._entries) > self._entries_max:
            del self._entries[next(iter(self._entries))]


class MemoryTurns:
    """Turns in memory, bounded in bytes.

    With `stored_only` it behaves as a store does: a turn that was not to be stored is not kept, not
    even as an ancestor. Given a ledger, it records the usage of stored turns as they are saved, as
    a database would.
    """

    def __init__(
        self, bytes_max: int, *, stored_only: bool = False, ledger: MemoryLedger | None = None
    ) -> None:
        self._bytes_max = bytes_max
        self._stored_only = stored_only
        self._ledger = ledger
        self._slots: dict[Key, Slot] = {}
        # Turns without held children, least recently used first.
        self._leaves: OrderedDict[Key, None] = OrderedDict()
        # What was deleted here, so that a turn which still runs on it does not bring it back.
        self._erased: OrderedDict[Key, None] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """What is held now; at most the budget."""
        return self._bytes

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
        while self._bytes > self._bytes_max and self._leaves:
            self._drop(next(iter(self._leaves)), is_cold=True)
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
        self._orphan(owner, slot)
        self._drop(key, is_cold=False)
        return slot.is_named

    def forget(self, owner: Owner, turn_id: str) -> None:
        """Find it here no more. What came after it stays as it is (a failed turn's parent, style.md
        7)."""
        key = (owner, turn_id)
        slot = self._slots.get(key)
        if slot is None:
            return
        slot.is_named = False
        if not slot.children:
            self._drop(key, is_cold=False)

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
            self._bytes -= slot.bytes
        self._slots[key] = fresh = Slot(linked(turn, above.turn if above else None), is_named)
        self._bytes += fresh.bytes
        self._leaves[key] = None
        if above is not None and turn.parent_id is not None:
            above.children.add(turn.id)
            self._leaves.pop((turn.owner, turn.parent_id), None)

    def _touch(self, key: Key) -> None:
        if key in self._leaves:
            self._leaves.move_to_end(key)

    def _drop(self, key: Key, *, is_cold: bool) -> None:
        """Let go of a turn without children, and of ancestors that were held only for it. Its
        parent is a leaf now: the next to go if the line is cold."""
        while (slot := self._slots.pop(key, None)) is not None:
            self._leaves.pop(key, None)
            self._bytes -= slot.bytes
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
                self._leaves[key] = None
                self._leaves.move_to_end(key, last=not is_cold)
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


def linked(turn: Turn, parent: Turn | None) -> Turn:
    """The turn with this parent: the same object if it has it already."""
    is_whole = turn.parent_id is None if parent is None else parent.is_whole
    if turn.parent is parent and turn.is_whole == is_whole:
        return turn
    return replace(turn, parent=parent, is_whole=is_whole, warm=turn.warm if is_whole else None)
