"""What does the engine core keep of requests that have finished, and who may go on from them? Pure.

In: requests as vLLM has them (`Request`: lists of ids, block hashes, a count of computed tokens). Out: the same, made
into what they would be had their whole prompt been sent. Nothing of vLLM is imported here.

    line    ids and block hashes of one conversation, in lists that grow in place: a chain of n turns has one
    kept    the end of one turn on a line. It may hold the turn's KV blocks; only the last of a line can
    claim   the waiting request that gets these blocks when it is scheduled

A request that goes on from a kept turn that holds its blocks takes the line over: nothing is copied, looked up or
freed. Every other one (a fork, a cut, a turn whose blocks were let go) gets a line of its own with copies of the
lists, and finds its blocks in the prefix cache by their hashes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

# So begin the ids of the plugin's requests. vLLM puts words of its own before those that clients choose, but for its
# Responses API, where a client can send no object of ours.
REQUEST_IDS = "segue-"
# How many of the last ids are compared, beside the lengths.
TAIL_IDS = 4
# Some 60 MB, beside their ids.
TURNS_MAX = 50_000


# Salt, and name, path and number of the adapter.
Scope = tuple[Any, Any]


class Refusal(Exception):
    """The request cannot be made whole: its client must send all ids."""


class Line:
    """The lists that the requests of one conversation share, one after the other."""

    __slots__ = ("counted", "hashes", "ids", "prompt", "refs")

    def __init__(self, ids: list[int], prompt: list[int], hashes: list[Any]) -> None:
        self.ids, self.prompt, self.hashes = ids, prompt, hashes
        # How many kept turns are on it, and how many of its ids are counted.
        self.refs = self.counted = 0


class Kept:
    """The end of one turn."""

    __slots__ = (
        "blocks",
        "cached_blocks",
        "claim",
        "frontier",
        "key",
        "length",
        "line",
        "scope",
    )

    def __init__(self, key: str, line: Line, frontier: int, scope: Scope) -> None:
        self.key, self.line, self.scope = key, line, scope
        self.length = len(line.ids)
        # All before it has its KV; what a step in flight or a rejected draft has computed does not count.
        self.frontier = frontier
        self.blocks: list[Any] | None = None
        # How many of the blocks can be found by their hashes.
        self.cached_blocks = 0
        self.claim: Any = None


class KeptTurns:
    """All kept turns of one engine core, bounded by ids and in number; `free` gives blocks back."""

    def __init__(
        self,
        tokens_max: int,
        hash_block_size: int,
        free: Callable[[list[Any]], None],
        turns_max: int = TURNS_MAX,
    ) -> None:
        self.tokens_max, self.turns_max = tokens_max, turns_max
        self._hash_block_size = hash_block_size
        self._free = free
        self._turns: OrderedDict[str, Kept] = OrderedDict()
        # Those that hold blocks, least recently used first; the claims, by the id of their request.
        self.held: OrderedDict[str, Kept] = OrderedDict()
        self.held_blocks = 0
        self.claims: dict[str, Kept] = {}
        # The line of each request that has one, by its id.
        self._lines: dict[str, Line] = {}
        self.tokens = 0
        self.counts = dict.fromkeys(("kept", "taken", "by_hash", "let_go", "evicted", "refused"), 0)

    # --- a request goes on -----------------------------------------------------------------------

    def go_on(self, request: Any, asked: dict[str, Any]) -> None:
        """Make the request whole, whose prompt has only what is new; raises `Refusal`."""
        kept = self._turns.get(asked["from"])
        if kept is None:
            raise Refusal("not kept")
        length = asked["length"]
        if not 0 < length <= kept.length:
            raise Refusal(f"{kept.length} ids are kept, not {length}")
        if kept.line.ids[max(0, length - TAIL_IDS) : length] != asked["tail"]:
            raise Refusal("other ids are kept")
        if kept.scope != _scope(request):
            raise Refusal("another salt or adapter")
        self._turns.move_to_end(kept.key)
        new = request.prompt_token_ids
        is_free = kept.blocks is not None and kept.claim is None
        is_further = kept.frontier <= length and kept.frontier < length + len(new)
        if is_free and is_further and not request.skip_reading_prefix_cache:
            self._claim(kept, request, length, new)
        else:
            line = kept.line
            whole = line.ids[:length]
            whole.extend(new)
            hashes = line.hashes[: length // self._hash_block_size]
            self._give(request, Line(whole, whole.copy(), hashes))
            self.counts["by_hash"] += 1

    def _claim(self, kept: Kept, request: Any, length: int, new: list[int]) -> None:
        line = kept.line
        # What stands behind is of a request that was given up, or was cut off.
        del line.ids[length:]
        del line.prompt[length:]
        line.prompt.extend(line.ids[len(line.prompt) :])
        line.prompt.extend(new)
        line.ids.extend(new)
        del line.hashes[length // self._hash_block_size :]
        kept.length = length
        kept.claim = request
        self.claims[request.request_id] = kept
        self.held.move_to_end(kept.key)
        self._give(request, line)
        request.num_computed_tokens = kept.frontier

    def _give(self, request: Any, line: Line) -> None:
        """The request is one of this line, and has no answer yet."""
        request.prompt_token_ids = line.prompt
        request._all_token_ids = line.ids
        request.all_token_ids = type(request.all_token_ids)(line.ids)
        request.num_prompt_tokens = len(line.prompt)
        request.block_hashes = line.hashes
        request.update_block_hashes()
        self._lines[request.request_id] = line

    def taken(self, kept: Kept, blocks: int) -> None:
        """The request is scheduled with the blocks; so many they were."""
        del self.claims[kept.claim.request_id]
        del self.held[kept.key]
        self.held_blocks -= blocks
        kept.blocks = kept.claim = None
        self.counts["taken"] += 1

    # --- a request ends ----------------------------------------------------------------------------

    def keep(
        self, key: str, request: Any, blocks: list[Any] | None, cached_blocks: int, frontier: int
    ) -> None:
        """The request has finished; with `blocks` they are held, without they were freed as ever."""
        line = self._lines.pop(request.request_id, None)
        if line is None or line.ids is not request._all_token_ids:
            line = Line(request._all_token_ids, request.prompt_token_ids, request.block_hashes)
        if key in self._turns:
            self._forget(key)
        kept = Kept(key, line, frontier, _scope(request))
        line.refs += 1
        self.tokens += len(line.ids) - line.counted
        line.counted = len(line.ids)
        self._turns[key] = kept
        self.counts["kept"] += 1
        if blocks is not None:
            kept.blocks, kept.cached_blocks = blocks, cached_blocks
            self.held[key] = kept
            self.held_blocks += len(blocks)
        while self._is_full and len(self._turns) > 1:
            self.counts["evicted"] += 1
            self._forget(next(iter(self._turns)))

    @property
    def _is_full(self) -> bool:
        return self.tokens > self.tokens_max or len(self._turns) > self.turns_max

    def drop(self, request_id: str) -> None:
        """The request is gone, and nothing of it is kept. What it claimed can be claimed again."""
        self._lines.pop(request_id, None)
        kept = self.claims.pop(request_id, None)
        if kept is not None:
            kept.claim = None

    def _forget(self, key: str) -> None:
        if key in self.held:
            self.let_go(key)
        line = self._turns.pop(key).line
        line.refs -= 1
        if not line.refs:
            self.tokens -= line.counted
            line.counted = 0

    # --- room --------------------------------------------------------------------------------------

    def let_go_oldest(self, but: str = "") -> bool:
        """Give the blocks back that were not used for the longest time; not those that this request has claimed."""
        for key, kept in self.held.items():
            if kept.claim is None or kept.claim.request_id != but:
                self.let_go(key)
                return True
        return False

    def let_go(self, key: str) -> None:
        """The blocks go to the prefix cache; who has claimed them goes on by their hashes."""
        kept = self.held.pop(key)
        assert kept.blocks is not None
        if kept.claim is not None:
            kept.claim.num_computed_tokens = 0
            del self.claims[kept.claim.request_id]
            kept.claim = None
        self.held_blocks -= len(kept.blocks)
        blocks, kept.blocks = kept.blocks, None
        self.counts["let_go"] += 1
        self._free(blocks)

    def let_go_all(self) -> None:
        """Every block is free."""
        for key in list(self.held):
            self.let_go(key)


def _scope(request: Any) -> Scope:
    """What must be the same. To vLLM adapters of one name are equal, also where another one was loaded under it."""
    lora = request.lora_request
    return request.cache_salt, lora and (lora.lora_name, lora.lora_path, lora.lora_int_id)
