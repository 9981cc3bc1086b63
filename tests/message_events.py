"""What a client of the Messages API reads: the order of its events as a machine, and events put together as SDKs do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.support import MODEL, Answer, Served, ServedProcess, fetch

MESSAGES = "/v1/messages"
VERSION = {"anthropic-version": "2023-06-01"}
BASH: dict[str, Any] = {
    "name": "bash",
    "description": "Runs a command",
    "input_schema": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    },
}
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
# What each type of block may get, and whether it has to end with a signature.
DELTAS = {
    "text": {"text_delta", "citations_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
    "server_tool_use": {"input_json_delta"},
    "mcp_tool_use": {"input_json_delta"},
}
PROMPT = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")


async def ask(
    served: Served | ServedProcess,
    messages: Any = HELLO,
    headers: dict[str, str] | None = None,
    path: str = MESSAGES,
    **fields: Any,
) -> Answer:
    """One request for a message."""
    body = {"model": MODEL, "max_tokens": 1_000, "messages": messages, **fields}
    return await fetch(served, "POST", path, body, VERSION | (headers or {}))


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream, by their framing: every event has its name, and there is no other end."""
    blocks = body.decode().split("\n\n")
    assert blocks[-1] == "", blocks[-1]
    found: list[dict[str, Any]] = []
    for block in blocks[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def prompt_of(usage: dict[str, Any]) -> int:
    """The length of the prompt, by its three parts."""
    return sum(usage[name] for name in PROMPT)


def joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that these events make, as an SDK puts it together; every step is checked on the way.

    message_start, then blocks one after the other without a gap, then message_delta and message_stop. Pings anywhere
    after the start.
    """
    assert events[0]["type"] == "message_start"
    message: dict[str, Any] = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    block: dict[str, Any] | None = None
    signatures = 0
    pieces: list[str] = []
    state = "blocks"
    for event in events[1:]:
        assert state != "stopped", event
        match event["type"]:
            case "ping":
                continue
            case "content_block_start":
                assert (block, state) == (None, "blocks")
                assert event["index"] == len(message["content"])
                block, pieces, signatures = event["content_block"], [], 0
                if block["type"] in ("tool_use", "server_tool_use", "mcp_tool_use"):
                    assert block["input"] == {}
                if block["type"] == "thinking":
                    assert (block["thinking"], block["signature"]) == ("", "")
            case "content_block_delta":
                assert block is not None
                assert event["index"] == len(message["content"])
                delta = event["delta"]
                assert delta["type"] in DELTAS[block["type"]]
                match delta["type"]:
                    case "text_delta":
                        assert delta["text"]
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        assert not signatures
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        signatures += 1
                        block["signature"] = delta["signature"]
                    case "citations_delta":
                        block["citations"] = [*(block["citations"] or []), delta["citation"]]
                    case _:
                        pieces.append(delta["partial_json"])
            case "content_block_stop":
                assert block is not None
                assert event["index"] == len(message["content"])
                if pieces:
                    block["input"] = json.loads("".join(pieces))
                assert block["type"] != "text" or block["text"], "an empty text has no block"
                assert block["type"] != "thinking" or signatures == 1
                message["content"].append(block)
                block = None
            case "message_delta":
                assert (block, state) == (None, "blocks")
                state = "ending"
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case "message_stop":
                assert state == "ending"
                state = "stopped"
            case other:
                raise AssertionError(f"an event {other} among those of a message")
    assert state == "stopped"
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The same message without what differs between two turns."""
    usage = {key: value for key, value in message["usage"].items() if "cache" not in key}
    content = _plain(message["content"])
    return {**message, "id": "", "content": content, "usage": usage | {"input_tokens": 0}}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        own = ("id", "signature", "tool_use_id", "encrypted_content")
        return {key: _plain(each) for key, each in value.items() if key not in own}
    return value


async def both(served: Served, messages: Any = HELLO, **fields: Any) -> dict[str, Any]:
    """The message, which is the same as JSON and as a stream."""
    whole = await ask(served, messages, **fields)
    assert whole.status == 200, whole.json
    streamed = await ask(served, messages, stream=True, **fields)
    assert streamed.status == 200, streamed.body
    message = joined(events_of(streamed.body))
    assert without_ids(message) == without_ids(whole.json)
    assert prompt_of(message["usage"]) == prompt_of(whole.json["usage"])
    found: dict[str, Any] = whole.json
    return found
