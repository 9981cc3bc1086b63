"""Arguments that satisfy their schema, for every kind of schema that agents' tools have."""

from __future__ import annotations

import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.schemas.example import example


def check(schema: Any) -> Any:
    """The example, which the schema must allow."""
    value = example(schema)
    jsonschema.Draft202012Validator(schema).validate(value)
    return value


# --- a family of schemas, each of which can be satisfied --------------------------------------------

names = st.sampled_from(["city", "path", "limit", "mode", "a b", "ü"])


@st.composite
def strings(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    least = draw(st.none() | st.integers(0, 12))
    if least is not None:
        schema["minLength"] = least
    if draw(st.booleans()):
        schema["maxLength"] = (least or 0) + draw(st.integers(0, 5))
    return schema


@st.composite
def numbers(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "number"]))}
    low = draw(st.integers(-20, 20))
    span = draw(st.integers(8, 40))
    if draw(st.booleans()):
        schema["minimum"] = low
    if draw(st.booleans()):
        schema["maximum"] = low + span
    return schema


plain = st.one_of(
    strings(),
    numbers(),
    st.sampled_from(
        [
            {},
            True,
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"]},
            {"type": ["null", "integer"]},
            {"enum": ["low", "high"]},
            {"type": "string", "enum": ["x"], "description": "one of one"},
            {"enum": [None, 1]},
            {"const": {"fixed": [1]}},
            {"type": "integer", "default": 3},
            {"$ref": "#/$defs/leaf"},
            {"$ref": "#/$defs/tree"},
            {"allOf": [{"$ref": "#/$defs/leaf"}]},
        ]
    ),
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(names, inner, max_size=3))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if properties:
        schema["required"] = sorted(draw(st.sets(st.sampled_from(sorted(properties)))))
    if draw(st.booleans()):
        schema["additionalProperties"] = False
    return schema


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema = {"type": "array", "items": draw(inner)}
    if draw(st.booleans()):
        schema["minItems"] = draw(st.integers(0, 3))
    return schema


def unions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))


schemas = st.recursive(
    plain, lambda inner: objects(inner) | arrays(inner) | unions(inner), max_leaves=8
)
LEAF = {"type": "string", "minLength": 2}
# A tree names itself; it ends where an alternative does.
TREE = {
    "type": "object",
    "properties": {
        "name": {"$ref": "#/$defs/leaf"},
        "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    },
    "required": ["name", "next", "children"],
}


@settings(max_examples=120, deadline=None, derandomize=True)
@given(schema=objects(schemas))
def test_arguments_satisfy_any_schema_of_the_family(schema: dict[str, Any]) -> None:
    whole = {**schema, "$defs": {"leaf": LEAF, "tree": TREE}}

    assert isinstance(check(whole), dict)
    assert example(whole) == example(whole)


@pytest.mark.parametrize(
    "schema, value",
    [
        ({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
         {"city": "city"}),
        ({"type": "object", "properties": {"city": {"type": "string"}}}, {}),
        ({"properties": {"n": {"type": "integer"}}, "required": ["n"]}, {"n": 1}),
        ({"type": "integer", "minimum": 10}, 10),
        ({"type": "integer", "maximum": -3}, -3),
        ({"type": "integer", "exclusiveMinimum": 0}, 1),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, [True, True]),
        ({"enum": ["b", "a"]}, "b"),
        ({"oneOf": [{"type": "null"}, {"type": "string"}]}, None),
    ],
)  # fmt: skip
def test_example_is_as_short_as_it_can_be(schema: Any, value: Any) -> None:
    assert check(schema) == value


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": ["a"]},
        {"type": "array", "minItems": 1},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": "integer", "minimum": 1.5},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"],
         "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/l"}, {"type": "string"}]},
                   "l": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/n"}}},
         "$ref": "#/$defs/n"},
        {"definitions": {"x": {"enum": [4]}}, "type": "object", "required": ["y"],
         "properties": {"y": {"$ref": "#/definitions/x"}}},
    ],
)  # fmt: skip
def test_odd_but_honest_schema_is_satisfied_too(schema: Any) -> None:
    check(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/nowhere"},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}, {"$ref": "#"}]},
        {"$ref": "https://example.com/schema"},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", "required": ["me"], "properties": {"me": {"$ref": "#"}}},
        {"type": "object", "required": [7], "properties": []},
        {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}},
        {"type": "string", "minLength": 10**12},
        {"type": "integer", "minimum": "x"},
        {"type": "array", "minItems": 9, "items": {"$ref": "#"}},
        {"type": 7},
        {"anyOf": []},
        {"allOf": "x"},
        {"enum": []},
        False,
        None,
        7,
        [],
    ],
)
def test_hopeless_schema_still_gives_something_small(schema: Any) -> None:
    """A client may send anything; the engine must neither hang, nor raise, nor fill memory."""
    assert len(repr(example(schema))) < 1_000_000


def test_command_of_a_shell_tool_is_one_that_runs() -> None:
    """So that a first demo of an agent does not end in "command not found"."""
    shell = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
    assert check(shell) == {"cmd": "ls"}


def test_words_stand_in_for_the_names_of_properties() -> None:
    """Also as the only item of a list; not in place of a choice, and no longer than allowed."""
    properties: dict[str, Any] = {
        "cmd": {"type": "string"},
        "command": {"type": "array", "items": {"type": "string"}},
        "query": {"type": "string", "maxLength": 4},
        "path": {"enum": ["/"]},
        "other": {"type": "string"},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    words = {"cmd": "ls", "command": "ls", "query": "two words", "path": "."}
    assert example(schema, words) == {
        "cmd": "ls",
        "command": ["ls"],
        "query": "two ",
        "path": "/",
        "other": "other",
    }


@pytest.mark.parametrize("word", ["$ref", "anyOf"])
def test_large_part_in_lists_of_lists_is_not_copied_for_each_item(word: str) -> None:
    many = {f"k{n}": {"type": "string"} for n in range(20_000)}
    whole = {"type": "object", "properties": many}
    part: dict[str, Any] = {"$ref": "#/$defs/whole"} if word == "$ref" else {"anyOf": [{}] * 20_000}
    for _ in range(3):
        part = {"type": "array", "items": part, "minItems": 64}
    began = time.thread_time()
    assert isinstance(example({**part, "$defs": {"whole": whole}}), list)
    assert time.thread_time() - began < 1
