"""The input of a custom tool, read while it is written: cutting its JSON anywhere changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.readers.call_json import InputReader
from tests.support import serving, wire

TEXTS = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from('"\\/\n😀é{}')))
# Anything that looks like the JSON of a string, broken or not.
BROKEN = st.lists(
    st.sampled_from(("a", '"', "\\", "\\u", "d83d", "\\ude00", "0041", "\\n", "\n", "}", "12"))
).map("".join)


def read(pieces: list[str]) -> str:
    reader = InputReader()
    return "".join(map(reader.feed, pieces)) + reader.close()


@given(TEXTS, st.booleans(), st.sampled_from(("", " ", "\n\t")))
def test_input_is_what_json_says(text: str, is_ascii: bool, space: str) -> None:
    written = json.dumps(
        {"input": text}, ensure_ascii=is_ascii, separators=(",", f"{space}:{space}")
    )
    assert msgspec.json.decode(written, type=dict[str, str])["input"] == text
    assert read(list(written)) == read([written]) == text
    for cut in range(len(written) + 1):
        assert read([written[:cut], written[cut:]]) == text
    # Of a call that is cut off there is as much as had come.
    begin = written.index(":") + len(space) + 2
    assert all(text.startswith(read([written[:cut]])) for cut in range(begin, len(written)))


@given(BROKEN, st.sampled_from(('{"input": "', '{ "input":"', '{"in', "")))
def test_broken_json_reads_the_same_however_it_is_cut(rest: str, opening: str) -> None:
    written = opening + rest
    whole = read([written])
    assert read(list(written)) == whole
    for cut in range(len(written) + 1):
        assert read([written[:cut], written[cut:]]) == whole


@pytest.mark.parametrize(
    "arguments, meant",
    [
        ('{"other": 1, "input": "x"}', "x"),
        ('{"input": 7}', '{"input": 7}'),
        ("plain words", "plain words"),
        ('{"input": "a\\qb"}', "a\\qb"),
        ('{"input": "a\\ud83d!"}', "a\\ud83d!"),
        ('{"input": "line\nline"}', "line\nline"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a", "more": [', "a"),
        ("", ""),
    ],
)
def test_arguments_that_are_odd_are_handed_over_as_well_as_can_be(
    arguments: str, meant: str
) -> None:
    assert read([arguments]) == meant


def test_input_is_said_while_it_is_written() -> None:
    reader = InputReader()
    pieces = ["{", '"input', '": "*** Be', "gin\\", "n+ a", '"}']
    assert [reader.feed(piece) for piece in pieces] == ["", "", "*** Be", "gin", "\n+ a", ""]
    assert reader.close() == ""


async def test_client_sees_a_patch_while_it_is_written(tmp_path: Path) -> None:
    patch = "*** Begin Patch\n" + '+ a "line"\n' * 20
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"calls": [{"name": "patch", "input": patch}]}]}))
    async with serving(script=str(script), tps=2_000) as served, wire(served) as socket:
        await socket.create(input="Go", tools=[{"type": "custom", "name": "patch"}])
        events = await socket.events()
    kind = "response.custom_tool_call_input.delta"
    deltas = [event["delta"] for event in events if event["type"] == kind]
    assert len(deltas) > 20
    assert "".join(deltas) == events[-1]["response"]["output"][0]["input"] == patch
