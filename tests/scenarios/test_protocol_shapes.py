"""Every JSON shape that we send, held against our own documents, the newest client's types, and Open Responses.

The shapes are recorded once: all stories of the transports, told over JSON, SSE and WebSocket, refusals, lists, models
and deletions. Our documents are closed for this, so that a field which they do not describe is a failure.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

from segue.openapi.schema import REF, SENT, WRITTEN, WRITTEN_PARTS
from tests.clients.outside import ROOT, run_python
from tests.openresponses import OUTSIDE, check_open_event, check_open_response
from tests.scenarios.test_transports import (
    STORIES,
    follow_up,
    serving_stories,
    tell_by_sse,
    tell_by_websocket,
)
from tests.support import WEATHER, ServedProcess, Wire, fetch, serving, wire


class Shape(NamedTuple):
    """Something that we sent: `sse` and `socket` are events, all else is the name of a schema."""

    kind: str
    value: Any
    story: str = ""


# What the client's types do not name: Open Responses demands three of these, the contract gives custom calls a status,
# and `retry_after` is ours.
BEYOND_THE_CLIENT = {
    "presence_penalty",
    "frequency_penalty",
    "store",
    "status",
    "retry_after",
    "context_window",
    "input_modalities",
}
EMPTY_LIST = {"object": "list", "first_id": "a", "last_id": "b", "has_more": False}
REFUSED: list[dict[str, Any]] = [
    {"input": "x", "previous_response_id": "resp_0"},
    {"input": "x", "model": "nobody"},
    {"input": 5},
    {"input": "x", "prompt": {"id": "p"}},
]
GIVEN: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello"},
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "message", "role": "developer", "content": "Be brief."},
    {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Yes", "annotations": [], "logprobs": []}],
    },
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "So."}]},
    {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "fine"},
    {"type": "custom_tool_call", "call_id": "call_2", "name": "g", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "fine"},
]


async def record(served: ServedProcess) -> list[Shape]:
    """Everything that these runs make the server send."""
    shapes: list[Shape] = []
    for name, story in STORIES.items():
        for turn in await tell_by_sse(served, name):
            shapes += [Shape("sse", event, name) for event in turn]
        for lane in (None, "main.1"):
            for turn in await tell_by_websocket(served, name, lane):
                shapes += [Shape("socket", event, name) for event in turn]
        last: dict[str, Any] | None = None
        for ask in story.asks:
            answer = await fetch(
                served, "POST", "/v1/responses", {"model": name, **follow_up(ask, last)}
            )
            last = answer.json
            shapes.append(Shape("Response" if answer.status == 200 else "ErrorBody", last, name))
    async with wire(served) as socket:
        for ask in REFUSED:
            answer = await fetch(served, "POST", "/v1/responses", {"model": "text", **ask})
            shapes.append(Shape("ErrorBody", answer.json))
            shapes += [
                Shape("socket", await socket.turn(**{"model": "text", **ask}, **lane))
                for lane in ({}, {"stream_id": "a"})
            ]
    return shapes + await record_lists(served)


async def record_lists(served: ServedProcess) -> list[Shape]:
    """What the other paths of the contract give."""
    body = {"model": "text", "input": GIVEN}
    path = "/v1/responses/" + (await fetch(served, "POST", "/v1/responses", body)).json["id"]
    asked = [
        ("GET", path, "Response"),
        ("GET", path + "/input_items?order=asc", "ItemList"),
        ("GET", path + "/input_items?limit=2", "ItemList"),
        ("DELETE", path, "Deleted"),
        ("GET", path, "ErrorBody"),
        ("GET", "/v1/models", "ModelList"),
        ("GET", "/v1/models/text", "ModelCard"),
        ("GET", "/v1/nowhere", "ErrorBody"),
        ("PUT", "/v1/responses", "ErrorBody"),
    ]
    return [Shape(kind, (await fetch(served, verb, to)).json) for verb, to, kind in asked]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    with serving_stories(tmp_path_factory.mktemp("shapes")) as served:
        yield served


async def record_asked_for(folder: Path) -> list[Shape]:
    """What only a client that asks for it brings about: steering, a rollout, compaction, a count, the background."""
    call = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    script = folder / "script.json"
    turns = [{"calls": [call]}, {"text": "long ", "pad_tokens": 3_000}, {"text": "So."}]
    script.write_text(json.dumps({"turns": turns}))
    async with serving(script=str(script), tps=2_000) as served, wire(served) as socket:
        events = await roll_out(socket)
        await socket.create(input="Compact.", store=False, tools=[WEATHER])
        (call_item,) = (await heard(socket, events))["response"]["output"]
        output = {"type": "function_call_output", "call_id": call_item["call_id"], "output": "x"}
        parent = events[-1]["response"]["id"]
        await socket.create(input=[output], previous_response_id=parent)
        while (event := await socket.next())["type"] != "response.output_text.delta":
            events.append(event)
        target = [one["response"]["id"] for one in events if "response" in one][-1]
        for named in ("resp_nobody", target):
            await socket.send(
                {"type": "response.steer", "previous_response_id": named, "input": "Shorter."}
            )
        assert (await heard(socket, events))["type"] == "response.incomplete"
        successor = (await heard(socket, events))["response"]["id"]
        trigger = {"type": "compaction_trigger"}
        await socket.create(input=[trigger], previous_response_id=successor)
        await heard(socket, events)
        said = [{"role": role, "content": "Hm."} for role in ("user", "assistant") * 2]
        body = {"model": "scripted", "input": said}
        window = await fetch(served, "POST", "/v1/responses/compact", body)
        count = await fetch(served, "POST", "/v1/responses/input_tokens", body)
        later = await fetch(served, "POST", "/v1/responses", {**body, "background": True})
        path = f"/v1/responses/{later.json['id']}"
        replayed = await fetch(served, "GET", f"{path}?stream=true")
        found = await fetch(served, "GET", path)
    return [
        *(Shape("socket", one, "asked for") for one in events),
        *(Shape("sse", one, "asked for") for one in replayed.events),
        Shape("Response", later.json),
        Shape("Response", found.json),
        Shape("CompactionWindow", window.json),
        Shape("InputTokens", count.json),
    ]


async def heard(socket: Wire, events: list[dict[str, Any]]) -> dict[str, Any]:
    """The next terminal event; all up to it are noted."""
    events += await socket.events()
    return events[-1]


async def roll_out(socket: Wire) -> list[dict[str, Any]]:
    """A rollout that waits, then is cut short by an answer that is too long for it."""
    fields = {"input": "x", "tools": [WEATHER], "rollout": True, "max_output_tokens": 60}
    await socket.create(**fields)
    events = [await socket.next()]
    while events[-1]["type"] != "response.done":
        events.append(await socket.next())
    done = events[-1]
    outputs = [
        {"type": "function_call_output", "call_id": one["call_id"], "output": "x"}
        for one in done["required_input"]
    ]
    await socket.send(
        {"type": "response.append", "response_id": done["response_id"], "input": outputs}
    )
    return events + await socket.events()


@pytest.fixture(scope="module")
def shapes(served: ServedProcess, tmp_path_factory: pytest.TempPathFactory) -> list[Shape]:
    async def everything() -> list[Shape]:
        folder = tmp_path_factory.mktemp("asked")
        return await record(served) + await record_asked_for(folder)

    return asyncio.run(everything())


async def document(served: ServedProcess, path: str) -> dict[str, Any]:
    """A document as served, with every type that we send closed."""
    answer = await fetch(served, "GET", path)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")
    found: dict[str, Any] = answer.json
    for name, schema in found["components"]["schemas"].items():
        if is_sent(name):
            schema["additionalProperties"] = False
    return found


def is_sent(name: str) -> bool:
    plain = name.removeprefix("Written")
    written = {kind.__name__ for kind in WRITTEN} | set(WRITTEN_PARTS)
    roots = {kind.__name__ for kind in SENT if isinstance(kind, type)}
    return name != plain or plain in roots - written


def validator(found: Mapping[str, Any], pointer: str) -> jsonschema.Draft202012Validator:
    schema = {"$ref": pointer, "components": found["components"]}
    return jsonschema.Draft202012Validator(schema)


async def test_everything_that_leaves_by_http_is_in_our_openapi_document(
    served: ServedProcess, shapes: list[Shape]
) -> None:
    found = await document(served, "/openapi.json")
    checks: dict[str, jsonschema.Draft202012Validator] = {}
    for kind, value, story in shapes:
        if kind == "socket":
            continue
        name = "Event" if kind == "sse" else kind
        check = checks.setdefault(name, validator(found, REF + name))
        assert not list(check.iter_errors(value)), (story, value)


async def test_everything_that_leaves_by_socket_is_in_our_asyncapi_document(
    served: ServedProcess, shapes: list[Shape]
) -> None:
    found = await document(served, "/asyncapi.json")
    told = found["operations"]["tell"]["messages"]
    payloads: dict[str, str] = {}
    for one in told:
        key = one["$ref"].rpartition("/")[2]
        message = found["components"]["messages"][key]
        assert found["channels"]["responses"]["messages"][key]["$ref"].endswith(f"/{key}")
        payloads[message["name"]] = message["payload"]["$ref"]
    for kind, value, story in shapes:
        if kind == "socket":
            check = validator(found, payloads[value["type"]])
            assert not list(check.iter_errors(value)), (story, value)


async def test_documents_see_a_shape_that_is_wrong(
    served: ServedProcess, shapes: list[Shape]
) -> None:
    """A check that lets everything through would prove nothing."""
    check = validator(await document(served, "/openapi.json"), REF + "Response")
    good = next(one.value for one in shapes if one.kind == "Response" and one.story == "reasoning")
    thought, message = good["output"]
    wrong = [
        {**good, "temperature": None},
        {**good, "more": 1},
        {key: value for key, value in good.items() if key != "user"},
        {**good, "output": [{**thought, "encrypted_content": None}, message]},
        {**good, "output": [thought, {**message, "phase": None}]},
        {**good, "output": [{"type": "later"}]},
        {**good, "usage": {**good["usage"], "total_tokens": "5"}},
        {**good, "tools": [{"type": "nothing"}]},
    ]
    assert check.is_valid(good)
    assert [one for one in wrong if check.is_valid(one)] == []


def test_everything_that_we_send_is_what_the_newest_client_expects(
    served: ServedProcess, shapes: list[Shape], tmp_path: Path
) -> None:
    ours = {"ErrorBody", "Deleted", "response.done"}
    sent = [one for one in shapes if not {one.kind, one.value.get("type")} & ours]
    known = [as_known(one) for one in split_windows(sent)]
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(known))
    found = run_python("python_shapes.py", served, str(path))
    assert found["wrong"] == []
    assert {one.rpartition(".")[2] for one in found["extra"]} <= BEYOND_THE_CLIENT, found["extra"]
    assert found["seen"] == len(known) > 500


def split_windows(shapes: list[Shape]) -> Iterator[Shape]:
    """The client's type of a window has no place for the messages of which its own words speak: they go apart."""
    for one in shapes:
        if one.kind == "CompactionWindow":
            *messages, compaction = one.value["output"]
            yield Shape("ItemList", {**EMPTY_LIST, "data": messages})
            yield Shape(one.kind, {**one.value, "output": [compaction]})
        else:
            yield one


def as_known(shape: Shape) -> tuple[str, Any]:
    """A shape with the one code put in place that Codex must have and the client's list of codes lacks."""
    if shape.value.get("type") != "response.failed":
        return shape[:2]
    response = shape.value["response"]
    assert response["error"]["code"] == "context_length_exceeded"
    known = {**response, "error": {**response["error"], "code": "invalid_prompt"}}
    return shape.kind, {**shape.value, "response": known}


def test_everything_that_we_send_obeys_open_responses(shapes: list[Shape]) -> None:
    for kind, value, _ in shapes:
        if kind in ("sse", "socket"):
            check_open_event(value)
        elif kind == "Response":
            check_open_response(value)


def test_only_what_is_asked_for_leaves_the_closed_union(shapes: list[Shape]) -> None:
    """With `reasoning = "summary"` and no custom tools a server passes where the union of events is closed."""
    told = {
        one.story for one in shapes if one.kind != "Response" and one.value.get("type") in OUTSIDE
    }
    assert told == {"reasoning", "cut-reasoning", "custom-call", "asked for"}


def test_error_bodies_have_their_four_keys(shapes: list[Shape]) -> None:
    bodies = [one.value for one in shapes if one.kind == "ErrorBody"]
    assert len(bodies) >= 5
    for body in bodies:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}


def test_page_says_of_every_event_that_we_send_that_it_is_sent(shapes: list[Shape]) -> None:
    page = (ROOT / "docs" / "protocol.md").read_text("utf-8")
    unsent = set(re.findall(r"^\| `([a-z_.]+)` \|.*\| not sent[^|]*\|$", page, re.MULTILINE))
    assert unsent
    seen = {one.value["type"] for one in shapes if one.kind in ("sse", "socket")}
    assert len(seen) > 20
    assert seen & unsent == set()
