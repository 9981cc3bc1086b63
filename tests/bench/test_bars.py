"""Figures are read from the tables of the other benchmarks, and each is held against its bar."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench import bars, paced, peers
from bench.bars import Bar
from bench.peers import LoopCost, PeerRow, print_rows


@pytest.mark.parametrize(
    "bar, ratio, is_held",
    [
        (Bar("wall", 0.5, 0.5, "x"), 1.0, True),
        (Bar("wall", 0.6, 0.5, "x"), 1.2, False),
        (Bar("events", 200.0, 100.0, "events/s", is_floor=True), 0.5, True),
        (Bar("events", 80.0, 100.0, "events/s", is_floor=True), 1.25, False),
    ],
)
def test_bar_is_held_or_missed(bar: Bar, ratio: float, is_held: bool) -> None:
    assert bar.ratio == pytest.approx(ratio)
    assert bar.is_held is is_held


def figures(found: Iterator[Bar]) -> dict[str, tuple[float, float]]:
    return {bar.what: (bar.figure, bar.bar) for bar in found}


def test_figures_are_read_from_the_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = {
        "segue": LoopCost(0.002, 0.001, 0.003, 0.003),
        "agentic-api": LoopCost(0.004, 0.002, 0.003, 0.003),
        "alone": LoopCost(0.001, 0.0, 0.001, 0.0),
    }
    assert set(bars.WAYS) <= set(peers.WAYS)
    print_rows([PeerRow("http-full", costs)])
    paced.show_paced(
        {
            "segue chat": [paced.Paced(20e-6, [0.001] * 9)],
            "agentic-api": [paced.Paced(80e-6, [0.004] * 9)],
        }
    )
    paced.show_unlimited(
        {f"segue chat, {way}": [paced.Unlimited(100_000.0, 5e-6)] for way in ("socket", "SSE")}
    )
    printed = capsys.readouterr().out
    monkeypatch.setattr(bars, "run", lambda *_: printed)
    assert figures(bars.peers(is_quick=True)) == {
        "HTTP with full history, SSE: wall": (0.5, 1.0),
        "HTTP with full history, SSE: wall less client and upstream": (0.33, 1.0),
        "HTTP with full history, SSE: CPU": (0.5, 1.0),
    }
    assert figures(bars.paced(is_quick=True)) == {
        "a token in 64 streams: CPU": (0.25, 0.45),
        "a token in 64 streams: late p50": (0.25, 0.6),
        "events of a full core, socket": (200_000.0, 150_000),
        "events of a full core, SSE": (200_000.0, 150_000),
    }
