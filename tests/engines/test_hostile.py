"""Whatever a server of an engine sends, and wherever it stops: does a job end in one of the ways that are documented?

Answers that are cut, spoilt, dribbled and without an end, in the protocol of each kind of server, over real sockets.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue.border.numbers import CHARS_MIN, ID_MAX, TOKEN_CHARS_MAX
from segue.engines.client import HEAD_BYTES_MAX
from segue.engines.token_engine import TokenEngine
from segue.engines.upstream import Timeouts, Upstream
from segue.engines.vllm import VLLM
from segue.errors import ApiError, EngineFailed, TooMany, Unavailable
from segue.limits import UNSEEN_TOKENS_MAX
from tests.engines.asking import WAIT_S
from tests.engines.hostile import (
    HEAD,
    LIMIT,
    STREAMS,
    Heard,
    answer_from,
    chunk,
    event,
    job_for,
    mutated,
    raw_server,
    until_its_end,
    whole_response,
)

ODD = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# A clock for the silence of a server that is patient enough for a loaded machine.
PATIENT = Timeouts(connect_s=5, first_s=10, silence_s=10, probe_s=5)


def check(heard: Heard, limit: int = LIMIT) -> None:
    """One end, or one of our errors; and nothing that cannot be."""
    assert (heard.finish is None) != (heard.error is None)
    if heard.error is not None:
        assert isinstance(heard.error, ApiError)
        assert heard.error.status in (400, 429, 502, 503)
        assert len(heard.error.message) < 1_000
    assert len(heard.ids) <= limit
    assert all(0 <= id <= ID_MAX for id in heard.ids)
    assert len(heard.text) <= limit * TOKEN_CHARS_MAX + CHARS_MIN
    if heard.finish is not None:
        finish = heard.finish
        for count in (finish.input_tokens, finish.output_tokens, finish.cached_tokens):
            assert count is None or 0 <= count <= 2 * UNSEEN_TOKENS_MAX


@pytest.mark.parametrize("name", STREAMS)
@ODD
@given(data=st.data())
def test_spoilt_answer_ends_in_a_documented_way(name: str, data: st.DataObject) -> None:
    body = data.draw(mutated(STREAMS[name]))
    raw = whole_response(body, data.draw(st.sampled_from([0, 7, 1_000])))
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=8))
    ends = [0, *sorted(set(cuts)), len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(ends)]

    async def ask() -> Heard:
        async with raw_server(pieces) as server:
            return await answer_from(name, server, job_for(name))

    check(asyncio.run(ask()))


@pytest.mark.parametrize("name", STREAMS)
async def test_answer_that_is_cut_at_any_byte_is_lost_only_before_its_end(name: str) -> None:
    """Every third byte here, the first and the last ones all; what comes is the beginning of the whole answer."""
    body = STREAMS[name]
    async with raw_server([whole_response(body, 0)]) as server:
        whole = await answer_from(name, server, job_for(name), PATIENT)
    assert whole.error is None
    ends = {*range(0, len(body), 3), *range(len(body) - 30, len(body) + 1)}
    for end in sorted(ends):
        async with raw_server([whole_response(body[:end], 0)]) as server:
            heard = await answer_from(name, server, job_for(name), PATIENT)
        check(heard)
        assert whole.ids[: len(heard.ids)] == heard.ids
        assert whole.text.startswith(heard.text)
        if heard.finish is not None:
            assert (heard.ids, heard.text) == (whole.ids, whole.text)
        assert server.jobs == 1, "a job that was answered is not sent again"


# What comes after an answer that is whole, in a body of chunks that does not end.
AFTER_THE_END: dict[str, list[bytes]] = {
    "cut": [],
    "no chunk": [b"zzz\r\n"],
    "no event": [chunk(b"data: {oops\n\n")],
    "an error": [chunk(event({"error": {"message": "late", "code": 500}}))],
    "a count of its own": [chunk(event({"id": "r-1", "usage": {"prompt_tokens": "3"}}))],
    "a flood": [chunk(event({"id": "r-1", "choices": [{"delta": {"content": "late"}}]}) * 4_000)],
    "a line without an end": [chunk(b"x" * 1_000_000)] * 11,
}


@pytest.mark.parametrize("after", AFTER_THE_END)
@pytest.mark.parametrize("name", STREAMS)
async def test_answer_that_is_whole_is_delivered_whatever_its_engine_does_then(
    name: str, after: str
) -> None:
    ended = until_its_end(name)
    async with raw_server([whole_response(STREAMS[name], 7)]) as server:
        whole = await answer_from(name, server, job_for(name), PATIENT)
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(ended)
    async with raw_server([head, *AFTER_THE_END[after]]) as server:
        heard = await answer_from(name, server, job_for(name), PATIENT)
    assert (heard.ids, heard.text, heard.error) == (whole.ids, whole.text, None)
    assert heard.finish is not None


@pytest.mark.parametrize("name", STREAMS)
async def test_answer_that_is_whole_waits_for_no_engine_that_falls_silent(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segue.engines.upstream.LINGER_S", 0.05)
    pieces = [HEAD + b"transfer-encoding: chunked\r\n\r\n", chunk(until_its_end(name))]
    patient = Timeouts(connect_s=2, first_s=2 * WAIT_S, silence_s=2 * WAIT_S, probe_s=2)
    async with raw_server(pieces, hangs_up=False) as server:
        heard = await answer_from(name, server, job_for(name), patient)
    assert heard.finish is not None


@pytest.mark.parametrize("said", ['"3"', "3.5", "[1]", '"x"', "true", "9" * 400])
@pytest.mark.parametrize("name", STREAMS)
async def test_count_of_another_kind_costs_no_answer(name: str, said: str) -> None:
    """Wherever an engine writes how many tokens it has counted."""
    counted = re.compile(rb'"(prompt_tokens|cached_tokens|tokens_evaluated|cache_n|cache)": \d+')
    sound = STREAMS[name]
    for found in counted.finditer(sound):
        spoilt = sound[: found.end(1)] + b'": ' + said.encode() + sound[found.end() :]
        async with raw_server([whole_response(spoilt, 0)]) as server:
            heard = await answer_from(name, server, job_for(name), PATIENT)
        check(heard)
        assert heard.finish is not None, found[0]


async def test_endpoint_that_names_its_reason_in_every_event_can_break_off() -> None:
    """Then a reason is not the end."""
    said = event({"choices": [{"delta": {"content": "A bee"}, "finish_reason": "stop"}]})
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    for count in (1, 3):
        async with raw_server([head, chunk(said * count)]) as server:
            heard = await answer_from("chat", server, job_for("chat"), PATIENT)
        assert isinstance(heard.error, EngineFailed)


@pytest.mark.parametrize("name", STREAMS)
async def test_stream_that_begins_with_a_mark_of_its_bytes_is_the_same(name: str) -> None:
    body = b"\xef\xbb\xbf" + STREAMS[name]
    async with (
        raw_server([whole_response(STREAMS[name], 0)]) as plain,
        raw_server([whole_response(body, 0)]) as marked,
    ):
        whole = await answer_from(name, plain, job_for(name), PATIENT)
        assert await answer_from(name, marked, job_for(name), PATIENT) == whole


@pytest.mark.parametrize("name", STREAMS)
async def test_answer_that_comes_byte_by_byte_is_the_same(name: str) -> None:
    raw = whole_response(STREAMS[name], 1)
    async with (
        raw_server([raw]) as at_once,
        raw_server([raw[n : n + 1] for n in range(len(raw))]) as dribbling,
    ):
        whole = await answer_from(name, at_once, job_for(name), PATIENT)
        assert await answer_from(name, dribbling, job_for(name), PATIENT) == whole
    assert whole.finish is not None


@pytest.mark.parametrize("filler", [b": still here\n\n", b"\n", b" ", b"data: {}\n\n"])
@pytest.mark.parametrize("name", STREAMS)
async def test_answer_that_never_comes_ends(name: str, filler: bytes) -> None:
    """Blanks, comments and events with nothing in them keep no job alive for ever."""
    pieces = itertools.chain([HEAD + b"\r\n"], itertools.repeat(filler * 40))
    async with raw_server(pieces) as server:  # type: ignore[arg-type]
        heard = await answer_from(name, server, job_for(name))
    check(heard)
    assert isinstance(heard.error, EngineFailed)


async def test_line_that_dribbles_costs_as_much_as_its_length() -> None:
    """A line that never ends, in many pieces: what is kept of it is not gone through again with each."""

    async def spent(count: int) -> float:
        pieces = [HEAD + b"\r\n", *itertools.repeat(b"data: " + b"x" * 58, count)]
        async with raw_server(pieces) as server:
            began = time.process_time()
            check(await answer_from("vllm", server, job_for("vllm"), PATIENT))
            return time.process_time() - began

    await spent(100)
    short, long = await spent(1_000), await spent(16_000)
    assert long < 16 * short * 3 + 0.2


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nx: ",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\ntrailer: ",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1;",
    ],
)
async def test_head_or_trailer_without_an_end_is_not_kept(head: bytes) -> None:
    filler = head if head.endswith(b"\r\n\r\n") else b"x" * 512
    pieces = [head, *[filler] * (3 * HEAD_BYTES_MAX // len(filler))]
    async with raw_server(pieces, hangs_up=False) as server:
        # Longer than the test waits: it is what comes that ends it.
        slow = Timeouts(connect_s=5, first_s=60, silence_s=60, probe_s=5)
        heard = await answer_from("vllm", server, job_for("vllm"), slow)
    check(heard)
    assert isinstance(heard.error, EngineFailed | Unavailable)


@pytest.mark.parametrize("after", ["\u00b2", "-5", "1e9", "inf", "9" * 40, "Mon, 99 Foo"])
async def test_limit_with_an_odd_wait_is_a_limit(after: str) -> None:
    head = f"HTTP/1.1 429 Slow\r\nretry-after: {after}\r\ncontent-length: 2\r\n\r\n{{}}"
    async with raw_server([head.encode("latin-1")]) as server:
        heard = await answer_from("chat", server, job_for("chat"))
    check(heard)
    assert isinstance(heard.error, TooMany)
    assert heard.error.wait_s is None or 0 <= heard.error.wait_s <= 24 * 3600


async def test_words_of_another_request_reach_nobody() -> None:
    ours = STREAMS["vllm"]
    other = event({"id": "r-2", "choices": [{"index": 0, "text": "", "token_ids": [666]}]})
    end = ours.index(b"\n\n") + 2
    async with raw_server([whole_response(ours[:end] + other + ours[end:], 0)]) as server:
        heard = await answer_from("vllm", server, job_for("vllm"), PATIENT)
    assert 666 not in heard.ids
    assert heard.finish is not None


async def test_endpoint_that_sends_a_book_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """Far more than the request allows in one event; and the log names the replica, without a word of it."""
    caplog.set_level(logging.DEBUG)
    book = event({"choices": [{"index": 0, "delta": {"content": "secret " * 100_000}}]})
    async with raw_server([whole_response(book * 3, 0)]) as server:
        heard = await answer_from("chat", server, job_for("chat"), PATIENT)
    check(heard)
    assert heard.finish is not None
    assert heard.finish.reason == "length"
    assert "engine raw writes more than a request allows" in caplog.text
    assert "secret" not in caplog.text


async def test_failure_is_logged_with_its_replica_and_without_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    probabilities = [{"token": "secret words", "logprob": -1.0}]
    said = event({"tokens": [7], "completion_probabilities": probabilities, "tokens_predicted": 1})
    async with raw_server([whole_response(said + b"data: secret\n\n", 0)]) as server:
        heard = await answer_from("llamacpp", server, job_for("llamacpp"), PATIENT)
    assert isinstance(heard.error, EngineFailed)
    assert "engine raw failed: The engine sent something that cannot be read." in caplog.text
    assert "secret" not in caplog.text


async def test_refusal_that_quotes_a_client_teaches_nothing_about_the_context() -> None:
    """A client's schema that speaks of a context of five tokens makes no engine small for everybody."""
    body = b'{"error":{"message":"bad grammar: maximum context length of 5 tokens"}}'
    head = b"HTTP/1.1 400 No\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with raw_server([head + body], hangs_up=False) as server:
        upstream = Upstream(server.url, None, PATIENT)
        engine = TokenEngine(VLLM, upstream, "m")
        for _ in range(2):
            with pytest.raises(ApiError):
                async for _ in engine.sample(job_for("vllm")):
                    pass
        assert engine.facts.context_tokens is None
        await upstream.close()
