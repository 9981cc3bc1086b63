"""Recordings of real clients can be read, and hold no texts of other people."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.clients.recordings import FOLDER, MARK, marked, read_recording, recordings

TEXTS = ("text", "description", "content")


@pytest.mark.parametrize("name", recordings())
def test_recording_is_a_conversation_that_grows(name: str) -> None:
    exchanges = read_recording(name)
    assert len(exchanges) > 3
    sizes = [len(exchange.body["messages"]) for exchange in exchanges]
    assert max(sizes) == sizes[-1] > 5
    for exchange in exchanges:
        assert exchange.turn
        assert "§" not in json.dumps(exchange.body, ensure_ascii=False)


@pytest.mark.parametrize("name", recordings())
def test_long_texts_are_marks_or_our_own(name: str) -> None:
    own = (
        "The tests in this folder fail.",
        "The first price was skipped.",
        "Count the files",
        "You are a coding agent",
    )

    def check(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for name, each in value.items():
                check(each, name)
        elif isinstance(value, list):
            for each in value:
                check(each, key)
        elif key in TEXTS and isinstance(value, str) and not value.startswith(own):
            for line in MARK.sub("", value).splitlines():
                assert len(line) <= 32 or re.match(
                    "x-anthropic-billing-header|<total_tokens>", line
                )

    check(json.loads((FOLDER / f"{name}.json").read_text())["values"], "")


def test_same_line_has_the_same_mark_and_a_filler_of_its_length() -> None:
    line = "A sentence that somebody else has written."
    once, twice = marked([f"{line}\nMore of it, which is also long.", line], frozenset())
    assert once.startswith(twice)
    assert MARK.fullmatch(twice)
    assert marked({"name": line, "text": line}, frozenset())["name"] == line
