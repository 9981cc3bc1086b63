"""Lanes by the official Python client's managed sessions. Runs in the client's environment.

    python_lanes.py BASE_URL MODEL/STORY ...     STORY is together, fork or blocking

Prints one JSON object: for each story what each lane was told and in which order it came, or how it broke.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from typing import Any

import openai
from openai.lib.responses_websocket import (
    AsyncResponsesWebSocketLane,
    AsyncResponsesWebSocketSession,
    ResponsesWebSocketError,
    ResponsesWebSocketLimits,
    ResponsesWebSocketSession,
)

LIMITS = ResponsesWebSocketLimits(
    max_lanes=8,
    max_events_per_lane=10_000,
    max_events=20_000,
    max_bytes_per_lane=16 * 1024 * 1024,
    max_bytes=32 * 1024 * 1024,
)
TURNS_MAX = 16
WAIT_S = 30
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
]


def create(model: str, given: Any, parent: str | None = None) -> Any:
    event = {
        "type": "response.create",
        "model": model,
        "store": False,
        "input": given,
        "tools": TOOLS,
    }
    return event if parent is None else {**event, "previous_response_id": parent}


def outputs(response: Any) -> list[dict[str, str]]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in response.output
        if item.type == "function_call"
    ]


def as_json(response: Any) -> Any:
    return json.loads(response.to_json())


async def until(lane: AsyncResponsesWebSocketLane, kind: str) -> None:
    """Hear a lane's events up to one of this type."""
    for _ in range(LIMITS.max_events):
        if (await lane.recv()).type == kind:
            return
    raise RuntimeError(f"{kind} did not come")


def listen(connection: Any) -> list[list[str | None]]:
    """The lane and type of every event, in the order in which the socket brought them."""
    order: list[list[str | None]] = []
    parse = connection.parse_event

    def parse_and_note(data: Any) -> Any:
        event = parse(data)
        order.append([getattr(event, "stream_id", None), event.type])
        return event

    connection.parse_event = parse_and_note
    return order


async def together(session: AsyncResponsesWebSocketSession, model: str) -> dict[str, Any]:
    """Two tool loops beside each other on one socket."""
    order = listen(session.connection)

    async def work(name: str) -> list[Any]:
        lane = session.lane(name)
        responses: list[Any] = []
        event = create(model, f"I am lane {name}")
        while len(responses) < TURNS_MAX:
            await lane.send(event)
            await until(lane, "response.completed")
            response = await lane.get_final_response()
            responses.append(as_json(response))
            given = outputs(response)
            if not given:
                break
            event = create(model, given, response.id)
        return responses

    one, two = await asyncio.gather(work("a"), work("b"))
    return {"lanes": {"a": one, "b": two}, "order": order}


async def fork(session: AsyncResponsesWebSocketSession, model: str) -> dict[str, Any]:
    """Lane b forks from lane a's response, and a goes on once b has bound its parent; then a fork that fails."""
    lanes = {name: session.lane(name) for name in ("a", "b")}
    await lanes["a"].send(create(model, "Hello"))
    root = await lanes["a"].get_final_response()
    given = outputs(root)
    await lanes["b"].send(create(model, given, root.id))
    await until(lanes["b"], "response.in_progress")
    await lanes["a"].send(create(model, given, root.id))
    left, right = await asyncio.gather(*(lane.get_final_response() for lane in lanes.values()))
    await lanes["b"].send(create(model, "x", "resp_unknown"))
    try:
        await lanes["b"].get_final_response()
        refused = None
    except ResponsesWebSocketError as error:
        refused = as_json(error.event)
    await lanes["a"].send(create(model, outputs(left) or "Go on", left.id))
    on = await lanes["a"].get_final_response()
    named = {"root": root, "left": left, "right": right, "on": on}
    return {key: as_json(value) for key, value in named.items()} | {"refused": refused}


def blocking(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """The session without asyncio: both lanes asked before either is heard, and the default lane too."""
    with (
        client.responses.connect() as connection,
        ResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        lanes = {"a": session.lane("a"), "b": session.lane("b"), "default": session.default}
        for name, lane in lanes.items():
            lane.send(create(model, f"I am lane {name}"))
        told = {name: lane.get_final_response(timeout=WAIT_S) for name, lane in lanes.items()}
        for name, lane in lanes.items():
            lane.send(create(model, outputs(told[name]), told[name].id))
        ends = {name: lane.get_final_response(timeout=WAIT_S) for name, lane in lanes.items()}
        return {"lanes": {name: [as_json(told[name]), as_json(ends[name])] for name in lanes}}


async def managed(base_url: str, model: str, story: Any) -> dict[str, Any]:
    client = openai.AsyncOpenAI(api_key="sk-test", base_url=base_url)
    async with (
        asyncio.timeout(WAIT_S),
        client,
        client.responses.connect(websocket_connection_options={"max_size": None}) as connection,
        AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        found: dict[str, Any] = await story(session, model)
        return found


def tell(base_url: str, model: str, story: str) -> dict[str, Any]:
    """A story, or how it broke: the others are to be seen all the same."""
    try:
        if story == "blocking":
            return blocking(openai.OpenAI(api_key="sk-test", base_url=base_url), model)
        return asyncio.run(managed(base_url, model, {"together": together, "fork": fork}[story]))
    except Exception:
        return {"broke": traceback.format_exc()}


if __name__ == "__main__":
    print(json.dumps({one: tell(sys.argv[1], *one.split("/")) for one in sys.argv[2:]}))
