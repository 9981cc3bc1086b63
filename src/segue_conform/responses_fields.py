"""Which claims are made about single fields and items of a request, and how a bad one is refused?"""

from __future__ import annotations

from segue_conform.case import Case, Json, Need, equal, expect, shown
from segue_conform.responses_http import (
    CALL,
    ECHO,
    GUIDE,
    OPEN,
    SUITE,
    TYPES,
    WEATHER,
    created,
    echoed,
    output_for,
    refused,
    texts,
)
from segue_conform.rules import calls_of, check_error, text_of
from segue_conform.target import Target, script

CLOCK: Json = {"type": "function", "name": "get_time", "parameters": {"type": "object"}}
THOUGHT: Json = {"reasoning": "Let me think.", "text": "Yes."}
SEALED = "reasoning.encrypted_content"


# --- fields -------------------------------------------------------------------------------------------------


async def _defaults(target: Target) -> None:
    response = await created(target)
    wanted: Json = {
        "truncation": "disabled",
        "store": True,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "tools": [],
        "metadata": {},
        "background": False,
        "error": None,
        "incomplete_details": None,
    }
    for key, value in wanted.items():
        equal(response.get(key), value, key)


async def _times(target: Target) -> None:
    response = await created(target)
    began, ended = response["created_at"], response["completed_at"]
    expect(isinstance(ended, int), f"completed_at is {shown(ended)}")
    expect(1_500_000_000 < began <= ended, f"created_at is {began}, completed_at {ended}")


async def _names(target: Target) -> None:
    sent: Json = {"prompt_cache_key": "cache-7", "safety_identifier": "user-7"}
    response = await created(target, **sent)
    for key, value in sent.items():
        equal(response.get(key), value, key)


async def _effort(target: Target) -> None:
    response = await created(target, reasoning={"effort": "low"})
    equal((response.get("reasoning") or {}).get("effort"), "low", "reasoning.effort")


async def _file(target: Target) -> None:
    data = "data:text/plain;base64,TXkgbnVtYmVyIGlzIDc0MjEu"
    parts = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_file", "filename": "a.txt", "file_data": data},
    ]
    await created(target, [{"role": "user", "content": parts}])


async def _instructions(target: Target) -> None:
    response = await created(target, script(ECHO), instructions="Be a poet.")
    expect("Be a poet." in " ".join(texts(response)), "the model was not sent the instructions")


async def _max_tokens(target: Target) -> None:
    response = await created(target, script(ECHO), max_output_tokens=77)
    equal(echoed(response).get("max_tokens"), 77, "the limit that the model was sent")


async def _format(target: Target) -> None:
    schema: Json = {"type": "object", "properties": {}, "additionalProperties": False}
    wanted = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    response = await created(target, script(ECHO), text={"format": wanted})
    equal(echoed(response).get("format"), "json_schema", "the format that the model was sent")


async def _stream_options(target: Target) -> None:
    body = target.create(stream=True, stream_options={"include_obfuscation": False})
    stream = await target.stream("/responses", body)
    equal(stream.types[-1:], ["response.completed"], "the last event")
    expect(
        not any("obfuscation" in event for event in stream.events),
        "events have obfuscation, which was switched off",
    )


async def _bad_truncation(target: Target) -> None:
    await refused(target, target.create(truncation="sometimes"), 400, 422)


# --- tools --------------------------------------------------------------------------------------------------


async def _choice_none(target: Target) -> None:
    sent = echoed(await created(target, script(ECHO), tools=[WEATHER], tool_choice="none"))
    expect(
        sent.get("tool_choice") == "none" or not sent["tools"],
        f"the model was offered tools, with {shown(sent.get('tool_choice'))}",
    )


async def _choice_required(target: Target) -> None:
    text = script({**CALL, "needs_choice": "required"})
    response = await created(target, text, tools=[WEATHER], tool_choice="required")
    equal(response.get("tool_choice"), "required", "tool_choice")
    expect(calls_of(response), "the model was not told that a call is required")


async def _choice_function(target: Target) -> None:
    choice = {"type": "function", "name": "get_weather"}
    text = script({**CALL, "needs_choice": "get_weather"})
    response = await created(target, text, tools=[WEATHER, CLOCK], tool_choice=choice)
    equal(response.get("tool_choice"), choice, "tool_choice")
    expect(calls_of(response), "the model was not told which function to call")


async def _choice_allowed(target: Target) -> None:
    tools = [{"type": "function", "name": "get_weather"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
    response = await created(target, tools=[WEATHER, CLOCK], tool_choice=choice)
    equal(response.get("tool_choice"), choice, "tool_choice")


async def _choice_unknown(target: Target) -> None:
    choice = {"type": "function", "name": "no_such_function"}
    await refused(target, target.create(tools=[WEATHER], tool_choice=choice), 400, 422)


async def _tools_offered(target: Target) -> None:
    sent = echoed(await created(target, script(ECHO), tools=[WEATHER, CLOCK]))
    equal(sent["tools"], ["get_weather", "get_time"], "the tools that the model was offered")


async def _custom_history(target: Target) -> None:
    items = [
        {"role": "user", "content": "Run it."},
        {"type": "custom_tool_call", "call_id": "call_1", "name": "run", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "a.txt"},
    ]
    tools = [{"type": "custom", "name": "run", "description": "Runs a command."}]
    await created(target, items, tools=tools)


async def _output_parts(target: Target) -> None:
    text = script(CALL, ECHO)
    first = await created(target, text, tools=[WEATHER])
    (call,) = calls_of(first) or [{}]
    parts = [{"type": "input_text", "text": "It is sunny."}]
    output = output_for(call) | {"output": parts}
    second = await created(target, [output], previous_response_id=first["id"], tools=[WEATHER])
    expect("It is sunny." in " ".join(texts(second)), "the model was not sent the output's text")


async def _thoughts_back(target: Target) -> None:
    """As agents do that keep the history themselves."""
    text = script({**CALL, "reasoning": "Let me look."}, {"text": "Sunny."})
    fields: Json = {"tools": [WEATHER], "store": False, "include": [SEALED]}
    first = await created(target, text, **fields)
    (call,) = calls_of(first) or [{}]
    items = [{"role": "user", "content": text}, *first["output"], output_for(call)]
    equal(text_of(await created(target, items, **fields)), "Sunny.", "the answer")


async def _sealed(target: Target) -> None:
    response = await created(target, script(THOUGHT), store=False, include=[SEALED])
    thoughts = [item for item in response["output"] if item["type"] == "reasoning"]
    expect(thoughts, "there is no reasoning item")
    sealed = thoughts[0].get("encrypted_content")
    expect(isinstance(sealed, str) and sealed, f"encrypted_content is {shown(sealed)}")


# --- refusals -----------------------------------------------------------------------------------------------


async def _no_input(target: Target) -> None:
    await refused(target, {"model": target.model}, 400, 422)


async def _bad_role(target: Target) -> None:
    await refused(target, target.create([{"role": "nobody", "content": "Hi."}]), 400, 422)


async def _bad_item(target: Target) -> None:
    await refused(target, target.create([{"type": "no_such_item"}]), 400, 422)


async def _bad_part(target: Target) -> None:
    items = [{"role": "user", "content": [{"type": "no_such_part"}]}]
    await refused(target, target.create(items), 400, 422)


async def _bad_tool(target: Target) -> None:
    tools = [{"type": "function", "parameters": {"type": "object"}}]
    await refused(target, target.create(tools=tools), 400, 422)


async def _bad_format(target: Target) -> None:
    body = target.create(text={"format": {"type": "json_schema", "name": "answer"}})
    await refused(target, body, 400, 422)


async def _bad_effort(target: Target) -> None:
    await refused(target, target.create(reasoning={"effort": "gigantic"}), 400, 422)


async def _long_value(target: Target) -> None:
    await refused(target, target.create(metadata={"k": "v" * 513}), 400, 422)


async def _negative_limit(target: Target) -> None:
    await refused(target, target.create(max_output_tokens=-1), 400, 422)


async def _wrong_key(target: Target) -> None:
    wrong = Target(target.session, target.base, target.model, key="sk-no-such-key")
    answer = await wrong.post("/responses", target.create())
    check_error(answer.body, answer.status, (401,))


async def _no_path(target: Target) -> None:
    answer = await target.get("/no-such-path")
    check_error(answer.body, answer.status, (404,))


async def _too_long(target: Target) -> None:
    failure = {
        "message": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
        "type": "BadRequestError",
        "code": 400,
    }
    body = target.create(script({"fail": 400, "error": failure}))
    error = await refused(target, body, 400, 413)
    equal(error.get("code"), "context_length_exceeded", "the code")


async def _busy(target: Target) -> None:
    failure = {"message": "Slow down.", "type": "rate_limit_error", "code": "rate_limit_exceeded"}
    body = target.create(script({"fail": 429, "error": failure}))
    error = await refused(target, body, 429, 503)
    expect(error.get("type") != "invalid_request_error", "the error blames the client")


async def _stream_fails(target: Target) -> None:
    body = target.create(script({"fail": 500}), stream=True)
    answer = await target.post("/responses", body)
    if answer.status != 200:
        check_error(answer.body, answer.status, (500, 502, 503))
        return
    stream = await target.stream("/responses", body)
    expect(stream.events, "the stream has no event")
    ended = stream.types[-1] in ("response.failed", "error")
    expect(ended, f"the last event is {shown(stream.events[-1])}")


OPENAPI = "OpenAI OpenAPI: Error"

CASES: tuple[Case, ...] = (
    Case(
        "responses.create.defaults",
        "fields that were left out have their defaults in the response",
        "must",
        f"{OPEN} schema: ResponseResource",
        _defaults,
    ),
    Case(
        "responses.create.times",
        "a completed response says when it began and ended, in seconds",
        "must",
        f"{OPEN} schema: ResponseResource",
        _times,
    ),
    Case(
        "responses.create.names",
        "prompt_cache_key and safety_identifier are repeated",
        "must",
        f"{OPEN} schema: ResponseResource",
        _names,
    ),
    Case(
        "responses.create.effort",
        "reasoning.effort is repeated",
        "must",
        f"{TYPES}: Reasoning",
        _effort,
    ),
    Case(
        "responses.create.file",
        "a text file in the input is accepted",
        "must",
        f"{SUITE}: file-input",
        _file,
    ),
    Case(
        "responses.create.instructions",
        "the model reads the instructions",
        "must",
        f"{TYPES}: instructions",
        _instructions,
        Need.SCRIPT,
    ),
    Case(
        "responses.create.limit",
        "max_output_tokens reaches the model",
        "must",
        f"{TYPES}: max_output_tokens",
        _max_tokens,
        Need.SCRIPT,
    ),
    Case(
        "responses.create.schema",
        "a text.format of type json_schema reaches the model",
        "must",
        f"{TYPES}: ResponseTextConfig",
        _format,
        Need.SCRIPT,
    ),
    Case(
        "responses.stream.options",
        "stream_options are accepted; without obfuscation there is none",
        "must",
        f"{TYPES}: stream_options",
        _stream_options,
    ),
    Case(
        "responses.stream.fails",
        "an engine that fails at once is an error, or a stream that ends as failed",
        "must",
        f"{TYPES}: ResponseFailedEvent",
        _stream_fails,
        Need.SCRIPT,
    ),
    Case(
        "responses.errors.truncation",
        "an unknown truncation is refused",
        "should",
        f"{TYPES}: truncation",
        _bad_truncation,
    ),
    Case(
        "responses.tools.offered",
        "the model is offered every tool, in order",
        "must",
        f"{TYPES}: tools",
        _tools_offered,
        Need.SCRIPT,
    ),
    Case(
        "responses.tools.none",
        "tool_choice none reaches the model, or no tool does",
        "must",
        f"{TYPES}: ToolChoiceOptions",
        _choice_none,
        Need.SCRIPT,
    ),
    Case(
        "responses.tools.required",
        "tool_choice required reaches the model, and is repeated",
        "must",
        f"{TYPES}: ToolChoiceOptions",
        _choice_required,
        Need.SCRIPT,
    ),
    Case(
        "responses.tools.function",
        "a function that is forced by name reaches the model, and is repeated",
        "must",
        f"{TYPES}: ToolChoiceFunction",
        _choice_function,
        Need.SCRIPT,
    ),
    Case(
        "responses.tools.allowed",
        "allowed_tools is accepted and repeated",
        "should",
        f"{TYPES}: ToolChoiceAllowed",
        _choice_allowed,
    ),
    Case(
        "responses.tools.unknown",
        "a forced function that is not among the tools is refused",
        "should",
        f"{TYPES}: ToolChoiceFunction",
        _choice_unknown,
    ),
    Case(
        "responses.tools.custom",
        "a history with a custom tool's call and output is accepted",
        "should",
        f"{TYPES}: ResponseCustomToolCall",
        _custom_history,
    ),
    Case(
        "responses.tools.parts",
        "an output of parts reaches the model",
        "should",
        f"{TYPES}: ResponseFunctionCallOutputItemList",
        _output_parts,
        Need.SCRIPT,
    ),
    Case(
        "responses.include.round",
        "thoughts and calls are accepted back as they came",
        "must",
        "openai/codex: store false",
        _thoughts_back,
        Need.SCRIPT,
    ),
    Case(
        "responses.include.encrypted",
        "reasoning.encrypted_content is there where it was asked for",
        "should",
        f"{TYPES}: ResponseIncludable",
        _sealed,
        Need.SCRIPT,
    ),
    Case(
        "responses.errors.input",
        "a request without input is refused",
        "should",
        OPENAPI,
        _no_input,
    ),
    Case("responses.errors.role", "an unknown role is refused", "should", OPENAPI, _bad_role),
    Case(
        "responses.errors.item",
        "an item of an unknown type is refused",
        "should",
        OPENAPI,
        _bad_item,
    ),
    Case(
        "responses.errors.part",
        "a part of an unknown type is refused",
        "should",
        OPENAPI,
        _bad_part,
    ),
    Case(
        "responses.errors.tool",
        "a function without a name is refused",
        "must",
        f"{TYPES}: FunctionTool",
        _bad_tool,
    ),
    Case(
        "responses.errors.format",
        "a json_schema without its schema is refused",
        "should",
        f"{TYPES}: ResponseFormatTextJSONSchemaConfig",
        _bad_format,
    ),
    Case(
        "responses.errors.effort",
        "an unknown reasoning.effort is refused",
        "should",
        f"{TYPES}: ReasoningEffort",
        _bad_effort,
    ),
    Case(
        "responses.errors.value",
        "a value of metadata of 513 characters is refused",
        "should",
        f"{TYPES}: Metadata",
        _long_value,
    ),
    Case(
        "responses.errors.limit",
        "a negative max_output_tokens is refused",
        "must",
        f"{TYPES}: max_output_tokens",
        _negative_limit,
    ),
    Case(
        "responses.errors.wrong-key",
        "a wrong key is 401",
        "must",
        "OpenAI OpenAPI: security",
        _wrong_key,
        Need.KEY,
    ),
    Case(
        "responses.errors.path",
        "an unknown path is 404, with an error object",
        "should",
        OPENAPI,
        _no_path,
    ),
    Case(
        "responses.errors.context",
        "an engine that finds the prompt too long is context_length_exceeded",
        "should",
        f"{GUIDE}: Error codes",
        _too_long,
        Need.SCRIPT,
    ),
    Case(
        "responses.errors.busy",
        "an engine that has no room is 429 or 503",
        "should",
        f"{GUIDE}: Error codes",
        _busy,
        Need.SCRIPT,
    ),
)
