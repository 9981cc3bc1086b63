"""Which claims are made about Chat Completions?"""

from __future__ import annotations

import json

from segue_conform.case import Case, Json, Need, equal, expect, shown
from segue_conform.responses_http import CALL, ECHO
from segue_conform.rules import check_error
from segue_conform.target import Streamed, Target, script

TOOL: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
PATH = "/chat/completions"


def body(target: Target, text: object = "Say hello.", **fields: object) -> Json:
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    return {"model": target.model, "messages": messages, **fields}


async def sent(target: Target, text: object = "Say hello.", **fields: object) -> Json:
    return (await target.post(PATH, body(target, text, **fields))).ok()


async def streamed(target: Target, text: object = "Say hello.", **fields: object) -> Streamed:
    return await target.stream(PATH, body(target, text, stream=True, **fields))


def choice_of(completion: Json) -> Json:
    expect(
        len(completion.get("choices", [])) == 1,
        f"the choices are {shown(completion.get('choices'))}",
    )
    choice: Json = completion["choices"][0]
    return choice


async def _whole(target: Target) -> None:
    completion = await sent(target)
    equal(completion.get("object"), "chat.completion", "object")
    choice = choice_of(completion)
    equal(
        (choice.get("finish_reason"), choice["message"].get("role")),
        ("stop", "assistant"),
        "finish_reason and role",
    )
    expect(choice["message"].get("content"), "the answer has no text")
    usage = completion.get("usage") or {}
    equal(
        usage.get("total_tokens"),
        usage.get("prompt_tokens", -1) + usage.get("completion_tokens", 0),
        "total_tokens",
    )


async def _stream(target: Target) -> None:
    stream = await streamed(target)
    expect(stream.ended, "the stream does not end with [DONE]")
    equal({event.get("object") for event in stream.events}, {"chat.completion.chunk"}, "object")
    equal(len({event.get("id") for event in stream.events}), 1, "the number of ids")
    finishes = [
        choice["finish_reason"]
        for event in stream.events
        for choice in event["choices"]
        if choice.get("finish_reason")
    ]
    equal(finishes, ["stop"], "the finish reasons")
    equal(
        stream.events[0]["choices"][0]["delta"].get("role"),
        "assistant",
        "the role of the first chunk",
    )


async def _usage(target: Target) -> None:
    stream = await streamed(target, stream_options={"include_usage": True})
    last = stream.events[-1]
    equal(last.get("choices"), [], "the choices of the last chunk")
    expect(
        isinstance((last.get("usage") or {}).get("total_tokens"), int),
        f"the usage is {shown(last.get('usage'))}",
    )


async def _exact(target: Target) -> None:
    words = "One, two;\n\tthree — “four” 五 🙂"
    stream = await streamed(target, script({"text": words, "pieces": 9}))
    deltas = [
        choice["delta"].get("content") or ""
        for event in stream.events
        for choice in event["choices"]
    ]
    equal("".join(deltas), words, "the text")


async def _call(target: Target) -> None:
    text = script(CALL, {"text": "Sunny."})
    choice = choice_of(await sent(target, text, tools=[TOOL]))
    equal(choice.get("finish_reason"), "tool_calls", "finish_reason")
    (call,) = choice["message"].get("tool_calls") or [{}]
    equal(call.get("function", {}).get("name"), "get_weather", "the name")
    equal(json.loads(call["function"]["arguments"]), {"city": "Paris"}, "the arguments")
    messages = [
        {"role": "user", "content": text},
        choice["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    equal(
        choice_of(await sent(target, messages, tools=[TOOL]))["message"]["content"],
        "Sunny.",
        "the answer after the result",
    )


async def _call_stream(target: Target) -> None:
    stream = await streamed(target, script(CALL), tools=[TOOL])
    deltas = [choice["delta"] for event in stream.events for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    equal({call.get("index") for call in calls}, {0}, "the index of the call")
    equal([call["id"] for call in calls if call.get("id")][1:], [], "further ids of the call")
    written = "".join(call["function"].get("arguments") or "" for call in calls)
    equal(json.loads(written or "null"), {"city": "Paris"}, "the arguments that were streamed")


async def _roles(target: Target) -> None:
    messages = [
        {"role": "system", "content": "Be a poet."},
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": script(ECHO)},
    ]
    told = choice_of(await sent(target, messages))["message"]["content"]
    expect("Be a poet." in told, "the model was not sent the system message")


async def _length(target: Target) -> None:
    answer = await sent(target, script({"text": "This goes on", "finish": "length"}))
    equal(choice_of(answer).get("finish_reason"), "length", "finish_reason")


async def _bad(target: Target) -> None:
    answer = await target.post(PATH, body(target) | {"messages": "hello"})
    check_error(answer.body, answer.status, (400, 422))


async def _model(target: Target) -> None:
    await sent(target)
    answer = await target.post(PATH, body(target) | {"model": "no-such-model-here"})
    check_error(answer.body, answer.status, (400, 404))


async def _engine_fails(target: Target) -> None:
    answer = await target.post(PATH, body(target, script({"fail": 500})))
    error = check_error(answer.body, answer.status, (500, 502, 503))
    expect(error.get("type") != "invalid_request_error", "the error blames the client")


async def _lone_result(target: Target) -> None:
    messages = [
        {"role": "user", "content": "Hi."},
        {"role": "tool", "tool_call_id": "call_unknown", "content": "x"},
    ]
    answer = await target.post(PATH, body(target, messages))
    check_error(answer.body, answer.status, (400,))


TYPES = "openai SDK types"

CASES: tuple[Case, ...] = (
    Case(
        "chat.create.whole",
        "an answer is a chat.completion with one choice and its usage",
        "must",
        f"{TYPES}: ChatCompletion",
        _whole,
    ),
    Case(
        "chat.create.roles",
        "messages of every role reach the model",
        "must",
        f"{TYPES}: ChatCompletionMessageParam",
        _roles,
        Need.SCRIPT,
    ),
    Case(
        "chat.create.length",
        "an answer cut by its limit says length",
        "must",
        f"{TYPES}: finish_reason",
        _length,
        Need.SCRIPT,
    ),
    Case(
        "chat.stream.chunks",
        "chunks with one id, one finish reason, and [DONE]",
        "must",
        f"{TYPES}: ChatCompletionChunk",
        _stream,
    ),
    Case(
        "chat.stream.usage",
        "the last chunk has the usage where it was asked for",
        "must",
        f"{TYPES}: stream_options",
        _usage,
    ),
    Case(
        "chat.stream.exact",
        "the text arrives as the model wrote it",
        "must",
        f"{TYPES}: ChatCompletionChunk",
        _exact,
        Need.SCRIPT,
    ),
    Case(
        "chat.tools.round",
        "a call has its arguments, and its result continues it",
        "must",
        f"{TYPES}: ChatCompletionMessageToolCall",
        _call,
        Need.SCRIPT,
    ),
    Case(
        "chat.tools.stream",
        "a call streams its arguments, its id once",
        "must",
        f"{TYPES}: ChoiceDeltaToolCall",
        _call_stream,
        Need.SCRIPT,
    ),
    Case(
        "chat.errors.request",
        "a bad request is refused with an error object",
        "must",
        "OpenAI OpenAPI: Error",
        _bad,
    ),
    Case(
        "chat.errors.model",
        "an unknown model is refused",
        "should",
        "OpenAI OpenAPI: Error",
        _model,
    ),
    Case(
        "chat.errors.engine",
        "an engine that fails is an error of the server",
        "must",
        "OpenAI OpenAPI: Error",
        _engine_fails,
        Need.SCRIPT,
    ),
    Case(
        "chat.errors.result",
        "a result without its call is refused",
        "should",
        "OpenAI OpenAPI: Error",
        _lone_result,
    ),
)
