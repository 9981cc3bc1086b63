"""The paths of the contract and their errors (docs/protocol.md 1), SSE framing (1.3), and the upgrade (6.1, 6.11)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import websockets
import websockets.asyncio.client

from tests.events import check_refusal, check_response, check_turn
from tests.support import MODEL, WEATHER, Served, fetch, serving, wire
from tests.ways import WAYS, ask, made, refused

BETA = {"OpenAI-Beta": "responses_websockets=2026-02-06"}


async def test_client_creates_retrieves_lists_and_deletes_a_response() -> None:
    async with serving() as served:
        created = await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "Hello"})
        assert created.status == 200
        check_response(created.json)
        path = f"/v1/responses/{created.json['id']}"
        assert (await fetch(served, "GET", path)).json == created.json
        listed = (await fetch(served, "GET", path + "/input_items")).json
        assert listed["object"] == "list"
        assert listed["has_more"] is False
        assert listed["first_id"] == listed["last_id"] == listed["data"][0]["id"]
        deleted = await fetch(served, "DELETE", path)
        assert deleted.status == 200
        expected = {"id": created.json["id"], "object": "response", "deleted": True}
        assert deleted.json == expected
        for verb, where in (("GET", path), ("DELETE", path), ("GET", path + "/input_items")):
            assert (await fetch(served, verb, where)).status == 404


async def test_models_are_listed_and_found_by_name() -> None:
    async with serving() as served:
        listed = await fetch(served, "GET", "/v1/models")
        assert listed.json["object"] == "list"
        (card,) = listed.json["data"]
        ours = {"context_window", "input_modalities"}
        assert card.keys() == {"id", "object", "created", "owned_by", *ours}
        assert card["input_modalities"] == ["text"]
        assert (card["id"], card["object"]) == (MODEL, "model")
        assert (await fetch(served, "GET", f"/v1/models/{MODEL}")).json == card
        # Codex asks so with other kinds of keys; it gets the one list that there is.
        codex = await fetch(served, "GET", "/v1/models?client_version=0.166.0")
        assert codex.json == listed.json
        missing = await fetch(served, "GET", "/v1/models/nobody")
        assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")


async def test_tokens_of_a_prompt_are_counted_without_generating() -> None:
    """The count is what the same request then uses; nothing is kept of the question."""
    async with serving() as served:
        for more in ({}, {"instructions": "Be brief.", "tools": [WEATHER], "tool_choice": "none"}):
            body = {"model": MODEL, "input": "How long is this?", **more}
            counted = await fetch(served, "POST", "/v1/responses/input_tokens", body)
            assert counted.status == 200, counted.body
            assert counted.json.keys() == {"object", "input_tokens"}
            assert counted.json["object"] == "response.input_tokens"
            response = await made(served, "json", **body)
            assert counted.json["input_tokens"] == response["usage"]["input_tokens"]
        body = {"model": MODEL, "previous_response_id": response["id"], "input": "And now?"}
        counted = await fetch(served, "POST", "/v1/responses/input_tokens", body)
        child = await made(served, "json", **body)
        assert counted.json["input_tokens"] == child["usage"]["input_tokens"]


async def test_every_answer_names_its_request() -> None:
    async with serving() as served:
        paths = ("/", "/health", "/ready", "/metrics", "/v1/models", "/openapi.json", "/nowhere")
        seen = {(await fetch(served, "GET", path)).headers["x-request-id"] for path in paths}
        body = {"model": MODEL, "input": "x", "stream": True}
        seen.add((await fetch(served, "POST", "/v1/responses", body)).headers["x-request-id"])
        async with wire(served) as socket:
            assert socket.socket.response is not None
            seen.add(socket.socket.response.headers["x-request-id"])
        assert len(seen) == len(paths) + 2
        assert all(one.startswith("req_") for one in seen)


@pytest.mark.parametrize("way", WAYS)
async def test_errors_before_a_turn_have_the_codes_of_the_contract(way: str) -> None:
    nobody = {"type": "function_call_output", "call_id": "call_nobody", "output": "x"}
    async with serving() as served:
        parent = await made(served, "json", input="Weather?", tools=[WEATHER])
        go_on = {"previous_response_id": parent["id"], "tools": [WEATHER]}
        told = await ask(served, way, input="x", previous_response_id="resp_abc")
        assert told.error == {
            "type": "invalid_request_error",
            "code": "previous_response_not_found",
            "message": "Previous response with id 'resp_abc' not found.",
            "param": "previous_response_id",
        }
        assert await refused(served, way, input="x", model="nobody") == (
            404,
            "model_not_found",
            "model",
        )
        assert await refused(served, way, input=[nobody], **go_on) == (
            400,
            "invalid_function_call_output",
            "input",
        )
        assert await refused(served, way, input="and?", **go_on) == (
            400,
            "missing_function_call_output",
            "input",
        )


async def test_sse_events_are_framed_and_end_with_done() -> None:
    """Name equals type, one blank line behind each event, `[DONE]` last; an event is never cut in two writes."""
    async with serving() as served:
        body = {"model": MODEL, "input": "Hello", "stream": True}
        answer = await fetch(served, "POST", "/v1/responses", body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.body.endswith(b"data: [DONE]\n\n")
        check_turn(answer.events)
        for event in answer.events:
            assert "error" not in event, "the Python client raises for a truthy top-level error"
        for chunk in await written(served, body):
            assert chunk.endswith(b"\n\n")


async def written(served: Served, body: dict[str, Any]) -> list[bytes]:
    """The chunks in which a stream was written."""
    data = json.dumps(body).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(head.encode() + data)
        await reader.readuntil(b"\r\n\r\n")
        chunks = []
        while size := int(await reader.readline(), 16):
            chunks.append((await reader.readexactly(size + 2))[:-2])
        writer.close()
        await writer.wait_closed()
    return chunks


@pytest.mark.parametrize(
    "headers",
    [
        {},
        BETA,
        {"Content-Type": "application/json", "Accept": "application/json"},
        {"Authorization": "Bearer none", "session-id": "s", "x-codex-window-id": "w", **BETA},
    ],
    ids=["plain", "beta", "compliance suite", "codex"],
)
async def test_upgrade_takes_the_headers_of_real_clients(headers: dict[str, str]) -> None:
    async with serving() as served, wire(served, additional_headers=headers) as socket:
        assert socket.socket.subprotocol is None
        assert (await socket.turn(input="Hello", store=False))["type"] == "response.completed"


async def test_upgrade_that_offers_compression_is_served() -> None:
    async with (
        serving() as served,
        websockets.asyncio.client.connect(served.ws_url, compression="deflate") as socket,
    ):
        await socket.send(json.dumps({"type": "response.create", "model": MODEL, "input": "x"}))
        async with asyncio.timeout(10):
            assert json.loads(await socket.recv())["type"] == "response.created"
            while json.loads(await socket.recv())["type"] != "response.completed":
                pass


async def test_path_of_the_socket_without_an_upgrade_is_told_what_it_takes() -> None:
    async with serving() as served:
        answer = await fetch(served, "GET", "/v1/responses")
        assert (answer.status, answer.headers["allow"]) == (405, "POST")


async def test_lane_never_implies_a_lineage() -> None:
    """A lane that is used again without a parent starts afresh (docs/protocol.md 6.2)."""
    async with serving() as served, wire(served) as socket:
        first = (await socket.turn(input="Hello", stream_id="a", store=False))["response"]
        second = (await socket.turn(input="Hello", stream_id="a", store=False))["response"]
        assert second["previous_response_id"] is None
        assert second["usage"]["input_tokens"] == first["usage"]["input_tokens"]


async def test_frames_that_are_no_create_are_told_so_and_the_socket_stays() -> None:
    async with serving() as served, wire(served) as socket:
        await socket.send("{")
        check_refusal(await socket.next(), 400, "invalid_json")
        await socket.send({"type": "session.update", "stream_id": "a"})
        check_refusal(await socket.next(), 400, "invalid_event_type", "a")
        await socket.send({"model": MODEL, "input": "x"})
        check_refusal(await socket.next(), 400, "invalid_event_type")
        assert (await socket.turn(input="x", store=False))["type"] == "response.completed"


async def test_terminal_error_of_a_turn_is_told_once() -> None:
    """After `response.failed` there is no `error` for the same turn (docs/protocol.md 5.2)."""
    async with serving(context_tokens=200) as served, wire(served) as socket:
        await socket.create(input="word " * 400, store=False)
        assert (await socket.events())[-1]["type"] == "response.failed"
        await socket.create(input="x", store=False)
        assert (await socket.next())["type"] == "response.created"
        await socket.events()


@pytest.mark.parametrize("way", WAYS)
async def test_client_recovers_on_a_new_socket(way: str) -> None:
    """A stored parent is continued from anywhere; an unstored one needs the full input (docs/protocol.md 6.13)."""
    async with serving() as served:
        async with wire(served) as socket:
            kept = (await socket.turn(input="Remember: seven."))["response"]
            lost = (await socket.turn(input="Remember: eight.", store=False))["response"]
        child = await made(served, way, input="Which?", previous_response_id=kept["id"])
        assert child["previous_response_id"] == kept["id"]
        found = await refused(served, way, input="Which?", previous_response_id=lost["id"])
        assert found == (400, "previous_response_not_found", "previous_response_id")
        full = [
            {"role": "user", "content": "Remember: eight."},
            *lost["output"],
            {"role": "user", "content": "Which?"},
        ]
        await made(served, way, input=full, previous_response_id=None)
