"""How a turn ends: the client's leaving beats our own leaving, and both beat the model."""

from __future__ import annotations

import pytest
from msgspec import Raw

from segue.errors import EngineFailed, ServerFault
from segue.seams.model import Finish
from segue.turn.decide import Again, Await, End, decide
from segue.turn.notices import Append, Cancel, Drain, Notice, Steer
from segue.wire.codec import user_message

FINISHES = [Finish("stop"), Finish("length"), None]


@pytest.mark.parametrize(
    "finish, status, reason",
    [
        (Finish("stop"), "completed", None),
        (Finish("length"), "incomplete", "max_output_tokens"),
        (Finish("content_filter"), "incomplete", "content_filter"),
        (None, "failed", None),
    ],
)
def test_engines_last_word_ends_an_undisturbed_turn(
    finish: Finish | None, status: str, reason: str | None
) -> None:
    end = decide(finish, [])

    assert (end.status, end.reason) == (status, reason)


def test_engine_that_breaks_off_is_at_fault() -> None:
    assert isinstance(decide(None, []).error, EngineFailed)


@pytest.mark.parametrize("finish", FINISHES)
@pytest.mark.parametrize("notice, status", [(Cancel(), "cancelled"), (Drain(), "failed")])
def test_notice_is_stronger_than_the_engine(
    finish: Finish | None, notice: Notice, status: str
) -> None:
    end = decide(finish, [notice])

    assert end.status == status


def test_answers_of_our_own_tools_are_given_to_the_model() -> None:
    item = user_message("Found.")

    assert decide(Finish("stop"), [], answers=(item,)) == Again((item,))
    assert isinstance(decide(Finish("length"), [], answers=(item,)), End)
    assert isinstance(decide(Finish("stop"), [Cancel()], answers=(item,)), End)
    steered = decide(Finish("stop"), [Steer("s", Raw(b"[]"), ())], answers=(item,))
    assert steered == End("incomplete", reason="steered")


def test_limit_that_is_used_up_ends_a_turn_that_would_go_on() -> None:
    item = user_message("Found.")
    ended = End("incomplete", reason="max_output_tokens")

    assert decide(Finish("stop"), [], answers=(item,), is_used_up=True) == ended
    assert decide(Finish("stop"), [], is_waiting=True, is_used_up=True) == ended
    assert decide(Finish("stop"), [], is_used_up=True) == End("completed")


def test_drain_is_told_as_our_fault() -> None:
    error = decide(Finish("stop"), [Drain()]).error

    assert isinstance(error, ServerFault)
    assert "shutting down" in error.message


STEER = Steer("steer_1", Raw(b'"Stop."'), ())
OUTPUTS = Append(())


def test_steer_ends_a_round_that_was_broken_off_for_it() -> None:
    assert decide(None, [STEER]) == End("incomplete", reason="steered")


def test_model_that_finished_before_the_steer_has_completed() -> None:
    assert decide(Finish("stop"), [STEER]) == End("completed")


@pytest.mark.parametrize("notice, status", [(Cancel(), "cancelled"), (Drain(), "failed")])
def test_leaving_is_stronger_than_a_steer(notice: Notice, status: str) -> None:
    decision = decide(None, [STEER, notice])
    assert isinstance(decision, End)
    assert decision.status == status


def test_rollout_waits_for_what_it_is_waiting_and_goes_on_with_it() -> None:
    assert decide(Finish("stop"), [], is_waiting=True) == Await()
    assert decide(Finish("stop"), [OUTPUTS], is_waiting=True) == Again(())
    assert decide(Finish("length"), [], is_waiting=True) == End(
        "incomplete", reason="max_output_tokens"
    )
