"""Which further claims are made about a connection: what it forgets, whose turn it is, steering, and its loss?"""

from __future__ import annotations

import socket as sockets

from segue_conform.case import Case, Json, Need, Wrong, equal, expect, shown
from segue_conform.responses_http import (
    ECHO,
    GUIDE,
    NOWHERE,
    SUITE,
    TYPES,
    WEATHER,
    knows,
    output_for,
    poll,
    refused,
    texts,
)
from segue_conform.responses_socket import (
    MODE,
    SLOW,
    SLOWLY,
    ends,
    not_found,
    steered,
    written,
)
from segue_conform.rules import calls_of, check_error, text_of
from segue_conform.target import Socket, Target, error_of, is_end, script

SEGUE = "Segue: docs/protocol.md"
LOST = [output_for({"call_id": "call_unknown"})]


async def started(socket: Socket, content: object, **fields: object) -> str:
    """The id of a response that has begun."""
    await socket.create(content, **fields)
    return str((await socket.event())["response"]["id"])


# --- turns --------------------------------------------------------------------------------------------------


async def _unstored(target: Target) -> None:
    async with target.socket() as socket:
        response = await socket.turn()
    answer = await target.get(f"/responses/{response['id']}")
    check_error(answer.body, answer.status, (404,))


async def _unstored_by_http(target: Target) -> None:
    async with target.socket() as socket:
        first = await socket.turn()
        body = target.create(previous_response_id=first["id"])
        not_found(await refused(target, body, 400, 404))
        await socket.turn(previous_response_id=first["id"])


async def _large(target: Target) -> None:
    async with target.socket() as socket:
        await socket.turn(f"{'word ' * 60_000} {script({'text': 'Long.'})}")


async def _model(target: Target) -> None:
    async with target.socket() as socket:
        error = await socket.refused(model="no-such-model-here")
        expect(error.get("message"), "the error has no message")
        await socket.turn()


async def _parents_model(target: Target) -> None:
    async with target.socket() as socket:
        first = await socket.turn()
        second = await socket.turn(model=None, previous_response_id=first["id"])
    equal(second.get("model"), first["model"], "the model")


async def _tools(target: Target) -> None:
    async with target.socket() as socket:
        first = await socket.turn(tools=[WEATHER])
        second = await socket.turn(script(ECHO), previous_response_id=first["id"])
    equal(second.get("tools"), [], "the tools of the second response")


# --- what is forgotten --------------------------------------------------------------------------------------


async def _evict_stored(target: Target) -> None:
    async with target.socket() as socket:
        first = await socket.turn(store=True)
        await socket.refused(LOST, previous_response_id=first["id"])
        await socket.turn(previous_response_id=first["id"])


async def _evict_own_lane(target: Target) -> None:
    async with target.socket() as socket:
        left = await socket.turn(stream_id="left")
        right = await socket.turn(stream_id="right")
        await socket.refused(LOST, previous_response_id=left["id"], stream_id="left")
        await socket.turn(previous_response_id=right["id"], stream_id="right")


async def _keep_on_incomplete(target: Target) -> None:
    cut = script({"text": "This goes on", "finish": "length"})
    async with target.socket() as socket:
        first = await socket.turn()
        await socket.create(cut, previous_response_id=first["id"])
        equal((await socket.events())[-1]["type"], "response.incomplete", "the end")
        await socket.turn(previous_response_id=first["id"])


async def _keep_on_bad_frame(target: Target) -> None:
    async with target.socket() as socket:
        first = await socket.turn()
        for bad in (
            "{",
            {"type": "response.of_next_year"},
            {"type": "response.create", "input": 5},
        ):
            await socket.send(bad)
            equal((await socket.event()).get("type"), "error", "the answer to a bad frame")
        await socket.turn(previous_response_id=first["id"])


# --- lanes --------------------------------------------------------------------------------------------------


async def _lane_back(target: Target) -> None:
    async with target.socket() as socket:
        first = await socket.turn("My number is 7421.", stream_id="left")
        second = await socket.turn(script(ECHO), previous_response_id=first["id"])
    knows(second, "7421")


async def _running_parent(target: Target) -> None:
    async with target.socket() as socket:
        first = await started(socket, script(SLOW))
        await socket.create(script(ECHO), previous_response_id=first)
        last = [event for event in await ends(socket, 2) if is_end(event)][-1]
    equal(last["type"], "response.completed", "the end of the second turn")
    expect("Slow." in texts(last["response"], "assistant"), "the model was not sent the parent")


async def _running_elsewhere(target: Target) -> None:
    async with target.socket() as socket:
        first = await started(socket, script(SLOW), stream_id="left")
        await socket.create(previous_response_id=first, stream_id="right")
        events = await ends(socket, 2)
    (error,) = [error_of(event) for event in events if event["type"] == "error"] or [{}]
    not_found(error)


async def _error_beside(target: Target) -> None:
    async with target.socket() as socket:
        await started(socket, script(SLOW), stream_id="left")
        await socket.create(previous_response_id=NOWHERE, stream_id="right")
        kinds = [event["type"] for event in await ends(socket, 2) if is_end(event)]
    equal(sorted(kinds), ["error", "response.completed"], "the ends of both lanes")


# --- warm-up ------------------------------------------------------------------------------------------------


async def _warm_events(target: Target) -> None:
    async with target.socket() as socket:
        await socket.create(generate=False)
        kinds = [event["type"] for event in await socket.events()]
    equal(
        kinds,
        ["response.created", "response.in_progress", "response.completed"],
        "the events of a warm-up",
    )


async def _warm_usage(target: Target) -> None:
    async with target.socket() as socket:
        warm = await socket.turn(generate=False)
    equal((warm.get("usage") or {}).get("output_tokens"), 0, "the output tokens of a warm-up")


async def _prewarm(target: Target) -> None:
    async with target.socket() as socket:
        warm = await socket.turn("My number is 7421.", prompt_cache_options={"prewarm": True})
        equal(warm["output"], [], "the output of a warm-up")
        knows(await socket.turn(script(ECHO), previous_response_id=warm["id"]), "7421")


# --- steering -----------------------------------------------------------------------------------------------


async def _steer_numbers(target: Target) -> None:
    async with target.socket() as socket:
        response_id = await written(socket, SLOWLY)
        event = await steered(socket, response_id)
        number = event.get("sequence_number")
        expect(isinstance(number, int) and number > 3, f"the number is {shown(number)}")
        first = await socket.event()
    equal(first.get("sequence_number"), (number or 0) + 1, "the number after it")


async def _steer_output(target: Target) -> None:
    async with target.socket() as socket:
        event = await steered(socket, await written(socket, SLOWLY), LOST)
        equal(event["type"], "response.steer.failed", "the answer to a steer with an output")


async def _steer_first(target: Target) -> None:
    async with target.socket() as socket:
        response_id = await written(socket, SLOWLY)
        await socket.create(script({"text": "Waited."}))
        await steered(socket, response_id)
        _, second, third = [event["response"] for event in await ends(socket, 3) if is_end(event)]
    equal(second.get("previous_response_id"), response_id, "the parent of the second response")
    equal(text_of(third), "Waited.", "the answer to the create that waited")


CALLS_SLOWLY: Json = {
    "calls": [{"name": "get_weather", "arguments": {"city": "Paris" * 20}}],
    "pieces": 30,
    "gap_s": 0.05,
}


async def _steer_waits(target: Target) -> None:
    async with target.socket() as socket:
        await socket.create(script(CALLS_SLOWLY, ECHO), tools=[WEATHER])
        response_id = str((await socket.event())["response"]["id"])
        while not (await socket.event())["type"].endswith("arguments.delta"):
            pass
        await steered(socket, response_id)
        first = (await ends(socket, 1))[-1]["response"]
        (call,) = calls_of(first) or [{}]
        equal((await socket.event())["type"], "response.steer.pending", "the event after the end")
        second = await socket.turn([output_for(call)], previous_response_id=response_id)
    sent = " ".join(texts(second))
    expect("Stop here." in sent and "sunny" in sent, f"the model was sent {shown(sent)}")


async def _steer_back(target: Target) -> None:
    async with target.socket() as socket:
        await socket.turn()
        event = await steered(socket, NOWHERE)
    given = (event.get("steer") or {}).get("input")
    expect("Stop here." in str(given), f"the input does not come back: {shown(event)}")


# --- after the connection -----------------------------------------------------------------------------------


async def _recover(target: Target) -> None:
    """An unstored parent is lost with its connection; what was said goes on as a new chain."""
    async with target.socket() as socket:
        first = await socket.turn("My number is 7421.")
    said = [{"role": "user", "content": "My number is 7421."}, *first["output"]]
    async with target.socket() as socket:
        not_found(await socket.refused(previous_response_id=first["id"]))
        again = await socket.turn([*said, {"role": "user", "content": script(ECHO)}])
        knows(again, "7421")
        after = await socket.turn(script(ECHO), previous_response_id=again["id"])
    knows(after, "7421")


async def _lost(target: Target) -> None:
    async with target.socket() as socket:
        response_id = await started(
            socket, script({"pause_s": 0.5, "text": "Finished."}), store=True
        )
        abort(socket)
    answer = await target.get(f"/responses/{response_id}")
    if answer.status != 200:
        raise Wrong(f"HTTP {answer.status}: {shown(answer.body)}")
    ended = await poll(target, f"/responses/{response_id}")
    equal((ended["status"], text_of(ended)), ("completed", "Finished."), "status and text")


def abort(socket: Socket) -> None:
    """Lose the connection: no close frame is sent."""
    lost: sockets.socket = socket.connection.get_extra_info("socket")
    lost.shutdown(sockets.SHUT_RDWR)


CASES: tuple[Case, ...] = (
    Case(
        "responses.socket.unstored",
        "a turn with store: false cannot be retrieved",
        "must",
        f"{TYPES}: store",
        _unstored,
    ),
    Case(
        "responses.socket.large",
        "a message of 300 KB is answered",
        "must",
        "openai/codex: whole histories",
        _large,
    ),
    Case(
        "responses.socket.model",
        "an unknown model is an error; the connection goes on",
        "must",
        MODE,
        _model,
    ),
    Case(
        "responses.socket.parents-model",
        "a create with a parent may leave out the model",
        "ours",
        f"{SEGUE} 9",
        _parents_model,
    ),
    Case(
        "responses.cache.tools",
        "tools are not inherited",
        "ours",
        f"{SEGUE} 9",
        _tools,
        Need.SCRIPT,
    ),
    Case(
        "responses.cache.by-http",
        "a turn that is not stored cannot be continued by HTTP, and still on its connection",
        "must",
        MODE,
        _unstored_by_http,
    ),
    Case(
        "responses.cache.evict-stored",
        "a stored parent is found again after a continuation that failed",
        "should",
        MODE,
        _evict_stored,
    ),
    Case(
        "responses.cache.evict-lane",
        "a continuation that fails leaves other lanes what they have",
        "must",
        MODE,
        _evict_own_lane,
    ),
    Case(
        "responses.cache.incomplete",
        "a continuation that ends as incomplete evicts nothing",
        "ours",
        f"{SEGUE} 9",
        _keep_on_incomplete,
        Need.SCRIPT,
    ),
    Case(
        "responses.cache.bad-frame",
        "a frame that cannot be used evicts nothing",
        "ours",
        f"{SEGUE} 6.4",
        _keep_on_bad_frame,
    ),
    Case(
        "responses.lanes.back",
        "the default lane may fork from a named one",
        "ours",
        f"{SEGUE} 9",
        _lane_back,
        Need.SCRIPT,
    ),
    Case(
        "responses.lanes.running",
        "a create may name the response that still runs on its lane",
        "ours",
        f"{SEGUE} 9",
        _running_parent,
        Need.SCRIPT,
    ),
    Case(
        "responses.lanes.running-elsewhere",
        "one that runs on another lane is not found",
        "ours",
        f"{SEGUE} 9",
        _running_elsewhere,
        Need.SCRIPT,
    ),
    Case(
        "responses.lanes.error-beside",
        "the error of a lane does not disturb another one",
        "must",
        MODE,
        _error_beside,
        Need.SCRIPT,
    ),
    Case(
        "responses.warm.events",
        "a warm-up has three events",
        "ours",
        f"{SEGUE} 9",
        _warm_events,
    ),
    Case(
        "responses.warm.usage",
        "a warm-up has no output tokens",
        "ours",
        f"{SEGUE} 6.7",
        _warm_usage,
    ),
    Case(
        "responses.warm.option",
        "prompt_cache_options.prewarm is a warm-up",
        "ours",
        f"{SEGUE} 6.7",
        _prewarm,
        Need.SCRIPT,
    ),
    Case(
        "responses.steer.numbers",
        "the events of a steer have numbers of the response that is steered",
        "ours",
        f"{SEGUE} 9",
        _steer_numbers,
        Need.SCRIPT,
    ),
    Case(
        "responses.steer.output",
        "a steer cannot bring the output of a tool",
        "ours",
        f"{SEGUE} 9",
        _steer_output,
        Need.SCRIPT,
    ),
    Case(
        "responses.steer.first",
        "the successor goes before a create that waits",
        "ours",
        f"{SEGUE} 9",
        _steer_first,
        Need.SCRIPT,
    ),
    Case(
        "responses.steer.pending",
        "words for a response that ends with calls wait for their outputs",
        "should",
        f"{GUIDE}: Mid-turn steering",
        _steer_waits,
        Need.SCRIPT,
    ),
    Case(
        "responses.steer.back",
        "words that are refused come back",
        "should",
        f"{GUIDE}: Mid-turn steering",
        _steer_back,
    ),
    Case(
        "responses.recovery.full",
        "after a lost connection the whole history goes on as a new chain",
        "must",
        f"{SUITE}: websocket-reconnect-store-false-recovery",
        _recover,
        Need.SCRIPT,
    ),
    Case(
        "responses.recovery.stored",
        "a stored turn whose connection is lost is finished",
        "ours",
        f"{SEGUE} 6.9",
        _lost,
        Need.SCRIPT,
    ),
)
