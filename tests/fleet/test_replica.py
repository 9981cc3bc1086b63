"""The counting replica over real HTTP, asked by Segue's own vLLM engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
import pytest

from segue.engines.token_engine import TokenEngine
from segue.engines.upstream import Upstream
from segue.engines.vllm import VLLM
from segue_fleet.blocks import ReplicaShape
from segue_fleet.replica import Arrival, Replica, ReplicaCounters, Words, serve
from tests.engines.asking import STOP, finish_of, heard, ids_of, job, tokens, upstream

# Its clock is ten times as fast as ours.
SHAPE = ReplicaShape(kv_tokens=800, slots=2, prefill_tps=10_000, decode_tps=1_000, block_tokens=16)
WORDS = Words([50, 51, 52], stop=STOP)
T = TypeVar("T")


@asynccontextmanager
async def asked(seed: int = 1) -> AsyncIterator[tuple[TokenEngine, Upstream]]:
    replica = Replica(SHAPE, model="counted", seed=seed, time_factor=10, words=WORDS)
    server = await serve(replica, 0)
    try:
        async with upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as address:
            yield TokenEngine(VLLM, address, "counted"), address
    finally:
        server.close()


async def page(address: Upstream, path: str, kind: type[T]) -> T:
    status, body = await address.call("GET", path)
    assert status == 200
    return msgspec.json.decode(body, type=kind)


async def test_engine_learns_what_was_found_and_the_replica_counts_it() -> None:
    async with asked() as (engine, address):
        assert await engine.is_ready()
        assert engine.facts.context_tokens == 1_048_576
        first = await heard(engine, job(tokens(list(range(3, 103))), output_tokens_max=12))
        answer = list(ids_of(first))
        assert len(answer) == 12
        assert answer[-1] == STOP
        assert set(answer[:-1]) <= set(WORDS.ids)
        assert finish_of(first).reason == "stop"
        assert finish_of(first).cached_tokens == 0
        longer = tokens([*range(3, 103), *answer, *range(200, 210)])
        assert finish_of(await heard(engine, job(longer, output_tokens_max=4))).cached_tokens == 112

        sums = await page(address, "/counters", ReplicaCounters)
        assert (sums.requests, sums.prompt_tokens, sums.found_tokens) == (2, 222, 112)
        assert sums.computed_tokens == 110
        assert sums.answer_tokens == 16
        assert sums.kv_tokens_max == 800
        arrivals = await page(address, "/arrivals", list[Arrival])
        assert [one.found_tokens for one in arrivals] == [0, 112]
        assert arrivals[1].digests[:7] == arrivals[0].digests[:7]
        status, metrics = await address.call("GET", "/metrics")
        assert (status, b'hits_total{model_name="counted"} 112' in metrics) == (200, True)


async def test_same_seed_gives_the_same_answer_elsewhere() -> None:
    answers = []
    for seed in (1, 1, 2):
        async with asked(seed) as (engine, _):
            answers.append(
                list(
                    ids_of(await heard(engine, job(tokens([5, 6, 7]), output_tokens_max=1_000_000)))
                )
            )
    assert answers[0] == answers[1] != answers[2]
    assert 20 <= len(answers[0]) <= 200


async def test_jobs_beyond_the_slots_wait_and_old_prompts_are_forgotten() -> None:
    async with asked() as (engine, address):
        prompts = [tokens([n] * 480) for n in range(10, 14)]
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(heard(engine, job(prompt, output_tokens_max=40)))
        sums = await page(address, "/counters", ReplicaCounters)
        assert sums.wait_s_p95 > sums.wait_s_p50 > 0
        assert sums.kv_tokens == sums.kv_tokens_max
        again = await heard(engine, job(prompts[0], output_tokens_max=2))
        assert (finish_of(again).cached_tokens or 0) < 480


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 422), (b"{}", 400), (b'{"token_ids":["a"]}', 422)]
)
async def test_bad_request_is_refused_and_the_connection_goes_on(body: bytes, status: int) -> None:
    async with asked() as (_, address):
        assert (await address.call("POST", "/inference/v1/generate", body))[0] == status
        assert (await address.call("GET", "/nothing"))[0] == 404
        assert (await address.call("GET", "/health"))[0] == 200
