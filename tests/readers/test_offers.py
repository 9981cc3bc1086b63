"""Forced answers: which tools must be called, which schema follows, and what is heard and kept in the end."""

import json
from typing import Any

import jsonschema
import msgspec
import pytest

from segue.dialects.chatml import QWEN3, SMOLLM2
from segue.dialects.family import Family, TokenDialect
from segue.dialects.llama3 import LLAMA3
from segue.readers.offers import call_schema, forced, format_schema
from segue.seams.model import Dialect, Scene
from segue.seams.prompt import Head
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.requests import TextConfig, TextFormat, ToolChoiceName
from segue.wire.tools import FunctionTool
from tests.contracts.dialect import (
    TOOLS,
    Heard,
    call,
    cold,
    flat,
    heard,
    message,
    output,
    read,
    smollm2,
    tools_of,
    turn_after,
)

LOOK = ToolChoiceName(type="function", name="look")
PATCH = ToolChoiceName(type="custom", name="patch")
READ = ToolChoiceName(type="function", name="read", namespace="fs")
SHAPE = {"type": "object", "properties": {"q": {"type": "string"}}}
THINKING = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def chatml(family: Family = SMOLLM2) -> tuple[Dialect, Vocabulary]:
    vocabulary = smollm2(texts=THINKING if family is QWEN3 else ())
    return TokenDialect(family, vocabulary), vocabulary


def llama3() -> tuple[Dialect, Vocabulary]:
    vocabulary = smollm2(*LLAMA3.specials, "<|python_tag|>")
    return TokenDialect(LLAMA3, vocabulary), vocabulary


MAKERS = {"chatml": chatml, "qwen3": lambda: chatml(QWEN3), "llama3": llama3}


@pytest.fixture(scope="module", params=MAKERS)
def made(request: pytest.FixtureRequest) -> tuple[Dialect, Vocabulary]:
    return MAKERS[request.param]()


def scene_of(choice: Any, *, can_constrain: bool = True) -> Scene:
    head = Head(tools=TOOLS, tool_choice=choice)
    return Scene(head, None, (message("user", "Hi"),), can_constrain=can_constrain)


@pytest.mark.parametrize(
    "choice, names",
    [
        ("auto", []),
        ("none", []),
        ("required", ["look", "patch", "fs.read"]),
        (LOOK, ["look"]),
        (PATCH, ["patch"]),
        (READ, ["fs.read"]),
        (ToolChoiceName(type="allowed_tools", mode="auto", tools=[LOOK]), []),
        (ToolChoiceName(type="allowed_tools", mode="required", tools=[LOOK, READ]), ["look", "fs.read"]),
    ],
)  # fmt: skip
def test_choice_says_which_tools_must_be_called(choice: Any, names: list[str]) -> None:
    found = forced(scene_of(choice))

    assert [offer.qualified_name for offer in found] == names


@pytest.mark.parametrize("choice", ["required", LOOK])
def test_engine_that_cannot_be_held_is_not_led(
    made: tuple[Dialect, Vocabulary], choice: Any
) -> None:
    rendered = made[0].render(scene_of(choice, can_constrain=False))

    assert (len(rendered.lead), rendered.schema) == (0, None)


def sampled_behind(dialect: Dialect, choice: Any, text: str) -> tuple[Scene, list[int]]:
    """What the reader is fed: our words, then what the engine sampled under the schema."""
    scene = scene_of(choice)
    rendered = dialect.render(scene)
    assert rendered.schema is not None
    jsonschema.validate(json.loads(text), json.loads(rendered.schema))
    return scene, [*rendered.lead]


@pytest.mark.parametrize("has_stop", [True, False])
@pytest.mark.parametrize(
    "choice, text, expected",
    [
        (LOOK, '{"q": "x"}', Heard("function", '{"q": "x"}', "look")),
        (PATCH, '{"input": "x"}', Heard("custom", "x", "patch")),
        (READ, "{}", Heard("function", "{}", "read", "fs", True)),
    ],
)
def test_forced_call_is_heard_though_the_engine_stops_behind_the_arguments(
    made: tuple[Dialect, Vocabulary], choice: Any, text: str, expected: Heard, has_stop: bool
) -> None:
    dialect, vocabulary = made
    scene, lead = sampled_behind(dialect, choice, text)
    stop = [*dialect.write([])][-1:] if has_stop else []

    parsed = read(dialect, scene, [lead, vocabulary.encode(text), stop])

    assert heard(parsed) == [expected]


def test_one_of_several_calls_is_forced_by_a_schema_with_all_their_names(
    made: tuple[Dialect, Vocabulary],
) -> None:
    dialect, vocabulary = made
    key = "parameters" if dialect.fingerprint.startswith("llama") else "arguments"
    text = json.dumps({"name": "fs.read", key: {}})
    scene, lead = sampled_behind(dialect, "required", text)

    parsed = read(dialect, scene, [lead, vocabulary.encode(text)])

    assert heard(parsed) == [Heard("function", "{}", "read", "fs", True)]
    schema = json.loads(dialect.render(scene).schema or b"")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "other", key: {}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "look", key: {"q": 1}}, schema)


def test_our_words_end_where_a_token_of_the_model_ends(made: tuple[Dialect, Vocabulary]) -> None:
    """They are the first ids of the whole call as an encoder would write it."""
    dialect, _ = made
    lead = dialect.render(scene_of(LOOK)).lead
    written = dialect.write([call("look", '{"q": "x"}')])

    # An empty thought may stand before them.
    begun = lead[lead.index(written[0]) :]

    assert begun == written[: len(begun)]


def test_forced_call_stands_in_history_as_if_the_model_had_finished_it(
    made: tuple[Dialect, Vocabulary],
) -> None:
    """The ids that were sampled are kept, and what closes the call is put behind them."""
    dialect, vocabulary = made
    scene, lead = sampled_behind(dialect, LOOK, '{"q": "x"}')
    past = turn_after(dialect, scene, [*lead, *vocabulary.encode('{"q": "x"}')])
    following = Scene(scene.head, past, (output("1"),))

    prompt = flat(dialect.render(following).prompt)

    text = b"".join(vocabulary.bytes_of(id) for id in prompt).decode()
    is_llama = dialect.fingerprint.startswith("llama")
    key, end = ("parameters", "") if is_llama else ("arguments", "\n</tool_call>")
    assert f'{{"name": "look", "{key}":{{"q": "x"}}}}{end}' in text
    seen = [*flat(dialect.render(scene).prompt), *vocabulary.encode('{"q": "x"}')]
    assert prompt[: len(seen)].tolist() == seen
    assert flat(dialect.render(cold(following)).prompt) == prompt


# --- text in a format -----------------------------------------------------------------------------


def formatted(type: Any, tools: Any = None, choice: Any = "auto") -> Scene:
    raw = msgspec.Raw(b'{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')
    wanted = TextFormat(type=type, schema=raw if type == "json_schema" else msgspec.UNSET)
    head = Head(text=TextConfig(format=wanted), tool_choice=choice)
    if tools is not None:
        head = msgspec.structs.replace(head, tools=tools)
    return Scene(head, None, (message("user", "Hi"),), can_constrain=True)


@pytest.mark.parametrize(
    "type, schema",
    [
        ("text", None),
        ("json_object", {"type": "object"}),
        (
            "json_schema",
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        ),
    ],
)
def test_format_becomes_a_schema(
    made: tuple[Dialect, Vocabulary], type: str, schema: object
) -> None:
    dialect, vocabulary = made
    rendered = dialect.render(formatted(type))

    assert (json.loads(rendered.schema) if rendered.schema else None) == schema
    parsed = read(dialect, formatted(type), [rendered.lead, vocabulary.encode('{"a": 1}')])
    assert heard(parsed) == [Heard("message", '{"a": 1}')]


def test_format_leaves_room_for_a_call_where_one_is_allowed(
    made: tuple[Dialect, Vocabulary],
) -> None:
    dialect, vocabulary = made
    scene = formatted("json_schema", TOOLS)
    rendered = dialect.render(scene)
    schema = json.loads(rendered.schema or b"")
    key = "parameters" if dialect.fingerprint.startswith("llama") else "arguments"
    text = json.dumps({"name": "look", key: {"q": "x"}})

    jsonschema.validate({"a": 1}, schema)
    jsonschema.validate(json.loads(text), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"b": 1}, schema)
    parsed = read(dialect, scene, [rendered.lead, vocabulary.encode(text)])
    assert heard(parsed) == [Heard("function", '{"q": "x"}', "look")]
    assert format_schema(formatted("json_object", TOOLS, "none"), key) == b'{"type":"object"}'


# --- references -----------------------------------------------------------------------------------

TREE = {
    "type": "object",
    "properties": {"node": {"$ref": "#/$defs/node"}, "self": {"$ref": "#"}},
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}},
            "additionalProperties": False,
        }
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize("is_alone", [True, False])
def test_references_of_a_schema_still_hold_inside_another(is_alone: bool) -> None:
    tool = FunctionTool(name="tree", parameters=msgspec.Raw(msgspec.json.encode(TREE)))
    offers = tools_of(tool).offers if is_alone else tools_of(tool, FunctionTool(name="x")).offers
    schema = json.loads(call_schema(offers, "arguments"))

    good = {"name": "tree", "arguments": {"node": {"next": {"n": 1}}, "self": {"node": {}}}}
    jsonschema.validate(good, schema)
    for bad in ({"node": {"next": {"n": "1"}}}, {"self": {"other": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"name": "tree", "arguments": bad}, schema)
