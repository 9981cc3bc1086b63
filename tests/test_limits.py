"""What is left of a key's limits, by values."""

from __future__ import annotations

import pytest

from segue.limits import CLOCKS_DIFFER_S, Draw, HeldPlaces, KeyLimits, Level, share_out


def draw(level: Level, now: float) -> tuple[Level, int]:
    limits = KeyLimits(requests_per_min=60)
    level, grant = share_out(Draw("key", limits, requests=1), level, HeldPlaces(), now)
    return level, grant.requests


def test_clock_that_ran_ahead_does_not_starve_a_key() -> None:
    level = Level(0.0, 0.0, at=10_000.0)
    now, granted = 6_400.0, 0
    for _ in range(61):
        level, given = draw(level, now)
        granted += given
        now += 1.0
    assert granted == pytest.approx(60, abs=1)


def test_clocks_that_differ_a_little_fill_nothing_twice() -> None:
    level = Level(0.0, 0.0, at=1_000.0)
    granted = 0
    for second in range(61):
        for skew in (0.0, CLOCKS_DIFFER_S / 2):
            level, given = draw(level, 1_000.0 + second + skew)
            granted += given
    assert granted <= 60 + CLOCKS_DIFFER_S
