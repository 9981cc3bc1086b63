"""Mistral on the beginning of its own vocabulary, against what its own library has written."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from segue.dialects.family import TokenDialect
from segue.dialects.mistral import MISTRAL
from segue.errors import ServerFault
from segue.seams.model import Ids, Scene
from segue.seams.prompt import Head
from segue.vocabularies.load import vocabulary_from_file
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.items import Item
from segue.wire.requests import ToolChoiceName
from segue.wire.tools import CustomTool, FunctionTool
from tests.contracts.dialect import (
    OFFERING,
    TOOLS,
    Heard,
    Step,
    call,
    chain,
    cold,
    custom_call,
    flat,
    heard,
    message,
    output,
    read,
    reasoning,
    special_ids,
    tools_of,
)
from tests.dialects.templates import encoded_whole

GOLDEN = Path(__file__).parents[1] / "golden" / "mistral"
MARKS = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"]
DEFINITIONS = {
    "look": FunctionTool(
        name="look",
        description="Looks things up.",
        parameters=msgspec.Raw(b'{"type":"object","properties":{"q":{"type":"string"}}}'),
    ),
    "patch": CustomTool(name="patch", description="Applies a patch."),
    "read": FunctionTool(name="read"),
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_from_file(GOLDEN)


@pytest.fixture(scope="module")
def dialect(vocabulary: Vocabulary) -> TokenDialect:
    return TokenDialect(MISTRAL, vocabulary)


# --- writing --------------------------------------------------------------------------------------


def recorded() -> Iterator[tuple[Head, list[dict[str, Any]], list[int]]]:
    """What `golden/mistral/record.py` has recorded."""
    for line in (GOLDEN / "conversations.jsonl").read_text().splitlines():
        one = json.loads(line)
        tools = tools_of(*(DEFINITIONS[name] for name in one["tools"]))
        yield Head(tools=tools) if one["tools"] else Head(), one["talk"], one["ids"]


def items_of(told: dict[str, Any]) -> list[Item]:
    """A chat message as items."""
    if told["role"] == "tool":
        return [output(told["content"])]
    if told["role"] != "assistant":
        return [message(told["role"], told["content"])]
    content = told["content"]
    chunks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    thoughts = [reasoning(one["thinking"]) for one in chunks if one["type"] == "thinking"]
    texts = [message("assistant", one["text"]) for one in chunks if one.get("text")]
    calls = [one["function"] for one in told.get("tool_calls", [])]
    return [*thoughts, *texts, *(called(one["name"], one["arguments"]) for one in calls)]


def called(name: str, arguments: str) -> Item:
    if name == "patch":
        return custom_call(name, json.loads(arguments)["input"])
    return call(name, arguments)


def test_conversation_is_written_as_the_models_own_library_does(dialect: TokenDialect) -> None:
    count = 0
    for head, talk, expected in recorded():
        items = [item for told in talk for item in items_of(told)]

        prompt = flat(dialect.render(Scene(head, None, tuple(items))).prompt)

        assert prompt.tolist() == expected
        count += 1
    assert count >= 200


def test_chain_of_sampled_turns_is_what_the_library_writes(dialect: TokenDialect) -> None:
    """Warm and cold: what the model sampled is kept, and what was read of it is what it said."""
    for head, talk, expected in recorded():
        steps, given = [], list[Item]()
        for told in talk:
            if told["role"] != "assistant":
                given += items_of(told)
                continue
            steps.append(Step(tuple(given), tuple(dialect.write(items_of(told))), head))
            given = []
        if not steps:
            continue
        _, past = chain(dialect, steps)
        last = Scene(head, past, tuple(given))

        assert flat(dialect.render(last).prompt).tolist() == expected
        assert flat(dialect.render(cold(last)).prompt).tolist() == expected
        assert dialect.render(last).tokens_tokenized < len(expected)


def test_instructions_are_the_first_block_and_tools_stand_behind_all_of_the_systems(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    head = Head(instructions="Be.", tools=tools_of(DEFINITIONS["read"]))
    given = (message("developer", "So."), message("user", "Hi"))

    prompt = flat(dialect.render(Scene(head, None, given)).prompt)

    function = '{"name": "read", "description": "", "parameters": {}}'
    specials = ["<s>", *(f"[{slash}{name}]" for slash in ("", "/") for name in NAMES)]
    assert prompt.tolist() == encoded_whole(
        vocabulary,
        "<s>[SYSTEM_PROMPT]Be.[/SYSTEM_PROMPT][SYSTEM_PROMPT]So.[/SYSTEM_PROMPT]"
        f'[AVAILABLE_TOOLS][{{"type": "function", "function": {function}}}][/AVAILABLE_TOOLS]'
        "[INST]Hi[/INST]",
        specials,
    )


def test_texts_of_one_answer_are_one_text(vocabulary: Vocabulary, dialect: TokenDialect) -> None:
    items = [message("assistant", "One."), message("assistant", "Two.")]
    expected = [*vocabulary.encode("One.\n\nTwo."), vocabulary.special("</s>")]

    prompt = flat(dialect.render(Scene(Head(), None, tuple(items))).prompt)

    assert dialect.write(items).tolist() == expected
    assert prompt.tolist() == [vocabulary.special("<s>"), *expected]


@pytest.mark.parametrize(
    "arguments, written", [("", "{}"), (" {} ", "{}"), ('{"a": ', '"{\\"a\\": "'), ("[1]", '"[1]"')]
)
def test_arguments_are_written_as_json(
    vocabulary: Vocabulary, dialect: TokenDialect, arguments: str, written: str
) -> None:
    ids = dialect.write([call("look", arguments)])

    assert ids[:-1].tolist() == sampled(vocabulary, f"[TOOL_CALLS]look[ARGS]{written}")


NAMES = ("SYSTEM_PROMPT", "AVAILABLE_TOOLS", "INST")


# --- forced answers -------------------------------------------------------------------------------


def forced_scene(choice: object) -> Scene:
    head = msgspec.structs.replace(OFFERING.head, tool_choice=choice)
    return Scene(head, None, (message("user", "Hi"),), can_constrain=True)


def test_forced_call_of_one_tool_begins_with_its_name(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    scene = forced_scene(ToolChoiceName(type="function", name="look"))
    rendered = dialect.render(scene)

    assert rendered.lead.tolist() == sampled(vocabulary, "[TOOL_CALLS]look[ARGS]")
    assert rendered.schema is not None
    assert "q" in json.loads(rendered.schema)["properties"]
    answer = [*rendered.lead, *vocabulary.encode(ARGUMENTS)]
    assert heard(read(dialect, scene, [answer])) == [FOUND]


def test_forced_call_of_any_tool_is_held_to_a_schema(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    scene = forced_scene("required")
    rendered = dialect.render(scene)

    assert rendered.lead.tolist() == sampled(vocabulary, "[TOOL_CALLS]")
    assert rendered.schema is not None
    assert len(json.loads(rendered.schema)["anyOf"]) == len(TOOLS.offers)
    answer = [*rendered.lead, *vocabulary.encode(OLD_CALL)]
    assert heard(read(dialect, scene, [answer])) == [FOUND]


def test_nothing_is_forced_where_the_engine_cannot_be_held(dialect: TokenDialect) -> None:
    scene = msgspec.structs.replace(forced_scene("required"), can_constrain=False)
    rendered = dialect.render(scene)

    assert not rendered.lead
    assert rendered.schema is None


# --- reading --------------------------------------------------------------------------------------

ARGUMENTS = '{"q": "<b>"}'
CALL = "[TOOL_CALLS]look[ARGS]" + ARGUMENTS
OLD_CALL = '{"name": "look", "arguments": {"q": "<b>"}}'
FOUND = Heard("function", ARGUMENTS, "look")
HELLO = Heard("message", "Hello")

# (what the model writes, what is heard)
STORIES: list[tuple[str, list[Heard]]] = [
    ("Hello", [HELLO]),
    (CALL, [FOUND]),
    (CALL + CALL, [FOUND, FOUND]),
    ("Hello" + CALL, [HELLO, FOUND]),
    ("[THINK]Hm.[/THINK]Hello" + CALL, [Heard("reasoning", "Hm."), HELLO, FOUND]),
    ("[THINK]\n[/THINK]Hello", [HELLO]),
    ("[THINK]Hm." + CALL, [Heard("reasoning", "Hm."), FOUND]),
    ("[THINK]Hm.", [Heard("reasoning", "Hm.")]),
    ("[TOOL_CALLS] look[CALL_ID]abc[ARGS]" + ARGUMENTS, [FOUND]),
    ("[TOOL_CALLS]fs.read[ARGS]{}", [Heard("function", "{}", "read", "fs", True)]),
    ("[TOOL_CALLS]look[ARGS]", [Heard("function", "{}", "look")]),
    ("[TOOL_CALLS]other[ARGS]{}", [Heard("function", "{}", "other")]),
    ('[TOOL_CALLS]look[ARGS]"{\\"q\\": \\"<b>\\"}"', [FOUND]),
    ('[TOOL_CALLS]patch[ARGS]{"input": "a\\nb"}', [Heard("custom", "a\nb", "patch")]),
    # The older way.
    ("[TOOL_CALLS][" + OLD_CALL + ", " + OLD_CALL + "]", [FOUND, FOUND]),
    ("[TOOL_CALLS]" + OLD_CALL, [FOUND]),
    ("[TOOL_CALLS]look" + ARGUMENTS, [FOUND]),
    ("[TOOL_CALLS]other{}", [Heard("message", "other{}")]),
    # Not a call: given back as it was.
    (OLD_CALL, [Heard("message", OLD_CALL)]),
    (
        "Hello\n```json\n" + OLD_CALL + "\n```",
        [Heard("message", "Hello\n```json\n" + OLD_CALL + "\n```")],
    ),
    ("[TOOL_CALLS]print(1)", [Heard("message", "print(1)")]),
    ("Hello[TOOL_CALLS]print(1)" + CALL, [HELLO, Heard("message", "print(1)"), FOUND]),
    ("[TOOL_CALLS]" + "Hello" * 60, [Heard("message", "Hello" * 60)]),
    ('{"answer": 1}', [Heard("message", '{"answer": 1}')]),
]


def sampled(vocabulary: Vocabulary, text: str) -> list[int]:
    return encoded_whole(vocabulary, text, MARKS)


@pytest.mark.parametrize("text, expected", STORIES)
def test_answer_is_heard(
    vocabulary: Vocabulary, dialect: TokenDialect, text: str, expected: Sequence[Heard]
) -> None:
    assert heard(read(dialect, OFFERING, [sampled(vocabulary, text)])) == expected


def test_call_is_told_as_soon_as_its_name_is_whole(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    reader = dialect.reader(OFFERING)

    assert reader.feed(Ids(sampled(vocabulary, "[TOOL_CALLS]look"))) == []
    assert len(reader.feed(Ids(sampled(vocabulary, "[ARGS]")))) == 1
    assert len(reader.feed(Ids(sampled(vocabulary, '{"q": "a')))) > 2


def test_half_a_letter_in_a_name_does_not_reach_the_arguments(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    ids = sampled(vocabulary, CALL)
    ids.insert(ids.index(vocabulary.special("[ARGS]")), vocabulary.encode("\u1234")[0])

    assert heard(read(dialect, OFFERING, [ids])) == [FOUND]


def test_call_that_was_cut_is_cut_only_if_something_is_missing(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    for text, is_cut in ((CALL, False), (CALL[:-1], True)):
        parsed = read(dialect, OFFERING, [sampled(vocabulary, text)], is_cut=True)

        assert [one.is_cut for one in heard(parsed)] == [is_cut]


# --- the vocabulary -------------------------------------------------------------------------------


def test_special_tokens_of_a_tekken_file_have_their_names_and_places(
    vocabulary: Vocabulary,
) -> None:
    assert vocabulary.special("[ARGS]") == 32
    assert vocabulary.has_special("<SPECIAL_39>")
    assert vocabulary.bytes_of(40) == b"\0"
    assert special_ids(vocabulary).isdisjoint(vocabulary.encode("[ARGS]</s>"))


def test_tekken_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text('{"vocab": []}')

    with pytest.raises(ServerFault, match=r"tekken\.json"):
        vocabulary_from_file(tmp_path)
