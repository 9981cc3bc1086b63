"""A hosted tool is a room and a row: a made-up one (`echo_shell.py`), named by `hosted_tools`, in real turns.

Nothing of the package names it. The model calls it, its output streams while it runs and is an item of its own, the
next round reads it, and a client that sends the items back is understood.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from segue.errors import Misconfigured
from segue.server.hosted import HOSTED_TOOLS, HostedTools, asking_of
from segue.settings.checks import load_settings
from tests.events import check_turn, told_alike
from tests.scenarios.test_tools import asking, calling, response_of, scripted
from tests.support import MODEL, fetch, kinds, until, wire

Body = dict[str, Any]
ROOM = "tests.doors.echo_shell"
ROW = (f"{ROOM}:echo_shell",)
HOSTED = {"type": "shell", "environment": {"type": "container_auto"}}
RUN = calling("shell", commands=["It rains", "a lot"])
DONE = {"text": "It rains, they say."}
FLAGS: Body = {"hosted_tools": ROW, "check_rendering": True}


@pytest.mark.parametrize("way", ["json", "sse", "websocket"])
async def test_model_calls_the_tool_and_reads_its_output(way: str, tmp_path: Path) -> None:
    async with scripted(tmp_path, RUN, DONE, **FLAGS) as served, asking(served, way) as ask:
        response = response_of(await ask({"input": "Go", "tools": [HOSTED]}))
    assert response["status"] == "completed"
    call, output, message = response["output"]
    assert (call["type"], call["status"]) == ("shell_call", "completed")
    assert call["environment"]["type"] == "container_reference"
    assert (output["type"], output["status"]) == ("shell_call_output", "completed")
    assert output["call_id"] == call["call_id"]
    assert [one["stdout"] for one in output["output"]] == ["It rains ", "a lot "]
    assert message["content"][0]["text"] == DONE["text"]


async def test_events_of_its_item_come_in_order_and_the_same_way_everywhere(tmp_path: Path) -> None:
    async with scripted(tmp_path, RUN, DONE, **FLAGS) as served:
        async with asking(served, "websocket") as ask:
            told = await ask({"input": "Go", "tools": [HOSTED]})
        async with asking(served, "sse") as ask:
            assert told_alike(await ask({"input": "Go", "tools": [HOSTED]})) == told_alike(told)
    of_item = [one for one in told if one.get("output_index") == 1]
    content = "response.shell_call_output_content"
    assert kinds(of_item) == [
        "response.output_item.added",
        *[f"{content}.delta"] * 2,
        f"{content}.done",
        *[f"{content}.delta"] * 2,
        f"{content}.done",
        "response.output_item.done",
    ]
    words = [one["delta"]["stdout"] for one in of_item if one["type"].endswith(".delta")]
    assert words == ["It ", "rains ", "a ", "lot "]


async def test_output_streams_while_the_tool_runs(tmp_path: Path) -> None:
    file = tmp_path / "go"
    waiting = calling("shell", commands=[f"wait {file}"])
    async with scripted(tmp_path, waiting, DONE, **FLAGS) as served, wire(served) as socket:
        await socket.create(input="Go", tools=[HOSTED])
        events = [await socket.next()]
        while not events[-1]["type"].endswith("output_content.delta"):
            events.append(await socket.next())
        # The tool waits for this file, and the client has read its first word.
        file.touch()
        events += await socket.events()
    assert check_turn(events)["status"] == "completed"


async def test_model_reads_what_was_printed(tmp_path: Path) -> None:
    """Without a script the scripted model says what it has read last."""
    async with scripted(tmp_path, RUN, **FLAGS) as served:
        body = {"model": MODEL, "input": "Go", "tools": [HOSTED]}
        first = (await fetch(served, "POST", "/v1/responses", {**body, "max_tool_calls": 1})).json
    # The model calls again and again: calls over the limit fail, and at some time the response ends.
    outputs = [one for one in first["output"] if one["type"] == "shell_call_output"]
    assert outputs[0]["output"][0]["stdout"] == "It rains "
    assert "no more tool calls" in outputs[1]["output"][0]["stderr"]


@pytest.mark.parametrize("is_stored", [True, False])
async def test_chain_and_client_that_sends_the_items_back_go_on(
    is_stored: bool, tmp_path: Path
) -> None:
    """Every prompt is rendered cold as well, and must be the same."""
    async with scripted(tmp_path, RUN, DONE, DONE, **FLAGS) as served:
        body = {"model": MODEL, "tools": [HOSTED], "store": is_stored}
        said = {"role": "user", "content": "Go"}
        first = (await fetch(served, "POST", "/v1/responses", {**body, "input": [said]})).json
        again = {"input": [said, *first["output"], {"role": "user", "content": "And?"}]}
        if is_stored:
            again = {"input": "And?", "previous_response_id": first["id"]}
        second = await fetch(served, "POST", "/v1/responses", {**body, **again})
        assert second.status == 200, second.body
        assert second.json["status"] == "completed"
        # An output of its own needs its call, as every output does.
        lone = {**body, "input": [first["output"][1]]}
        refused = await fetch(served, "POST", "/v1/responses", lone)
        assert (refused.status, refused.json["error"]["code"]) == (
            400,
            "invalid_function_call_output",
        )


async def test_shell_of_the_client_stays_the_clients(tmp_path: Path) -> None:
    async with scripted(tmp_path, RUN, DONE, **FLAGS) as served, asking(served, "sse") as ask:
        response = response_of(await ask({"input": "Go", "tools": [{"type": "shell"}]}))
    (call,) = response["output"]
    assert (call["type"], call["environment"]) == ("shell_call", {"type": "local"})


async def test_cancelled_turn_stops_the_tool(tmp_path: Path) -> None:
    waiting = calling("shell", commands=["wait /nowhere"])
    body = {"model": MODEL, "input": "Go", "tools": [HOSTED], "background": True}
    async with scripted(tmp_path, waiting, DONE, **FLAGS) as served:
        queued = (await fetch(served, "POST", "/v1/responses", body)).json
        running = served.app.runner.registry.running[queued["id"]]
        await until(lambda: len(running.assembler.items) == 2)
        path = f"/v1/responses/{queued['id']}"
        await fetch(served, "POST", f"{path}/cancel", {})
        cancelled = (await fetch(served, "GET", path)).json
    assert cancelled["status"] == "cancelled"
    call, output = cancelled["output"]
    assert (call["status"], output["status"]) == ("completed", "incomplete")


async def test_guard_sees_the_output_before_the_client_does(tmp_path: Path) -> None:
    settings = tmp_path / "segue.toml"
    settings.write_text('[guard_rules]\npatterns = ["rains"]\n')
    flags = {**FLAGS, "guard": ("rules",), "config": str(settings)}
    async with scripted(tmp_path, RUN, DONE, **flags) as served, asking(served, "sse") as ask:
        told = await ask({"input": "Go", "tools": [HOSTED]})
    assert "rains " not in json.dumps([one for one in told if "output_content" in one["type"]])
    assert response_of(told)["status"] != "completed"


# --- what complains -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, words",
    [
        ("without_definition", "no definition by which a request could ask for it"),
        ("of_no_contract", "NoDefinition is no tool type of the contract"),
        ("without_kinds", "no kind of item to work on"),
        ("without_events", "'shell_call' has no event that says that the work has begun"),
        ("without_prefix", "NoneType is no item type of the contract"),
        ("with_strange_scope", "'dance' is no scope of API keys"),
        ("with_taken_name", "another tool has the name 'mcp'"),
        ("no_tool", "built no HostedTool, but 'a text'"),
        ("nowhere", "cannot be imported"),
    ],
)
def test_tool_that_is_not_whole_refuses_the_start(name: str, words: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        HostedTools(load_settings({"hosted_tools": (f"{ROOM}:{name}",)}, environment={}))
    assert str(refused.value).startswith(f"hosted_tools: '{ROOM}:{name}'")
    assert words in str(refused.value)


def test_type_that_two_tools_run_refuses_the_start() -> None:
    with pytest.raises(Misconfigured, match="'shell' belongs to the tool 'shell'"):
        HostedTools(load_settings({"hosted_tools": (*ROW, f"{ROOM}:twice")}, environment={}))


def test_name_without_a_module_refuses_the_start() -> None:
    with pytest.raises(Misconfigured, match="'dance' is not MODULE:NAME"):
        HostedTools(load_settings({"hosted_tools": ("dance",)}, environment={}))


async def test_rows_say_of_our_own_tools_what_they_say_of_themselves() -> None:
    """Which requests need a tool is known before its room is loaded."""
    async with HostedTools(load_settings({}, environment={})) as hosted:
        for row, tool in zip(HOSTED_TOOLS.values(), hosted.load().tools, strict=True):
            own = asking_of(tool)
            assert (row.definitions, row.acts_on) == (own.definitions, own.acts_on)
            assert set(row.has_words) <= set(own.has_words)
