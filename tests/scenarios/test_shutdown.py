"""A stop of the real process: nothing that runs is lost in silence, nothing new begins, and it does end."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import websockets

from segue.process import runner
from segue.turn.plan import Plan
from segue.turn.prepare import prepare
from tests.support import (
    MODEL,
    WAIT_S,
    ServedProcess,
    Wire,
    fetch,
    served_process,
    serving,
    until,
    wire,
)

pytestmark = pytest.mark.timeout(60)

# How long the process may take beyond its grace: a slow machine, and the end of the interpreter.
STOP_S = 15.0


def flags(folder: Path, *, grace_s: float, pad_tokens: int, tps: int = 200) -> list[str]:
    """A server whose turns say one item at once and then talk for `pad_tokens / tps` seconds."""
    script = folder / "script.json"
    turn = {"reasoning": "hm", "text": "x", "pad_tokens": pad_tokens}
    script.write_text(json.dumps({"turns": [turn]}))
    return [
        *("--script", str(script), "--tps", str(tps), "--grace-s", str(grace_s)),
        *("--store", f"sqlite:///{folder / 'turns.db'}"),
    ]


async def begin(socket: Wire, **fields: Any) -> str:
    """Start a turn and wait until its first item is whole; its id."""
    await socket.create(input="x", **fields)
    while (event := await socket.next())["type"] != "response.output_item.done":
        if event["type"] == "response.created":
            response_id: str = event["response"]["id"]
    return response_id


async def stop(served: ServedProcess) -> float:
    """Ask it to stop, and wait until it refuses work; when that was."""
    asked_at = time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(WAIT_S):
        while (await fetch(served, "GET", "/ready")).status != 503:
            pass
    return asked_at


async def exit_status(served: ServedProcess) -> int:
    return await asyncio.to_thread(served.process.wait, WAIT_S)


async def closed_with(socket: Wire) -> int | None:
    with pytest.raises(websockets.ConnectionClosed) as closed:
        await socket.next()
    return closed.value.rcvd.code if closed.value.rcvd else None


def is_clean(served: ServedProcess) -> bool:
    text = "".join(served.printed)
    return "Traceback" not in text and " ERROR " not in text


async def test_running_turns_finish_and_new_work_is_refused(tmp_path: Path) -> None:
    data = {"model": MODEL, "input": "x"}
    with served_process(*flags(tmp_path, grace_s=20, pad_tokens=300), cwd=tmp_path) as served:
        async with wire(served) as socket:
            response_id = await begin(socket)
            streaming = asyncio.create_task(
                fetch(served, "POST", "/v1/responses", {**data, "stream": True})
            )
            plain = asyncio.create_task(fetch(served, "POST", "/v1/responses", data))
            await begin(socket, stream_id="second", store=False)
            await stop(served)

            refused = await fetch(served, "POST", "/v1/responses", data)
            assert refused.status == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["x-request-id"]
            assert refused.json["error"]["code"] == "server_is_overloaded"
            with pytest.raises(websockets.InvalidStatus) as upgrade:
                async with wire(served):
                    pass
            assert upgrade.value.response.status_code == 503
            assert upgrade.value.response.headers["retry-after"]
            # What is there already can still be read.
            assert (await fetch(served, "GET", f"/v1/responses/{response_id}")).status == 200

            await socket.create(input="new", stream_id="new")
            await socket.create(input="waiting")
            ends: dict[str | None, list[dict[str, Any]]] = {}
            while sum(map(len, ends.values())) < 4:
                event = await socket.next()
                if event["type"] in ("error", "response.completed", "response.failed"):
                    ends.setdefault(event.get("stream_id"), []).append(event)
            assert [(one["type"], one["status"]) for one in ends["new"]] == [("error", 503)]
            assert [one["type"] for one in ends["second"]] == ["response.completed"]
            assert [one["type"] for one in ends[None]] == ["response.completed", "error"]
            assert ends[None][1]["error"]["code"] == "server_is_overloaded"
            assert ends[None][1]["retry_after"] > 0

            assert (await streaming).events[-1]["type"] == "response.completed"
            assert (await plain).json["status"] == "completed"
            assert await closed_with(socket) == 1012
        assert await exit_status(served) == 0
    assert is_clean(served)


async def test_turns_that_outlast_the_grace_end_as_failed(tmp_path: Path) -> None:
    """Each with its own terminal event, what waited included, and the stored one can be read later."""
    with served_process(*flags(tmp_path, grace_s=0.3, pad_tokens=9000), cwd=tmp_path) as served:
        async with wire(served) as socket:
            response_id = await begin(socket)
            await begin(socket, stream_id="unstored", store=False)
            await socket.create(input="waits")
            data = {"model": MODEL, "input": "x"}
            streaming = asyncio.create_task(
                fetch(served, "POST", "/v1/responses", {**data, "stream": True})
            )
            plain = asyncio.create_task(fetch(served, "POST", "/v1/responses", data))
            await begin(socket, stream_id="later")
            asked_at = await stop(served)
            ends: list[dict[str, Any]] = []
            while len(ends) < 4:
                event = await socket.next()
                if event["type"] in ("error", "response.failed", "response.completed"):
                    ends.append(event)
            failed = [one["response"] for one in ends if one["type"] == "response.failed"]
            assert len(failed) == 3
            assert {one["error"]["code"] for one in failed} == {"server_error"}
            assert {one["output"][0]["type"] for one in failed} == {"reasoning"}
            assert [one["status"] for one in ends if one["type"] == "error"] == [503]
            assert await closed_with(socket) == 1012
            assert (await streaming).events[-1]["type"] == "response.failed"
            assert (await plain).status == 500
        assert await exit_status(served) == 0
        assert time.monotonic() - asked_at < 0.3 + STOP_S
    assert is_clean(served)
    with served_process(*flags(tmp_path, grace_s=0, pad_tokens=0), cwd=tmp_path) as served:
        response = (await fetch(served, "GET", f"/v1/responses/{response_id}")).json
        assert response["status"] == "failed"
        assert response["output"][0]["content"][0]["text"] == "hm"


async def test_second_signal_ends_the_grace(tmp_path: Path) -> None:
    with served_process(*flags(tmp_path, grace_s=60, pad_tokens=9000), cwd=tmp_path) as served:
        async with wire(served) as socket:
            await begin(socket)
            await stop(served)
            served.process.send_signal(signal.SIGINT)
            asked_at = time.monotonic()
            assert (await socket.events())[-1]["type"] == "response.failed"
            assert await closed_with(socket) == 1012
        assert await exit_status(served) == 0
        assert time.monotonic() - asked_at < STOP_S
    assert is_clean(served)


async def test_idle_server_stops_at_once_and_tells_its_sockets(tmp_path: Path) -> None:
    with served_process(*flags(tmp_path, grace_s=60, pad_tokens=0), cwd=tmp_path) as served:
        async with wire(served) as socket:
            asked_at = time.monotonic()
            served.process.send_signal(signal.SIGTERM)
            assert await closed_with(socket) == 1012
        assert await exit_status(served) == 0
        assert time.monotonic() - asked_at < STOP_S


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
async def test_acknowledged_turn_is_there_after_a_restart(tmp_path: Path, how: int) -> None:
    settings = flags(tmp_path, grace_s=5, pad_tokens=5, tps=0)
    with served_process(*settings, cwd=tmp_path) as served:
        async with wire(served) as socket:
            done = (await socket.turn(input="remember"))["response"]
            # At once: what was acknowledged needs no clean stop.
            served.process.send_signal(how)
            await asyncio.to_thread(served.process.wait, WAIT_S)
    with served_process(*settings, cwd=tmp_path) as served:
        assert (await fetch(served, "GET", f"/v1/responses/{done['id']}")).json == done
        async with wire(served) as socket:
            following = await socket.turn(input="go on", previous_response_id=done["id"])
            assert following["type"] == "response.completed"
            grown = following["response"]["usage"]["input_tokens"]
            assert grown > done["usage"]["total_tokens"]


async def test_every_socket_hears_of_a_stop_before_it_would_ask_again(tmp_path: Path) -> None:
    """One that waits at once, one that works right behind its terminal event: a frame that crosses a close is lost."""
    with served_process(*flags(tmp_path, grace_s=20, pad_tokens=300), cwd=tmp_path) as served:
        async with wire(served) as waiting, wire(served) as short, wire(served) as long:
            assert (await waiting.turn(input="x", generate=False))["type"] == "response.completed"
            await begin(short, max_output_tokens=100)
            response_id = await begin(long)
            await stop(served)
            assert await closed_with(waiting) == 1012
            events = await short.events()
            assert events[-1]["type"] == "response.incomplete"
            assert await closed_with(short) == 1012
            # The other turn still runs: nobody had to wait for it.
            running = await fetch(served, "GET", f"/v1/responses/{response_id}")
            assert running.json["status"] == "in_progress"
            assert (await long.events())[-1]["type"] == "response.completed"
            assert await closed_with(long) == 1012
        assert await exit_status(served) == 0
    assert is_clean(served)


@dataclass
class HeldPreparation:
    """`prepare`, held until it is let go: a store or a file that takes its time."""

    has_begun: asyncio.Semaphore
    may_go_on: asyncio.Event

    async def __call__(self, *asked: Any) -> Plan:
        self.has_begun.release()
        await self.may_go_on.wait()
        return await prepare(*asked)


@pytest.mark.parametrize("ends", ["within the grace", "after the grace"])
async def test_create_that_is_being_prepared_is_answered(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """On a socket, as a stream and as JSON: a 503 that says why and when to retry; then the socket closes."""
    held = HeldPreparation(asyncio.Semaphore(0), asyncio.Event())
    monkeypatch.setattr(runner, "prepare", held)
    asked = {"model": MODEL, "input": "x"}
    async with serving() as served, wire(served) as socket, asyncio.TaskGroup() as tasks:
        plain = tasks.create_task(fetch(served, "POST", "/v1/responses", asked))
        stream = tasks.create_task(fetch(served, "POST", "/v1/responses", asked | {"stream": True}))
        await socket.create(input="x")
        await socket.create(input="x", stream_id="other")
        async with asyncio.timeout(WAIT_S):
            for _ in range(4):
                await held.has_begun.acquire()
            within = ends == "within the grace"
            draining = tasks.create_task(served.app.drain(WAIT_S if within else 0.01))
            await until(lambda: served.app.runner.is_draining)
            if within:
                held.may_go_on.set()
            refused = [await socket.next(), await socket.next()]
            assert await closed_with(socket) == 1012
            await draining
    assert {one.get("stream_id") for one in refused} == {None, "other"}
    for one in refused:
        assert (one["type"], one["status"]) == ("error", 503)
        assert "shutting down" in one["error"]["message"]
        assert one["retry_after"] > 0
    for answer in (plain.result(), stream.result()):
        assert answer.status == 503
        assert "shutting down" in answer.json["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
