"""Which claims are made about the Messages API?"""

from __future__ import annotations

import json
from typing import cast

from segue_conform.case import Absent, Case, Json, Need, equal, expect, shown
from segue_conform.responses_http import CALL, ECHO
from segue_conform.target import Answer, Streamed, Target, script

HEADERS = {"anthropic-version": "2023-06-01"}
TOOL: Json = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


def body(target: Target, text: object = "Say hello.", **fields: object) -> Json:
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    return {"model": target.model, "max_tokens": 256, "messages": messages, **fields}


async def sent(target: Target, text: object = "Say hello.", **fields: object) -> Json:
    return (await target.post("/messages", body(target, text, **fields), HEADERS)).ok()


async def streamed(target: Target, text: object = "Say hello.", **fields: object) -> Streamed:
    return await target.stream("/messages", body(target, text, stream=True, **fields), HEADERS)


def text_of(message: Json) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def check_error(answer: Answer, *statuses: int) -> Json:
    found = answer.body.get("error") if isinstance(answer.body, dict) else None
    if answer.status in (404, 405, 501) and not (
        answer.status in statuses and isinstance(found, dict) and answer.json.get("type")
    ):
        raise Absent(f"HTTP {answer.status}: {shown(answer.body)}")
    expect(answer.status in statuses, f"HTTP {answer.status}: {shown(answer.body)}")
    equal(answer.json.get("type"), "error", "type")
    expect(isinstance(found, dict), f"the error is {shown(found)}")
    error = cast(Json, found)
    expect(
        isinstance(error.get("message"), str) and isinstance(error.get("type"), str),
        f"the error is {shown(error)}",
    )
    return error


async def _whole(target: Target) -> None:
    message = await sent(target)
    equal((message.get("type"), message.get("role")), ("message", "assistant"), "type and role")
    equal(
        (message.get("stop_reason"), message.get("stop_sequence")),
        ("end_turn", None),
        "stop_reason and stop_sequence",
    )
    expect(text_of(message), "the answer has no text")
    for key in ("input_tokens", "output_tokens"):
        expect(
            isinstance(message["usage"].get(key), int),
            f"usage.{key} is {shown(message['usage'].get(key))}",
        )


async def _order(target: Target) -> None:
    stream = await streamed(target)
    equal(stream.names, stream.types, "the names of events")
    kinds = [name for name in stream.types if name != "ping"]
    equal(kinds[:2], ["message_start", "content_block_start"], "the first events")
    equal(kinds[-3:], ["content_block_stop", "message_delta", "message_stop"], "the last events")
    equal(set(kinds[2:-3]), {"content_block_delta"}, "the events between them")
    delta = next(event for event in stream.events if event["type"] == "message_delta")
    equal(delta["delta"].get("stop_reason"), "end_turn", "stop_reason")
    expect(
        isinstance(delta["usage"].get("output_tokens"), int),
        f"the usage is {shown(delta.get('usage'))}",
    )


async def _exact(target: Target) -> None:
    words = "One, two;\n\tthree — “four” 五 🙂"
    stream = await streamed(target, script({"text": words, "pieces": 9}))
    deltas = [
        event["delta"].get("text", "")
        for event in stream.events
        if event["type"] == "content_block_delta"
    ]
    equal("".join(deltas), words, "the text")


async def _call(target: Target) -> None:
    text = script(CALL, {"text": "Sunny."})
    first = await sent(target, text, tools=[TOOL])
    equal(first.get("stop_reason"), "tool_use", "stop_reason")
    use: Json = next((block for block in first["content"] if block["type"] == "tool_use"), {})
    equal((use.get("name"), use.get("input")), ("get_weather", {"city": "Paris"}), "name and input")
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "sunny"}
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    equal(
        text_of(await sent(target, messages, tools=[TOOL])), "Sunny.", "the answer after the result"
    )


async def _call_stream(target: Target) -> None:
    stream = await streamed(target, script(CALL), tools=[TOOL])
    written = [
        event["delta"].get("partial_json", "")
        for event in stream.events
        if event["type"] == "content_block_delta"
        and event["delta"].get("type") == "input_json_delta"
    ]
    equal(json.loads("".join(written) or "null"), {"city": "Paris"}, "the input that was streamed")


async def _system(target: Target) -> None:
    answer = await sent(target, script(ECHO), system=[{"type": "text", "text": "Be a poet."}])
    expect("Be a poet." in text_of(answer), "the model was not sent the system prompt")


async def _length(target: Target) -> None:
    answer = await sent(target, script({"text": "This goes on", "finish": "length"}), max_tokens=3)
    equal(answer.get("stop_reason"), "max_tokens", "stop_reason")


async def _thinking(target: Target) -> None:
    text = script({"reasoning": "Let me think.", "text": "Yes."})
    answer = await sent(
        target, text, max_tokens=4096, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    equal([block["type"] for block in answer["content"]], ["thinking", "text"], "the blocks")
    expect(
        isinstance(answer["content"][0].get("signature"), str),
        "the thinking block has no signature",
    )


async def _count(target: Target) -> None:
    asked = {key: value for key, value in body(target).items() if key != "max_tokens"}
    counted = (await target.post("/messages/count_tokens", asked, HEADERS)).ok()
    expect(
        isinstance(counted.get("input_tokens"), int) and counted["input_tokens"] > 0,
        f"the answer is {shown(counted)}",
    )


async def _bad(target: Target) -> None:
    answer = await target.post("/messages", body(target) | {"messages": "hello"}, HEADERS)
    equal(check_error(answer, 400)["type"], "invalid_request_error", "the type of the error")


async def _max_tokens(target: Target) -> None:
    asked = {key: value for key, value in body(target).items() if key != "max_tokens"}
    check_error(await target.post("/messages", asked, HEADERS), 400)


async def _model(target: Target) -> None:
    answer = await target.post("/messages", body(target) | {"model": "no-such-model-here"}, HEADERS)
    check_error(answer, 404, 400)


async def _engine_fails(target: Target) -> None:
    answer = await target.post("/messages", body(target, script({"fail": 500})), HEADERS)
    expect(
        check_error(answer, 500, 502, 503, 529)["type"] != "invalid_request_error",
        "the error blames the client",
    )


async def _x_api_key(target: Target) -> None:
    bare = Target(target.session, target.base, target.model)
    headers = {**HEADERS, "x-api-key": target.key or ""}
    equal(
        (await bare.post("/messages", body(target), headers)).status,
        200,
        "the status with x-api-key",
    )
    equal(
        check_error(await bare.post("/messages", body(target), HEADERS), 401)["type"],
        "authentication_error",
        "the type without",
    )


def begun(answer: Json) -> Json:
    """What continues the thread of an answer."""
    return {"type": "continue", "previous_message_id": answer["id"]}


async def _thread(target: Target) -> None:
    first = await sent(target, "My number is 7421.", thread={"type": "create"})
    second = await sent(target, script(ECHO), thread=begun(first))
    expect("7421" in text_of(second), "the model was not sent the first turn of the thread")


async def _thread_fork(target: Target) -> None:
    first = await sent(target, "My number is 7421.", thread={"type": "create"})
    await sent(target, "Left.", thread=begun(first))
    right = text_of(await sent(target, script(ECHO), thread=begun(first)))
    expect("7421" in right, "the second turn from one message does not know the first")
    expect("Left." not in right, "a turn reads what belongs to another one")


async def _thread_call(target: Target) -> None:
    first = await sent(
        target,
        script(CALL, ECHO),
        tools=[TOOL],
        system="Be a poet.",
        thread={"type": "create"},
    )
    use: Json = next((block for block in first["content"] if block["type"] == "tool_use"), {})
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "sunny"}
    second = await sent(target, [{"role": "user", "content": [result]}], thread=begun(first))
    read = text_of(second)
    for what, words in (("tools", "get_weather"), ("system", "Be a poet."), ("result", "sunny")):
        expect(words in read, f"the model was not sent the {what}")


async def _no_thread(target: Target) -> None:
    asked = body(target, thread=begun({"id": "msg_unknown"}))
    answer = await target.post("/messages", asked, HEADERS)
    expect(answer.status != 200, "an unknown thread was ignored: the answer has no history")
    details = check_error(answer, 400, 404).get("details") or {}
    equal(
        details.get("error_code") if isinstance(details, dict) else details,
        "thread_not_found" if answer.status == 404 else "thread_unsupported_request",
        "details.error_code, on which clients send everything again",
    )


async def _parallel(target: Target) -> None:
    two = {"calls": [{"name": "get_weather", "arguments": {"city": c}} for c in ("Paris", "Rome")]}
    text = script(two, {"text": "Both."})
    first = await sent(target, text, tools=[TOOL])
    uses = [block for block in first["content"] if block["type"] == "tool_use"]
    equal(len({use["id"] for use in uses}), 2, "the number of calls with ids of their own")
    results = [
        {"type": "tool_result", "tool_use_id": use["id"], "content": "sunny"} for use in uses
    ]
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": results},
    ]
    equal(text_of(await sent(target, messages, tools=[TOOL])), "Both.", "the answer")


async def _stream_fails(target: Target) -> None:
    asked = body(target, script({"text": "One two three four", "cut": True}), stream=True)
    stream = await target.stream("/messages", asked, HEADERS)
    equal(stream.types[-1:], ["error"], "the last event of a stream that broke off")


TYPES = "anthropic SDK types"
THREADS = "anthropic SDK: tool_runner, thread"

CASES: tuple[Case, ...] = (
    Case(
        "messages.create.whole",
        "an answer is a message with content, stop_reason and usage",
        "must",
        f"{TYPES}: Message",
        _whole,
    ),
    Case(
        "messages.create.system",
        "the model reads the system prompt",
        "must",
        f"{TYPES}: system",
        _system,
        Need.SCRIPT,
    ),
    Case(
        "messages.create.length",
        "an answer cut by its limit says max_tokens",
        "must",
        f"{TYPES}: StopReason",
        _length,
        Need.SCRIPT,
    ),
    Case(
        "messages.create.thinking",
        "thoughts are a thinking block with a signature",
        "should",
        f"{TYPES}: ThinkingBlock",
        _thinking,
        Need.SCRIPT,
    ),
    Case(
        "messages.stream.order",
        "the events of a stream, in order, under their names",
        "must",
        f"{TYPES}: RawMessageStreamEvent",
        _order,
    ),
    Case(
        "messages.stream.exact",
        "the text arrives as the model wrote it",
        "must",
        f"{TYPES}: TextDelta",
        _exact,
        Need.SCRIPT,
    ),
    Case(
        "messages.tools.round",
        "a call is a tool_use block, and its result continues it",
        "must",
        f"{TYPES}: ToolUseBlock",
        _call,
        Need.SCRIPT,
    ),
    Case(
        "messages.tools.stream",
        "a call streams its input",
        "must",
        f"{TYPES}: InputJSONDelta",
        _call_stream,
        Need.SCRIPT,
    ),
    Case(
        "messages.tokens.count",
        "count_tokens counts without generating",
        "should",
        f"{TYPES}: MessageTokensCount",
        _count,
    ),
    Case(
        "messages.errors.request",
        "a bad request is 400 invalid_request_error in the API's own form",
        "must",
        f"{TYPES}: ErrorResponse",
        _bad,
    ),
    Case(
        "messages.errors.max-tokens",
        "a request without max_tokens is refused",
        "should",
        f"{TYPES}: max_tokens",
        _max_tokens,
    ),
    Case(
        "messages.errors.model",
        "an unknown model is refused",
        "should",
        f"{TYPES}: NotFoundError",
        _model,
    ),
    Case(
        "messages.errors.engine",
        "an engine that fails is an error of the server",
        "must",
        f"{TYPES}: ErrorResponse",
        _engine_fails,
        Need.SCRIPT,
    ),
    Case(
        "messages.errors.key",
        "the key is read from x-api-key; without it 401",
        "must",
        "anthropic SDK: auth_headers",
        _x_api_key,
        Need.KEY,
    ),
    Case(
        "messages.tools.parallel",
        "two calls of one answer get their results",
        "must",
        f"{TYPES}: ToolUseBlock",
        _parallel,
        Need.SCRIPT,
    ),
    Case(
        "messages.stream.failure",
        "an engine that breaks off is an error event at the end",
        "must",
        "anthropic SDK: Stream",
        _stream_fails,
        Need.SCRIPT,
    ),
    Case(
        "messages.threads.continue",
        "a thread is continued with the new messages alone",
        "should",
        THREADS,
        _thread,
        Need.SCRIPT,
    ),
    Case(
        "messages.threads.call",
        "the result of a call continues a thread; its tools and system prompt stay",
        "should",
        THREADS,
        _thread_call,
        Need.SCRIPT,
    ),
    Case(
        "messages.threads.fork",
        "two turns from one message do not see each other",
        "ours",
        "Segue: docs/apis/messages.md, Threads",
        _thread_fork,
        Need.SCRIPT,
    ),
    Case(
        "messages.threads.unknown",
        "an unknown thread is refused in the words of the SDKs, never ignored",
        "must",
        THREADS,
        _no_thread,
    ),
)
