"""Which claims are made about single fields and options of Chat Completions?"""

from __future__ import annotations

import json

from segue_conform.case import Case, Json, Need, Wrong, equal, expect, shown
from segue_conform.completions import PATH, TOOL, TYPES, body, choice_of, sent, streamed
from segue_conform.responses_http import CALL, ECHO, PNG
from segue_conform.rules import check_error
from segue_conform.target import Target, script

TWO: Json = {
    "calls": [{"name": "get_weather", "arguments": {"city": c}} for c in ("Paris", "Rome")]
}


def text_of(completion: Json) -> str:
    return str(choice_of(completion)["message"].get("content") or "")


def echoed(completion: Json) -> Json:
    """What the model was sent."""
    try:
        found: Json = json.loads(text_of(completion))
    except ValueError:
        words = shown(text_of(completion))
        raise Wrong(f"the answer is {words}, not what the script says") from None
    return found


# --- fields -------------------------------------------------------------------------------------------------


async def _head(target: Target) -> None:
    completion = await sent(target)
    for key, kind in (("id", str), ("created", int), ("model", str)):
        expect(isinstance(completion.get(key), kind), f"{key} is {shown(completion.get(key))}")


async def _limits(target: Target) -> None:
    for name in ("max_completion_tokens", "max_tokens"):
        told = echoed(await sent(target, script(ECHO), **{name: 77}))
        equal(told.get("max_tokens"), 77, f"the limit that the model was sent for {name}")


async def _stop(target: Target) -> None:
    answer = await sent(target, script({"text": "One two END three"}), stop=["END"])
    equal(text_of(answer).strip(), "One two", "the text before the stop")
    equal(choice_of(answer).get("finish_reason"), "stop", "finish_reason")


async def _format(target: Target) -> None:
    schema: Json = {"type": "object", "properties": {}, "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    told = echoed(await sent(target, script(ECHO), response_format=wanted))
    equal(told.get("format"), "json_schema", "the format that the model was sent")


async def _developer(target: Target) -> None:
    messages = [
        {"role": "developer", "content": "Be a poet."},
        {"role": "user", "content": script(ECHO)},
    ]
    expect("Be a poet." in text_of(await sent(target, messages)), "the model was not sent it")


async def _several(target: Target) -> None:
    answer = await target.post(PATH, body(target, n=2))
    if answer.status != 200:
        check_error(answer.body, answer.status, (400, 422))
        return
    equal(len(answer.json["choices"]), 2, "the number of choices")


async def _image(target: Target) -> None:
    picture = {"type": "image_url", "image_url": {"url": PNG}}
    parts = [{"type": "text", "text": "What is it?"}, picture]
    await sent(target, [{"role": "user", "content": parts}])


async def _reasoning(target: Target) -> None:
    answer = await sent(target, script({"reasoning": "Let me think.", "text": "Yes."}))
    message = choice_of(answer)["message"]
    equal(message.get("content"), "Yes.", "the content, without the thoughts")
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    equal(thoughts, "Let me think.", "the thoughts")


# --- streams ------------------------------------------------------------------------------------------------


async def _no_usage(target: Target) -> None:
    stream = await streamed(target)
    expect(
        all(event.get("choices") and not event.get("usage") for event in stream.events),
        "there is usage, which was not asked for",
    )


async def _usage_once(target: Target) -> None:
    stream = await streamed(target, stream_options={"include_usage": True})
    found = [event.get("usage") for event in stream.events]
    equal([bool(usage) for usage in found], [False] * (len(found) - 1) + [True], "usage by chunk")


async def _stream_text(target: Target) -> None:
    """A chunk of text is a string, and the last one of a choice has none."""
    stream = await streamed(target)
    last = [event["choices"][0] for event in stream.events if event["choices"]][-1]
    equal(last.get("finish_reason"), "stop", "finish_reason of the last chunk")
    expect(not last["delta"].get("content"), "the chunk with finish_reason has text")


async def _stream_cut(target: Target) -> None:
    body_of = body(target, script({"text": "One two three four", "cut": True}), stream=True)
    stream = await target.stream(PATH, body_of)
    last = stream.events[-1] if stream.events else {}
    error = last.get("error")
    expect(isinstance(error, dict) and error.get("message"), f"the last event is {shown(last)}")


async def _stream_calls(target: Target) -> None:
    stream = await streamed(target, script(TWO), tools=[TOOL])
    calls = [
        call
        for event in stream.events
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls") or []
    ]
    written = dict.fromkeys((0, 1), "")
    for call in calls:
        written[call["index"]] += call["function"].get("arguments") or ""
    cities = [json.loads(text)["city"] for text in written.values()]
    equal(cities, ["Paris", "Rome"], "the cities, by index")
    equal(len({call["id"] for call in calls if call.get("id")}), 2, "the number of ids")


# --- tools --------------------------------------------------------------------------------------------------


async def _choice(target: Target, choice: object, told: str) -> None:
    text = script({**CALL, "needs_choice": told})
    answer = await sent(target, text, tools=[TOOL], tool_choice=choice)
    calls = choice_of(answer)["message"].get("tool_calls")
    expect(calls, f"the model was not told the choice: {shown(text_of(answer))}")


async def _choice_required(target: Target) -> None:
    await _choice(target, "required", "required")


async def _choice_function(target: Target) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    await _choice(target, choice, "get_weather")


async def _choice_none(target: Target) -> None:
    told = echoed(await sent(target, script(ECHO), tools=[TOOL], tool_choice="none"))
    expect(
        told.get("tool_choice") == "none" or not told["tools"],
        f"the model was offered tools, with {shown(told.get('tool_choice'))}",
    )


async def _two_calls(target: Target) -> None:
    text = script(TWO, {"text": "Both."})
    message = choice_of(await sent(target, text, tools=[TOOL]))["message"]
    ids = [call["id"] for call in message["tool_calls"]]
    equal(len({*ids}), 2, "the number of calls with ids of their own")
    results = [{"role": "tool", "tool_call_id": name, "content": "sunny"} for name in ids]
    messages = [{"role": "user", "content": text}, message, *results]
    equal(text_of(await sent(target, messages, tools=[TOOL])), "Both.", "the answer")


# --- refusals -----------------------------------------------------------------------------------------------


async def _bad_json(target: Target) -> None:
    answer = await target.post(PATH, b'{"model": ')
    check_error(answer.body, answer.status, (400, 422))


async def _bad_role(target: Target) -> None:
    answer = await target.post(PATH, body(target, [{"role": "nobody", "content": "Hi."}]))
    check_error(answer.body, answer.status, (400, 422))


async def _no_key(target: Target) -> None:
    bare = Target(target.session, target.base, target.model)
    answer = await bare.post(PATH, body(target))
    check_error(answer.body, answer.status, (401,))


async def _busy(target: Target) -> None:
    failure = {"message": "Slow down.", "type": "rate_limit_error", "code": "rate_limit_exceeded"}
    answer = await target.post(PATH, body(target, script({"fail": 429, "error": failure})))
    error = check_error(answer.body, answer.status, (429, 503))
    expect(error.get("type") != "invalid_request_error", "the error blames the client")


OPENAPI = "OpenAI OpenAPI: Error"

CASES: tuple[Case, ...] = (
    Case(
        "chat.create.head",
        "an answer has its id, its time and its model",
        "must",
        f"{TYPES}: ChatCompletion",
        _head,
    ),
    Case(
        "chat.create.limits",
        "max_completion_tokens and max_tokens reach the model",
        "must",
        f"{TYPES}: max_completion_tokens",
        _limits,
        Need.SCRIPT,
    ),
    Case(
        "chat.create.stop",
        "the text ends before a stop",
        "must",
        f"{TYPES}: stop",
        _stop,
        Need.SCRIPT,
    ),
    Case(
        "chat.create.format",
        "a response_format of type json_schema reaches the model",
        "must",
        f"{TYPES}: ResponseFormatJSONSchema",
        _format,
        Need.SCRIPT,
    ),
    Case(
        "chat.create.developer",
        "a message of the developer reaches the model",
        "must",
        f"{TYPES}: ChatCompletionDeveloperMessageParam",
        _developer,
        Need.SCRIPT,
    ),
    Case(
        "chat.create.several",
        "n = 2 gives two choices or is refused",
        "should",
        f"{TYPES}: n",
        _several,
    ),
    Case(
        "chat.create.image",
        "an image is accepted, also by a model that reads text",
        "should",
        f"{TYPES}: ChatCompletionContentPartImageParam",
        _image,
    ),
    Case(
        "chat.create.reasoning",
        "thoughts are beside the content",
        "ours",
        "vLLM, DeepSeek: reasoning_content",
        _reasoning,
        Need.SCRIPT,
    ),
    Case(
        "chat.stream.no-usage",
        "there is no usage where it was not asked for",
        "should",
        f"{TYPES}: stream_options",
        _no_usage,
    ),
    Case(
        "chat.stream.usage-once",
        "where it was, the last chunk alone has it",
        "should",
        f"{TYPES}: stream_options",
        _usage_once,
    ),
    Case(
        "chat.stream.finish",
        "the chunk with finish_reason is the last of its choice, without text",
        "should",
        f"{TYPES}: ChatCompletionChunk",
        _stream_text,
    ),
    Case(
        "chat.stream.failure",
        "an engine that breaks off is an error in the stream",
        "should",
        "openai SDK: Stream",
        _stream_cut,
        Need.SCRIPT,
    ),
    Case(
        "chat.tools.stream-two",
        "two calls stream under their indexes",
        "must",
        f"{TYPES}: ChoiceDeltaToolCall",
        _stream_calls,
        Need.SCRIPT,
    ),
    Case(
        "chat.tools.parallel",
        "two calls of one answer get their results",
        "must",
        f"{TYPES}: parallel_tool_calls",
        _two_calls,
        Need.SCRIPT,
    ),
    Case(
        "chat.tools.required",
        "tool_choice required reaches the model",
        "must",
        f"{TYPES}: ChatCompletionToolChoiceOptionParam",
        _choice_required,
        Need.SCRIPT,
    ),
    Case(
        "chat.tools.function",
        "a function that is forced by name reaches the model",
        "must",
        f"{TYPES}: ChatCompletionNamedToolChoiceParam",
        _choice_function,
        Need.SCRIPT,
    ),
    Case(
        "chat.tools.none",
        "tool_choice none reaches the model, or no tool does",
        "must",
        f"{TYPES}: ChatCompletionToolChoiceOptionParam",
        _choice_none,
        Need.SCRIPT,
    ),
    Case("chat.errors.json", "a body that is no JSON is refused", "must", OPENAPI, _bad_json),
    Case("chat.errors.role", "an unknown role is refused", "should", OPENAPI, _bad_role),
    Case(
        "chat.errors.key",
        "a request without a key is 401",
        "must",
        "OpenAI OpenAPI: security",
        _no_key,
        Need.KEY,
    ),
    Case(
        "chat.errors.busy",
        "an engine that has no room is 429 or 503",
        "should",
        OPENAPI,
        _busy,
        Need.SCRIPT,
    ),
)
