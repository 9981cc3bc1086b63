"""A tool that takes half a minute: what others notice of it, and how soon it is over when nobody waits.

The figures are printed (`-s`), for docs/tools.md. The same stories with a tool that waits for a word, and so without
half minutes, are in tests/scenarios/test_mcp.py.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median, quantiles

import pytest

from tests.mcp_server import remote
from tests.scenarios.test_embedded_model import NAME, serving_smollm2
from tests.scenarios.test_mcp import DONE, OWN, hosting_own
from tests.scenarios.test_tools import calling
from tests.support import Wire, until, wire

pytestmark = pytest.mark.reliability
TOOL_S = 30.0
# Calls of the slow tool at once: half of what one connection may run.
SLOW_LANES = 8
TURNS = 400


async def times_of(socket: Wire, turns: int) -> list[float]:
    """How long each of so many turns takes on a lane of its own, in milliseconds."""
    found: list[float] = []
    for _ in range(turns):
        began = time.perf_counter()
        last = await socket.turn(input="Hello", stream_id="quick", store=False)
        found.append(1000 * (time.perf_counter() - began))
        assert last["type"] == "response.completed"
    return found


def told(name: str, times: list[float]) -> str:
    tail = quantiles(times, n=100)
    return f"{name}: p50 {median(times):.2f} ms, p95 {tail[94]:.2f} ms, of {len(times)} turns"


async def test_slow_tools_of_other_lanes_are_not_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same turns before, beside and after eight calls of a half-minute tool, on lanes of one connection."""
    sleep = calling("own.sleep", seconds=TOOL_S)
    async with (
        hosting_own(tmp_path, sleep, DONE, check_rendering=False) as (served, far),
        wire(served) as socket,
    ):
        await times_of(socket, TURNS // 4)
        before = await times_of(socket, TURNS)
        began = time.perf_counter()
        for lane in range(SLOW_LANES):
            await socket.create(input="Go", tools=[OWN], stream_id=f"slow{lane}")
        async with asyncio.timeout(10):
            await far.has_begun.wait()
        beside: list[float] = []
        while time.perf_counter() - began < TOOL_S - 5:
            beside += await times_of(socket, TURNS // 10)
        is_beside = time.perf_counter() - began < TOOL_S
        for _ in range(SLOW_LANES):
            await end_of(socket)
        took = time.perf_counter() - began
        after = await times_of(socket, TURNS)
    assert is_beside
    with capsys.disabled():
        print(f"\n{told('no tool runs', before + after)}\n{told('eight tools run', beside)}")
        print(f"eight calls of {TOOL_S:g} s, beside each other: {took:.1f} s")
    assert took < TOOL_S + 10
    assert median(beside) < 1.5 * max(median(before), median(after)) + 1


async def end_of(socket: Wire) -> None:
    """Until one of the slow lanes is done."""
    async with asyncio.timeout(TOOL_S + 20):
        event = await socket.next()
        while event["type"] != "response.completed":
            assert event["type"] not in ("response.failed", "error"), event
            event = await socket.next()
    assert "slept 30 s" in str(event["response"]["output"])


async def test_closing_the_socket_stops_the_slow_tool_and_frees_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real model with one slot: it answers another connection while the tool runs, and after the close."""
    async with remote() as far:
        config = tmp_path / "segue.toml"
        config.write_text(f'[[mcp]]\nlabel = "own"\nurl = "{far.url}"\n')
        tool = {**OWN, "allowed_tools": ["wait"]}
        quick = {"model": NAME, "input": "Say hello.", "max_output_tokens": 8, "store": False}
        async with (
            serving_smollm2(parallel=1, config=str(config)) as served,
            wire(served) as other,
            wire(served) as socket,
            asyncio.TaskGroup() as group,
        ):
            choice = {"type": "mcp", "server_label": "own", "name": "wait"}
            await socket.create(
                model=NAME, input="Wait.", tools=[tool], tool_choice=choice, temperature=0
            )
            async with asyncio.timeout(60):
                await far.has_begun.wait()
            beside = await other.turn(**quick)
            assert beside["type"] in ("response.completed", "response.incomplete")
            assert served.app.runner.running_count == 1
            closed = time.perf_counter()
            # Beside the rest: this client has events to read before it hears that its close was heard.
            group.create_task(socket.socket.close())
            async with asyncio.timeout(10):
                await far.was_stopped.wait()
            stopped = time.perf_counter() - closed
            await until(lambda: served.app.runner.running_count == 0)
            freed = time.perf_counter() - closed
            after = await other.turn(**quick)
    assert after["type"] in ("response.completed", "response.incomplete")
    with capsys.disabled():
        print(
            f"\nclose to the tool's end: {1000 * stopped:.0f} ms, to the turn's: {1000 * freed:.0f} ms"
        )
    assert max(stopped, freed) < 1
