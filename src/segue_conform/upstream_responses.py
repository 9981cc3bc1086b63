"""How does the scripted upstream answer a gateway that speaks the Responses API to its engine?

As an engine's own endpoint does: without state, the whole history in each request. Items become messages, in which a
script may stand; a step becomes the events of one response.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count

from segue_conform.case import Json

ROLES = {"function_call": "assistant", "function_call_output": "tool"}


def messages_of(body: Json) -> list[Json]:
    """The request as messages of a chat."""
    given = body.get("input") or []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    head = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    return [*head, *(_message(item) for item in items if item.get("type") != "reasoning")]


def _message(item: Json) -> Json:
    kind = item.get("type") or "message"
    role = ROLES.get(kind) or item.get("role")
    content = item.get("output") if kind == "function_call_output" else item.get("content")
    calls = [{"function": {"name": item["name"]}}] if kind == "function_call" else []
    return {"role": role, "content": content, "tool_calls": calls}


def as_chat(body: Json) -> Json:
    """What a step needs to know of the request, as a chat request would say it."""
    choice = body.get("tool_choice")
    return {
        "messages": messages_of(body),
        "tools": [{"function": tool} for tool in body.get("tools") or []],
        "tool_choice": {"function": choice} if isinstance(choice, dict) else choice,
        "max_tokens": body.get("max_output_tokens"),
        "response_format": (body.get("text") or {}).get("format"),
    }


def output_of(step: Json, number: int) -> list[Json]:
    """The items of a step."""
    items = list[Json]()
    if step.get("reasoning"):
        content = [{"type": "reasoning_text", "text": step["reasoning"]}]
        items.append({"type": "reasoning", "summary": [], "content": content})
    if step.get("text") is not None:
        part = {"type": "output_text", "text": step["text"], "annotations": [], "logprobs": []}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    for at, call in enumerate(step.get("calls", [])):
        arguments = json.dumps(call.get("arguments", {}))
        call_id = f"call_{number}_{at}"
        items.append(
            {
                "type": "function_call",
                "call_id": call_id,
                "name": call["name"],
                "arguments": arguments,
            }
        )
    status = "incomplete" if step.get("finish") == "length" else "completed"
    return [
        {"id": f"item_{number}_{at}", "status": status, **item} for at, item in enumerate(items)
    ]


def response_of(body: Json, step: Json, number: int) -> Json:
    """The response when it has ended."""
    is_cut = step.get("finish") == "length"
    written = max(1, len(str(step.get("text", ""))) // 4)
    return {
        "id": f"resp_{number:032x}",
        "object": "response",
        "created_at": 0,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": body.get("model"),
        "output": output_of(step, number),
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "truncation": "disabled",
        "background": False,
        "max_output_tokens": body.get("max_output_tokens"),
        "previous_response_id": None,
        "service_tier": "auto",
        "text": body.get("text") or {"format": {"type": "text"}},
        "usage": {
            "input_tokens": 20,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 20 + written,
        },
    }


def events_of(response: Json, size: int = 6) -> Iterator[Json]:
    """The events of that response, its texts in pieces of this many characters."""
    numbers = count()
    begun = {
        **response,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    for kind in ("created", "in_progress"):
        yield {"type": f"response.{kind}", "response": begun, "sequence_number": next(numbers)}
    for place, item in enumerate(response["output"]):
        for event in _events_of_item(item, size):
            yield {**event, "output_index": place, "sequence_number": next(numbers)}
    end = f"response.{response['status']}"
    yield {"type": end, "response": response, "sequence_number": next(numbers)}


def _events_of_item(item: Json, size: int) -> Iterator[Json]:
    empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    yield {"type": "response.output_item.added", "item": {**item, **empty, "status": "in_progress"}}
    where = {"item_id": item["id"]}
    if item["type"] == "function_call":
        kind, whole = "response.function_call_arguments", item["arguments"]
        yield from (
            {"type": f"{kind}.delta", "delta": piece, **where} for piece in _pieces(whole, size)
        )
        yield {"type": f"{kind}.done", "arguments": whole, "name": item["name"], **where}
    else:
        yield from _events_of_part(item["content"][0], {**where, "content_index": 0}, size)
    yield {"type": "response.output_item.done", "item": item}


def _events_of_part(part: Json, where: Json, size: int) -> Iterator[Json]:
    kind = f"response.{part['type']}"
    extra: Json = {"logprobs": []} if part["type"] == "output_text" else {}
    yield {"type": "response.content_part.added", "part": {**part, "text": ""}, **where}
    yield from (
        {"type": f"{kind}.delta", "delta": piece, **extra, **where}
        for piece in _pieces(part["text"], size)
    )
    yield {"type": f"{kind}.done", "text": part["text"], **extra, **where}
    yield {"type": "response.content_part.done", "part": part, **where}


def _pieces(text: str, size: int) -> Iterator[str]:
    return (text[at : at + size] for at in range(0, len(text), size))
