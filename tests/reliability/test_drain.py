"""A stop with a thousand responses in flight, over four workers, again and again: none is truncated."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest
import websockets

from tests.support import MODEL, ServedProcess, Wire, fetch, served_process

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(1500)]

TIMES = 10
SOCKETS = 50
LANES = 12
STREAMS = 400
WAIT_S = 120


async def test_ten_restarts_truncate_none_of_a_thousand_responses_each(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"text": "x", "pad_tokens": 200}]}))
    words = ["--workers", "4", "--store", f"sqlite:///{tmp_path / 'turns.db'}"]
    words += ["--script", str(script), "--tps", "20", "--grace-s", "100"]
    kept: list[str] = []
    for _ in range(TIMES):
        with served_process(*words, cwd=tmp_path) as served:
            # What was acknowledged before the last stop is still there.
            for one in kept:
                assert (await fetch(served, "GET", f"/v1/responses/{one}")).status == 200
            kept = await stop_under_load(served)
        assert "Traceback" not in "".join(served.printed)


async def stop_under_load(served: ServedProcess) -> list[str]:
    """Some of the responses that ended after the signal."""
    sockets = [
        Wire(await websockets.asyncio.client.connect(served.ws_url, max_size=None))
        for _ in range(SOCKETS)
    ]
    for socket in sockets:
        for lane in range(LANES):
            await socket.create(input="x", stream_id=str(lane))
    body = {"model": MODEL, "input": "x", "stream": True}
    streams = [
        asyncio.create_task(fetch(served, "POST", "/v1/responses", body)) for _ in range(STREAMS)
    ]
    async with asyncio.timeout(WAIT_S):
        ended = await asyncio.gather(*map(begun, sockets))
        served.process.send_signal(signal.SIGTERM)
        whole = await asyncio.gather(*map(rest, sockets, ended))
        for answer in await asyncio.gather(*streams):
            assert answer.status == 503 or answer.events[-1]["type"] == "response.completed"
    assert [len(one) for one in whole] == [LANES] * SOCKETS
    assert [socket.socket.close_code for socket in sockets] == [1012] * SOCKETS
    assert await asyncio.to_thread(served.process.wait, WAIT_S) == 0
    return [one[0] for one in whole]


async def begun(socket: Wire) -> list[str]:
    """Read until every lane has begun; what has been completed by then."""
    left, completed = LANES, []
    while left:
        event = await socket.next()
        left -= event["type"] == "response.created"
        if event["type"] == "response.completed":
            completed.append(event["response"]["id"])
    return completed


async def rest(socket: Wire, completed: list[str]) -> list[str]:
    """Read until the server closes; all that was completed."""
    try:
        while True:
            event = await socket.next()
            assert event["type"] not in ("response.failed", "error"), event
            if event["type"] == "response.completed":
                completed.append(event["response"]["id"])
    except websockets.ConnectionClosed:
        return completed
