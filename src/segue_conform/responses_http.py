"""Which claims are made about the Responses API by plain HTTP?"""

from __future__ import annotations

import asyncio
import json
from typing import cast

from segue_conform.case import Absent, Case, Json, Need, Wrong, equal, expect, shown
from segue_conform.rules import calls_of, check_error, check_response, check_usage, text_of
from segue_conform.target import Answer, Target, script

WEATHER: Json = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL: Json = {"calls": [{"name": "get_weather", "arguments": {"city": "Paris"}}]}
ECHO: Json = {"echo": True}
# One red pixel.
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQ"
    "AAAABJRU5ErkJggg=="
)
NOWHERE = "resp_00000000000000000000000000000000"


async def created(target: Target, content: object = "Say hello.", **fields: object) -> Json:
    """A response that must complete."""
    response = (await target.post("/responses", target.create(content, **fields))).ok()
    equal(response.get("status"), "completed", "status")
    return response


async def refused(target: Target, body: object, *statuses: int) -> Json:
    """A request that must be refused: its error."""
    answer = await target.post("/responses", body)
    return check_error(answer.body, answer.status, statuses)


def echoed(response: Json) -> Json:
    """What the model was sent, as the scripted upstream repeats it."""
    try:
        return cast(Json, json.loads(text_of(response)))
    except ValueError:
        raise Wrong(f"the answer is {shown(text_of(response))}, not what the script says") from None


def texts(response: Json, role: str | None = None) -> list[str]:
    """The texts that the model was sent."""
    return [
        message["text"]
        for message in echoed(response)["messages"]
        if role is None or message["role"] == role
    ]


def output_for(call: Json, output: str = "sunny") -> Json:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


# --- one response ---------------------------------------------------------------------------------------


async def _models(target: Target) -> None:
    page = (await target.get("/models")).ok()
    equal(page.get("object"), "list", "object")
    expect(page.get("data"), "the list of models is empty")
    for row in page["data"]:
        is_model = row.get("object") == "model" and isinstance(row.get("id"), str)
        expect(is_model, f"a row is {shown(row)}")


async def _create(target: Target) -> None:
    response = await created(target)
    check_response(response)
    expect(response["output"], "the output is empty")
    expect(text_of(response), "the answer has no text")


async def _usage(target: Target) -> None:
    check_usage(await created(target))


async def _echo_of_fields(target: Target) -> None:
    sent: Json = {
        "metadata": {"run": "7"},
        "instructions": "Be short.",
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 64,
        "parallel_tool_calls": False,
        "truncation": "auto",
    }
    response = await created(target, **sent)
    for key, value in sent.items():
        equal(response.get(key), value, key)


async def _echo_of_tools(target: Target) -> None:
    response = await created(target, tools=[WEATHER], tool_choice="none")
    equal(response.get("tool_choice"), "none", "tool_choice")
    names = [tool.get("name") for tool in response.get("tools", [])]
    equal(names, ["get_weather"], "the list of tools")


async def _text_format(target: Target) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    answer = await target.post("/responses", target.create(text={"format": wanted}))
    equal(answer.ok()["text"]["format"].get("name"), "answer", "text.format.name")


async def _client_metadata(target: Target) -> None:
    await created(target, client_metadata={"session": "1"})


async def _unknown_keys(target: Target) -> None:
    await created(target, some_key_of_next_year=True)


async def _roles(target: Target) -> None:
    items = [
        {"role": "system", "content": "Be short."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
        {"type": "message", "role": "user", "content": "Again."},
    ]
    await created(target, items)


async def _phases(target: Target) -> None:
    def answer(phase: str) -> Json:
        content = [{"type": "output_text", "text": "Hm.", "annotations": []}]
        return {"type": "message", "role": "assistant", "phase": phase, "content": content}

    user = {"role": "user", "content": "Hello."}
    await created(target, [user, answer("commentary"), answer("final_answer"), user])


async def _image(target: Target) -> None:
    picture = {"type": "input_image", "image_url": PNG}
    parts = [{"type": "input_text", "text": "What is it?"}, picture]
    await created(target, [{"role": "user", "content": parts}])


async def _request_id(target: Target) -> None:
    answer = await target.post("/responses", target.create())
    expect(answer.headers.get("x-request-id"), "there is no header x-request-id")


# --- refusals ---------------------------------------------------------------------------------------------


async def _bad_json(target: Target) -> None:
    error = await refused(target, b'{"model": ', 400)
    missing = [key for key in ("type", "param", "code") if key not in error]
    expect(not missing, f"the error has no {', '.join(missing)}: {shown(error)}")


async def _bad_type(target: Target) -> None:
    error = await refused(target, target.create(5), 400, 422)
    equal(error.get("type"), "invalid_request_error", "the type of the error")


async def _bad_number(target: Target) -> None:
    await refused(target, target.create(temperature=9), 400, 422)


async def _no_model(target: Target) -> None:
    await created(target)
    await refused(target, target.create() | {"model": "no-such-model-here"}, 400, 404)


async def _many_pairs(target: Target) -> None:
    await refused(target, target.create(metadata={f"k{at}": "v" for at in range(17)}), 400, 422)


async def _output_without_call(target: Target) -> None:
    await refused(target, target.create([output_for({"call_id": "call_unknown"})]), 400)


async def _no_key(target: Target) -> None:
    bare = Target(target.session, target.base, target.model)
    answer = await bare.post("/responses", target.create())
    check_error(answer.body, answer.status, (401,))


async def _engine_fails(target: Target) -> None:
    error = await refused(target, target.create(script({"fail": 500})), 500, 502, 503)
    expect(error.get("type") != "invalid_request_error", "the error blames the client")


# --- calls ------------------------------------------------------------------------------------------------


async def _call(target: Target) -> None:
    response = await created(target, script(CALL), tools=[WEATHER])
    (call,) = calls_of(response) or [{}]
    found = call.get("name"), call.get("status")
    equal(found, ("get_weather", "completed"), "the pair of name and status")
    equal(json.loads(call["arguments"]), {"city": "Paris"}, "the object of arguments")
    expect(call.get("call_id") and call.get("id") != call["call_id"], f"the ids are {shown(call)}")


async def _call_round(target: Target) -> None:
    text = script(CALL, {"text": "It is sunny."})
    first = await created(target, text, tools=[WEATHER])
    (call,) = calls_of(first) or [{}]
    items = [{"role": "user", "content": text}, *first["output"], output_for(call)]
    second = await created(target, items, tools=[WEATHER])
    equal(text_of(second), "It is sunny.", "the answer after the output")


async def _two_calls(target: Target) -> None:
    calls = [{"name": "get_weather", "arguments": {"city": city}} for city in ("Paris", "Rome")]
    first = await created(target, script({"calls": calls}, ECHO), tools=[WEATHER])
    found = calls_of(first)
    cities = [json.loads(call["arguments"])["city"] for call in found]
    equal(cities, ["Paris", "Rome"], "the list of cities")
    equal(len({call["call_id"] for call in found}), 2, "the number of call ids")
    outputs = [output_for(call, f"output {at}") for at, call in enumerate(found)]
    second = await created(target, outputs, previous_response_id=first["id"], tools=[WEATHER])
    equal(texts(second, "tool"), ["output 0", "output 1"], "what the model was sent as outputs")


async def _length(target: Target) -> None:
    text = script({"text": "This goes on", "finish": "length"})
    response = (await target.post("/responses", target.create(text, max_output_tokens=16))).ok()
    equal(response.get("status"), "incomplete", "status")
    details = response.get("incomplete_details") or {}
    equal(details.get("reason"), "max_output_tokens", "the reason")


async def _reasoning(target: Target) -> None:
    response = await created(target, script({"reasoning": "Let me think.", "text": "Yes."}))
    kinds = [item["type"] for item in response["output"]]
    equal(kinds, ["reasoning", "message"], "the list of items")
    summary = response["output"][0].get("summary")
    expect(isinstance(summary, list), "the reasoning item has no summary list")


# --- state --------------------------------------------------------------------------------------------------


async def _retrieve(target: Target) -> None:
    response = await created(target)
    found = (await target.get(f"/responses/{response['id']}")).ok()
    check_response(found)
    for key in ("id", "status", "output", "model", "created_at"):
        equal(found.get(key), response[key], key)


async def _retrieve_unknown(target: Target) -> None:
    (await target.get(f"/responses/{(await created(target))['id']}")).ok()
    answer = await target.get(f"/responses/{NOWHERE}")
    check_error(answer.body, answer.status, (404,))


async def _unstored(target: Target) -> None:
    response = await created(target, store=False)
    equal(response.get("store"), False, "store")
    answer = await target.get(f"/responses/{response['id']}")
    check_error(answer.body, answer.status, (404,))


async def _delete(target: Target) -> None:
    response = await created(target)
    body = (await target.delete(f"/responses/{response['id']}")).ok()
    equal(body.get("id"), response["id"], "the id")
    equal(body.get("deleted"), True, "deleted")
    status = (await target.get(f"/responses/{response['id']}")).status
    equal(status, 404, "the status of a deleted response")


async def _input_items(target: Target) -> None:
    items = [{"role": "user", "content": f"Number {at}."} for at in range(3)]
    response = await created(target, items)
    path = f"/responses/{response['id']}/input_items?order=asc"
    page = (await target.get(f"{path}&limit=2")).ok()
    equal((page.get("object"), len(page["data"])), ("list", 2), "the pair of object and length")
    equal(page.get("has_more"), True, "has_more")
    equal(page["data"][0]["content"][0]["text"], "Number 0.", "the first item")
    rest = (await target.get(f"{path}&after={page['last_id']}")).ok()
    found = [item["content"][0]["text"] for item in rest["data"]]
    equal(found, ["Number 2."], "the second page")


def knows(response: Json, *words: str) -> None:
    """The model was sent these words of earlier turns."""
    sent = " ".join(texts(response, "user"))
    expect(all(word in sent for word in words), f"the model was sent only {shown(sent)}")


async def _parent(target: Target) -> None:
    first = await created(target, "My number is 7421.")
    second = await created(target, script(ECHO), previous_response_id=first["id"])
    equal(second.get("previous_response_id"), first["id"], "previous_response_id")
    knows(second, "7421")
    expect(texts(second, "assistant"), "the model was not sent the answer of the parent")


async def _long_chain(target: Target) -> None:
    last: str | None = None
    for at in range(4):
        last = (await created(target, f"Fact {at}.", previous_response_id=last))["id"]
    fifth = await created(target, script(ECHO), previous_response_id=last)
    knows(fifth, *(f"Fact {at}." for at in range(4)))


async def _instructions(target: Target) -> None:
    first = await created(target, instructions="Speak like a pirate.")
    fields = {"previous_response_id": first["id"], "instructions": "Speak plainly."}
    sent = " ".join(texts(await created(target, script(ECHO), **fields)))
    is_new = "Speak plainly." in sent and "pirate" not in sent
    expect(is_new, f"the model was sent {shown(sent)}")


async def _fork(target: Target) -> None:
    root = await created(target, "My number is 7421.")
    left = await created(target, "Left.", previous_response_id=root["id"])
    right = await created(target, script(ECHO), previous_response_id=root["id"])
    expect(left["id"] != right["id"], "two children have one id")
    knows(right, "7421")
    expect("Left." not in " ".join(texts(right, "user")), "a child was sent what its sibling said")


async def _unknown_parent(target: Target) -> None:
    error = await refused(target, target.create(previous_response_id=NOWHERE), 400, 404)
    equal(error.get("code"), "previous_response_not_found", "the code")


async def _unknown_parent_param(target: Target) -> None:
    error = await refused(target, target.create(previous_response_id=NOWHERE), 400)
    equal(error.get("param"), "previous_response_id", "the param")


async def _pending_call(target: Target) -> None:
    first = await created(target, script(CALL), tools=[WEATHER])
    await refused(target, target.create("Well?", previous_response_id=first["id"]), 400)


async def _item_reference(target: Target) -> None:
    first = await created(target, script({"text": "The code is 9143."}))
    reference = {"type": "item_reference", "id": first["output"][-1]["id"]}
    items = [reference, {"role": "user", "content": script(ECHO)}]
    sent = " ".join(texts(await created(target, items)))
    expect("9143" in sent, "the model was not sent the item")


# --- beside it ------------------------------------------------------------------------------------------------


async def _input_tokens(target: Target) -> None:
    body = (await target.post("/responses/input_tokens", target.create())).ok()
    equal(body.get("object"), "response.input_tokens", "object")
    counted = body.get("input_tokens")
    expect(isinstance(counted, int) and counted > 0, f"input_tokens is {shown(counted)}")


async def _compact(target: Target) -> None:
    items = [
        {"role": "user", "content": "My number is 7421."},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Noted."}]},
    ]
    body = (await target.post("/responses/compact", target.create(items))).ok()
    equal(body.get("object"), "response.compaction", "object")
    kinds = [item.get("type") for item in body["output"]]
    equal(kinds.count("compaction"), 1, "the number of compaction items")
    await created(target, [*body["output"], {"role": "user", "content": "Go on."}])


async def _compact_model(target: Target) -> None:
    answer = await target.post("/responses/compact", {"input": "Hello."})
    if answer.status in (404, 405, 501):
        raise Absent(f"HTTP {answer.status}")
    expect(answer.status in (400, 422), f"HTTP {answer.status}: {shown(answer.body)}")


async def _conversation(target: Target) -> None:
    made = (await target.post("/conversations", {"metadata": {"a": "b"}})).ok()
    equal(made.get("object"), "conversation", "object")
    equal(made.get("metadata"), {"a": "b"}, "metadata")
    path = f"/conversations/{made['id']}"
    changed = (await target.post(path, {"metadata": {"a": "c"}})).ok()
    equal(changed.get("metadata"), {"a": "c"}, "the changed metadata")
    equal((await target.delete(path)).ok().get("deleted"), True, "deleted")
    equal((await target.get(path)).status, 404, "the status of a deleted conversation")


async def _conversation_items(target: Target) -> None:
    items = [{"type": "message", "role": "user", "content": "My number is 7421."}]
    made = (await target.post("/conversations", {"items": items})).ok()
    path = f"/conversations/{made['id']}/items"
    first = (await target.get(path)).ok()["data"][0]
    equal(first["content"][0]["text"], "My number is 7421.", "the item")
    await created(target, "Remember it.", conversation=made["id"])
    page = (await target.get(f"{path}?order=asc")).ok()
    roles = [item.get("role") for item in page["data"]]
    equal(roles, ["user", "user", "assistant"], "the list of roles")


async def _conversation_read(target: Target) -> None:
    made = (await target.post("/conversations", {})).ok()
    await created(target, "My number is 7421.", conversation=made["id"])
    knows(await created(target, script(ECHO), conversation=made["id"]), "7421")


async def _conversation_and_parent(target: Target) -> None:
    first = await created(target)
    made = (await target.post("/conversations", {})).ok()
    body = target.create(conversation=made["id"], previous_response_id=first["id"])
    await refused(target, body, 400)


async def poll(target: Target, path: str) -> Json:
    """A background response when it has ended."""
    async with asyncio.timeout(target.answer_s):
        while True:
            response = (await target.get(path)).ok()
            if response["status"] not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.05)


async def _background(target: Target) -> None:
    body = target.create(background=True, store=True)
    response = (await target.post("/responses", body)).ok()
    status = response.get("status")
    expect(status in ("queued", "in_progress"), f"status is {shown(status)}")
    ended = await poll(target, f"/responses/{response['id']}")
    equal(ended["status"], "completed", "status")
    equal(ended.get("background"), True, "background")


async def _background_cancel(target: Target) -> None:
    body = target.create(script({"pause_s": 10, "text": "Late."}), background=True, store=True)
    response = (await target.post("/responses", body)).ok()
    path = f"/responses/{response['id']}"
    (await target.post(f"{path}/cancel", {})).ok()
    equal((await poll(target, path))["status"], "cancelled", "status")


async def _cancel_foreground(target: Target) -> None:
    response = await created(target)
    answer: Answer = await target.post(f"/responses/{response['id']}/cancel", {})
    check_error(answer.body, answer.status, (400,))


async def _idempotent(target: Target) -> None:
    key = {"Idempotency-Key": f"conform-{(await created(target))['id']}"}
    first = (await target.post("/responses", target.create(), key)).ok()
    second = (await target.post("/responses", target.create(), key)).ok()
    equal(second["id"], first["id"], "the id of the repeated request")


TYPES, OPEN, GUIDE = "openai SDK types", "Open Responses", "OpenAI guide"
SUITE = "Open Responses compliance suite"

CASES: tuple[Case, ...] = (
    Case(
        "responses.create.models",
        "the list of models has the form of a list",
        "must",
        f"{TYPES}: Model",
        _models,
    ),
    Case(
        "responses.create.whole",
        "a response has every required key, and an answer",
        "must",
        f"{OPEN} schema: ResponseResource",
        _create,
    ),
    Case(
        "responses.create.usage",
        "usage has its counts, and they add up",
        "must",
        f"{TYPES}: ResponseUsage",
        _usage,
    ),
    Case(
        "responses.create.fields",
        "the response repeats the settings of the request",
        "must",
        f"{OPEN} schema: ResponseResource",
        _echo_of_fields,
    ),
    Case(
        "responses.create.tools",
        "the response repeats tools and tool_choice",
        "must",
        f"{OPEN} schema: ResponseResource",
        _echo_of_tools,
    ),
    Case(
        "responses.create.format",
        "the response repeats a text.format of type json_schema",
        "must",
        f"{TYPES}: ResponseTextConfig",
        _text_format,
    ),
    Case(
        "responses.create.client-metadata",
        "client_metadata, which Codex sends, is accepted",
        "must",
        "openai/codex: client_metadata",
        _client_metadata,
    ),
    Case(
        "responses.create.unknown-keys",
        "keys that the server does not know are ignored",
        "ours",
        "Segue: docs/fields.md",
        _unknown_keys,
    ),
    Case(
        "responses.create.roles",
        "messages of every role are accepted, with a type or without",
        "must",
        f"{TYPES}: EasyInputMessage",
        _roles,
    ),
    Case(
        "responses.create.phases",
        "a history with phases is accepted",
        "must",
        f"{SUITE}: assistant-phase",
        _phases,
    ),
    Case(
        "responses.create.image",
        "an image is accepted, also by a model that reads text",
        "must",
        f"{SUITE}: image-input",
        _image,
    ),
    Case(
        "responses.create.request-id",
        "answers have x-request-id",
        "should",
        "openai SDK: APIResponse.request_id",
        _request_id,
    ),
    Case(
        "responses.create.idempotency",
        "a request repeated with its Idempotency-Key is one response",
        "ours",
        "Segue: docs/protocol.md 9",
        _idempotent,
    ),
    Case(
        "responses.errors.json",
        "a body that is no JSON is 400, with an error of four keys",
        "must",
        "OpenAI OpenAPI: Error",
        _bad_json,
    ),
    Case(
        "responses.errors.type",
        "a field of a wrong type is invalid_request_error",
        "must",
        "OpenAI OpenAPI: Error",
        _bad_type,
    ),
    Case(
        "responses.errors.range",
        "a number out of its range is refused",
        "should",
        f"{TYPES}: temperature",
        _bad_number,
    ),
    Case(
        "responses.errors.model",
        "an unknown model is refused",
        "should",
        "OpenAI OpenAPI: Error",
        _no_model,
    ),
    Case(
        "responses.errors.metadata",
        "a seventeenth pair of metadata is refused",
        "should",
        f"{TYPES}: Metadata",
        _many_pairs,
    ),
    Case(
        "responses.errors.output",
        "a tool output without its call is refused",
        "must",
        f"{SUITE}: websocket-failed-continuation",
        _output_without_call,
    ),
    Case(
        "responses.errors.key",
        "a request without a key is 401",
        "must",
        "OpenAI OpenAPI: security",
        _no_key,
        Need.KEY,
    ),
    Case(
        "responses.errors.engine",
        "an engine that fails is an error of the server",
        "must",
        "OpenAI OpenAPI: Error",
        _engine_fails,
        Need.SCRIPT,
    ),
    Case(
        "responses.calls.call",
        "a call of the model is a function_call with its arguments",
        "must",
        f"{TYPES}: ResponseFunctionToolCall",
        _call,
        Need.SCRIPT,
    ),
    Case(
        "responses.calls.round",
        "a client sends the call back with its output",
        "must",
        f"{SUITE}: function-call-roundtrip",
        _call_round,
        Need.SCRIPT,
    ),
    Case(
        "responses.calls.parallel",
        "two calls of one answer get their outputs",
        "must",
        f"{TYPES}: parallel_tool_calls",
        _two_calls,
        Need.SCRIPT,
    ),
    Case(
        "responses.calls.length",
        "an answer cut by its limit is incomplete, with the reason",
        "must",
        f"{TYPES}: IncompleteDetails",
        _length,
        Need.SCRIPT,
    ),
    Case(
        "responses.calls.reasoning",
        "thoughts of the model are an item before the message",
        "should",
        f"{TYPES}: ResponseReasoningItem",
        _reasoning,
        Need.SCRIPT,
    ),
    Case(
        "responses.state.retrieve",
        "a response is stored by default, and reads the same",
        "must",
        f"{TYPES}: responses.retrieve",
        _retrieve,
    ),
    Case(
        "responses.state.unknown",
        "an unknown response is 404",
        "must",
        f"{TYPES}: responses.retrieve",
        _retrieve_unknown,
    ),
    Case(
        "responses.state.unstored",
        "a response with store: false cannot be retrieved",
        "must",
        f"{TYPES}: store",
        _unstored,
    ),
    Case(
        "responses.state.delete",
        "a deleted response is gone",
        "must",
        f"{TYPES}: responses.delete",
        _delete,
    ),
    Case(
        "responses.state.input-items",
        "input items are listed in pages",
        "must",
        f"{TYPES}: responses.input_items",
        _input_items,
    ),
    Case(
        "responses.state.parent",
        "previous_response_id brings the model what came before",
        "must",
        f"{TYPES}: previous_response_id",
        _parent,
        Need.SCRIPT,
    ),
    Case(
        "responses.state.chain",
        "a chain of five responses loses nothing",
        "must",
        f"{TYPES}: previous_response_id",
        _long_chain,
        Need.SCRIPT,
    ),
    Case(
        "responses.state.instructions",
        "instructions are not inherited from the parent",
        "must",
        f"{TYPES}: instructions",
        _instructions,
        Need.SCRIPT,
    ),
    Case(
        "responses.state.fork",
        "two children of a response do not see each other",
        "must",
        f"{TYPES}: previous_response_id",
        _fork,
        Need.SCRIPT,
    ),
    Case(
        "responses.state.unknown-parent",
        "an unknown parent is previous_response_not_found",
        "must",
        f"{GUIDE}: WebSocket mode",
        _unknown_parent,
    ),
    Case(
        "responses.state.unknown-parent-param",
        "that error is 400 and names the field",
        "should",
        f"{GUIDE}: WebSocket mode",
        _unknown_parent_param,
    ),
    Case(
        "responses.state.pending-call",
        "a turn without the output of a call is refused",
        "should",
        "OpenAI: No tool output found",
        _pending_call,
        Need.SCRIPT,
    ),
    Case(
        "responses.state.item-reference",
        "an item_reference stands for a stored item",
        "should",
        f"{TYPES}: ItemReference",
        _item_reference,
        Need.SCRIPT,
    ),
    Case(
        "responses.tokens.count",
        "input_tokens counts without generating",
        "should",
        f"{TYPES}: responses.input_tokens",
        _input_tokens,
    ),
    Case(
        "responses.compaction.window",
        "a compacted window can be sent back",
        "should",
        f"{SUITE}: compact-response",
        _compact,
    ),
    Case(
        "responses.compaction.model",
        "compaction without a model is refused",
        "should",
        f"{SUITE}: compact-missing-model",
        _compact_model,
    ),
    Case(
        "responses.conversations.life",
        "a conversation is made, changed and deleted",
        "should",
        f"{TYPES}: conversations",
        _conversation,
    ),
    Case(
        "responses.conversations.items",
        "a response adds its items to its conversation",
        "should",
        f"{TYPES}: conversations.items",
        _conversation_items,
    ),
    Case(
        "responses.conversations.read",
        "the model reads the conversation",
        "should",
        f"{TYPES}: conversation",
        _conversation_read,
        Need.SCRIPT,
    ),
    Case(
        "responses.conversations.parent",
        "a conversation and a parent exclude each other",
        "should",
        f"{TYPES}: previous_response_id",
        _conversation_and_parent,
    ),
    Case(
        "responses.background.poll",
        "a background response is answered at once, and completes",
        "should",
        f"{GUIDE}: Background mode",
        _background,
    ),
    Case(
        "responses.background.cancel",
        "a background response can be cancelled",
        "should",
        f"{GUIDE}: Background mode",
        _background_cancel,
        Need.SCRIPT,
    ),
    Case(
        "responses.background.foreground",
        "any other response cannot be cancelled",
        "should",
        f"{TYPES}: responses.cancel",
        _cancel_foreground,
    ),
)
