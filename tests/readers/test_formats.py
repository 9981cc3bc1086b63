"""Every format: what it writes is read back, however it is cut, as text and as special tokens."""

from __future__ import annotations

import json
import re
from array import array
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.readers.bound import BoundFamily
from segue.readers.formats import FORMATS, declared_format, format_of, own_ids, unread_marks
from segue.readers.text_reader import TextReader
from segue.seams.model import Ids, ItemText, Parsed, Scene
from segue.seams.prompt import Head
from segue.vocabularies.chat_template import template_in
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.tools import CustomTool, FunctionTool
from tests.contracts.dialect import Heard, all_ids, heard, letters, smollm2, tools_of
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
    assert {row.name for row in FORMATS} == WRITTEN.keys()


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


# Formats in which the end of a value is sometimes forgotten: what begins the next one, and what ends the call.
FORGETFUL = {
    "xml": ("<parameter={}>", "</function>", "</parameter>"),
    "seed": ("<parameter={}>", "</function>", "</parameter>"),
    "minimax-m2": ('<parameter name="{}">', "</invoke>", "</parameter>"),
    "dsml": (
        '<｜DSML｜parameter name="{}" string="true">',
        "</｜DSML｜invoke>",
        "</｜DSML｜parameter>",
    ),
}


@pytest.mark.parametrize("name", FORGETFUL)
def test_end_of_a_call_on_a_line_of_a_value_is_part_of_it(name: str) -> None:
    """A file that an agent writes may have such a line."""
    begin, end, _ = FORGETFUL[name]
    for line in (end, begin.format("colour"), begin.format("city"), f"{end} and more", end[:-1]):
        for city in (f"a\n{line}\nb", f"\n\n{line}"):
            call = ("get_weather", {"city": city, "days": 2})

            assert called(read(name, WRITTEN[name].calls(call), is_special=False)) == [call]


@pytest.mark.parametrize("name", FORGETFUL)
def test_value_without_its_own_end_ends_with_the_next_or_with_the_call(name: str) -> None:
    _, end, closing = FORGETFUL[name]
    calls = [("get_weather", {"city": "Rome", "is_live": True}), ("get_weather", {"city": "Bonn"})]
    text = re.sub("\n+", "\n", WRITTEN[name].calls(*calls).replace(closing, "\n"))

    assert called(read(name, text, is_special=False)) == calls
    # Nothing follows, not even the end of the calls.
    cut = text[: text.rindex(end) + len(end)]
    assert called(read(name, cut, is_special=False)) == calls


@pytest.mark.parametrize(
    "text, city",
    [
        ("city='it's here'", "it's here"),
        ("city='it's \"here\", \u00e9'", 'it\'s "here", é'),
        ("city='a' ", "a"),
        ("city='C:\\\\data\\n'", "C:\\data\n"),
        ('city="say \\"hi\\""', 'say "hi"'),
    ],
)
def test_quote_inside_a_word_ends_no_string(text: str, city: str) -> None:
    """Templates write strings between quotes as they are."""
    said = f"<|tool_call_start|>[get_weather({text}, days=2)]<|tool_call_end|>"

    assert called(read("lfm2", said)) == [("get_weather", {"city": city, "days": 2})]


@pytest.mark.parametrize("is_special", [True, False])
def test_quote_that_is_a_mark_escapes_nothing(is_special: bool) -> None:
    """As Gemma 4 writes strings, inside objects too."""
    call = ("get_weather", {"city": "C:\\new", "tags": ["it's \\n", {"a": "\\"}]})

    assert called(read("gemma4", WRITTEN["gemma4"].calls(call), is_special=is_special)) == [call]


def test_lists_and_objects_in_tags_are_read() -> None:
    """As MiniMax M3 writes them."""
    mark = "]<]minimax[>["
    text = (
        f'{mark}<tool_call>\n{mark}<invoke name="get_weather">{mark}<city>Rome{mark}</city>'
        f"{mark}<tags>{mark}<item>1{mark}</item>{mark}<item>two{mark}</item>{mark}</tags>"
        f"{mark}<where>{mark}<a>{mark}<item>true{mark}</item>{mark}</a>{mark}<b>x y{mark}</b>{mark}</where>"
        f"{mark}</invoke>\n{mark}</tool_call>"
    )
    expected = {"city": "Rome", "tags": [1, "two"], "where": {"a": [True], "b": "x y"}}

    assert called(read("minimax-m3", text)) == [("get_weather", expected)]


def test_objects_on_lines_of_their_own_are_calls() -> None:
    """As MiniMax M1 writes them."""
    one = '{"name": "get_weather", "arguments": {"city": "Rome"}}'

    found = called(read("apriel", f"<tool_calls>\n{one}\n{one}\n</tool_calls>\nSo."))

    assert found == [("get_weather", {"city": "Rome"})] * 2 + [("message", "So.")]


LOOSE = "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>"


@pytest.mark.parametrize("text", [LOOSE, f"{LOOSE}\n</tool_call>"])
def test_call_of_a_known_tool_may_lack_the_mark_around_it(text: str) -> None:
    """A common slip of Qwen3-Coder."""
    call = ("get_weather", {"city": "Rome"})
    unknown = LOOSE.replace("get_weather", "other")

    assert called(read("xml", text)) == [call]
    assert called(read("xml", f"I look.\n{text}")) == [("message", "I look."), call]
    assert called(read("xml", f"a {unknown}")) == [("message", f"a {unknown}")]
    assert called(read("xml", f"```\n{LOOSE}\n```")) == [("message", f"```\n{LOOSE}\n```")]


@names
def test_end_of_a_thought_that_never_began_is_no_text(name: str) -> None:
    row = BY_NAME[name]

    found = read(name, f"{row.thought}So.", is_special=False)

    assert called(found) == [("message", "So.")]


@pytest.mark.parametrize("given", [Scene(Head(), None, ()), OFFERING])
def test_white_space_that_belongs_to_the_marks_around_an_answer_is_no_text(given: Scene) -> None:
    words = vocabulary("hermes", is_special=False)
    end = array("I", [words.special(END)])
    bound = BoundFamily(words, "test", array("I"), frozenset(end), end)
    one = TextReader(bound, given, replace(BY_NAME["hermes"], gap=" ", tail="\n"))
    ids = words.encode(" So.\n\nOr not.\n")

    parsed = [value for id in (*ids, *end) for value in one.feed(Ids([id]))]

    assert called(heard(parsed + one.close(is_cut=False))) == [("message", "So.\n\nOr not.")]


@pytest.mark.parametrize(
    "text, found",
    [
        ('[TOOL_CALLS][{"name": "a", "arguments": {"id": "no"}, "id": "abcdefg01"}]</s>', ["abcdefg01"]),
        ("[TOOL_CALLS]a[CALL_ID]abcdefg01[ARGS]{}[TOOL_CALLS]b[CALL_ID]abcdefg02[ARGS]{}", ["abcdefg01", "abcdefg02"]),
        ("<|tool_call_begin|>functions.a:3<|tool_call_argument_begin|>{}<|tool_call_end|>", ["functions.a:3"]),
        ("<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>a<|tool_call:args|>{}", ["a1b2c3d4e5"]),
        (
            '<calls>[{"name": "a", "arguments": {"name": "no", "id": "no"}, "id": "x 1"}, {"id": "2"}]',
            ["x 1", "2"],
        ),
        ('So: <tool_calls>[{"name": "a", "arguments": {}}]</tool_calls>', []),
        ('[TOOL_CALLS][{"name": "a", ', []),
        ("I look.", []),
    ],
)  # fmt: skip
def test_ids_that_a_model_gave_its_calls_are_found(text: str, found: list[str]) -> None:
    assert own_ids(text) == found


def test_token_that_begins_the_words_ends_a_thought() -> None:
    """As Command A's: an answer whose thought has not ended is no thought."""
    marks = ["<|START_RESPONSE|>", "<|END_RESPONSE|>"]
    words = smollm2(*marks)
    end = array("I", [words.special(END)])
    bound = BoundFamily(words, "test", array("I"), frozenset(end), end)
    given = TextReader(bound, OFFERING, BY_NAME["command-r"], is_thinking=True)
    text = "Hm.<|START_RESPONSE|>So.<|END_RESPONSE|>"
    ids = encoded_whole(words, text, marks)
    parsed = [value for id in ids for value in given.feed(Ids([id]))]

    found = called(heard(parsed + given.close(is_cut=False)))

    assert found == [("reasoning", "Hm."), ("message", "So.")]


@pytest.mark.parametrize("name", ["kimi-k2", "deepseek-v3", "solar"])
def test_call_without_any_arguments_has_empty_arguments(name: str) -> None:
    text = WRITTEN[name].calls(("now", {})).replace("{}", "")

    assert called(read(name, text)) == [("now", {})]


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


def pieces(name: str) -> list[str]:
    """Everything that may mean something in this format."""
    row, written = BY_NAME[name], WRITTEN[name]
    whole = written.calls(("get_weather", {"city": "a", "days": 1}))
    marks = [*row.begins, *row.ends, *written.specials, row.think, row.thought, row.loose, "```"]
    return [mark for mark in marks if mark] + [
        whole,
        whole[: len(whole) // 2],
        "}",
        "{",
        "\n",
        "x",
        '"',
        ",",
    ]


@names
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_row_of_marks_is_read_to_its_end(name: str, data: st.DataObject) -> None:
    """Nothing hangs or fails, and every sampled id belongs to an item or to the end."""
    text = "".join(data.draw(st.lists(st.sampled_from(pieces(name)), max_size=8)))
    words = vocabulary(name, is_special=data.draw(st.booleans()))
    ids = ids_of(name, text, words)
    one = reader(name, words)

    parsed = [value for id in ids for value in one.feed(Ids([id]))]
    parsed += one.close(is_cut=data.draw(st.booleans()))

    assert all_ids(parsed)[: len(ids)] == ids


# --- which format ---------------------------------------------------------------------------------


# Without a row: how they write calls is worked out from them.
DERIVED = {
    "Apertus-8B-Instruct", "NVIDIA-Nemotron-Nano-v2", "meetkai-functionary-medium-v3.1", "tencent-Hy3",
}  # fmt: skip
# Every template of the collection; "-": it shows no calls, or none that are read by a row.
EXPECTED = {
    "apriel": "Apriel-1.6-15b-Thinker-fixed MiniMax-M1 unsloth-Apriel-1.5",
    "command-r": "Cohere2MoE CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "deepseek-v3": "deepseek-ai-DeepSeek-R1-Distill-Llama-8B deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"
    " deepseek-ai-DeepSeek-V3.1 llama-cpp-deepseek-r1",
    "dsml": "deepseek-ai-DeepSeek-V3.2 deepseek-ai-DeepSeek-V4 deepseek-ai-DeepSeek-V4-Flash-0731",
    "gemma4": "google-gemma-4-31B-it google-gemma-4-31B-it-interleaved",
    "gigachat3": "GigaChat3-10B-A1.8B",
    "gigachat3.1": "GigaChat3.1-10B-A1.8B",
    "glm": "GLM-4.6 GLM-4.7-Flash Spark2.5 inclusionai-ling-3.0-flash poolside-Laguna-S-2.1"
    " poolside-Laguna-XS-2.1 poolside-Laguna-XS.2",
    "granite3": "ibm-granite-granite-3.3-2B-Instruct",
    "hermes": "Bielik-11B-v3.0-Instruct MiMo-VL NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use"
    " NousResearch-Hermes-3-Llama-3.1-8B-tool_use Qwen-QwQ-32B Qwen-Qwen2.5-7B-Instruct Qwen-Qwen3-0.6B"
    " Reka-Edge ibm-granite-granite-4.0 ibm-granite-granite-4.1",
    "kimi-k2": "Kimi-K2-Instruct Kimi-K2-Thinking moonshotai-Kimi-K2",
    "kimi-k3": "Kimi-K3",
    "lfm2": "LFM2-8B-A1B LFM2.5-8B-A1B LFM2.5-Instruct",
    "llama3": "meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct"
    " meta-llama-Llama-3.3-70B-Instruct",
    "minimax-m2": "MiniMax-M2",
    "minimax-m3": "MiniMax-M3",
    "mistral": "Mistral-Small-3.2-24B-Instruct-2506 mistralai-Ministral-3-14B-Reasoning-2512"
    " mistralai-Mistral-Nemo-Instruct-2407 unsloth-mistral-Devstral-Small-2507",
    "minicpm5": "openbmb-MiniCPM5-1B",
    "seed": "ByteDance-Seed-OSS",
    "solar": "upstage-Solar-Open-100B",
    "xml": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 Qwen3-Coder Qwen3.5-4B StepFun3.5-Flash",
    "-": "HuggingFaceTB-SmolLM3-3B google-gemma-2-2b-it llama-cpp-rwkv-world microsoft-Phi-3.5-mini-instruct"
    " openai-gpt-oss-120b CohereForAI-c4ai-command-r-plus-tool_use"
    " fireworks-ai-llama-3-firefunction-v2 meetkai-functionary-medium-v3.2 muse-glimmer",
}
# Of those in DERIVED, which have a mark that looks like a call's.
NOTICED = {"NVIDIA-Nemotron-Nano-v2", "tencent-Hy3"}
UNREAD = {
    "CohereForAI-c4ai-command-r-plus-tool_use", "fireworks-ai-llama-3-firefunction-v2",
    "meetkai-functionary-medium-v3.2", "muse-glimmer",
}  # fmt: skip


def test_table_knows_the_models_own_templates() -> None:
    found: dict[str, set[str]] = {}
    for name in template_names():
        row = format_of(template(name))
        found.setdefault(row.name if row else "-", set()).add(name)

    expected = {name: set(models.split()) for name, models in EXPECTED.items()}
    expected["-"] |= DERIVED
    assert found == expected


def test_calls_that_nobody_reads_are_noticed_in_a_template() -> None:
    assert {name for name in template_names() if unread_marks(template(name))} == UNREAD | NOTICED


OPEN_FUNCTION = r"<tool_call>\s*<function=(?P<name>\w+)>"
OPEN_GEMMA = r"<\|tool_call>call:(?P<name>\w+)"
PARAMETER = r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>"


@pytest.mark.parametrize(
    "calls, expected",
    [
        ({"open": "<call>\n", "close": "\n</call>", "content": "json"}, ("declared", "<call>")),
        (
            {"open_pattern": OPEN_FUNCTION, "close": "</tool_call>", "content": "xml-inline",
             "content_args": {"tag_pattern": PARAMETER}},
            ("xml", "<tool_call>"),
        ),
        ({"open_pattern": OPEN_GEMMA, "close": "<tool_call|>", "content": "json"}, ("gemma4", "<|tool_call>")),
        ({"open_pattern": "<x>", "close": "</x>", "content": "kv-lines"}, None),
    ],
)  # fmt: skip
def test_model_declares_its_format(calls: object, expected: tuple[str, str] | None) -> None:
    thinking = {"open": "<mm>\n", "close": "</mm>", "content": "text"}

    found = declared_format({"fields": {"thinking": thinking, "tool_calls": calls}})

    assert (found and (found.name, found.begins[0])) == expected
    assert found is None or (found.think, found.thought) == ("<mm>", "</mm>")


@pytest.mark.parametrize("declared", [None, {}, {"fields": {}}, {"fields": {"content": {}}}, "x"])
def test_declaration_without_calls_says_nothing(declared: object) -> None:
    assert declared_format(declared) is None


def test_declaration_is_read_beside_the_tokenizer(tmp_path: Path) -> None:
    calls = {"open": "<call>", "close": "</call>", "content": "json"}
    declared = {"fields": {"tool_calls": calls}}
    config = {"chat_template": "{{ messages }}", "response_template": declared}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    found = template_in(tmp_path)

    assert found is not None
    assert found.answers == declared
