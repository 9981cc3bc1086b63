"""Are the ids of a prompt written once, and forgotten when nobody holds them?"""

from __future__ import annotations

import gc
import json

from hypothesis import given
from hypothesis import strategies as st

from segue.engines.digits import KEPT_IDS_MIN, Digits
from segue.turn.values import NO_TOKENS, Tokens, id_array
from tests.engines.asking import tokens

LONG = range(1_000, 1_000 + 4 * KEPT_IDS_MIN)


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=80), max_size=8))
def test_text_is_the_ids_in_order_however_they_are_chunked(chunks: list[list[int]]) -> None:
    digits = Digits()
    prompt = tokens(*chunks)
    wanted = [id for chunk in chunks for id in chunk]

    for _ in range(2):
        assert json.loads(b"[" + digits.text(prompt) + b"]") == wanted


def test_turn_writes_only_its_new_ids() -> None:
    digits = Digits()
    prompt = NO_TOKENS
    for turn in range(20):
        prompt = prompt.plus(id_array(LONG))
        before = digits.ids_written
        digits.text(prompt.plus(id_array([1, 2, 3])))
        assert digits.ids_written - before == len(LONG) + 3, turn


def test_fork_shares_the_text_of_its_past() -> None:
    digits = Digits()
    trunk = tokens(LONG)
    digits.text(trunk.plus(id_array(LONG)))
    before = digits.ids_written

    digits.text(trunk.plus(id_array([4])))

    assert digits.ids_written - before == 1


def test_text_goes_with_its_history() -> None:
    digits = Digits()
    prompt: Tokens | None = tokens(LONG, LONG)
    assert prompt is not None
    digits.text(prompt)
    assert digits.bytes > 0

    del prompt
    gc.collect()

    assert digits.bytes == 0


def test_budget_is_kept_and_costs_only_time() -> None:
    digits = Digits(bytes_max=1_000)
    prompt = tokens(*[LONG] * 10)

    for _ in range(3):
        assert json.loads(b"[" + digits.text(prompt) + b"]") == [*LONG] * 10
        assert digits.bytes <= 1_000
