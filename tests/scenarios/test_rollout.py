"""One long response for a whole rollout (docs/protocol.md 11), over real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.events import check_turn
from tests.support import WEATHER, Served, Wire, fetch, metric, serving, wire

CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}


@asynccontextmanager
async def scripted(tmp_path: Path, *turns: dict[str, Any], **flags: Any) -> AsyncIterator[Served]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": turns}))
    async with serving(script=str(script), **flags) as served:
        yield served


async def until_done(socket: Wire) -> list[dict[str, Any]]:
    """The events up to the next stop for tools, or to the end."""
    found = [await socket.next()]
    ends = {"response.done", "response.completed", "response.failed", "error"}
    while found[-1]["type"] not in ends:
        found.append(await socket.next())
    return found


def outputs(done: dict[str, Any], text: str = "sun") -> list[dict[str, Any]]:
    return [
        {"type": "function_call_output", "call_id": one["call_id"], "output": text}
        for one in done["required_input"]
    ]


async def append(socket: Wire, response_id: str, items: object) -> None:
    await socket.send({"type": "response.append", "response_id": response_id, "input": items})


@pytest.mark.parametrize("lane", [None, "main"])
async def test_thirty_calls_are_one_response_prepared_once(
    tmp_path: Path, lane: str | None
) -> None:
    turns = [{"calls": [CALL]}] * 30 + [{"text": "Done."}]
    async with scripted(tmp_path, *turns) as served, wire(served) as socket:
        lanes = {} if lane is None else {"stream_id": lane}
        await socket.create(input="Weather?", tools=[WEATHER], rollout=True, **lanes)
        told = await until_done(socket)
        tokenized = []
        while told[-1]["type"] == "response.done":
            done = told[-1]
            await append(socket, done["response_id"], outputs(done))
            told += await until_done(socket)
            tokenized.append(len(told))
        response = told[-1]["response"]
        assert [one["type"] for one in told].count("response.done") == 30
        assert len(response["output"]) == 31
        check_turn(told, lane)
        numbers = [one["sequence_number"] for one in told]
        assert numbers == list(range(len(numbers)))
        assert {one.get("stream_id") for one in told} == {lane}

        assert (
            await metric(served, 'segue_turns_total{outcome="completed",transport="websocket"}')
            == 1
        )
        assert await metric(served, "segue_tool_decodes_total") == 1
        assert await metric(served, "segue_items_validated_total") == 31
        page = (
            await fetch(served, "GET", f"/v1/responses/{response['id']}/input_items?limit=100")
        ).json
        assert len(page["data"]) == 31
        assert (await fetch(served, "GET", f"/v1/responses/{response['id']}")).json == response


async def test_rollout_gives_the_engine_the_same_ids_as_a_chain(tmp_path: Path) -> None:
    turns = [{"calls": [CALL]}] * 3 + [{"text": "Done."}, {"text": "Bye."}]
    async with scripted(tmp_path, *turns, check_rendering=True) as served, wire(served) as socket:
        await socket.create(input="Weather?", tools=[WEATHER], rollout=True)
        told = await until_done(socket)
        while told[-1]["type"] == "response.done":
            await append(socket, told[-1]["response_id"], outputs(told[-1]))
            told = await until_done(socket)
        rolled = told[-1]["response"]
        after = await socket.turn(previous_response_id=rolled["id"], input="Bye.", tools=[WEATHER])

        last = await socket.turn(input="Weather?", tools=[WEATHER])
        used = last["response"]["usage"]["input_tokens"]
        while last["response"]["output"][0]["type"] == "function_call":
            call = last["response"]["output"][0]
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
            last = await socket.turn(
                previous_response_id=last["response"]["id"], input=[output], tools=[WEATHER]
            )
            used += last["response"]["usage"]["input_tokens"]
        assert rolled["usage"]["input_tokens"] == used
        end = await socket.turn(
            previous_response_id=last["response"]["id"], input="Bye.", tools=[WEATHER]
        )
        assert end["response"]["usage"] == after["response"]["usage"]


async def test_append_in_a_conversation_is_refused_for_an_id_that_none_holds(
    tmp_path: Path,
) -> None:
    turns = [{"calls": [CALL]}, {"text": "Done."}]
    async with scripted(tmp_path, *turns) as served, wire(served) as socket:
        name = (await fetch(served, "POST", "/v1/conversations", {})).json["id"]
        await socket.create(input="Weather?", tools=[WEATHER], rollout=True, conversation=name)
        done = (await until_done(socket))[-1]
        (output,) = outputs(done)
        await append(socket, done["response_id"], [{**output, "id": "fco_\0"}])
        refused = await socket.next()
        assert (refused["error"]["code"], refused["error"]["param"]) == (
            "invalid_value",
            "input[0].id",
        )
        await append(socket, done["response_id"], [output])
        assert (await until_done(socket))[-1]["type"] == "response.completed"


@pytest.mark.parametrize(
    "change, code",
    [
        (lambda items: [], "missing_function_call_output"),
        (lambda items: items + items, "invalid_function_call_output"),
        (lambda items: [{**items[0], "call_id": "call_0"}], "invalid_function_call_output"),
        (lambda items: [*items, {"role": "user", "content": "And?"}], "invalid_request"),
        (lambda items: [7], "invalid_value"),
    ],
)
async def test_bad_append_is_refused_and_the_rollout_goes_on_waiting(
    tmp_path: Path, change: Any, code: str
) -> None:
    async with (
        scripted(tmp_path, {"calls": [CALL]}, {"text": "Done."}) as served,
        wire(served) as socket,
    ):
        await socket.create(input="Weather?", tools=[WEATHER], rollout=True, stream_id="main")
        done = (await until_done(socket))[-1]
        await append(socket, done["response_id"], change(outputs(done)))
        refused = await socket.next()
        assert (refused["type"], refused["error"]["code"]) == ("error", code)
        assert refused["stream_id"] == "main"
        await append(socket, done["response_id"], outputs(done))
        assert (await until_done(socket))[-1]["type"] == "response.completed"


async def test_append_is_refused_at_the_limit_of_all_memory_and_accepted_after_it(
    tmp_path: Path,
) -> None:
    async with (
        scripted(tmp_path, {"calls": [CALL]}, {"text": "Done."}) as served,
        wire(served) as socket,
    ):
        memory = served.app.state.memory
        await socket.create(input="Weather?", tools=[WEATHER], rollout=True, stream_id="main")
        done = (await until_done(socket))[-1]
        bytes_max, memory.bytes_max = memory.bytes_max, -1
        memory.enforce()
        await append(socket, done["response_id"], outputs(done))
        refused = await socket.next()
        assert (refused["type"], refused["status"], refused["stream_id"]) == ("error", 503, "main")
        assert refused["error"]["message"] == "The server has reached its memory limit."
        memory.bytes_max = bytes_max
        memory.enforce()
        await append(socket, done["response_id"], outputs(done))
        assert (await until_done(socket))[-1]["type"] == "response.completed"


async def test_append_needs_a_rollout_that_waits_on_this_connection(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, {"calls": [CALL]}, {"text": "Done."}) as served,
        wire(served) as socket,
        wire(served) as other,
    ):
        await socket.create(input="Weather?", tools=[WEATHER], rollout=True)
        done = (await until_done(socket))[-1]
        await append(other, done["response_id"], outputs(done))
        assert (await other.next())["status"] == 404
        await append(socket, done["response_id"], outputs(done))
        await append(socket, done["response_id"], outputs(done))
        kinds = set()
        codes = set()
        while not {"response.completed", "error"} <= kinds:
            event = await socket.next()
            kinds.add(event["type"])
            codes |= {event["error"]["code"]} if event["type"] == "error" else set()
        assert codes <= {"response_not_waiting", "not_found"}
        await append(socket, done["response_id"], outputs(done))
        assert (await socket.next())["status"] == 404


async def test_tool_that_never_answers_ends_the_rollout(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, {"calls": [CALL]}, append_s_max=0.05) as served,
        wire(served) as socket,
    ):
        await socket.create(input="Weather?", tools=[WEATHER], rollout=True)
        await until_done(socket)
        failed = (await until_done(socket))[-1]
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"]["code"] == "append_timeout"
        assert (await socket.turn(input="Hello."))["type"] == "response.completed"


async def test_waiting_rollouts_give_their_places_to_others(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, {"calls": [CALL]}, {"text": "Done."}) as served,
        wire(served) as socket,
    ):
        waiting = {}
        for number in range(16):
            await socket.create(
                input="Weather?", tools=[WEATHER], rollout=True, stream_id=f"lane{number}"
            )
        while len(waiting) < 16:
            event = await socket.next()
            if event["type"] == "response.done":
                waiting[event["stream_id"]] = event
        last = await socket.turn(input="Hello.", stream_id="free")
        assert last["type"] == "response.completed"
        for done in waiting.values():
            await append(socket, done["response_id"], outputs(done))
        ended = set()
        while len(ended) < 16:
            event = await socket.next()
            if event["type"] == "response.completed":
                ended.add(event["stream_id"])


async def test_rollout_ends_when_its_socket_goes(tmp_path: Path) -> None:
    async with scripted(tmp_path, {"calls": [CALL]}) as served:
        async with wire(served) as socket:
            await socket.create(input="Weather?", tools=[WEATHER], rollout=True)
            done = (await until_done(socket))[-1]
            socket.socket.transport.abort()
        assert (
            await metric(served, 'segue_turns_total{outcome="cancelled",transport="websocket"}')
            == 1
        )
        found = (await fetch(served, "GET", f"/v1/responses/{done['response_id']}")).json
        assert found["status"] == "cancelled"


async def test_rollout_belongs_to_the_socket() -> None:
    async with serving() as served:
        body = {"model": "scripted", "input": "Hello.", "rollout": True}
        answer = await fetch(served, "POST", "/v1/responses", body)
        assert answer.status == 400
        assert answer.json["error"]["param"] == "rollout"
