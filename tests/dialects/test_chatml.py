"""ChatML on SmolLM2's vocabulary: how a prompt looks, and what is heard in an answer."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import jinja2.sandbox
import pytest
from hypothesis import assume, given, settings
from msgspec.structs import replace

from segue.dialects.chatml import SMOLLM2, SMOLLM2_SYSTEM
from segue.dialects.family import TokenDialect
from segue.seams.model import Ids, ItemClosed, ItemText, Parsed, Scene
from segue.seams.prompt import Head
from segue.vocabularies.gguf import read_gguf
from segue.vocabularies.load import vocabulary_from_gguf
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.effects import NO_EFFECTS, apply_effects
from segue.wire.items import CustomToolCall, FunctionCall, Item, Message, Reasoning
from segue_embedded.weights import find_weights
from tests.contracts.dialect import (
    BARE,
    OFFERING,
    TOOLS,
    Heard,
    all_ids,
    call,
    custom_call,
    flat,
    heard,
    item,
    message,
    output,
    read,
    reasoning,
    spoken,
    turn_after,
)
from tests.dialects.templates import CHAT_TOOLS

GOLDEN = Path(__file__).parents[1] / "golden"
SPECIAL = re.compile(r"(<\|im_start\|>|<\|im_end\|>)")


def smollm2() -> Path:
    path = find_weights("smollm2")
    return path


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_from_gguf(smollm2())


@pytest.fixture(scope="module")
def dialect(vocabulary: Vocabulary) -> TokenDialect:
    return TokenDialect(SMOLLM2, vocabulary)


def shown(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """The prompt as text, special tokens by name."""
    names = {vocabulary.special(text): text for text in ("<|im_start|>", "<|im_end|>")}
    return b"".join(
        names[id].encode() if id in names else vocabulary.bytes_of(id) for id in ids
    ).decode()


# --- against the templates of the models ----------------------------------------------------------


def from_template(template: str, **values: object) -> str:
    """As the usual libraries run a chat template."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return str(environment.from_string(template).render(add_generation_prompt=True, **values))


def encoded_whole(vocabulary: Vocabulary, text: str) -> list[int]:
    """The ids of the whole text, where special tokens are the only places at which it is cut."""
    ids: list[int] = []
    for part in SPECIAL.split(text):
        is_special = SPECIAL.fullmatch(part)
        ids.extend([vocabulary.special(part)] if is_special else vocabulary.encode(part))
    return ids


WORDS = [
    "Hello", " world", "\n", "\n\n", " ", "  ", "漢字", "😀", "é", "12", ".", "<", "<|im_end|>",
    "</think>", "<tool_call>", "\t", "\\n", '{"a": 1}', "'s", "def f():\n    pass",
]  # fmt: skip


def words(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(0, 6)))


def test_conversation_is_written_as_the_models_own_template_does(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    template = read_gguf(smollm2())["tokenizer.chat_template"]
    assert isinstance(template, str)
    rng = random.Random(1)
    for _ in range(200):
        roles = rng.choices(["user", "assistant", "system"], k=rng.randint(1, 6))
        talk = [{"role": role, "content": words(rng)} for role in roles]
        items = tuple(message(parsed["role"], parsed["content"]) for parsed in talk)
        expected = from_template(template, messages=talk)

        prompt = flat(dialect.render(Scene(Head(), None, items)).prompt)

        assert shown(vocabulary, prompt) == expected
        if "<|im_end|>" not in "".join(parsed["content"] for parsed in talk):
            assert prompt.tolist() == encoded_whole(vocabulary, expected)


def test_instructions_are_the_first_system_message(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    parsed = Scene(Head(instructions="Be brief."), None, (message("user", "Hi"),))
    led = Scene(Head(), None, (message("developer", "Be brief."), message("user", "Hi")))
    plain = Scene(Head(), None, (message("user", "Hi"),))

    assert dialect.render(parsed) == dialect.render(led)
    assert SMOLLM2_SYSTEM in shown(vocabulary, flat(dialect.render(plain).prompt))


def test_tools_calls_and_outputs_are_written_as_qwens_template_does(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    """The coder models' template doubles the braces of the example; the instruct models' does not."""
    template = (GOLDEN / "qwen2.5-coder.jinja").read_text()
    template = template.replace('{{\\"name', '{\\"name').replace("object>}}", "object>}")
    rng = random.Random(2)
    for _ in range(200):
        talk: list[dict[str, object]] = [{"role": "system", "content": words(rng)}]
        items: list[Item] = []
        for _ in range(rng.randint(1, 4)):
            text, parsed = words(rng), words(rng)
            arguments = [{"q": words(rng), "n": n} for n in range(rng.randint(0, 3))]
            outputs = [words(rng) for _ in arguments]
            called = [{"function": {"name": "look", "arguments": a}} for a in arguments]
            talk.append({"role": "user", "content": text})
            talk.append({"role": "assistant", "content": parsed, "tool_calls": called})
            talk.extend({"role": "tool", "content": out} for out in outputs)
            items.append(message("user", text))
            if parsed or not called:
                items.append(message("assistant", parsed))
            items.extend(call("look", json.dumps(a, ensure_ascii=False)) for a in arguments)
            items.extend(output(out) for out in outputs)
        head = Head(instructions=str(talk[0]["content"]), tools=TOOLS)

        prompt = flat(dialect.render(Scene(head, None, tuple(items))).prompt)

        assert shown(vocabulary, prompt) == from_template(template, messages=talk, tools=CHAT_TOOLS)


# --- what else is written -------------------------------------------------------------------------


def test_tool_choice_changes_no_prompt(dialect: TokenDialect) -> None:
    """Tools stay in the prompt when none may be called, so that its beginning stays."""
    prompts = [
        dialect.render(Scene(Head(tools=TOOLS, tool_choice=choice), None, ()))
        for choice in ("auto", "none", "required")
    ]

    assert prompts[0] == prompts[1] == prompts[2]


def test_model_turn_is_one_block(vocabulary: Vocabulary, dialect: TokenDialect) -> None:
    items = (
        reasoning("Hm."),
        message("assistant", "I look."),
        call("look", '{"q":1}'),
        call("read", "not json", "fs"),
        custom_call("patch", 'a "b"\n'),
        output("1"),
        output("2"),
    )

    text = shown(vocabulary, flat(dialect.render(Scene(Head(), None, items)).context))

    assert text.partition("<|im_end|>\n")[2] == (
        "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "look", "arguments": {"q":1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "fs.read", "arguments": "not json"}\n</tool_call>\n'
        '<tool_call>\n{"name": "patch", "arguments": {"input": "a \\"b\\"\\n"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


def test_what_the_model_cannot_see_is_told_in_words(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    picture = "data:image/png;base64,AAAA"
    parts = [
        {"type": "input_text", "text": "Look:"},
        {"type": "input_image", "image_url": picture},
        {"type": "input_image", "image_url": "cat.png"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AA"},
        {"type": "input_audio", "input_audio": {"data": "AAAA"}},
    ]
    items = (
        item("message", role="user", content=parts),
        item("computer_call_output", call_id="c", output={"image_url": picture}),
        item("image_generation_call", result="AAAA"),
    )

    text = shown(vocabulary, flat(dialect.render(Scene(Head(), None, items)).prompt))

    assert "Look:\n[image: image/png sent as data, which this model cannot see]" in text
    assert "[image: cat.png, which this model cannot see]" in text
    assert "[file: a.pdf, which cannot be read here]" in text
    assert "[audio: sent as data, which this model cannot hear]" in text
    assert '{"output": {"image_url": "image/png sent as data"}}' in text
    assert '"result": "[image, which this model cannot see]"' in text
    assert "AAAA" not in text


def test_only_new_items_are_encoded(vocabulary: Vocabulary, dialect: TokenDialect) -> None:
    first = Scene(Head(tools=TOOLS), None, (message("user", "Hi"),))
    past = turn_after(dialect, first, dialect.write([message("assistant", "Hello!")]))
    new = (output("42"),)

    rendered = dialect.render(Scene(first.head, past, new))

    alone = len(vocabulary.encode("user\n<tool_response>\n42\n</tool_response>")) + 3
    assert rendered.tokens_tokenized == alone
    assert rendered.tokens_reused == rendered.context.length - alone


def test_older_warmth_is_used_where_the_last_turn_has_none(dialect: TokenDialect) -> None:
    ids = dialect.write([message("assistant", "Hello!")])
    first = turn_after(dialect, Scene(Head(), None, (message("user", "Hi"),)), ids)
    second = turn_after(dialect, Scene(Head(), first, (message("user", "So?"),)), ids)
    whole = dialect.render(Scene(Head(), second, ()))

    half = dialect.render(Scene(Head(), replace(second, warm=None), ()))

    assert flat(half.prompt) == flat(whole.prompt)
    assert first.warm is not None
    assert first.warm.prompt.length < half.tokens_reused < whole.tokens_reused


# --- reading --------------------------------------------------------------------------------------


def answer(
    vocabulary: Vocabulary, dialect: TokenDialect, text: str, *, is_cut: bool = False
) -> list[Parsed]:
    return read(dialect, OFFERING, [vocabulary.encode(text)], is_cut=is_cut)


def function(text: str, name: str = "look") -> Heard:
    return Heard("function", text, name)


CALL = '<tool_call>\n{"name": "look", "arguments": {"q": "<b>"}}\n</tool_call>'
ARGUMENTS = '{"q": "<b>"}'

# (what the model writes, what is heard)
STORIES: list[tuple[str, list[Heard]]] = [
    ("", []),
    (" \n", []),
    ("Hello\n", [Heard("message", "Hello\n")]),
    ("\n\nHello", [Heard("message", "\n\nHello")]),
    ("a < b <think> c", [Heard("message", "a < b <think> c")]),
    ("<thi", [Heard("message", "<thi")]),
    ("a\n<tool", [Heard("message", "a\n<tool")]),
    ("<think>\nHm.\n</think>\n\nSo.", [Heard("reasoning", "Hm."), Heard("message", "So.")]),
    ("<think>\n\n</think>\n\nSo.", [Heard("message", "So.")]),
    ("<think>Hm", [Heard("reasoning", "Hm")]),
    ("<think>" + CALL + "</think>", [Heard("reasoning", CALL)]),
    (CALL, [function(ARGUMENTS)]),
    ("I look.\n\n" + CALL, [Heard("message", "I look."), function(ARGUMENTS)]),
    (CALL + "\nDone.", [function(ARGUMENTS), Heard("message", "Done.")]),
    (CALL + "\n" + CALL, [function(ARGUMENTS)] * 2),
    (f"a{CALL}b{CALL}", [Heard("message", "a"), function(ARGUMENTS), Heard("message", "b"), function(ARGUMENTS)]),
    # No end mark, at the end or before something else.
    (CALL.removesuffix("\n</tool_call>"), [function(ARGUMENTS)]),
    (CALL.removesuffix("}\n</tool_call>"), [function(ARGUMENTS)]),
    (CALL.removesuffix("</tool_call>") + CALL, [function(ARGUMENTS)] * 2),
    (CALL.removesuffix("</tool_call>") + "So.", [function(ARGUMENTS), Heard("message", "So.")]),
    # A brace too few, a brace too many.
    (CALL.replace("}}", "}"), [function(ARGUMENTS)]),
    (CALL.replace("}}", "}}}"), [function(ARGUMENTS)]),
    # Other shapes of the same.
    ('<tool_call>{"arguments": {"q": 1}, "name": "look"}</tool_call>', [function('{"q": 1}')]),
    ('<tool_call>{"name": "look"}</tool_call>', [function("{}")]),
    ('<tool_call>{"name": "look", "arguments": "{\\"q\\": 1}"}</tool_call>', [function('{"q": 1}')]),
    ('<tool_call>{"name": "look", "arguments": {}, "id": "}"}</tool_call>', [function("{}")]),
    # Who is called.
    (CALL.replace("look", "other"), [function(ARGUMENTS, "other")]),
    (CALL.replace("look", "fs.read"), [Heard("function", ARGUMENTS, "read", "fs", True)]),
    (
        '<tool_call>{"name": "patch", "arguments": {"input": "a\\n\\"b\\""}}</tool_call>',
        [Heard("custom", 'a\n"b"', "patch")],
    ),
    ('<tool_call>{"name": "patch", "arguments": {"diff": 1}}</tool_call>', [Heard("custom", '{"diff": 1}', "patch")]),
    # Not a call: given back as it was.
    ("the <tool_call> mark", [Heard("message", "the <tool_call> mark")]),
    ("a\n<tool_call>\n{look}\n</tool_call>", [Heard("message", "a\n<tool_call>\n{look}\n</tool_call>")]),
    ('<tool_call>\n{"name": "lo', [Heard("message", '<tool_call>\n{"name": "lo')]),
    ("<tool_call>" + CALL, [Heard("message", "<tool_call>"), function(ARGUMENTS)]),
    ("a <|im_end|> b", [Heard("message", "a <|im_end|> b")]),
]  # fmt: skip


@pytest.mark.parametrize("text, expected", STORIES)
def test_answer_is_heard(
    vocabulary: Vocabulary, dialect: TokenDialect, text: str, expected: list[Heard]
) -> None:
    assert heard(answer(vocabulary, dialect, text)) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Hel", Heard("message", "Hel", is_cut=True)),
        ("<think>\nHm", Heard("reasoning", "Hm", is_cut=True)),
        (CALL[: CALL.index("b>")], Heard("function", '{"q": "<', "look", is_cut=True)),
        (CALL[:-3], function(ARGUMENTS)),
        (
            '<tool_call>{"name": "patch", "arguments": {"input": "a\\nb\\',
            Heard("custom", "a\nb", "patch", is_cut=True),
        ),
    ],
)
def test_answer_that_was_cut_says_so(
    vocabulary: Vocabulary, dialect: TokenDialect, text: str, expected: Heard
) -> None:
    parsed = answer(vocabulary, dialect, text, is_cut=True)

    assert heard(parsed) == [expected]
    assert shown(vocabulary, all_ids(parsed)) == text + "<|im_end|>\n"


def test_stop_that_was_sampled_means_that_nothing_was_cut(dialect: TokenDialect) -> None:
    ids = dialect.write([message("assistant", "Hello")])

    assert heard(read(dialect, BARE, [ids], is_cut=True)) == [Heard("message", "Hello")]


def test_tokens_behind_the_stop_are_not_heard(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    ids = dialect.write([message("assistant", "Hello")]) + vocabulary.encode(" again")

    assert heard(read(dialect, BARE, [ids])) == [Heard("message", "Hello")]


def test_each_token_of_text_is_said_at_once(vocabulary: Vocabulary, dialect: TokenDialect) -> None:
    ids = vocabulary.encode("Hello world, here I am")
    reader = dialect.reader(BARE)
    reader.feed(Ids([ids[0]]))

    for id in ids[1:]:
        assert reader.feed(Ids([id])) == [ItemText(vocabulary.bytes_of(id).decode())]


def test_character_of_several_tokens_is_said_when_it_is_whole(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    ids = vocabulary.encode("a🦤b")
    assert len(ids) > 3

    parsed = read(dialect, BARE, [[id] for id in ids])

    assert [value.text for value in parsed if isinstance(value, ItemText)] == ["a", "🦤", "b"]


def test_arguments_are_streamed_as_written(vocabulary: Vocabulary, dialect: TokenDialect) -> None:
    parsed = answer(vocabulary, dialect, CALL.replace("<b>", "one two three four"))

    assert len([value for value in parsed if isinstance(value, ItemText)]) > 4


def test_ids_are_parted_at_the_items(vocabulary: Vocabulary, dialect: TokenDialect) -> None:
    parsed = answer(vocabulary, dialect, "I look.\n" + CALL + "\n" + CALL)
    parts = [shown(vocabulary, value.ids) for value in parsed if isinstance(value, ItemClosed)]

    assert parts == ["I look.", "\n" + CALL, "\n" + CALL]


def test_tool_that_an_earlier_item_brought_is_known(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    added = item("additional_tools", tools=[{"type": "custom", "name": "sed"}])
    past = turn_after(dialect, Scene(Head(), None, (added,)), None)
    effects = apply_effects(NO_EFFECTS, [added])
    text = '<tool_call>\n{"name": "sed", "arguments": {"input": "s/a/b/"}}\n</tool_call>'

    parsed = read(dialect, Scene(Head(), past, (), effects=effects), [vocabulary.encode(text)])

    assert heard(parsed) == [Heard("custom", "s/a/b/", "sed")]


def expected_of(items: Sequence[Item]) -> list[Heard]:
    """The items themselves, less the newlines that stand at a mark, and less blank text."""
    found: list[Heard] = []
    for n, value in enumerate(one.value for one in items):
        match value:
            case Reasoning():
                text = (value.content or [])[0].text.strip("\n")
                found.extend([Heard("reasoning", text)] if text.strip() else [])
            case Message():
                assert isinstance(value.content, str)
                text = value.content.lstrip("\n") if n else value.content
                text = text.rstrip("\n") if n + 1 < len(items) else text
                found.extend([Heard("message", text)] if text.strip() else [])
            case CustomToolCall():
                found.append(Heard("custom", value.input, value.name))
            case FunctionCall():
                is_known = value.namespace == "fs"
                space = value.namespace or None
                found.append(Heard("function", value.arguments, value.name, space, is_known))
            case _:
                raise AssertionError(value)
    return found


@settings(deadline=None, max_examples=100)
@given(items=spoken())
def test_what_is_written_is_read_back(dialect: TokenDialect, items: list[Item]) -> None:
    # An empty thought is not written; without it the message is the first.
    items = [
        i for i in items if not isinstance(i.value, Reasoning) or (i.value.content or [])[0].text
    ]
    for value in (one.value for one in items):
        if isinstance(value, Message):
            assume(not str(value.content).lstrip().startswith(("<think>", "</think>")))

    assert heard(read(dialect, OFFERING, [dialect.write(items)])) == expected_of(items)
