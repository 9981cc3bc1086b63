"""What an item means: all its spellings have one digest, and no other meaning has it."""

from __future__ import annotations

from typing import Any

import pytest

from segue.resent.canonical import digest_of, digest_of_json
from segue.wire.items import Item
from tests.contracts import dialect as contract

Json = dict[str, Any]

USER: Json = {"type": "message", "role": "user", "content": "hi"}
PART: Json = {"type": "input_text", "text": "hi"}
SAID: Json = {"type": "message", "role": "assistant", "content": "so so"}
CALL: Json = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":1,"b":2}'}
BARE: Json = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT: Json = {"type": "function_call_output", "call_id": "c", "output": "x"}
IMAGE: Json = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
TOOLS: Json = {"type": "additional_tools", "tools": [{"type": "function", "name": "f"}]}
PATCH: Json = {
    "type": "apply_patch_call",
    "call_id": "c",
    "operation": {"type": "delete_file", "path": "p"},
}
REFERENCE: Json = {"type": "item_reference", "id": "one"}
THOUGHT: Json = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}


def item(fields: Json) -> Item:
    return contract.item(**fields)


@pytest.mark.parametrize(
    "first, second",
    [
        (USER, {**USER, "content": [PART], "id": "msg_1", "status": "completed"}),
        (USER, {**USER, "content": [{**PART, "prompt_cache_breakpoint": {"mode": "explicit"}}]}),
        (USER, dict(reversed(USER.items()))),
        (
            SAID,
            {
                **SAID,
                "content": [
                    {"type": "output_text", "text": text, "annotations": []}
                    for text in ("so", " so")
                ],
            },
        ),
        (CALL, {**CALL, "arguments": '{ "b": 2.0,\n "a": 1e0 }', "id": "fc_1"}),
        (CALL, {**CALL, "namespace": None, "unknown": True}),
        (BARE, {**BARE, "arguments": " "}),
        (
            OUTPUT,
            {**OUTPUT, "output": [{"type": "input_text", "text": "x"}], "status": "completed"},
        ),
        (TOOLS, {**TOOLS, "id": "one", "role": None}),
        (PATCH, {**PATCH, "id": "apc_1", "status": "completed"}),
        (THOUGHT, {**THOUGHT, "encrypted_content": "sealed", "id": "rs_1"}),
    ],
)
def test_spellings_of_one_meaning_have_one_digest(first: Json, second: Json) -> None:
    assert digest_of(item(first)) == digest_of(item(second))


@pytest.mark.parametrize(
    "first, second",
    [
        (USER, {**USER, "content": "hi "}),
        (USER, {**USER, "role": "developer"}),
        # Two texts keep their boundary.
        ({**USER, "content": [PART, PART]}, {**USER, "content": "hi\nhi"}),
        (
            {**USER, "content": [IMAGE]},
            {**USER, "content": [{**IMAGE, "image_url": "data:image/png;base64,AB"}]},
        ),
        (SAID, {**SAID, "phase": "commentary"}),
        (CALL, {**CALL, "call_id": "d"}),
        (CALL, {**CALL, "arguments": '{"a":1,"b":"2"}'}),
        (CALL, {**CALL, "arguments": '{"a":true,"b":2}'}),
        (CALL, {**CALL, "status": "incomplete"}),
        (CALL, {**CALL, "namespace": "n"}),
        ({**CALL, "arguments": "{"}, {**CALL, "arguments": "{ "}),
        (OUTPUT, {**OUTPUT, "output": "y"}),
        (OUTPUT, {**OUTPUT, "type": "custom_tool_call_output"}),
        (REFERENCE, {**REFERENCE, "id": "two"}),
        (THOUGHT, {**THOUGHT, "content": [{"type": "reasoning_text", "text": "no"}]}),
    ],
)
def test_another_meaning_has_another_digest(first: Json, second: Json) -> None:
    assert digest_of(item(first)) != digest_of(item(second))


@pytest.mark.parametrize(
    "arguments", ["[" * 5_000 + "]" * 5_000, "1" * 5_000, "1e999", '"\\ud800"']
)
def test_arguments_that_cannot_be_read_mean_themselves(arguments: str) -> None:
    odd = {**CALL, "arguments": arguments}
    assert digest_of(item(odd)) == digest_of(item({**odd, "id": "fc_1"}))
    assert digest_of(item(odd)) != digest_of(item({**odd, "arguments": f" {arguments}"}))


def test_tools_are_compared_as_json() -> None:
    assert digest_of_json(b'[{"a": 1, "b": 2}]') == digest_of_json(b'[{"b":2,"a":1.0}]')
    assert digest_of_json(b"[]") != digest_of_json(b"")
