"""Are the ids of a prompt written once, and forgotten when nobody holds them?"""

from __future__ import annotations

import gc
import json

from hypothesis import given
from hypothesis import strategies as st

from segue.engines.token_json import CACHED_IDS_MIN, TokenJson
from segue.turn.values import NO_TOKENS, Tokens, id_array
from tests.engines.asking import tokens

LONG = range(1_000, 1_000 + 4 * CACHED_IDS_MIN)


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=80), max_size=8))
def test_text_is_the_ids_in_order_however_they_are_chunked(chunks: list[list[int]]) -> None:
    token_json = TokenJson()
    prompt = tokens(*chunks)
    wanted = [id for chunk in chunks for id in chunk]

    for _ in range(2):
        assert json.loads(b"[" + token_json.text(prompt) + b"]") == wanted


def test_turn_writes_only_its_new_ids() -> None:
    token_json = TokenJson()
    prompt = NO_TOKENS
    texts: list[bytes] = []
    for _ in range(20):
        prompt = prompt.plus(id_array(LONG))
        token_json.text(prompt.plus(id_array([1, 2, 3])))
        now = [token_json.chunk_text(chunk) for chunk in prompt.chunks()]
        assert all(new is old for new, old in zip(now, texts, strict=False))
        texts = now


def test_fork_shares_the_text_of_its_past() -> None:
    token_json = TokenJson()
    trunk = tokens(LONG)
    token_json.text(trunk.plus(id_array(LONG)))
    chunk = trunk.chunks()[-1]
    text = token_json.chunk_text(chunk)
    size = token_json.bytes

    token_json.text(trunk.plus(id_array([4])))

    assert token_json.chunk_text(chunk) is text
    assert token_json.bytes == size


def test_text_goes_with_its_history() -> None:
    token_json = TokenJson()
    prompt: Tokens | None = tokens(LONG, LONG)
    assert prompt is not None
    token_json.text(prompt)
    assert token_json.bytes > 0

    del prompt
    gc.collect()

    assert token_json.bytes == 0


def test_budget_is_kept_and_costs_only_time() -> None:
    token_json = TokenJson(bytes_max=1_000)
    prompt = tokens(*[LONG] * 10)

    for _ in range(3):
        assert json.loads(b"[" + token_json.text(prompt) + b"]") == [*LONG] * 10
        assert token_json.bytes <= 1_000
