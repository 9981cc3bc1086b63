"""Bad input gets the documented answer on every transport, harms nobody else and leaves no trace in the log."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import websockets

from tests.scenarios.bad_inputs import (
    BAD,
    BAD_HTTP,
    BODY_BYTES_MAX,
    CALL,
    GOOD,
    ODD,
    OVERSIZE,
    PARENT,
    Bad,
    BadHttp,
    body,
)
from tests.support import MODEL, WEATHER, Answer, Served, Wire, fetch, serving, wire

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAM_ID_TEXT = (
    "The 'stream_id' field must be a non-empty string with at most 256 characters and may only contain letters, "
    "numbers, underscores, hyphens, and periods."
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serving(body_bytes_max=BODY_BYTES_MAX) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def names(served: Served) -> dict[str, str]:
    """A stored response with an open call, for the cases that need one."""
    answer = await fetch(
        served, "POST", "/v1/responses", {"model": MODEL, "input": "Weather?", "tools": [WEATHER]}
    )
    return {PARENT: answer.json["id"], CALL: answer.json["output"][0]["call_id"]}


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a client sends is an error of ours."""
    caplog.set_level(logging.INFO)
    yield
    loud = [one for one in caplog.records if one.levelno >= logging.ERROR or one.exc_info]
    assert not loud, [one.getMessage() for one in loud]


def filled(text: str | bytes, names: dict[str, str]) -> bytes:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    for name, value in names.items():
        data = data.replace(name.encode(), value.encode())
    return data


def with_words(data: bytes, **words: Any) -> bytes:
    """A body with words of a transport put first; what is no object stays as it is."""
    if data[:1] != b"{" or not words:
        return data
    first = json.dumps(words)[1:-1].encode()
    return b"{" + first + (b"" if data[1:2] == b"}" else b",") + data[1:]


def check_detail(error: dict[str, Any], code: str, param: str | None, status: int) -> None:
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error["message"]
    assert error["type"] == {429: "rate_limit_error", 503: "server_error"}.get(
        status, "invalid_request_error"
    )
    assert 0 < len(error["message"]) < 1000


def check_refusal(answer: Answer, status: int, code: str, param: str | None) -> None:
    assert answer.status == status, answer.body[:300]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert set(answer.json) == {"error"}
    check_detail(answer.json["error"], code, param, status)


def check_event(
    event: dict[str, Any], status: int, code: str, param: str | None, lane: str | None = None
) -> None:
    """The nested error of docs/protocol.md 6.8, and nothing else beside it."""
    keys = {"type", "status", "sequence_number", "error"}
    keys |= {"stream_id"} if lane else set()
    keys |= {"retry_after"} if status in (429, 503) else set()
    assert set(event) == keys
    assert event["type"] == "error"
    assert event["status"] == status
    assert event["sequence_number"] == 0
    assert event.get("stream_id") == lane
    check_detail(event["error"], code, param, status)


async def check_usable(socket: Wire) -> None:
    """The socket still serves a turn on the default lane."""
    done = await socket.turn(input="Still there?", store=False)
    assert done["type"] == "response.completed"
    assert "stream_id" not in done


async def test_table_is_large_and_its_names_are_unique() -> None:
    names = [case.name for case in BAD]
    http_names = [case.name for case in BAD_HTTP]
    assert len(names) == len(set(names)) >= 150
    assert len(http_names) == len(set(http_names)) >= 40


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
@pytest.mark.parametrize("words", [{}, {"stream": True}], ids=["json", "sse"])
async def test_http_client_is_told_what_is_wrong(
    served: Served, names: dict[str, str], case: Bad, words: dict[str, Any]
) -> None:
    """A request for a stream is refused before the stream begins: the same status, the same body."""
    data = with_words(filled(case.body, names), **words)
    answer = await fetch(served, "POST", "/v1/responses", data)
    check_refusal(answer, case.status, case.code, case.param)
    if case.message:
        assert answer.json["error"]["message"] == filled(case.message, names).decode()


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
async def test_socket_client_is_told_what_is_wrong(
    served: Served, names: dict[str, str], case: Bad
) -> None:
    """On the default lane and on a named one; the socket serves the next turn."""
    async with wire(served) as socket:
        for lane in (None, "lane.1"):
            words = {"type": "response.create"} | ({"stream_id": lane} if lane else {})
            await socket.send(with_words(filled(case.body, names), **words).decode())
            event = await socket.next()
            check_event(event, case.status, case.code, case.param, lane if case.is_object else None)
            if case.message:
                assert event["error"]["message"] == filled(case.message, names).decode()
        await check_usable(socket)


@pytest.mark.parametrize("case", BAD_HTTP, ids=lambda case: case.name)
async def test_http_client_is_told_what_is_wrong_around_the_body(
    served: Served, names: dict[str, str], case: BadHttp
) -> None:
    path = filled(case.path, names).decode()
    answer = await fetch(served, case.method, path, case.body, case.headers)
    check_refusal(answer, case.status, case.code, case.param)
    if case.status == 405:
        assert answer.headers["allow"] in ("GET", "POST", "DELETE, GET")


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
async def test_odd_but_legal_input_is_served_on_every_transport(served: Served, text: str) -> None:
    plain = await fetch(served, "POST", "/v1/responses", text.encode())
    assert plain.json["status"] == "completed", plain.body
    listed = await fetch(served, "GET", f"/v1/responses/{plain.json['id']}/input_items")
    assert listed.status == 200
    stream = await fetch(served, "POST", "/v1/responses", with_words(text.encode(), stream=True))
    assert stream.events[-1]["type"] == "response.completed"
    async with wire(served) as socket:
        await socket.send(with_words(text.encode(), type="response.create").decode())
        assert (await socket.events())[-1]["type"] == "response.completed"


async def test_nul_in_text_comes_back_as_it_went(served: Served) -> None:
    answer = await fetch(served, "POST", "/v1/responses", ODD["NUL escaped"].encode())
    listed = await fetch(served, "GET", f"/v1/responses/{answer.json['id']}/input_items")
    assert listed.json["data"][0]["content"][0]["text"] == "a\0b"
    assert answer.json["instructions"] == "a\0b"


async def test_last_of_two_equal_keys_is_the_one_that_counts(served: Served) -> None:
    """JSON leaves it open; docs/errors.md says so."""
    answer = await fetch(
        served, "POST", "/v1/responses", ODD["the last of two keys counts"].encode()
    )
    assert "You said: this one" in answer.json["output"][0]["content"][0]["text"]


async def test_gzip_body_in_two_members_is_whole(served: Served) -> None:
    """Members in a row are one body (RFC 1952, 2.2): the second must not be lost in silence."""
    data = gzip.compress(GOOD[:9]) + gzip.compress(GOOD[9:])
    answer = await fetch(served, "POST", "/v1/responses", data, {"Content-Encoding": "gzip"})
    assert answer.status == 200


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"type": None},
        {"type": ""},
        {"type": "response.cancel"},
        {"type": "session.update", "session": {}},
        {"type": "response.completed"},
        {"type": "x" * 9999},
    ],
    ids=lambda event: str(event)[:40],
)
async def test_socket_client_hears_of_an_unknown_event(
    served: Served, event: dict[str, Any]
) -> None:
    async with wire(served) as socket:
        for lane in (None, "lane-1"):
            await socket.send(
                {**json.loads(body()), **event, **({"stream_id": lane} if lane else {})}
            )
            answer = await socket.next()
            code = "invalid_value" if event.get("type", "") is None else "invalid_event_type"
            check_event(answer, 400, code, "type", lane)
        await check_usable(socket)


async def test_socket_client_hears_of_an_event_type_that_is_no_string(served: Served) -> None:
    async with wire(served) as socket:
        await socket.send({"type": 5, "model": MODEL, "stream_id": "a"})
        check_event(await socket.next(), 400, "invalid_value", "type", "a")
        await check_usable(socket)


@pytest.mark.parametrize(
    "stream_id",
    ["", "x" * 257, "a b", "a\n", "a/b", "å", "\0", 5, 1.5, True, None, [], {"a": 1}, ["a"]],
    ids=lambda value: json.dumps(value)[:20],
)
async def test_socket_client_hears_of_a_bad_lane_without_its_name(
    served: Served, stream_id: object
) -> None:
    async with wire(served) as socket:
        await socket.create(input="x", stream_id=stream_id)
        event = await socket.next()
        check_event(event, 400, "invalid_stream_id", "stream_id")
        assert event["error"]["message"] == STREAM_ID_TEXT
        await check_usable(socket)


async def test_bad_lane_does_not_hide_behind_another_fault(served: Served) -> None:
    """A frame with two faults is answered once, and an unusable lane is not echoed."""
    async with wire(served) as socket:
        await socket.create(input="x", stream_id="a b", temperature=9)
        event = await socket.next()
        assert "stream_id" not in event
        await check_usable(socket)


@pytest.mark.parametrize("lane", ["x" * 256, "A-z_0.9", "...", "null"], ids=lambda lane: lane[:9])
async def test_legal_lane_names_are_echoed_on_every_event(served: Served, lane: str) -> None:
    async with wire(served) as socket:
        await socket.create(input="x", stream_id=lane, store=False)
        events = await socket.events(lane)
        assert events[-1]["type"] == "response.completed"
        assert {event["stream_id"] for event in events} == {lane}


async def test_socket_client_may_name_32_lanes_and_no_more(served: Served) -> None:
    async with wire(served) as socket:
        for number in range(32):
            done = await socket.turn(input="x", stream_id=f"lane{number}", store=False)
            assert done["type"] == "response.completed"
        await socket.create(input="x", stream_id="lane32")
        event = await socket.next()
        check_event(event, 400, "websocket_stream_limit_reached", "stream_id", "lane32")
        assert event["error"]["message"] == (
            "This WebSocket connection has reached its maximum number of distinct stream IDs (32). "
            "Reuse an existing stream_id or open a new WebSocket connection."
        )
        assert (await socket.turn(input="x", stream_id="lane0"))["type"] == "response.completed"
        await check_usable(socket)


async def test_socket_client_may_let_64_creates_wait_and_no_more() -> None:
    """The next is refused at once, on its lane, and says when to come back; those that wait are served."""
    async with serving(tps=1) as served, wire(served) as socket:
        for _ in range(65):
            await socket.create(input="x", generate=False)
        # A turn that runs holds the lane; all that follow wait.
        assert [(await socket.events())[-1]["type"] for _ in range(65)] == [
            "response.completed"
        ] * 65
        await socket.create(input="x", store=False)
        for _ in range(64):
            await socket.create(input="x", store=False)
        await socket.create(input="x", store=False, stream_id="other")
        while (event := await socket.next())["type"] != "error":
            assert event["type"] in ("response.created", "response.in_progress")
        check_event(event, 429, "rate_limit_exceeded", None, "other")
        assert event["retry_after"] > 0


@pytest.mark.parametrize("frame", [b"\x00\x01", b"", GOOD], ids=["bytes", "nothing", "JSON"])
async def test_binary_frame_is_named_and_ends_the_connection(served: Served, frame: bytes) -> None:
    async with wire(served) as socket:
        await socket.send(frame)
        check_event(await socket.next(), 400, "invalid_message", None)
        with pytest.raises(websockets.ConnectionClosedError) as closed:
            await socket.next()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1003


async def test_oversize_frame_is_named_and_ends_the_connection(served: Served) -> None:
    async with wire(served) as socket:
        sending = asyncio.create_task(socket.send(OVERSIZE.decode()))
        event = await socket.next()
        check_event(event, 413, "payload_too_large", None)
        assert str(BODY_BYTES_MAX) in event["error"]["message"]
        with pytest.raises(websockets.ConnectionClosedError) as closed:
            await socket.next()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        await asyncio.gather(sending, return_exceptions=True)


async def test_oversize_body_is_named_with_both_figures(served: Served) -> None:
    answer = await fetch(served, "POST", "/v1/responses", OVERSIZE)
    assert answer.json["error"]["message"] == (
        f"The request is too large: {len(OVERSIZE)} bytes, at most {BODY_BYTES_MAX} are accepted."
    )


@pytest.mark.parametrize("data", [b"\xff", b'{"a":"\xed\xa0\x80"}'], ids=["byte", "surrogate"])
async def test_frame_that_is_not_utf8_ends_the_connection(served: Served, data: bytes) -> None:
    """RFC 6455, 8.1; said before the close, as of any other frame that cannot be read (docs/inside/hazards.md F14)."""
    async with wire(served) as socket:
        await socket.socket.send(data, text=True)
        check_event(await socket.next(), 400, "invalid_json", None)
        with pytest.raises(websockets.ConnectionClosedError) as closed:
            await socket.next()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1007


@pytest.mark.parametrize("words", [{}, {"stream": True}], ids=["json", "sse"])
async def test_context_overflow_fails_the_response_and_is_a_status_for_plain_json(
    words: dict[str, Any],
) -> None:
    async with serving(context_tokens=64) as served:
        data = {"model": MODEL, "input": "word " * 200, "store": False, **words}
        answer = await fetch(served, "POST", "/v1/responses", data)
        if not words:
            check_refusal(answer, 400, "context_length_exceeded", "input")
        else:
            assert [one["type"] for one in answer.events][::2] == [
                "response.created",
                "response.failed",
            ]
            error = answer.events[-1]["response"]["error"]
            assert error["code"] == "context_length_exceeded"
        async with wire(served) as socket:
            failed = await socket.turn(input="word " * 200, stream_id="a")
            assert failed["type"] == "response.failed"
            assert failed["stream_id"] == "a"
            assert failed["response"]["error"]["code"] == "context_length_exceeded"
            await check_usable(socket)


async def test_bad_frames_do_not_disturb_another_lane(served: Served) -> None:
    async with serving(tps=200) as slow, wire(slow) as socket:
        await socket.create(input="x", stream_id="good", store=False)
        for number in range(20):
            await socket.send("{")
            await socket.create(input=number)
        found = []
        while len(found) < 41:
            event = await socket.next()
            if event["type"] in ("error", "response.completed"):
                found.append(event.get("stream_id", event["type"]))
        assert sorted(found) == ["error"] * 40 + ["good"]


@pytest.mark.parametrize(
    "path, headers, status, code",
    [
        ("/v1/other", {}, 404, "unknown_url"),
        ("/v1/responses", {"Sec-WebSocket-Version": "8"}, 400, "invalid_upgrade"),
        ("/v1/responses", {"Sec-WebSocket-Key": "short"}, 400, "invalid_upgrade"),
    ],
)
async def test_bad_upgrade_is_refused_with_a_status(
    served: Served, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    answer = await fetch(served, "GET", path, headers=upgrade | headers)
    check_refusal(answer, status, code, None)


async def test_refused_requests_are_counted_and_the_server_is_well(served: Served) -> None:
    page = (await fetch(served, "GET", "/metrics")).body.decode()
    assert 'segue_turns_total{outcome="refused",transport="http"}' in page
    assert (await fetch(served, "GET", "/ready")).status == 200
