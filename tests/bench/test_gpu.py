"""The parts of the GPU benchmark that need no GPU: reading streams, and making a report of results."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from bench.gpu import report, talk
from bench.gpu.cases import Case, Figures, stages
from bench.gpu.servers import ENGINES
from segue_bench.client import ClientConnection

STREAM = b'data: {"a":"\\n\\ndata: "}\n\nevent: x\ndata: {"b":1}\n\n: ping\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", range(1, len(STREAM)))
def test_events_do_not_depend_on_where_a_stream_is_cut(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: Iterator[bytes] = iter([STREAM[:size], STREAM[size:], b""])
    monkeypatch.setattr(talk, "read_chunk", lambda connection: next(chunks))
    events = list(talk.sse(ClientConnection.__new__(ClientConnection)))
    assert events == [b'{"a":"\\n\\ndata: "}', b'{"b":1}', b"[DONE]"]


def figures(case: Case, turn_ms: float) -> Figures:
    """A loop whose turns all take this long."""
    return Figures(
        case=case,
        loop_s=case.turns * turn_ms / 1e3,
        ttft_ms=[turn_ms / 2] * case.turns,
        turn_ms=[turn_ms] * case.turns,
        computed_per_turn=500.0,
        cpu_ms={"front": 1.0, "core": 2.0},
    )


def test_rounds_are_put_together_and_compared_with_the_ids() -> None:
    loops = [
        figures(Case("plain", way, 100_000, round=number), ms)
        for number in (0, 1)
        for way, ms in (("ws", 100.0), ("ids", 80.0), ("chat", 200.0))
    ]
    ids, chat, ws = report.rows_of(1, loops)
    assert [ids.way, chat.way, ws.way] == ["ids", "chat", "ws"]
    assert (ws.turns, ws.loop_s, ws.beyond_ids) == (20, 2.0, 0.2)
    assert "| Segue socket | 2.00 s | −50% |" in report.tables([ids, chat, ws])
    ElementTree.fromstring(report.chart([ids, chat, ws]))


def test_a_case_that_failed_is_no_row() -> None:
    assert report.rows_of(1, [Figures(case=Case("plain", "ws", 1_000), failed="refused")]) == []


def test_every_case_has_an_engine_that_runs_and_a_name_in_the_tables() -> None:
    for stage in stages():
        for case in stage.cases:
            assert case.engine in stage.engines
            assert case.engine in ENGINES
            assert (report.GROUPS[case.engine][1], case.way) in report.ROWS
