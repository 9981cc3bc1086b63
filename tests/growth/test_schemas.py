"""What is made of a client's schema takes time that grows no faster than the schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.growth.measure import Cost, Finding, judge, sizes_to
from tests.growth.test_measure import timed
from tests.odd_schemas import STRUCTURES, TAKERS
from tests.watch import freeze_heap

CASES = [(taker, structure) for taker in TAKERS for structure in STRUCTURES]


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """What the test runner has loaded is no part of what is measured."""
    freeze_heap()
    yield
    freeze_heap()


def growth(taker: str, structure: str, limit: int, doublings: int) -> Finding:
    make, take = STRUCTURES[structure][0], TAKERS[taker]
    schemas: dict[int, Any] = {}

    def cost(size: int) -> Cost:
        schema = schemas.setdefault(size, make(size))
        return timed(lambda size: take(schema) and None)(size)

    return judge(f"{taker}, {structure}", cost, sizes_to(limit, doublings))


@pytest.mark.parametrize("taker, structure", CASES)
def test_schema_costs_what_its_size_costs(taker: str, structure: str) -> None:
    finding = growth(taker, structure, STRUCTURES[structure][1], 2)
    assert not finding.is_bad, finding.line()


@pytest.mark.reliability
@pytest.mark.parametrize("taker, structure", CASES)
def test_schema_at_its_limit(taker: str, structure: str) -> None:
    finding = growth(taker, structure, STRUCTURES[structure][2], 3)
    assert not finding.is_bad, finding.line()
