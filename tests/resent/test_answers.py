"""An answer that came back: the same words, calls and thoughts, however they are spelt and divided."""

from __future__ import annotations

import pytest

from segue.resent.answers import answer_length
from segue.wire.items import Item
from tests.contracts.dialect import item, message, reasoning


def call(arguments: str = '{"a": 1.0}', call_id: str = "c1", **more: object) -> Item:
    return item("function_call", call_id=call_id, name="f", arguments=arguments, **more)


def sealed(text: str = "") -> Item:
    content = [{"type": "reasoning_text", "text": text}] if text else None
    return item("reasoning", summary=[], content=content, encrypted_content="seal")


def said(*texts: str, **more: object) -> Item:
    content = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    return item("message", role="assistant", content=content, **more)


NEXT = message("user", "And?")
THOUGHT, OTHER = reasoning("Let me see."), reasoning("No.")
TALK = said("One moment.", id="msg_1", status="completed")
WROTE = (THOUGHT, TALK, call(id="fc_1"), call("", "c2", id="fc_2"))
SPELT = (call('{"a":1}'), call("{}", "c2"))


@pytest.mark.parametrize(
    "wrote, returned",
    [
        (WROTE, WROTE),
        (WROTE, (THOUGHT, message("assistant", "One moment."), *SPELT)),
        (WROTE, (message("assistant", " One moment.\n"), *SPELT)),
        (WROTE, (said("One ", "moment."), THOUGHT, *SPELT)),
        (WROTE, (*SPELT, said("One moment."))),
        ((sealed("Let me see."), TALK), (sealed(), TALK)),
        ((sealed("Let me see."), TALK), (sealed("What was opened."), TALK)),
        # Thoughts between calls come back as one.
        ((THOUGHT, call(), OTHER, call("", "c2")), (reasoning("Let me see.No."), *SPELT)),
        # White space is no text.
        ((THOUGHT, said("\n"), call()), (call(),)),
        ((said("One"), said(" moment.")), (TALK,)),
        (
            (item("message", role="assistant", content=[{"type": "refusal", "refusal": "No."}]),),
            (said("No."),),
        ),
    ],
)
def test_answer_is_known_in_any_spelling(
    wrote: tuple[Item, ...], returned: tuple[Item, ...]
) -> None:
    assert answer_length(wrote, (*returned, NEXT)) == len(returned)


@pytest.mark.parametrize(
    "returned",
    [
        (),
        (THOUGHT,),
        (said("One moment!"), *SPELT),
        (TALK, SPELT[0]),
        (TALK, *SPELT[::-1]),
        (TALK, call('{"a":2}'), SPELT[1]),
        (TALK, call('{"a":true}'), SPELT[1]),
        (TALK, call('{"a":1}', "c3"), SPELT[1]),
        (TALK, *SPELT, call("{}", "c3")),
        (OTHER, TALK, *SPELT),
        (said("One moment.", phase="final_answer"), *SPELT),
        (said("One moment.", status="incomplete"), *SPELT),
        (TALK, *SPELT, said("More.")),
    ],
)
def test_answer_that_was_changed_is_not_known(returned: tuple[Item, ...]) -> None:
    assert answer_length(WROTE, (*returned, NEXT)) == 0
