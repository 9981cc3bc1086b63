"""Is an engine behind HTTP asked patiently, left at once, and are its errors made ours?"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from segue.border.numbers import WAIT_S_MAX, wait_of
from segue.border.refusals import error_for_status, error_in_stream
from segue.engines.llamacpp import LLAMACPP
from segue.engines.token_engine import TokenEngine
from segue.engines.upstream import Timeouts, Upstream, split_address
from segue.engines.vllm import VLLM
from segue.errors import ApiError, EngineFailed, InvalidRequest, TooMany, Unavailable
from tests.engines.asking import WAIT_S, finish_of, heard, ids_of, job, played, tokens, upstream
from tests.engines.fakes.vllm import FakeVllm

LLAMA_OVERFLOW = (
    b'{"error":{"code":400,"message":"request (5000 tokens) exceeds the available context size '
    b'(2048 tokens), try increasing it","type":"exceed_context_size_error","n_prompt_tokens":5000,'
    b'"n_ctx":2048}}'
)
VLLM_OVERFLOW = (
    b'{"error":{"message":"This model\'s maximum context length is 8192 tokens. However, you '
    b'requested 9000 tokens.","type":"BadRequestError","param":null,"code":400}}'
)
SGLANG_OVERFLOW = (
    b'{"error":{"message":"The input (9000 tokens) is longer than the model\'s context length '
    b'(8192 tokens)."}}'
)
OPENAI_OVERFLOW = (
    b'{"error":{"message":"Your input is too long.","type":"invalid_request_error",'
    b'"code":"context_length_exceeded"}}'
)


@pytest.mark.parametrize(
    "status, body, kind, code",
    [
        (400, LLAMA_OVERFLOW, InvalidRequest, "context_length_exceeded"),
        (400, VLLM_OVERFLOW, InvalidRequest, "context_length_exceeded"),
        (400, SGLANG_OVERFLOW, InvalidRequest, "context_length_exceeded"),
        (400, OPENAI_OVERFLOW, InvalidRequest, "context_length_exceeded"),
        (400, b'{"error":{"message":"bad grammar"}}', InvalidRequest, "invalid_request"),
        (422, b'{"detail":[{"type":"missing"}]}', InvalidRequest, "invalid_request"),
        (400, b"not JSON", InvalidRequest, "invalid_request"),
        (401, b'{"error":"Unauthorized"}', EngineFailed, "server_error"),
        (404, b"", EngineFailed, "server_error"),
        (429, b"", TooMany, "rate_limit_exceeded"),
        (503, b'{"error":{"message":"Loading model"}}', Unavailable, "server_is_overloaded"),
        (500, b"\xff", EngineFailed, "server_error"),
    ],
)
def test_refusal_becomes_our_own_error(
    status: int, body: bytes, kind: type[ApiError], code: str
) -> None:
    error = error_for_status(status, body)

    assert isinstance(error, kind)
    assert error.code == code


@pytest.mark.parametrize(
    ("address", "root", "version"),
    [
        ("http://h:1", "http://h:1", "/v1"),
        ("http://h:1/", "http://h:1", "/v1"),
        ("http://h:1/v1/", "http://h:1", "/v1"),
        ("https://h/openai/v1", "https://h/openai", "/v1"),
        ("https://h/api/paas/v4", "https://h/api/paas", "/v4"),
        ("https://h/api/v3", "https://h/api", "/v3"),
        ("https://h/v1beta/openai", "https://h", "/v1beta/openai"),
        ("https://h/v1/openai/", "https://h", "/v1/openai"),
        ("https://h/openai", "https://h", "/openai"),
        ("https://h/vllm", "https://h/vllm", "/v1"),
        ("https://v1/prefix", "https://v1/prefix", "/v1"),
        ("https://user:secret@v1", "https://user:secret@v1", "/v1"),
    ],
)
def test_address_may_name_its_version(address: str, root: str, version: str) -> None:
    assert split_address(address) == (root, version)


async def test_native_paths_are_below_the_root_and_others_below_the_version() -> None:
    async with FakeVllm() as fake, upstream(fake.url + "/api/paas/v4") as address:
        await address.call("GET", "/v1/models")
        await address.call("GET", "/props")
        assert fake.paths == ["/api/paas/v4/models", "/api/paas/props"]


def test_overflow_tells_both_figures_where_the_engine_does() -> None:
    assert "5000 tokens, at most 2048 fit" in error_for_status(400, LLAMA_OVERFLOW).message


@pytest.mark.parametrize(
    "raw, kind",
    [
        (b'{"message":"died","code":500}', EngineFailed),
        (b'{"message":"maximum context length is 10"}', InvalidRequest),
        (b'{"message":"busy","code":"503"}', Unavailable),
        (b'"only words"', EngineFailed),
    ],
)
def test_error_inside_a_stream_becomes_our_own(raw: bytes, kind: type[ApiError]) -> None:
    assert isinstance(error_in_stream(raw), kind)


def test_client_hears_no_more_of_an_engines_words_than_a_bound() -> None:
    assert len(error_for_status(400, b'{"message":"%s"}' % (b"x" * 10_000)).message) < 1_000


# --- events ---------------------------------------------------------------------------------------

RAW = (
    b': hello\n\ndata: {"a": 1}\n\ndata:{"b": 2}\r\n\r\nevent: x\ndata: [DONE]\n\nerror: {"c": 3}\n'
)
EVENTS = [b'{"a": 1}', b'{"b": 2}', b"[DONE]", b'{"error": {"c": 3}}']


async def events_of(pieces: list[bytes]) -> list[bytes]:
    events: list[bytes] = []
    with closing(played(pieces)) as stream:
        assert not await stream.read(lambda came: events.extend(came) or False)
    return events


async def test_events_do_not_depend_on_where_the_bytes_are_cut() -> None:
    for at in range(len(RAW) + 1):
        assert await events_of([piece for piece in (RAW[:at], RAW[at:]) if piece]) == EVENTS
    assert await events_of([RAW[n : n + 1] for n in range(len(RAW))]) == EVENTS


# --- with a fake engine ---------------------------------------------------------------------------


async def test_refused_connection_is_unavailable() -> None:
    fake = FakeVllm()
    await fake.start()
    await fake.stop()

    async with upstream(fake.url) as address:
        with pytest.raises(Unavailable):
            await heard(TokenEngine(LLAMACPP, address), job(tokens([1])))
        assert not await TokenEngine(LLAMACPP, address).is_ready()


async def test_engine_that_dies_in_the_middle_is_a_failure_after_what_it_said() -> None:
    async with FakeVllm(break_at=2, hold_at=2) as fake, upstream(fake.url) as address:
        said: list[int] = []
        async with aclosing(TokenEngine(VLLM, address, "fake").sample(job(tokens([1])))) as pieces:
            with pytest.raises(EngineFailed):
                async for piece in pieces:
                    said += ids_of([piece])
                    if len(said) == 2:
                        fake.gate.set()
        assert said == [7, 8]


async def test_silence_in_the_middle_is_a_failure() -> None:
    """The wait for a first event is long, the one between events is not."""
    timeouts = Timeouts(connect_s=2, first_s=20, silence_s=0.1, probe_s=2)
    async with FakeVllm(hold_at=1) as fake, upstream(fake.url, timeouts=timeouts) as address:
        with pytest.raises(EngineFailed, match=r"sent nothing for 0\.1 seconds"):
            await heard(TokenEngine(VLLM, address, "fake"), job(tokens([1])))
        async with asyncio.timeout(WAIT_S):
            await fake.left.wait()


async def test_engine_that_reads_its_prompt_for_too_long_is_given_up() -> None:
    timeouts = Timeouts(connect_s=2, first_s=0.1, silence_s=20, probe_s=2)
    async with FakeVllm(hold_at=0) as fake, upstream(fake.url, timeouts=timeouts) as address:
        with pytest.raises((EngineFailed, Unavailable)):
            await heard(TokenEngine(VLLM, address, "fake"), job(tokens([1])))


@pytest.mark.parametrize("hold_at", [0, 1])
async def test_cancelled_turn_closes_the_connection_at_once(hold_at: int) -> None:
    """While the prompt is read, and in the middle of the answer."""
    async with FakeVllm(hold_at=hold_at) as fake, upstream(fake.url) as address:
        asking = asyncio.create_task(heard(TokenEngine(VLLM, address, "fake"), job(tokens([1]))))
        async with asyncio.timeout(WAIT_S):
            await fake.held.wait()
        asking.cancel()
        async with asyncio.timeout(WAIT_S):
            await fake.left.wait()
        await asyncio.wait([asking])
        assert asking.cancelled()


async def test_connection_serves_the_next_job() -> None:
    async with FakeVllm() as fake, upstream(fake.url) as address:
        engine = TokenEngine(VLLM, address, "fake")
        for _ in range(6):
            assert finish_of(await heard(engine, job(tokens([1])))).reason == "stop"
            assert await engine.is_ready()
        assert len(fake.paths) > 6
        assert len(fake.connections) <= 2


async def test_engine_that_was_restarted_is_asked_on_a_new_connection() -> None:
    async with FakeVllm() as fake, upstream(fake.url) as address:
        engine = TokenEngine(VLLM, address, "fake")
        assert ids_of(await heard(engine, job(tokens([1])))) == [7, 8, 9]
        await fake.stop()
        await fake.start()
        assert ids_of(await heard(engine, job(tokens([1])))) == [7, 8, 9]


async def test_prompt_of_megabytes_arrives_whole() -> None:
    prompt = tokens(*[range(100_000, 140_000)] * 8)
    async with FakeVllm(context_tokens=1_000_000) as fake, upstream(fake.url) as address:
        await heard(TokenEngine(VLLM, address, "fake"), job(prompt))
        assert fake.requests[-1]["prompt"] == prompt.flat().tolist()


async def test_key_is_sent_and_a_wrong_one_is_the_operators_fault() -> None:
    async with FakeVllm(key="secret") as fake:
        async with upstream(fake.url, "secret") as address:
            assert ids_of(await heard(TokenEngine(VLLM, address, "fake"), job(tokens([1]))))
        async with upstream(fake.url, "wrong") as address:
            with pytest.raises(EngineFailed, match="key"):
                await heard(TokenEngine(VLLM, address, "fake"), job(tokens([1])))


def test_address_may_end_with_the_version() -> None:
    assert Upstream("http://127.0.0.1:1/v1/").url == "http://127.0.0.1:1"


async def test_name_for_logs_has_no_password() -> None:
    upstream = Upstream("http://svc:hunter2@127.0.0.1:9/v1", None)
    assert upstream.name == "http://127.0.0.1:9"
    await upstream.close()


@pytest.mark.parametrize("raw", [b'{"error":{"message":"boom inside","code":500}}', b"boom inside"])
def test_words_of_a_broken_engine_are_in_no_log_line(
    raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """They may quote a request, and requests are in no log."""
    caplog.set_level(logging.DEBUG)
    error = error_for_status(500, raw, None, "engine http://a")
    assert "boom" not in error.message
    # A refusal is for the client that sent the request.
    assert "boom" in error_for_status(400, b'{"error":"boom inside"}').message
    assert "boom" not in caplog.text
    assert [one.levelname for one in caplog.records] == ["WARNING"] * 2


def test_retry_after_is_seconds_or_a_date() -> None:
    assert wait_of("7") == 7
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert 25 < (wait_of(soon) or 0) <= 30
    assert wait_of("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert wait_of("soon") is None
    # Numbers that are none, and such as nobody waits for.
    for odd in ("\u00b2", "nan", "inf", "1e400", "-1", "9" * 400, "Mon, 01 Jan 0001 00:00:00 GMT"):
        assert (wait_of(odd) or 0.0) <= WAIT_S_MAX
    assert wait_of("999999999") == WAIT_S_MAX
    assert wait_of("") is None
