"""Llama 3 on its own vocabulary and template."""

import json
import random

import pytest

from segue.dialects.choose import choose
from segue.dialects.family import TokenDialect
from segue.dialects.llama3 import LLAMA3
from segue.seams.model import Ids, Scene
from segue.seams.prompt import Head
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.items import Item
from tests.contracts.dialect import OFFERING, TOOLS, Heard, call, flat, heard, message, output, read
from tests.dialects import templates
from tests.dialects.templates import CHAT_TOOLS, ROOT_AT, encoded_whole, from_template, words
from tests.models import assets

BEGIN = "<|begin_of_text|>"
SPECIALS = [BEGIN, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return templates.vocabulary("llama3_2")


@pytest.fixture(scope="module")
def dialect(vocabulary: Vocabulary) -> TokenDialect:
    return TokenDialect(LLAMA3, vocabulary)


@pytest.mark.parametrize("in_user", [True, False])
def test_conversation_is_written_as_the_models_own_template_does(
    vocabulary: Vocabulary, dialect: TokenDialect, in_user: bool
) -> None:
    """With the tools in the first message of the user, and in the system's block where there is no such message."""
    template = templates.template_of("llama3_2")
    rng = random.Random(5)
    for _ in range(150):
        talk: list[dict[str, object]] = []
        items: list[Item] = []
        system = rng.choice([None, words(rng)])
        if system is not None:
            talk.append({"role": "system", "content": system})
        tools = rng.choice([None, CHAT_TOOLS])
        for n in range(rng.randint(1, 4)):
            if n or in_user:
                text = words(rng)
                talk.append({"role": "user", "content": text})
                items.append(message("user", text))
            for _ in range(rng.randint(0, 2)):
                arguments, out = {"q": words(rng)}, words(rng)
                called = [{"function": {"name": "look", "arguments": arguments}}]
                talk.append({"role": "assistant", "tool_calls": called})
                talk.append({"role": "tool", "content": out})
                items.append(call("look", json.dumps(arguments, ensure_ascii=False)))
                items.append(output(out))
            parsed = words(rng)
            talk.append({"role": "assistant", "content": parsed})
            items.append(message("assistant", parsed))
        head = Head(instructions=system, tools=TOOLS) if tools else Head(instructions=system)
        expected = from_template(
            template, messages=talk, tools=tools, bos_token=BEGIN, tools_in_user_message=in_user
        )

        prompt = flat(dialect.render(Scene(head, None, tuple(items), root_at=ROOT_AT)).prompt)

        assert prompt.tolist() == encoded_whole(vocabulary, expected, SPECIALS)


@pytest.mark.parametrize("name", ["3.1-8B", "3.3-70B"])
def test_day_that_a_template_has_built_in_is_the_day_of_every_prompt(
    vocabulary: Vocabulary, name: str
) -> None:
    template = assets.template(f"meta-llama-Llama-{name}-Instruct")
    dialect = choose(templates.folder("llama3_2"), vocabulary, template)
    expected = from_template(
        template,
        messages=[{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}],
        tools=CHAT_TOOLS,
        bos_token=BEGIN,
    )

    scene = Scene(
        Head(instructions="Be.", tools=TOOLS), None, (message("user", "Hi"),), root_at=ROOT_AT
    )
    prompt = flat(dialect.render(scene).prompt)

    assert "Today Date: 26 Jul 2024" in expected
    assert prompt.tolist() == encoded_whole(vocabulary, expected, SPECIALS)
    assert dialect.fingerprint == TokenDialect(LLAMA3, vocabulary).fingerprint


CALL = '{"name": "look", "parameters": {"q": "<b>"}}'
ARGUMENTS = '{"q": "<b>"}'
FOUND = Heard("function", ARGUMENTS, "look")

# (what the model writes, what is heard)
STORIES: list[tuple[str, list[Heard]]] = [
    ("Hello", [Heard("message", "Hello")]),
    (CALL, [FOUND]),
    (CALL + "; " + CALL, [FOUND, FOUND]),
    (CALL + "\n" + CALL, [FOUND, FOUND]),
    (CALL + "\n\nSo.", [FOUND, Heard("message", "So.")]),
    ("<|python_tag|>" + CALL, [FOUND]),
    ("I look.<|python_tag|>" + CALL, [Heard("message", "I look."), FOUND]),
    ("<|python_tag|>print(1)", [Heard("message", "print(1)")]),
    (CALL.replace("look", "fs.read"), [Heard("function", ARGUMENTS, "read", "fs", True)]),
    (CALL.replace("parameters", "arguments"), [FOUND]),
    ('{"type": "function", ' + CALL[1:], [FOUND]),
    ('{"type": "function", "function": ' + CALL + "}", [FOUND]),
    # Not a call: given back as it was.
    (
        "I look:\n```json\n" + CALL + "\n```",
        [Heard("message", "I look:\n```json\n" + CALL + "\n```")],
    ),
    ("```\n" + CALL + "\n```", [Heard("message", "```\n" + CALL + "\n```")]),
    (CALL.replace("look", "other"), [Heard("message", CALL.replace("look", "other"))]),
    ('{"answer": 1}', [Heard("message", '{"answer": 1}')]),
    ("{1, 2}", [Heard("message", "{1, 2}")]),
    ("```python\nx = {}\n```", [Heard("message", "```python\nx = {}\n```")]),
    ('```json\n{"a": 1}\n```', [Heard("message", '```json\n{"a": 1}\n```')]),
]


def sampled(vocabulary: Vocabulary, text: str) -> list[int]:
    return encoded_whole(vocabulary, text, ["<|python_tag|>"])


@pytest.mark.parametrize("text, expected", STORIES)
def test_answer_is_heard(
    vocabulary: Vocabulary, dialect: TokenDialect, text: str, expected: list[Heard]
) -> None:
    assert heard(read(dialect, OFFERING, [sampled(vocabulary, text)])) == expected


def test_json_is_text_where_no_tools_are_offered(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    parsed = read(dialect, Scene(Head(), None, ()), [sampled(vocabulary, CALL)])

    assert heard(parsed) == [Heard("message", CALL)]


def test_first_letters_of_an_object_that_is_no_call_are_not_held_back(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    reader = dialect.reader(OFFERING)
    parsed = reader.feed(Ids(vocabulary.encode('{"answer": [1, 2')))

    assert len(parsed) > 4


def test_what_is_written_is_read_back(dialect: TokenDialect) -> None:
    items = [message("assistant", "I look."), call("look", ARGUMENTS), call("look", ARGUMENTS)]

    parsed = read(dialect, OFFERING, [dialect.write(items)])

    assert heard(parsed) == [Heard("message", "I look."), FOUND, FOUND]
