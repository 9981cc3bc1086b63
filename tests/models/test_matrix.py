"""Do the families that matter most behave as docs/models.md says, and are all of them on that page?"""

import pytest

from tests.models.cells import CELLS, Model
from tests.models.families import BY_NAME, FAMILIES
from tests.models.matrix import COLUMNS, HOLDS, on_page, tried

QUICK = [family.name for family in FAMILIES if family.is_quick]


@pytest.mark.parametrize("name", QUICK)
def test_family_does_what_the_page_says(name: str) -> None:
    cells = on_page()[name]
    model = Model(BY_NAME[name])
    results = {column: tried(model, column) for column in CELLS if cells[column] == HOLDS}
    wrong = {column: one.why for column, one in results.items() if one.mark != HOLDS}
    assert not wrong, wrong


def test_page_has_every_family_and_column() -> None:
    cells = on_page()
    assert list(cells) == list(BY_NAME)
    assert all(set(COLUMNS) <= set(row) for row in cells.values())


def test_at_least_25_families_are_tried() -> None:
    assert len(FAMILIES) >= 25
