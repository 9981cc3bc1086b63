"""Qwen3 on its own vocabulary and template: what it thought is forgotten when the user speaks again."""

import random

import pytest

from segue.dialects.chatml import QWEN3
from segue.dialects.family import TokenDialect
from segue.seams.history import Turn
from segue.seams.model import Scene
from segue.seams.prompt import Head
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.requests import ReasoningConfig
from tests.contracts.dialect import (
    TOOLS,
    call,
    cold,
    flat,
    heard,
    message,
    output,
    read,
    reasoning,
    turn_after,
)
from tests.dialects import templates
from tests.dialects.templates import conversation, encoded_whole, from_template, head_of, shown

SPECIALS = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return templates.vocabulary("qwen3")


@pytest.fixture(scope="module")
def dialect(vocabulary: Vocabulary) -> TokenDialect:
    return TokenDialect(QWEN3, vocabulary)


def test_conversation_is_written_as_the_models_own_template_does(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    template = templates.template_of("qwen3")
    rng = random.Random(3)
    for _ in range(250):
        talk, rounds = conversation(rng)
        head, more = head_of(rng, talk)
        items = [item for given, wrote in rounds for item in (*given, *wrote)]
        expected = from_template(template, messages=talk, **more)

        prompt = flat(dialect.render(Scene(head, None, tuple(items))).prompt)

        assert prompt.tolist() == encoded_whole(vocabulary, expected, SPECIALS)


def test_chain_is_written_as_the_models_own_template_does(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    """Turn by turn with kept ids, warm and cold, the prompt says what the template's does. The ids may differ: an
    encoder would join the cue's newline with spaces that the model has sampled behind it."""
    template = templates.template_of("qwen3")
    rng = random.Random(4)
    for _ in range(100):
        talk, rounds = conversation(rng)
        head, more = head_of(rng, talk)
        past: Turn | None = None
        for given, wrote in rounds[:-1]:
            scene = Scene(head, past, tuple(given))
            past = turn_after(dialect, scene, dialect.write(wrote))
        scene = Scene(head, past, tuple(rounds[-1][0]))
        expected = from_template(template, messages=talk, **more)

        rendered = dialect.render(scene)

        assert shown(vocabulary, flat(rendered.prompt), SPECIALS) == expected
        assert flat(dialect.render(cold(scene)).prompt) == flat(rendered.prompt)


def test_loop_of_calls_keeps_its_thoughts_and_encodes_only_what_is_new(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    head = Head(tools=TOOLS)
    parsed = dialect.write([reasoning("Hm."), call("look", "{}")])
    first = turn_after(dialect, Scene(head, None, (message("user", "Hi"),)), parsed)
    second = turn_after(dialect, Scene(head, first, (output("1"),)), parsed)

    rendered = dialect.render(Scene(head, second, (output("2"),)))

    new = dialect.render(Scene(Head(), None, (output("2"),))).context.length
    assert rendered.tokens_tokenized == new


def test_only_what_follows_the_forgotten_thought_is_rendered_again(dialect: TokenDialect) -> None:
    head = Head(tools=TOOLS)
    parsed = dialect.write([reasoning("Hm."), call("look", "{}")])
    question = Scene(head, None, (message("user", "Hi"),))
    first = turn_after(dialect, question, parsed)
    second = turn_after(dialect, Scene(head, first, (output("1"),)), parsed)

    rendered = dialect.render(Scene(head, second, (output("2"), message("user", "And?"))))

    again = [output("1"), output("2"), message("user", "And?")]
    length = sum(dialect.render(Scene(Head(), None, (one,))).context.length for one in again)
    # Both outputs stand alone here, because the model spoke between them.
    assert rendered.tokens_tokenized == length
    assert rendered.tokens_reused > dialect.render(question).context.length


def test_request_without_effort_begins_with_an_empty_thought(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    head = Head(reasoning=ReasoningConfig(effort="none"))
    scene = Scene(head, None, (message("user", "Hi"),))
    template = templates.template_of("qwen3")
    talk = [{"role": "user", "content": "Hi"}]
    expected = from_template(template, messages=talk, enable_thinking=False)

    rendered = dialect.render(scene)

    assert flat(rendered.prompt).tolist() == encoded_whole(vocabulary, expected, SPECIALS)
    answer = dialect.write([message("assistant", "Hello")])
    assert [one.text for one in heard(read(dialect, scene, [rendered.lead, answer]))] == ["Hello"]
    # In history it is gone when the user speaks again, as in the template.
    past = turn_after(dialect, scene, rendered.lead + answer)
    after = dialect.render(Scene(head, past, (message("user", "So?"),)))
    talk += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "So?"}]
    expected = from_template(template, messages=talk, enable_thinking=False)
    assert flat(after.prompt).tolist() == encoded_whole(vocabulary, expected, SPECIALS)
