"""The time for a request grows no faster than its size, and no step of it holds the event loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.growth.measure import Bench, bench, judge, sizes_to
from tests.growth.structures import STRUCTURES, Structure

NAMES = [one.name for one in STRUCTURES]


@pytest.fixture(scope="module")
def server() -> Iterator[Bench]:
    with bench() as one:
        yield one


@pytest.mark.parametrize("structure", STRUCTURES, ids=NAMES)
def test_structure_costs_what_its_size_costs(server: Bench, structure: Structure) -> None:
    sizes = sizes_to(structure.short, 2)
    finding = judge(structure.name, lambda size: server.cost(structure.case, size), sizes)
    assert not finding.is_bad, finding.line()


@pytest.mark.reliability
@pytest.mark.parametrize("structure", STRUCTURES, ids=NAMES)
def test_structure_at_its_limit(server: Bench, structure: Structure) -> None:
    sizes = sizes_to(structure.limit, 3)
    finding = judge(structure.name, lambda size: server.cost(structure.case, size), sizes)
    assert not finding.is_bad, finding.line()
