"""What does a person, or a program, get to read? A table in the terminal, and one JSON file.

Each names the machine, the versions, the seed and the repetitions, so that a number never stands alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from segue_bench.figures import (
    BenchRun,
    baseline,
    seconds_words,
    shorter,
    speed_words,
    tokens_words,
)
from segue_bench.machine import Machine, in_words

FILE_COLUMNS = 150


class BenchSettings(Struct, frozen=True):
    """The settings of the run."""

    preset: str
    seed: int
    repetitions: int
    turns: int
    output_tokens: int
    tool_ms: float
    rtt_ms: float
    tls: bool
    url: str
    model: str
    command: str


class BenchReport(Struct, frozen=True):
    """The JSON file."""

    machine: Machine
    runs: list[BenchRun]
    settings: BenchSettings
    left_out: dict[str, str]
    findings: list[str] = []


def open_console() -> Console:
    """Where tables are printed; a file or a pipe has no width, so it gets enough."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=FILE_COLUMNS)


def write_json(path: Path, report: Struct) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def empty_table(first: str, *others: str) -> Table:
    """Words on the left, numbers on the right."""
    table = Table(header_style="bold", pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def shown(value: float | None, form: str) -> str:
    """A number, or a dash where it is not known."""
    return "–" if value is None else format(value, form)


def groups(runs: Sequence[BenchRun]) -> Iterator[list[BenchRun]]:
    """Runs that are compared with each other: one context, one speed."""
    for key in dict.fromkeys((run.context_tokens, run.tokens_per_s) for run in runs):
        yield [run for run in runs if (run.context_tokens, run.tokens_per_s) == key]


COLUMNS = (
    "way|total|± %|vs full|turn p50|p99 ms|TTFT ms|api|inf|cli|sent kB|recv kB|tokenized|CPU ms"
)
GAIN = COLUMNS.split("|").index("vs full")


def table(runs: Sequence[BenchRun]) -> Table:
    """All runs, those that are compared with each other together."""
    drawn = empty_table(*COLUMNS.split("|"))
    for group in groups(runs):
        first = group[0]
        reference = baseline(group)
        context = tokens_words(first.context_tokens)
        drawn.add_section()
        drawn.add_row(f"[bold cyan]{context}, {speed_words(first.tokens_per_s)}")
        for run in group:
            cells = cells_of(run, reference)
            if cells[GAIN].startswith("-"):
                cells[GAIN] = f"[green]{cells[GAIN]}"
            drawn.add_row(*cells)
    return drawn


def cells_of(run: BenchRun, reference: BenchRun | None) -> list[str]:
    """One row of the table."""
    gain = "" if reference is None or reference is run else f"{-shorter(run, reference):+.0%}"
    return [
        f" {run.name}",
        seconds_words(run.total_s),
        f"{spread_of(run) * 100:.0f}" if run.repetitions > 1 else "–",
        gain,
        f"{run.turn_ms_p50:.1f}",
        f"{run.turn_ms_p99:.1f}",
        f"{run.ttft_ms_p50:.1f}",
        shown(run.shares.api, ".0%"),
        shown(run.shares.inference, ".0%"),
        shown(run.shares.client, ".0%"),
        f"{run.bytes_sent / 1e3:,.0f}",
        f"{run.bytes_received / 1e3:,.0f}",
        shown(run.tokens_tokenized, ",d"),
        shown(run.cpu_ms_per_turn, ".1f"),
    ]


def spread_of(run: BenchRun) -> float:
    """Half of the difference between the fastest repetition and the slowest, against the median."""
    return (max(run.total_s_each) - min(run.total_s_each)) / 2 / run.total_s


LEGEND = (
    "total: the whole loop, median of the repetitions, tool time included; ±: half of the difference between the "
    "fastest and the slowest repetition; vs full: compared with http-full with the render cache off. "
    "api, inf, cli: shares of a turn spent in the server and on the network, in the engine, in this client. "
    "sent, recv, tokenized: the whole loop. CPU: the server's processor time for a turn."
)


def context_line(report: BenchReport) -> str:
    """How it was measured, in one line."""
    settings = report.settings
    where = "own server, scripted engine"
    if settings.url:
        where = f"server {settings.url}, model {settings.model}"
    network = f", rtt {settings.rtt_ms:g} ms" if settings.rtt_ms else ""
    tls = ", TLS" if settings.tls else ""
    cut = " (fewer at slow speeds)" if any(r.turns < settings.turns for r in report.runs) else ""
    real = [r.prompt_tokens_first for r in report.runs if r.prompt_tokens_first is not None]
    limits = sorted({min(real), max(real)}) if real else []
    prompts = " to ".join(f"{tokens:,}" for tokens in limits) or "?"
    return (
        f"{in_words(report.machine)}. Preset {settings.preset}, {where}{network}{tls}, "
        f"{settings.turns} turns{cut}, {settings.output_tokens} output tokens a turn, prompts of {prompts} tokens, "
        f"seed {settings.seed}, "
        f"{settings.repetitions} repetition{'s' * (settings.repetitions != 1)}, ways interleaved."
    )
