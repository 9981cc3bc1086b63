"""Recorded sessions become requests with exactly their sharing."""

from __future__ import annotations

from collections import Counter

from segue_bench.sessions import (
    MESSAGE_TOKENS,
    Answered,
    Said,
    SeededText,
    Session,
    SessionTurn,
    load_sessions,
    plan,
)

SESSION = Session(
    "one",
    tools=600,
    system=400,
    turns=[
        SessionTurn(-1, 0, 2_000, 100, 0),
        SessionTurn(0, 1_984, 3_000, 100, 5),
        SessionTurn(1, 2_944, 4_000, 100, 9),
        # Keeps the first turn and its answer, and some of what came then.
        SessionTurn(2, 2_600, 2_900, 100, 12),
        # Keeps less than the instructions.
        SessionTurn(3, 128, 2_000, 100, 20),
        SessionTurn(1, 2_944, 3_500, 100, 30),
    ],
)


def test_kinds_and_what_a_chain_sends() -> None:
    steps = plan(SESSION)
    assert [one.kind for one in steps] == [
        "root",
        "continuation",
        "continuation",
        "reset",
        "reset",
        "fork",
    ]
    assert [one.parent for one in steps] == [None, 0, 1, 0, None, 1]
    assert [len(one.new) for one in steps] == [1, 1, 1, 2, 1, 1]
    assert steps[3].history[:2] == (*steps[0].history, Answered(0, 100))
    cut = steps[3].history[2]
    assert isinstance(cut, Said)
    assert cut.source == "one 1"
    assert cut.tokens < 900
    assert steps[4].head != steps[0].head


def test_prompts_are_as_long_as_they_were() -> None:
    """Of all recorded turns, also when everything is sixteen times shorter."""
    kinds: Counter[str] = Counter()
    for scale in (1, 16):
        total, meant = 0, 0
        for session in load_sessions():
            for turn, step in zip(session.turns, plan(session, scale), strict=True):
                kinds[step.kind] += 1
                total += step.head.tokens
                total += sum(part.tokens + MESSAGE_TOKENS for part in step.history)
                meant += turn.input // scale
                before = step.history[: len(step.history) - len(step.new)]
                if step.parent is not None:
                    assert isinstance(before[-1], Answered)
                    assert before[-1].step == step.parent
        assert 0.99 < total / meant < 1.01
    assert kinds["continuation"] > 0.9 * kinds.total()
    assert min(kinds["root"], kinds["reset"]) > 200


def test_cut_text_is_the_beginning_of_the_whole() -> None:
    texts = SeededText(["ant", "bee", "cat"])
    whole = texts.text(Said("a", 50))
    assert len(whole.split()) == 50
    assert whole.startswith(texts.text(Said("a", 20)) + " ")
    assert texts.text(Said("b", 50)) != whole
