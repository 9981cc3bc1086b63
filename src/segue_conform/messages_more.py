"""Which claims are made about single fields, blocks and threads of the Messages API?"""

from __future__ import annotations

import json

from segue_conform.case import Case, Json, Need, Wrong, equal, expect, shown
from segue_conform.messages import (
    HEADERS,
    THREADS,
    TOOL,
    TYPES,
    begun,
    body,
    check_error,
    sent,
    streamed,
    text_of,
)
from segue_conform.responses_http import CALL, ECHO, PNG
from segue_conform.target import Target, script

BOTH: Json = {"text": "Let me look.", **CALL}


def echoed(message: Json) -> Json:
    """What the model was sent."""
    try:
        found: Json = json.loads(text_of(message))
    except ValueError:
        raise Wrong(f"the answer is {shown(text_of(message))}, not what the script says") from None
    return found


def use_in(message: Json) -> Json:
    """The call of a message."""
    return next((block for block in message["content"] if block["type"] == "tool_use"), {})


# --- fields -------------------------------------------------------------------------------------------------


async def _stop(target: Target) -> None:
    text = script({"text": "One two END three"})
    message = await sent(target, text, stop_sequences=["END"])
    found = message.get("stop_reason"), message.get("stop_sequence")
    equal(found, ("stop_sequence", "END"), "stop_reason and stop_sequence")
    equal(text_of(message).strip(), "One two", "the text before it")


async def _limit(target: Target) -> None:
    message = await sent(target, script(ECHO), max_tokens=77)
    equal(echoed(message).get("max_tokens"), 77, "the limit that the model was sent")


async def _agents_fields(target: Target) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "Be short.", **mark}]
    content = [{"type": "text", "text": "Say hello.", **mark}]
    await sent(
        target,
        [{"role": "user", "content": content}],
        system=system,
        tools=[{**TOOL, **mark}],
        metadata={"user_id": "user_7"},
    )


async def _history(target: Target) -> None:
    messages = [
        {"role": "user", "content": "My number is 7421."},
        {"role": "assistant", "content": [{"type": "text", "text": "Noted."}]},
        {"role": "user", "content": script(ECHO)},
    ]
    roles = [message["role"] for message in echoed(await sent(target, messages))["messages"]]
    equal(roles, ["user", "assistant", "user"], "the roles that the model was sent")


async def _image(target: Target) -> None:
    data = PNG.partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "text", "text": "What is it?"}, {"type": "image", "source": source}]
    await sent(target, [{"role": "user", "content": content}])


async def _models(target: Target) -> None:
    page = (await target.request("GET", "/models", headers=HEADERS)).ok()
    rows = page["data"]
    expect(rows and all(row.get("type") == "model" for row in rows), f"the rows are {shown(rows)}")
    equal(page.get("has_more"), False, "has_more")


async def _request_id(target: Target) -> None:
    answer = await target.post("/messages", body(target), HEADERS)
    answer.ok()
    expect(answer.headers.get("request-id"), "there is no header request-id")


# --- streams ------------------------------------------------------------------------------------------------


async def _start(target: Target) -> None:
    message = (await streamed(target)).events[0]["message"]
    found = message.get("role"), message.get("content"), message.get("stop_reason")
    equal(found, ("assistant", [], None), "role, content and stop_reason of message_start")
    expect(isinstance(message["usage"].get("input_tokens"), int), "it has no usage.input_tokens")


async def _indexes(target: Target) -> None:
    stream = await streamed(target, script(BOTH), tools=[TOOL])
    starts = [event for event in stream.events if event["type"] == "content_block_start"]
    kinds = [(event["index"], event["content_block"]["type"]) for event in starts]
    equal(kinds, [(0, "text"), (1, "tool_use")], "the blocks")
    delta = next(event for event in stream.events if event["type"] == "message_delta")
    equal(delta["delta"].get("stop_reason"), "tool_use", "stop_reason")


async def _thoughts(target: Target) -> None:
    text = script({"reasoning": "Let me think.", "text": "Yes."})
    thinking = {"type": "enabled", "budget_tokens": 1024}
    stream = await streamed(target, text, max_tokens=4096, thinking=thinking)
    deltas = [
        (event["index"], event["delta"]["type"])
        for event in stream.events
        if event["type"] == "content_block_delta"
    ]
    wanted = [(0, "thinking_delta"), (0, "signature_delta"), (1, "text_delta")]
    equal(list(dict.fromkeys(deltas)), wanted, "the kinds of deltas, by block")


# --- tools --------------------------------------------------------------------------------------------------


async def _choice(target: Target, choice: Json, told: str) -> None:
    text = script({**CALL, "needs_choice": told})
    message = await sent(target, text, tools=[TOOL], tool_choice=choice)
    expect(use_in(message), f"the model was not told the choice: {shown(text_of(message))}")


async def _choice_any(target: Target) -> None:
    await _choice(target, {"type": "any"}, "required")


async def _choice_tool(target: Target) -> None:
    await _choice(target, {"type": "tool", "name": "get_weather"}, "get_weather")


async def _choice_none(target: Target) -> None:
    told = echoed(await sent(target, script(ECHO), tools=[TOOL], tool_choice={"type": "none"}))
    expect(
        told.get("tool_choice") == "none" or not told["tools"],
        f"the model was offered tools, with {shown(told.get('tool_choice'))}",
    )


async def _result_fails(target: Target) -> None:
    text = script(CALL, ECHO)
    first = await sent(target, text, tools=[TOOL])
    parts = [{"type": "text", "text": "No such city."}]
    result = {"type": "tool_result", "tool_use_id": use_in(first)["id"], "content": parts}
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [{**result, "is_error": True}]},
    ]
    told = text_of(await sent(target, messages, tools=[TOOL]))
    expect("No such city." in told, "the model was not sent the error")


async def _lone_result(target: Target) -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_unknown", "content": "x"}
    asked = body(target, [{"role": "user", "content": [result]}], tools=[TOOL])
    check_error(await target.post("/messages", asked, HEADERS), 400)


async def _no_result(target: Target) -> None:
    first = await sent(target, script(CALL), tools=[TOOL])
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": "Well?"},
    ]
    asked = body(target, messages, tools=[TOOL])
    check_error(await target.post("/messages", asked, HEADERS), 400)


async def _count_tools(target: Target) -> None:
    asked = {key: value for key, value in body(target).items() if key != "max_tokens"}
    alone, offered = [
        (await target.post("/messages/count_tokens", {**asked, **fields}, HEADERS)).ok()
        for fields in ({}, {"tools": [TOOL]})
    ]
    expect(offered["input_tokens"] > alone["input_tokens"], "tools are not counted")


# --- refusals -----------------------------------------------------------------------------------------------


async def _bad_json(target: Target) -> None:
    error = check_error(await target.post("/messages", b'{"model": ', HEADERS), 400)
    equal(error["type"], "invalid_request_error", "the type of the error")


async def _bad_block(target: Target) -> None:
    asked = body(target, [{"role": "user", "content": [{"type": "no_such_block"}]}])
    check_error(await target.post("/messages", asked, HEADERS), 400)


async def _bad_role(target: Target) -> None:
    asked = body(target, [{"role": "nobody", "content": "Hi."}])
    check_error(await target.post("/messages", asked, HEADERS), 400)


async def _busy(target: Target) -> None:
    failure = {"message": "Slow down.", "type": "rate_limit_error", "code": "rate_limit_exceeded"}
    asked = body(target, script({"fail": 429, "error": failure}))
    error = check_error(await target.post("/messages", asked, HEADERS), 429, 503, 529)
    expect(
        error["type"] in ("rate_limit_error", "overloaded_error"), f"the type is {error['type']}"
    )


# --- threads ------------------------------------------------------------------------------------------------


async def _thread_stream(target: Target) -> None:
    first = await streamed(target, "My number is 7421.", thread={"type": "create"})
    message = first.events[0]["message"]
    second = await streamed(target, script(ECHO), thread=begun(message))
    deltas = [event["delta"] for event in second.events if event["type"] == "content_block_delta"]
    told = "".join(delta.get("text", "") for delta in deltas)
    expect("7421" in told, "the model was not sent the first turn of the thread")


async def _thread_long(target: Target) -> None:
    last = await sent(target, "Fact 0.", thread={"type": "create"})
    for at in range(1, 3):
        last = await sent(target, f"Fact {at}.", thread=begun(last))
    told = text_of(await sent(target, script(ECHO), thread=begun(last)))
    missing = [at for at in range(3) if f"Fact {at}." not in told]
    expect(not missing, f"the model was not sent the facts {missing}")


async def _no_thread(target: Target) -> None:
    first = await sent(target, "My number is 7421.")
    answer = await target.post("/messages", body(target, "Well?", thread=begun(first)), HEADERS)
    expect(answer.status != 200, "a message without a thread was continued")
    check_error(answer, 400, 404)


CASES: tuple[Case, ...] = (
    Case(
        "messages.create.stop",
        "a stop sequence ends the text, and is named",
        "must",
        f"{TYPES}: stop_sequences",
        _stop,
        Need.SCRIPT,
    ),
    Case(
        "messages.create.limit",
        "max_tokens reaches the model",
        "must",
        f"{TYPES}: max_tokens",
        _limit,
        Need.SCRIPT,
    ),
    Case(
        "messages.create.agents",
        "cache_control and metadata, which agents send, are accepted",
        "must",
        f"{TYPES}: CacheControlEphemeral",
        _agents_fields,
    ),
    Case(
        "messages.create.history",
        "earlier messages reach the model in order",
        "must",
        f"{TYPES}: MessageParam",
        _history,
        Need.SCRIPT,
    ),
    Case(
        "messages.create.image",
        "an image is accepted, also by a model that reads text",
        "should",
        f"{TYPES}: ImageBlockParam",
        _image,
    ),
    Case(
        "messages.create.models",
        "models are listed in the API's own form",
        "should",
        f"{TYPES}: ModelInfo",
        _models,
    ),
    Case(
        "messages.create.request-id",
        "answers have request-id",
        "should",
        "anthropic SDK: _request_id",
        _request_id,
    ),
    Case(
        "messages.stream.start",
        "a stream begins with an empty message and its input tokens",
        "must",
        f"{TYPES}: RawMessageStartEvent",
        _start,
    ),
    Case(
        "messages.stream.blocks",
        "text and a call are two blocks, with their indexes",
        "must",
        f"{TYPES}: RawContentBlockStartEvent",
        _indexes,
        Need.SCRIPT,
    ),
    Case(
        "messages.stream.thinking",
        "thoughts stream before the text, and end with their signature",
        "should",
        f"{TYPES}: ThinkingDelta, SignatureDelta",
        _thoughts,
        Need.SCRIPT,
    ),
    Case(
        "messages.tools.any",
        "tool_choice any reaches the model",
        "must",
        f"{TYPES}: ToolChoiceAny",
        _choice_any,
        Need.SCRIPT,
    ),
    Case(
        "messages.tools.forced",
        "a tool that is forced by name reaches the model",
        "must",
        f"{TYPES}: ToolChoiceTool",
        _choice_tool,
        Need.SCRIPT,
    ),
    Case(
        "messages.tools.none",
        "tool_choice none reaches the model, or no tool does",
        "must",
        f"{TYPES}: ToolChoiceNone",
        _choice_none,
        Need.SCRIPT,
    ),
    Case(
        "messages.tools.error",
        "a result that is an error reaches the model",
        "must",
        f"{TYPES}: ToolResultBlockParam",
        _result_fails,
        Need.SCRIPT,
    ),
    Case(
        "messages.tools.lone-result",
        "a result without its call is refused",
        "should",
        f"{TYPES}: ToolResultBlockParam",
        _lone_result,
    ),
    Case(
        "messages.tools.no-result",
        "a call without its result is refused",
        "should",
        f"{TYPES}: ToolUseBlockParam",
        _no_result,
        Need.SCRIPT,
    ),
    Case(
        "messages.tokens.tools",
        "tools are counted",
        "should",
        f"{TYPES}: MessageTokensCount",
        _count_tools,
    ),
    Case(
        "messages.errors.json",
        "a body that is no JSON is 400 invalid_request_error",
        "must",
        f"{TYPES}: ErrorResponse",
        _bad_json,
    ),
    Case(
        "messages.errors.block",
        "a block of an unknown type is refused",
        "should",
        f"{TYPES}: ContentBlockParam",
        _bad_block,
    ),
    Case(
        "messages.errors.role",
        "an unknown role is refused",
        "should",
        f"{TYPES}: MessageParam",
        _bad_role,
    ),
    Case(
        "messages.errors.busy",
        "an engine that has no room is rate_limit_error or overloaded_error",
        "should",
        f"{TYPES}: RateLimitError, OverloadedError",
        _busy,
        Need.SCRIPT,
    ),
    Case(
        "messages.threads.stream",
        "a streamed answer is continued by the id of its message_start",
        "should",
        THREADS,
        _thread_stream,
        Need.SCRIPT,
    ),
    Case(
        "messages.threads.long",
        "a thread of four turns loses nothing",
        "should",
        THREADS,
        _thread_long,
        Need.SCRIPT,
    ),
    Case(
        "messages.threads.none",
        "a message that belongs to no thread is not continued",
        "should",
        THREADS,
        _no_thread,
    ),
)
