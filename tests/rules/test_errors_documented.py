"""Is every error code explained, and is every explained one real?

Reads the syntax trees under src/segue for codes and docs/errors.md for its table. Codes are string literals: passed as
`code=…`, set as `code` in a class, or keys of the table of failed statuses.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d{3}) \| `([a-z_]+)` \| (\S+) \| (.+) \|$", re.MULTILINE)


def codes_of(tree: ast.AST) -> Iterator[str]:
    """The codes that a module uses."""
    for node in ast.walk(tree):
        found: list[ast.expr | None] = []
        match node:
            case ast.keyword(arg="code", value=value):
                found = [value]
            case ast.Assign(targets=[ast.Name(id="code")], value=value):
                found = [value]
            case ast.AnnAssign(target=ast.Name(id="code"), value=value):
                found = [value]
            case ast.Assign(targets=[ast.Name(id="FAILED_STATUS")], value=ast.Dict(keys=keys)):
                found = list(keys)
            case ast.Call(func=ast.Name(id="_refusal"), args=[_, _, code, _]):
                found = [code]
        for one in found:
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                yield one.value


@cache
def used() -> set[str]:
    paths = (ROOT / "src" / "segue").rglob("*.py")
    return {code for path in paths for code in codes_of(ast.parse(path.read_bytes()))}


def documented() -> list[tuple[str, str, str, str]]:
    return ROW.findall((ROOT / "docs" / "errors.md").read_text("utf-8"))


def test_every_code_in_the_source_is_explained() -> None:
    assert used() - {code for _, code, _, _ in documented()} == set()


def test_every_explained_code_is_used_and_has_one_line() -> None:
    codes = [code for _, code, _, _ in documented()]
    assert sorted(codes) == sorted(set(codes))
    assert set(codes) - used() == set()


def test_rule_finds_codes_however_they_are_written() -> None:
    text = """
class Bad(Exception):
    code = "plain"
    code: str = "typed"
FAILED_STATUS = {"key": 400}
raise Bad(code="passed")
raise Bad(code=other)
_refusal(400, "kind", "placed", "words")
"""
    assert set(codes_of(ast.parse(text))) == {"plain", "typed", "key", "passed", "placed"}
