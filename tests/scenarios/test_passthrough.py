"""Embeddings and plain completions reach an engine that has them, within the limits of the key. Engines are FAKE."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from segue.accounts.hashes import issue_key
from segue.limits import KeyLimits
from tests.engines.fakes.chat import FakeChat
from tests.support import MODEL, fetch, metric, serving, until

USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
ASKED = {"model": "gpt", "prompt": "Once"}


@dataclass
class FakeEndpoint(FakeChat):
    """Has the older endpoints as well, and plays the same each time."""

    lacks: str = ""
    # Embeddings wait for this.
    may_answer: asyncio.Event | None = None

    def routes(self) -> list[web.RouteDef]:
        older = [
            web.post("/v1/completions", self._plain),
            web.post("/v1/embeddings", self._embeddings),
        ]
        return [*super().routes(), *(route for route in older if route.path != self.lacks)]

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = await self.body_of(request)
        if self.refuses is not None:
            return self.refusal(*self.refuses)
        if self.may_answer is not None:
            await self.may_answer.wait()
        row = {"object": "embedding", "index": 0, "embedding": [0.5] * 64}
        usage = {"prompt_tokens": 9, "total_tokens": 9}
        answer = {"object": "list", "data": [row], "model": body["model"], "usage": usage}
        return web.json_response(answer)

    async def _plain(self, request: web.Request) -> web.StreamResponse:
        body = await self.body_of(request)
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
        choice = {"index": 0, "text": " upon", "logprobs": None, "finish_reason": "stop"}
        if not body.get("stream"):
            return web.json_response({**head, "choices": [choice], "usage": USAGE})
        response = await self.begin(request)
        for event in ({"choices": [choice]}, {"choices": [], "usage": USAGE}):
            await response.write(b"data: %b\n\n" % json.dumps({**head, **event}).encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def flags(*fakes: FakeEndpoint, **more: Any) -> dict[str, Any]:
    return {"engine": "chat", "engine_url": [fake.url for fake in fakes], "model": ["gpt"], **more}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
async def test_embeddings_are_those_of_the_engine(path: str) -> None:
    async with FakeEndpoint() as fake, serving(**flags(fake)) as served:
        body = {"model": "gpt", "input": ["a", "b"], "dimensions": 64}
        answer = await fetch(served, "POST", path, body)
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        assert len(answer.json["data"][0]["embedding"]) == 64
        assert fake.requests == [body]
        name = 'segue_turns_total{outcome="completed",transport="passthrough_http"}'
        assert await metric(served, name) == 1
        assert await metric(served, 'segue_input_tokens_total{model="gpt"}') == 9


async def test_body_is_weighed_and_keeps_nobody_waiting_while_the_engine_works() -> None:
    async with FakeEndpoint(may_answer=asyncio.Event()) as fake, serving(**flags(fake)) as served:
        assert fake.may_answer is not None
        memory, text = served.app.state.memory, "x" * 1_000_000
        body = {"model": "gpt", "input": text}
        asked = asyncio.create_task(fetch(served, "POST", "/v1/embeddings", body))
        await until(lambda: fake.requests)
        assert memory.intake.bytes == 0
        assert memory.bytes > 3 * len(text)
        fake.may_answer.set()
        assert (await asked).status == 200
        assert memory.bytes < len(text)
        memory.is_full = True
        refused = await fetch(served, "POST", "/v1/embeddings", body)
        assert (refused.status, len(fake.requests)) == (503, 1)


async def test_completion_is_that_of_the_engine() -> None:
    async with FakeEndpoint() as fake, serving(**flags(fake)) as served:
        answer = await fetch(served, "POST", "/v1/completions", {**ASKED, "suffix": "end"})
        assert (answer.status, answer.json["choices"][0]["text"]) == (200, " upon")
        assert fake.requests == [{**ASKED, "suffix": "end"}]
        assert await metric(served, 'segue_output_tokens_total{model="gpt"}') == 3


@pytest.mark.parametrize("wants_usage", [False, True])
async def test_completion_is_streamed_and_counted(wants_usage: bool) -> None:
    asked: dict[str, Any] = {**ASKED, "stream": True}
    if wants_usage:
        asked["stream_options"] = {"include_usage": True}
    async with FakeEndpoint() as fake, serving(**flags(fake)) as served:
        answer = await fetch(served, "POST", "/v1/completions", asked)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert answer.body.count(b"data: {") == 1 + wants_usage
        assert (b'"prompt_tokens"' in answer.body) is wants_usage
        assert await metric(served, 'segue_output_tokens_total{model="gpt"}') == 3


async def test_alias_is_called_by_the_name_that_the_engine_knows(tmp_path: Path) -> None:
    async with FakeEndpoint() as fake:
        config = tmp_path / "segue.toml"
        config.write_text(
            f'[[models]]\nname = "gpt"\nengine = "chat"\nengine_url = ["{fake.url}"]\naliases = ["text-ada"]\n'
            "output_tokens_max = 7\n"
        )
        async with serving(config=str(config)) as served:
            await fetch(served, "POST", "/v1/completions", {**ASKED, "model": "text-ada"})
            unknown = await fetch(served, "POST", "/v1/completions", {**ASKED, "model": "x"})
    assert fake.requests == [{**ASKED, "max_tokens": 7}]
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")


async def test_other_replica_is_asked_where_one_is_gone() -> None:
    async with (
        FakeEndpoint() as first,
        FakeEndpoint() as second,
        serving(**flags(first, second)) as served,
    ):
        for _ in range(4):
            assert (await fetch(served, "POST", "/v1/completions", ASKED)).status == 200
        await first.stop()
        for _ in range(4):
            assert (await fetch(served, "POST", "/v1/completions", ASKED)).status == 200
        await second.stop()
        answer = await fetch(served, "POST", "/v1/completions", ASKED)
    assert (answer.status, answer.json["error"]["code"]) == (503, "server_is_overloaded")


async def test_engine_that_lacks_it_says_so_and_still_takes_turns() -> None:
    async with FakeEndpoint(lacks="/v1/embeddings") as fake, serving(**flags(fake)) as served:
        for _ in range(5):
            answer = await fetch(served, "POST", "/v1/embeddings", {"model": "gpt", "input": "a"})
            assert (answer.status, answer.json["error"]["param"]) == (404, "model")
            assert "does not have /v1/embeddings" in answer.json["error"]["message"]
        name = 'segue_turns_total{outcome="refused",transport="passthrough_http"}'
        assert await metric(served, name) == 5
        assert (await fetch(served, "POST", "/v1/completions", ASKED)).status == 200
    async with serving() as served:
        answer = await fetch(served, "POST", "/v1/embeddings", {"model": MODEL, "input": "a"})
    assert (answer.status, answer.json["error"]["code"]) == (404, "unknown_url")


async def test_refusal_of_the_engine_reaches_the_client() -> None:
    refuses = (400, "The model does not support Embeddings API")
    async with FakeEndpoint(refuses=refuses) as fake, serving(**flags(fake)) as served:
        answer = await fetch(served, "POST", "/v1/embeddings", {"model": "gpt", "input": "a"})
    assert answer.status == 400
    assert "does not support Embeddings API" in answer.json["error"]["message"]


async def test_tokens_count_against_the_limits_of_the_key() -> None:
    async with FakeEndpoint() as fake, serving(**flags(fake, auth="keys")) as served:
        state = served.app.state
        limits = KeyLimits(tokens_per_min=10)
        _, secret = await issue_key(state.store.keys, state.hashes, "test", "ada", limits=limits)
        headers = {"Authorization": f"Bearer {secret}"}
        answers = [await fetch(served, "POST", "/v1/completions", ASKED, headers) for _ in range(2)]
        nobody = await fetch(served, "POST", "/v1/completions", ASKED)
        _, other = await issue_key(
            state.store.keys, state.hashes, "other", "bob", scopes=["models"]
        )
        headers = {"Authorization": f"Bearer {other}"}
        forbidden = await fetch(served, "POST", "/v1/completions", ASKED, headers)
        await served.app.runner.records.afterwards.drained()
        (used,) = await state.store.ledger.report("ada", 0)
    assert [answer.status for answer in answers] == [200, 429]
    assert (nobody.status, forbidden.status) == (401, 403)
    assert (used.input_tokens, used.output_tokens) == (9, 3)


async def test_stream_that_its_client_leaves_before_the_count_is_counted_all_the_same() -> None:
    """Else no limit of a key would hold for who reads all but the last event."""

    @dataclass
    class Talking(FakeEndpoint):
        async def _plain(self, request: web.Request) -> web.StreamResponse:
            await self.body_of(request)
            response = await self.begin(request)
            for _ in range(5):
                await response.write(b'data: {"choices":[{"index":0,"text":" word"}]}\n\n')
            await asyncio.Event().wait()
            return response

    async with Talking() as fake, serving(**flags(fake, auth="keys")) as served:
        state = served.app.state
        limits = KeyLimits(tokens_per_min=20)
        _, secret = await issue_key(state.store.keys, state.hashes, "test", "ada", limits=limits)
        headers = {"Authorization": f"Bearer {secret}"}
        body = {**ASKED, "prompt": "word " * 20, "stream": True}
        async with (
            ClientSession(headers=headers) as client,
            client.post(f"{served.url}/v1/completions", json=body) as answer,
        ):
            got = b""
            while got.count(b"word") < 5:
                got += await answer.content.readany()
            answer.close()

        async def is_written() -> bool:
            return bool(await state.store.ledger.report("ada", 0))

        await until(is_written)
        (used,) = await state.store.ledger.report("ada", 0)
        refused = await fetch(served, "POST", "/v1/completions", ASKED, headers)
    assert used.output_tokens == 5
    assert 20 <= used.input_tokens <= 50
    assert refused.status == 429


async def test_model_with_guards_takes_nothing_unseen() -> None:
    async with FakeEndpoint() as fake, serving(**flags(fake, guard=("rules",))) as served:
        answer = await fetch(served, "POST", "/v1/completions", ASKED)
    assert answer.status == 403
    assert "guards" in answer.json["error"]["message"]


async def test_paths_are_off_where_chat_is_off() -> None:
    async with FakeEndpoint() as fake, serving(**flags(fake, apis=["responses"])) as served:
        answer = await fetch(served, "POST", "/v1/completions", ASKED)
    assert answer.status == 404
    assert "--apis" in answer.json["error"]["message"]
