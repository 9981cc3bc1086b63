"""What a running process takes over from new settings, and what it keeps."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segue.engines.queued import QueuedEngine, servers_of
from segue.errors import Misconfigured
from segue.replicas.router import RoutedEngine
from segue.server.control import Reloaded
from segue.server.reload import compare
from segue.server.served import served_models
from segue.settings.checks import load_settings
from segue.settings.values import Settings
from tests.engines.fakes.chat import FakeChat, delta, end
from tests.support import WAIT_S, Served, fetch, serving, until


def settings(**flags: object) -> Settings:
    return load_settings({"engine": "scripted", "store": "memory", "port": 0} | flags, {})


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


def test_differences_are_named_and_only_what_can_change_is_wanted() -> None:
    old = settings(model=["one", "two"])
    new = settings(
        model=["two", "three"], temperature=0.5, port=1, workers=2, store="sqlite:///x", grace_s=1
    )
    wanted, result = compare(old, new)
    assert result == Reloaded(
        ["grace_s", "model one (removed)", "model two (temperature)", "model three (added)"],
        ["port", "workers", "store"],
    )
    assert [one.name for one in served_models(wanted)] == ["two", "three"]
    assert (wanted.port, wanted.workers, wanted.store) == (old.port, old.workers, old.store)
    assert compare(wanted, wanted) == (wanted, Reloaded([], []))


async def answer(served: Served, **fields: Any) -> Any:
    body = {"model": "one", "input": "please", **fields}
    return (await fetch(served, "POST", "/v1/responses", body)).json


def text_of(response: Any) -> str:
    return str(response["output"][0]["content"][0]["text"])


async def test_guards_limits_scripts_and_log_level_come_into_force(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"text": "before"}]}))
    flags: dict[str, object] = {"model": ["one"], "script": str(script)}
    async with serving(**flags) as served:
        first = await answer(served)
        assert text_of(first) == "before"
        engine = served.app.runner.models["one"].engine
        # The same settings: the engine stays.
        await served.app.reload.check(settings(**flags, temperature=0.5))
        served.app.reload.apply()
        model = served.app.runner.models["one"]
        assert model.engine is engine
        assert model.sampling.temperature == 0.5
        # Something wrong: nothing changes, not even what was right.
        with pytest.raises(Misconfigured, match="nope"):
            await served.app.reload.check(settings(**flags, websocket=False, guard=["nope"]))
        assert served.app.runner.models["one"] is model
        script.write_text(json.dumps({"turns": [{"text": "and after"}]}))
        wanted = settings(**flags, guard=["rules"], websocket=False, log_level="debug")
        await served.app.reload.check(wanted)
        assert text_of(await answer(served)) == "before", "checked is not applied"
        served.app.reload.apply()
        assert text_of(await answer(served, previous_response_id=first["id"])) == "and after"
        refused = await answer(served, input="-----BEGIN PRIVATE KEY-----")
        assert refused["error"]["code"] == "invalid_prompt"
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        upgrade["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
        assert (await fetch(served, "GET", "/v1/responses", headers=upgrade)).status == 426
        assert logging.getLogger().level == logging.DEBUG


async def test_model_goes_from_one_engine_url_to_several_and_back() -> None:
    """A server that stays keeps its queue; jobs that wait for one that goes are served by what comes after it."""

    async def reload(*urls: str) -> None:
        await served.app.reload.check(settings(**flags, engine_url=urls))
        served.app.reload.apply()

    def engine() -> Any:
        return served.app.runner.models["one"].engine

    flags: dict[str, object] = {"engine": "chat", "model": ["one"], "engine_parallel": 1}
    fakes = [FakeChat(events=[delta(content=word), end()]) for word in ("first", "second")]
    async with (
        fakes[0] as first,
        fakes[1] as second,
        serving(**flags, engine_url=[first.url]) as served,
    ):
        alone = engine()
        assert isinstance(alone, QueuedEngine)
        assert text_of(await answer(served)) == "first"
        first.hold_at = 1
        running = asyncio.create_task(answer(served))
        async with asyncio.timeout(WAIT_S):
            await first.held.wait()
        waiting = asyncio.create_task(answer(served))
        await until(lambda: alone.queue.waiting == 1)
        await reload(first.url, second.url)
        router = engine()
        assert isinstance(router, RoutedEngine)
        assert servers_of(router)[0] is alone
        assert text_of(await answer(served)) == "second", "the first one is busy"
        await reload(second.url)
        assert engine() is servers_of(router)[0]
        assert text_of(await waiting) == "second", "what it waited for is removed"
        first.gate.set()
        assert text_of(await running) == "first", "what ran there ends there"
        await reload(first.url)
        assert text_of(await answer(served)) == "first"
