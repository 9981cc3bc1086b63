"""What a key may still use, with the time passed in."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.accounts import quota as words
from segue.accounts.quota import KeyQuota, Meter
from segue.errors import TooMany, Unavailable
from segue.limits import Draw, Grant, HeldPlaces, KeyLimits, Level, share_out
from segue.stores.memory import MemorySharedLimits


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class CountingSharedLimits(MemorySharedLimits):
    """Meters that count their questions, and can be switched off."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.asked = 0
        self.is_down = False

    async def draw(self, draw: Draw) -> Grant:
        self.asked += 1
        await asyncio.sleep(0)
        if self.is_down:
            raise Unavailable("down")
        return await super().draw(draw)


def metered(clock: Clock) -> tuple[CountingSharedLimits, Meter]:
    shared_limits = CountingSharedLimits(clock)
    return shared_limits, Meter(shared_limits)


def quota(clock: Clock, **limits: int) -> KeyQuota:
    return KeyQuota(KeyLimits(**limits), "key", metered(clock)[1], clock)


def test_requests_that_start_no_turn_come_back_steadily() -> None:
    clock = Clock()
    some = quota(clock, other_requests_per_min=6)
    for _ in range(6):
        some.count_other_request()
    with pytest.raises(TooMany) as caught:
        some.count_other_request()
    assert caught.value.wait_s == pytest.approx(10)
    clock.now += 10
    some.count_other_request()
    with pytest.raises(TooMany):
        some.count_other_request()


async def test_minute_of_requests_may_come_at_once_and_then_one_by_one() -> None:
    clock = Clock()
    some = quota(clock, requests_per_min=6)
    for _ in range(6):
        await some.count_request()
    with pytest.raises(TooMany) as caught:
        await some.count_request()
    assert caught.value.wait_s == pytest.approx(10)
    clock.now += 10
    await some.count_request()
    with pytest.raises(TooMany):
        await some.count_request()
    clock.now += 3_600
    for _ in range(6):
        await some.count_request()
    with pytest.raises(TooMany):
        await some.count_request()


async def test_debt_of_tokens_is_waited_off() -> None:
    clock = Clock()
    some = quota(clock, tokens_per_min=60)
    await some.count_request()
    await some.hold()
    some.release("turn", 180)
    with pytest.raises(TooMany) as caught:
        await some.count_request()
    assert caught.value.wait_s == pytest.approx(120)
    await some.report()
    with pytest.raises(TooMany):
        await some.count_request()
    clock.now += 121
    await some.count_request()


async def test_refused_request_costs_nothing() -> None:
    clock = Clock()
    some = quota(clock, requests_per_min=1)
    await some.count_request()
    for _ in range(100):
        with pytest.raises(TooMany):
            await some.count_request()
    clock.now += 60
    await some.count_request()


async def test_places_are_given_back() -> None:
    some = quota(Clock(), lanes_max=2)
    await some.hold()
    await some.hold()
    with pytest.raises(TooMany):
        await some.hold()
    some.release()
    await some.hold()
    assert some.in_flight == 2


async def test_those_who_come_at_once_are_counted_one_by_one() -> None:
    clock = Clock()
    some = quota(clock, lanes_max=3, requests_per_min=40)
    held = await asyncio.gather(*(some.hold() for _ in range(10)), return_exceptions=True)
    assert [one for one in held if one is None] == [None] * 3
    assert some.in_flight == 3
    asked = await asyncio.gather(
        *(some.count_request() for _ in range(100)), return_exceptions=True
    )
    assert sum(one is None for one in asked) == 40


async def test_turn_after_turn_asks_the_store_for_nothing() -> None:
    clock = Clock()
    shared_limits, meter = metered(clock)
    limits = KeyLimits(6_000, 1_000_000, 4, 4, 1_000)
    some = KeyQuota(limits, "key", meter, clock)
    await some.check_connections()
    some.connect()
    for _ in range(200):
        await some.count_request()
        await some.hold()
        some.release("turn", 10)
    assert shared_limits.asked == 3, "a place, a few seconds' requests, a lane"


async def test_store_that_cannot_be_asked_refuses_only_what_was_not_granted_before() -> None:
    clock = Clock()
    shared_limits, meter = metered(clock)
    some = KeyQuota(KeyLimits(requests_per_min=40, tokens_per_min=100), "key", meter, clock)
    await some.count_request()
    shared_limits.is_down = True
    await some.count_request()
    await some.hold()
    some.release("turn", 150)
    with pytest.raises(Unavailable):
        await some.report()
    with pytest.raises(TooMany):
        await some.count_request()
    shared_limits.is_down = False
    await some.report()
    with pytest.raises(TooMany):
        await some.count_request()


async def test_key_whose_report_fails_keeps_no_other_from_reporting() -> None:
    clock = Clock()
    shared_limits, meter = metered(clock)
    draw = shared_limits.draw

    async def fail_for_one(wanted: Draw) -> Grant:
        if wanted.key_id == "locked":
            raise Unavailable("locked")
        return await draw(wanted)

    limits = KeyLimits(requests_per_min=60, tokens_per_min=100)
    quotas = [KeyQuota(limits, name, meter, clock) for name in ("locked", "free")]
    for one in quotas:
        await one.count_request()
        await one.hold()
        one.release("turn", 7)
    shared_limits.draw = fail_for_one  # type: ignore[method-assign]
    assert await meter.report() == 1
    assert [one.has_changes for one in quotas] == [True, False]


async def test_what_was_not_used_is_given_back() -> None:
    clock = Clock()
    _, meter = metered(clock)
    some = KeyQuota(KeyLimits(requests_per_min=100, lanes_max=2), "key", meter, clock)
    await some.count_request()
    await some.hold()
    assert not some.is_idle
    some.release()
    await meter.report()
    assert not some.is_idle
    clock.now += words.UNUSED_S + 1
    await meter.report()
    assert not some.is_idle, "its place is kept for the next turn"
    clock.now += words.KEEP_S
    await meter.report()
    assert some.is_idle
    for _ in range(100):
        await some.count_request()


async def test_without_limits_nothing_is_refused_and_nobody_asked() -> None:
    some = KeyQuota(KeyLimits())
    for _ in range(1_000):
        await some.count_request()
        await some.hold()
    await some.check_connections()
    assert some.in_flight == 1_000
    assert not some.has_changes


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(-5, 30),
            st.integers(0, 12),
            st.integers(0, 12),
            st.floats(0, 30),
        ),
        max_size=60,
    )
)
def test_whoever_draws_all_together_never_have_more_than_the_limits(
    draws: list[tuple[int, int, int, int, float]],
) -> None:
    limits = KeyLimits(requests_per_min=20, tokens_per_min=100, connections_max=7, lanes_max=5)
    level: Level | None = None
    held: dict[int, HeldPlaces] = {}
    spare = dict.fromkeys(range(4), 0)
    now, granted = 0.0, 0
    for worker, requests, connections, lanes, later in draws:
        now += later
        requests = max(requests, -spare[worker])
        others = HeldPlaces(
            sum(one.connections for who, one in held.items() if who != worker),
            sum(one.lanes for who, one in held.items() if who != worker),
        )
        draw = Draw("key", limits, requests, 0, HeldPlaces(connections, lanes))
        level, grant = share_out(draw, level, others, now)
        held[worker] = grant.held
        spare[worker] += grant.requests
        granted += grant.requests
        assert sum(one.connections for one in held.values()) <= 7
        assert sum(one.lanes for one in held.values()) <= 5
        assert granted <= 20 + now / 3 + 1e-3
        assert grant.requests == requests or grant.wait_s > 0 or 0 < grant.requests < requests
