"""Two servers behind a real HAProxy, with the settings that we ship: clients do not notice which one they speak to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from tests.haproxy import Balanced, haproxy
from tests.postgres import PostgresServer
from tests.support import (
    MODEL,
    Answer,
    Served,
    ServedProcess,
    Wire,
    fetch,
    metric,
    served_process,
    until,
    wire,
)

pytestmark = pytest.mark.timeout(100)


@pytest.fixture
async def store(postgres: PostgresServer) -> AsyncIterator[str]:
    url = await postgres.make_database()
    yield url
    await postgres.drop_database(url)


def flags(folder: Path, store: str) -> list[str]:
    script = folder / "script.json"
    script.write_text(json.dumps({"turns": [{"text": "x", "pad_tokens": 150}]}))
    words = ["--store", store, "--script", str(script), "--tps", "100", "--grace-s", "20"]
    return words


def as_served(balanced: Balanced) -> Served:
    """What our small clients need to know of a server is its port."""
    return cast("Served", balanced)


async def post(balanced: Balanced, **fields: Any) -> Answer:
    answer = await fetch(as_served(balanced), "POST", "/v1/responses", {"model": MODEL, **fields})
    assert answer.status == 200, answer.body
    return answer


async def turns_of(served: ServedProcess, outcome: str) -> float:
    return await metric(served, f'segue_turns_total{{outcome="{outcome}",transport="http"}}')


async def test_chain_cancel_and_follow_cross_two_servers(tmp_path: Path, store: str) -> None:
    async with AsyncExitStack() as stack:
        settings = flags(tmp_path, store)
        here = stack.enter_context(served_process(*settings, cwd=tmp_path))
        there = stack.enter_context(served_process(*settings, cwd=tmp_path))
        balanced = stack.enter_context(haproxy(tmp_path, [here.port, there.port]))

        last = None
        for _ in range(4):
            answer = await post(balanced, input="x", previous_response_id=last, max_output_tokens=1)
            last = answer.json["id"]
        async with wire(as_served(balanced)) as socket:
            end = await socket.turn(input="x", previous_response_id=last, max_output_tokens=1)
            assert end["type"] == "response.incomplete"
        # In turns: half of the chain was made by each.
        assert [await turns_of(one, "incomplete") for one in (here, there)] == [2, 2]

        begun = [(await post(balanced, input="x", background=True)).json["id"] for _ in range(4)]
        followed = [
            asyncio.create_task(
                fetch(as_served(balanced), "GET", f"/v1/responses/{one}?stream=true")
            )
            for one in begun[:1] * 2
        ]
        cancelled = [
            (await fetch(as_served(balanced), "POST", f"/v1/responses/{one}/cancel")).json
            # One after the other, so that each is asked for at the server that does not run it as well.
            for one in begun[1:] * 2
        ]
        assert {one["status"] for one in cancelled} == {"cancelled"}
        first, second = [(await one).events for one in followed]
        assert first == second
        assert first[-1]["type"] == "response.completed"


async def test_rolling_restart_truncates_nothing_and_clients_come_back(
    tmp_path: Path, store: str
) -> None:
    """One server is stopped while both are at work: its sockets are told, and the next turn goes on at the other."""
    async with AsyncExitStack() as stack:
        settings = flags(tmp_path, store)
        here = stack.enter_context(served_process(*settings, cwd=tmp_path))
        there = stack.enter_context(served_process(*settings, cwd=tmp_path))
        balanced = stack.enter_context(haproxy(tmp_path, [here.port, there.port]))
        # One after the other, before anything else: so each server gets half of them.
        sockets = [await stack.enter_async_context(wire(as_served(balanced))) for _ in range(4)]
        body = {"model": MODEL, "input": "x", "stream": True}
        streams = [
            asyncio.create_task(fetch(as_served(balanced), "POST", "/v1/responses", body))
            for _ in range(10)
        ]
        for socket in sockets:
            await socket.create(input="x")
            await socket.next()
        stopping = asyncio.create_task(asyncio.to_thread(here.stop))
        ends = [(await socket.events())[-1] for socket in sockets]
        assert {end["type"] for end in ends} == {"response.completed"}
        assert {(await one).events[-1]["type"] for one in streams} == {"response.completed"}
        assert await stopping == 0
        # Half of the sockets were its own; they were told, the others were not.
        await until(lambda: len(told(sockets)) == 2)
        async with wire(as_served(balanced)) as again:
            parent = ends[sockets.index(told(sockets)[0])]["response"]["id"]
            following = await again.turn(
                input="y", previous_response_id=parent, max_output_tokens=1
            )
            assert following["type"] == "response.incomplete"


def told(sockets: Sequence[Wire]) -> list[Wire]:
    """Those that were closed because their server restarts."""
    return [one for one in sockets if one.socket.close_code == 1012]
