"""What a family forgets, and what stays warm then."""

import random

import pytest

from segue.dialects.chatml import QWEN3
from segue.dialects.family import TokenDialect
from segue.seams.history import Round, Unfinished, Warm, ancestors
from segue.seams.model import Scene
from segue.seams.prompt import Head
from segue.wire.items import Item
from tests.contracts.dialect import (
    TOOLS,
    call,
    cold,
    flat,
    message,
    output,
    reasoning,
    smollm2,
    turn_after,
)

HEAD = Head(tools=TOOLS)


@pytest.fixture(scope="module")
def dialect() -> TokenDialect:
    return TokenDialect(QWEN3, smollm2(texts=("<think>", "</think>")))


def loop(dialect: TokenDialect, *givens: tuple[Item, ...]) -> Scene:
    """A chain in which the model thinks and calls behind each but the last of these."""
    parsed = dialect.write([reasoning("Hm."), call("look", "{}")])
    scene = Scene(HEAD, None, givens[0])
    for given in givens[1:]:
        scene = Scene(HEAD, turn_after(dialect, scene, parsed), given)
    return scene


def test_question_behind_a_loop_is_rendered_from_the_first_thought_on(
    dialect: TokenDialect,
) -> None:
    asked, answered = (message("user", "Hi"),), (output("1"),)
    scene = loop(dialect, asked, answered, answered, (output("2"), message("user", "And?")))
    first = dialect.render(Scene(HEAD, None, asked)).context.length

    warm, bare = dialect.render(scene), dialect.render(cold(scene))

    assert flat(warm.prompt) == flat(bare.prompt)
    assert bare.tokens_tokenized - warm.tokens_tokenized == first


def test_second_question_finds_the_first_ones_prompt_warm(dialect: TokenDialect) -> None:
    """What was forgotten once needs not be forgotten again: only the last loop is rendered anew."""
    one, two = (message("user", "One " * 50),), (output("1"), message("user", "Two"))
    before = loop(dialect, one, two)
    scene = loop(dialect, one, two, (output("2"), message("user", "Three")))

    rendered = dialect.render(scene)

    assert rendered.tokens_reused > dialect.render(before).context.length
    assert flat(rendered.prompt) == flat(dialect.render(cold(scene)).prompt)


@pytest.mark.parametrize("is_asked", [True, False])
def test_recalled_prompt_is_used_only_if_nothing_in_it_is_forgotten(
    dialect: TokenDialect, is_asked: bool
) -> None:
    """For clients that send everything again: leading items that were rendered before."""
    leading = (message("user", "Hi"), reasoning("Hm."), call("look", "{}"), output("1"))
    later = (call("look", "{}"), output("2"), *((message("user", "And?"),) if is_asked else ()))
    context = dialect.render(Scene(HEAD, None, leading)).context
    past = Unfinished(None, (Round(leading),), Warm(dialect.fingerprint, HEAD, context))

    bare = dialect.render(Scene(HEAD, None, (), (Round(leading), Round(later))))
    rendered = dialect.render(Scene(HEAD, past, later))

    assert flat(rendered.prompt) == flat(bare.prompt)
    assert (rendered.tokens_reused == 0) is is_asked


def test_thoughts_of_rounds_inside_one_turn_are_forgotten_too(dialect: TokenDialect) -> None:
    rng = random.Random(9)
    for _ in range(30):
        givens = [
            rng.choice([(output("1"),), (message("user", "So?"),), (reasoning("x"), output("2"))])
            for _ in range(rng.randint(2, 6))
        ]
        scene = loop(dialect, (message("user", "Hi"),), *givens)
        past = scene.past
        assert past is not None
        rounds = tuple(round for turn in ancestors(past) for round in turn.rounds)
        as_rounds = Scene(HEAD, None, scene.given, rounds)

        assert flat(dialect.render(as_rounds).prompt) == flat(dialect.render(scene).prompt)
