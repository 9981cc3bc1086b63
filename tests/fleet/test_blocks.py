from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue_fleet.blocks import BlockCache, CountedReplica, ReplicaShape, block_digests

SHAPE = ReplicaShape(kv_tokens=64, slots=1, prefill_tps=10, decode_tps=2, block_tokens=4)


def served(replica: CountedReplica, now: float, prompt: list[int], answer: list[int]) -> int:
    digests = block_digests([*prompt, *answer], "", 4)
    return replica.serve(now, len(prompt), len(answer), digests).found_tokens


def test_digest_stands_for_the_block_and_everything_before_it() -> None:
    one = block_digests([1, 2, 3, 4, 5, 6, 7, 8, 9], "", 4)
    assert len(one) == 2
    assert block_digests([1, 2, 3, 4, 5, 6, 7, 8], "", 4) == one
    assert block_digests([0, 2, 3, 4, 5, 6, 7, 8], "", 4)[1] != one[1]
    assert block_digests([1, 2, 3, 4], "tenant", 4) != one[:1]


def test_next_turn_finds_prompt_and_answer_but_never_its_own_last_token() -> None:
    replica = CountedReplica(SHAPE)
    first = list(range(12))
    assert served(replica, 0, first, [90, 91, 92, 93]) == 0
    assert served(replica, 1, [*first, 90, 91, 92, 93, 5, 5, 5], [1]) == 16
    # The same prompt again: the block of its last token is computed.
    assert served(replica, 2, first, [7]) == 8


def test_least_recently_used_prompt_loses_its_end_first() -> None:
    cache = BlockCache(4)
    old, new = [1, 2, 3], [11, 12]
    cache.use(old)
    cache.use(new)
    assert (cache.found(old), cache.found(new)) == (2, 2)


@given(st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=12), st.integers(1, 8))
def test_blocks_in_the_cache_always_begin_with_the_first(
    prompts: list[list[int]], room: int
) -> None:
    """What is found by halving is what is found one by one."""
    cache = BlockCache(room)
    for prompt in prompts:
        cache.use(block_digests(prompt, "", 1))
        assert len(cache) <= room
        for other in prompts:
            digests = block_digests(other, "", 1)
            here = [one in cache._blocks for one in digests]
            assert cache.found(digests) == (here.index(False) if False in here else len(here))
            assert not any(here[cache.found(digests) :])


def test_prompts_are_read_one_after_the_other_and_slots_are_kept_until_the_answer_ends() -> None:
    replica = CountedReplica(SHAPE)
    first = replica.serve(0, 10, 4, block_digests(range(14), "", 4))
    assert (first.wait_s, first.first_at_s, first.end_at_s) == (0, 1.0, 3.0)
    second = replica.serve(1, 20, 2, block_digests(range(50, 72), "", 4))
    assert second.read_at_s == pytest.approx(3.0)
    assert second.first_at_s == pytest.approx(5.0)
