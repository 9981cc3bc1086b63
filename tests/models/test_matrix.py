"""Do the families that matter most behave as docs/inside/families.md says, and are all of them on that page?"""

import pytest

from tests.models.cells import CELLS
from tests.models.families import BY_NAME, FAMILIES, NOTES, WITHOUT_TOOLS
from tests.models.matrix import COLUMNS, HOLDS, PAGE, USE, on_page, tried, written
from tests.models.talk import Model

QUICK = [family.name for family in FAMILIES if family.is_quick]


@pytest.mark.parametrize("name", QUICK)
def test_family_does_what_the_page_says(name: str) -> None:
    cells = on_page()[name]
    model = Model(BY_NAME[name])
    results = {column: tried(model, column) for column in CELLS if cells[column] == HOLDS}
    wrong = {column: one.why for column, one in results.items() if one.mark != HOLDS}
    assert not wrong, wrong


# What was wrong once, and is not seen in the rows above.
ONCE_WRONG = [
    ("Mistral Nemo", "ids"),
    ("Ministral 3", "images"),
    ("Apertus", "turn 5"),
    ("Solar Open", "said"),
    ("MiniCPM5", "nested"),
    ("MiniMax M3", "results"),
    ("Kimi K3", "forced"),
    ("Reka Edge", "said"),
]


@pytest.mark.parametrize("name, column", ONCE_WRONG)
def test_cell_that_was_wrong_once_holds(name: str, column: str) -> None:
    result = tried(Model(BY_NAME[name]), column)
    assert result.mark == HOLDS, result.why


def test_page_has_every_family_and_column() -> None:
    cells = on_page()
    assert list(cells) == list(BY_NAME)
    assert all(set(COLUMNS) <= set(row) for row in cells.values())


def test_page_says_of_every_family_what_to_make_of_it() -> None:
    for page in (PAGE, USE):
        text = page.read_text()
        assert text == written(text, on_page())
    assert all(f"| {name} | " in USE.read_text() for name in BY_NAME)


def test_notes_are_about_families() -> None:
    assert set(NOTES) | WITHOUT_TOOLS <= set(BY_NAME)


def test_at_least_25_families_are_tried() -> None:
    assert len(FAMILIES) >= 25
