"""Every format: what it writes is read back, however it is cut, as text and as special tokens."""

from __future__ import annotations

import json
from array import array
from functools import cache
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.readers.bound import BoundFamily
from segue.readers.formats import FORMATS, format_of
from segue.readers.text_reader import TextReader
from segue.turn.values import Head, Ids, ItemText, Parsed, Scene
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.tools import CustomTool, FunctionTool
from tests.contracts.dialect import Heard, heard, letters, smollm2, tools_of
from tests.dialects.templates import encoded_whole
from tests.models.assets import template, template_names
from tests.readers.written import BY_NAME, WRITTEN

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "near": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "is_live": {"type": "boolean"},
        "tags": {"type": "array"},
        "where": {"$ref": "#/$defs/where"},
    },
    "$defs": {"where": {"type": "object"}},
}
TOOLS = tools_of(
    FunctionTool(name="get_weather", parameters=msgspec.Raw(json.dumps(SCHEMA).encode())),
    FunctionTool(name="now"),
    CustomTool(name="patch"),
)
OFFERING = Scene(Head(tools=TOOLS), None, ())
END = "<|im_end|>"
NASTY = 'Zürich "x"\n\tC:\\n 東京 👩‍👩‍👧 {1} [a] <b>'
NESTED: dict[str, object] = {
    "city": NASTY,
    "days": -2,
    "near": 0.5,
    "is_live": True,
    "tags": [1, "two", [], {"a": None}],
    "where": {"a": {"b": [True, "é"]}, "c": ""},
}
names = pytest.mark.parametrize("name", WRITTEN)


@cache
def vocabulary(name: str, *, is_special: bool) -> Vocabulary:
    """SmolLM2's, with the marks of a format as special tokens or not."""
    return smollm2(*WRITTEN[name].specials) if is_special else smollm2()


def reader(name: str, words: Vocabulary, scene: Scene = OFFERING) -> TextReader:
    end = array("I", [words.special(END)])
    bound = BoundFamily(words, "test", array("I"), frozenset(end), end)
    return TextReader(bound, scene, BY_NAME[name])


def ids_of(name: str, text: str, words: Vocabulary) -> list[int]:
    marks = [mark for mark in WRITTEN[name].specials if words.has_special(mark)]
    return encoded_whole(words, text, marks) if marks else list(words.encode(text))


def read(
    name: str, text: str, *, is_special: bool = True, is_cut: bool = False, scene: Scene = OFFERING
) -> list[Heard]:
    words = vocabulary(name, is_special=is_special)
    one = reader(name, words, scene)
    parsed: list[Parsed] = []
    for id in ids_of(name, text, words):
        parsed += one.feed(Ids([id]))
    return heard(parsed + one.close(is_cut=is_cut))


def called(found: list[Heard]) -> list[tuple[str, object]]:
    """The calls, with their arguments as values; anything else as it is."""
    return [
        (one.name, json.loads(one.text)) if one.kind == "function" else (one.kind, one.text)
        for one in found
    ]


def test_every_format_has_a_writer() -> None:
    assert [row.name for row in FORMATS] == list(WRITTEN)


@pytest.mark.parametrize("name, is_special", list(product(WRITTEN, (True, False))))
def test_calls_are_read_back(name: str, is_special: bool) -> None:
    calls = [("get_weather", NESTED), ("now", {}), ("get_weather", {"city": ""})]

    assert called(read(name, WRITTEN[name].calls(*calls), is_special=is_special)) == calls


@names
def test_text_and_thoughts_around_calls_are_read(name: str) -> None:
    row, call = BY_NAME[name], ("get_weather", {"city": "Rome"})
    if row.is_bare:
        pytest.skip("a call is the whole answer")
    text = f"{row.think}\nHm.\n{row.thought}\n\nI look.\n{WRITTEN[name].calls(call)}\nSo."

    found = read(name, text) if row.think == "<think>" else read(name, text, is_special=False)

    assert called(found) == [("reasoning", "Hm."), ("message", "I look."), call, ("message", "So.")]


@names
def test_call_that_is_cut_at_every_byte_is_the_same(name: str) -> None:
    """Marks are text here, and every token is one byte."""
    words = vocabulary(name, is_special=False)
    bytes_of = {words.bytes_of(id): id for id in range(words.size)}
    text = WRITTEN[name].calls(("get_weather", NESTED))
    one = reader(name, words)

    parsed = [value for byte in text.encode() for value in one.feed(Ids([bytes_of[bytes([byte])]]))]

    assert called(heard(parsed + one.close(is_cut=False))) == [("get_weather", NESTED)]


@names
def test_answer_that_is_cut_anywhere_loses_nothing_before_the_cut(name: str) -> None:
    """The arguments so far are the beginning of the whole, and only a whole call is not marked as cut."""
    text = WRITTEN[name].calls(("get_weather", {"city": NASTY, "days": 3}))
    words = vocabulary(name, is_special=True)
    ids = ids_of(name, text, words)
    whole = read(name, text)[0].text
    for count in range(1, len(ids)):
        one = reader(name, words)
        parsed = [value for id in ids[:count] for value in one.feed(Ids([id]))]
        for found in heard(parsed + one.close(is_cut=True)):
            if found.kind == "function":
                assert whole.startswith(found.text)
                assert found.is_cut or found.text == whole


@names
def test_strings_are_streamed_while_they_are_written(name: str) -> None:
    words = vocabulary(name, is_special=True)
    text = WRITTEN[name].calls(("get_weather", {"city": "one two three four five"}))
    one = reader(name, words)
    parsed: list[Parsed] = []
    for id in ids_of(name, text[: text.index("four")], words):
        parsed += one.feed(Ids([id]))

    sent = "".join(value.text for value in parsed if isinstance(value, ItemText))
    assert sent.startswith('{"city": "one two')


@names
def test_input_of_a_custom_tool_is_its_text(name: str) -> None:
    text = WRITTEN[name].calls(("patch", {"input": NASTY}))

    assert called(read(name, text)) == [("custom", NASTY)]


@names
def test_no_tools_no_calls(name: str) -> None:
    """Special tokens have no text, and everything else is as it was written."""
    text = WRITTEN[name].calls(("get_weather", {"city": "Rome"}))
    shown = text
    for mark in WRITTEN[name].specials:
        shown = shown.replace(mark, "")

    assert called(read(name, text, scene=Scene(Head(), None, ()))) == [("message", shown)]
    assert called(read(name, text, is_special=False, scene=Scene(Head(), None, ()))) == [
        ("message", text)
    ]


@names
def test_call_that_is_quoted_in_a_fence_is_text(name: str) -> None:
    quoted = f"So:\n```\n{WRITTEN[name].calls(('now', {}))}\n```\n."
    if "```" in WRITTEN[name].calls(("now", {})):
        pytest.skip("its marks are fences")

    assert read(name, quoted, is_special=False) == [Heard("message", quoted)]


@names
def test_mark_alone_is_text(name: str) -> None:
    mark = BY_NAME[name].begins[0]

    assert read(name, f"the {mark} mark", is_special=False) == [
        Heard("message", f"the {mark} mark")
    ]
    if mark in WRITTEN[name].specials:
        assert read(name, f"the {mark} mark.") == [Heard("message", "the  mark.")]


@names
def test_call_without_its_end_is_whole(name: str) -> None:
    written = WRITTEN[name]
    text = written.calls(("get_weather", {"city": "Rome", "days": 2})).removesuffix(written.end)
    for end in BY_NAME[name].ends:
        text = text.removesuffix(end)

    assert called(read(name, text)) == [("get_weather", {"city": "Rome", "days": 2})]


words_of = st.text(letters, max_size=6)
leaves = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | words_of
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b1", "c_d"]), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "city": words_of,
        "days": st.integers(-9, 9),
        "near": st.none() | st.floats(-9, 9),
        "is_live": st.booleans(),
        "tags": st.lists(trees, max_size=3),
        "where": st.dictionaries(st.sampled_from(["a", "b1"]), trees, max_size=2),
    },
)


@names
@settings(max_examples=30, deadline=None, derandomize=True)
@given(arguments=arguments)
def test_any_arguments_are_read_back(name: str, arguments: dict[str, object]) -> None:
    text = WRITTEN[name].calls(("get_weather", arguments))

    assert called(read(name, text)) == [("get_weather", arguments)]


# --- which format ---------------------------------------------------------------------------------


def test_table_knows_the_models_own_templates() -> None:
    known = {name: row.name for name in template_names() if (row := format_of(template(name)))}

    assert known["Qwen3.5-4B"] == known["Qwen3-Coder"] == known["StepFun3.5-Flash"] == "xml"
