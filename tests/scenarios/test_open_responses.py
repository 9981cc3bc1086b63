"""The tests of the Open Responses compliance suite, told by us: same requests, same demands (docs/protocol.md 8.2).

The suite itself needs Bun and a checkout. Every event is held against its closed union, so the model shows its
reasoning as summaries. All tests of the suite start at once; so do ours, in the last one.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.events import check_turn
from tests.openresponses import UNION, check_open_error, check_open_event, check_open_response
from tests.scenarios.test_protocol_items import PIXEL
from tests.support import MODEL, Served, Wire, fetch, serving, wire

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city"}},
        "required": ["location"],
    },
}
# The smallest thing that a PDF reader takes for a document.
PDF = base64.b64encode(
    b"%PDF-1.1\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
    b"2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
    b"3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>endobj\n"
    b"xref\n0 4\n0000000000 65535 f \n0000000009 00000 n \n0000000052 00000 n \n"
    b"0000000101 00000 n \ntrailer<</Size 4/Root 1 0 R>>\nstartxref\n160\n%%EOF"
).decode()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(reasoning="summary") as served:
        yield served


async def plain(served: Served, **fields: Any) -> dict[str, Any]:
    """A response over HTTP that must be complete and not empty."""
    answer = await fetch(served, "POST", "/v1/responses", {"model": MODEL, **fields})
    assert answer.status == 200, answer.body
    check_open_response(answer.json)
    assert answer.json["status"] == "completed"
    assert answer.json["output"]
    response: dict[str, Any] = answer.json
    return response


def all_in_union(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The terminal response of events that are all in the closed union."""
    for event in events:
        check_open_event(event)
        assert event["type"] in UNION, event["type"]
    response: dict[str, Any] = events[-1]["response"]
    return response


async def turn(socket: Wire, **fields: Any) -> dict[str, Any]:
    """A turn on the socket that must complete."""
    await socket.create(**fields)
    response = all_in_union(await socket.events())
    assert response["status"] == "completed"
    return response


async def failure(socket: Wire, **fields: Any) -> str:
    """The code with which a turn fails, in an error event or in a failed response."""
    last = await socket.turn(**fields)
    if last["type"] == "error":
        check_open_error(last)
        code: str = last["error"]["code"]
    else:
        assert last["type"] == "response.failed", last
        code = last["response"]["error"]["code"]
    return code


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


async def test_open_responses_basic_response(served: Served) -> None:
    await plain(served, input=[user("Say hello in exactly 3 words.")])


async def test_open_responses_assistant_phase(served: Served) -> None:
    history = [
        user("What is 2 + 2?"),
        {"type": "message", "role": "assistant", "phase": "commentary", "content": "I add."},
        {"type": "message", "role": "assistant", "phase": "final_answer", "content": "Four."},
        user("And 3 + 3?"),
    ]
    await plain(served, input=history)


async def test_open_responses_streaming_response(served: Served) -> None:
    body = {"model": MODEL, "input": [user("Count from 1 to 5.")], "stream": True}
    answer = await fetch(served, "POST", "/v1/responses", body)
    assert all_in_union(answer.events)["status"] == "completed"
    check_turn(answer.events)


async def test_open_responses_tool_calling(served: Served) -> None:
    asked = [user("What is the weather like in San Francisco?")]
    response = await plain(served, input=asked, tools=[WEATHER])
    (call,) = [item for item in response["output"] if item["type"] == "function_call"]
    assert json.loads(call["arguments"]).keys() == {"location"}


async def test_open_responses_tool_calling_streaming(served: Served) -> None:
    body = {"model": MODEL, "input": [user("Weather?")], "tools": [WEATHER], "stream": True}
    events = (await fetch(served, "POST", "/v1/responses", body)).events
    all_in_union(events)
    told = {event["type"] for event in events}
    assert {
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    } <= told


async def test_open_responses_function_call_roundtrip(served: Served) -> None:
    forced = {"type": "function", "name": "get_weather"}
    asked = [user("Weather in Oslo?")]
    first = await plain(served, input=asked, tools=[WEATHER], tool_choice=forced)
    output = {
        "type": "function_call_output",
        "call_id": first["output"][-1]["call_id"],
        "output": '{"temperature":"18C"}',
    }
    await plain(served, input=[*asked, *first["output"], output], tools=[WEATHER])


async def test_open_responses_previous_response_id(served: Served) -> None:
    first = await plain(served, input="My name is Alice.")
    second = await plain(served, input="What is my name?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]


async def test_open_responses_image_input(served: Served) -> None:
    parts = [
        {"type": "input_text", "text": "What do you see?"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
    ]
    await plain(served, input=[{"type": "message", "role": "user", "content": parts}])


async def test_open_responses_file_input(served: Served) -> None:
    data = f"data:application/pdf;base64,{PDF}"
    parts = [
        {"type": "input_file", "filename": "a.pdf", "file_data": data},
        {"type": "input_text", "text": "What does it say?"},
    ]
    await plain(served, input=[{"type": "message", "role": "user", "content": parts}])


async def test_open_responses_system_prompt(served: Served) -> None:
    system = {"type": "message", "role": "system", "content": "You talk like a pirate."}
    await plain(served, input=[system, user("Say hello.")])


async def test_open_responses_multi_turn(served: Served) -> None:
    history = [
        user("My name is Alice."),
        {"type": "message", "role": "assistant", "content": "Hello Alice! Nice to meet you."},
        user("What is my name?"),
    ]
    await plain(served, input=history)


async def test_open_responses_websocket_response(served: Served) -> None:
    async with wire(served) as socket:
        await turn(socket, input=[user("Say hello.")])


async def test_open_responses_websocket_sequential_responses(served: Served) -> None:
    async with wire(served) as socket:
        first = await turn(socket, input=[user("One.")], store=False)
        second = await turn(socket, input=[user("Two.")], store=False)
        assert first["id"] != second["id"]


async def test_open_responses_websocket_continuation(served: Served) -> None:
    async with wire(served) as socket:
        first = await turn(socket, input=[user("The word is kiwi.")], store=False)
        second = await turn(
            socket, input=[user("Which?")], previous_response_id=first["id"], store=False
        )
        assert second["previous_response_id"] == first["id"]


async def test_open_responses_websocket_reconnect_store_false_recovery(served: Served) -> None:
    async with wire(served) as socket:
        first = await turn(socket, input=[user("The word is kiwi.")], store=False)
    async with wire(served) as socket:
        asked = {"input": [user("Which?")], "store": False}
        code = await failure(socket, previous_response_id=first["id"], **asked)
        assert code == "previous_response_not_found"
        await turn(socket, **asked)


async def test_open_responses_websocket_previous_response_not_found(served: Served) -> None:
    async with wire(served) as socket:
        asked = {"input": [user("Hello")], "store": False}
        code = await failure(socket, previous_response_id="resp_nobody", **asked)
        assert code == "previous_response_not_found"


async def test_open_responses_websocket_failed_continuation_evicts_cache(served: Served) -> None:
    async with wire(served) as socket:
        first = await turn(socket, input=[user("Hello")], store=False)
        go_on = {"previous_response_id": first["id"], "store": False}
        output = {"type": "function_call_output", "call_id": "call_missing", "output": "x"}
        await failure(socket, input=[output], **go_on)
        assert (
            await failure(socket, input=[user("Go on")], **go_on) == "previous_response_not_found"
        )


async def test_open_responses_websocket_generate_false(served: Served) -> None:
    async with wire(served) as socket:
        ready = await turn(socket, input=[user("Hello")], generate=False, store=False)
        assert ready["id"].startswith("resp_")
        assert ready["output"] == []
        await turn(socket, input=[], previous_response_id=ready["id"], store=False)


async def compacted(served: Served) -> dict[str, Any]:
    """A window, made from a history as the suite sends it."""
    history = [
        user("My favourite colour is teal."),
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I will remember that."}],
        },
    ]
    body = {"model": MODEL, "input": history, "prompt_cache_key": "key", "tools": [], "text": {}}
    answer = await fetch(served, "POST", "/v1/responses/compact", body)
    assert answer.status == 200, answer.body
    window: dict[str, Any] = answer.json
    return window


async def test_open_responses_compact_response(served: Served) -> None:
    window = await compacted(served)
    assert window.keys() == {"id", "object", "created_at", "output", "usage"}
    assert window["object"] == "response.compaction"
    assert [item["type"] for item in window["output"]].count("compaction") == 1
    assert window["output"][-1].keys() >= {"id", "type", "encrypted_content"}


async def test_open_responses_compact_missing_model(served: Served) -> None:
    body = {"input": [user("Hello")]}
    answer = await fetch(served, "POST", "/v1/responses/compact", body)
    assert answer.status in (400, 422)


async def test_open_responses_websocket_compact_new_chain(served: Served) -> None:
    window = await compacted(served)
    async with wire(served) as socket:
        given = [*window["output"], user("Which colour?")]
        response = await turn(socket, input=given, store=False)
        assert response["previous_response_id"] is None


async def test_open_responses_suite_starts_everything_at_once(served: Served) -> None:
    """Some sixteen requests arrive together; a queue that is full would fail the suite."""
    itself = "test_open_responses_suite_starts_everything_at_once"
    names = [name for name in globals() if name.startswith("test_open_responses_")]
    assert len(names) > 16
    async with asyncio.timeout(30):
        await asyncio.gather(*(globals()[name](served) for name in names if name != itself))
