"""What items say, and in which order."""

from __future__ import annotations

import pytest

from segue.dialects.parts import in_call_order
from segue.wire.items import Item
from tests.contracts.dialect import item, message


def called(call_id: str) -> Item:
    return item("function_call", call_id=call_id, name="f", arguments="{}")


def answered(call_id: str) -> Item:
    return item("function_call_output", call_id=call_id, output="x")


A, B, C = map(called, "abc")
X, Y, Z = map(answered, "abc")
SAID, USER = message("assistant", "So."), message("user", "And?")


@pytest.mark.parametrize(
    "before, given, ordered",
    [
        ((A, B), (Y, X, USER), (X, Y, USER)),
        ((A, B), (X, Y), (X, Y)),
        ((), (A, SAID, B, Y, X), (A, SAID, B, X, Y)),
        ((A, B), (Y, X, C, Z), (X, Y, C, Z)),
        # What does not belong to the calls right before stays after what does.
        ((A, B), (Z, Y, X), (X, Y, Z)),
        ((C,), (Y, Z), (Z, Y)),
        # Others' words between outputs stay where they are.
        ((A, B), (Y, USER, X), (Y, USER, X)),
    ],
)
def test_outputs_stand_in_the_order_of_their_calls(
    before: tuple[Item, ...], given: tuple[Item, ...], ordered: tuple[Item, ...]
) -> None:
    assert tuple(in_call_order(given, before)) == ordered
