"""Long texts in slices: the same values, the same bytes and the same errors as from the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from segue.wire import long_texts
from segue.wire.codec import LARGE_BYTES, decode_create, encode, user_message
from segue.wire.requests import Create

SIZE = long_texts.LARGE_BYTES
# What a JSON string may be made of, and what it may not be made of.
UNITS = [
    "a",
    "\\n",
    '\\"',
    "\\\\",
    "ü",
    "€",
    "😀",
    "\\u20ac",
    "\\ud83d\\ude00",
    "\\\\ud83d",
    "\u200b",
]
BROKEN = ["\\x", "\\ud83d", "\x01", "\\u12"]

DECODERS: list[Callable[[bytes | bytearray], Any]] = [
    msgspec.json.Decoder(Create).decode,
    msgspec.json.Decoder(dict[str, Raw]).decode,
    msgspec.json.decode,
]


def outcome(decode: Callable[[bytes], Any], body: bytes) -> Any:
    try:
        return decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return type(error), str(error)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from(UNITS), min_size=1, max_size=6), st.sampled_from(["", *BROKEN]))
@example(["\\\\"], "")
@example(["a", "\\\\"], "")
@example(["\\ud83d\\ude00"], "")
@example(["a"], "\\x")
def test_long_text_means_what_the_library_says(units: list[str], broken: str) -> None:
    unit = "".join(units)
    text = unit * (SIZE // len(unit.encode())) + broken
    body = f'{{"model": "m", "input": "{text}", "unknown": [1]}}'.encode()
    for decode in DECODERS:
        found = outcome(lambda body, decode=decode: long_texts.decode(decode, body), body)  # type: ignore[misc]
        assert found == outcome(decode, body)


def test_long_key_stays_in_its_place() -> None:
    body = encode({"a" * SIZE: ["b" * SIZE]})
    assert long_texts.decode(msgspec.json.decode, body) == msgspec.json.decode(body)


def test_text_that_must_be_short_is_refused_as_such() -> None:
    body = encode({"input": "a", "metadata": {"key": "a" * SIZE}})
    with pytest.raises(msgspec.ValidationError, match="length <= 512"):
        long_texts.decode(msgspec.json.Decoder(Create).decode, body)


def test_client_that_writes_our_mark_gets_its_own_words() -> None:
    mark = long_texts.MARK.decode()
    body = encode({"input": "a" * SIZE, "instructions": f"{mark}0"})
    create = decode_create(body)
    assert (create.input, create.instructions) == ("a" * SIZE, f"{mark}0")


@settings(max_examples=10, deadline=None)
@given(st.text(min_size=1, max_size=6))
def test_long_item_has_the_bytes_of_the_library(text: str) -> None:
    item = user_message(text * (LARGE_BYTES // len(text) + 1))
    assert item.raw == encode(item.value)
