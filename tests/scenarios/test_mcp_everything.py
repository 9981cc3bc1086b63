"""The MCP project's own server for testing clients (`@modelcontextprotocol/server-everything`), driven for real: every
kind of answer that it has, through the official client, and its death in the middle of a call.

`make test` puts it under `.cache/mcp`; `SEGUE_TEST_MCP` names another folder. A missing one is a failure.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from segue.wire.items import McpCall
from tests.clients.outside import NODE, ROOT, run_python
from tests.scenarios.test_mcp import DONE, hosting
from tests.scenarios.test_tools import calling
from tests.support import MODEL, served_process, until, wire

FOLDER = Path(os.environ.get("SEGUE_TEST_MCP") or ROOT / ".cache" / "mcp")
PROGRAM = FOLDER / "node_modules/@modelcontextprotocol/server-everything/dist/index.js"
ALL = {"type": "mcp", "server_label": "all", "require_approval": "never"}

# Each kind of answer, and a word that must be in it.
CALLS = [
    (calling("all.echo", message="bees"), "bees"),
    (calling("all.get-sum", a=2, b=40), "42"),
    (calling("all.get-tiny-image"), "[image: image/png, not shown: it is not a text]"),
    (calling("all.get-structured-content", location="Chicago"), '"humidity"'),
    (calling("all.get-resource-links", count=1), "[resource: demo://resource/"),
    (calling("all.trigger-long-running-operation", duration=0.3, steps=3), "Steps: 3"),
]
WRONG = calling("all.get-sum", a="two", b=40)


def command() -> list[str]:
    assert PROGRAM.is_file(), f"there is no MCP server at {PROGRAM}: run 'make test', or name one"
    return [str(NODE), str(PROGRAM), "stdio"]


def test_official_client_gets_every_kind_of_answer_with_approval_and_without(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.json"
    turns = [*(turn for turn, _ in CALLS), WRONG, DONE]
    script.write_text(json.dumps({"turns": turns}))
    config = tmp_path / "segue.toml"
    config.write_text(
        f'script = "{script}"\nstore = "memory"\n'
        f'[[mcp]]\nlabel = "all"\ncommand = {json.dumps(command())}\n'
    )
    with served_process("--config", str(config), cwd=tmp_path) as served:
        found = run_python("python_everything.py", served, MODEL)
        assert not [line for line in served.printed if "Traceback" in line], served.printed
    for way in ("http", "socket"):
        assert {"echo", "get-sum", "get-tiny-image"} <= set(found[way]["listed"])
        assert found[way]["said"] == "Done."
        for calls in (found[way]["free"], found[way]["asked"]):
            *good, wrong = calls
            assert [one["status"] for one in good] == ["completed"] * len(CALLS)
            for one, (_, word) in zip(good, CALLS, strict=True):
                assert word in one["output"], one
            check_wrong(wrong)


def check_wrong(call: dict[str, Any]) -> None:
    """The server says what is wrong with the arguments, and the item says so."""
    assert (call["status"], call["output"]) == ("failed", None)
    assert "number" in json.dumps(call["error"])
    assert call["error"]["type"] in ("mcp_tool_execution_error", "mcp_protocol_error")


async def test_server_killed_in_a_call_fails_the_call_and_the_turn_goes_on(tmp_path: Path) -> None:
    """The next call of the same response starts the server again."""
    mark = tmp_path / "pid"
    line = " ".join(f"'{word}'" for word in command())
    table = {"label": "all", "command": ["sh", "-c", f"echo $$ > '{mark}'; exec {line}"]}
    long = calling("all.trigger-long-running-operation", duration=60, steps=600)
    turns = [long, calling("all.echo", message="bees"), DONE]
    async with hosting(tmp_path, *turns, mcp=[table]) as served, wire(served) as socket:
        await socket.create(input="Go", tools=[ALL])
        event = await socket.next()
        while event["type"] != "response.mcp_call_arguments.done":
            event = await socket.next()
        (running,) = served.app.runner.registry.running.values()
        await until(lambda: isinstance(running.assembler.items[-1].value, McpCall))
        first = int(mark.read_text())
        os.kill(first, signal.SIGKILL)
        last = (await socket.events())[-1]["response"]
        assert int(mark.read_text()) != first
    _, killed, after, message = last["output"]
    assert killed["status"] == "failed"
    assert killed["error"]["type"] == "mcp_protocol_error"
    assert "closed the connection" in killed["error"]["message"]
    assert (after["status"], after["output"]) == ("completed", "Echo: bees")
    assert message["content"][0]["text"] == "Done."
    assert last["status"] == "completed"
