"""The tools of MCP servers, told with real servers and real sockets: sampling pauses, the tool runs, sampling goes on.

The servers are real ones: `mcp-server-time` and `mcp-server-git` from the registry as programs, and one of our own over
HTTP and over pipes that can wait, fail and die. The model is the scripted engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.events import check_turn
from tests.mcp_server import Remote, remote
from tests.scenarios.test_tools import asking, calling, response_of, scripted, stored_bytes
from tests.support import MODEL, WEATHER, Served, fetch, kinds, metric, wire

pytest.importorskip("mcp", reason="the extra 'mcp' is not installed")

Body = dict[str, Any]

TIME = {
    "label": "time",
    "command": [sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"],
}
PIPED = {"label": "own", "command": [sys.executable, "-m", "tests.mcp_server"]}
CLOCK = {"type": "mcp", "server_label": "time", "require_approval": "never"}
NOW = calling("time.get_current_time", timezone="UTC")
DONE = {"text": "Done."}


@asynccontextmanager
async def hosting(
    folder: Path, *turns: Body, mcp: list[Body], **flags: object
) -> AsyncIterator[Served]:
    """A server with these MCP servers, whose model says these turns; every prompt is checked cold as well."""
    config = folder / "segue.toml"
    lines: list[str] = []
    for table in mcp:
        lines += ["[[mcp]]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    config.write_text("\n".join(lines))
    flags = {"config": str(config), "check_rendering": True, **flags}
    async with scripted(folder, *turns, **flags) as served:
        yield served


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {json.dumps(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def types_of(told: list[Body]) -> list[str]:
    return [one["type"] for one in response_of(told)["output"]]


@pytest.mark.parametrize("way", ["json", "websocket"])
async def test_model_asks_a_server_from_the_registry_what_time_it_is(
    way: str, tmp_path: Path
) -> None:
    async with (
        hosting(tmp_path, NOW, DONE, mcp=[TIME]) as served,
        asking(served, way) as ask,
    ):
        told = await ask({"input": "What time is it?", "tools": [CLOCK]})
        assert types_of(told) == ["mcp_list_tools", "mcp_call", "message"]
        listed, call, _ = response_of(told)["output"]
        assert [one["name"] for one in listed["tools"]] == ["get_current_time", "convert_time"]
        assert call["status"] == "completed"
        assert json.loads(call["output"])["timezone"] == "UTC"
        assert json.loads(call["arguments"]) == {"timezone": "UTC"}
