"""Does the SGLang engine speak as SGLang's source says? Against a FAKE: no SGLang was ever observed here."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Literal

import pytest

from segue.engines.sglang import SGLANG
from segue.engines.token_engine import TokenEngine
from segue.errors import EngineFailed, InvalidRequest, Unavailable
from segue.seams.lineage import Lineage
from segue.seams.model import Finish, Grammar, JobStarted, Sampling, TokenLogprob
from tests.contracts.engine import Bench, chatml
from tests.engines.asking import (
    PROMISES,
    STOP,
    WAIT_S,
    Played,
    Promise,
    finish_of,
    heard,
    ids_of,
    job,
    logprobs_of,
    reply,
    tokens,
    upstream,
)
from tests.engines.fakes.server import DONE, event
from tests.engines.fakes.sglang import FakeSglang
from tests.engines.fakes.thread import remote

WAYS = pytest.mark.parametrize("is_incremental", [False, True])


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@WAYS
async def test_engine_keeps_its_promise(promise: Promise, is_incremental: bool) -> None:
    with remote(lambda: FakeSglang(reply, is_incremental=is_incremental)) as fake:
        async with upstream(fake.url) as address:
            await promise(Bench(TokenEngine(SGLANG, address), chatml()))


@WAYS
@pytest.mark.parametrize("interval", [1, 2, 5, 100])
async def test_every_id_is_heard_once_however_they_are_repeated(
    is_incremental: bool, interval: int
) -> None:
    fake = FakeSglang(reply, is_incremental=is_incremental, interval=interval)
    async with fake, upstream(fake.url) as address:
        pieces = await heard(TokenEngine(SGLANG, address), job(tokens([1, 3])))
        assert ids_of(pieces) == reply([1, 3])


async def test_request_has_the_fields_that_sglang_knows() -> None:
    async with FakeSglang() as fake, upstream(fake.url) as address:
        wanted = job(
            tokens([1, 3]),
            5,
            sampling=Sampling(0.5, 0, 0.25, -0.5, seed=7),
            schema=b'{"type":"object"}',
        )
        await heard(TokenEngine(SGLANG, address), wanted)
        sent = fake.requests[-1]
        assert sent["input_ids"] == [1, 3]
        assert sent["stream"] is True
        assert sent["rid"]
        settings = sent["sampling_params"]
        assert isinstance(settings, dict)
        assert settings["max_new_tokens"] == 5
        assert settings["stop_token_ids"] == [STOP]
        assert settings["sampling_seed"] == 7
        assert json.loads(settings["json_schema"]) == {"type": "object"}
        assert 0 < settings["top_p"] < 0.001


async def test_engine_says_how_much_of_the_prompt_it_kept() -> None:
    async with FakeSglang(block=1) as fake, upstream(fake.url) as address:
        engine = TokenEngine(SGLANG, address)
        assert await heard(engine, job(tokens([1] * 40), 0)) == [
            JobStarted(0),
            Finish("length", 0),
        ]
        assert finish_of(await heard(engine, job(tokens([1] * 60)))).cached_tokens == 40


@pytest.mark.parametrize("hold_at", [0, 1])
async def test_cancelled_turn_is_aborted_by_name_at_once(hold_at: int) -> None:
    async with FakeSglang(hold_at=hold_at) as fake, upstream(fake.url) as address:
        asking = asyncio.create_task(heard(TokenEngine(SGLANG, address), job(tokens([1]))))
        async with asyncio.timeout(WAIT_S):
            await fake.held.wait()
        asking.cancel()
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait([asking])
            await fake.left.wait()
        assert asking.cancelled()
        assert fake.aborted == [fake.requests[0]["rid"]]


async def test_answer_that_was_heard_out_is_not_aborted() -> None:
    async with FakeSglang() as fake, upstream(fake.url) as address:
        await heard(TokenEngine(SGLANG, address), job(tokens([1])))
        assert fake.aborted == []


async def test_prompt_that_does_not_fit_is_the_clients_error() -> None:
    async with FakeSglang(context_tokens=50) as fake, upstream(fake.url) as address:
        with pytest.raises(InvalidRequest) as raised:
            await heard(TokenEngine(SGLANG, address), job(tokens([1] * 60)))
        assert raised.value.code == "context_length_exceeded"


async def test_request_that_the_server_aborts_is_not_taken_for_an_answer() -> None:
    async with FakeSglang(fault_at=2) as fake, upstream(fake.url) as address:
        with pytest.raises(Unavailable):
            await heard(TokenEngine(SGLANG, address), job(tokens([1])))


async def test_server_that_dies_in_the_middle_is_a_failure() -> None:
    async with FakeSglang(break_at=1) as fake, upstream(fake.url) as address:
        with pytest.raises(EngineFailed):
            await heard(TokenEngine(SGLANG, address), job(tokens([1])))


@WAYS
@pytest.mark.parametrize("interval", [1, 3])
async def test_logprobs_belong_to_their_ids(is_incremental: bool, interval: int) -> None:
    fake = FakeSglang(reply, is_incremental=is_incremental, interval=interval)
    async with fake, upstream(fake.url) as address:
        asked = Sampling(top_logprobs=2, wants_logprobs=True)
        pieces = await heard(TokenEngine(SGLANG, address), job(tokens([1, 3]), sampling=asked))
        alone = Sampling(wants_logprobs=True)
        bare = await heard(TokenEngine(SGLANG, address), job(tokens([1, 3]), sampling=alone))
    ids = ids_of(pieces)
    assert logprobs_of(pieces) == [
        TokenLogprob(-id / 8, ((1, -1 / 64), (2, -2 / 64))) for id in ids
    ]
    assert logprobs_of(bare) == [TokenLogprob(-id / 8) for id in ids]


@pytest.mark.parametrize("syntax", ["regex", "structural_tag"])
async def test_grammar_is_handed_on(syntax: Literal["regex", "structural_tag"]) -> None:
    async with FakeSglang() as fake, upstream(fake.url) as address:
        engine = TokenEngine(SGLANG, address)
        assert engine.grammars == {"regex", "structural_tag"}
        await heard(engine, job(tokens([1]), schema=Grammar(syntax, "[0-9]+")))
        settings = fake.requests[-1]["sampling_params"]
        assert isinstance(settings, dict)
        assert settings[syntax] == "[0-9]+"
        assert "json_schema" not in settings


@pytest.mark.parametrize("is_low_first, sent", [(False, 1), (True, -1)])
async def test_chain_and_priority_are_sent_as_the_server_takes_them(
    is_low_first: bool, sent: int
) -> None:
    lineage = Lineage("resp_1", priority=1)
    fake = FakeSglang(takes_priority=True, is_low_first=is_low_first)
    async with fake, upstream(fake.url) as address:
        engine = TokenEngine(SGLANG, address)
        for _ in range(2):
            await heard(engine, job(tokens([1]), lineage=lineage))
        assert fake.requests[-1]["priority"] == sent
        assert fake.headers[-1]["x-smg-routing-key"] == fake.headers[-1]["x-session-id"] == "resp_1"
        # Each request has an id of its own, which SGLang's router cuts back to the chain.
        ids = [str(one["rid"]) for one in fake.requests]
        assert len(set(ids)) == 2
        assert [re.sub(r"_t[0-9]+$", "", id) for id in ids] == ["resp_1"] * 2


async def test_server_without_priorities_is_sent_none() -> None:
    async with FakeSglang() as fake, upstream(fake.url) as address:
        await heard(TokenEngine(SGLANG, address), job(tokens([1]), lineage=Lineage(priority=1)))
        assert "priority" not in fake.requests[-1]
        assert str(fake.requests[-1]["rid"]).startswith("req_")


async def test_ids_after_the_end_are_dropped() -> None:
    ends = {"completion_tokens": 1, "finish_reason": {"type": "length"}}
    late = {"completion_tokens": 2, "finish_reason": {"type": "stop"}}
    said = [event({"output_ids": [7], "meta_info": ends})]
    said += [event({"output_ids": [7, 8], "meta_info": late}), DONE]
    pieces = await heard(TokenEngine(SGLANG, Played(said)), job(tokens([1])))

    assert ids_of(pieces) == [7]
    assert finish_of(pieces).reason == "length"
