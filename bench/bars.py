"""Are the bars held? Every figure that has one, its bar and how far it is from it, from one run.

    python -m bench bars [--only peers paced traces cold] [--quick] [--json FILE]

Runs the pieces one after the other: turns beside `agentic-api` by every way (`bench peers --unpinned`), paced streams
and events (`bench paced`), the recorded sessions (`segue bench --trace --sessions 0`), cold tokenizing. The bars that
need a GPU are those of `bench/gpu`. The exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from segue_bench.machine import describe, in_words
from segue_bench.rounds import print_table
from segue_bench.trace_report import TraceReport
from tests.models.assets import CACHE

RUN_S_MAX = 3_600.0
PEERS = re.compile(
    r"^(?P<way>[\w-]+) +all 30 +(?:[\d.]+ +){3}(?P<wall>[-\d.]+) x +(?P<alone>[-\d.]+) x"
    r" +[\d.]+ +[\d.]+ +(?P<cpu>[\d.]+) x",
    re.M,
)
PACED = re.compile(
    r"^segue chat +(?P<us>[\d.]+) +(?P<ms>[\d.]+) +[\d.]+ +(?P<cpu>[\d.]+) x +(?P<late>[\d.]+) x",
    re.M,
)
EVENTS = re.compile(
    r"^segue chat, (?P<way>socket|SSE) +[\d,]+ +[\d,]+ +[\d.]+ +(?P<rate>[\d,]+)", re.M
)
COLD = re.compile(r"^qwen3 +[\d,]+ +\d+ +\d+ +(?P<first>\d+)", re.M)
WAYS = {
    "ws": ("unstored turn on a socket", 0.5),
    "ws-stored": ("stored turn on a socket", 0.5),
    "http-full": ("HTTP with full history, SSE", 1.0),
    "http-chained": ("HTTP chained, SSE", 0.5),
}


class Bar(Struct, frozen=True):
    """A figure that has a bar: no more than it, or no less."""

    what: str
    figure: float
    bar: float
    unit: str
    is_floor: bool = False

    @property
    def ratio(self) -> float:
        """Of figure and bar; held up to 1."""
        return self.bar / self.figure if self.is_floor else self.figure / self.bar

    @property
    def is_held(self) -> bool:
        return round(self.ratio, 3) <= 1.0


def run(*command: str) -> str:
    """What a piece prints; it is shown too."""
    ran = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=RUN_S_MAX
    )
    print(ran.stdout, flush=True)
    if ran.returncode:
        raise SystemExit(f"bench: {' '.join(command)} failed:\n{ran.stderr[-2000:]}")
    return ran.stdout


def peers(*, is_quick: bool) -> Iterator[Bar]:
    """Turns through *chat*, as shares of what agentic-api takes, over the whole loop."""
    rounds = ("--rounds", "10" if is_quick else "40")
    found = run("bench", "peers", "--unpinned", "--ways", ",".join(WAYS), *rounds)
    for row in PEERS.finditer(found):
        what, bar = WAYS[row["way"]]
        for name in ("wall", "alone", "cpu"):
            words = {"wall": "wall", "alone": "wall less client and upstream", "cpu": "CPU"}[name]
            yield Bar(f"{what}: {words}", float(row[name]), bar, "x agentic-api")


def paced(*, is_quick: bool) -> Iterator[Bar]:
    """Tokens through *chat*."""
    found = run("bench", "paced", "--only", "paced", "unlimited", *(("--rounds", "2") * is_quick))
    if row := PACED.search(found):
        yield Bar("a token in 64 streams: CPU", float(row["cpu"]), 0.45, "x agentic-api")
        yield Bar("a token in 64 streams: late p50", float(row["late"]), 0.6, "x agentic-api")
    for row in EVENTS.finditer(found):
        rate = float(row["rate"].replace(",", ""))
        yield Bar(f"events of a full core, {row['way']}", rate, 150_000, "events/s", is_floor=True)


def traces(*, is_quick: bool) -> Iterator[Bar]:
    """What is done again on a socket when the recorded sessions go on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        sessions = ("--sessions", "4" if is_quick else "0")
        run("segue_cli.cli", "bench", "--trace", *sessions, "--ways", "ws", "--json", str(path))
        report = msgspec.json.decode(path.read_bytes(), type=TraceReport)
    row = next(row for row in report.amplification if row.kind == "continuation")
    bars = {"bytes": 1.0, "items": 1.0, "tokenized": 1.0, "computed": 1.05}
    for name, bar in bars.items():
        figure = getattr(row, name)
        yield Bar(f"sessions, socket, continuations: {name}", figure, bar, "per new one")


def cold(*, is_quick: bool) -> Iterator[Bar]:
    """The first long text of a process."""
    rounds = ("--rounds", "1" if is_quick else "5")
    row = COLD.search(
        run("bench", "cold", "--tokenizer", str(CACHE / "tokenizers" / "qwen3"), *rounds)
    )
    if row:
        yield Bar("cold tokenizing of 82,000 tokens", float(row["first"]), 60.0, "ms")


PIECES: dict[str, Callable[..., Iterator[Bar]]] = {
    "peers": peers,
    "paced": paced,
    "traces": traces,
    "cold": cold,
}


def main(arguments: Sequence[str]) -> int:
    """Run the pieces and print the table; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench bars", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=tuple(PIECES), default=tuple(PIECES), metavar="NAME"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds: minutes, not a quarter of an hour"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args(arguments)
    began, machine = time.monotonic(), describe()
    bars: list[Bar] = []
    for name in options.only:
        found = list(PIECES[name](is_quick=options.quick))
        if not found:
            raise SystemExit(f"bench: no figure was found in what {name} printed")
        bars += found
    print_bars(bars)
    print(
        f"{in_words(machine)}; {time.monotonic() - began:.0f} s. Bars that need a GPU: bench/gpu."
    )
    if options.json:
        report = {"machine": msgspec.to_builtins(machine), "bars": [as_row(bar) for bar in bars]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(not bar.is_held for bar in bars))


def print_bars(bars: Sequence[Bar]) -> None:
    """One line a bar."""
    print_table(
        "what {}|figure {:,.2f}|bar {}|unit {}|of the bar {:.2f} x|{}",
        [
            (
                bar.what,
                bar.figure,
                f"{'>=' if bar.is_floor else '<='} {bar.bar:,g}",
                bar.unit,
                bar.ratio,
                "held" if bar.is_held else "missed",
            )
            for bar in bars
        ],
    )


def as_row(bar: Bar) -> dict[str, object]:
    """For programs."""
    return {**msgspec.to_builtins(bar), "ratio": round(bar.ratio, 4), "is_held": bar.is_held}
