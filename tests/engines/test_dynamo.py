"""Does the Dynamo codec speak to NVIDIA Dynamo? Against a FAKE whose bytes were recorded from Dynamo 1.6.1; the real
one is in `tests/dynamo` (make test-dynamo)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest

from segue.engines.dynamo import DYNAMO
from segue.engines.token_engine import TokenEngine
from segue.engines.vllm import VLLM
from segue.errors import EngineFailed, InvalidRequest, Unavailable
from segue.seams.lineage import Lineage
from segue.seams.model import Finish, Grammar, JobStarted, Sampling
from tests.contracts.engine import Bench, chatml
from tests.engines.asking import (
    PROMISES,
    Played,
    Promise,
    finish_of,
    heard,
    ids_of,
    job,
    reply,
    tokens,
    upstream,
)
from tests.engines.fakes.dynamo import FakeDynamo, events_in, shape
from tests.engines.fakes.thread import remote

RECORDED = Path(__file__).parents[1] / "golden" / "dynamo"
END = 151_645


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_engine_keeps_its_promise(promise: Promise) -> None:
    with remote(lambda: FakeDynamo(reply)) as fake:
        async with upstream(fake.url) as address:
            engine = TokenEngine(DYNAMO, address, "fake")
            await heard(engine, job(tokens([1])))
            await promise(Bench(engine, chatml()))


@pytest.mark.parametrize(
    "name, ids, finish",
    [
        ("stop", [2326, 4882, 1617, 2617, 3666, END], Finish("stop", 0)),
        ("length", [1036, 1339, 1592], Finish("length", 32)),
    ],
)
async def test_recorded_answer_is_read(name: str, ids: list[int], finish: Finish) -> None:
    raw = (RECORDED / f"{name}.sse").read_bytes()
    engine = TokenEngine(DYNAMO, Played([raw]), "qwen3")
    pieces = await heard(engine, job(tokens([1]), stops=frozenset({END})))
    assert ids_of(pieces) == ids
    assert pieces[0] == JobStarted(worker="4335089140298178684")
    assert finish_of(pieces) == finish


async def test_fake_sends_the_shapes_that_were_recorded() -> None:
    """But for times, which are not asked for."""
    async with FakeDynamo(lambda ids: [7, 8, END], model="qwen3") as fake:
        for name, limit in (("stop", 9), ("length", 2)):
            raw = await _asked(fake, limit)
            ours, theirs = events_in(raw), events_in((RECORDED / f"{name}.sse").read_bytes())
            for one in theirs:
                cast("dict[str, object]", one.get("nvext", {})).pop("timing", None)
                cast("dict[str, object]", one.get("usage") or {}).pop("total_tokens", None)
            assert shape(ours[0]) == shape(theirs[0])
            assert shape(ours[-1]) == shape(theirs[-1])
            assert shape(ours[-2]["choices"]) == shape(theirs[-2]["choices"])
            assert cast("dict[str, object]", ours[-2]["nvext"]).keys() == (
                cast("dict[str, object]", theirs[-2]["nvext"]).keys()
            )


async def _asked(fake: FakeDynamo, limit: int) -> bytes:
    """The bytes of an answer, as they are on the wire."""
    async with upstream(fake.url) as address:
        body = b'{"prompt":[1],"model":"qwen3","max_tokens":%d,"stop_token_ids":[%d],' % (
            limit,
            END,
        )
        body += b'"nvext":{"extra_fields":["completion_token_ids","worker_id","stop_reason"]}}'
        _, raw = await address.call("POST", "/v1/completions", body)
        return raw


async def test_job_names_its_chain_and_its_priority_and_nothing_that_is_unknown() -> None:
    async with FakeDynamo() as fake, upstream(fake.url) as address:
        engine = TokenEngine(DYNAMO, address, "fake")
        for lineage in (Lineage(), Lineage("resp_1"), Lineage("resp_1", priority=1)):
            pieces = await heard(engine, job(tokens([1, 3], [4]), lineage=lineage, cache_salt="s"))
            assert ids_of(pieces) == [7, 8, 9]
        plain, chained, urgent = fake.requests
        assert "x-dynamo-session-id" not in fake.headers[0]
        assert [one["x-dynamo-session-id"] for one in fake.headers[1:]] == ["resp_1"] * 2
        assert chained["prompt"] == [1, 3, 4]
        assert chained == plain
        hints = cast("dict[str, object]", urgent["nvext"])["agent_hints"]
        assert hints == {"priority": 1}


@pytest.mark.parametrize(
    "schema, name, value",
    [
        (b'{"type":"object"}', "guided_json", {"type": "object"}),
        (Grammar("regex", "a+"), "guided_regex", "a+"),
        (Grammar("lark", 'start: "a"'), "guided_grammar", 'start: "a"'),
    ],
)
async def test_constraint_is_guided(schema: bytes | Grammar, name: str, value: object) -> None:
    async with FakeDynamo() as fake, upstream(fake.url) as address:
        await heard(TokenEngine(DYNAMO, address, "fake"), job(tokens([1]), schema=schema))
        assert fake.requests[-1][name] == value


async def test_front_without_a_worker_is_not_ready_and_to_be_tried_again() -> None:
    async with (
        FakeDynamo(has_workers=False, model="org/fake") as fake,
        upstream(fake.url) as address,
    ):
        engine = TokenEngine(DYNAMO, address, "org/fake")
        assert not await engine.is_ready()
        with pytest.raises(Unavailable, match="No worker"):
            await heard(engine, job(tokens([1])))
        fake.has_workers = True
        assert await engine.is_ready()
        assert engine.facts.context_tokens == fake.context_tokens
        assert ids_of(await heard(engine, job(tokens([1])))) == [7, 8, 9]


async def test_refusal_and_error_in_the_stream_are_told_apart() -> None:
    async with FakeDynamo(fault_at=1) as fake, upstream(fake.url) as address:
        engine = TokenEngine(DYNAMO, address, "fake")
        with pytest.raises(EngineFailed):
            await heard(engine, job(tokens([1])))
        with pytest.raises(InvalidRequest, match="Unsupported parameter"):
            await heard(engine, job(tokens([1]), schema=Grammar("structural_tag", "{}")))


async def test_logprobs_that_do_not_come_are_none() -> None:
    async with FakeDynamo() as fake, upstream(fake.url) as address:
        asked = Sampling(wants_logprobs=True, top_logprobs=2)
        pieces = await heard(TokenEngine(DYNAMO, address, "fake"), job(tokens([1]), sampling=asked))
        assert ids_of(pieces) == [7, 8, 9]
        assert fake.requests[-1]["return_tokens_as_token_ids"] is True


@pytest.mark.parametrize("has_generate", [False, True])
async def test_vllm_codec_says_which_engine_this_is(has_generate: bool) -> None:
    """Its `/inference/v1/generate` refuses as vLLM's does, but does not stream."""
    async with FakeDynamo(has_generate=has_generate) as fake, upstream(fake.url) as address:
        with pytest.raises(EngineFailed, match="--engine dynamo"):
            await heard(TokenEngine(VLLM, address, "fake"), job(tokens([1])))


async def test_jobs_of_a_chain_beside_each_other_have_their_own_answers() -> None:
    async with FakeDynamo(lambda ids: [*ids, 2]) as fake, upstream(fake.url) as address:
        engine = TokenEngine(DYNAMO, address, "fake")
        jobs = [job(tokens([n]), lineage=Lineage(f"resp_{n % 2}")) for n in range(5, 9)]
        answers = await asyncio.gather(*(heard(engine, one) for one in jobs))
        assert [ids_of(one) for one in answers] == [[n, 2] for n in range(5, 9)]
        workers = [cast(JobStarted, one[0]).worker for one in answers]
        assert workers[0] == workers[2] != workers[1] == workers[3]
