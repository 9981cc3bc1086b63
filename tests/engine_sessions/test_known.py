"""Is the longest known beginning of a prompt found, with its digest, and nothing that the engine does not have?"""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from segue.engine_sessions.frames import id_bytes
from segue.engine_sessions.known import KnownTurn, KnownTurns, new_digest
from segue.seams.prompt import NO_TOKENS, Tokens, id_array
from tests.engines.asking import tokens

SCOPE = ("alice", None)


def told(known: KnownTurns, prompt: Tokens, sampled: list[int], handle: int) -> KnownTurn:
    turn = KnownTurn(prompt, SCOPE, known.find(prompt, SCOPE))
    known.add(turn, handle)
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
        for part in (answer, [source.randrange(3) for _ in range(source.randint(1, 6))]):
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
        told(known, prompt, sampled, handle)
        turns[handle] = whole + sampled
        ends.append((prompt, sampled))
