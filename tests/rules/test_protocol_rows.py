"""Has every row of the wire contract a test, and does every test that is named exist?"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.rules.protocol_rows import ROWS, SECTION_10, NotServed
from tests.rules.test_citations import marks

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "protocol.md"
NODE = re.compile(r"(?:(?P<room>\w+)/)?(?P<file>\w+)::(?P<name>test_\w+)\Z")


@cache
def names_in(path: Path) -> frozenset[str]:
    """The names of the tests in a file."""
    if not path.exists():
        return frozenset()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, functions) and node.name.startswith("test_")
    )


def is_a_test(node: str) -> bool:
    """Whether `file::test` or `room/file::test` exists."""
    found = NODE.match(node)
    if found is None:
        return False
    path = TESTS / (found["room"] or "scenarios") / f"test_{found['file']}.py"
    return found["name"] in names_in(path)


def test_every_section_is_on_the_page() -> None:
    known = marks(PAGE.read_text("utf-8"))
    numbers = {number for section in ROWS for number in re.findall(r"^[\d.]+", section)}
    assert sorted(numbers - known) == []
    assert {f"10 row {number}" for number in range(1, SECTION_10 + 1)} <= known


@pytest.mark.parametrize("section", ROWS)
def test_every_row_has_tests_that_exist_or_says_why_not(section: str) -> None:
    wrong: list[str] = []
    for row, proof in ROWS[section].items():
        if isinstance(proof, NotServed):
            if not proof[0]:
                wrong.append(f"{row}: no reason")
        elif not proof:
            wrong.append(f"{row}: no test")
        else:
            wrong += [f"{row}: {node}" for node in proof if not is_a_test(node)]
    assert wrong == []


def test_every_row_of_section_10_has_a_test_that_names_it() -> None:
    names = {name for path in TESTS.rglob("test_*.py") for name in names_in(path)}
    numbers = [
        int(found[1]) for name in names if (found := re.match(r"test_section_10_row_(\d+)_", name))
    ]
    assert set(numbers) == set(range(1, SECTION_10 + 1))


def test_rule_sees_a_test_that_does_not_exist() -> None:
    assert is_a_test("walk::test_client_walks_a_tool_loop_over_websocket")
    assert is_a_test("wire/items::test_examples_cover_every_type")
    assert not is_a_test("walk::test_nobody_wrote_this")
    assert not is_a_test("nowhere::test_examples_cover_every_type")
    assert not is_a_test("a word that is no name of a test")
