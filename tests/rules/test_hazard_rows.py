"""Has every failure and every threat a test, does each exist, and do the two pages for people agree?

The last column of docs/inside/hazards.md is written from the rows, by `python -m tests.rules.test_hazard_rows`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rules.hazard_rows import FAILURES, THREATS
from tests.rules.test_protocol_rows import is_a_test, names_in

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "security.md"
HAZARDS = TESTS.parent / "docs" / "inside" / "hazards.md"
ROW = re.compile(
    r"^\| (?P<id>[FT]\d+) \|(?P<words>(?: [^|]+ \|){3}) (?P<tests>[^|]*)\|$", re.MULTILINE
)
FAILURES_COUNT, THREATS_COUNT = 40, 17


def exists(node: str) -> bool:
    """Whether a test is there; `/file::test` stands in no room."""
    if not node.startswith("/"):
        return is_a_test(node)
    file, _, name = node[1:].partition("::")
    return name in names_in(TESTS / f"test_{file}.py")


@pytest.mark.parametrize(
    "letter, rows, count", [("F", FAILURES, FAILURES_COUNT), ("T", THREATS, THREATS_COUNT)]
)
def test_every_row_is_there_and_has_tests_that_exist(
    letter: str, rows: dict[str, tuple[str, ...]], count: int
) -> None:
    assert [row.split()[0] for row in rows] == [f"{letter}{n}" for n in range(1, count + 1)]
    assert [row for row, tests in rows.items() if not tests] == []
    wrong = [(row, one) for row, tests in rows.items() for one in tests if not exists(one)]
    assert wrong == []


def test_page_tells_of_every_threat_and_names_tests_that_exist() -> None:
    found = re.findall(
        r"^\| (T\d+) \| .+? \| .+? \| (.+?) \|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    assert [name for name, _ in found] == [row.split()[0] for row in THREATS]
    for (name, told), tests in zip(found, THREATS.values(), strict=True):
        files = set(re.findall(r"`(\w*/?\w+)`", told))
        assert files, name
        assert files <= {one.partition("::")[0].removeprefix("/") for one in tests}, name


def files_of(tests: tuple[str, ...]) -> str:
    """The files of these tests, each once, in their order."""
    return ", ".join(dict.fromkeys(f"`{test.partition('::')[0]}`" for test in tests))


def filled(page: str) -> str:
    """The page of hazards with its last column as it must be."""
    files = {row.split()[0]: files_of(tests) for row, tests in (FAILURES | THREATS).items()}
    return ROW.sub(lambda row: f"| {row['id']} |{row['words']} {files[row['id']]} |", page)


def test_page_of_hazards_has_every_row_with_its_test_files() -> None:
    page = HAZARDS.read_text("utf-8")
    assert [row["id"] for row in ROW.finditer(page)] == [
        row.split()[0] for row in (FAILURES | THREATS)
    ]
    assert filled(page) == page, "run `python -m tests.rules.test_hazard_rows`"


def test_rule_sees_a_test_that_does_not_exist() -> None:
    assert exists("/cli::test_usage_is_a_table_with_totals")
    assert not exists("/cli::test_nobody_wrote_this")
    assert not exists("hazards::test_nobody_wrote_this")


if __name__ == "__main__":
    HAZARDS.write_text(filled(HAZARDS.read_text("utf-8")), "utf-8")
