"""How large a schema becomes when its lists are written out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from segue.readers.tags import json_of, sequence, tag_of, words
from segue.seams.model import Grammar
from segue_embedded.unrolled import UNROLLED_MAX, unrolled
from tests.odd_schemas import chain, joined

NUMBER = {"type": "integer"}


def array(count: Any, items: object = NUMBER, word: str = "maxItems") -> dict[str, Any]:
    return {"type": "array", "items": items, word: count}


def fields(count: int, part: object) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{n}": part for n in range(count)}}


LIST = {"$defs": {"list": array(1_000)}}
REFERENCE = {"$ref": "#/$defs/list"}
SMALL: list[dict[str, Any]] = [
    {},
    array(1_000),
    array(1_000, array(1_000)),
    fields(1_000, NUMBER),
    fields(20, array(500)),
    # What is only referred to is written once.
    {**LIST, **fields(1_000, REFERENCE)},
    {**LIST, **fields(1_000, {**REFERENCE, "description": "A list."})},
    {**LIST, **fields(1_000, {"allOf": [REFERENCE], "default": []})},
    {**LIST, **fields(1_000, {"anyOf": [REFERENCE, {"type": "null"}]})},
    {"type": "object", "properties": {"self": {"$ref": "#"}, "minItems": {"type": "string"}}},
    array("many"),
    array(None),
]
LARGE: list[dict[str, Any]] = [
    array(10**9),
    array(10**9, word="minItems"),
    array(1e9),
    {"maxItems": 10**30},
    array(3, array(10**9)),
    fields(1_000, array(1_000)),
    {"anyOf": [array(1_000, {"const": n}) for n in range(100)]},
    {"type": "array", "prefixItems": [NUMBER] * 30_000},
    # What is joined with another part is written for each.
    {**LIST, **fields(300, {"allOf": [REFERENCE, {"minItems": 1}]})},
    {**LIST, **fields(300, {**REFERENCE, "minItems": 1})},
    {**LIST, **fields(300, {"minItems": 1, "anyOf": [REFERENCE]})},
    joined(40),
    # Deeper than anything may be followed.
    {"type": "array", "$defs": chain(20_000)["$defs"], "allOf": [{}, {"$ref": "#/$defs/d0"}]},
]


@pytest.mark.parametrize("schema", SMALL)
def test_schema_that_stays_small(schema: dict[str, Any]) -> None:
    assert unrolled(json.dumps(schema).encode()) <= UNROLLED_MAX


@pytest.mark.parametrize("schema", LARGE)
def test_schema_that_would_take_all_memory(schema: dict[str, Any]) -> None:
    held = json.dumps(schema)
    assert unrolled(held.encode()) > UNROLLED_MAX
    assert unrolled(tag_of(sequence([words("<a>"), json_of(schema)]))) > UNROLLED_MAX
    assert unrolled(Grammar("lark", f"start: one\none: %json {held}")) > UNROLLED_MAX


def test_grammar_without_a_schema_is_not_counted() -> None:
    for definition in ('start: "%json" /[0-9]+/', "start: %json {", "start: /a/"):
        assert unrolled(Grammar("lark", definition)) == 0
    assert unrolled(Grammar("regex", '%json {"minItems": 1000000}')) == 0
