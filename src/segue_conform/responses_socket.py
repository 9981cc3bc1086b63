"""Which claims are made about WebSocket mode?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp

from segue_conform.case import Absent, Case, Json, Need, Wrong, equal, expect, shown
from segue_conform.responses_http import (
    CALL,
    ECHO,
    GUIDE,
    NOWHERE,
    SUITE,
    TYPES,
    WEATHER,
    created,
    knows,
    output_for,
    texts,
)
from segue_conform.rules import calls_of, check_order, text_of
from segue_conform.target import Socket, Target, completed, error_of, is_end, script

MODE = f"{GUIDE}: WebSocket mode"
SEGUE = "Segue: docs/protocol.md"
NOT_FOUND = "previous_response_not_found"
SLOW: Json = {"pause_s": 0.5, "text": "Slow."}


def not_found(error: Json) -> None:
    equal(error.get("code"), NOT_FOUND, "the code")


async def ends(socket: Socket, count: int) -> list[Json]:
    """Events up to this number of ends."""
    events = list[Json]()
    while sum(map(is_end, events)) < count:
        events.append(await socket.event())
    return events


# --- turns --------------------------------------------------------------------------------------------------


async def _turn(target: Target) -> None:
    async with target.socket() as socket:
        await socket.create()
        events = await socket.events()
    check_order(events)
    completed(events)


async def _store_default(target: Target) -> None:
    async with target.socket() as socket:
        response = await socket.turn(store=None)
    equal((await target.get(f"/responses/{response['id']}")).status, 200, "the status of GET")


async def _sequence(target: Target) -> None:
    async with target.socket() as socket:
        first, second = await socket.turn(), await socket.turn()
    expect(first["id"] != second["id"], "two turns have one id")


async def _from_zero(target: Target) -> None:
    async with target.socket() as socket:
        await socket.turn()
        await socket.create()
        numbers = [event.get("sequence_number") for event in await socket.events()]
    equal(numbers[0], 0, "the first number of a second turn")


async def _same_events(target: Target) -> None:
    text = script({"reasoning": "Hm.", "text": "One two three.", "pieces": 3})
    async with target.socket() as socket:
        await socket.create(text)
        over_socket = [event["type"] for event in await socket.events()]
    stream = await target.stream("/responses", target.create(text, store=False, stream=True))
    equal(over_socket, stream.types, "the events over the socket")


async def _stream_ignored(target: Target) -> None:
    async with target.socket({"OpenAI-Beta": "responses_websockets=2026-02-06"}) as socket:
        await socket.turn(stream=True, include=[], client_metadata={"a": "b"})


async def _queue(target: Target) -> None:
    async with target.socket() as socket:
        await socket.create("First.")
        await socket.create("Second.")
        events = await ends(socket, 2)
    kinds = [
        event["type"] for event in events if is_end(event) or event["type"] == "response.created"
    ]
    equal(kinds, ["response.created", "response.completed"] * 2, "beginnings and ends of two turns")


async def _ping(target: Target) -> None:
    async with target.socket() as socket:
        await socket.connection.ping(b"here")
        await socket.turn()


async def _many(target: Target) -> None:
    async with target.socket() as socket:
        for at in range(20):
            await socket.create(stream_id=f"lane-{at % 20}")
        events = await ends(socket, 20)
    kinds = [event["type"] for event in events if is_end(event)]
    equal(kinds, ["response.completed"] * 20, "the ends of 20 turns")


# --- errors ---------------------------------------------------------------------------------------------------


async def _bad_json(target: Target) -> None:
    async with target.socket() as socket:
        await socket.send('{"type": "response.create", ')
        event = await socket.event()
        equal(event.get("type"), "error", "the answer to bad JSON")
        expect(isinstance(event.get("status"), int), f"status is {shown(event.get('status'))}")
        await socket.turn()


async def _bad_type(target: Target) -> None:
    async with target.socket() as socket:
        await socket.send({"type": "response.of_next_year"})
        equal((await socket.event()).get("type"), "error", "the answer to an unknown type")
        await socket.turn()


async def _envelope(target: Target) -> None:
    async with target.socket() as socket:
        await socket.create(previous_response_id=NOWHERE)
        event = await socket.event()
    equal((event.get("type"), event.get("status")), ("error", 400), "type and status")
    error = error_of(event)
    equal(error.get("param"), "previous_response_id", "the param")
    expect(isinstance(error.get("message"), str), "the error has no message")


async def _background(target: Target) -> None:
    async with target.socket() as socket:
        await socket.create(background=True, store=True)
        equal((await socket.event()).get("type"), "error", "the answer to background")


async def _failed(target: Target) -> None:
    async with target.socket() as socket:
        await socket.create(script({"fail": 500}))
        events = await socket.events()
        expect(
            events[-1]["type"] in ("response.failed", "error"), f"the end is {shown(events[-1])}"
        )
        expect(error_of(events[-1]).get("message"), "the error has no message")
        await socket.turn()


async def _no_key(target: Target) -> None:
    async with target.socket():
        pass
    bare = Target(target.session, target.base, target.model)
    address = "ws" + target.base.removeprefix("http") + "/responses"
    try:
        async with bare.session.ws_connect(address):
            raise Wrong("the upgrade was accepted without a key")
    except aiohttp.WSServerHandshakeError as error:
        equal(error.status, 401, "the status of an upgrade without a key")


# --- state of a connection ------------------------------------------------------------------------------------


async def _continue(target: Target) -> None:
    async with target.socket() as socket:
        first = await socket.turn("My number is 7421.")
        second = await socket.turn(script(ECHO), previous_response_id=first["id"])
    equal(second.get("previous_response_id"), first["id"], "previous_response_id")
    knows(second, "7421")


async def _continue_call(target: Target) -> None:
    async with target.socket() as socket:
        first = await socket.turn(script(CALL, {"text": "Sunny."}), tools=[WEATHER])
        (call,) = calls_of(first) or [{}]
        second = await socket.turn(
            [output_for(call)], previous_response_id=first["id"], tools=[WEATHER]
        )
    equal(text_of(second), "Sunny.", "the answer after the output")


async def _other_socket(target: Target) -> None:
    async with target.socket() as socket:
        first = await socket.turn()
    async with target.socket() as socket:
        not_found(await socket.refused(previous_response_id=first["id"]))
        await socket.turn()


async def _stored_elsewhere(target: Target) -> None:
    async with target.socket() as socket:
        first = await socket.turn("My number is 7421.", store=True)
    async with target.socket() as socket:
        second = await socket.turn(script(ECHO), previous_response_id=first["id"])
    knows(second, "7421")


async def _by_http(target: Target) -> None:
    first = await created(target, "My number is 7421.")
    async with target.socket() as socket:
        second = await socket.turn(script(ECHO), previous_response_id=first["id"])
    knows(second, "7421")


async def _unknown(target: Target) -> None:
    async with target.socket() as socket:
        not_found(await socket.refused(previous_response_id=NOWHERE))


async def _evict(target: Target) -> None:
    async with target.socket() as socket:
        first = await socket.turn()
        lost = [output_for({"call_id": "call_unknown"})]
        await socket.refused(lost, previous_response_id=first["id"])
        not_found(await socket.refused(previous_response_id=first["id"]))


async def _keep_on_fork(target: Target) -> None:
    async with target.socket() as socket:
        first = await socket.turn()
        lost = [output_for({"call_id": "call_unknown"})]
        await socket.refused(lost, previous_response_id=first["id"], stream_id="other")
        await socket.turn(previous_response_id=first["id"])


async def _instructions(target: Target) -> None:
    async with target.socket() as socket:
        first = await socket.turn(instructions="Speak like a pirate.")
        second = await socket.turn(script(ECHO), previous_response_id=first["id"])
    expect("pirate" not in " ".join(texts(second)), "the instructions of the parent were inherited")


# --- lanes ----------------------------------------------------------------------------------------------------


async def _lane_names(target: Target) -> None:
    async with target.socket() as socket:
        await socket.create(stream_id="left")
        await socket.create()
        events = await ends(socket, 2)
    by_lane = {event.get("stream_id") for event in events}
    equal(by_lane, {"left", None}, "the lanes of the events")
    for lane in by_lane:
        check_order([event for event in events if event.get("stream_id") == lane])


async def _lane_order(target: Target) -> None:
    async with target.socket() as socket:
        await socket.create(script(SLOW), stream_id="left")
        await socket.create(script({"text": "Quick."}), stream_id="left")
        events = await ends(socket, 2)
    answers = [text_of(event["response"]) for event in events if is_end(event)]
    equal(answers, ["Slow.", "Quick."], "the answers of one lane")


async def _lanes_beside(target: Target) -> None:
    async with target.socket() as socket:
        await socket.create(script(SLOW), stream_id="left")
        await socket.create(script({"text": "Quick."}), stream_id="right")
        events = await ends(socket, 2)
    answers = [text_of(event["response"]) for event in events if is_end(event)]
    equal(answers, ["Quick.", "Slow."], "the answers of two lanes")


async def _fork(target: Target) -> None:
    async with target.socket() as socket:
        first = await socket.turn("My number is 7421.")
        fork = await socket.turn(script(ECHO), previous_response_id=first["id"], stream_id="fork")
        knows(fork, "7421")
        await socket.turn(previous_response_id=first["id"])


async def _lane_bad(target: Target) -> None:
    async with target.socket() as socket:
        await socket.create(stream_id="no blanks please")
        event = await socket.event()
        equal((event.get("type"), event.get("stream_id")), ("error", None), "type and stream_id")
        await socket.turn()


async def _lane_count(target: Target) -> None:
    async with target.socket() as socket:
        for at in range(32):
            await socket.turn(generate=False, stream_id=f"lane-{at}")
        await socket.refused(stream_id="lane-32")
        await socket.turn(stream_id="lane-31")


async def _lane_error(target: Target) -> None:
    async with target.socket() as socket:
        await socket.create(stream_id="left", previous_response_id=NOWHERE)
        equal((await socket.event()).get("stream_id"), "left", "stream_id of the error")


# --- warm-up, steering, the end ------------------------------------------------------------------------------------


async def _warm(target: Target) -> None:
    async with target.socket() as socket:
        warm = await socket.turn("My number is 7421.", generate=False, tools=[WEATHER])
        equal(warm["output"], [], "the output of a warm-up")
        after = await socket.turn("Well?", previous_response_id=warm["id"], tools=[WEATHER])
        expect(after["output"], "the turn after a warm-up has no output")


async def _warm_empty(target: Target) -> None:
    async with target.socket() as socket:
        warm = await socket.turn(script({"text": "Warm."}), generate=False)
        equal(
            text_of(await socket.turn([], previous_response_id=warm["id"])), "Warm.", "the answer"
        )


SLOWLY: Json = {"text": "word " * 60, "pieces": 60, "gap_s": 0.05}
STEERED = {"role": "user", "content": "Stop here."}


async def written(socket: Socket, step: Json) -> str:
    """The id of a response that is being written."""
    await socket.create(script(step, {"echo": True}))
    response_id = str((await socket.event())["response"]["id"])
    while (await socket.event())["type"] != "response.output_text.delta":
        pass
    return response_id


async def steered(socket: Socket, response_id: str, items: object = (STEERED,)) -> Json:
    """The answer to words for this response."""
    await socket.send(
        {"type": "response.steer", "previous_response_id": response_id, "input": items}
    )
    while not (event := await socket.event())["type"].startswith("response.steer."):
        if event["type"] == "error":
            raise Absent(f"response.steer is answered with {shown(event)}")
    return event


async def _steer(target: Target) -> None:
    async with target.socket() as socket:
        event = await steered(socket, await written(socket, SLOWLY))
        equal(event["type"], "response.steer.accepted", "the answer to response.steer")


async def _steer_successor(target: Target) -> None:
    async with target.socket() as socket:
        response_id = await written(socket, SLOWLY)
        await steered(socket, response_id)
        first, second = [event["response"] for event in await ends(socket, 2) if is_end(event)]
    equal(first["id"], response_id, "the response that ends first")
    expect(first["status"] in ("incomplete", "completed"), f"it is {shown(first['status'])}")
    equal(second.get("previous_response_id"), response_id, "the parent of the successor")
    knows(second, "Stop here.")


async def _steer_nothing(target: Target) -> None:
    async with target.socket() as socket:
        await socket.turn()
        event = await steered(socket, NOWHERE)
        equal(event["type"], "response.steer.failed", "the answer to response.steer")
        await socket.turn()


async def _until(target: Target, is_met: Callable[[int], bool], words: str) -> None:
    """Wait until the number of answers that the upstream writes is as wanted."""
    began = time.monotonic()
    while not is_met((await target.upstream_state())["running"]):
        expect(time.monotonic() - began < 3, words)
        await asyncio.sleep(0.05)


async def _close_stops(target: Target) -> None:
    before = (await target.upstream_state())["running"]
    async with target.socket() as socket:
        await socket.create(script({"pause_s": 15, "text": "Late."}))
        await _until(target, lambda count: count > before, "the engine was not asked within 3 s")
    words = "the engine still works 3 s after the client has closed"
    await _until(target, lambda count: count <= before, words)


CASES: tuple[Case, ...] = (
    Case(
        "responses.socket.turn",
        "a turn over WebSocket has the events of a stream, each in one text frame",
        "must",
        f"{MODE}; {SUITE}: websocket-response",
        _turn,
    ),
    Case(
        "responses.socket.stored",
        "a turn is stored unless the client says otherwise",
        "ours",
        f"{SEGUE} 9",
        _store_default,
    ),
    Case(
        "responses.socket.sequence",
        "turns follow each other on a connection",
        "must",
        f"{SUITE}: websocket-sequential-responses",
        _sequence,
    ),
    Case(
        "responses.socket.zero",
        "each of them is numbered from 0",
        "ours",
        f"{SEGUE} 9",
        _from_zero,
    ),
    Case(
        "responses.socket.same",
        "the events are those of the same turn by HTTP",
        "must",
        MODE,
        _same_events,
        Need.SCRIPT,
    ),
    Case(
        "responses.socket.stream-flag",
        "`stream` and the beta header, which clients send, are accepted",
        "must",
        "openai/codex; openai-agents",
        _stream_ignored,
    ),
    Case(
        "responses.socket.queue",
        "a second create waits for the first",
        "must",
        f"{MODE}; Open Responses: WebSocket",
        _queue,
    ),
    Case("responses.socket.ping", "a ping does not disturb", "must", "RFC 6455 5.5.2", _ping),
    Case(
        "responses.socket.twenty",
        "twenty creates at once are all answered (16 run, the others wait)",
        "should",
        MODE,
        _many,
    ),
    Case(
        "responses.socket.bad-json",
        "a message that is no JSON is an error with a status; the connection goes on",
        "ours",
        f"{SEGUE} 9",
        _bad_json,
    ),
    Case(
        "responses.socket.bad-type",
        "a message of an unknown type is an error; the connection goes on",
        "ours",
        f"{SEGUE} 9",
        _bad_type,
    ),
    Case(
        "responses.socket.envelope",
        "an error has type, status, code, message and param",
        "must",
        f"{MODE}; Open Responses: WebSocket",
        _envelope,
    ),
    Case(
        "responses.socket.background",
        "background is refused",
        "ours",
        f"{SEGUE} 6",
        _background,
    ),
    Case(
        "responses.socket.failure",
        "an engine that fails ends the turn, not the connection",
        "must",
        MODE,
        _failed,
        Need.SCRIPT,
    ),
    Case(
        "responses.socket.key",
        "an upgrade without a key is 401",
        "must",
        "openai/codex: auth recovery",
        _no_key,
        Need.KEY,
    ),
    Case(
        "responses.cache.continue",
        "a turn that is not stored can be continued on its connection",
        "must",
        f"{SUITE}: websocket-continuation",
        _continue,
        Need.SCRIPT,
    ),
    Case(
        "responses.cache.call",
        "the output of a call continues it",
        "must",
        MODE,
        _continue_call,
        Need.SCRIPT,
    ),
    Case(
        "responses.cache.connection",
        "on another connection that is previous_response_not_found; that connection goes on",
        "must",
        f"{SUITE}: websocket-reconnect-store-false-recovery",
        _other_socket,
    ),
    Case(
        "responses.cache.stored",
        "a stored response can be continued on another connection",
        "should",
        MODE,
        _stored_elsewhere,
        Need.SCRIPT,
    ),
    Case(
        "responses.cache.http",
        "a response by HTTP can be continued on a connection",
        "should",
        MODE,
        _by_http,
        Need.SCRIPT,
    ),
    Case(
        "responses.cache.unknown",
        "an unknown parent is previous_response_not_found",
        "must",
        f"{SUITE}: websocket-previous-response-not-found",
        _unknown,
    ),
    Case(
        "responses.cache.evict",
        "a continuation that fails evicts its parent",
        "must",
        f"{SUITE}: websocket-failed-continuation-evicts-cache",
        _evict,
    ),
    Case(
        "responses.cache.fork-fails",
        "a fork that fails on another lane does not",
        "must",
        MODE,
        _keep_on_fork,
    ),
    Case(
        "responses.cache.instructions",
        "instructions are not inherited",
        "must",
        f"{TYPES}: instructions",
        _instructions,
        Need.SCRIPT,
    ),
    Case(
        "responses.lanes.names",
        "events carry the stream_id of their lane, those of the default lane none",
        "must",
        MODE,
        _lane_names,
    ),
    Case(
        "responses.lanes.order",
        "turns of one lane follow each other",
        "must",
        MODE,
        _lane_order,
        Need.SCRIPT,
    ),
    Case(
        "responses.lanes.beside",
        "lanes run beside each other",
        "must",
        MODE,
        _lanes_beside,
        Need.SCRIPT,
    ),
    Case(
        "responses.lanes.fork",
        "a fork on another lane knows its parent, and the source goes on",
        "must",
        MODE,
        _fork,
        Need.SCRIPT,
    ),
    Case(
        "responses.lanes.bad", "a bad stream_id is reported without it", "should", MODE, _lane_bad
    ),
    Case(
        "responses.lanes.count",
        "a thirty-third name is refused, a known name is not",
        "should",
        MODE,
        _lane_count,
    ),
    Case(
        "responses.lanes.error",
        "the error of a request carries its stream_id",
        "must",
        MODE,
        _lane_error,
    ),
    Case(
        "responses.warm.id",
        "a warm-up has no output and an id to continue",
        "must",
        f"{MODE}; openai/codex: prewarm",
        _warm,
    ),
    Case(
        "responses.warm.empty",
        "an empty input with a warm-up as parent generates",
        "must",
        "openai/codex: prewarm",
        _warm_empty,
        Need.SCRIPT,
    ),
    Case(
        "responses.steer.accepted",
        "a running turn can be steered",
        "should",
        f"{GUIDE}: Mid-turn steering",
        _steer,
        Need.SCRIPT,
    ),
    Case(
        "responses.steer.successor",
        "a steered response ends, and its successor reads the words",
        "should",
        f"{GUIDE}: Mid-turn steering",
        _steer_successor,
        Need.SCRIPT,
    ),
    Case(
        "responses.steer.failed",
        "words for an unknown response are refused, and the connection goes on",
        "should",
        f"{GUIDE}: Mid-turn steering",
        _steer_nothing,
    ),
    Case(
        "responses.socket.close",
        "a client that closes stops the engine within 3 s",
        "ours",
        f"{SEGUE} 9",
        _close_stops,
        Need.CONTROL,
    ),
)
