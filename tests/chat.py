"""What a client of Chat Completions reads: chunks checked in their order, and put together as clients do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import MODEL, Answer, Served, ServedProcess, fetch

CHAT = "/v1/chat/completions"
BASH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


async def ask(served: Served | ServedProcess, messages: Any = HELLO, **fields: Any) -> Answer:
    """One request for a completion."""
    return await fetch(served, "POST", CHAT, {"model": MODEL, "messages": messages, **fields})


def script(path: Path, *turns: dict[str, Any]) -> str:
    """A script for the engine, as a file."""
    file = path / "script.json"
    file.write_text(json.dumps({"turns": turns}))
    return str(file)


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    """The chunks of a whole stream; comments are left out."""
    blocks = body.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""], blocks[-2:]
    lines = [block for block in blocks[:-2] if not block.startswith(":")]
    assert all(line.startswith("data: {") for line in lines), lines
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def check_order(chunks: Sequence[dict[str, Any]], *, wants_usage: bool = False) -> None:
    """The order of chunks as a machine with these states: role, deltas, annotations, finish, usage."""
    heads = {(one["id"], one["object"], one["created"], one["model"]) for one in chunks}
    assert len(heads) == 1, heads
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert chunks[0]["object"] == "chat.completion.chunk"
    if wants_usage:
        *chunks, last = chunks
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] > 0
        assert all(one["usage"] is None for one in chunks)
    else:
        assert not any("usage" in one for one in chunks)
    choices = [one["choices"] for one in chunks]
    assert all(len(one) == 1 and one[0]["index"] == 0 for one in choices)
    (first,), *_, (finish,) = choices
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert finish["delta"] == {}
    assert finish["finish_reason"] is not None
    calls: list[str] = []
    state = "deltas"
    for (choice,) in choices[1:-1]:
        assert choice["finish_reason"] is None
        assert state != "annotations", "nothing follows the annotations"
        ((name, delta),) = choice["delta"].items()
        if name == "tool_calls":
            (call,) = delta
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append(call["type"])
                inner = call[call["type"]]
                assert [*inner.values()][1] == ""
            else:
                # Only the newest call is written.
                assert call["index"] == len(calls) - 1
                (written,) = call[calls[-1]].values()
                assert isinstance(written, str)
        elif name == "annotations":
            state = "annotations"
        else:
            assert name in ("content", "reasoning_content", "refusal", "function_call"), name
    if calls and finish["finish_reason"] not in ("length", "content_filter"):
        assert finish["finish_reason"] == "tool_calls"


def joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The choice that these chunks are together, as a completion has it."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    calls: list[dict[str, Any]] = []
    logprobs: list[Any] = []
    reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            logprobs += (choice["logprobs"] or {"content": []})["content"]
            reason = choice["finish_reason"] or reason
            for name, delta in choice["delta"].items():
                if name == "tool_calls":
                    _join_call(calls, delta[0])
                elif name == "function_call":
                    _join(message.setdefault(name, {}), delta)
                elif name == "annotations":
                    message[name] = delta
                elif name != "role":
                    message[name] = (message.get(name) or "") + delta
    if calls:
        message["tool_calls"] = calls
    if calls or "function_call" in message:
        message["content"] = message["content"] or None
    return {"message": message, "logprobs": logprobs, "finish_reason": reason}


def _join_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    if "id" in delta:
        calls.append({name: value for name, value in delta.items() if name != "index"})
    else:
        _join(calls[delta["index"]][calls[delta["index"]]["type"]], delta[calls[-1]["type"]])


def _join(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, text in delta.items():
        whole[name] = whole.get(name, "") + text


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice without what differs from turn to turn."""
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [call | {"id": ""} for call in message["tool_calls"]]
    return {
        "message": message,
        "logprobs": (choice["logprobs"] or []),
        "finish_reason": choice["finish_reason"],
    }
