"""What stands in for a long history: what is kept word for word, and what it means to the model."""

from __future__ import annotations

from itertools import count

import msgspec

from segue.seams.history import Round
from segue.turn.compact import (
    Compacted,
    from_bytes,
    stand_in,
    summary_message,
    to_bytes,
    window,
    worth_keeping,
)
from segue.wire.items import Message
from tests.contracts.turns import said


def texts(items: object) -> list[str]:
    assert isinstance(items, list | tuple)
    return [
        item.value.content if isinstance(item.value.content, str) else item.value.content[0].text
        for item in items
    ]


def test_compaction_survives_its_seal() -> None:
    compacted = Compacted("chain", "A river.", [msgspec.Raw(said("Hello.").raw)])
    assert from_bytes(to_bytes(compacted)) == compacted
    assert from_bytes(b"{}") is None
    assert from_bytes(b"\xff") is None


def test_developers_words_and_the_newest_users_messages_are_kept() -> None:
    rounds = [
        Round((said("Be kind.", "developer"), said("An old question. " * 20, "user"))),
        Round((said("A newer one.", "user"),)),
    ]
    given = (said("The newest.", "user"),)
    kept = worth_keeping(rounds, given, 400)
    assert texts(kept) == ["Be kind.", "A newer one.", "The newest."]


def test_last_message_of_the_user_is_kept_whatever_its_size() -> None:
    given = (said("word " * 1_000, "user"),)
    assert worth_keeping([], given, 10) == list(given)


def test_what_the_model_said_is_not_kept() -> None:
    assert worth_keeping([Round((said("I think so.", "assistant"),))], (), 1_000) == []


def test_stand_in_is_what_was_kept_and_then_the_summary() -> None:
    items = stand_in(Compacted("chain", "A river.", [msgspec.Raw(said("Hello.", "user").raw)]))
    assert texts(items)[0] == "Hello."
    assert texts(items)[1].endswith("A river.")
    assert all(isinstance(item.value, Message) and item.value.role == "user" for item in items)


def test_summary_is_told_as_a_users_message() -> None:
    message = summary_message(Compacted("window", "A river."))
    assert message.role == "user"
    assert str(message.content).endswith("A river.")


def test_window_shows_users_messages_with_ids_and_status() -> None:
    numbers = count()
    shown = window(
        None,
        (said("Be.", "developer"), said("Hello.", "user")),
        1_000,
        lambda prefix: f"{prefix}_{next(numbers)}",
    )
    (message,) = [msgspec.json.decode(raw) for raw in shown]
    assert (message["id"], message["status"], message["role"]) == ("msg_0", "completed", "user")


def test_newest_messages_are_kept_by_whatever_measure_there_is() -> None:
    rounds = [Round((said(f"Question {number}.", "user"),)) for number in range(9)]
    kept = worth_keeping(rounds, (), 3, measure=lambda item: 1)
    assert texts(kept) == ["Question 6.", "Question 7.", "Question 8."]
