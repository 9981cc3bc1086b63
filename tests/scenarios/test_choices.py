"""A client says which tools may be called, and how many: the scripted engine plays more, and is not heard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import MODEL, fetch, serving

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
OTHER = {**LOOK, "name": "other"}
CALLS = [{"name": "other", "arguments": {"n": 1}}, {"name": "look", "arguments": {"n": 2}}]


@pytest.fixture
def script(tmp_path: Path) -> str:
    """Two calls, then a long text that nobody should wait for."""
    path = tmp_path / "script.json"
    turn = {"text": "Well.", "calls": CALLS}
    path.write_text(json.dumps({"turns": [turn]}))
    return str(path)


async def outputs(script: str, **asked: Any) -> list[tuple[str, str]]:
    body = {"model": MODEL, "input": "Go.", "tools": [LOOK, OTHER], "store": False, **asked}
    async with serving(script=script) as served:
        answer = (await fetch(served, "POST", "/v1/responses", body)).json
    assert answer["status"] == "completed", answer
    return [(one["type"], one.get("name", "")) for one in answer["output"]]


async def test_client_that_allows_no_call_gets_text(script: str) -> None:
    assert await outputs(script, tool_choice="none") == [("message", "")]


async def test_client_that_allows_some_tools_gets_calls_of_those(script: str) -> None:
    choice = {"type": "allowed_tools", "mode": "auto"}
    choice["tools"] = [{"type": "function", "name": "look"}]  # type: ignore[assignment]
    found = await outputs(script, tool_choice=choice)
    assert found == [("message", ""), ("function_call", "look")]


async def test_client_that_wants_one_call_gets_one(script: str) -> None:
    found = await outputs(script, parallel_tool_calls=False)
    assert found == [("message", ""), ("function_call", "other")]
    both = await outputs(script)
    assert both == [("message", ""), ("function_call", "other"), ("function_call", "look")]


async def test_engine_that_talks_on_behind_the_one_call_is_not_waited_for(tmp_path: Path) -> None:
    """It would take minutes; the response is complete all the same."""
    path = tmp_path / "script.json"
    calls = [CALLS[0], *[CALLS[1]] * 2_000]
    path.write_text(json.dumps({"turns": [{"calls": calls}]}))
    body = {"model": MODEL, "input": "Go.", "tools": [LOOK, OTHER], "parallel_tool_calls": False}
    async with serving(script=str(path), tps=200.0) as served:
        answer = (await fetch(served, "POST", "/v1/responses", body)).json
    assert answer["status"] == "completed"
    assert [one["name"] for one in answer["output"]] == ["other"]
    assert answer["usage"]["output_tokens"] < 200
