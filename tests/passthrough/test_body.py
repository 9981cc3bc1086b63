"""Requests that are passed on, and answers as they pass: the same at every cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.errors import InvalidRequest
from segue.passthrough.body import EVENT_BYTES_MAX, StreamedAnswer, WholeAnswer, decode_passed

USAGE = {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3}
DETAILED = {**USAGE, "prompt_tokens_details": {"cached_tokens": 4}}
CHUNKS = [
    {"choices": [{"text": "a"}], "usage": None},
    {"choices": [{"text": '"usage":{"prompt_tokens":1000}'}]},
    {"choices": [], "usage": DETAILED},
]
STREAM = (
    b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in CHUNKS) + b"data: [DONE]\n\n"
)


def test_request_goes_on_but_for_its_model() -> None:
    body = {"model": "alias", "prompt": [1, 2], "suffix": "x", "n": 2}
    passed = decode_passed(json.dumps(body).encode())
    assert passed.model == "alias"
    assert json.loads(passed.encoded("real", None)) == {**body, "model": "real"}


def test_usage_of_a_stream_is_always_asked_for() -> None:
    passed = decode_passed(b'{"model":"m","stream":true}')
    assert json.loads(passed.encoded("m", None))["stream_options"] == {"include_usage": True}
    assert not passed.request.wants_usage


@pytest.mark.parametrize("asked, sent", [({}, 5), ({"max_tokens": 3}, 3), ({"max_tokens": 9}, 5)])
def test_answer_is_no_longer_than_the_operator_allows(asked: dict[str, int], sent: int) -> None:
    passed = decode_passed(json.dumps({"model": "m", **asked}).encode())
    assert json.loads(passed.encoded("m", 5))["max_tokens"] == sent


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model":5}', b'{"stream":"yes"}', b'{"model":'])
def test_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_passed(body)


def test_request_without_a_model_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="model"):
        assert decode_passed(b"{}").model


@pytest.mark.parametrize("is_last", [True, False])
def test_usage_is_found_at_either_end_of_a_long_answer(is_last: bool) -> None:
    data = {"data": [{"embedding": [0.125] * 20_000}], "text": '"usage": {"prompt_tokens": 7}'}
    parts = [data, {"usage": DETAILED}] if is_last else [{"usage": DETAILED}, data]
    body = json.dumps(parts[0] | parts[1]).encode()
    answer = WholeAnswer()
    assert b"".join(answer.feed(body[at : at + 999]) for at in range(0, len(body), 999)) == body
    assert answer.usage(1_000).counts(1_000) == (9, 4, 3)


def test_usage_that_cannot_be_is_nothing() -> None:
    answer = WholeAnswer()
    answer.feed(b'{"usage":{"prompt_tokens":-5,"completion_tokens":"x"}}')
    assert answer.usage(1_000).counts(1_000) == (0, 0, 0)
    answer = WholeAnswer()
    answer.feed(b'{"usage":{"prompt_tokens":-5,"prompt_tokens_details":{"cached_tokens":9}}}')
    assert answer.usage(1_000).counts(1_000) == (0, 0, 0)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8), st.booleans())
def test_stream_is_the_same_at_every_cut(cuts: list[int], wants_usage: bool) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    answer = StreamedAnswer(wants_usage=wants_usage)
    written = b"".join(answer.feed(STREAM[begin:end]) for begin, end in pairwise(places))
    assert answer.end() == b""
    assert answer.usage(1_000).counts(1_000) == (9, 4, 3)
    if wants_usage:
        assert written == STREAM
    else:
        assert written == STREAM.replace(b"data: %b\n\n" % json.dumps(CHUNKS[2]).encode(), b"")


def test_stream_that_is_left_before_its_count_is_what_was_seen_of_it() -> None:
    answer = StreamedAnswer(wants_usage=False)
    assert answer.usage(1_000).counts(1_000) == (0, 0, 0), "nothing has come"
    answer.feed(b': wait\n\ndata: {"choices":[{}]}\n\ndata: {"choices":[{}]}\n\ndata: {"cho')
    assert answer.usage(1_000).counts(1_000) == (250, 0, 2)
    answer.feed(b'ices":[{}]}\n\ndata: [DONE]\n\n')
    assert answer.usage(1_000).counts(1_000) == (0, 0, 0), "it is whole: its engine counts nothing"


def test_stream_with_other_ends_of_lines_is_read_at_every_cut() -> None:
    stream = STREAM.replace(b"\n", b"\r\n")
    for cut in range(len(stream)):
        answer = StreamedAnswer(wants_usage=True)
        assert answer.feed(stream[:cut]) + answer.feed(stream[cut:]) + answer.end() == STREAM


def test_what_is_no_event_passes_as_it_is() -> None:
    answer = StreamedAnswer(wants_usage=False)
    assert answer.feed(b'data: {"usage": broken}\n\nrest') == b'data: {"usage": broken}\n\n'
    assert answer.end() == b"rest"
    long = b"x" * (EVENT_BYTES_MAX + 1)
    assert answer.feed(long) == long
