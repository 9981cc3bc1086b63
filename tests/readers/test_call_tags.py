"""Grammars of forced calls: they allow what the schema allows and nothing else, and they stay small."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue.errors import InvalidRequest
from segue.readers.call_tags import tagged_calls
from segue.readers.forced import CallForm, lead_of
from segue.readers.tags import GRAMMAR_BYTES_MAX, json_of, maybe, sequence, tag_of
from segue.schemas.structural_tags import lark
from segue.seams.model import Grammar, Scene
from segue.seams.prompt import Head
from segue.wire.requests import TextConfig, TextFormat
from tests.odd_schemas import chain, lists, scene_of, spelling, tag, tree, vocabulary, wide
from tests.readers.following import is_accepted

few = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
NAMES = ("a", "b", "c", "d", "e", "f", "g")
Object = dict[str, Any]


def is_allowed(name: str, schema: Object, written: str) -> bool:
    """Whether a forced call may go on with these arguments, up to its end."""
    forced = tagged_calls(spelling(name), scene_of(schema), vocabulary())
    assert forced is not None
    words = vocabulary()
    return is_accepted(forced[1], words, words.encode(written + spelling(name).end).tolist())


def spelled(name: str, arguments: Object) -> str:
    """Numbers and objects as the format writes them."""
    if name == "gemma4":
        inner = (f"{key}:{braced(value)}" for key, value in arguments.items())
        return ",".join(inner)
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())


def braced(value: object) -> str:
    return "{" + spelled("gemma4", value) + "}" if isinstance(value, dict) else json.dumps(value)


def object_of(names: Sequence[str], needed: Sequence[str]) -> Object:
    return {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
        "required": [*needed],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("name", ["gemma4", "pythonic", "lfm2"])
def test_arguments_with_separators_may_be_left_out_unless_they_are_needed(name: str) -> None:
    @few
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        names = NAMES[: data.draw(st.integers(1, len(NAMES)))]
        needed = data.draw(st.sets(st.sampled_from(names), max_size=2))
        said = data.draw(st.sets(st.sampled_from(names)))
        given = {one: 1 for one in names if one in said}
        schema = object_of(names, sorted(needed))
        assert is_allowed(name, schema, spelled(name, given)) == (needed <= said)
        if given:
            row = spelled(name, given)
            for wrong in (f"{row},", f",{row}", f"{row}, {row}", row.replace("1", "x")):
                assert not is_allowed(name, schema, wrong)

    check()


@few
@given(said=st.sets(st.sampled_from(NAMES)), inner=st.sets(st.sampled_from(NAMES)))
def test_objects_in_objects_are_held_to_their_schema(said: set[str], inner: set[str]) -> None:
    """The object in the middle is heavier than all the others, so that they are divided around it."""
    schema = object_of(NAMES, [])
    schema["properties"]["d"] = object_of(NAMES, [])
    numbers = {name: 1 for name in NAMES if name in inner}
    given = {name: numbers if name == "d" else 1 for name in NAMES if name in said}
    assert is_allowed("gemma4", schema, spelled("gemma4", given))
    assert not is_allowed("gemma4", schema, spelled("gemma4", {**given, "other": 1}))
    if "d" in given:
        assert not is_allowed("gemma4", schema, spelled("gemma4", {**given, "d": 1}))


def test_argument_is_held_to_what_it_refers_to() -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "array", "items": {"$ref": "#/$defs/one"}}},
        "required": ["x"],
        "$defs": {"one": {"type": "integer"}},
    }
    call = "<parameter=x>\n{}\n</parameter>\n"
    assert is_allowed("xml", schema, call.format("[1, 2]"))
    assert not is_allowed("xml", schema, call.format('["a"]'))


def size(name: str, *schemas: Object) -> int:
    forced = tagged_calls(spelling(name), scene_of(*schemas), vocabulary())
    assert forced is not None
    assert isinstance(forced[1], Grammar)
    return len(forced[1].definition)


def row(width: int, depth: int, word: str = "z") -> Object:
    """Objects in each other, each with as many properties."""
    found = wide(width)
    for _ in range(depth - 1):
        found = {**wide(width - 1), "properties": {**wide(width - 1)["properties"], word: found}}
    return found


@pytest.mark.parametrize(
    "name, schema, times_max",
    [
        # 1.4 KB of these were once 123 MB, 2 KB were 4 GB.
        ("gemma4", row(10, 5), 40),
        ("gemma4", row(12, 6), 40),
        ("gemma4", row(12, 6, "a"), 40),
        ("gemma4", wide(400), 60),
        ("pythonic", wide(400), 60),
        ("lfm2", wide(400), 60),
        ("xml", wide(400), 20),
        ("gemma4", lists(40), 150),
        ("xml", chain(400), 20),
        ("gemma4", chain(100), 40),
    ],
)
def test_grammar_is_not_much_larger_than_its_schema(
    name: str, schema: Object, times_max: int
) -> None:
    written = tag(name, schema)
    assert written is not None
    given = len(json.dumps(schema))
    assert len(written) < given * times_max
    assert len(lark(written)) < given * times_max


@pytest.mark.parametrize("name", ["gemma4", "pythonic", "xml", "hermes"])
def test_many_tools_of_one_shape_are_as_large_as_their_sum(name: str) -> None:
    assert size(name, *[wide(20)] * 40) < size(name, wide(20), wide(20)) * 21


def test_what_many_arguments_refer_to_is_not_written_for_each() -> None:
    parts = {f"p{n}": {"type": "string", "description": "x" * 20} for n in range(400)}
    properties = {f"k{n}": {"$ref": "#/$defs/all"} for n in range(300)}
    whole = {"type": "object", "properties": parts}
    schema = {"type": "object", "properties": properties, "$defs": {"all": whole}}
    for name in ("xml", "gemma4"):
        assert size(name, schema) < 1_500_000
        assert size(name, *[schema] * 10) < size(name, schema) * 10


def test_tag_that_is_too_large_is_refused_before_it_is_written() -> None:
    """A part that stands in a tag twice, forty times over, would be two to the forty."""
    node = json_of({"type": "object"})
    for _ in range(40):
        node = sequence([maybe([node]), maybe([node])])
    with pytest.raises(InvalidRequest, match="4 MiB") as refused:
        tag_of(node)
    assert refused.value.code == "unsupported_value"


@pytest.mark.parametrize("schema", [row(3, 40), tree(10_000), lists(20_000)])
def test_forced_call_that_would_be_too_large_or_too_deep_is_refused(schema: Object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        tagged_calls(spelling("gemma4"), scene_of(schema), vocabulary())
    assert (refused.value.code, refused.value.param) == ("unsupported_value", "tools")


@pytest.mark.parametrize("chars, is_refused", [(1_000, False), (GRAMMAR_BYTES_MAX, True)])
def test_schema_of_an_answer_has_a_limit_too(chars: int, is_refused: bool) -> None:
    raw = msgspec.Raw(msgspec.json.encode({"type": "object", "description": "x" * chars}))
    wanted = TextConfig(format=TextFormat(type="json_schema", schema=raw))
    scene = Scene(Head(text=wanted), None, (), can_constrain=True)
    form = CallForm(named=lambda name: ())
    if not is_refused:
        assert lead_of(form, scene, vocabulary())[1]
        return
    with pytest.raises(InvalidRequest) as refused:
        lead_of(form, scene, vocabulary())
    assert (refused.value.code, refused.value.param) == ("unsupported_value", "text.format")
