"""Are schemas of clients walked in one place? Any shape, references that circle and sizes at the limit are tried there
(`tests/odd_schemas.py`, `tests/growth/test_schemas.py`).

Code elsewhere that looks up a keyword of JSON schema by itself is listed here, with the reason why it cannot be led on
for long, or why that is no schema of a client."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.odd_schemas import TAKERS

SOURCE = Path("src")
WALKED_IN = "segue/schemas/"
# Keywords that lead from one part of a schema to others, or list what it allows.
KEYWORDS = {
    "$ref", "$defs", "definitions", "anyOf", "oneOf", "allOf", "properties", "patternProperties", "prefixItems",
    "additionalProperties", "items", "enum", "required",
}  # fmt: skip
# By file, and for each function: why.
ELSEWHERE = {
    # Goes down the JSON itself, which is 256 levels deep at most, and follows no reference: among the TAKERS.
    "segue/dialects/harmony.py": {"_type", "_property", "_default"},
    # Goes down as far as NESTED_MAX, measures each part, and asks `JsonSchema` for everything else: among the TAKERS.
    "segue/readers/call_tags.py": {"_arguments", "_nested", "_value"},
    # Reads the names at the top, to search in them.
    "segue/tools/tool_search.py": {"_parameters"},
    # Our own description of the API.
    "segue/openapi/": None,
}


def lookups(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Keywords that are looked up in a value, by function: `get`, an index, `in`, a pattern. What is only written, such
    as a schema of our own, is none."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="get" | "pop"), args=[ast.Constant(value), *_]
                ):
                    found = [value]
                case ast.Subscript(slice=ast.Constant(value), ctx=ast.Load()):
                    found = [value]
                case ast.Compare(left=ast.Constant(value), ops=[ast.In() | ast.NotIn()]):
                    found = [value]
                case ast.MatchMapping(keys=keys):
                    found = [key.value for key in keys if isinstance(key, ast.Constant)]
                case _:
                    continue
            yield from ((function.name, value) for value in found if value in KEYWORDS)


def is_allowed(path: str, function: str) -> bool:
    for place, functions in ELSEWHERE.items():
        if path.startswith(place) and (functions is None or function in functions):
            return True
    return path.startswith(WALKED_IN)


def test_schemas_are_walked_in_their_own_room() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        for function, keyword in lookups(ast.parse(path.read_text())):
            if not is_allowed(name, function):
                found.append(f"{name}: {function} looks up '{keyword}'")
    assert not found, (
        "use segue.schemas.json_schema, and add what takes a schema to tests/odd_schemas.py"
    )


def test_places_elsewhere_are_still_there() -> None:
    for place, functions in ELSEWHERE.items():
        if functions is not None:
            tree = ast.parse((SOURCE / place).read_text())
            assert functions == {function for function, _ in lookups(tree)}, place


def test_rule_sees_a_walker() -> None:
    source = """
def walk(part):
    match part:
        case {"anyOf": choices}:
            return choices
    return part.get("items") or part["properties"] if "$ref" in part else {"enum": 1}
"""
    assert {keyword for _, keyword in lookups(ast.parse(source))} == {
        *("anyOf", "items", "properties", "$ref"),
    }


def test_every_writer_of_calls_is_tried() -> None:
    assert {"Harmony's types", "calls in xml", "calls in gemma4", "example"} <= TAKERS.keys()
