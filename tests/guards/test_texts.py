"""Which words of items and of a head are there to be looked at."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from segue.guards.texts import texts_of
from segue.wire.codec import decode_item
from segue.wire.files import text_of_file

PICTURE = "data:image/png;base64,iVBORw0KGgo="


def words(item: dict[str, Any]) -> list[str]:
    return texts_of([decode_item(json.dumps(item).encode(), "input[0]")], text_of_file)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"role": "user", "content": "Hello."}, ["Hello."]),
        ({"role": "user", "content": "data: of a kind"}, ["data: of a kind"]),
        (
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "See"},
                    {"type": "input_image", "image_url": PICTURE},
                    {"type": "input_image", "image_url": "https://a.example/b.png"},
                ],
            },
            ["See", "https://a.example/b.png"],
        ),
        (
            {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
            ["sun"],
        ),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":1}'},
            ["f", '{"a":1}'],
        ),
        (
            {
                "type": "shell_call_output",
                "call_id": "c",
                "output": [
                    {"stdout": "out", "stderr": "err", "outcome": {"type": "exit", "exit_code": 0}}
                ],
            },
            ["out", "err"],
        ),
    ],
)
def test_words_of_an_item_are_found_wherever_they_stand(
    item: dict[str, Any], expected: list[str]
) -> None:
    assert words(item) == expected


def test_file_is_read_as_the_model_reads_it() -> None:
    data = base64.b64encode(b"Secret plans.").decode()
    part = {"type": "input_file", "filename": "plan.txt", "file_data": data}
    found = words({"role": "user", "content": [part]})
    assert sorted(found) == ["Secret plans.", "plan.txt"]
