"""Same story, same events: what a client is told does not depend on how it asked.

Every story is told over JSON, SSE and WebSocket (default lane and a named one) by one server, in which each story is a
model with a script of its own. The events are checked against the contract, then compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.events import check_refusal, check_response, check_turn, neutral, told_alike
from tests.support import WEATHER, ServedProcess, fetch, kinds, served_process, serving, wire

PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edit a file"}
CRM: dict[str, Any] = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers",
    "tools": [
        {
            "type": "function",
            "name": "find",
            "description": "Find a customer",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
        }
    ],
}
LAST = "the response before"


@dataclass(frozen=True)
class Story:
    """What the model says and what the client asks, turn by turn; and how the last turn ends."""

    turns: list[dict[str, Any]]
    asks: list[dict[str, Any]]
    said: list[str]
    end: str = "response.completed"
    status: int = 200
    code: str | None = None
    model: dict[str, Any] = field(default_factory=dict)


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


STORIES: dict[str, Story] = {
    "text": Story([{"text": "Good morning, Ada. ✓"}], [{"input": "Hello"}], ["message"]),
    "silence": Story([{"text": ""}], [{"input": "Say nothing"}], []),
    "long-text": Story([{"text": "So:", "pad_tokens": 300}], [{"input": "Go on"}], ["message"]),
    "reasoning": Story(
        [{"reasoning": "The user greets.\nI greet back.", "text": "Hello!"}],
        [{"input": "Hello"}],
        ["reasoning", "message"],
    ),
    "reasoning-summary": Story(
        [{"reasoning": "The user greets.", "text": "Hello!"}],
        [{"input": "Hello"}],
        ["reasoning", "message"],
        model={"reasoning": "summary"},
    ),
    "reasoning-hidden": Story(
        [{"reasoning": "The user greets.", "text": "Hello!"}],
        [{"input": "Hello"}],
        ["reasoning", "message"],
        model={"reasoning": "hidden"},
    ),
    "parallel-calls": Story(
        [
            {
                "text": "Both, then.",
                "calls": [call("get_weather", city="Oslo"), call("get_weather", city="Rome")],
            }
        ],
        [{"input": "Oslo and Rome?", "tools": [WEATHER]}],
        ["message", "function_call", "function_call"],
    ),
    "call-and-answer": Story(
        [{"calls": [call("get_weather", city="Oslo")]}, {"text": "Rain."}],
        [
            {"input": "Oslo?", "tools": [WEATHER], "instructions": "Be brief."},
            {"previous_response_id": LAST, "input": "its outputs", "tools": [WEATHER]},
        ],
        ["message"],
    ),
    "custom-call": Story(
        [{"calls": [{"name": "apply_patch", "input": '*** Begin "Patch"\n+ü\n*** End'}]}],
        [{"input": "Patch it", "tools": [PATCH]}],
        ["custom_tool_call"],
    ),
    "namespaced-call": Story(
        [{"calls": [call("crm.find", name="Ada")]}],
        [{"input": "Find Ada", "tools": [CRM]}],
        ["function_call"],
    ),
    "cut-text": Story(
        [{"text": "one two three", "pad_tokens": 100}],
        [{"input": "Count", "max_output_tokens": 20}],
        ["message"],
        end="response.incomplete",
    ),
    "cut-reasoning": Story(
        [{"reasoning": "hm " * 100, "text": "Hello!"}],
        [{"input": "Think", "max_output_tokens": 20}],
        ["reasoning"],
        end="response.incomplete",
    ),
    "cut-call": Story(
        [{"calls": [call("get_weather", city="Llanfairpwllgwyngyll" * 8)]}],
        [{"input": "There?", "tools": [WEATHER], "max_output_tokens": 24}],
        ["function_call"],
        end="response.incomplete",
    ),
    "warm-up": Story(
        [{"text": "Warm already."}],
        [
            {"input": "Hello", "generate": False, "instructions": "Be brief."},
            {"previous_response_id": LAST, "input": [], "instructions": "Be brief."},
        ],
        ["message"],
    ),
    "prewarm": Story(
        [{"text": "Warm already."}],
        [
            {"input": [], "prompt_cache_options": {"prewarm": True}, "tools": [WEATHER]},
            {"previous_response_id": LAST, "input": "Hello", "tools": [WEATHER]},
        ],
        ["message"],
    ),
    "overflow": Story(
        [{"text": "never said"}],
        [{"input": "word " * 400}],
        [],
        end="response.failed",
        status=400,
        code="context_length_exceeded",
        model={"context_tokens": 200},
    ),
}


@contextmanager
def serving_stories(folder: Path) -> Iterator[ServedProcess]:
    """A server with a model for each story."""
    lines = []
    for name, story in STORIES.items():
        script = folder / f"{name}.json"
        script.write_text(json.dumps({"turns": story.turns}))
        lines += ["[[models]]", f'name = "{name}"', f"script = {json.dumps(str(script))}"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in story.model.items()]
    config = folder / "segue.toml"
    config.write_text("\n".join(lines))
    with served_process("--config", str(config), cwd=folder) as served:
        yield served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    with serving_stories(tmp_path_factory.mktemp("stories")) as served:
        yield served


def follow_up(ask: dict[str, Any], last: dict[str, Any] | None) -> dict[str, Any]:
    """A request with its parent put in, and an output for each call of the parent."""
    if ask.get("previous_response_id") != LAST:
        return ask
    assert last is not None
    ask = {**ask, "previous_response_id": last["id"]}
    if ask["input"] == "its outputs":
        ask["input"] = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
            for item in last["output"]
        ]
    return ask


async def tell_by_sse(served: ServedProcess, name: str) -> list[list[dict[str, Any]]]:
    told: list[list[dict[str, Any]]] = []
    last = None
    for ask in STORIES[name].asks:
        body = {"model": name, "stream": True, **follow_up(ask, last)}
        answer = await fetch(served, "POST", "/v1/responses", body)
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"].startswith("text/event-stream")
        told.append(answer.events)
        last = check_turn(told[-1])
    return told


async def tell_by_websocket(
    served: ServedProcess, name: str, lane: str | None, **common: Any
) -> list[list[dict[str, Any]]]:
    told: list[list[dict[str, Any]]] = []
    last = None
    fields = common if lane is None else {**common, "stream_id": lane}
    async with wire(served) as socket:
        for ask in STORIES[name].asks:
            await socket.create(**{"model": name, **fields, **follow_up(ask, last)})
            told.append(await socket.events(lane))
            last = check_turn(told[-1], lane)
    return told


@pytest.mark.parametrize("name", STORIES)
async def test_client_is_told_the_same_story_on_every_transport(
    name: str, served: ServedProcess
) -> None:
    story = STORIES[name]
    by_sse = await tell_by_sse(served, name)
    by_socket = await tell_by_websocket(served, name, None)
    by_lane = await tell_by_websocket(served, name, "main.1")
    last: dict[str, Any] | None = None
    for ask, one, two, three in zip(story.asks, by_sse, by_socket, by_lane, strict=True):
        assert kinds(one) == kinds(two) == kinds(three)
        assert told_alike(one) == told_alike(two) == told_alike(three)
        body = {"model": name, **follow_up(ask, last)}
        plain = await fetch(served, "POST", "/v1/responses", body)
        if story.code is None:
            assert plain.status == 200, plain.body
            last = plain.json
            assert last is not None
            check_response(last)
            assert neutral(last) == neutral(one[-1]["response"])
    end = by_sse[-1][-1]
    assert end["type"] == story.end
    assert [item["type"] for item in end["response"]["output"]] == story.said
    assert plain.status == story.status
    if story.code is not None:
        fault = end["response"]["error"]
        assert fault["code"] == plain.json["error"]["code"] == story.code
        assert fault["message"] == plain.json["error"]["message"]


@pytest.mark.parametrize("name", ["text", "parallel-calls", "overflow"])
async def test_unstored_story_is_told_like_a_stored_one(name: str, served: ServedProcess) -> None:
    stored = await tell_by_websocket(served, name, None)
    unstored = await tell_by_websocket(served, name, None, store=False)
    for one, two in zip(stored, unstored, strict=True):
        for event in one + two:
            if "response" in event:
                assert event["response"].pop("store") is (event in one)
        assert told_alike(one) == told_alike(two)


async def test_client_sees_what_each_story_is_about(served: ServedProcess) -> None:
    """The items carry what the model was made to say: names, namespaces, inputs, texts and reasons."""

    async def output(name: str) -> list[dict[str, Any]]:
        events = (await tell_by_sse(served, name))[-1]
        return list(events[-1]["response"]["output"])

    assert (await output("text"))[0]["content"][0]["text"] == "Good morning, Ada. ✓"
    said = await output("reasoning")
    assert said[0]["content"][0]["text"] == "The user greets.\nI greet back."
    assert (await output("reasoning-summary"))[0]["summary"][0]["text"] == "The user greets."
    hidden = (await output("reasoning-hidden"))[0]
    assert hidden["summary"] == []
    assert "content" not in hidden
    calls = (await output("parallel-calls"))[1:]
    assert [json.loads(one["arguments"])["city"] for one in calls] == ["Oslo", "Rome"]
    assert len({one["call_id"] for one in calls}) == 2
    custom = (await output("custom-call"))[0]
    assert custom["name"] == "apply_patch"
    assert custom["input"] == '*** Begin "Patch"\n+ü\n*** End'
    found = (await output("namespaced-call"))[0]
    assert (found["namespace"], found["name"]) == ("crm", "find")
    warm, then = await tell_by_websocket(served, "warm-up", None)
    assert kinds(warm) == ["response.created", "response.in_progress", "response.completed"]
    assert warm[-1]["response"]["usage"]["output_tokens"] == 0
    assert then[-1]["response"]["output"][0]["content"][0]["text"] == "Warm already."
    for cut in ("cut-text", "cut-reasoning", "cut-call"):
        response = (await tell_by_sse(served, cut))[-1][-1]["response"]
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["usage"]["output_tokens"] == response["max_output_tokens"]


async def test_client_carries_one_chain_over_all_transports(served: ServedProcess) -> None:
    """A stored response is the parent of the next wherever that comes from, and costs the same tokens."""
    by_one: list[dict[str, Any]] = []
    async with wire(served) as socket:
        for number in range(4):
            by_one.append(
                (await socket.turn(**_chained(by_one, number)))["response"],
            )
    by_all: list[dict[str, Any]] = []
    for number in range(4):
        ask = _chained(by_all, number)
        if number % 3 == 0:
            by_all.append((await fetch(served, "POST", "/v1/responses", ask)).json)
        elif number % 3 == 1:
            async with wire(served) as socket:
                by_all.append((await socket.turn(**ask))["response"])
        else:
            answer = await fetch(served, "POST", "/v1/responses", {**ask, "stream": True})
            by_all.append(check_turn(answer.events))
    assert [one["usage"] for one in by_all] == [one["usage"] for one in by_one]
    assert neutral(by_all) == neutral(by_one)


def _chained(so_far: list[dict[str, Any]], number: int) -> dict[str, Any]:
    ask = {"model": "reasoning", "input": f"Question {number}"}
    return ask if not so_far else {**ask, "previous_response_id": so_far[-1]["id"]}


async def test_refusal_says_the_same_on_every_transport() -> None:
    """Refused before it began: a status on HTTP, streamed or not, and an error event on the socket."""
    refusals: list[tuple[int, str, dict[str, Any]]] = [
        (400, "previous_response_not_found", {"input": "x", "previous_response_id": "resp_0"}),
        (404, "model_not_found", {"input": "x", "model": "nobody"}),
        (400, "invalid_value", {"input": 5}),
        (
            400,
            "invalid_function_call_output",
            {"input": [{"type": "function_call_output", "call_id": "call_0", "output": "x"}]},
        ),
        (400, "unsupported_parameter", {"input": "x", "prompt": {"id": "p"}}),
    ]
    async with serving() as served, wire(served) as socket:
        for status, code, ask in refusals:
            body = {"model": "scripted", **ask}
            plain = await fetch(served, "POST", "/v1/responses", body)
            streamed = await fetch(served, "POST", "/v1/responses", {**body, "stream": True})
            await socket.create(**ask)
            event = await socket.next()
            check_refusal(event, status, code)
            assert plain.status == streamed.status == status
            assert plain.json == streamed.json == {"error": event["error"]}
        assert (await socket.turn(input="Still here?"))["type"] == "response.completed"


async def test_heartbeats_are_numbered_events_of_the_turn_on_each_transport(tmp_path: Path) -> None:
    script = tmp_path / "slow.json"
    script.write_text(json.dumps({"turns": [{"text": "so slow"}]}))
    ask = {"model": "scripted", "input": "Hello"}
    async with serving(script=str(script), tps=15, heartbeat_s=0.02) as served:
        sse = await fetch(served, "POST", "/v1/responses", {**ask, "stream": True})
        async with wire(served) as socket:
            await socket.create(**ask)
            events = await socket.events()
        check_turn(sse.events)
        check_turn(events)
        for one in (sse.events, events):
            assert len(one) > len(kinds(one)) + 1
        assert told_alike(sse.events) == told_alike(events)
