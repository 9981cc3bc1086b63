"""What did a server answer, whatever API was asked? One request of Messages, Chat or Responses, one `Reply`.

The body is written before the clock starts. The time to the first token is the time to the first text, thought or
argument that is not empty.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from segue_bench.client import ClientConnection, read_body, read_chunk, read_head

Body = dict[str, Any]


class ExchangeFailed(Exception):
    """The server refused, or its answer broke off."""


@dataclass(slots=True)
class ReplyCall:
    """A call of a tool, its arguments as the server spelt them (on Messages: as JSON of the input)."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Reply:
    """An answer, put together from its events."""

    id: str = ""
    text: str = ""
    # Each thought with its signature.
    thoughts: list[list[str]] = field(default_factory=list)
    calls: list[ReplyCall] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    ttft_s: float = 0.0
    turn_s: float = 0.0
    sent_bytes: int = 0
    events: int = 0
    is_ended: bool = False


def exchange(
    connection: ClientConnection, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> Reply:
    """Ask, and read the answer to its end."""
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"POST {path} HTTP/1.1\r\n{connection.address.headers()}{more}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    reply, began = Reply(sent_bytes=len(head) + len(body)), time.perf_counter()
    connection.send(head + body)
    answer = read_head(connection)
    if answer.status != 200:
        words = read_body(connection, answer).decode(errors="replace")
        raise ExchangeFailed(f"{path}: status {answer.status}: {words[:600]}")
    read = _READERS[path.partition("?")[0]]
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        for event in _events(connection):
            had = reply.text, len(reply.thoughts), len(reply.calls)
            read(reply, event)
            reply.events += 1
            if not reply.ttft_s and had != (reply.text, len(reply.thoughts), len(reply.calls)):
                reply.ttft_s = time.perf_counter() - began
    else:
        _WHOLE[path.partition("?")[0]](reply, json.loads(read_body(connection, answer)))
    reply.turn_s = time.perf_counter() - began
    reply.ttft_s = reply.ttft_s or reply.turn_s
    if not reply.is_ended:
        raise ExchangeFailed(f"{path}: the answer has no end: {reply}")
    return reply


def _events(connection: ClientConnection) -> Iterator[Body]:
    rest = b""
    while chunk := read_chunk(connection):
        *whole, rest = (rest + chunk.replace(b"\r\n", b"\n")).split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data: ").rpartition(b"\ndata: ")[2]
            if data.startswith(b"{"):
                value: Body = json.loads(data)
                if "error" in value and value.get("type") in (None, "error"):
                    raise ExchangeFailed(data.decode()[:600])
                yield value


# --- Messages -------------------------------------------------------------------------------------


def _messages_event(reply: Reply, event: Body) -> None:
    match event["type"]:
        case "message_start":
            reply.id = event["message"]["id"]
        case "content_block_start":
            _block(reply, event["content_block"])
        case "content_block_delta":
            delta = event["delta"]
            match delta["type"]:
                case "text_delta":
                    reply.text += delta["text"]
                case "thinking_delta":
                    reply.thoughts[-1][0] += delta["thinking"]
                case "signature_delta":
                    reply.thoughts[-1][1] = delta["signature"]
                case "input_json_delta":
                    reply.calls[-1].arguments += delta["partial_json"]
        case "message_delta":
            _messages_usage(reply, event["usage"])
        case "message_stop":
            reply.is_ended = True


def _block(reply: Reply, block: Body) -> None:
    match block["type"]:
        case "text":
            reply.text += block["text"]
        case "thinking":
            reply.thoughts.append([block["thinking"], block.get("signature") or ""])
        case "tool_use":
            given = json.dumps(block["input"]) if block.get("input") else ""
            reply.calls.append(ReplyCall(block["id"], block["name"], given))


def _messages_usage(reply: Reply, usage: Body) -> None:
    read = usage.get("cache_read_input_tokens")
    created = usage.get("cache_creation_input_tokens") or 0
    reply.prompt_tokens = (usage.get("input_tokens") or 0) + created + (read or 0)
    reply.cached_tokens, reply.output_tokens = read, usage["output_tokens"]


def _messages_whole(reply: Reply, message: Body) -> None:
    reply.id, reply.is_ended = message["id"], True
    for block in message["content"]:
        _block(reply, block)
    _messages_usage(reply, message["usage"])


# --- Chat -----------------------------------------------------------------------------------------


def _chat_event(reply: Reply, chunk: Body) -> None:
    reply.id = chunk["id"]
    if chunk.get("usage"):
        _chat_usage(reply, chunk["usage"])
    for choice in chunk["choices"]:
        reply.is_ended |= choice.get("finish_reason") is not None
        _said(reply, choice["delta"])
        for delta in choice["delta"].get("tool_calls") or ():
            if delta.get("id"):
                reply.calls.append(ReplyCall(delta["id"], delta["function"]["name"]))
            reply.calls[delta["index"]].arguments += delta["function"].get("arguments") or ""


def _said(reply: Reply, said: Body) -> None:
    reply.text += said.get("content") or ""
    if thought := said.get("reasoning_content") or said.get("reasoning"):
        if not reply.thoughts:
            reply.thoughts.append(["", ""])
        reply.thoughts[0][0] += thought


def _chat_usage(reply: Reply, usage: Body) -> None:
    reply.prompt_tokens, reply.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _chat_whole(reply: Reply, completion: Body) -> None:
    reply.id, reply.is_ended = completion["id"], True
    message = completion["choices"][0]["message"]
    _said(reply, message)
    for call in message.get("tool_calls") or ():
        function = call["function"]
        reply.calls.append(ReplyCall(call["id"], function["name"], function["arguments"]))
    _chat_usage(reply, completion["usage"])


# --- Responses ------------------------------------------------------------------------------------


def _responses_event(reply: Reply, event: Body) -> None:
    if event["type"] in ("response.completed", "response.incomplete"):
        _responses_whole(reply, event["response"])
    elif event["type"] == "response.failed":
        raise ExchangeFailed(json.dumps(event["response"]["error"]))
    elif event["type"].endswith(".delta") and not reply.ttft_s:
        # Only that something came; the whole is in the last event.
        reply.thoughts.append(["", ""])


def _responses_whole(reply: Reply, response: Body) -> None:
    reply.id, reply.is_ended, reply.thoughts = response["id"], True, []
    for item in response["output"]:
        if item["type"] == "message":
            reply.text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "function_call":
            reply.calls.append(ReplyCall(item["call_id"], item["name"], item["arguments"]))
    usage = response["usage"]
    reply.prompt_tokens, reply.output_tokens = usage["input_tokens"], usage["output_tokens"]
    reply.cached_tokens = usage["input_tokens_details"]["cached_tokens"]


_READERS = {
    "/v1/messages": _messages_event,
    "/v1/chat/completions": _chat_event,
    "/v1/responses": _responses_event,
}
_WHOLE = {
    "/v1/messages": _messages_whole,
    "/v1/chat/completions": _chat_whole,
    "/v1/responses": _responses_whole,
}
