"""Is the longest known beginning of a prompt found, with its digest, and nothing that the engine does not have?"""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from segue.dialects.template import template_dialect
from segue.engine_sessions.frames import id_bytes
from segue.engine_sessions.known import KnownTurn, KnownTurns, new_digest
from segue.seams.model import Scene
from segue.seams.prompt import NO_TOKENS, Head, Tokens, id_array
from segue.turn.commit import warm_after
from segue.vocabularies.chat_template import ChatTemplate
from tests.contracts.dialect import TOOLS, message, turn_after
from tests.dialects import templates
from tests.engines.asking import tokens

SCOPE = ("alice", None)


def told(
    known: KnownTurns, prompt: Tokens, sampled: list[int], handle: int, *, is_ahead: bool = False
) -> KnownTurn:
    turn = KnownTurn(prompt, SCOPE, known.find(prompt, SCOPE), is_ahead=is_ahead)
    turn.handle = handle
    known.add(turn)
    turn.sampled.extend(sampled)
    known.grown(turn, len(sampled))
    return turn


def test_answer_that_was_cut_is_known_as_far_as_it_stands() -> None:
    known = KnownTurns()
    prompt = tokens([1, 2, 3])
    told(known, prompt, [4, 5, 6], 9)
    begins = known.find(prompt.plus(id_array([4, 5, 7, 8])), SCOPE)
    assert (begins.handle, begins.length) == (9, 5)
    assert begins.data == id_bytes(id_array([7, 8]))


def test_same_ids_in_other_nodes_are_sent_as_a_whole() -> None:
    known = KnownTurns()
    told(known, tokens([1, 2, 3]), [4], 9)
    begins = known.find(tokens([1, 2, 3], [4]), SCOPE)
    assert (begins.handle, begins.length) == (0, 0)


def test_turn_of_a_model_with_nothing_but_its_template_sends_only_what_is_new() -> None:
    text = ChatTemplate(templates.template_of("qwen3"), end="<|im_end|>")
    dialect = template_dialect(templates.vocabulary("qwen3"), text)
    known, past, before = KnownTurns(), None, 0
    for handle in range(1, 5):
        question = message("user", f"Question {handle} " + "word " * 50)
        scene = Scene(Head(tools=TOOLS), past, (question,), root_at=templates.ROOT_AT)
        rendered = dialect.render(scene)
        assert isinstance(rendered.prompt, Tokens)
        assert known.find(rendered.prompt, SCOPE).length >= before
        before = rendered.prompt.length
        sampled = dialect.write((message("assistant", "So it is."),)).tolist()
        told(known, rendered.prompt, sampled, handle)
        turn = turn_after(dialect, scene, sampled)
        warm = warm_after(dialect.fingerprint, scene.head, rendered, turn.rounds[-1])
        past = replace(turn, warm=warm)


def test_another_owner_or_salt_knows_nothing() -> None:
    known = KnownTurns()
    prompt = tokens([1, 2, 3])
    told(known, prompt, [4], 9)
    for scope in (("bob", None), ("alice", "salt")):
        assert known.find(prompt.plus(id_array([4])), scope).handle == 0


def test_what_is_forgotten_goes_and_its_ids_are_no_longer_counted() -> None:
    known = KnownTurns(tokens_max=10)
    first = told(known, tokens([1] * 6), [2], 1)
    assert known.tokens == 7
    told(known, tokens([3] * 6), [4], 2)
    assert (known.tokens, len(known)) == (7, 1)
    assert known.find(first.prompt.plus(id_array([2])), SCOPE).handle == 0


def test_turns_of_few_ids_are_bounded_in_number() -> None:
    known = KnownTurns(turns_max=3)
    prompts = [tokens([number]) for number in range(9)]
    for number, prompt in enumerate(prompts, 1):
        told(known, prompt, [4], number)
    found = [known.find(prompt.plus(id_array([4])), SCOPE).handle for prompt in prompts]
    assert (found, known.tokens) == ([0] * 6 + [7, 8, 9], 6)


def read_ahead(prompt: Tokens, ids: list[int]) -> Tokens:
    """As `tools/ahead` makes a prompt: in one node that no other prompt has."""
    return Tokens(prompt, id_array(ids), prompt.length + len(ids))


def test_prompt_that_was_read_ahead_is_found_and_only_what_is_new_is_sent() -> None:
    known = KnownTurns()
    prompt, output = tokens([1, 2, 3]), list(range(100, 200))
    told(known, prompt, [4, 5], 1)
    for handle, end in ((2, 40), (3, 80)):
        begins = known.find(read_ahead(prompt, [4, 5, *output[:end]]), SCOPE)
        assert (begins.handle, len(begins.data)) == (handle - 1, 4 * 40)
        # One id is sampled after each, which nobody reads.
        told(known, read_ahead(prompt, [4, 5, *output[:end]]), [9], handle, is_ahead=True)
    whole = prompt.plus(id_array([4, 5])).plus(id_array([*output, 6]))
    begins = known.find(whole, SCOPE)
    assert (begins.handle, begins.length) == (3, 85)
    assert begins.data == id_bytes(id_array([*output[80:], 6]))
    # The first is worth nothing beside the second.
    assert (len(known), known.tokens) == (2, 5 + 83)
    told(known, whole, [7], 4)
    begins = known.find(whole.plus(id_array([7, 8])), SCOPE)
    assert (begins.handle, begins.data) == (4, id_bytes(id_array([8])))


def test_output_that_is_cut_costs_what_was_read_ahead_and_no_more() -> None:
    known = KnownTurns()
    prompt, output = tokens([1, 2, 3]), list(range(100, 200))
    told(known, prompt, [4, 5], 1)
    told(known, read_ahead(prompt, [4, 5, *output[:40]]), [], 2, is_ahead=True)
    told(known, read_ahead(prompt, [4, 5, *output[:80]]), [], 3, is_ahead=True)
    cut = prompt.plus(id_array([4, 5, *output[:60], 7]))
    assert (known.find(cut, SCOPE).handle, known.find(cut, SCOPE).length) == (3, 65)
    other = prompt.plus(id_array([4, 5, *output[:20], 7]))
    assert (known.find(other, SCOPE).handle, known.find(other, SCOPE).length) == (1, 5)


def test_what_was_read_ahead_goes_with_the_turn_that_it_goes_on_from() -> None:
    known = KnownTurns()
    prompt = tokens([1, 2, 3])
    turn = told(known, prompt, [4, 5], 1)
    told(known, read_ahead(prompt, [4, 5, 6]), [], 2, is_ahead=True)
    known.forget(turn)
    assert (len(known), known.tokens) == (0, 0)
    late = KnownTurn(read_ahead(prompt, [4, 5, 6, 7]), SCOPE, known.find(prompt, SCOPE))
    late.before = turn
    known.add(late)
    assert (len(known), known.tokens) == (0, 0)


@given(st.integers(0, 2**32))
def test_beginning_is_a_prefix_of_what_its_turn_has(seed: int) -> None:
    """Over random trees of turns: what is sent and what is known are the whole prompt, and the digest is its own."""
    source = random.Random(seed)
    known = KnownTurns(tokens_max=source.choice((30, 10_000)))
    turns: dict[int, list[int]] = {}
    ends: list[tuple[Tokens, list[int]]] = [(NO_TOKENS, [])]
    for handle in range(1, 25):
        prompt, answer = source.choice(ends)
        answer = answer[: source.randint(0, len(answer))]
        new = [source.randrange(3) for _ in range(source.randint(1, 6))]
        is_ahead = source.random() < 0.3
        if is_ahead:
            prompt = read_ahead(prompt, [*answer, *new])
        else:
            for part in (answer, new):
                prompt = prompt.plus(id_array(part))
        begins = known.find(prompt, SCOPE)
        whole = prompt.flat().tolist()
        has = turns[begins.handle][: begins.length] if begins.handle else []
        assert has == whole[: begins.length]
        assert begins.data == id_bytes(id_array(whole[begins.length :]))
        digest = new_digest()
        digest.update(id_bytes(id_array(whole[: begins.length])))
        assert begins.state.digest() == digest.digest()
        sampled = [source.randrange(3) for _ in range(source.randint(0, 5))]
        told(known, prompt, sampled, handle, is_ahead=is_ahead)
        turns[handle] = whole + sampled
        # What is read ahead has no children: its output goes on, or another one comes.
        if is_ahead:
            more = [source.randrange(3) for _ in range(4)]
            kept = new[: source.randint(0, len(new))] + more
            assert prompt.before is not None
            ends.append((prompt.before, [*answer, *kept]))
        else:
            ends.append((prompt, sampled))
