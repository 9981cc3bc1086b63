"""What Open Responses demands beyond what `tests/events.py` checks of every event (docs/protocol.md 2.1, 5 and 8).

Its schema is stricter than the official clients: its numbers are never null, absent keys are left out rather than null,
and its union of events is closed. What we may send beyond that union is named here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tests.events import check_response

Event = Mapping[str, Any]

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")

UNION = {
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.completed",
    "response.failed",
    "response.incomplete",
    "response.output_item.added",
    "response.output_item.done",
    "response.content_part.added",
    "response.content_part.done",
    "response.output_text.delta",
    "response.output_text.done",
    "response.output_text.annotation.added",
    "response.refusal.delta",
    "response.refusal.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.reasoning_summary_part.added",
    "response.reasoning_summary_part.done",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "response.reasoning.delta",
    "response.reasoning.done",
    "error",
}
# The closed union does not know these: raw reasoning, which `reasoning = "summary"` avoids, and what only a client that
# asks for it can bring about, by offering a custom tool, a trigger, a steer or a rollout.
OUTSIDE = {
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
    "response.compaction.compacting",
    "response.steer.accepted",
    "response.steer.pending",
    "response.steer.failed",
    "response.done",
}
ITEMS = {"message", "function_call", "function_call_output", "reasoning", "compaction"}
ITEMS_OUTSIDE = {"custom_tool_call"}
NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
STRING_CHOICES = {"none", "auto", "required"}


def check_open_event(event: Event) -> None:
    """One event by the rules of Open Responses; those outside of its union must be among the known ones."""
    kind = event["type"]
    assert kind in UNION | OUTSIDE, f"{kind} is outside of the closed union"
    assert type(event["sequence_number"]) is int
    if kind == "error":
        check_open_error(event)
    if "response" in event:
        check_open_response(event["response"])
    if "item" in event:
        check_open_item(event["item"])
    for part in [event["part"]] if "part" in event else []:
        _check_part(part)


def check_open_error(event: Event) -> None:
    """Status, code and message are demanded; the code is a string even where OpenAI says null."""
    assert type(event["status"]) is int
    assert type(event["error"]["code"]) is str
    assert type(event["error"]["message"]) is str


def check_open_response(response: Mapping[str, Any]) -> None:
    """A response object, snapshots included: nothing is missing, and a number is a number."""
    check_response(response)
    for name in NUMBERS:
        assert type(response[name]) in (int, float), f"{name} is {response[name]!r}"
    assert type(response["top_logprobs"]) is int
    choice = response["tool_choice"]
    if isinstance(choice, str):
        assert choice in STRING_CHOICES
    else:
        assert choice["type"] in ("function", "custom", "allowed_tools"), choice
    if response["reasoning"] is not None:
        assert {"effort", "summary"} <= response["reasoning"].keys()
    assert response["truncation"] in ("auto", "disabled")
    for item in response["output"]:
        check_open_item(item)


def check_open_item(item: Mapping[str, Any]) -> None:
    """An output item: absent is left out, names and call ids are short and plain."""
    assert item["type"] in ITEMS | ITEMS_OUTSIDE, item["type"]
    assert None not in item.values(), item
    if "call_id" in item:
        assert 1 <= len(item["call_id"]) <= 64
        assert NAME.match(item["name"]), item["name"]
    for part in (*item.get("content", ()), *item.get("summary", ())):
        _check_part(part)


def _check_part(part: Mapping[str, Any]) -> None:
    match part["type"]:
        case "output_text":
            assert type(part["text"]) is str
            assert type(part["annotations"]) is list
            assert type(part["logprobs"]) is list
        case "refusal":
            assert type(part["refusal"]) is str
        case kind:
            assert kind in ("reasoning_text", "summary_text"), kind
            assert type(part["text"]) is str
