"""How many requests wait for an engine? The metrics of any worker and the log say the same: those of all workers."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web

from segue.cluster.hub import Hub
from segue.server import health
from segue.server.app import WorkerPlace
from segue_embedded.weights import find_weights
from tests.engines.fakes.vllm import FakeVllm
from tests.support import Served, fetch, metric, serving, until

Pair = tuple[Served, Served, "BusyEngine"]


class BusyEngine(FakeVllm):
    """A FAKE engine that works on its jobs, and is then too busy to say that it is up."""

    is_busy = False

    async def _health(self, request: web.Request) -> web.Response:
        if self.is_busy:
            await self.gate.wait()
        return await super()._health(request)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """Two workers of one server, whose engine takes two jobs at once and holds them."""
    async with AsyncExitStack() as stack:
        engine = BusyEngine(hold_at=1)
        await stack.enter_async_context(engine)
        place = WorkerPlace(group="here", hub=str(tmp_path / "hub"))
        await stack.enter_async_context(Hub().opened(place.hub))
        flags = {
            "store": f"sqlite:///{tmp_path / 'shared.db'}",
            "seal_keys": str(tmp_path / "seals"),
            "engine": "vllm",
            "engine_url": (engine.url,),
            "engine_parallel": 2,
            "model": ("fake",),
            "tokenizer": str(find_weights("smollm2")),
        }
        here = await stack.enter_async_context(serving(place, **flags))
        there = await stack.enter_async_context(serving(place, **flags))
        await until(lambda: here.app.state.peers.others and there.app.state.peers.others)
        yield here, there, engine


async def test_metrics_of_any_worker_and_the_log_count_those_that_wait_at_all_workers(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, there, engine = pair
    caplog.set_level(logging.WARNING)
    gauge = f'{{replica="{engine.url}"}}'
    body = {"model": "fake", "input": "x", "store": False}
    tasks = [
        asyncio.create_task(fetch(served, "POST", "/v1/responses", body))
        for served in (here, here, here, there, there, there)
    ]
    async with asyncio.timeout(10):
        while await metric(here, "segue_engine_waiting" + gauge) < 4:
            pass
    monkeypatch.setattr(health, "PAGE_S_MAX", 0.1)
    engine.is_busy = True
    for served in (here, there):
        served.app.health.renew()
    for served in (here, there):
        assert await metric(served, "segue_workers") == 2
        assert await metric(served, "segue_engine_waiting" + gauge) == 4
        assert await metric(served, "segue_engine_running" + gauge) == 2
    await until(lambda: "is full" in caplog.text)
    figures = re.findall(r"is full: (\d+) requests run and (\d+) wait", caplog.text)
    assert set(figures) == {("2", "4")}
    engine.gate.set()
    assert {(await task).status for task in tasks} == {200}
