"""Is the choice of a replica bounded, stable and the same everywhere?"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.replicas.measures import HALF_LIFE_S, Pace, Work
from segue.replicas.placement import (
    JOBS_FACTOR,
    WORK_FACTOR,
    WORK_TOKENS_MIN,
    Asked,
    Choice,
    ReplicaLoad,
    choose,
    ordered,
)

loads = st.builds(
    ReplicaLoad,
    name=st.uuids().map(str),
    running=st.integers(0, 300),
    waiting=st.integers(0, 300),
    slots=st.integers(1, 256),
    work=st.floats(0, 1e9),
    prefill_tokens_s=st.floats(0, 1e6),
    service_s=st.floats(0, 1e4),
    delay_s=st.floats(0, 1e3),
)
fleets = st.lists(loads, min_size=1, max_size=12, unique_by=lambda one: one.name)
askings = st.builds(
    Asked,
    head=st.binary(max_size=16),
    beginning=st.binary(max_size=16),
    held_tokens=st.integers(0, 200_000),
    prompt_tokens=st.integers(0, 200_000),
    head_share=st.floats(0, 1),
)


def idle(count: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(f"http://replica{n}:8000") for n in range(count)]


def beginnings(count: int) -> list[Asked]:
    return [Asked(b"head", b"%d" % n) for n in range(count)]


@given(fleets, askings)
def test_first_turn_is_bounded_and_does_not_depend_on_the_order_of_the_list(
    fleet: list[ReplicaLoad], asked: Asked
) -> None:
    choice = choose(fleet, asked)
    shuffled = sorted(fleet, key=lambda one: one.name, reverse=True)
    assert choose(shuffled, asked) == choice
    chosen = next(one for one in fleet if one.name == choice.name)
    jobs, slots = sum(one.jobs for one in fleet) + 1, sum(one.slots for one in fleet)

    def bound(one: ReplicaLoad) -> int:
        return math.ceil(JOBS_FACTOR * (jobs / slots) * one.slots)

    if len(fleet) > 1:
        assert chosen.jobs + 1 <= bound(chosen)
        free = [one for one in fleet if one.running < one.slots and one.jobs + 1 <= bound(one)]
        assert chosen in free or not free
        least = min(one.work for one in free or fleet if one.jobs + 1 <= bound(one))
        assert chosen.work <= WORK_FACTOR * least + max(asked.prompt_tokens, WORK_TOKENS_MIN)


@given(st.integers(1, 12), st.binary(max_size=16))
def test_a_replica_that_is_added_moves_only_what_it_gets(count: int, beginning: bytes) -> None:
    asked = Asked(b"", beginning)
    before, after = idle(count), idle(count + 1)
    old, new = choose(before, asked).name, choose(after, asked).name
    assert new in (old, after[-1].name)
    # The order of the others stays as it was.
    rest = [one.name for one in ordered(after, asked) if one is not after[-1]]
    assert rest == [one.name for one in ordered(before, asked)]


@pytest.mark.parametrize("count", [2, 4, 16])
def test_beginnings_spread_over_idle_replicas(count: int) -> None:
    names = [choose(idle(count), one).name for one in beginnings(1_000)]
    found = [names.count(one.name) for one in idle(count)]
    assert min(found) > 0.5 * 1_000 / count
    assert max(found) < 1.6 * 1_000 / count


def test_rare_head_has_one_replica_and_a_popular_one_its_share() -> None:
    fleet = idle(8)
    rare = {choose(fleet, Asked(b"rare", b"%d" % n, head_share=0.01)).name for n in range(64)}
    half = {choose(fleet, Asked(b"half", b"%d" % n, head_share=0.5)).name for n in range(64)}
    whole = {choose(fleet, Asked(b"all", b"%d" % n)).name for n in range(256)}
    assert (len(rare), len(half), len(whole)) == (1, 5, 8)


def test_sessions_that_come_at_once_are_as_many_everywhere() -> None:
    """One head, and every replica is told what the others have: within a quarter of each other."""
    fleet = idle(4)
    for asked in beginnings(64):
        name = choose(fleet, asked).name
        fleet = [
            one if one.name != name else ReplicaLoad(name, running=one.running + 1) for one in fleet
        ]
    assert max(one.running for one in fleet) <= 20


def test_work_of_the_past_counts_beside_jobs() -> None:
    names = {one.name for one in idle(4)}
    busy, *rest = idle(4)
    worked = ReplicaLoad(busy.name, work=1_000_000)
    found = {choose([worked, *rest], Asked(b"", b"%d" % n, prompt_tokens=100)) for n in range(64)}
    assert {one.name for one in found} == names - {busy.name}
    assert {one.reason for one in found} == {"beginning", "load"}


LONG, FREE = "http://long", "http://free"


@pytest.mark.parametrize(
    ("held", "prefill", "expected"),
    [
        # It would wait for 6 s.
        (10_000, 5_000.0, Choice(FREE, "queue")),
        (100_000, 5_000.0, Choice(LONG, "parent")),
        (100_000, 50_000.0, Choice(FREE, "queue")),
        (0, 0.0, Choice(FREE, "queue")),
    ],
)
def test_history_leaves_a_queue_that_costs_more_than_reading_it_again(
    held: int, prefill: float, expected: Choice
) -> None:
    long = ReplicaLoad(LONG, running=4, waiting=11, slots=4, service_s=2.0)
    free = ReplicaLoad(FREE, running=1, slots=4, prefill_tokens_s=prefill)
    assert choose([long, free], Asked(route=LONG, held_tokens=held)) == expected


def test_history_stays_where_all_are_as_busy_and_where_only_the_engine_is_slow() -> None:
    fleet = [ReplicaLoad(name, running=4, waiting=9, slots=4) for name in "ab"]
    assert choose(fleet, Asked(route="b", held_tokens=10)) == Choice("b", "parent")
    fleet = [ReplicaLoad("a"), ReplicaLoad("b", running=1, delay_s=3.0)]
    assert choose(fleet, Asked(route="b", held_tokens=10)) == Choice("b", "parent")
    # An engine that has slots for all has a queue of its own: it is measured.
    fleet = [ReplicaLoad("a", running=10), ReplicaLoad("b", running=60, delay_s=3.0)]
    assert choose(fleet, Asked(route="b", held_tokens=1_000)) == Choice("a", "queue")
    assert choose(fleet, Asked(route="b", held_tokens=20_000)) == Choice("b", "parent")


def test_route_that_is_gone_is_placed_anew_and_says_so() -> None:
    assert choose(idle(3), Asked(route="gone")).reason == "down"
    assert choose(idle(1), Asked(route="gone")).reason == "down"
    (only,) = idle(1)
    assert choose([only], Asked(route=only.name)) == Choice(only.name, "parent")


def test_work_decays() -> None:
    work = Work()
    work.add(100, now=10.0)
    assert work.at(10.0 + HALF_LIFE_S) == pytest.approx(50)
    work.add(100, now=10.0 + HALF_LIFE_S)
    assert work.at(10.0 + 2 * HALF_LIFE_S) == pytest.approx(75)


def test_pace_is_learnt_from_prompts_that_did_not_wait() -> None:
    pace = Pace()
    for number in range(40):
        slow = number % 2
        pace.note_first_token(10_000, 1.0 + 4.0 * slow, now=float(number))
        pace.note_end(3.0)
    assert pace.prefill_tokens_s == pytest.approx(10_000, rel=0.1)
    assert pace.service_s == pytest.approx(3.0)
    assert 0.5 < pace.delay_s(40.0) < 4.0
    assert pace.delay_s(100.0) < 0.01
    # A few tokens say nothing of how fast it reads.
    pace.note_first_token(10, 1.0, now=100.0)
    assert pace.prefill_tokens_s == pytest.approx(10_000, rel=0.1)
