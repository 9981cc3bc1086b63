"""A mistake of ours in the handling of a frame is answered, logged with its ids and without content, and costs no other
turn of the connection anything."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from segue.observe.logs import TextFormatter
from segue.responses import steering
from segue.stores.memory_turns import MemoryTurns
from segue.wire import codec
from segue.wire.codec import LARGE_BYTES
from tests.support import MODEL, TERMINAL, WEATHER, Served, Wire, fetch, serving, wire

CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}
SECRET = "the words of the client"
LONG = {"text": "Once there was a river. " * 15}


class Events:
    """A connection, and all events that have come on it."""

    def __init__(self, socket: Wire) -> None:
        self.socket = socket
        self.seen: list[dict[str, Any]] = []

    async def wait_for(self, lane: str, *types: str) -> dict[str, Any]:
        """The first event of such a type in this lane; it may have come already."""
        while True:
            for event in self.seen:
                if event.get("stream_id") == lane and event["type"] in types:
                    return event
            self.seen.append(await self.socket.next())

    async def ended(self, lane: str) -> str:
        """How the turn of this lane has ended."""
        return str((await self.wait_for(lane, *TERMINAL - {"error"}))["type"])


@asynccontextmanager
async def beside_a_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *turns: dict[str, Any]
) -> AsyncIterator[tuple[Served, Events]]:
    """A connection with a turn that runs in another lane: it completes, whatever happens inside, and so does a later
    one."""
    caplog.handler.setFormatter(TextFormatter("%(request)s%(message)s"))
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": turns}))
    async with serving(script=str(script), tps=200) as served, wire(served) as socket:
        events = Events(socket)
        await socket.create(input="x", stream_id="beside")
        await events.wait_for("beside", "response.created")
        yield served, events
        await socket.create(input="x", stream_id="later")
        assert await events.ended("beside") == "response.completed"
        assert await events.ended("later") == "response.completed"
    assert SECRET not in caplog.text


def fails(real: Callable[..., Any]) -> Callable[..., Any]:
    """Fails where it gets the words of the client."""

    def call(*given: Any) -> Any:
        if any(SECRET in str(bytes(one) if isinstance(one, Raw) else one) for one in given):
            raise RuntimeError("a mistake")
        return real(*given)

    return call


@pytest.mark.parametrize("size", [1, LARGE_BYTES])
async def test_frame_that_cannot_be_decoded_by_our_fault_is_answered_in_its_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    monkeypatch.setattr(codec, "decode_frame", fails(codec.decode_frame))
    async with beside_a_turn(tmp_path, caplog, LONG) as (_, events):
        await events.socket.create(stream_id="a", input=SECRET + "x" * size)
        error = await events.wait_for("a", "error")
        assert (error["status"], error["error"]["code"]) == (500, "server_error")
        assert "a mistake" not in json.dumps(error)
        request_id = events.socket.socket.response.headers["x-request-id"]  # type: ignore[union-attr]
        assert f"[{request_id}] a WebSocket frame could not be handled" in caplog.text
        assert "RuntimeError: a mistake" in caplog.text


async def test_create_whose_parent_cannot_be_looked_up_frees_its_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with beside_a_turn(tmp_path, caplog, LONG) as (_, events):
        monkeypatch.setattr(MemoryTurns, "held", fails(MemoryTurns.held))
        await events.socket.create(stream_id="a", input="x", previous_response_id=SECRET)
        await events.socket.create(stream_id="a", input="x")
        error = await events.wait_for("a", "error")
        assert (error["status"], error["error"]["code"]) == (500, "server_error")
        assert await events.ended("a") == "response.completed"


async def test_append_that_fails_is_answered_and_can_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [{"calls": [CALL]}, {"text": "Done."}]
    async with beside_a_turn(tmp_path, caplog, *turns) as (served, events):
        runner = served.app.runner
        monkeypatch.setattr(runner, "read", fails(runner.read))
        await events.socket.create(stream_id="a", input="x", tools=[WEATHER], rollout=True)
        done = await events.wait_for("a", "response.done")
        frame = {"type": "response.append", "response_id": done["response_id"]}
        (call,) = done["required_input"]
        output = {"type": "function_call_output", "call_id": call["call_id"]}
        await events.socket.send({**frame, "input": [{**output, "output": SECRET}]})
        error = await events.wait_for("a", "error")
        assert error["error"]["code"] == "server_error"
        await events.socket.send({**frame, "input": [{**output, "output": "sun"}]})
        await events.wait_for("a", "response.completed")
    assert "an append could not be handled" in caplog.text


async def test_steer_that_fails_is_sent_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(steering, "decode_steered", fails(steering.decode_steered))
    async with beside_a_turn(tmp_path, caplog, LONG) as (_, events):
        await events.socket.create(stream_id="a", input="x")
        created = await events.wait_for("a", "response.created")
        target = created["response"]["id"]
        steer = {"type": "response.steer", "previous_response_id": target, "input": SECRET}
        await events.socket.send(steer)
        failed = await events.wait_for("a", "response.steer.failed")
        assert failed["error"]["code"] == "server_error"
        await events.wait_for("a", "response.completed")
    assert "a steer could not be handled" in caplog.text


async def test_request_that_fails_by_our_fault_has_a_status_a_body_and_an_id(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.setFormatter(TextFormatter("%(request)s%(message)s"))
    async with serving() as served:
        conversations = served.app.runner.records.conversations
        monkeypatch.setattr(type(conversations), "find", fails(type(conversations).find))
        body = {"model": MODEL, "input": "x", "conversation": SECRET}
        answer = await fetch(served, "POST", "/v1/responses", body)
        assert (answer.status, answer.json["error"]["code"]) == (500, "server_error")
        assert f"[{answer.headers['x-request-id']}] request failed" in caplog.text
