"""A client's schema may be anything; what it says is found, and nobody stumbles over the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings

from segue.schemas.json_schema import CopyBudget, JsonSchema, listed, properties_of, required_of
from tests.odd_schemas import STRUCTURES, TAKERS, any_schemas, own_unions, shared

many = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("name", TAKERS)
def test_client_sends_any_schema(name: str) -> None:
    """No function that takes a schema raises, whatever is in it."""

    @many
    @given(schema=any_schemas)
    def check(schema: Any) -> None:
        TAKERS[name](schema)

    check()


NOTHING = [{}, True, None, [], "string", 5]


@pytest.mark.parametrize("word", ["type", "enum", "anyOf", "oneOf", "allOf", "$ref"])
@pytest.mark.parametrize("value", [None, 5, "x", {}, {"a": 1}, [None, 5]])
def test_keyword_of_the_wrong_kind_says_nothing(word: str, value: object) -> None:
    """Some serializers write an empty list as null."""
    if (word, value) == ("type", "x"):
        return
    part = {"type": "integer", word: value}
    expected = {"integer"} if word != "type" else {"string"}
    if (word, value) == ("enum", [None, 5]):
        expected = {"integer", "null"}
    assert JsonSchema({"properties": {"x": part}}).types(part) == expected


@pytest.mark.parametrize("part", NOTHING)
def test_part_that_says_nothing_is_a_string(part: object) -> None:
    assert JsonSchema({"properties": {"x": part}}).types(part) == {"string"}
    assert (listed(part, "enum"), properties_of(part), required_of(part)) == ([], {}, frozenset())


@pytest.mark.parametrize(
    "reference, found",
    [
        ("#", True),
        ("#/properties/a", True),
        ("#/properties/b~1c", True),
        ("#/properties/d%20e", True),
        ("#/anyOf/1", True),
        ("#/anyOf/2", False),
        ("#/anyOf/x", False),
        ("#/properties/none/deeper", False),
        ("#anchor", False),
        ("https://example.com/schema", False),
        ("#/" + "a" * 2_000, False),
        (None, False),
    ],
)
def test_reference_is_followed_inside_its_schema(reference: object, found: bool) -> None:
    parts = {"a": {}, "b/c": {}, "d e": {}, "a" * 2_000: {}}
    schema = {"properties": parts, "anyOf": [{}, {}], "a" * 2_000: {}}
    assert (JsonSchema(schema).at(reference) is not None) == found


@pytest.mark.parametrize("size", [40, 20_000])
def test_part_that_refers_to_itself_is_walked_once(size: int) -> None:
    """Forty of these once took eighteen seconds."""
    schema = own_unions(size)
    began = time.thread_time()
    assert JsonSchema(schema).types(schema["properties"]["x"]) == {"string"}
    assert time.thread_time() - began < 1


def test_types_are_found_through_unions_and_references() -> None:
    schema = {
        "properties": {"x": {"oneOf": [{"$ref": "#/$defs/a"}, {"enum": [1, None]}]}},
        "$defs": {"a": {"anyOf": [{"type": ["boolean", "object"]}, {"$ref": "#/$defs/b"}]}, "b": {"const": 0.5}},
    }  # fmt: skip
    found = JsonSchema(schema).types(schema["properties"]["x"])
    assert found == {"integer", "null", "boolean", "object", "number"}


@pytest.mark.parametrize(
    "part",
    [
        {"anyOf": [{}, {"type": "null"}]},
        {"anyOf": [{"properties": {"a": {}}}, {"type": "null"}]},
        {"oneOf": [{"type": "integer"}, True]},
        {"anyOf": [{"$ref": "#/nowhere"}, {"type": "null"}]},
        {"description": "anything"},
    ],
)
def test_part_that_may_be_anything_has_no_known_types(part: dict[str, Any]) -> None:
    assert JsonSchema({"properties": {"x": part}}).known_types(part) == []


def test_part_is_held_to_its_types_however_they_are_said() -> None:
    part: dict[str, Any] = {"anyOf": [{"type": "string"}, {"allOf": [{}, {"enum": [1]}]}]}
    assert JsonSchema(part).known_types(part) == ["integer", "string"]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_parts_that_refer_to_each_other_have_the_same_types(order: str) -> None:
    schema: dict[str, Any] = {
        "$defs": {
            "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "string"}]},
            "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]},
        }
    }
    walked = JsonSchema(schema)
    found = [walked.types(schema["$defs"][name]) for name in order]
    assert found == [{"string", "integer"}] * 2


def test_part_that_stands_alone_brings_what_it_refers_to() -> None:
    schema: dict[str, Any] = {
        "properties": {"x": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"$ref": "#/$defs/number"}},
                "additionalProperties": False,
            },
            "number": {"type": "integer"},
            "unused": {"description": "x" * 1_000_000},
        },
    }
    alone: Any = JsonSchema(schema).alone(schema["properties"]["x"], CopyBudget())
    assert len(alone["$defs"]) == 2
    jsonschema.validate([{"next": {"n": 1}}], alone)
    for bad in ([{"next": {"n": "1"}}], [{"other": 1}], {}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, alone)


def test_part_that_would_be_copied_too_often_says_only_its_types() -> None:
    schema = shared(5_000)
    walked, budget = JsonSchema(schema), CopyBudget()
    first, *others = (walked.alone(part, budget) for part in schema["properties"].values())
    assert isinstance(first, dict)
    assert "$defs" in first
    assert others[-1] == {"type": ["object"]}


@pytest.mark.parametrize("make", [one[0] for one in STRUCTURES.values()], ids=STRUCTURES)
def test_structure_is_a_schema(make: Callable[[int], Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(make(30))
