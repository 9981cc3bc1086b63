"""What items and tools are said to hold is what they hold, however short the values in their lists are."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from segue.wire.codec import decode_item, decode_tools
from segue.wire.items import weigh

COUNT = 2_000
# Twice as much would refuse what there is room for; less is what the limit of all memory does not know of.
HELD_MIN, HELD_MAX = 0.45, 1.1
CALL = {"call_id": "c"}
SHORT = ["ls"] * COUNT
NAMES = {f"name{n}": f"value{n}" for n in range(COUNT)}
FUNCTIONS = [{"type": "function", "name": f"f{n:05}"} for n in range(COUNT)]
OUTPUT = {"stdout": "ab", "stderr": "", "outcome": {"type": "timeout"}}
LISTS: dict[str, dict[str, Any]] = {
    "commands": {"type": "shell_call", **CALL, "action": {"commands": SHORT}},
    "outputs": {"type": "shell_call_output", **CALL, "output": [OUTPUT] * COUNT},
    "words": {"type": "local_shell_call", **CALL, "action": {"type": "exec", "command": SHORT}},
    "variables": {
        "type": "local_shell_call",
        **CALL,
        "action": {"type": "exec", "command": [], "env": NAMES},
    },
    "queries": {"type": "file_search_call", "id": "f", "queries": SHORT},
    "tools of a server": {
        "type": "mcp_list_tools",
        "id": "l",
        "server_label": "s",
        "tools": [{"name": "ab"}] * COUNT,
    },
    "annotations": {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "x", "annotations": [{}] * COUNT}],
    },
    "logprobs": {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "x", "logprobs": [{}] * COUNT}],
    },
    "parts": {"role": "user", "content": [{"type": "input_text", "text": "ab"}] * COUNT},
    "files": {"role": "user", "content": [{"type": "input_file", "file_data": "data:"}] * COUNT},
    "parts of an output": {
        "type": "function_call_output",
        **CALL,
        "output": [{"type": "input_text", "text": "ab"}] * COUNT,
    },
    "summaries": {"type": "reasoning", "summary": [{"type": "summary_text", "text": "ab"}] * COUNT},
    "additional tools": {"type": "additional_tools", "tools": FUNCTIONS},
    "tools of a namespace": {
        "type": "additional_tools",
        "tools": [{"type": "namespace", "name": "n", "tools": FUNCTIONS}],
    },
    "callers of a tool": {
        "type": "additional_tools",
        "tools": [{"type": "function", "name": "f", "allowed_callers": SHORT}],
    },
    "a text": {"role": "user", "content": "word " * 10 * COUNT},
}


def held(make: Callable[[], object]) -> int:
    """What stays in memory of what is made."""
    gc.collect()
    tracemalloc.start()
    made = make()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert made is not None
    return size


@pytest.mark.parametrize("name", LISTS)
def test_item_is_weighed_with_the_values_of_its_lists(name: str) -> None:
    raw = json.dumps(LISTS[name], separators=(",", ":")).encode()
    weight = weigh([decode_item(raw, "x")])
    assert HELD_MIN < held(lambda: decode_item(raw, "x")) / weight < HELD_MAX


@pytest.mark.parametrize(
    "tools", [FUNCTIONS, [{"type": "namespace", "name": "n", "tools": FUNCTIONS}]]
)
def test_tools_are_weighed_with_their_definitions_and_offers(tools: list[Any]) -> None:
    raw = json.dumps(tools, separators=(",", ":")).encode()
    weight = decode_tools(raw, None)[0].held_bytes
    assert HELD_MIN < held(lambda: decode_tools(raw, None)) / weight < HELD_MAX
