"""Schemas as clients may send them: any shape at all, or one structure many times; and everything that takes one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st

from segue.dialects.harmony import tools_section
from segue.errors import InvalidRequest
from segue.readers.arguments import TaggedArguments
from segue.readers.call_tags import SPELLINGS, Spelling, tagged_calls
from segue.readers.formats import Tags
from segue.readers.offers import call_schema, format_schema
from segue.schemas.example import example
from segue.schemas.followed import levels, unrolled
from segue.schemas.json_schema import CopyBudget, JsonSchema, moved, properties_of, refers
from segue.schemas.structural_tags import gbnf, lark
from segue.seams.model import Grammar, Scene
from segue.seams.prompt import Head
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.requests import TextConfig, TextFormat
from segue.wire.tools import FunctionTool
from tests.contracts.dialect import smollm2, tools_of

Json = Any

# --- any shape ----------------------------------------------------------------------------------------

KEYWORDS = (
    "type", "properties", "required", "enum", "const", "anyOf", "oneOf", "allOf", "items", "prefixItems", "$ref",
    "$defs", "default", "description", "additionalProperties", "title", "examples", "minimum", "maximum", "minItems",
    "maxItems", "minLength", "maxLength", "nullable", "format",
)  # fmt: skip
WORDS = (
    "string", "object", "array", "integer", "number", "boolean", "null", "", "any", "#", "#/", "#/properties/a",
    "#/$defs/a", "#/anyOf/0", "#/%", "a", "<x>", "\n", '"', "x\u2028",
)  # fmt: skip
NAMES = ("a", "b", "c d", "<x>", "\n", "$ref", "enum", "")
numbers = st.sampled_from([0, -1, 1, 5, 10**18, 10**30, 3.5, 1e300])
plain = st.none() | st.booleans() | numbers | st.sampled_from(WORDS)


def _wider(inner: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    words = st.dictionaries(st.sampled_from(KEYWORDS), inner | named, max_size=4)
    typed = st.sampled_from(["object", "array", "string", "boolean"])
    some = st.builds(lambda kind, rest: {"type": kind, **rest}, typed, words)
    whole = st.builds(
        lambda parts, rest: {"type": "object", "properties": parts, **rest}, named, words
    )
    return st.lists(inner, max_size=3) | words | some | whole


any_schemas: st.SearchStrategy[Json] = st.recursive(plain, _wider, max_leaves=20).filter(
    lambda schema: isinstance(schema, dict)
)

# --- one structure, many times ------------------------------------------------------------------------

Make = Callable[[int], Json]
BOOLEAN = {"type": "boolean"}


def wide(size: int) -> Json:
    return {"type": "object", "properties": {f"k{n}": BOOLEAN for n in range(size)}}


def required(size: int) -> Json:
    """The last names are needed, so that each list of names is searched to its end."""
    return {**wide(size), "required": [f"k{n}" for n in reversed(range(size))]}


def own_unions(size: int) -> Json:
    part = {"anyOf": [{"$ref": "#/properties/x"}] * size}
    return {"type": "object", "properties": {"x": part}, "required": ["x"]}


def unions_of_unions(size: int) -> Json:
    """Each refers to all the others."""
    count = max(int(size**0.5), 2)
    parts = [{"$ref": f"#/$defs/d{n}"} for n in range(count)]
    defs = {f"d{n}": {"anyOf": [*parts, {"type": "integer"}]} for n in range(count)}
    return {"type": "object", "properties": {"x": parts[0], "y": parts[1]}, "$defs": defs}


def chain(size: int) -> Json:
    defs: Json = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(size)}
    properties = {f"k{n}": {"$ref": f"#/$defs/d{n}"} for n in range(size)}
    return {"type": "object", "properties": properties, "$defs": {**defs, f"d{size}": BOOLEAN}}


def shared(size: int) -> Json:
    """All properties refer to one that has as many."""
    parts = {f"k{n}": {"$ref": "#/$defs/all"} for n in range(size)}
    return {"type": "object", "properties": parts, "$defs": {"all": wide(size)}}


def enums(size: int) -> Json:
    parts = {f"k{n}": {"$ref": "#/$defs/one"} for n in range(size)}
    listed = {"enum": [f"value {n}" for n in range(size)]}
    return {"type": "object", "properties": parts, "$defs": {"one": listed}}


def tree(size: int) -> Json:
    """Objects in an object, ten properties in each."""
    return {"type": "object", "properties": {f"k{n}": wide(10) for n in range(size // 10)}}


def deep(size: int) -> Json:
    """Fourteen objects in each other, each with its part of the properties, none of them needed."""
    found: Json = wide(size // 14)
    for _ in range(13):
        found = {"type": "object", "properties": {"a": found, **wide(size // 14)["properties"]}}
    return found


def lists(size: int) -> Json:
    """Lists of objects in lists of objects."""
    found: Json = wide(size // 5)
    for _ in range(4):
        parts = {**wide(size // 5)["properties"], "z": {"type": "array", "items": found}}
        found = {"type": "object", "properties": parts}
    return found


def joined(size: int) -> Json:
    """Each part is joined with the next one twice."""
    defs: Json = {f"d{size}": {"type": "object"}}
    for n in range(size):
        both = {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"type": "object"}]}
        defs[f"d{n}"] = {"type": "object", "properties": {"a": both, "b": both}}
    return {"$ref": "#/$defs/d0", "$defs": defs}


# By name, with how many there are in a test of seconds, and how many there may be in one tool (65,536 values).
STRUCTURES: dict[str, tuple[Make, int, int]] = {
    "optional properties": (wide, 2_000, 30_000),
    "required properties": (required, 5_000, 20_000),
    "references of a part to itself": (own_unions, 2_000, 30_000),
    "unions of unions": (unions_of_unions, 2_000, 30_000),
    "references to references": (chain, 800, 12_000),
    "references to one part": (shared, 1_000, 15_000),
    "references to one list of values": (enums, 1_000, 20_000),
    "objects in objects": (tree, 800, 10_000),
    "objects in one row": (deep, 2_000, 28_000),
    "lists of objects": (lists, 2_000, 28_000),
    "joined parts": (joined, 400, 6_000),
}


# --- everything that takes one ------------------------------------------------------------------------


@cache
def vocabulary() -> Vocabulary:
    return smollm2()


def scene_of(*schemas: Json, **head: Any) -> Scene:
    """A scene whose tools take these."""
    parts = [msgspec.Raw(msgspec.json.encode(schema)) for schema in schemas]
    tools = [FunctionTool(name=f"f{n}", parameters=raw) for n, raw in enumerate(parts)]
    wanted = Head(tools=tools_of(*tools), **{"tool_choice": "required", **head})
    return Scene(wanted, None, (), can_constrain=True, can_follow_tags=True)


def spelling(name: str) -> Spelling:
    return next(one for format, _, one in SPELLINGS if format == name)


def tag(name: str, schema: Json) -> str | None:
    """The structural tag of a forced call; None: it was refused."""
    try:
        forced = tagged_calls(spelling(name), scene_of(schema), vocabulary())
    except InvalidRequest:
        return None
    assert forced is not None
    assert isinstance(forced[1], Grammar)
    return forced[1].definition


def types(schema: Json) -> None:
    walked = JsonSchema(schema)
    for part in (schema, *properties_of(schema).values()):
        assert walked.types(part)


def arguments(schema: Json) -> None:
    reader = TaggedArguments(Tags("<p=%key%>", "</p>"), JsonSchema(schema))
    for key in ["a", *properties_of(schema)][:50]:
        reader.feed(f"<p={key}>1</p>")
    reader.close()


def alone(schema: Json) -> None:
    walked, budget = JsonSchema(schema), CopyBudget()
    for part in properties_of(schema).values():
        msgspec.json.encode(walked.alone(part, budget))


def answers(schema: Json) -> None:
    """Schemas for an answer that is JSON of this schema, or a call with arguments of this schema."""
    wanted = TextFormat(type="json_schema", schema=msgspec.Raw(msgspec.json.encode(schema)))
    scene = scene_of(schema, tool_choice="auto", text=TextConfig(format=wanted))
    assert format_schema(scene, "arguments")
    assert call_schema(scene.offers, "arguments")
    refers(moved(schema, "#/x"))


def calls(name: str) -> Callable[[Json], None]:
    """A forced call in this format, in the words of each engine."""

    def write(schema: Json) -> None:
        written = tag(name, schema)
        if written is not None:
            lark(written)
            gbnf(written)

    return write


TAKERS: dict[str, Callable[[Json], object]] = {
    "types": types,
    "arguments in tags": arguments,
    "parts that stand alone": alone,
    "schemas of answers": answers,
    "Harmony's types": lambda schema: tools_section(scene_of(schema).offers),
    "example": lambda schema: msgspec.json.encode(example(schema)),
    "lists written out": unrolled,
    "parts in each other": levels,
} | {f"calls in {name}": calls(name) for name in ("xml", "gemma4", "pythonic", "dsml", "hermes")}
