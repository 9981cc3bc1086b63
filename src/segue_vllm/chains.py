"""Which conversations does this API server know, by which ids? Nothing of vLLM is imported here.

A conversation is a chain of parts: each part is what one turn added, its prompt's new ids and what was sampled. A
second child of a turn shares everything before it, and a child may begin anywhere in its parent. A handle names one
turn. Whoever asks to go on says how long the beginning is and gives its digest, so that a wrong prefix is refused
and never computed.

How much is kept is bounded by ids, and by turns, each of which costs as much as 200 ids. A turn that is forgotten
leaves its ids for as long as a later turn stands on them.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b
from typing import Any

from segue_vllm.frames import DIGEST_BYTES, bytes_of

# What must be the same as before, by name.
SCOPE = ("model", "adapter", "salt")
Scope = tuple[Any, Any, Any]
# Some 130 MB, beside their ids.
TURNS_MAX = 160_000


def new_digest() -> Any:
    """Of ids, each as four bytes, little-endian; it can be copied and goes on in O(new)."""
    return blake2b(digest_size=DIGEST_BYTES)


class Unknown(Exception):
    """A conversation is not known as it was asked for. `why` is a word of `frames.Refused`."""

    def __init__(self, why: str, words: str) -> None:
        super().__init__(words)
        self.why = why


class Part:
    """What one turn added to the chain before it."""

    __slots__ = ("before", "begin", "digest", "handle", "ids", "key", "owner", "refs", "scope")

    def __init__(
        self, before: Part | None, begin: int, digest: Any, owner: str, scope: Scope
    ) -> None:
        self.before = before
        # How many ids of the chain before it count.
        self.begin = begin
        # Of all ids up to `begin`.
        self.digest = digest
        self.ids = array("I")
        self.owner = owner
        # Model, LoRA and salt.
        self.scope = scope
        self.handle = 0
        # By which name the engine core knows it; None where it does not.
        self.key: str | None = None
        # How many stand on it, the table of handles included.
        self.refs = 0

    @property
    def length(self) -> int:
        return self.begin + len(self.ids)

    def at(self, length: int) -> tuple[Part, Any]:
        """The part that has the last of so many ids, and their digest."""
        part: Part = self
        while length < part.begin:
            assert part.before is not None, "the first part begins at 0"
            part = part.before
        digest = part.digest.copy()
        digest.update(bytes_of(part.ids[: length - part.begin]))
        return part, digest

    def flat(self) -> array[int]:
        """All ids: O(history)."""
        pieces: list[array[int]] = []
        part: Part | None = self
        end = self.length
        while part is not None:
            pieces.append(part.ids[: end - part.begin])
            end = part.begin
            part = part.before
        joined = array("I")
        for piece in reversed(pieces):
            joined.extend(piece)
        return joined


class Chains:
    """All turns that this process remembers."""

    def __init__(self, tokens_max: int, turns_max: int = TURNS_MAX) -> None:
        self.tokens_max, self.turns_max = tokens_max, turns_max
        # Those included that are forgotten and stood on.
        self.tokens = self.turns = 0
        self.evicted = 0
        # Least recently used first.
        self._parts: OrderedDict[int, Part] = OrderedDict()
        self._last = 0

    def __len__(self) -> int:
        return len(self._parts)

    def begin(
        self,
        owner: str,
        scope: Scope,
        handle: int,
        length: int,
        digest: bytes,
        ids: array[int],
    ) -> Part:
        """A new turn, under a handle of its own; raises `Unknown`."""
        if handle:
            parent = self._find(owner, scope, handle, length)
            before, state = parent.at(length)
            if state.digest() != digest:
                raise Unknown("digest", "Other ids than these stand before the new ones.")
            part = Part(before, length, state, owner, scope)
            before.refs += 1
        else:
            part = Part(None, 0, new_digest(), owner, scope)
        self._last += 1
        self.turns += 1
        part.handle = self._last
        # The table's, and that of the running turn, until `end`.
        part.refs = 2
        self._parts[part.handle] = part
        self.add(part, ids)
        return part

    def _find(self, owner: str, scope: Scope, handle: int, length: int) -> Part:
        part = self._parts.get(handle)
        if part is None:
            why = "evicted" if 0 < handle <= self._last else "unknown"
            raise Unknown(why, f"The handle is {why}.")
        if part.owner != owner:
            # To anybody else it is as if there were none.
            raise Unknown("owner", "The handle is another owner's.")
        for name, mine, asked in zip(SCOPE, part.scope, scope, strict=True):
            if mine != asked:
                raise Unknown(name, f"The handle has another {name}.")
        if not 0 <= length <= part.length:
            raise Unknown("length", f"The handle has {part.length} ids, not {length}.")
        self._parts.move_to_end(handle)
        return part

    def parent(self, handle: int) -> Part | None:
        """What a handle names, without any question."""
        return self._parts.get(handle)

    def add(self, part: Part, ids: array[int] | list[int]) -> None:
        """The part has grown; the least recently used turns make room."""
        part.ids.extend(ids)
        self.tokens += len(ids)
        while self._is_full and len(self._parts) > 1:
            oldest = next(iter(self._parts))
            if oldest == part.handle:
                self._parts.move_to_end(oldest)
                continue
            self.evicted += 1
            self._release(self._parts.pop(oldest))

    @property
    def _is_full(self) -> bool:
        return self.tokens > self.tokens_max or self.turns > self.turns_max

    def end(self, part: Part) -> None:
        """Nothing more is sampled after it."""
        self._release(part)

    def forget(self, handle: int) -> None:
        """Nobody will go on from this turn."""
        part = self._parts.pop(handle, None)
        if part is not None:
            self._release(part)

    def forget_owner(self, owner: str) -> None:
        """Nobody will go on from any turn of this owner."""
        for handle in [one.handle for one in self._parts.values() if one.owner == owner]:
            self.forget(handle)

    def _release(self, part: Part) -> None:
        node: Part | None = part
        while node is not None:
            node.refs -= 1
            if node.refs:
                return
            self.tokens -= len(node.ids)
            self.turns -= 1
            done, node = node, node.before
            done.before = None
