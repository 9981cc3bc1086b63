"""The events of hosted calls against a table of what was recorded of OpenAI: names, order and fields.

Ids and texts differ, and are compared by their types. Where our events have a field more than the table, that is a
difference too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.keepers import FLAGS, containers_are_gone, keeper_of_the_file, sandboxes_can_be_made
from tests.scenarios.test_code_interpreter import AUTO, DONE, SHELL, SHOWN, python
from tests.scenarios.test_shell import run
from tests.scenarios.test_tools import asking, scripted

__all__ = ["containers_are_gone", "keeper_of_the_file", "sandboxes_can_be_made"]

Body = dict[str, Any]
TABLE: Body = json.loads(Path("tests/golden/hosted_events.json").read_text("utf-8"))
KINDS = {"str": str, "int": int, "list": list}


def differences(found: object, wanted: object, at: str) -> Iterator[str]:
    """Where a value differs from the table."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict) or found.keys() != wanted.keys():
            names = sorted(found) if isinstance(found, dict) else found
            yield f"{at} has {names}, and not {sorted(wanted)}"
            return
        for name, value in wanted.items():
            yield from differences(found[name], value, f"{at}.{name}")
        return
    word = str(wanted)
    if word in KINDS:
        is_so = type(found) is KINDS[word] and found != []
    else:
        literal = {"[]": [], "null": None}
        is_so = found == (literal[word] if word in literal else word.strip("'"))
    if not is_so:
        yield f"{at} is {found!r}, and not {word}"


def compared(events: list[Body], table: list[Body]) -> Iterator[str]:
    """How a stream differs from the table."""
    left = [{**event} for event in events]
    for row in table:
        wanted = {name: value for name, value in row.items() if name not in ("type", "many")}
        count = 0
        while left and left[0]["type"] == row["type"] and (count == 0 or row.get("many")):
            event = left.pop(0)
            fields = {key: event[key] for key in event if key not in ("type", "sequence_number")}
            yield from differences(fields, wanted, row["type"])
            count += 1
        if not count:
            yield f"{row['type']} is missing before {left[0]['type'] if left else 'the end'}"
    yield from (f"{event['type']} is too much" for event in left)


def of_call(told: list[Body]) -> list[Body]:
    """The events of the call: those before the answer, without heartbeats and the first two."""
    answer = max(event.get("output_index", 0) for event in told)
    return [event for event in told if event.get("output_index", answer) < answer]


@pytest.mark.parametrize("way", ["sse", "websocket"])
@pytest.mark.parametrize("tool", ["shell", "code_interpreter"])
async def test_stream_is_as_recorded(tool: str, way: str, tmp_path: Path) -> None:
    call = run("echo hello") if tool == "shell" else python("print('hello')\n6 * 7")
    definition = SHELL if tool == "shell" else AUTO
    async with scripted(tmp_path, call, DONE, **FLAGS) as served, asking(served, way) as ask:
        told = await ask({"input": "Go", "tools": [definition], **SHOWN})
    assert [*compared(of_call(told), TABLE[tool])] == []


def test_comparison_sees_what_differs() -> None:
    rows = [{"type": "a", "n": "int"}, {"type": "b", "many": True, "x": {"y": "''"}}]
    good = [{"type": "a", "n": 1}, {"type": "b", "x": {"y": ""}}, {"type": "b", "x": {"y": ""}}]
    assert [*compared(good, rows)] == []
    assert [*compared(good[1:], rows)] == ["a is missing before b"]
    assert [*compared([good[0], good[0], good[1]], rows)] == [
        "b is missing before a", "a is too much", "b is too much",
    ]  # fmt: skip
    assert [*compared([{"type": "a", "n": "1"}, good[1]], rows)] == ["a.n is '1', and not int"]
    assert [*compared([{"type": "a", "n": 1, "m": 2}, good[1]], rows)] == [
        "a has ['m', 'n'], and not ['n']"
    ]
    assert [*compared([good[0], {"type": "b", "x": {"y": "z"}}], rows)] == [
        "b.x.y is 'z', and not ''"
    ]
