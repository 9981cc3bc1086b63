"""Qwen3 on its own vocabulary and template: what it thought is forgotten when the user speaks again."""

import json
import random

import pytest

from segue.dialects.chatml import QWEN3, ChatmlDialect
from segue.dialects.vocabulary import Vocabulary
from segue.turn.values import Head, Scene, Turn
from segue.wire.items import Item
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
from tests.dialects.templates import CHAT_TOOLS, encoded_whole, from_template, shown, words

SPECIALS = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return templates.vocabulary("qwen3")


@pytest.fixture(scope="module")
def dialect(vocabulary: Vocabulary) -> ChatmlDialect:
    return ChatmlDialect(vocabulary, QWEN3)


Talk = list[dict[str, object]]


def model_turn(rng: random.Random, *, is_calling: bool) -> tuple[list[Item], dict[str, object]]:
    """What the model may say in one go: a thought perhaps, a text perhaps, and calls or not."""
    thought, text = words(rng).strip("\n"), words(rng).lstrip()
    text = text or ("" if is_calling else "So.")
    arguments = [{"q": words(rng), "n": n} for n in range(rng.randint(1, 2) if is_calling else 0)]
    items: list[Item] = []
    if thought:
        items.append(reasoning(thought))
    if text:
        items.append(message("assistant", text))
    items.extend(call("look", json.dumps(one, ensure_ascii=False)) for one in arguments)
    said: dict[str, object] = {"role": "assistant", "content": text, "reasoning_content": thought}
    if arguments:
        said["tool_calls"] = [{"function": {"name": "look", "arguments": a}} for a in arguments]
    return items, said


def conversation(rng: random.Random) -> tuple[Talk, list[tuple[list[Item], list[Item]]]]:
    """Some questions, each with a loop of calls behind it: as chat messages, and as rounds."""
    talk: Talk = []
    rounds: list[tuple[list[Item], list[Item]]] = []
    for _ in range(rng.randint(1, 3)):
        text = words(rng)
        talk.append({"role": "user", "content": text})
        given = [message("user", text)]
        for is_calling in [*([True] * rng.randint(0, 3)), False]:
            wrote, said = model_turn(rng, is_calling=is_calling)
            talk.append(said)
            rounds.append((given, wrote))
            calls = said.get("tool_calls", [])
            assert isinstance(calls, list)
            outputs = [words(rng) for _ in calls]
            talk.extend({"role": "tool", "content": out} for out in outputs)
            given = [output(out) for out in outputs]
    # It ends where the model is to speak: behind the outputs of the last loop, or the last question.
    while talk[-1]["role"] == "assistant":
        talk.pop()
        given, _ = rounds.pop()
    return talk, [*rounds, (given, [])]


def head_of(rng: random.Random, talk: Talk) -> tuple[Head, dict[str, object]]:
    system = rng.choice([None, "Be brief."])
    if system:
        talk.insert(0, {"role": "system", "content": system})
    if rng.random() < 0.5:
        return Head(instructions=system), {}
    return Head(instructions=system, tools=TOOLS), {"tools": CHAT_TOOLS}


def test_conversation_is_written_as_the_models_own_template_does(
    vocabulary: Vocabulary, dialect: ChatmlDialect
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
    vocabulary: Vocabulary, dialect: ChatmlDialect
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
    vocabulary: Vocabulary, dialect: ChatmlDialect
) -> None:
    head = Head(tools=TOOLS)
    said = dialect.write([reasoning("Hm."), call("look", "{}")])
    first = turn_after(dialect, Scene(head, None, (message("user", "Hi"),)), said)
    second = turn_after(dialect, Scene(head, first, (output("1"),)), said)

    rendered = dialect.render(Scene(head, second, (output("2"),)))

    new = dialect.render(Scene(Head(), None, (output("2"),))).context.length
    assert rendered.tokens_tokenized == new


def test_only_what_follows_the_forgotten_thought_is_rendered_again(dialect: ChatmlDialect) -> None:
    head = Head(tools=TOOLS)
    said = dialect.write([reasoning("Hm."), call("look", "{}")])
    question = Scene(head, None, (message("user", "Hi"),))
    first = turn_after(dialect, question, said)
    second = turn_after(dialect, Scene(head, first, (output("1"),)), said)

    rendered = dialect.render(Scene(head, second, (output("2"), message("user", "And?"))))

    again = [output("1"), output("2"), message("user", "And?")]
    length = sum(dialect.render(Scene(Head(), None, (one,))).context.length for one in again)
    # Both outputs stand alone here, because the model spoke between them.
    assert rendered.tokens_tokenized == length
    assert rendered.tokens_reused > dialect.render(question).context.length


def test_request_without_effort_begins_with_an_empty_thought(
    vocabulary: Vocabulary, dialect: ChatmlDialect
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
