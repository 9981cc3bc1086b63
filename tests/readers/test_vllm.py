"""The same answers, read as vLLM 0.32 reads them: `vllm.json` records what its tool parsers found.

Content is compared without blanks at its end: newlines before a mark belong to the mark here, and only some of vLLM's
parsers leave them out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from segue.dialects.template import template_dialect
from segue.vocabularies.chat_template import ChatTemplate
from tests.contracts.dialect import Heard, heard, smollm2
from tests.contracts.dialect import read as read_by
from tests.dialects.templates import encoded_whole
from tests.models.assets import template
from tests.readers.test_formats import END, NESTED, OFFERING, called, read

ROWS = json.loads((Path(__file__).parent / "vllm.json").read_text())
LOOKED: list[object] = ["get_weather", {"city": "Rome"}]
OTHER: list[object] = ["other", {"a": "1"}]
TYPES = {
    "city": "5", "days": "many", "near": None, "is_live": True, "tags": "[1, 2", "where": {"a": None}, "other": "7",
}  # fmt: skip
# Formats that have no row: they are worked out from this template, which has these marks.
DERIVED = {"apertus": ("Apertus-8B-Instruct", ("<|tools_prefix|>", "<|tools_suffix|>"))}
# What is meant to differ: the calls that we find.
DIFFERENT: dict[tuple[str, str], list[list[object]]] = {
    # A schema may say a type by reference; vLLM leaves such a value a string.
    **{(name, "one"): [["get_weather", NESTED]] for name in ("xml", "seed", "glm", "minimax-m2")},
    # An object in Python's notation, as Seed-OSS writes it, is an object.
    **{(name, "types"): [["get_weather", TYPES]] for name in ("xml", "seed", "glm", "minimax-m2")},
    # Numbers and words inside lists and objects are no strings.
    ("gemma4", "one"): [["get_weather", NESTED]],
    # The call of an unknown tool reaches the client, as in all other formats.
    **{(name, "unknown tool"): [OTHER] for name in ("glm", "minimax-m2")},
    # A call may follow text: it has a mark.
    ("pythonic", "text before"): [LOOKED],
    # A call has no mark and is the whole answer: it is not looked for inside of text.
    ("llama3", "text before"): [],
    # The call of a tool that nobody knows has no mark either.
    ("llama3", "unknown tool"): [],
}  # fmt: skip


def read_derived(name: str, text: str) -> list[Heard]:
    source, marks = DERIVED[name]
    words = smollm2(*marks)
    dialect = template_dialect(words, ChatTemplate(template(source), end=END), is_derived=True)
    return heard(read_by(dialect, OFFERING, [encoded_whole(words, text, [*marks])]))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['format']} {row['story']}")
def test_answer_is_read_as_vllm_reads_it(row: dict[str, object]) -> None:
    name, story, text = str(row["format"]), str(row["story"]), str(row["text"])
    found = called(read_derived(name, text) if name in DERIVED else read(name, text))
    calls = [[tool, arguments] for tool, arguments in found if tool != "message"]
    said = "".join(str(text) for tool, text in found if tool == "message")

    if (name, story) in DIFFERENT:
        assert calls == DIFFERENT[name, story] != row["calls"]
    else:
        assert calls == row["calls"]
        assert said.rstrip() == str(row["content"] or "").rstrip()
