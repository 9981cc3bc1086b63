"""The life and death of connections: lanes, forks, eviction, age, silence, slow readers and clients that leave."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket as net
import sqlite3
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import websockets

from segue.listener.subscribers import SseSubscriber
from tests.support import (
    MODEL,
    TERMINAL,
    WEATHER,
    Served,
    Wire,
    fetch,
    kinds,
    metric,
    serving,
    until,
    wire,
)

CANCELLED = 'segue_turns_total{outcome="cancelled",transport="%s"}'
STRAY_OUTPUT = {"type": "function_call_output", "call_id": "call_unknown", "output": "x"}
Leave = Callable[[Wire], Awaitable[None]]


def write_script(folder: Path, *turns: dict[str, Any]) -> str:
    """A script for the scripted engine; its path."""
    path = folder / "script.json"
    path.write_text(json.dumps({"turns": turns}))
    return str(path)


async def read(served: Served, response_id: str) -> dict[str, Any]:
    """A response as GET shows it, once it no longer runs."""
    found: list[dict[str, Any]] = []

    async def is_over() -> bool:
        answer = await fetch(served, "GET", f"/v1/responses/{response_id}")
        assert answer.status == 200, answer.body
        found.append(answer.json)
        return bool(answer.json["status"] != "in_progress")

    await until(is_over)
    return found[-1]


async def is_cancelled(served: Served, transport: str) -> bool:
    return await metric(served, CANCELLED % transport) == 1


async def refusal(socket: Wire, **fields: Any) -> tuple[str, str]:
    """The code and text with which this create is refused."""
    event = await socket.turn(**fields)
    assert event["type"] == "error", event
    return event["error"]["code"], event["error"]["message"]


async def completed(socket: Wire, **fields: Any) -> dict[str, Any]:
    """The response that this create makes."""
    event = await socket.turn(**fields)
    assert event["type"] == "response.completed", event
    response: dict[str, Any] = event["response"]
    return response


def lost(parent: dict[str, Any]) -> tuple[str, str]:
    return (
        "previous_response_not_found",
        f"Previous response with id '{parent['id']}' not found.",
    )


# Lanes.


async def test_creates_of_one_lane_run_one_after_the_other_in_order() -> None:
    async with serving() as served, wire(served) as socket:
        for number in range(5):
            await socket.create(input=f"number {number}", store=False)
        for number in range(5):
            events = await socket.events()
            assert kinds(events)[:2] == ["response.created", "response.in_progress"]
            assert len({event["response"]["id"] for event in events if "response" in event}) == 1
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            text = events[-1]["response"]["output"][0]["content"][0]["text"]
            assert f"number {number}" in text


async def test_slow_lane_does_not_hold_up_a_fast_one(tmp_path: Path) -> None:
    script = write_script(tmp_path, {"text": "long", "pad_tokens": 100_000})
    async with serving(script=script, tps=200) as served, wire(served) as socket:
        await socket.create(input="x", stream_id="slow", store=False)
        assert (await socket.next())["stream_id"] == "slow"
        # The default lane is a lane like any other, and so is another name.
        for lane in ({}, {"stream_id": "fast"}):
            await socket.create(input="x", max_output_tokens=2, store=False, **lane)
            while (event := await socket.next())["type"] not in TERMINAL:
                pass
            assert event["type"] == "response.incomplete"
            assert event.get("stream_id") == lane.get("stream_id")


async def test_sixteen_turns_run_at_once_and_the_seventeenth_waits(tmp_path: Path) -> None:
    script = write_script(tmp_path, {"text": "x", "pad_tokens": 40})
    async with serving(script=script, tps=200) as served, wire(served) as socket:
        for number in range(17):
            await socket.create(input="x", stream_id=f"lane{number}", store=False)
        running: set[str] = set()
        most = ended = 0
        while ended < 17:
            event = await socket.next()
            if event["type"] == "response.created":
                running.add(event["stream_id"])
            elif event["type"] in TERMINAL:
                assert event["type"] == "response.completed"
                running.remove(event["stream_id"])
                ended += 1
            most = max(most, len(running))
        assert most == 16


async def test_client_forks_from_the_default_lane_and_back() -> None:
    async with serving() as served, wire(served) as socket:
        root = await completed(socket, input="root", store=False)
        for lane in ({"stream_id": "a"}, {}):
            child = await completed(
                socket, input="child", previous_response_id=root["id"], store=False, **lane
            )
            assert child["previous_response_id"] == root["id"]


async def test_fork_from_a_turn_that_still_runs_is_refused(tmp_path: Path) -> None:
    """Forks need a finished parent (docs/protocol.md 9 row 14); on its own lane the create waits for it."""
    script = write_script(tmp_path, {"text": "x", "pad_tokens": 60})
    async with serving(script=script, tps=200) as served, wire(served) as socket:
        await socket.create(input="x", store=False)
        parent_id = (await socket.next())["response"]["id"]
        await socket.create(input="fork", stream_id="b", previous_response_id=parent_id)
        await socket.create(input="next", previous_response_id=parent_id, store=False)
        assert (await socket.events("b"))[-1]["error"]["code"] == "previous_response_not_found"
        assert (await socket.events())[-1]["type"] == "response.completed"
        assert (await socket.events())[-1]["type"] == "response.completed"


async def test_mistake_of_ours_is_reported_and_does_not_block_the_lane(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets a code, the log gets the traceback, and the next create of the lane is served."""

    async def stumble(*_: object, **__: object) -> None:
        raise RuntimeError("a mistake")

    async with serving() as served, wire(served) as socket:
        for lane in ({}, {"stream_id": "a"}):
            with monkeypatch.context() as broken:
                broken.setattr(served.app.runner, "_prepare", stumble)
                event = await socket.turn(input="x", **lane)
                answer = await fetch(
                    served, "POST", "/v1/responses", {"model": MODEL, "input": "x"}
                )
            assert (event["status"], event["error"]["code"]) == (500, "server_error")
            assert (answer.status, answer.json["error"]) == (500, event["error"])
            assert "mistake" not in event["error"]["message"]
            await completed(socket, input="x", store=False, **lane)
    assert caplog.text.count("RuntimeError: a mistake") == 4


# What is forgotten, and what is not.


async def test_failed_continuation_evicts_its_parent() -> None:
    """The story of the compliance suite: after turn 2 failed, turn 3 from the same parent is not found."""
    async with serving() as served, wire(served) as socket:
        first = await completed(socket, input="Weather?", tools=[WEATHER], store=False)
        go_on = {"previous_response_id": first["id"], "tools": [WEATHER], "store": False}
        code, message = await refusal(socket, input=[STRAY_OUTPUT], **go_on)
        assert code == "invalid_function_call_output"
        assert message == "No tool call found for function call output with call_id call_unknown."
        call_id = first["output"][0]["call_id"]
        answer = {"type": "function_call_output", "call_id": call_id, "output": "sun"}
        assert await refusal(socket, input=[answer], **go_on) == lost(first)


async def test_turn_that_fails_after_it_started_evicts_its_parent_too() -> None:
    async with serving(context_tokens=200) as served, wire(served) as socket:
        first = await completed(socket, input="x", store=False)
        too_long = await socket.turn(
            input="word " * 300, previous_response_id=first["id"], store=False
        )
        assert too_long["type"] == "response.failed"
        assert await refusal(socket, input="y", previous_response_id=first["id"]) == lost(first)


async def test_failed_fork_evicts_nothing() -> None:
    async with serving() as served, wire(served) as socket:
        root = await completed(socket, input="root", store=False)
        go_on = {"previous_response_id": root["id"], "store": False}
        code, _ = await refusal(socket, input=[STRAY_OUTPUT], stream_id="b", **go_on)
        assert code == "invalid_function_call_output"
        await completed(socket, input="still there", **go_on)
        await completed(socket, input="and for a fork", stream_id="b", **go_on)


async def test_bad_envelopes_evict_nothing() -> None:
    """They never bound the parent (docs/protocol.md 6.4)."""
    async with serving() as served, wire(served) as socket:
        root = await completed(socket, input="root", store=False)
        go_on = {"previous_response_id": root["id"], "store": False}
        await refusal(socket, input="x", temperature=9, **go_on)
        await socket.create(input="x", stream_id="a b", **go_on)
        assert (await socket.next())["error"]["code"] == "invalid_stream_id"
        await completed(socket, input="still there", **go_on)


@pytest.mark.parametrize("does_fail", [False, True], ids=["advances", "fails"])
async def test_waiting_fork_keeps_its_parent_while_the_source_moves_on(
    tmp_path: Path, does_fail: bool
) -> None:
    script = write_script(tmp_path, {"text": "x", "pad_tokens": 40})
    async with serving(script=script, tps=200) as served, wire(served) as socket:
        root = await completed(socket, input="root", store=False)
        go_on = {"previous_response_id": root["id"], "store": False}
        await socket.create(input="busy", stream_id="b", store=False)
        await socket.create(input="fork", stream_id="b", **go_on)
        await socket.create(input=[STRAY_OUTPUT] if does_fail else "next", **go_on)
        ends: list[dict[str, Any]] = []
        while len(ends) < 3:
            event = await socket.next()
            if event["type"] in TERMINAL:
                ends.append(event)
        moved = next(event for event in ends if "stream_id" not in event)
        assert moved["type"] == ("error" if does_fail else "response.completed")
        _, fork = (event for event in ends if "stream_id" in event)
        assert fork["type"] == "response.completed"
        assert fork["response"]["previous_response_id"] == root["id"]
        if does_fail:
            assert await refusal(socket, input="late", **go_on) == lost(root)


async def test_stored_parent_outlives_eviction_and_the_socket() -> None:
    async with serving() as served:
        async with wire(served) as socket:
            root = await completed(socket, input="root")
            await refusal(socket, input=[STRAY_OUTPUT], previous_response_id=root["id"])
            await completed(socket, input="again", previous_response_id=root["id"], store=False)
        async with wire(served) as socket:
            await completed(socket, input="elsewhere", previous_response_id=root["id"])


async def test_unstored_parent_lives_and_dies_with_its_socket() -> None:
    async with serving() as served:
        async with wire(served) as socket:
            root = await completed(socket, input="root", store=False)
            async with wire(served) as other:
                assert await refusal(other, input="x", previous_response_id=root["id"]) == lost(
                    root
                )
            await completed(socket, input="x", previous_response_id=root["id"], store=False)
        async with wire(served) as socket:
            assert await refusal(socket, input="x", previous_response_id=root["id"]) == lost(root)
        answer = await fetch(
            served,
            "POST",
            "/v1/responses",
            {"model": MODEL, "input": "x", "previous_response_id": root["id"]},
        )
        assert (answer.status, answer.json["error"]["message"]) == (400, lost(root)[1])


# Warm-ups.


@pytest.mark.parametrize(
    "warm", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}], ids=str
)
async def test_warm_up_says_nothing_and_can_be_continued(warm: dict[str, Any]) -> None:
    """Also by an empty input, which then makes the model speak (docs/protocol.md 6.7)."""
    async with serving() as served, wire(served) as socket:
        await socket.create(input="Say hello", instructions="Be brief", store=False, **warm)
        events = await socket.events()
        assert kinds(events) == ["response.created", "response.in_progress", "response.completed"]
        ready = events[-1]["response"]
        assert ready["output"] == []
        assert ready["usage"]["output_tokens"] == 0
        assert ready["usage"]["input_tokens"] > 0
        spoken = await completed(socket, input=[], previous_response_id=ready["id"], store=False)
        assert spoken["output"][0]["content"][0]["text"]
        assert spoken["usage"]["output_tokens"] > 0
        await completed(socket, input="more", previous_response_id=ready["id"], store=False)


async def test_warm_up_needs_no_input() -> None:
    async with serving() as served, wire(served) as socket:
        ready = await completed(socket, generate=False, tools=[WEATHER], store=False)
        await completed(socket, input="Hi", previous_response_id=ready["id"], store=False)


# Age.


def check_age_error(event: dict[str, Any], age_s: float, lane: str | None = None) -> None:
    assert event["type"] == "error"
    assert event["status"] == 400
    assert event.get("stream_id") == lane
    assert event["error"] == {
        "type": "invalid_request_error",
        "code": "websocket_connection_limit_reached",
        "message": f"Responses websocket connection limit reached ({age_s / 60:.0f} minutes). "
        "Create a new websocket connection to continue.",
        "param": None,
    }


async def closed_with(socket: Wire) -> int | None:
    with pytest.raises(websockets.ConnectionClosed) as closed:
        await socket.next()
    return closed.value.rcvd.code if closed.value.rcvd else None


async def test_old_idle_connection_gets_an_error_and_is_closed() -> None:
    async with serving(connection_age_s=0.2) as served, wire(served) as socket:
        check_age_error(await socket.next(), 0.2)
        assert await closed_with(socket) == 1001


async def test_old_connection_finishes_its_turn_and_takes_no_new_one(tmp_path: Path) -> None:
    script = write_script(tmp_path, {"text": "x", "pad_tokens": 150})
    async with (
        serving(script=script, tps=200, connection_age_s=0.2) as served,
        wire(served) as socket,
    ):
        await socket.create(input="x", store=False)
        # Nothing tells when a busy connection came of age, except a refusal.
        refused = False
        types = []
        while not types or types[-1] not in TERMINAL:
            event = await socket.next()
            if event.get("stream_id") != "late":
                types.append(event["type"])
                if not refused:
                    await socket.create(input="x", stream_id="late", generate=False, store=False)
            elif event["type"] == "error":
                refused = True
                check_age_error(event, 0.2, "late")
        assert refused
        assert types[-1] == "response.completed"
        while (event := await socket.next()).get("stream_id") == "late":
            pass
        check_age_error(event, 0.2)
        assert await closed_with(socket) == 1001


# The upgrade.


async def test_upgrade_is_refused_where_websocket_is_off() -> None:
    async with serving(websocket=False) as served:
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with wire(served):
                pass
        answer = refused.value.response
        assert answer.status_code == 426
        assert answer.headers["x-request-id"].startswith("req_")
        assert json.loads(answer.body)["error"]["code"] == "upgrade_required"
        plain = await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "x"})
        assert plain.status == 200


async def test_upgrade_elsewhere_is_not_found() -> None:
    async with serving() as served:
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with websockets.connect(served.url.replace("http", "ws") + "/v1/models"):
                pass
        assert refused.value.response.status_code == 404


async def test_upgrade_takes_a_query_and_a_trailing_slash() -> None:
    async with serving() as served:
        for tail in ("?beta=true", "/"):
            async with websockets.connect(served.ws_url + tail) as socket:
                await completed(Wire(socket), input="x", store=False)


# Silence.


async def test_silence_is_broken_by_heartbeats_on_socket_and_sse(tmp_path: Path) -> None:
    script = write_script(tmp_path, {"text": "one"})
    async with serving(script=script, tps=2, heartbeat_s=0.1) as served, wire(served) as socket:
        await socket.create(input="x", store=False)
        over_socket = await socket.events()
        data = {"model": MODEL, "input": "x", "stream": True, "store": False}
        over_sse = (await fetch(served, "POST", "/v1/responses", data)).events
    assert kinds(over_socket) == kinds(over_sse)
    for events in (over_socket, over_sse):
        beats = [event for event in events if event["type"] == "response.in_progress"]
        assert len(beats) >= 3
        assert all(beat["response"]["status"] == "in_progress" for beat in beats)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_ping_is_answered_while_a_response_streams(tmp_path: Path) -> None:
    script = write_script(tmp_path, {"text": "x", "pad_tokens": 100_000})
    async with serving(script=script, tps=2000) as served, wire(served) as socket:
        await socket.create(input="x", store=False)
        for _ in range(5):
            # A client that does not read holds its own pongs up: it reads on while it waits.
            pong = asyncio.ensure_future(await socket.socket.ping())
            async with asyncio.timeout(10):
                while not pong.done():
                    assert (await socket.next())["type"] not in TERMINAL


# Connections that we must end.


async def send_too_much(socket: Wire) -> None:
    await socket.send("x" * 6_000)


async def send_binary(socket: Wire) -> None:
    await socket.send(b"abc")


async def send_many_frames(socket: Wire) -> None:
    for _ in range(80):
        await socket.socket.ping()


def send_bytes(data: bytes) -> Leave:
    async def send(socket: Wire) -> None:
        socket.socket.transport.write(data)

    return send


OFFENCES: dict[str, tuple[Leave, int, str]] = {
    "too large": (send_too_much, 1009, "payload_too_large"),
    "binary": (send_binary, 1003, "invalid_message"),
    "flood": (send_many_frames, 1008, "rate_limit_exceeded"),
    "not UTF-8": (send_bytes(b"\x81\x82\0\0\0\0\xff\xff"), 1007, "invalid_json"),
    "reserved bits": (send_bytes(b"\xf1\x82\0\0\0\0{}"), 1002, "invalid_message"),
    "not masked": (send_bytes(b"\x81\x02{}"), 1002, "invalid_message"),
}


async def test_whatever_ends_a_connection_every_create_is_answered_first(tmp_path: Path) -> None:
    """docs/inside/hazards.md F9, F14: no close without an event, and no create is left without its last word."""
    script = write_script(tmp_path, {"text": "x", "pad_tokens": 100_000})
    limits = {"body_bytes_max": 5_000, "frames_per_s": 10, "frames_burst_max": 40}
    async with serving(script=script, tps=100, **limits) as served:
        for name, (offend, code, reason) in OFFENCES.items():
            ends: list[tuple[str | None, int, str]] = []
            async with wire(served, ping_interval=None) as socket:
                for lane in ({}, {"stream_id": "a"}, {"stream_id": "a"}):
                    await socket.create(input="x", store=False, **lane)
                for _ in range(2):
                    assert (await socket.next())["type"] in (
                        "response.created",
                        "response.in_progress",
                    )
                with suppress(websockets.ConnectionClosed):
                    await offend(socket)
                with pytest.raises(websockets.ConnectionClosed) as closed:
                    while True:
                        event = await socket.next()
                        if event["type"] in TERMINAL:
                            error = event["error"]
                            ends.append((event.get("stream_id"), event["status"], error["code"]))
            assert closed.value.rcvd is not None, name
            assert closed.value.rcvd.code == code, name
            cut = [(lane, 500, "server_error") for lane in (None, "a", "a")]
            assert ends[:-1] == cut, name
            assert ends[-1][2] == reason, name

        async def is_over() -> bool:
            return served.app.runner.running_count == 0

        await until(is_over)


# Readers that do not read.


def narrow_socket(port: int) -> net.socket:
    """A connected socket with as small a window as the system allows."""
    one = net.socket()
    one.setsockopt(net.SOL_SOCKET, net.SO_RCVBUF, 4096)
    one.connect(("127.0.0.1", port))
    one.setblocking(False)
    return one


@asynccontextmanager
async def serving_at_length(folder: Path, **flags: Any) -> AsyncIterator[Served]:
    """An answer far larger than all buffers, a small outbox, little patience."""
    script = write_script(folder, {"text": "x", "pad_tokens": PAD_TOKENS})
    async with serving(
        script=script,
        store=f"sqlite:///{folder / 'turns.db'}",
        outbox_bytes_max=32 * 1024,
        write_s_max=0.4,
        **flags,
    ) as served:
        yield served


PAD_TOKENS = 300_000


def sampled_tokens(folder: Path) -> int:
    """How much the model had said when the one turn ended, from the usage that it left."""
    with sqlite3.connect(folder / "turns.db") as database:
        ((status, tokens),) = database.execute("SELECT status, output_tokens FROM usage")
    database.close()
    assert status == "cancelled"
    return int(tokens)


async def test_socket_reader_that_never_reads_slows_the_model_and_is_cut(tmp_path: Path) -> None:
    """What the model said until then is all that memory could hold: the outbox and the kernel's buffers."""
    async with serving_at_length(tmp_path) as served:
        sock = narrow_socket(served.port)
        async with websockets.connect(
            served.ws_url, sock=sock, max_queue=1, compression=None, ping_interval=None
        ) as socket:
            await Wire(socket).create(input="x", store=False)
            await until(lambda: is_cancelled(served, "websocket"))
            assert await metric(served, "segue_connections") == 0
            socket.transport.abort()
    assert sampled_tokens(tmp_path) < PAD_TOKENS / 2


STREAMED: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "x", "store": False},
    "/v1/messages": {"max_tokens": PAD_TOKENS, "messages": [{"role": "user", "content": "x"}]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.mark.parametrize("path", STREAMED)
async def test_stream_that_was_cut_leaves_nothing_for_the_garbage_collector(
    tmp_path: Path, path: str
) -> None:
    """That comes seldom, and until then all that waited would stay in memory."""
    gc.collect()
    gc.disable()
    try:
        async with serving_at_length(tmp_path) as served:
            _, writer = await asyncio.open_connection(sock=narrow_socket(served.port), limit=1024)
            data = json.dumps({"model": MODEL, "stream": True, **STREAMED[path]}).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            await until(lambda: waiting_bytes() > 0)
            writer.transport.abort()
            await until(lambda: waiting_bytes() == 0)
    finally:
        gc.enable()


def waiting_bytes() -> int:
    """What all streams by HTTP hold that are in memory, in use or not."""
    return sum(one.unread_bytes for one in gc.get_objects() if isinstance(one, SseSubscriber))


async def test_sse_reader_that_never_reads_slows_the_model_and_is_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_at_length(tmp_path) as served:
        reader, writer = await asyncio.open_connection(sock=narrow_socket(served.port), limit=1024)
        data = json.dumps({"model": MODEL, "input": "x", "stream": True, "store": False}).encode()
        head = (
            f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await until(lambda: is_cancelled(served, "sse"))
        # Cut: what the kernel still held comes, and then the end, without the stream's last word.
        async with asyncio.timeout(5):
            got = await reader.read(-1)
        assert b"response.created" in got
        assert b"[DONE]" not in got
        assert b"response.completed" not in got
        writer.close()
    assert sampled_tokens(tmp_path) < PAD_TOKENS / 2
    assert "ASGI" not in caplog.text


# Clients that leave.


@asynccontextmanager
async def serving_slowly(folder: Path, pad_tokens: int = 100_000) -> AsyncIterator[Served]:
    """Turns whose reasoning is soon done and whose text takes long."""
    script = write_script(folder, {"reasoning": "hm", "text": "x", "pad_tokens": pad_tokens})
    async with serving(script=script, tps=200) as served:
        yield served


async def begin(socket: Wire, **fields: Any) -> str:
    """Start a turn and wait until its first item is whole; its id."""
    await socket.create(input="x", **fields)
    while (event := await socket.next())["type"] != "response.output_item.done":
        if event["type"] == "response.created":
            response_id: str = event["response"]["id"]
    return response_id


EMPTY_CLOSE = b"\x88\x80\0\0\0\0"  # a masked close frame without a status


async def close_with_status(socket: Wire) -> None:
    await socket.socket.close(1000, "enough")


async def close_without_status(socket: Wire) -> None:
    socket.socket.transport.write(EMPTY_CLOSE)
    await socket.socket.wait_closed()


async def end_stream(socket: Wire) -> None:
    socket.socket.transport.close()
    await socket.socket.wait_closed()


async def reset_stream(socket: Wire) -> None:
    sock = socket.socket.transport.get_extra_info("socket")
    sock.setsockopt(net.SOL_SOCKET, net.SO_LINGER, struct.pack("ii", 1, 0))
    socket.socket.transport.abort()
    await socket.socket.wait_closed()


CLOSES = [close_with_status, close_without_status]
LOSSES = [end_stream, reset_stream]


def by_name(value: object) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("leave", CLOSES, ids=by_name)
async def test_close_frame_cancels_a_stored_turn_and_keeps_its_finished_items(
    tmp_path: Path, leave: Leave
) -> None:
    async with serving_slowly(tmp_path) as served, wire(served) as socket:
        response_id = await begin(socket)
        async with asyncio.timeout(5):
            await leave(socket)
        await until(lambda: is_cancelled(served, "websocket"))
        response = await read(served, response_id)
        assert response["status"] == "cancelled"
        assert response["output"][0]["type"] == "reasoning"
        assert response["output"][0]["content"][0]["text"] == "hm"
        assert response["completed_at"] is None
        # A cancelled turn is no parent.
        async with wire(served) as other:
            code, _ = await refusal(other, input="x", previous_response_id=response_id)
            assert code == "previous_response_not_found"


@pytest.mark.parametrize("leave", CLOSES + LOSSES, ids=by_name)
async def test_unstored_turn_ends_within_a_second_however_its_client_leaves(
    tmp_path: Path, leave: Leave
) -> None:
    async with serving_slowly(tmp_path) as served, wire(served) as socket:
        response_id = await begin(socket, store=False)
        async with asyncio.timeout(5):
            await leave(socket)
        await until(lambda: is_cancelled(served, "websocket"))
        assert await metric(served, "segue_connections") == 0
        assert (await fetch(served, "GET", f"/v1/responses/{response_id}")).status == 404


@pytest.mark.parametrize("leave", LOSSES, ids=by_name)
async def test_stored_turn_outlives_a_lost_connection_and_can_be_fetched(
    tmp_path: Path, leave: Leave
) -> None:
    async with serving_slowly(tmp_path, pad_tokens=100) as served, wire(served) as socket:
        response_id = await begin(socket)
        async with asyncio.timeout(5):
            await leave(socket)
        running = await fetch(served, "GET", f"/v1/responses/{response_id}")
        assert running.json["status"] == "in_progress"
        response = await read(served, response_id)
        assert response["status"] == "completed"
        assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
        async with wire(served) as other:
            await completed(other, input="on", previous_response_id=response_id, generate=False)


@pytest.mark.parametrize("leave", CLOSES + LOSSES, ids=by_name)
async def test_creates_that_wait_are_dropped_when_the_client_leaves(
    tmp_path: Path, leave: Leave
) -> None:
    async with serving_slowly(tmp_path, pad_tokens=60) as served, wire(served) as socket:
        response_id = await begin(socket)
        for _ in range(5):
            await socket.create(input="never")
        await socket.create(input="x", stream_id="other", generate=False)
        await socket.events("other")  # so that all have arrived
        async with asyncio.timeout(5):
            await leave(socket)
        status = "cancelled" if leave in CLOSES else "completed"
        assert (await read(served, response_id))["status"] == status
        page = (await fetch(served, "GET", "/metrics")).body.decode()
        counts = re.findall(r"^segue_turns_total{.*} (\S+)$", page, re.MULTILINE)
        assert sum(map(float, counts)) == 2


async def test_closing_before_the_turn_began_leaves_nothing() -> None:
    """The create and the close frame arrive together."""
    async with serving() as served:
        for _ in range(20):
            async with wire(served) as socket:
                await socket.create(input="x")
                await socket.socket.close()

        async def is_over() -> bool:
            return (
                served.app.runner.running_count == 0
                and await metric(served, "segue_connections") == 0
            )

        await until(is_over)


async def post(served: Served, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    data = json.dumps({"model": MODEL, "input": "x", **fields}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def test_dropped_sse_request_cancels_its_turn(tmp_path: Path) -> None:
    async with serving_slowly(tmp_path) as served:
        reader, writer = await post(served, stream=True)
        async with asyncio.timeout(10):
            seen = await reader.readuntil(b"response.output_item.done")
        writer.transport.abort()
        await until(lambda: is_cancelled(served, "sse"))
        found = re.search(rb'"id":"(resp_\w+)"', seen)
        assert found
        response = await read(served, found[1].decode())
        assert response["status"] == "cancelled"
        assert response["output"][0]["type"] == "reasoning"


@pytest.mark.parametrize("store", [True, False])
async def test_dropped_plain_request_cancels_its_turn(tmp_path: Path, store: bool) -> None:
    async with serving_slowly(tmp_path) as served:
        _, writer = await post(served, store=store)

        async def is_running() -> bool:
            return served.app.runner.running_count == 1

        await until(is_running)
        writer.transport.abort()
        await until(lambda: is_cancelled(served, "http"))
