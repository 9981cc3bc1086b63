"""What a key may still use, with the time passed in."""

from __future__ import annotations

import pytest

from segue.errors import TooMany
from segue.turn.quota import KeyLimits, Quota, unlimited


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def quota(clock: Clock, **limits: int) -> Quota:
    return Quota(KeyLimits(**limits), clock)


def test_minute_of_requests_may_come_at_once_and_then_one_by_one() -> None:
    clock = Clock()
    some = quota(clock, requests_per_min=6)
    for _ in range(6):
        some.ask()
    with pytest.raises(TooMany) as caught:
        some.ask()
    assert caught.value.wait_s == pytest.approx(10)
    clock.now += 10
    some.ask()
    with pytest.raises(TooMany):
        some.ask()
    clock.now += 3_600
    for _ in range(6):
        some.ask()
    with pytest.raises(TooMany):
        some.ask()


def test_debt_of_tokens_is_waited_off() -> None:
    clock = Clock()
    some = quota(clock, tokens_per_min=60)
    some.ask()
    some.hold()
    some.release(tokens=180)
    with pytest.raises(TooMany) as caught:
        some.ask()
    assert caught.value.wait_s == pytest.approx(120)
    clock.now += 121
    some.ask()


def test_refused_request_costs_nothing() -> None:
    clock = Clock()
    some = quota(clock, requests_per_min=1)
    some.ask()
    for _ in range(100):
        with pytest.raises(TooMany):
            some.ask()
    clock.now += 60
    some.ask()


def test_places_are_given_back() -> None:
    some = quota(Clock(), lanes_max=2)
    some.hold()
    some.hold()
    with pytest.raises(TooMany):
        some.hold()
    some.release()
    some.hold()
    assert some.in_flight == 2


def test_quota_is_idle_once_everything_is_back() -> None:
    clock = Clock()
    some = quota(clock, requests_per_min=60)
    some.ask()
    some.hold()
    assert not some.is_idle
    some.release()
    assert not some.is_idle
    clock.now += 1
    assert some.is_idle


def test_without_limits_nothing_is_refused() -> None:
    some = unlimited()
    for _ in range(1_000):
        some.ask()
        some.hold()
    some.check_connections()
    assert some.in_flight == 1_000
