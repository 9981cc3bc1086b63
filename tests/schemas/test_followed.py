"""How large a schema becomes when its lists are written out, and how deep when its references are followed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given

from segue.readers.tags import json_of, maybe, sequence, tag_of, words
from segue.schemas.followed import (
    LEVELS_MAX,
    UNROLLED_MAX,
    can_be_followed,
    levels,
    schemas_in,
    unrolled,
)
from segue.seams.model import Grammar
from tests.odd_schemas import any_schemas, chain, joined

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


def held_forms(schema: object) -> list[bytes | Grammar]:
    """The schema as engines get it."""
    text = json.dumps(schema)
    tag = tag_of(sequence([words("<a>"), maybe([json_of(schema)])]))
    return [text.encode(), tag, Grammar("lark", f"start: one\none: %json {text}")]


@pytest.mark.parametrize("schema", SMALL)
def test_schema_that_stays_small(schema: dict[str, Any]) -> None:
    assert unrolled(schema) <= UNROLLED_MAX
    assert all(map(can_be_followed, held_forms(schema)))


@pytest.mark.parametrize("schema", LARGE)
def test_schema_that_would_take_all_memory(schema: dict[str, Any]) -> None:
    assert unrolled(schema) > UNROLLED_MAX
    assert not any(map(can_be_followed, held_forms(schema)))


def test_grammar_without_a_schema_is_not_counted() -> None:
    for definition in ('start: "%json" /[0-9]+/', "start: %json {", "start: /a/"):
        assert not [*schemas_in(Grammar("lark", definition))]
    assert not [*schemas_in(Grammar("regex", '%json {"minItems": 1000000}'))]


# --- parts in each other ---


def linked(count: int, part: Callable[[object], object]) -> dict[str, Any]:
    """Definitions of which each refers to the next."""
    defs = {f"d{n}": part({"$ref": f"#/$defs/d{n + 1}"}) for n in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": NUMBER}}


def every(count: int) -> dict[str, Any]:
    """Definitions that all refer to each other, as those of a language do."""
    refs = [{"$ref": f"#/$defs/d{n}"} for n in range(count)]
    defs = {f"d{n}": {"type": "object", "properties": {"a": {"anyOf": refs}}} for n in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": defs}


def test_parts_are_counted_along_references() -> None:
    assert levels({}) == 1
    assert levels({"properties": {"a": {"items": {}}}}) == 4
    # The definitions themselves stand in the schema, too.
    assert levels(linked(10, lambda ref: ref)) == 2 + 11
    assert levels(linked(10, lambda ref: fields(1, ref))) == 2 + 31
    # What refers to itself goes no deeper than it is high, for each part that is referred to.
    assert levels({"properties": {"a": {"$ref": "#"}}}) == 6
    wide = fields(300, {"type": "array", "items": {"$ref": "#"}})
    assert levels(wide) == 8


@pytest.mark.parametrize(
    "schema",
    [
        linked(1_000, lambda ref: ref),
        linked(400, lambda ref: fields(1, ref)),
        linked(400, lambda ref: {"type": "array", "items": {"anyOf": [ref, NUMBER]}}),
        every(300),
    ],
)
def test_schema_that_would_overflow_a_stack(schema: dict[str, Any]) -> None:
    assert levels(schema) > LEVELS_MAX
    assert not any(map(can_be_followed, held_forms(schema)))


def test_schema_of_a_language_is_followed() -> None:
    assert all(map(can_be_followed, held_forms(every(60))))


@given(any_schemas)
def test_any_schema_has_a_depth(schema: Any) -> None:
    assert levels(schema) >= 1
    assert can_be_followed(msgspec.json.encode(schema)) in (True, False)
