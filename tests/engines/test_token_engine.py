"""Does the one engine for token ids read every codec's stream, wherever the bytes are cut and whatever goes wrong?"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import weakref
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.border.believed import PIECE_IDS_MAX, believed
from segue.engines.dynamo import DYNAMO
from segue.engines.llamacpp import LLAMACPP
from segue.engines.sglang import SGLANG
from segue.engines.token_engine import (
    CACHED_IDS_MIN,
    SamplingFields,
    TokenAnswer,
    TokenCodec,
    TokenEngine,
    TokenJson,
    TokenRequest,
    no_preparation,
)
from segue.engines.upstream import Upstream
from segue.engines.vllm import VLLM
from segue.errors import ApiError, EngineFailed
from segue.seams.model import (
    Engine,
    Finish,
    Ids,
    Job,
    JobStarted,
    Piece,
    Sampling,
    TokenLogprob,
    Written,
)
from segue.seams.prompt import NO_TOKENS, Tokens, id_array
from tests.engines.asking import STOP, Played, job, tokens
from tests.engines.fakes.server import DONE, event

WANTED = Sampling(wants_logprobs=True)

# --- an engine that does not exist, as short as a codec can be --------------------------------------


class _Event(Struct):
    new: list[int] = []
    end: bool = False
    error: Raw | UnsetType = UNSET


_event = msgspec.json.Decoder(_Event)


def _request(job: Job, model: str, known: None) -> TokenRequest:
    fields = {"model": model, "limit": job.output_tokens_max, **SamplingFields().of(job.sampling)}
    return TokenRequest("/sample", "ids", fields, abort=("/abort", b'{"all":true}'))


def _read(found: _Event, answer: TokenAnswer) -> None:
    answer.add(found.new, [TokenLogprob(-id / 8) for id in found.new])
    if found.end:
        answer.reason, answer.is_over = answer.reason or "length", True


SHORTEST = TokenCodec(no_preparation, _request, _event, _read)

# --- the same answer from every kind of server: 7, 8 and a stop -------------------------------------


def _vllm(id: int, reason: str | None = None) -> bytes:
    logprobs = {"token_logprobs": [-id / 8], "top_logprobs": None}
    choice = {"token_ids": [id], "logprobs": logprobs, "finish_reason": reason}
    return event({"choices": [choice]})


def _dynamo(*ids: int, reason: str | None = None) -> bytes:
    logprobs = {"token_logprobs": [-id / 8 for id in ids], "top_logprobs": None}
    choice = {"text": "" if reason else "so", "logprobs": logprobs, "finish_reason": reason}
    return event({"choices": [choice], "nvext": {"completion_token_ids": ids}})


def _sglang(*ids: int, reason: str | None = None) -> bytes:
    meta = {
        "completion_tokens": len(ids),
        "cached_tokens": 3,
        "output_token_logprobs": [[-id / 8, id, None] for id in ids],
        "finish_reason": reason and {"type": reason},
    }
    return event({"output_ids": ids, "meta_info": meta})


def _llamacpp(id: int, count: int) -> bytes:
    likely = [{"id": id, "logprob": -id / 8}]
    body = {"tokens": [id], "tokens_predicted": count, "completion_probabilities": likely}
    return event({"content": "…", **body})


STREAMS: dict[str, bytes] = {
    "shortest": event({"new": [7, 8]}) + event({"new": [STOP], "end": True}),
    "vllm": b"".join(
        [
            *(_vllm(7), _vllm(8), _vllm(STOP, "stop")),
            event({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}),
            DONE,
        ]
    ),
    "dynamo": b"".join(
        [
            *(_dynamo(7), _dynamo(8), _dynamo(STOP, reason="stop")),
            event({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}),
            DONE,
        ]
    ),
    "sglang": _sglang(7) + _sglang(7, 8) + _sglang(7, 8, STOP, reason="stop") + DONE,
    "llamacpp": b"".join(
        [
            event({"tokens": [99], "prompt_progress": {"cache": 3}}),
            *(_llamacpp(7, 1), _llamacpp(8, 2), _llamacpp(STOP, 3)),
            event({"stop": True, "stop_type": "eos", "timings": {"cache_n": 3}}),
        ]
    ),
}


def engine(name: str, upstream: Upstream) -> Engine:
    match name:
        case "vllm":
            return TokenEngine(VLLM, upstream)
        case "dynamo":
            return TokenEngine(DYNAMO, upstream)
        case "sglang":
            return TokenEngine(SGLANG, upstream)
        case "llamacpp":
            return TokenEngine(LLAMACPP, upstream)
        case _:
            return TokenEngine(SHORTEST, upstream, "toy")


def answer_of(name: str, upstream: Upstream, wanted: Job) -> AsyncGenerator[Piece, None]:
    """What a turn is given of it."""
    return believed(engine(name, upstream), wanted, "played", lambda what: None)


class Outcome(Struct):
    """What came of a job, whatever it was cut into."""

    started: JobStarted | None = None
    ids: list[int] = []
    logprobs: list[TokenLogprob | None] = []
    finish: Finish | None = None
    error: type[ApiError] | None = None


async def outcome(name: str, pieces: list[bytes], wanted: Job) -> Outcome:
    found = Outcome()
    try:
        async with aclosing(answer_of(name, Played(pieces), wanted)) as answer:
            async for piece in answer:
                match piece:
                    case JobStarted():
                        found.started = piece
                    case Ids():
                        found.ids += piece.ids
                        found.logprobs += piece.logprobs
                    case Finish():
                        found.finish = piece
    except ApiError as error:
        found.error = type(error)
    return found


def pieces_of(raw: bytes, cuts: list[int]) -> list[bytes]:
    ends = [0, *sorted(set(cuts)), len(raw)]
    parts = [raw[a:b] for a, b in itertools.pairwise(ends)]
    return [part for part in parts if part]


JOB = job(tokens([1, 3, 4]), sampling=WANTED)


@pytest.mark.parametrize("name", STREAMS)
async def test_every_kind_of_server_gives_the_same_answer(name: str) -> None:
    found = await outcome(name, [STREAMS[name]], JOB)

    assert found.ids == [7, 8, STOP]
    assert found.logprobs == [TokenLogprob(-id / 8) for id in (7, 8, STOP)]
    cached = None if name == "shortest" else 3
    assert found.finish == Finish("stop", cached)
    assert found.started == (JobStarted(3) if name in ("sglang", "llamacpp") else None)


@pytest.mark.parametrize("name", STREAMS)
async def test_answer_without_a_limit_is_whole(name: str) -> None:
    """Neither the client nor the engine has named one."""
    found = await outcome(name, [STREAMS[name]], job(tokens([1, 3]), output_tokens_max=None))
    assert found.ids == [7, 8, STOP]


@pytest.mark.parametrize("name", STREAMS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_answer_does_not_depend_on_where_its_bytes_are_cut(name: str, data: st.DataObject) -> None:
    """Whole answers, answers that break off, and answers that end in an error or in bytes that are no JSON."""
    raw = STREAMS[name]
    raw = raw[: data.draw(st.integers(0, len(raw)), "breaks off at")]
    raw += data.draw(
        st.sampled_from([b"", b'\n\ndata: {"error":{"code":503}}\n\n', b"\n\ndata: x\n\n"])
    )
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=6), "cuts")

    async def both() -> tuple[Outcome, Outcome]:
        return await outcome(name, [raw], JOB), await outcome(name, pieces_of(raw, cuts), JOB)

    whole, cut = asyncio.run(both())
    assert cut == whole


@pytest.mark.parametrize("name", STREAMS)
async def test_warm_up_yields_no_ids(name: str) -> None:
    found = await outcome(name, [STREAMS[name]], job(tokens([1]), 0))
    assert found.ids == []
    assert found.finish is not None


@pytest.mark.parametrize("name", STREAMS)
async def test_pieces_are_taken_where_they_arrive_or_yielded_in_order(name: str) -> None:
    """A job that takes every second piece gets each id once, by one of the two ways."""
    told: list[int] = []
    asked = itertools.count()

    def take(piece: Written) -> bool:
        assert isinstance(piece, Ids)
        is_taken = bool(next(asked) % 2)
        told.extend(piece.ids if is_taken else ())
        return is_taken

    events = [part + b"\n\n" for part in STREAMS[name].split(b"\n\n") if part]
    wanted = job(tokens([1, 3]), take=take)
    async with aclosing(engine(name, Played(events)).sample(wanted)) as pieces:
        async for piece in pieces:
            told.extend(piece.ids if isinstance(piece, Ids) else ())
    assert told == [7, 8, STOP]


@pytest.mark.parametrize("name", STREAMS)
async def test_who_has_taken_an_answer_is_freed_without_the_garbage_collector(name: str) -> None:
    """It is a whole turn with its events."""

    class Taker:
        def take(self, piece: Written) -> bool:
            return True

    taker = Taker()
    freed = weakref.ref(taker)
    gc.disable()
    try:
        found = await outcome(name, [STREAMS[name]], job(tokens([1, 3]), take=taker.take))
        del taker
        assert found.finish is not None
        assert freed() is None
    finally:
        gc.enable()


async def test_request_is_what_the_codec_says_and_the_ids_of_the_prompt() -> None:
    played = Played([STREAMS["shortest"]])
    async for _ in engine("shortest", played).sample(job(tokens([1, 3], [4]), 5)):
        pass
    _, (path, body) = played.sent
    assert path == "/sample"
    sent = msgspec.json.decode(body)
    assert (sent["ids"], sent["model"], sent["limit"]) == ([1, 3, 4], "toy", 5)
    assert sent["temperature"] == 0


async def test_answer_that_is_left_is_aborted_where_the_codec_says_how() -> None:
    played = Played([event({"new": [7]}), event({"new": [8], "end": True})])
    answer = engine("shortest", played).sample(JOB)
    await anext(answer)
    await answer.aclose()
    assert played.sent[-1] == ("/abort", b'{"all":true}')


async def test_what_came_before_an_error_counts() -> None:
    raw = event({"new": [7]}) + event({"error": {"message": "out of memory", "code": 500}})
    found = await outcome("shortest", [raw], JOB)
    assert found.ids == [7]
    assert found.error is EngineFailed


# --- what engines must not say -----------------------------------------------------------------------

# The JSON of an id, and of several, in each kind of server's own event.
SAYING = {
    "shortest": '{"new":[%s]}',
    "vllm": '{"choices":[{"index":0,"text":"","token_ids":[%s]}]}',
    "dynamo": '{"choices":[{"text":"so"}],"nvext":{"completion_token_ids":[%s]}}',
    "sglang": '{"output_ids":[%s],"meta_info":{"completion_tokens":1}}',
    "llamacpp": '{"content":"so","tokens":[%s],"tokens_predicted":1}',
    "likeliest of vllm": '{"choices":[{"token_ids":[7],"logprobs":{"token_logprobs":[-1.0],'
    '"top_logprobs":[{"token_id:%s":-1.0}]}}]}',
    "likeliest of llamacpp": '{"tokens":[7],"tokens_predicted":1,"completion_probabilities":'
    '[{"id":7,"logprob":-1.0,"top_logprobs":[{"id":%s,"logprob":-1.0}]}]}',
}  # fmt: skip
NO_IDS_AT_ALL = [
    *("-1", "-2147483649", "16777216", "2147483648", "4294967295", "4294967296", "8589934592"),
    *("1099511627776", "9223372036854775808", "1" + "0" * 30, "1" + "0" * 5_000),
    *("1.5", "1e3", "1e400", "true", "false", "null", "x", "[]", "[5]", "{}", "NaN", "[[[["),
]


@pytest.mark.parametrize("bad", NO_IDS_AT_ALL, ids=lambda bad: bad[:24])
@pytest.mark.parametrize("kind", SAYING)
async def test_id_that_is_none_is_a_failure_of_the_engine(kind: str, bad: str) -> None:
    name = kind.rpartition(" ")[2]
    said = b"data: " + (SAYING[kind] % bad).encode() + b"\n\n"
    wanted = job(tokens([1]), sampling=Sampling(wants_logprobs=True, top_logprobs=2))
    found = await outcome(name, [said, STREAMS[name]], wanted)

    assert found.error is EngineFailed
    assert all(0 <= id < 2**24 for id in found.ids)


async def test_logprobs_that_do_not_fit_the_ids_are_a_failure_of_the_engine() -> None:
    logprobs = {"token_logprobs": [-1.0], "top_logprobs": [None, None]}
    said = event({"choices": [{"token_ids": [7], "logprobs": logprobs}]})
    found = await outcome("vllm", [said], JOB)
    assert found.error is EngineFailed


@pytest.mark.parametrize("limit", range(1, 5))
@pytest.mark.parametrize("name", STREAMS)
async def test_engine_that_ignores_the_limit_is_cut_off_there(name: str, limit: int) -> None:
    """Whether its ids come one by one or all in one event, and whatever it says of its end."""
    found = await outcome(name, [STREAMS[name]], job(tokens([1]), limit))

    assert found.ids == [7, 8, STOP][:limit]
    assert found.finish is not None
    assert found.finish.reason == ("stop" if limit >= 3 else "length")


async def test_job_that_is_cut_off_at_its_limit_is_stopped_at_the_engine() -> None:
    played = Played([event({"new": [7, 8, 9]}), event({"new": [10], "end": True})])
    pieces = [piece async for piece in answer_of("shortest", played, job(tokens([1]), 2))]

    assert pieces == [Ids([7, 8]), Finish("length")]
    assert played.sent[-1] == ("/abort", b'{"all":true}')


async def test_many_ids_in_one_event_are_read_with_pauses() -> None:
    """Whoever else waits has its time between two pieces."""
    ids, passes, seen = [*range(PIECE_IDS_MAX)] * 3 + [5], 0, list[int]()

    async def other() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    wanted = job(tokens([1]), None, take=lambda piece: pytest.fail("more than is read at once"))
    played = Played([event({"new": ids}), event({"end": True})])
    told: list[int] = []
    async with aclosing(answer_of("shortest", played, wanted)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Ids):
                told += piece.ids
                assert len(piece.ids) <= PIECE_IDS_MAX
                seen.append(passes)
    beside.cancel()
    assert told == ids
    assert len(seen) == 4
    assert seen == sorted(set(seen))


def test_sampling_fields_are_the_same_for_all_but_for_what_a_server_is_known_to_need() -> None:
    sampling = Sampling(0.5, 0, 0.25, 0, seed=2**32)
    assert SamplingFields().of(sampling) == {
        "temperature": 0.5,
        "top_p": 0,
        "presence_penalty": 0.25,
        "frequency_penalty": 0,
        "seed": 2**32,
    }
    odd = SamplingFields(top_p_min=0.1, seed="s", seed_values=2**32 - 1)
    assert odd.of(sampling) == {
        "temperature": 0.5,
        "top_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": 0,
        "s": 1,
    }
    # What nobody chose is the engine's own.
    assert odd.of(Sampling()) == {}


# --- the text of a prompt: written once, and dropped with its history --------------------------------

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
        now = [token_json.text(Tokens(None, chunk, len(chunk))) for chunk in prompt.chunks()]
        assert all(new is old for new, old in zip(now, texts, strict=False))
        texts = now


def test_fork_shares_the_text_of_its_past() -> None:
    token_json = TokenJson()
    trunk = tokens(LONG)
    token_json.text(trunk.plus(id_array(LONG)))
    chunk = trunk.chunks()[-1]
    text = token_json.text(Tokens(None, chunk, len(chunk)))
    size = token_json.bytes

    token_json.text(trunk.plus(id_array([4])))

    assert token_json.text(Tokens(None, chunk, len(chunk))) is text
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
