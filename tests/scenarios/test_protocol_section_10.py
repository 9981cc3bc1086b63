"""The easiest ways to break a real client (docs/protocol.md 10), one test for each row, by its number."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import websockets

from segue.settings.checks import load_settings
from tests.events import check_refusal, check_turn
from tests.support import (
    MODEL,
    TERMINAL,
    WEATHER,
    Wire,
    fetch,
    kinds,
    metric,
    serving,
    until,
    wire,
)
from tests.ways import WAYS, ask, made

STRAY_OUTPUT = {"type": "function_call_output", "call_id": "call_unknown", "output": "x"}
# Codex waits so long for a text frame.
CODEX_S_MAX = 300


def write_script(folder: Path, *turns: dict[str, Any]) -> str:
    path = folder / "script.json"
    path.write_text(json.dumps({"turns": turns}))
    return str(path)


async def completed(socket: Wire, **fields: Any) -> dict[str, Any]:
    event = await socket.turn(**fields)
    assert event["type"] == "response.completed", event
    response: dict[str, Any] = event["response"]
    return response


async def code_of(socket: Wire, **fields: Any) -> str:
    event = await socket.turn(**fields)
    assert event["type"] == "error", event
    code: str = event["error"]["code"]
    return code


async def test_section_10_row_1_errors_are_nested_with_status_code_and_number() -> None:
    async with serving() as served, wire(served) as socket:
        for lane in (None, "main"):
            named = {} if lane is None else {"stream_id": lane}
            event = await socket.turn(input="x", previous_response_id="resp_abc", **named)
            check_refusal(event, 400, "previous_response_not_found", lane)
            assert event["error"]["message"] == "Previous response with id 'resp_abc' not found."
            assert event["error"]["param"] == "previous_response_id"
            assert not {"code", "message", "param"} & event.keys(), "a flat error hangs Codex"


async def test_section_10_row_2_words_of_other_transports_are_ignored_on_the_socket() -> None:
    codex = {"reasoning_summary_delivery": "sequential_cutoff"}
    words = [
        {"stream": True},
        {"stream": False},
        {"stream_options": {"include_obfuscation": True, **codex}},
        {"client_metadata": {"session_id": "s", "x-codex-window-id": "w"}},
        {"stream": True, "stream_options": codex, "client_metadata": {}},
    ]
    async with serving() as served, wire(served) as socket:
        for one in words:
            await socket.create(input="Hello", store=False, **one)
            events = await socket.events()
            assert check_turn(events)["status"] == "completed"
            assert not any("obfuscation" in event for event in events)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_warm_up", [False, True], ids=["a turn", "a warm-up"])
async def test_section_10_row_3_empty_input_with_a_parent_generates(
    way: str, is_warm_up: bool
) -> None:
    async with serving() as served:
        asked = {"input": "Remember the number 41.", "generate": not is_warm_up}
        parent = await made(served, "json", **asked)
        child = await ask(served, way, input=[], previous_response_id=parent["id"])
        assert child.response["status"] == "completed"
        assert child.text
        assert child.response["usage"]["output_tokens"] > 0


async def test_section_10_row_4_in_progress_follows_created_once_the_parent_is_pinned() -> None:
    """A fork that has said in_progress survives the advance of its source; an unbound parent is never created."""
    async with serving() as served, wire(served) as socket:
        root = await completed(socket, input="root", store=False)
        go_on = {"previous_response_id": root["id"], "store": False}
        await socket.create(input="fork", stream_id="fork", **go_on)
        first, second = await socket.next(), await socket.next()
        assert first["type"] == "response.created"
        assert second["type"] == "response.in_progress"
        for number in range(3):
            await socket.create(input=f"advance {number}", store=False)
        ends: list[dict[str, Any]] = []
        while len(ends) < 4:
            event = await socket.next()
            if event["type"] in TERMINAL:
                ends.append(event)
        assert {event["type"] for event in ends} == {"response.completed"}
        await socket.create(input="x", previous_response_id="resp_unknown")
        assert [event["type"] for event in await socket.events()] == ["error"]


@pytest.mark.parametrize("way", ["sse", "socket", "lane"])
async def test_section_10_row_5_done_items_and_the_terminal_snapshot_are_whole(
    way: str, tmp_path: Path
) -> None:
    call = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    script = write_script(tmp_path, {"reasoning": "hm", "text": "I look.", "calls": [call, call]})
    async with serving(script=script) as served:
        answer = await ask(served, way, input="x", tools=[WEATHER])
    done = [
        event["item"] for event in answer.events if event["type"] == "response.output_item.done"
    ]
    assert [item["type"] for item in done] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert answer.response["output"] == done
    added = [
        event["item"]["id"]
        for event in answer.events
        if event["type"] == "response.output_item.added"
    ]
    assert added == [item["id"] for item in done]
    assert json.loads(done[2]["arguments"]) == {"city": "Oslo"}
    assert done[0]["content"][0]["text"] == "hm"


async def test_section_10_row_6_a_socket_carries_json_objects_and_nothing_else() -> None:
    """No `[DONE]`, no binary frame, no SSE text: frame after frame, over two turns and a refusal."""
    async with serving() as served, wire(served) as socket:
        ends = 0
        for fields in ({"input": "a"}, {"input": 5}, {"input": "b"}):
            await socket.create(store=False, **fields)
        while ends < 3:
            async with asyncio.timeout(10):
                frame = await socket.socket.recv()
            assert isinstance(frame, str)
            event = json.loads(frame)
            assert isinstance(event["type"], str)
            ends += event["type"] in TERMINAL
        await socket.create(input="c", store=False)
        assert (await socket.events())[0]["type"] == "response.created"


async def test_section_10_row_7_context_overflow_is_a_failed_response() -> None:
    asked = {"input": "word " * 400, "store": False}
    async with serving(context_tokens=200) as served:
        for way in ("sse", "socket", "lane"):
            answer = await ask(served, way, **asked)
            assert answer.events[-1]["type"] == "response.failed"
            assert answer.response["error"]["code"] == "context_length_exceeded"
        plain = await ask(served, "json", **asked)
        assert (plain.status, plain.error["code"]) == (400, "context_length_exceeded")
        assert plain.error["param"] == "input"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("view", ["text", "summary", "hidden"])
async def test_section_10_row_8_null_is_never_said_for_a_number_or_an_absent_key(
    way: str, view: str, tmp_path: Path
) -> None:
    script = write_script(tmp_path, {"reasoning": "hm", "text": "Yes."})
    async with serving(script=script, reasoning=view) as served:
        answer = await ask(served, way, input="x", temperature=None, top_p=None, top_logprobs=None)
    snapshots = [event["response"] for event in answer.events if "response" in event]
    for response in [*snapshots, answer.response]:
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
            assert type(response[name]) in (int, float), name
        assert type(response["top_logprobs"]) is int
    thought, message = answer.response["output"]
    assert thought.get("encrypted_content", "") is not None
    assert thought.get("content", []) is not None
    assert message.get("phase", "") is not None


async def test_section_10_row_9_errors_keep_the_socket_and_evict_on_their_own_lane_only() -> None:
    async with serving() as served, wire(served) as socket:
        root = await completed(socket, input="root", store=False)
        go_on = {"previous_response_id": root["id"], "store": False}
        # A fork that fails leaves the parent to everybody.
        assert (
            await code_of(socket, input=[STRAY_OUTPUT], stream_id="other", **go_on)
            == "invalid_function_call_output"
        )
        same = await completed(socket, input="still there", **go_on)
        # A continuation that fails takes its own parent along.
        go_on = {"previous_response_id": same["id"], "store": False}
        assert (
            await code_of(socket, input=[STRAY_OUTPUT], **go_on) == "invalid_function_call_output"
        )
        assert await code_of(socket, input="again", **go_on) == "previous_response_not_found"
        await completed(socket, input="in full", store=False)


async def test_section_10_row_10_creates_queue_by_lane_within_the_limits(tmp_path: Path) -> None:
    """Two on each of 17 lanes: 16 run at once, each lane keeps its order, and the 33rd name is refused."""
    script = write_script(tmp_path, {"text": "x", "pad_tokens": 20})
    async with serving(script=script, tps=400) as served, wire(served) as socket:
        for lane in range(17):
            for number in range(2):
                await socket.create(input="x", stream_id=f"l{lane}", metadata={"n": str(number)})
        running: set[str] = set()
        heard: dict[str, list[str]] = {}
        most = 0
        while sum(map(len, heard.values())) < 34:
            event = await socket.next()
            lane_name = event["stream_id"]
            if event["type"] == "response.created":
                assert lane_name not in running, "two turns of one lane overlap"
                running.add(lane_name)
                most = max(most, len(running))
            elif event["type"] in TERMINAL:
                assert event["type"] == "response.completed"
                running.remove(lane_name)
                heard.setdefault(lane_name, []).append(event["response"]["metadata"]["n"])
        assert most == 16
        assert all(order == ["0", "1"] for order in heard.values())
        for lane in range(17, 32):
            await socket.create(input="x", stream_id=f"l{lane}", generate=False, store=False)
            assert (await socket.events(f"l{lane}"))[-1]["type"] == "response.completed"
        event = await socket.turn(input="x", stream_id="l32")
        check_refusal(event, 400, "websocket_stream_limit_reached", "l32")


async def test_section_10_row_11_closing_the_socket_is_the_only_cancel(tmp_path: Path) -> None:
    script = write_script(tmp_path, {"text": "x", "pad_tokens": 100_000})
    async with serving(script=script, tps=200) as served:
        async with wire(served) as socket:
            await socket.create(input="x", store=False)
            response_id = (await socket.next())["response"]["id"]
            await socket.send({"type": "response.cancel", "response_id": response_id})
            while (event := await socket.next())["type"] != "error":
                pass
            assert event["error"]["code"] == "invalid_event_type"
            assert (await socket.next())["type"] != "error", "the turn goes on"

        async def is_counted() -> bool:
            name = 'segue_turns_total{outcome="cancelled",transport="websocket"}'
            return await metric(served, name) == 1

        await until(is_counted)


async def test_section_10_row_12_a_turn_is_closed_upon_with_1009_or_1012_only(
    tmp_path: Path,
) -> None:
    script = write_script(tmp_path, {"text": "x", "pad_tokens": 100_000})
    async with (
        serving(script=script, tps=200, body_bytes_max=4096) as served,
        wire(served) as big,
        wire(served) as stopped,
    ):
        for socket in (big, stopped):
            await socket.create(input="x", store=False)
            assert (await socket.next())["type"] == "response.created"
        await big.create(input="x" * 5000)
        assert await closed_with(big) == 1009
        await served.app.drain(0)
        assert await closed_with(stopped) == 1012


async def closed_with(socket: Wire) -> int | None:
    """The code of the server's close; before it came a terminal event or an error."""
    last: dict[str, Any] = {}
    try:
        while True:
            last = await socket.next()
    except websockets.ConnectionClosed as closed:
        assert last["type"] in TERMINAL, last
        return closed.rcvd.code if closed.rcvd else None


async def test_section_10_row_13_text_frames_break_every_silence(tmp_path: Path) -> None:
    usual = load_settings({"engine": "scripted"}, environment={})
    assert usual.heartbeat_s < CODEX_S_MAX
    script = write_script(tmp_path, {"text": "slow"})
    async with serving(script=script, tps=10, heartbeat_s=0.02) as served, wire(served) as socket:
        await socket.create(input="x", store=False)
        events = await socket.events()
    check_turn(events)
    beats = [event for event in events if event["type"] == "response.in_progress"]
    assert len(beats) > 2
    assert len(kinds(events)) == len(events) - len(beats) + 1


async def test_section_10_row_14_store_left_out_means_true_on_the_socket_too() -> None:
    async with serving() as served:
        async with wire(served) as socket:
            first = await completed(socket, input="Remember: seven.")
        assert first["store"] is True
        assert (await fetch(served, "GET", f"/v1/responses/{first['id']}")).json == first
        async with wire(served) as later:
            second = await completed(later, input="Which?", previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]


@pytest.mark.parametrize("way", WAYS)
async def test_section_10_row_15_done_items_and_reasoning_are_taken_back_verbatim(
    way: str, tmp_path: Path
) -> None:
    """The whole output goes back as input, each item as it was given, and the model goes on from there."""
    call = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    script = write_script(
        tmp_path, {"reasoning": "hm", "text": "I look.", "calls": [call]}, {"text": "Rain."}
    )
    asked = {"input": [{"role": "user", "content": "Oslo?"}], "tools": [WEATHER], "store": False}
    async with serving(script=script) as served:
        first = await made(served, way, **asked)
        call_id = first["output"][-1]["call_id"]
        output = {"type": "function_call_output", "call_id": call_id, "output": "rain"}
        history = [*asked["input"], *first["output"], output]
        answer = await ask(served, way, **{**asked, "input": history})
    assert answer.status == 200, answer.error
    assert answer.text == "Rain."


@pytest.mark.parametrize("way", WAYS)
async def test_section_10_row_15_a_compacted_window_is_taken_back_verbatim(way: str) -> None:
    async with serving() as served:
        first = await made(served, way, input="The code word is heron.")
        body = {"model": MODEL, "previous_response_id": first["id"], "input": []}
        answer = await fetch(served, "POST", "/v1/responses/compact", body)
        assert answer.status == 200, answer.body
        given = [*answer.json["output"], {"role": "user", "content": "Which word?"}]
        answer = await ask(served, way, input=given, store=False)
        assert answer.status == 200, answer.error
        assert answer.text
