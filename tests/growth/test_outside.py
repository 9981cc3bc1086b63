"""What others say costs what its size costs; and with a fix taken out, the fuzzer finds what it was for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.growth.measure import Bench, Structure, bench, judge, sizes_to
from tests.growth.outside import ENGINES, FORMS, OUTSIDE, Outside, engine_bench, outside_case
from tests.growth.removals import REMOVALS, without
from tests.growth.rows import all_rows, places, tried


@pytest.fixture(scope="module")
def server() -> Iterator[Bench]:
    with bench() as one:
        yield one


@pytest.fixture(scope="module")
def liar() -> Iterator[Bench]:
    with engine_bench() as one:
        yield one


@pytest.mark.parametrize("one", OUTSIDE, ids=[one.name for one in OUTSIDE])
def test_what_others_say_costs_what_its_size_costs(server: Bench, one: Outside) -> None:
    case = outside_case(server, one)
    found = judge(one.name, lambda size: server.cost(case, size), sizes_to(one.short, 2))
    assert not found.is_bad, found.line()


@pytest.mark.parametrize("one", FORMS, ids=[one.name for one in FORMS])
def test_form_costs_what_its_size_costs(server: Bench, one: Structure) -> None:
    found = judge(one.name, lambda size: server.cost(one.case, size), sizes_to(one.short, 2))
    assert not found.is_bad, found.line()


@pytest.mark.parametrize("one", ENGINES, ids=[one.name for one in ENGINES])
def test_engine_that_lies_costs_what_it_says(liar: Bench, one: Structure) -> None:
    found = judge(one.name, lambda size: liar.cost(one.case, size), sizes_to(one.short, 2))
    assert not found.is_bad, found.line()


def test_every_row_has_a_name_of_its_own_and_removals_name_rows() -> None:
    names = [row.name for row in all_rows()]
    assert len({*names}) == len(names)
    assert {name for one in REMOVALS.values() for name in one.rows} <= {*names}


@pytest.mark.reliability
@pytest.mark.parametrize("name", REMOVALS)
def test_fuzzer_finds_what_a_fix_was_for(name: str) -> None:
    removal = REMOVALS[name]
    rows = [row for row in all_rows() if row.name in removal.rows]
    with without(name), places() as at:
        for row in rows:
            is_bad = True
            # What is raised is a finding.
            with suppress(Exception):
                is_bad = tried(row, at, removal.is_long).is_bad
            assert is_bad, f"{row.name} does not find it: {removal.what}"
