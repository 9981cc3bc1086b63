"""What does `segue bench --trace` do with its flags?"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from segue.errors import Misconfigured
from segue.printable import cell
from segue_bench.machine import describe, in_words
from segue_bench.report import open_console, write_json
from segue_bench.sessions import Session, load_sessions
from segue_bench.trace import TRACE_WAYS, TraceRun, TraceWay, replay, vocabulary_words
from segue_bench.trace_report import (
    LEGEND,
    TraceReport,
    TraceSettings,
    along,
    amplification_table,
    amplifications,
    ttft_chart,
    ttft_table,
)
from segue_bench.ways import named_ways

# Few enough for a minute: they have about 450 turns.
SESSIONS = 8
SCALE = 16
WAYS: tuple[TraceWay, ...] = ("ws", "http-chained", "http-full", "json-full")
PEERS = ("agentic-api",)
PEER_WAYS: tuple[TraceWay, ...] = ("ws", "http-full")
SHIPPED = "shipped"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a replay."""
    group = parser.add_argument_group("replay of recorded sessions")
    add = group.add_argument
    trace = (
        "replay recorded agent sessions (a JSON file as docs/inside/performance.md describes; without FILE the 120 that"
        " are shipped) and report how much work is done again"
    )
    add("--trace", nargs="?", const=SHIPPED, metavar="FILE", help=trace)
    many = f"how many sessions of the file, spread over it (default: {SESSIONS}); 0: all"
    add("--sessions", type=_natural, default=SESSIONS, metavar="N", help=many)
    divided = f"divide all numbers of tokens by this (default: {SCALE}); 1: as recorded"
    add("--scale", type=_natural, default=SCALE, metavar="K", help=divided)
    peer = "also replay by another gateway, which is installed from the package index: agentic-api"
    add("--peer", action="append", default=[], choices=PEERS, help=peer)


def _natural(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 1_000_000:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return number


def run(options: argparse.Namespace, shown: Sequence[str]) -> int:
    """Replay, print, write; the exit status is 1 if a turn failed."""
    ways = named_ways(options.ways, TRACE_WAYS, WAYS)
    if options.url:
        raise Misconfigured(
            "--trace reads counters of servers that it starts itself: leave --url out."
        )
    if options.scale < 1:
        raise Misconfigured("--scale must be 1 or more.")
    sessions = _chosen(_load(options.trace), options.sessions)
    machine = describe()
    console = open_console()
    runs = _replayed(sessions, ways, options.scale, options.peer, console)
    report = TraceReport(
        machine=machine,
        settings=TraceSettings(
            sessions=len(sessions),
            turns=sum(len(session.turns) for session in sessions),
            scale=options.scale,
            file="agent_sessions.json" if options.trace == SHIPPED else Path(options.trace).name,
            command=shlex.join(["segue", "bench", *shown]),
        ),
        amplification=[row for run in runs for row in amplifications(run)],
        ttft=[along(run) for run in runs if not run.way.startswith("json")],
        failures=[
            f"{run.server} {run.way}: {run.first_failure}" for run in runs if run.first_failure
        ],
    )
    _print(report, console)
    if options.json:
        write_json(options.json, report)
    if options.svg and report.ttft:
        path = options.svg.with_name(f"{options.svg.name}-ttft.svg")
        path.write_text(ttft_chart(report.ttft))
    return int(bool(report.failures))


def _replayed(
    sessions: Sequence[Session],
    ways: Sequence[TraceWay],
    scale: int,
    peers: Sequence[str],
    console: Console,
) -> list[TraceRun]:
    peer_ways = [way for way in PEER_WAYS if way in ways] if peers else []
    words = vocabulary_words()
    turns = sum(len(session.turns) for session in sessions)
    with TraceProgress(console, turns * (len(ways) + len(peer_ways))) as bar:
        runs = [replay(sessions, way, words, scale, bar) for way in ways]
        runs += [replay(sessions, way, words, scale, bar, is_peer=True) for way in peer_ways]
    return runs


def _print(report: TraceReport, console: Console) -> None:
    settings = report.settings
    console.print(amplification_table(report.amplification))
    if report.ttft:
        console.print(ttft_table(report.ttft))
    for failure in report.failures:
        console.print(cell(f"first failure of {failure}"), style="red")
    console.print(LEGEND, style="dim")
    console.print(
        f"{in_words(report.machine)}. {settings.sessions} sessions of {settings.file}, {settings.turns:,} turns,"
        f" tokens ÷ {settings.scale}, one session after the other, an engine that counts blocks and takes no time.",
        style="dim",
    )


def _load(name: str) -> list[Session]:
    if name == SHIPPED:
        return load_sessions()
    try:
        sessions = load_sessions(Path(name))
    except OSError as error:
        raise Misconfigured(f"--trace: {name} cannot be read: {error.strerror}.") from None
    except msgspec.MsgspecError as error:
        raise Misconfigured(f"--trace: {name} is not a file of sessions: {error}.") from None
    if not any(session.turns for session in sessions):
        raise Misconfigured(f"--trace: {name} has no turns.")
    return sessions


def _chosen(sessions: Sequence[Session], count: int) -> list[Session]:
    """So many, spread over the file."""
    if not count or count >= len(sessions):
        return list(sessions)
    return [sessions[number * len(sessions) // count] for number in range(count)]


class TraceProgress:
    """Shows how far a replay is."""

    def __init__(self, console: Console, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=total)

    def __enter__(self) -> TraceProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def began(self, server: str, way: TraceWay) -> None:
        self._progress.update(self._task, description=f"{server}, {way:<12}")

    def advanced(self) -> None:
        self._progress.advance(self._task)
