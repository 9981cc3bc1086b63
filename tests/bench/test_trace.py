"""Recorded sessions are replayed against a real server, and what was done again is counted."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from segue_bench.sessions import load_sessions, plan
from segue_bench.trace import TraceRun, TraceTotals
from segue_bench.trace_report import TraceReport, along, ttft_chart
from segue_cli.cli import main

# A root, two continuations, a reset that keeps some of the second turn, a fork, and a sub-agent.
TURNS = [
    [-1, 0, 2_000, 100, 0],
    [0, 1_984, 3_000, 100, 5],
    [1, 2_944, 4_000, 100, 9],
    [2, 2_600, 2_900, 100, 12],
    [1, 2_944, 3_500, 100, 30],
    [-1, 0, 1_500, 100, 31],
]


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    path = tmp_path / "sessions.json"
    one = {"id": "one", "tools": 600, "system": 400, "turns": TURNS}
    path.write_text(json.dumps({"sessions": [one]}))
    return path


def test_nothing_is_done_again_on_a_socket(sessions: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = ["bench", "--trace", str(sessions), "--ways", "ws,http-full", "--scale", "4"]
    assert main([*command, "--json", str(out), "--svg", str(tmp_path / "chart")]) == 0
    report = msgspec.json.decode(out.read_bytes(), type=TraceReport)
    rows = {(row.way, row.kind): row for row in report.amplification}
    assert {key: row.turns for key, row in rows.items()} == {
        (way, kind): count
        for way in ("ws", "http-full")
        for kind, count in {"continuation": 3, "reset": 1, "root": 2}.items()
    }
    socket, resent = rows["ws", "continuation"], rows["http-full", "continuation"]
    assert (socket.bytes, socket.items) == (1.0, 1.0)
    assert socket.tokenized is not None
    assert socket.computed is not None
    assert 0.9 < socket.tokenized <= 1.0
    assert 1.0 <= socket.computed <= 1.05
    assert socket.new_tokens == resent.new_tokens
    assert resent.bytes is not None
    assert resent.items is not None
    assert resent.bytes > 2
    # What was sent before is known by its bytes, and not decoded again.
    assert 1 < resent.items < 2
    # A chain cannot keep half of a message: what is left of it is sent again.
    assert (rows["ws", "reset"].bytes or 0) > 1.0
    assert report.failures == []
    assert [line.way for line in report.ttft] == ["ws", "http-full"]
    assert "ws: " in (tmp_path / "chart-ttft.svg").read_text()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--trace", "nothing.json"], "cannot be read"),
        (["--trace", __file__], "is not a file of sessions"),
        (["--trace", "--ways", "rollout"], "is not one of ws"),
        (["--trace", "--scale", "0"], "--scale"),
        (["--trace", "--url", "http://127.0.0.1:1", "--model", "m"], "leave --url out"),
    ],
)
def test_wrong_flags_are_named(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flags]) != 0
    assert words in capsys.readouterr().err


def test_recorded_resets_are_as_many_as_were_counted() -> None:
    kinds = [step.kind for session in load_sessions() for step in plan(session)]
    assert (len(kinds), kinds.count("reset")) == (7_468, 362)


def test_times_are_grouped_by_turn() -> None:
    run = TraceRun("segue", "ws", {"root": TraceTotals()}, [])
    run.along = [(number, number * 100, number / 1e3) for number in range(1, 30)]
    line = along(run)
    assert [(one.first_turn, one.turns, one.ttft_ms_p50) for one in line.groups] == [
        (1, 1, 1.0),
        (2, 4, 3.5),
        (6, 5, 8.0),
        (11, 10, 15.5),
        (21, 9, 25.0),
    ]
    assert "ws: 25 ms" in ttft_chart([line])
