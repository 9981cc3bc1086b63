"""Which claims are made about the Responses API as server-sent events?"""

from __future__ import annotations

from segue_conform.case import Case, Json, Need, equal, expect, shown
from segue_conform.responses_http import CALL, GUIDE, OPEN, TYPES, WEATHER, poll
from segue_conform.rules import check_order, check_response, check_usage, text_of
from segue_conform.target import TERMINAL, Streamed, Target, script


async def streamed(target: Target, content: object = "Say hello.", **fields: object) -> Streamed:
    return await target.stream("/responses", target.create(content, stream=True, **fields))


def last_of(stream: Streamed) -> Json:
    expect(stream.events, "the stream has no event")
    return stream.events[-1]


async def _framing(target: Target) -> None:
    stream = await streamed(target)
    expect(
        stream.content_type.startswith("text/event-stream"),
        f"Content-Type is {shown(stream.content_type)}",
    )
    equal(stream.names, stream.types, "the names of events")


async def _order(target: Target) -> None:
    stream = await streamed(target)
    check_order(stream.events)
    equal(last_of(stream)["type"], "response.completed", "the last event")


async def _snapshots(target: Target) -> None:
    for event in (await streamed(target)).events:
        if event["type"] in ("response.created", "response.in_progress", *TERMINAL):
            check_response(event["response"])


async def _from_zero(target: Target) -> None:
    equal((await streamed(target)).events[0].get("sequence_number"), 0, "the first sequence_number")


async def _usage(target: Target) -> None:
    check_usage(last_of(await streamed(target))["response"])


async def _parts(target: Target) -> None:
    wanted = [
        "response.output_item.added", "response.content_part.added", "response.output_text.delta",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
    ]  # fmt: skip
    seen = [name for name in dict.fromkeys((await streamed(target)).types) if name in wanted]
    equal(seen, wanted, "the order of the events of a message")


async def _exact(target: Target) -> None:
    words = "One, two;\n\tthree — “four” 五 🙂"
    stream = await streamed(target, script({"text": words, "pieces": 9}))
    check_order(stream.events)
    equal(text_of(last_of(stream)["response"]), words, "the text")


async def _call(target: Target) -> None:
    stream = await streamed(target, script(CALL), tools=[WEATHER])
    check_order(stream.events)
    wanted = [
        "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done",
    ]  # fmt: skip
    equal(
        [name for name in dict.fromkeys(stream.types) if name in wanted],
        wanted,
        "the events of a call",
    )
    added = next(event["item"] for event in stream.events if event["type"] == wanted[0])
    equal(
        (added.get("arguments"), added.get("status")),
        ("", "in_progress"),
        "arguments and status when it is added",
    )


async def _two_calls(target: Target) -> None:
    calls = [{"name": "get_weather", "arguments": {"city": city}} for city in ("Paris", "Rome")]
    stream = await streamed(
        target, script({"text": "Let me look.", "calls": calls}), tools=[WEATHER]
    )
    check_order(stream.events)
    kinds = [item["type"] for item in last_of(stream)["response"]["output"]]
    equal(kinds, ["message", "function_call", "function_call"], "the items")


async def _reasoning(target: Target) -> None:
    stream = await streamed(target, script({"reasoning": "Let me think.", "text": "Yes."}))
    check_order(stream.events)
    deltas = [
        name
        for name in stream.types
        if name.startswith("response.reasoning") and name.endswith(".delta")
    ]
    expect(deltas, "there is no delta of the reasoning")


async def _length(target: Target) -> None:
    stream = await streamed(target, script({"text": "This goes on", "finish": "length"}))
    check_order(stream.events)
    equal(last_of(stream)["type"], "response.incomplete", "the last event")
    equal(
        last_of(stream)["response"]["output"][-1].get("status"),
        "incomplete",
        "the status of the last item",
    )


async def _cut(target: Target) -> None:
    """The types have a flat `error` too; official clients take it with its object of HTTP as well."""
    stream = await streamed(target, script({"text": "This breaks off in the middle", "cut": True}))
    ends = [name for name in stream.types if name in (*TERMINAL, "error")]
    expect(ends in (["response.failed"], ["error"]), f"the ends of the turn are {shown(ends)}")
    last = last_of(stream)
    error = last.get("response", last).get("error") or last
    expect(error.get("code") and error.get("message"), f"the error is {shown(error)}")


async def _refused(target: Target) -> None:
    await streamed(target)
    body = target.create(stream=True, previous_response_id="resp_00000000000000000000000000000000")
    answer = await target.post("/responses", body)
    expect(400 <= answer.status < 500, f"HTTP {answer.status}: {shown(answer.body)}")


async def _retrievable(target: Target) -> None:
    response = last_of(await streamed(target))["response"]
    found = (await target.get(f"/responses/{response['id']}")).ok()
    equal(found["output"], response["output"], "the output of the stored response")


async def _done(target: Target) -> None:
    expect((await streamed(target)).ended, "the stream does not end with [DONE]")


async def _replay(target: Target) -> None:
    body = target.create(background=True, store=True, stream=True)
    stream = await target.stream("/responses", body)
    path = f"/responses/{stream.events[0]['response']['id']}"
    await poll(target, path)
    again = await target.stream(f"{path}?stream=true&starting_after=1")
    equal([event["sequence_number"] for event in again.events[:1]], [2], "the first number after 1")
    equal(again.types[-1], "response.completed", "the last event")


CASES: tuple[Case, ...] = (
    Case(
        "responses.stream.framing",
        "the name of an event is its type",
        "must",
        f"{OPEN}: streaming",
        _framing,
    ),
    Case(
        "responses.stream.order",
        "created, in progress, items, one end; numbers grow; deltas are what is done",
        "must",
        f"{OPEN}: streaming; openai Python accumulator",
        _order,
    ),
    Case(
        "responses.stream.snapshots",
        "every snapshot is a whole response",
        "must",
        f"{OPEN} schema: ResponseResource",
        _snapshots,
    ),
    Case(
        "responses.stream.zero",
        "sequence numbers begin with 0",
        "ours",
        "Segue: docs/protocol.md 9",
        _from_zero,
    ),
    Case(
        "responses.stream.usage",
        "the end has the usage",
        "must",
        f"{TYPES}: ResponseCompletedEvent",
        _usage,
    ),
    Case(
        "responses.stream.parts",
        "a message has its part, deltas and ends in order",
        "must",
        f"{OPEN}: streaming",
        _parts,
    ),
    Case(
        "responses.stream.exact",
        "the text arrives as the model wrote it",
        "must",
        f"{OPEN}: streaming",
        _exact,
        Need.SCRIPT,
    ),
    Case(
        "responses.stream.call",
        "a call streams its arguments",
        "must",
        f"{OPEN}: streaming",
        _call,
        Need.SCRIPT,
    ),
    Case(
        "responses.stream.calls",
        "text and two calls are three items",
        "must",
        f"{OPEN}: streaming",
        _two_calls,
        Need.SCRIPT,
    ),
    Case(
        "responses.stream.reasoning",
        "reasoning streams before the answer",
        "should",
        f"{TYPES}: ResponseReasoningTextDeltaEvent",
        _reasoning,
        Need.SCRIPT,
    ),
    Case(
        "responses.stream.length",
        "a cut answer closes its items and ends as incomplete",
        "must",
        f"{OPEN}: streaming",
        _length,
        Need.SCRIPT,
    ),
    Case(
        "responses.stream.failure",
        "an engine that breaks off is one end, response.failed or error, with code and message",
        "must",
        f"{TYPES}: ResponseFailedEvent, ResponseErrorEvent",
        _cut,
        Need.SCRIPT,
    ),
    Case(
        "responses.stream.refused",
        "a request that is refused has a status, and no stream",
        "must",
        "OpenAI OpenAPI: Error",
        _refused,
    ),
    Case(
        "responses.stream.stored",
        "a streamed response can be retrieved",
        "must",
        f"{TYPES}: store",
        _retrievable,
    ),
    Case(
        "responses.stream.done",
        "the stream ends with [DONE]",
        "should",
        f"{OPEN}: streaming",
        _done,
    ),
    Case(
        "responses.stream.replay",
        "the events of a background response can be read again from a number on",
        "should",
        f"{GUIDE}: Background mode",
        _replay,
    ),
)
