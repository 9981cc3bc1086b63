"""Does a server with a small context serve people who set no limits, and many of them at once? With FAKE engines that
refuse exactly what the real ones refuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from segue_embedded.weights import find_weights
from tests.engines.asking import reply
from tests.engines.fakes.server import Fake
from tests.engines.fakes.sglang import FakeSglang
from tests.engines.fakes.vllm import FakeVllm
from tests.support import Served, fetch, serving, until


@asynccontextmanager
async def served_by(engine: str, fake: Fake, **flags: object) -> AsyncIterator[Served]:
    async with fake:
        tokenizer = str(find_weights("smollm2"))
        given = {"engine": engine, "engine_url": [fake.url], "tokenizer": tokenizer}
        async with serving(**(given | {"model": ["fake"]} | flags)) as served:
            yield served


async def asked(served: Served, **fields: object) -> Any:
    body = {"model": "fake", "input": "Hi", "store": False, **fields}
    return (await fetch(served, "POST", "/v1/responses", body)).json


async def context_window(served: Served) -> int | None:
    (card,) = (await fetch(served, "GET", "/v1/models")).json["data"]
    window: int | None = card.get("context_window")
    return window


FAKES = {
    "vllm": lambda: FakeVllm(reply, context_tokens=32_768),
    "vllm, scaled out": lambda: FakeVllm(reply, context_tokens=32_768, is_scaled_out=True),
    "sglang": lambda: FakeSglang(reply, context_tokens=32_768, drafts=6),
}


@pytest.mark.parametrize("kind", FAKES)
async def test_no_limit_and_a_limit_that_is_too_large_are_answered(kind: str) -> None:
    fake = FAKES[kind]()
    async with served_by(kind.partition(",")[0], fake) as served:
        assert await context_window(served) == 32_768
        for limit in (None, 64, 1_000_000):
            answer = await asked(served, max_output_tokens=limit)
            assert answer["status"] == "completed", answer
        compacting = [{"type": "compaction"}]
        assert (await asked(served, context_management=compacting))["status"] == "completed"
        # What nobody chose is not sent but where the engine wants to be told its own, and shown as that or as usual.
        sent = fake.requests[-1].get("sampling_params", fake.requests[-1])
        own = {"temperature": 0.3, "top_p": 0.9} if "scaled" in kind else {}
        assert {"temperature", "top_p", "presence_penalty"} & set(sent) == set(own)  # type: ignore[call-overload]
        shown = {"temperature": 1, "top_p": 1, "presence_penalty": 0} | own
        assert {name: answer[name] for name in shown} == shown


async def test_server_that_hides_its_context_is_learned_from() -> None:
    fake = FakeVllm(reply, context_tokens=32_768, lists_models=False)
    async with served_by("vllm", fake) as served:
        assert await context_window(served) is None
        compacting = [{"type": "compaction"}]
        answer = await asked(served, context_management=compacting, truncation="auto")
        assert answer["status"] == "completed", answer
        assert await context_window(served) == 32_768


async def test_context_that_the_operator_made_too_large_is_still_served() -> None:
    async with served_by(
        "vllm", FakeVllm(reply, context_tokens=32_768), context_tokens=131_072
    ) as served:
        assert await context_window(served) == 131_072
        assert (await asked(served))["status"] == "completed"


async def test_twenty_users_wait_for_nobody() -> None:
    fake = FakeVllm(reply, context_tokens=32_768, hold_at=1)
    async with served_by("vllm", fake) as served:
        users = [asyncio.create_task(asked(served, input=f"Hi {n}")) for n in range(20)]
        await until(lambda: fake.running == 20)
        fake.gate.set()
        assert {(await one)["status"] for one in users} == {"completed"}


async def test_engine_that_is_away_at_the_start_is_asked_when_it_comes() -> None:
    fake = FakeVllm(reply, context_tokens=32_768)
    async with fake:
        await fake.stop()
        tokenizer = str(find_weights("smollm2"))
        async with serving(
            engine="vllm", engine_url=[fake.url], tokenizer=tokenizer, model=["fake"]
        ) as served:
            assert await context_window(served) is None
            await fake.start()
            assert (await asked(served))["status"] == "completed"
            assert await context_window(served) == 32_768


async def test_rate_limit_of_the_engine_is_told_in_its_words() -> None:
    fake = FakeVllm(reply, limited="Rate limit reached: 30 requests a minute.")
    async with served_by("vllm", fake) as served:
        body = {"model": "fake", "input": "Hi", "store": False}
        refused = await fetch(served, "POST", "/v1/responses", body)
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "30 requests a minute" in refused.json["error"]["message"]
        assert refused.headers["retry-after"] == "7"
        # The engine's wish holds for everybody, in words of our own.
        waiting = await fetch(served, "POST", "/v1/responses", body)
        assert (waiting.status, waiting.headers["retry-after"]) == (503, "7")
        assert "asks this server to wait" in waiting.json["error"]["message"]
