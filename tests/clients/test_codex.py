"""Codex CLI in particular: tool shapes, resuming, compaction, sub-agents, an interrupt, what the socket saves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents import AGENTS, codex, run
from tests.clients.faulty import FaultyChat
from tests.clients.stage import Stage, scripted, staged
from tests.clients.task import END, Turns, by_code, by_patch, by_shell, call
from tests.support import WAIT_S

pytestmark = pytest.mark.clients

CODEX = AGENTS["Codex CLI"]
SLIM = ("--disable", "multi_agent", "--disable", "goals")
Record = Callable[[str, object], None]


def kinds(frame: dict[str, Any]) -> list[str]:
    """The types of a frame's input items."""
    return [item["type"] for item in frame["input"]]


@pytest.mark.parametrize(
    "model, turns, output",
    [
        ("gpt-5.5", by_patch, "custom_tool_call_output"),
        ("gpt-6.1-sol", by_code, "custom_tool_call_output"),
    ],
)
async def test_codex_works_with_every_shape_of_tools(
    model: str,
    turns: Callable[[], Turns],
    output: str,
    tmp_path: Path,
    record_property: Record,
) -> None:
    """Custom tools at the top, and namespaces of custom tools that come in an `additional_tools` item."""
    record_property("codex", f"Codex CLI with the tools of `{model}` (custom tools, namespaces)")
    async with staged(tmp_path, *scripted(tmp_path, turns()), model=model) as stage:
        ran = await stage.play(CODEX)
        assert ran.code == 0, ran.said[-3000:]
        assert END in ran.out
        assert stage.is_fixed
        frames = [frame for _, frame in stage.proxy.frames]
        assert frames[0]["generate"] is False
        assert output in [kind for frame in frames for kind in kinds(frame)]
        is_carried = "additional_tools" in kinds(frames[1])
        assert is_carried == ("tools" not in frames[1])
        assert stage.proxy.handshakes == [101]
        assert any(item["type"] == "file_change" for item in ran.items)


async def test_codex_resumes_in_a_new_process(tmp_path: Path, record_property: Record) -> None:
    record_property("codex", "Codex CLI, `resume` in a new process")
    turns = [*by_shell(), {"text": "I counted the first price too."}]
    async with staged(tmp_path, *scripted(tmp_path, turns)) as stage:
        assert (await stage.play(CODEX)).code == 0
        before = len(stage.proxy.frames)
        again = partial(codex, prompt=("resume", "--last", "What did you do?"))
        command, environment = again(stage.proxy.url, stage.repository, stage.scratch)
        ran = await run(command, environment, cwd=stage.repository)
        assert ran.code == 0, ran.said[-3000:]
        assert ran.items[-1]["text"] == turns[-1]["text"]
        assert stage.proxy.handshakes == [101, 101]
        warm_up, turn = (frame for _, frame in stage.proxy.frames[before:])
        assert warm_up["generate"] is False
        assert turn["previous_response_id"]
        assert kinds(turn).count("function_call_output") == len(by_shell()) - 1


async def test_codex_compacts_a_long_session(tmp_path: Path, record_property: Record) -> None:
    """It asks for a summary on a second socket, then goes on from it on the first."""
    record_property(
        "codex", "Codex CLI, compaction in a long session (its own, on a second socket)"
    )
    first = {**call("exec_command", cmd="cat money.py test_money.py"), "usage": 9_000}
    summary = "SUMMARY: money.py skips the first price."
    others = {"CONTEXT CHECKPOINT": [{"text": summary}], summary: by_shell()}
    async with (
        FaultyChat(turns=[first, *by_shell()], others=others) as engine,
        staged(tmp_path, "--engine", "chat", "--engine-url", engine.url) as stage,
    ):
        options = (*SLIM, "-c", "model_auto_compact_token_limit=8000")
        ran = await _codex(stage, options)
        assert ran.code == 0, ran.said[-3000:]
        assert stage.is_fixed
        assert stage.proxy.sockets == 2
        (asked,) = [frame for number, frame in stage.proxy.frames if number == 2]
        assert asked["tools"] == []
        fresh = [frame for number, frame in stage.proxy.frames if number == 1][2]
        assert "previous_response_id" not in fresh
        assert summary in json.dumps(fresh["input"])


async def test_codex_runs_sub_agents_on_sockets_of_their_own(
    tmp_path: Path, record_property: Record
) -> None:
    record_property("codex", "Codex CLI, parallel sub-agents on sockets of their own")

    def spawn(which: str) -> dict[str, Any]:
        message = f"SUBTASK {which}: list the files"
        return {"name": "multi_agent_v1__spawn_agent", "arguments": {"message": message}}

    # The parent waits by a command, so that its children have time to finish.
    turns = [
        {"calls": [spawn("one"), spawn("two")]},
        call("exec_command", cmd="sleep 2"),
        *by_shell(),
    ]
    children = [call("exec_command", cmd="ls"), {"text": "Listed."}]
    # The parent has two outputs of tools after its first turn.
    turns.insert(1, turns[1])
    async with (
        FaultyChat(turns=turns, others={"SUBTASK": children}) as engine,
        staged(tmp_path, "--engine", "chat", "--engine-url", engine.url) as stage,
    ):
        ran = await _codex(stage, ("--disable", "goals"))
        assert ran.code == 0, ran.said[-3000:]
        assert stage.is_fixed
        assert stage.proxy.handshakes == [101, 101, 101]
        for number in (2, 3):
            frames = [frame for one, frame in stage.proxy.frames if one == number]
            assert [frame.get("generate") for frame in frames] == [False, None, None]
            assert all(frame["previous_response_id"] for frame in frames[1:])


async def _codex(stage: Stage, options: tuple[str, ...]) -> Any:
    command, environment = codex(stage.proxy.url, stage.repository, stage.scratch, options=options)
    return await run(command, environment, cwd=stage.repository)


async def test_codex_is_interrupted_in_the_middle_of_a_turn(
    tmp_path: Path, record_property: Record
) -> None:
    """It leaves at once, and the turn that ran is cancelled: the engine is free for others."""
    record_property("codex", "Codex CLI, interrupted in the middle of a turn (the engine is freed)")
    async with staged(tmp_path, *scripted(tmp_path, by_shell()), "--tps", "10") as stage:
        stop = asyncio.Event()
        stage.proxy.on_created = lambda number: stop.set() if number == 3 else None
        ran = await stage.play(CODEX, stop=stop)
        assert ran.code != 0
        assert not stage.is_fixed
        cancelled = 'turns_total{outcome="cancelled",transport="websocket"}'
        async with asyncio.timeout(WAIT_S):
            while await stage.count(cancelled) != 1:
                pass
        assert await stage.count("connections") == 0


async def test_socket_saves_codex_what_http_sends_again(
    tmp_path: Path, record_property: Record
) -> None:
    """The same task at 1,000 tokens a second, by both roads, without the proxy; the figures go into the page."""
    figures = []
    for name, is_socket in (("WebSocket", True), ("HTTP", False)):
        folder = tmp_path / name
        folder.mkdir()
        async with staged(folder, *scripted(folder, by_shell()), "--tps", "1000") as stage:
            command, environment = codex(
                f"{stage.served.url}/v1", stage.repository, folder, supports_websockets=is_socket
            )
            ran = await run(command, environment, cwd=stage.repository)
            assert ran.code == 0, ran.said[-3000:]
            assert stage.is_fixed
            received = await stage.count("bytes_received_total")
            items = await stage.count("items_validated_total")
            tokenized = await stage.count("tokens_tokenized_total")
            figures.append((name, ran.seconds, received, items, tokenized))
    record_property(
        "figures",
        [
            "| transport | wall time | bytes received | items validated | tokens tokenized |",
            "|---|---|---|---|---|",
            *(
                f"| {name} | {seconds:.2f} s | {received:,.0f} | {items:,.0f} | {tokenized:,.0f} |"
                for name, seconds, received, items, tokenized in figures
            ),
        ],
    )
    socket, http = figures
    assert socket[2] < 0.6 * http[2]
    assert socket[3] < 0.5 * http[3]
