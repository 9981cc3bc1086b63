"""What does a person, or a program, get to read? A table in the terminal, and one JSON file.

Each says the machine, the versions, the seed and the repetitions, so that a number never stands alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from segue_bench.charts import (
    baseline,
    seconds_words,
    speed_words,
    tokens_words,
)
from segue_bench.figures import Run, shorter
from segue_bench.machine import Machine, in_words

PAPER_COLUMNS = 150


class Asked(Struct, frozen=True):
    """What the run was asked for."""

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


class Report(Struct, frozen=True):
    """The JSON file."""

    machine: Machine
    runs: list[Run]
    settings: Asked
    left_out: dict[str, str]
    findings: list[str] = []


def paper() -> Console:
    """Where tables are printed; what is not a terminal has no width, so it gets enough."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PAPER_COLUMNS)


def to_json(report: Report) -> bytes:
    """The report as a file for programs."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def groups(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Runs that are compared with each other: one context, one speed."""
    keys = dict.fromkeys((run.context_tokens, run.tokens_per_s) for run in runs)
    for context, speed in keys:
        yield [r for r in runs if (r.context_tokens, r.tokens_per_s) == (context, speed)]


# --- the terminal ---------------------------------------------------------------------------------


COLUMNS = [
    "total",
    "± %",
    "vs full",
    "turn p50",
    "p99 ms",
    "TTFT ms",
    "api",
    "inf",
    "cli",
    "sent kB",
    "recv kB",
    "tokenized",
    "CPU ms",
]


def table(runs: Sequence[Run]) -> Table:
    """The one table."""
    drawn = Table(header_style="bold", pad_edge=False)
    drawn.add_column("way", no_wrap=True)
    for name in COLUMNS:
        drawn.add_column(name, justify="right", no_wrap=True)
    for group in groups(runs):
        first, held = group[0], baseline(group)
        context = tokens_words(first.context_tokens)
        drawn.add_section()
        drawn.add_row(f"[bold cyan]{context}, {speed_words(first.tokens_per_s)}")
        for run in group:
            cells = cells_of(run, held)
            if cells[3].startswith("-"):
                cells[3] = f"[green]{cells[3]}"
            drawn.add_row(*cells)
    return drawn


def cells_of(run: Run, held: Run | None) -> list[str]:
    """One line of the table."""
    gain = "" if held is None or held is run else f"{-shorter(run, held):+.0%}"
    shares = run.shares
    return [
        f" {run.name}",
        seconds_words(run.total_s),
        f"{spread_of(run):.0%}"[:-1] if run.repetitions > 1 else "–",
        gain,
        f"{run.turn_ms_p50:.1f}",
        f"{run.turn_ms_p99:.1f}",
        f"{run.ttft_ms_p50:.1f}",
        _percent(shares.api),
        _percent(shares.inference),
        _percent(shares.client),
        f"{run.bytes_sent / 1e3:,.0f}",
        f"{run.bytes_received / 1e3:,.0f}",
        "–" if run.tokens_tokenized is None else f"{run.tokens_tokenized:,}",
        "–" if run.cpu_ms_per_turn is None else f"{run.cpu_ms_per_turn:.1f}",
    ]


def spread_of(run: Run) -> float:
    """Half of the way from the fastest repetition to the slowest, against the median."""
    return (max(run.total_s_each) - min(run.total_s_each)) / 2 / run.total_s


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


LEGEND = (
    "total: the loop, median of repetitions, tool time included; ±: half of the spread of the repetitions; vs full: "
    "against http-full with the render cache off. "
    "api, inf, cli: shares of a turn in the server and on the way, in the engine, in this client. "
    "sent, recv, tokenized: the whole loop. CPU: the server's, a turn."
)


def context_line(report: Report) -> str:
    """How it was measured, in one line."""
    asked = report.settings
    where = (
        f"server {asked.url}, model {asked.model}" if asked.url else "own server, scripted engine"
    )
    network = f", rtt {asked.rtt_ms:g} ms" if asked.rtt_ms else ""
    tls = ", TLS" if asked.tls else ""
    cut = " (fewer at slow speeds)" if any(r.turns < asked.turns for r in report.runs) else ""
    real = [r.prompt_tokens_first for r in report.runs if r.prompt_tokens_first is not None]
    prompts = (
        " to ".join(f"{tokens:,}" for tokens in sorted({min(real), max(real)})) if real else "?"
    )
    return (
        f"{in_words(report.machine)}. Preset {asked.preset}, {where}{network}{tls}, "
        f"{asked.turns} turns{cut}, {asked.output_tokens} output tokens a turn, prompts of {prompts} tokens, "
        f"seed {asked.seed}, "
        f"{asked.repetitions} repetition{'s' * (asked.repetitions != 1)}, ways interleaved."
    )
