"""What does a replica find of a prompt, and how long does it take? Values and sums only, no clock and no socket.

A prompt is a list of block digests: each digest stands for a block of tokens and everything before it, as engines with
a prefix cache count. `BlockCache` keeps as many blocks as its KV room has and drops those that were used least lately,
the end of a prompt before its beginning. `ReplicaClock` says when a job gets a slot, when its prompt is read and when
its answer ends: prompts are read one after the other, answers are written beside each other. Jobs keep the order in
which they come, so that everything is known when a job arrives.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from heapq import heappop, heappush

from msgspec import Struct

BLOCK_TOKENS = 16


class ReplicaShape(Struct, frozen=True):
    """What a replica has: KV room and rates, in tokens and in seconds of its own clock."""

    kv_tokens: int = 500_000
    slots: int = 16
    prefill_tps: float = 10_000.0
    decode_tps: float = 60.0
    block_tokens: int = BLOCK_TOKENS


class Served(Struct, frozen=True):
    """One job: what was found and computed of its prompt, and its times by the clock of the replica."""

    prompt_tokens: int
    found_tokens: int
    answer_tokens: int
    at_s: float
    # When its prompt begins to be read, when its first token comes, and when its last.
    read_at_s: float
    first_at_s: float
    end_at_s: float

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.found_tokens

    @property
    def wait_s(self) -> float:
        """In the queue, before its prompt is read."""
        return self.read_at_s - self.at_s


def block_digests(ids: Sequence[int], salt: str = "", size: int = BLOCK_TOKENS) -> list[int]:
    """One number for each whole block: the same number is the same text up to there."""
    data = memoryview(array("I", ids)).cast("B")
    digest = blake2b(salt.encode(), digest_size=8).digest()
    digests = []
    for start in range(0, len(ids) // size * size * 4, size * 4):
        digest = blake2b(data[start : start + size * 4], digest_size=8, key=digest).digest()
        digests.append(int.from_bytes(digest, "big"))
    return digests


class BlockCache:
    """The blocks that a replica has, the least recently used first."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def found(self, digests: Sequence[int]) -> int:
        """How many blocks of this prompt's beginning are here."""
        # A block is dropped before those that it stands on: the first that is missing ends the beginning.
        low = 0
        high = len(digests)
        while low < high:
            middle = (low + high) // 2
            if digests[middle] in self._blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def merge(self, other: BlockCache) -> None:
        """Its blocks are here too, as recently used as they were there."""
        self.use(list(reversed(other._blocks)))

    def use(self, digests: Sequence[int]) -> None:
        """They are here now, and were used last; the beginning stays longest."""
        for digest in reversed(digests):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self.blocks_max:
            self._blocks.popitem(last=False)


class ReplicaClock:
    """When each job of a replica gets its turn."""

    def __init__(self, shape: ReplicaShape) -> None:
        self.shape = shape
        self._slots = [0.0] * shape.slots
        self._read_until = 0.0

    def free_at(self, now: float) -> float:
        """When it would begin to read a prompt that comes now."""
        return max(now, self._slots[0], self._read_until)

    def serve(
        self, now: float, prompt_tokens: int, found_tokens: int, answer_tokens: int
    ) -> Served:
        """A job that arrives now, after all others."""
        read_at = max(now, heappop(self._slots), self._read_until)
        first_at = read_at + (prompt_tokens - found_tokens) / self.shape.prefill_tps
        end_at = first_at + answer_tokens / self.shape.decode_tps
        self._read_until = first_at
        heappush(self._slots, end_at)
        return Served(prompt_tokens, found_tokens, answer_tokens, now, read_at, first_at, end_at)


class CountedReplica:
    """A replica as numbers: its cache, its clock and what it has served."""

    def __init__(self, shape: ReplicaShape) -> None:
        self.shape = shape
        self.cache = BlockCache(shape.kv_tokens // shape.block_tokens)
        self.clock = ReplicaClock(shape)

    def serve(
        self, now: float, prompt_tokens: int, answer_tokens: int, digests: Sequence[int]
    ) -> Served:
        """A job that arrives now; the digests are those of its prompt and of its answer after it."""
        size = self.shape.block_tokens
        # The last token of a prompt is always computed: the first of the answer comes from it.
        whole = max(0, prompt_tokens - 1) // size
        found_blocks = self.cache.found(digests[:whole])
        self.cache.use(digests)
        return self.clock.serve(now, prompt_tokens, found_blocks * size, answer_tokens)
