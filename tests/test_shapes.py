"""Does the check of shapes see what is wrong? Answers that fit, and the same with a fault each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import shapes

USAGE = {
    "cache_creation": None,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 5,
    "inference_geo": None,
    "input_tokens": 1,
    "output_tokens": 2,
    "output_tokens_details": None,
    "server_tool_use": None,
    "service_tier": "standard",
    "speed": None,
}
MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "Hi", "citations": None}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "stop_details": None,
    "container": None,
    "diagnostics": None,
    "usage": USAGE,
}
CHUNK: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {"reasoning_content": "So."}, "finish_reason": None}],
}
DELTA = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}


def changed(value: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**value, **fields}


def test_fields_outside_the_types_and_values_that_do_not_fit_are_found_by_both(
    tmp_path: Path,
) -> None:
    good = [("messages answer", MESSAGE), ("messages event", DELTA), ("chat event", CHUNK)]
    bad = {
        "an unknown stop reason": ("messages answer", changed(MESSAGE, stop_reason="done")),
        "a number for a text": ("messages event", changed(DELTA, index="0")),
        "a field of no type": ("messages answer", changed(MESSAGE, surprise=1)),
        "a choice without its place": ("chat event", changed(CHUNK, choices=[{"delta": {}}])),
        "a field of no type in chat": ("chat event", changed(CHUNK, surprise=1)),
    }
    wrong = shapes.misfits([*good, *bad.values()], tmp_path)
    by_python = [line for line in wrong if "shapes.ts(" not in line]
    by_typescript = [line for line in wrong if "shapes.ts(" in line]
    assert len(by_python) == len(bad), by_python
    # A line of the file for each shape, after two lines of imports.
    faulty = set(range(3 + len(good), 3 + len(good) + len(bad)))
    assert {int(line.partition("(")[2].partition(",")[0]) for line in by_typescript} == faulty


@pytest.fixture
def noted() -> dict[tuple[str, bytes], None]:
    shapes.noted.clear()
    return shapes.noted


def test_answers_are_noted_by_what_they_are(noted: dict[tuple[str, bytes], None]) -> None:
    stream = {"content-type": "text/event-stream"}
    plain = {"content-type": "application/json"}
    events = b'event: ping\ndata: {"type":"ping"}\n\nevent: error\ndata: {"type":"error"}\n\n'
    shapes.note("/v1/messages", {}, 200, stream, events + b'event: x\ndata: {"type":"x"}\n\n')
    shapes.note("/v1/messages?beta=true", {}, 200, plain, b"{}")
    shapes.note("/v1/models", {"Anthropic-Version": "x"}, 200, plain, b'{"data":[]}')
    shapes.note("/v1/chat/completions", {}, 400, plain, json.dumps({"error": {}}).encode())
    shapes.note("/v1/chat/completions", {}, 200, stream, b"data: {}\n\n: ping\n\ndata: [DONE]\n\n")
    shapes.note("/v1/models", {}, 200, plain, b"{}")
    shapes.note("/v1/responses", {}, 200, plain, b"{}")
    assert [kind for kind, _ in noted] == [
        "messages error",
        "messages event",
        "messages beta answer",
        "messages models",
        "chat error",
        "chat event",
    ]
    noted.clear()
