"""What is true of every response and of every stream of events, whatever was asked?

The keys of a response are those that the Open Responses schema requires; the order of events is the one that the
official Python accumulator insists on (docs/protocol.md 5).
"""

from __future__ import annotations

from collections import Counter
from typing import cast

from segue_conform.case import Json, equal, expect, shown
from segue_conform.target import TERMINAL

REQUIRED = (
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "incomplete_details",
    "model",
    "previous_response_id",
    "instructions",
    "output",
    "error",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "temperature",
    "reasoning",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "store",
    "background",
    "service_tier",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
)
NUMBERS = (
    "created_at",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
)
# Where the pieces of an item begin and end: delta, done, and the key of the whole in the last.
PIECES = {
    "response.output_text": "text",
    "response.refusal": "refusal",
    "response.reasoning_text": "text",
    "response.reasoning": "text",
    "response.reasoning_summary_text": "text",
    "response.function_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
}


def check_response(response: Json) -> None:
    """Every key is there, and numbers are numbers."""
    missing = [key for key in REQUIRED if key not in response]
    expect(not missing, f"the response has no {', '.join(missing)}")
    equal(response["object"], "response", "object")
    for key in NUMBERS:
        value = response[key]
        expect(
            isinstance(value, int | float) and not isinstance(value, bool),
            f"{key} is {shown(value)}, not a number",
        )
    expect(isinstance(response["id"], str) and response["id"], f"the id is {shown(response['id'])}")


def check_usage(response: Json) -> None:
    """Counts are there and add up."""
    usage = response.get("usage")
    expect(isinstance(usage, dict), f"usage is {shown(usage)}")
    counts = cast(Json, usage)
    for key in ("input_tokens", "output_tokens", "total_tokens"):
        expect(
            isinstance(counts.get(key), int) and counts[key] >= 0,
            f"usage.{key} is {shown(counts.get(key))}",
        )
    equal(counts["total_tokens"], counts["input_tokens"] + counts["output_tokens"], "total_tokens")
    for key in ("input_tokens_details", "output_tokens_details"):
        expect(isinstance(counts.get(key), dict), f"usage.{key} is {shown(counts.get(key))}")


def check_order(events: list[Json]) -> None:
    """The order of one turn's events."""
    types = [event.get("type") for event in events]
    equal(types[:1], ["response.created"], "the first event")
    expect("response.in_progress" in types, "there is no response.in_progress")
    ends = [name for name in types if name in TERMINAL or name == "error"]
    expect(len(ends) == 1, f"there are {len(ends)} terminal events: {ends}")
    expect(types[-1] in TERMINAL, f"the last event is {types[-1]}")
    _check_numbers(events)
    _check_snapshots(events)
    _check_items(events)
    _check_pieces(events)


def _check_numbers(events: list[Json]) -> None:
    numbers = [event.get("sequence_number") for event in events]
    expect(
        all(isinstance(number, int) for number in numbers), f"sequence numbers are {shown(numbers)}"
    )
    grow = all(
        a < b for a, b in zip(cast(list[int], numbers), cast(list[int], numbers)[1:], strict=False)
    )
    expect(grow, f"sequence numbers do not grow: {shown(numbers)}")


def _check_snapshots(events: list[Json]) -> None:
    first = events[0].get("response", {})
    equal(
        (first.get("status"), first.get("output")),
        ("in_progress", []),
        "status and output of response.created",
    )
    ids = {
        event["response"].get("id") for event in events if isinstance(event.get("response"), dict)
    }
    equal(len(ids), 1, "the number of response ids in one turn")


def _check_items(events: list[Json]) -> None:
    """Each item is added once, is done once, and stands in the last snapshot as it was done."""
    added = [event for event in events if event["type"] == "response.output_item.added"]
    ended = [event for event in events if event["type"] == "response.output_item.done"]
    done = {event.get("output_index"): event.get("item", {}) for event in ended}
    places = Counter(event.get("output_index") for event in added)
    expect(
        all(count == 1 for count in places.values()),
        f"an output_index was added twice: {dict(places)}",
    )
    for event in added:
        item, place = event.get("item", {}), event.get("output_index")
        expect(place in done, f"item {place} ({item.get('type')}) was added and is never done")
        for key in ("id", "type", "call_id"):
            equal(done[place].get(key), item.get(key), f"{key} of item {place} when it is done")
    equal(set(done), set(places), "the items that are done")
    output = events[-1]["response"].get("output", [])
    ids = [done[place].get("id") for place in sorted(done, key=str)]
    equal([item.get("id") for item in output], ids, "the items of the last snapshot")


def _check_pieces(events: list[Json]) -> None:
    """What came in deltas is what is done; the deltas of an item name it."""
    items = {
        event["item"]["id"] for event in events if event["type"] == "response.output_item.added"
    }
    parts: dict[tuple[object, ...], str] = {}
    for event in events:
        kind, _, step = cast(str, event["type"]).rpartition(".")
        if kind not in PIECES or step not in ("delta", "done"):
            continue
        expect(
            event.get("item_id") in items,
            f"{event['type']} names {shown(event.get('item_id'))}, which was not added",
        )
        place = (kind, event["item_id"], event.get("content_index"), event.get("summary_index"))
        if step == "delta":
            parts[place] = parts.get(place, "") + cast(str, event.get("delta", ""))
        else:
            equal(
                event.get(PIECES[kind]), parts.get(place, ""), f"{PIECES[kind]} of {event['type']}"
            )


def text_of(response: Json) -> str:
    """All text that a response has written."""
    contents = [
        part
        for item in response.get("output", [])
        if item.get("type") == "message"
        for part in item["content"]
    ]
    return "".join(part.get("text", "") for part in contents)


def calls_of(response: Json) -> list[Json]:
    """The function calls of a response."""
    return [item for item in response.get("output", []) if item.get("type") == "function_call"]


def check_error(body: object, status: int, statuses: tuple[int, ...]) -> Json:
    """An error of HTTP: a status among these, and an object with a message."""
    wanted = " or ".join(map(str, statuses))
    expect(status in statuses, f"HTTP {status}, not {wanted}: {shown(body)}")
    error = body.get("error") if isinstance(body, dict) else None
    expect(isinstance(error, dict), f"the body is {shown(body)}, without an error object")
    found = cast(Json, error)
    message = found.get("message")
    expect(isinstance(message, str) and message, f"the error has no message: {shown(found)}")
    return found
