"""No regular expression of the product takes time that grows faster than what it reads."""

from __future__ import annotations

import re

from tests.growth.patterns import ANCHORED, RATIO_MAX, TRUSTED, patterns, worst


def test_patterns_grow_no_faster_than_their_input() -> None:
    found = dict(patterns())
    assert len(found) > 40
    assert set(found) >= ANCHORED | TRUSTED
    bad = {
        name: result
        for name, pattern in found.items()
        if name not in TRUSTED
        and (result := worst(pattern, is_anchored=name in ANCHORED))[0] > RATIO_MAX
    }
    assert not bad


def test_pattern_that_once_stopped_a_worker_is_found() -> None:
    """The frame of 80 KB: each quote of an open string was tried as a beginning."""
    token = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}:,]', re.DOTALL)
    assert worst(token)[0] > RATIO_MAX
