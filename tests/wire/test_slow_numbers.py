"""Numbers that take the JSON library long are known before it reads them."""

from __future__ import annotations

import json
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.errors import InvalidRequest
from segue.resent.canonical import arguments_of
from segue.wire.codec import decode_item, decode_tools
from segue.wire.inner_json import inner_object
from segue.wire.slow_numbers import FEW, SLOW_IN_TEXT_MAX, SLOW_NUMBERS_MAX, slow_numbers

COUNT = 20_000
SLOW = ["1e300", "1E+300", "5e-324", "1.7976931348623157e308", "1.5e0300", "-2e-308", "12e299"]
# Three times what an ordinary number takes.
QUICK_S = 1e-7
strings = st.text(alphabet='1e30"\\,[ ', max_size=40)


@pytest.mark.parametrize("number", SLOW)
def test_reader_counts_numbers_with_large_exponents(number: str) -> None:
    data = json.dumps({"a": ["@"] * COUNT}).replace('"@"', number).encode()
    # One that stands where two windows meet is not seen.
    assert COUNT - 10 < slow_numbers(data) <= COUNT


def test_reader_counts_long_numbers_where_there_is_room_for_many() -> None:
    data = b"[" + b",".join([b"9" * 308 + b".5"] * COUNT) + b"]"
    assert COUNT * 0.99 < slow_numbers(data) <= COUNT


@given(st.lists(strings | st.integers(-999, 999), max_size=30))
def test_reader_takes_no_string_for_a_number(values: list[object]) -> None:
    assert slow_numbers(json.dumps(values).encode()) <= FEW


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=200, max_size=200))
def test_what_is_not_counted_is_read_quickly(numbers: list[float]) -> None:
    data = msgspec.json.encode(numbers)
    if slow_numbers(data) <= FEW:
        began = time.thread_time()
        msgspec.json.decode(data)
        assert time.thread_time() - began < 200 * 20 * QUICK_S


def test_client_may_bound_a_schema_by_the_largest_number() -> None:
    number = {
        "type": "number",
        "minimum": -1.7976931348623157e308,
        "maximum": 1.7976931348623157e308,
    }
    schema = {"type": "object", "properties": {f"p{n}": number for n in range(100)}}
    tool = {"type": "function", "name": "f", "parameters": schema}
    tools, _ = decode_tools(json.dumps([tool]).encode(), None)
    assert len(tools.definitions) == 1


def test_client_is_refused_an_item_with_too_many_slow_numbers() -> None:
    item = b'{"type":"web_search_call","action":{"a":[%b]}}'
    decode_item(item % b",".join([b"1e300"] * SLOW_NUMBERS_MAX), "input[0]")
    with pytest.raises(InvalidRequest, match="Too many numbers") as refused:
        decode_item(item % b",".join([b"1e300"] * (SLOW_NUMBERS_MAX + 1)), "input[0]")
    assert refused.value.param == "input[0]"


def test_arguments_with_slow_numbers_stay_a_text() -> None:
    text = '{"a":[' + ",".join(["1e300"] * (SLOW_IN_TEXT_MAX + 1)) + "]}"
    assert inner_object(text) is None
    assert arguments_of(text) == ["text", text]


def test_arguments_with_one_such_number_are_spelt_in_any_way() -> None:
    assert arguments_of('{"a":1e300,"b":2.0}') == arguments_of('{ "b": 2, "a": 1E300 }')
