"""Which flags does `segue bench` have? What they mean, and what runs because of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from segue.errors import Misconfigured
from segue.printable import say
from segue_bench import crowd, load, trace_command
from segue_bench.client import ConnectionFailed
from segue_bench.figures import speed_words, tokens_words
from segue_bench.findings import findings
from segue_bench.machine import describe
from segue_bench.measure import measure
from segue_bench.page import charts, page
from segue_bench.plan import PRESETS, BenchCase, BenchPlan, cases
from segue_bench.report import (
    LEGEND,
    BenchReport,
    BenchSettings,
    context_line,
    open_console,
    table,
    write_json,
)
from segue_bench.server import ServerNotStarted
from segue_bench.ways import WAYS, TurnFailed, WayName, named_ways

T = TypeVar("T")

FAILED = 1
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the verb its flags."""
    parser.description = (
        "Run the same agent loop over each transport of a Responses server, and report how long it took and "
        "where the time went. Without --url it starts servers of its own, with an engine that plays a script at a "
        "given speed."
    )
    actions = parser.add_subparsers(dest="action", metavar="load|crowd")
    many = "many streams at once: how many does one core sustain?"
    load.add_action(actions.add_parser("load", help=many))
    others = "what idle, stalled and reconnecting clients do to the streams of others"
    crowd.add_action(actions.add_parser("crowd", help=others))
    presets = "; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items())
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), default="quick", help=f"{presets} (default: quick)")
    add("--ways", metavar="WAY,…", help=f"some of {','.join(WAYS)} (default: all)")
    add("--speeds", metavar="N,…", help="tokens a second of the scripted engine; 0: unlimited")
    add("--contexts", metavar="N,…", help="tokens of prompt before the first turn")
    add("--turns", type=_count, metavar="N", help="tool calls of a loop")
    add("--output-tokens", type=_count, metavar="N", help="tokens that the model writes in a turn")
    add("--tool-ms", type=_amount, metavar="MS", help="how long a tool runs")
    network = "round-trip time of a simulated network"
    add("--rtt-ms", type=_amount, default=0.0, metavar="MS", help=network)
    add("--tls", action="store_true", help="through TLS, with a certificate made for the run")
    add("--repeat", type=_count, metavar="N", help="repetitions of every loop")
    add("--seed", type=int, default=1, help="for the texts (default: 1)")
    limit = "limit the sampling time of a loop by giving slow models fewer turns; 0: no limit"
    add("--sampling-s-max", type=_amount, metavar="S", help=limit)
    bare = "measure full history also without the cache of token ids"
    add("--bare", action="store_true", help=bare)
    add("--url", default="", help="measure the server at this URL instead of our own")
    add("--model", default="", help="the model to use at --url")
    add("--key", default="", help="the API key for --url")
    add("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    add("--html", type=Path, metavar="FILE", help="write a page with charts")
    pictures = "write the charts as PREFIX-total.svg, PREFIX-along.svg and PREFIX-stages.svg"
    add("--svg", type=Path, metavar="PREFIX", help=pictures)
    trace_command.add_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Run the verb; the exit status says whether everything could be measured."""
    try:
        if options.action == "load":
            return load.run(options)
        if options.action == "crowd":
            return crowd.run(options)
        if options.trace:
            return trace_command.run(options, _shown(options.arguments))
        return _bench(plan_of(options), options)
    except KeyboardInterrupt:
        say("segue bench: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ServerNotStarted, TurnFailed, ConnectionFailed) as error:
        say(f"segue bench: {error}", file=sys.stderr)
        return FAILED


def plan_of(options: argparse.Namespace) -> BenchPlan:
    """The preset, with what the flags change."""
    preset = PRESETS[options.preset]
    shape = preset.shape
    if options.output_tokens is not None:
        shape = replace(shape, output_tokens=options.output_tokens)
    if options.url and (options.tls or options.rtt_ms or options.speeds):
        raise Misconfigured("--speeds, --tls and --rtt-ms work only without --url: leave them out.")
    if options.url and not options.model:
        raise Misconfigured("--url needs the name of a model on that server: --model NAME.")
    speeds: tuple[float | None, ...] = _numbers(options.speeds, "--speeds") or preset.speeds
    return BenchPlan(
        preset=options.preset,
        shape=shape,
        ways=named_ways(options.ways, WAYS, WAYS),
        speeds=(None,) if options.url else speeds,
        contexts=tuple(map(int, _numbers(options.contexts, "--contexts"))) or preset.contexts,
        turns=_or(options.turns, preset.turns),
        repeat=_or(options.repeat, preset.repeat),
        seed=options.seed,
        tool_ms=_or(options.tool_ms, preset.tool_ms),
        rtt_ms=options.rtt_ms,
        tls=options.tls,
        sampling_s_max=_or(options.sampling_s_max, preset.sampling_s_max),
        bare=options.bare,
        url=options.url,
        model=options.model,
        key=options.key,
    )


def _bench(plan: BenchPlan, options: argparse.Namespace) -> int:
    console = open_console()
    machine = describe()
    with ProgressBar(plan, console) as bar:
        measured = measure(plan, bar)
    settings = BenchSettings(
        preset=plan.preset,
        seed=plan.seed,
        repetitions=plan.repeat,
        turns=plan.turns,
        output_tokens=plan.shape.output_tokens,
        tool_ms=plan.tool_ms,
        rtt_ms=plan.rtt_ms,
        tls=plan.tls,
        url=plan.url,
        model=plan.model,
        command=" ".join(["segue bench", *_shown(options.arguments)]),
    )
    report = BenchReport(
        machine, measured.runs, settings, measured.left_out, findings(measured.runs)
    )
    console.print(table(report.runs))
    for finding in report.findings:
        console.print(f"• {finding}.")
    console.print(LEGEND, style="dim")
    console.print(context_line(report), style="dim")
    if options.json:
        write_json(options.json, report)
    if options.html:
        options.html.write_text(page(report))
    if options.svg:
        for name, svg in charts(report).items():
            options.svg.with_name(f"{options.svg.name}-{name}.svg").write_text(svg)
    return 0


def _shown(arguments: Sequence[str]) -> list[str]:
    """The flags as they were given; without the key."""
    shown = list(arguments)
    for n, word in enumerate(shown):
        if word == "--key" and n + 1 < len(shown):
            shown[n + 1] = "…"
        elif word.startswith("--key="):
            shown[n] = "--key=…"
    return shown


class ProgressBar:
    """Shows how far a run is."""

    def __init__(self, plan: BenchPlan, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", justify="left"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            # Drawing costs processor time, and this process is the client.
            refresh_per_second=4,
            transient=True,
        )
        groups = cases(plan)
        total = sum(case.turns for group in groups for case in group) * plan.repeat
        self._remaining = dict.fromkeys(plan.ways, 0)
        for group in groups:
            for case in group:
                self._remaining[case.way] += case.turns * plan.repeat
        self._task = self._progress.add_task("starting", total=total)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def began(self, case: BenchCase) -> None:
        words = f"{case.way}, {tokens_words(case.context_tokens)}, {speed_words(case.tokens_per_s)}"
        self._progress.update(self._task, description=f"{words:<40}")

    def advanced(self) -> None:
        self._progress.advance(self._task)

    def ended(self, case: BenchCase) -> None:
        self._remaining[case.way] -= case.turns

    def left_out(self, way: WayName, why: str) -> None:
        self._progress.console.print(f"{way} is left out: {why}.", highlight=False, soft_wrap=True)
        left = (self._progress.tasks[0].total or 0) - self._remaining[way]
        self._progress.update(self._task, total=left)


# --- reading flags --------------------------------------------------------------------------------


def _or(value: T | None, preset: T) -> T:
    return preset if value is None else value


def _numbers(text: str | None, flag: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(word) for word in text.split(",")) if text else ()
    except ValueError:
        raise Misconfigured(f"{flag}: '{text}' is not a list of numbers.") from None
    if any(not 0 <= number <= 1e9 for number in numbers):
        raise Misconfigured(f"{flag}: '{text}' has a number below 0 or above 1e9.")
    return tuple(dict.fromkeys(numbers))


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _amount(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1e6:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return number
