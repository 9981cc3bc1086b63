"""Two checkouts compared: figures are read from tables of either form, and a ratio becomes a verdict."""

from __future__ import annotations

import pytest

from bench.compare import compare, read_figures
from bench.peers import LoopCost, PeerRow, print_rows
from segue_bench.rounds import interleaved, print_table

TURNS = """
turns
history   events   wall ms p50   CPU ms   CPU against the smallest
  1,000       35          5.82     1.85     1.00 x
500,000       35          6.12     1.87     1.01 x
"""
EVENTS = """
way          events/s   CPU us an event   events/s of a full core   (best round)
one socket    367,692               2.0                   508,057
SSE           293,849               3.0                   328,974
"""
IDLE = "\nidle\n2,000 idle connections: 6.3 KiB each\n"


@pytest.mark.parametrize(
    "name, output, figures",
    [
        ("turns", TURNS, {"1,000": 1.85, "500,000": 1.87}),
        ("events", EVENTS, {"one socket": 2.0, "SSE": 3.0}),
        ("idle", IDLE, {"2,000": 6.3}),
    ],
)
def test_figures_are_read_from_the_output(
    name: str, output: str, figures: dict[str, float]
) -> None:
    assert read_figures(name, output) == figures


def test_figures_are_read_from_a_table_that_we_print(capsys: pytest.CaptureFixture[str]) -> None:
    columns = "history {:,}|events {}|wall ms p50 {:.2f}|CPU ms {:.2f}|CPU against {:.2f} x"
    print_table(columns, [(1_000, 35, 5.8, 1.85, 1.0), (100_000, 35, 6.1, 1.9, 1.03)])
    assert read_figures("turns", capsys.readouterr().out) == {"1,000": 1.85, "100,000": 1.9}


def test_figures_are_read_from_the_table_of_peers(capsys: pytest.CaptureFixture[str]) -> None:
    own, rival = LoopCost(0.002, 0.001, 0.004, 0.003), LoopCost(0.004, 0.002, 0.005, 0.004)
    costs = {"segue": own, "agentic-api": rival, "alone": LoopCost(0.001, 0.0, 0.001, 0.0)}
    print_rows([PeerRow("http-full", costs)])
    figures = read_figures("peers", capsys.readouterr().out)
    assert {" ".join(name.split()): figure for name, figure in figures.items()} == {
        "http-full all 30": 1.0,
        "http-full late": 3.0,
    }


def test_output_without_a_figure_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no figure"):
        read_figures("turns", "nothing")


@pytest.mark.parametrize(
    "after, verdict", [(2.0, "same"), (2.05, "same"), (2.07, "higher"), (1.9, "lower")]
)
def test_median_decides(after: float, verdict: str) -> None:
    base = [{"SSE": 2.0}, {"SSE": 9.0}, {"SSE": 1.0}]
    here = [{"SSE": after}, {"SSE": 0.1}, {"SSE": 99.0}]
    (row,) = compare("events", base, here, 0.03)
    assert row[-1] == verdict


def test_each_round_begins_with_another_candidate() -> None:
    order: list[str] = []
    results = interleaved({name: lambda name=name: order.append(name) for name in "ab"}, 2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(runs) for name, runs in results.items()} == {"a": 2, "b": 2}
