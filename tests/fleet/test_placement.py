"""What is said of a run: shared, found, and what one who knows everything would have found."""

from __future__ import annotations

import pytest

from bench.fleet import hits_back_s
from bench.fleet_play import Heard
from bench.placement import Replaced, in_order, judge
from bench.scale import SHAPE, sessions_of, simulate
from segue_fleet.blocks import ReplicaShape
from segue_fleet.replica import Arrival

SHAPE_SMALL = ReplicaShape(kv_tokens=8, block_tokens=1)


def job(at: float, blocks: str, found: int) -> Arrival:
    """Each letter is a block of one token; the last token of a prompt is never found."""
    return Arrival(at, len(blocks), 0, found, 0.0, 0.0, [ord(one) for one in blocks])


def test_found_is_compared_with_one_cache_that_has_all_rooms() -> None:
    arrivals = {
        "one": [job(1, "abcd", 0), job(3, "abcdefg", 4)],
        # It has not seen this beginning, another one has.
        "two": [job(2, "xyz", 0), job(4, "abcdefgh", 0)],
    }
    before, after = judge(in_order(arrivals), SHAPE_SMALL, arrivals, edges=[3.5])
    assert (before.shared_tokens, before.found_tokens, before.oracle_tokens) == (4, 4, 4)
    assert before.computed == {"one": 7, "two": 3}
    assert before.spread == pytest.approx(7 / 3)
    assert (after.shared_tokens, after.oracle_tokens, after.of_oracle) == (7, 7, 0)


def test_oracle_forgets_what_only_a_replaced_replica_had() -> None:
    arrivals = {"one": [job(1, "abcd", 0), job(5, "abcde", 0)], "two": [job(2, "wxyz", 0)]}
    (judged,) = judge(in_order(arrivals), SHAPE_SMALL, arrivals, [Replaced("one", 4)])
    assert (judged.shared_tokens, judged.oracle_tokens) == (4, 0)
    (judged,) = judge(in_order(arrivals), SHAPE_SMALL, arrivals, [Replaced("two", 4)])
    assert judged.oracle_tokens == 4


def test_oracle_has_no_more_room_than_all_replicas() -> None:
    arrivals = {"one": [job(1, "abcdefgh", 0), job(2, "stuvwxyz", 0), job(3, "abcdefgh", 0)]}
    (judged,) = judge(in_order(arrivals), SHAPE_SMALL, arrivals)
    assert (judged.shared_tokens, judged.oracle_tokens) == (7, 0)


def test_hits_are_back_when_turns_find_as_much_as_before() -> None:
    def turn(at: float, cached: int) -> Heard:
        return Heard("s", 1, at, 0.0, (), 100, cached)

    heard = [turn(n, 95) for n in range(10)] + [turn(10 + n, 0 if n < 3 else 95) for n in range(8)]
    # The last turn that found nothing ended at 12.
    assert hits_back_s(heard, killed_at=9.5, window=4) == pytest.approx(2.5)
    assert hits_back_s(heard[:10], killed_at=8.5, window=4) == 0


def test_simulated_routes_find_what_load_alone_loses() -> None:
    sums = {
        policy: simulate(policy, sessions_of(40, 6, 60.0, 1), 5, SHAPE, 1)
        for policy in ("segue", "load only", "oracle")
    }
    assert sums["segue"].jobs == 240
    assert sums["segue"].share > 0.95
    assert sums["load only"].share < 0.6
    assert sums["segue"].first_s_p95 < sums["load only"].first_s_p95
    assert sums["oracle"].pooled_tokens <= sums["oracle"].shared_tokens
