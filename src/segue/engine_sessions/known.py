"""Which prompt does an engine know already, and by which handle? Pure.

In: a prompt, as a chain of chunks. Out: the handle of the turn that has its longest known beginning, how long that is,
its digest, and the ids that come after. A turn is found again by the nodes of its prompt: chains share them. What the
engine sampled after a prompt is held against what stands there now, id by id, so that an answer that was cut, or was
read in another way than it was written, costs only what differs. So is what was read ahead of a tool's output: its
prompts are made for that, share no node with those that follow, and are found by the turn that they go on from.

How much is remembered is bounded by ids, and by turns, each of which costs as much as 300 ids; what is forgotten is
sent as a whole.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from hashlib import blake2b
from typing import Any

from segue.engine_sessions.frames import DIGEST_BYTES, id_bytes
from segue.seams.prompt import IdArray, Tokens, id_array

# The nodes of so many ids are held at most, beside what their conversations hold anyway.
TOKENS_MAX = 16_000_000
# Some 65 MB, beside these.
TURNS_MAX = 50_000


class KnownTurn:
    """A prompt that the engine has, and what it has sampled after it."""

    __slots__ = (
        "ahead",
        "base",
        "base_digest",
        "before",
        "digest",
        "handle",
        "prompt",
        "sampled",
        "scope",
        "shared",
    )

    def __init__(
        self,
        prompt: Tokens,
        scope: tuple[str, str | None],
        begins: Beginning,
        *,
        is_ahead: bool = False,
    ) -> None:
        self.prompt, self.scope = prompt, scope
        self.handle = 0
        # What was read ahead of what follows this turn. Of such a one: the turn that it goes on from, and how far.
        self.ahead: KnownTurn | None = None
        self.before: KnownTurn | None = None
        self.shared = 0
        if is_ahead and (of := begins.of) is not None:
            self.before, self.shared = (of.before, of.shared) if of.before else (of, begins.length)
        # How many of its ids were known before it, and the digests of those and of the whole prompt.
        self.base, self.base_digest = begins.length, begins.state
        self.digest = begins.state.copy()
        self.digest.update(begins.data)
        self.sampled = id_array()

    @property
    def length(self) -> int:
        return self.prompt.length + len(self.sampled)

    @property
    def size(self) -> int:
        """How many ids are held for its sake."""
        return self.length - (self.base if self.before is None else self.before.prompt.length)


class Beginning:
    """What of a prompt an engine has, and what it has not."""

    __slots__ = ("data", "length", "of", "state")

    def __init__(self, of: KnownTurn | None, length: int, state: Any, data: bytes) -> None:
        self.of = of
        self.length = length
        # The digest, which can go on, of the ids before `length`; and all others as bytes.
        self.state, self.data = state, data

    @property
    def handle(self) -> int:
        return 0 if self.of is None else self.of.handle


def new_digest() -> Any:
    """Of ids, as they are sent."""
    return blake2b(digest_size=DIGEST_BYTES)


def unknown(prompt: Tokens) -> Beginning:
    """All of the prompt."""
    return Beginning(None, 0, new_digest(), id_bytes(prompt.flat()))


class KnownTurns:
    """What one engine knows, as far as we know."""

    def __init__(self, tokens_max: int = TOKENS_MAX, turns_max: int = TURNS_MAX) -> None:
        self._tokens_max, self._turns_max = tokens_max, turns_max
        self.tokens = 0
        # Least recently used first.
        self._turns: OrderedDict[int, KnownTurn] = OrderedDict()
        # The turn that has brought a node, by the node's identity: the turn keeps it alive.
        self._nodes: dict[int, KnownTurn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def find(self, prompt: Tokens, scope: tuple[str, str | None]) -> Beginning:
        """The longest beginning that is known."""
        node: Tokens | None = prompt
        after: list[IdArray[int]] = []
        while node is not None:
            turn = self._nodes.get(id(node))
            if turn is not None and turn.scope == scope:
                new = _joined(after[::-1])
                if turn.ahead is not None and node.length <= turn.ahead.shared:
                    begins = _held_against(turn.ahead, node, new)
                    # Not where it differs in what an earlier one has read.
                    if begins.length >= turn.ahead.base:
                        return begins
                return _held_against(turn, node, new)
            after.append(node.ids)
            node = node.before
        return unknown(prompt)

    def add(self, turn: KnownTurn) -> None:
        """The engine has this prompt now, under the handle of the turn."""
        if turn.before is not None and id(turn.before) not in self._turns:
            return
        self._turns[id(turn)] = turn
        if turn.before is None:
            for node in _nodes(turn):
                self._nodes[id(node)] = turn
        else:
            earlier, turn.before.ahead = turn.before.ahead, turn
            if earlier is not None:
                self.forget(earlier)
        self.grown(turn, turn.size)

    def grown(self, turn: KnownTurn, count: int) -> None:
        """So many more ids are remembered."""
        if id(turn) not in self._turns:
            return
        self._turns.move_to_end(id(turn))
        self.tokens += count
        while self._is_full and len(self._turns) > 1:
            self.forget(next(iter(self._turns.values())))

    @property
    def _is_full(self) -> bool:
        return self.tokens > self._tokens_max or len(self._turns) > self._turns_max

    def forget(self, turn: KnownTurn) -> None:
        """The engine does not have it any longer, or we do not care."""
        if self._turns.pop(id(turn), None) is None:
            return
        self.tokens -= turn.size
        if turn.before is not None and turn.before.ahead is turn:
            turn.before.ahead = None
        if turn.ahead is not None:
            self.forget(turn.ahead)
        for node in _nodes(turn):
            if self._nodes.get(id(node)) is turn:
                del self._nodes[id(node)]

    def forget_owner(self, owner: str) -> None:
        """Everything of the owner was erased."""
        for turn in [one for one in self._turns.values() if one.scope[0] == owner]:
            self.forget(turn)

    def clear(self) -> None:
        """The engine is another one."""
        self._turns.clear()
        self._nodes.clear()
        self.tokens = 0


def _nodes(turn: KnownTurn) -> list[Tokens]:
    """Those that were not known before."""
    found = []
    node: Tokens | None = turn.prompt
    while node is not None and node.length > turn.base:
        found.append(node)
        node = node.before
    return found


def _held_against(turn: KnownTurn, node: Tokens, new: IdArray[int]) -> Beginning:
    """How far these ids, which come after the node, are what the turn has there."""
    old = _between(turn.prompt, node.length)
    old.extend(turn.sampled)
    most = min(len(old), len(new))
    # Many are compared at once.
    same = bisect_left(range(1, most + 1), True, key=lambda n: old[:n] != new[:n])
    length = node.length + same
    if length >= turn.prompt.length:
        state = turn.digest.copy()
        state.update(id_bytes(turn.sampled[: length - turn.prompt.length]))
    else:
        state = turn.base_digest.copy()
        known = _between(turn.prompt, turn.base)
        state.update(id_bytes(known[: length - turn.base]))
    return Beginning(turn, length, state, id_bytes(new[same:]))


def _between(prompt: Tokens, begin: int) -> IdArray[int]:
    """The ids from there on."""
    chunks: list[IdArray[int]] = []
    node: Tokens | None = prompt
    while node is not None and node.length > begin:
        start = node.length - len(node.ids)
        chunks.append(node.ids if start >= begin else node.ids[begin - start :])
        node = node.before
    chunks.reverse()
    return _joined(chunks)


def _joined(chunks: list[IdArray[int]]) -> IdArray[int]:
    joined = array("I")
    for chunk in chunks:
        joined.extend(chunk)
    return joined
