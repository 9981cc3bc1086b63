"""Does a scenario that fails print what happened?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.last_turn import FIRST, LAST, last_events

ROOT = Path(__file__).parents[1]
STORY = """
from tests.support import MODEL, fetch, serving, wire

async def test_socket() -> None:
    async with serving() as served, wire(served) as socket:
        await socket.turn(input="An older turn", store=False)
        last = await socket.turn(input="Hello", store=False)
        assert last["type"] == "response.failed"

async def test_stream() -> None:
    async with serving() as served:
        body = {"model": MODEL, "input": "Hello", "stream": True}
        assert (await fetch(served, "POST", "/v1/responses", body)).events == []

async def test_passes() -> None:
    async with serving() as served, wire(served) as socket:
        await socket.turn(input="Hello", store=False)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What pytest prints about each of the tests, by section."""
    story = tmp_path_factory.mktemp("story") / "test_story.py"
    story.write_text(STORY)
    options = [
        "-c",
        str(ROOT / "pyproject.toml"),
        "-p",
        "tests.last_turn",
        "-p",
        "no:cacheprovider",
    ]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(story)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "2 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    return run.stdout.split("Last turn, at teardown")[1:]


def test_failed_scenario_prints_its_last_turn_and_a_timeline(printed: list[str]) -> None:
    assert len(printed) == 2, "one section for each test that failed, none for the other"
    for transport, text in zip(("websocket", "sse"), printed, strict=True):
        lines = text.splitlines()
        kinds = [line.split()[1] for line in lines if " response." in line]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds.count("response.created") == 1, "the older turn is left out"
        assert kinds[-1] == "response.completed"
        assert any(f" over {transport}: completed" in line for line in lines)
        assert [mark for mark in ("received", "rendered", "settled") if f" ms  {mark}" in text] == [
            "received",
            "rendered",
            "settled",
        ]


def test_long_turn_is_shortened_in_its_middle() -> None:
    events = ['{"type": "response.created", "sequence_number": 0}']
    events += [
        f'{{"type": "delta", "sequence_number": {n}, "delta": "{"x" * 500}"}}'
        for n in range(1, 200)
    ]
    lines = last_events(["no JSON", *events])
    assert len(lines) == FIRST + LAST + 1
    assert "160 more" in lines[FIRST]
    assert max(map(len, lines)) < 180


def test_what_is_no_event_is_printed_as_it_came() -> None:
    assert last_events([b"HTTP 404 {}", b"[1]", "\N{SNOWMAN}"]) == [
        "        HTTP 404 {}",
        "        [1]",
        "        \N{SNOWMAN}",
    ]
