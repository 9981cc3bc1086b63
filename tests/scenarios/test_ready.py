"""What does it cost to ask `/ready`, and whom can the answer harm? A real server in front of a FAKE chat endpoint."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from aiohttp import web

from tests.engines.fakes.chat import FakeChat, delta, end, usage
from tests.support import fetch, serving

ASKED = 40


@dataclass
class BusyEndpoint(FakeChat):
    """Takes every job, and answers questions about itself with this status."""

    status: int = 200

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []}, status=self.status)


def endpoint() -> BusyEndpoint:
    return BusyEndpoint(events=[delta(content="Hi."), end(), usage(1, 1)])


async def test_many_who_ask_at_once_cost_one_question_to_the_upstream() -> None:
    """Strangers, the operator's scrapes and the load balancer together, at most once a second."""
    fake = endpoint()
    async with fake, serving(engine="chat", engine_url=[fake.url], model=["gpt"]) as served:
        loop = asyncio.get_running_loop()
        before, began = fake.paths.count("/v1/models"), loop.time()
        pages = ["/ready", "/metrics"] * (ASKED // 2)
        answers = await asyncio.gather(*(fetch(served, "GET", page) for page in pages))
        assert {answer.status for answer in answers} == {200}
        asked = fake.paths.count("/v1/models") - before
        assert 1 <= asked <= 1 + int(loop.time() - began)


async def test_endpoint_that_limits_questions_goes_on_serving_and_is_ready() -> None:
    fake = endpoint()
    async with fake, serving(engine="chat", engine_url=[fake.url], model=["gpt"]) as served:
        fake.status = 429
        assert (await fetch(served, "GET", "/ready")).status == 200
        body = {"model": "gpt", "input": "Hi", "store": False}
        assert (await fetch(served, "POST", "/v1/responses", body)).status == 200


async def test_question_that_fails_takes_nothing_from_those_who_send_jobs() -> None:
    fake = endpoint()
    async with fake, serving(engine="chat", engine_url=[fake.url], model=["gpt"]) as served:
        fake.status = 503
        assert (await fetch(served, "GET", "/ready")).status == 503
        body = {"model": "gpt", "input": "Hi", "store": False}
        assert (await fetch(served, "POST", "/v1/responses", body)).status == 200
