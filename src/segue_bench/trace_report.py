"""What does a replay of sessions show? Amplification by way and kind of turn, and the time to the first text by turn.

*Amplification* is what was done for each new one: bytes of items received, items validated, tokens tokenized by the
server, tokens computed by the engine. 1.0 means that nothing was done again.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec import Struct
from rich.table import Table

from segue_bench.charts import ChartAxis, ChartLine, line_chart, log_ticks
from segue_bench.figures import tokens_words
from segue_bench.machine import Machine
from segue_bench.report import empty_table, shown
from segue_bench.trace import KINDS, TraceRun, TraceTotals

# First turns of the groups in which times are shown.
GROUPS = (1, 2, 6, 11, 21, 41, 81)


class Amplification(Struct, frozen=True):
    """One row: turns of one kind, by one way."""

    server: str
    way: str
    kind: str
    turns: int
    failed: int
    # Turns whose parent the server had lost: the whole history was sent instead.
    restarted: int
    # Per new one; None where nothing was new.
    bytes: float | None
    items: float | None
    tokenized: float | None
    computed: float | None
    # Sent with every turn, whatever is new: tools and instructions, and the other fields of a request.
    head_bytes_per_turn: float
    envelope_bytes_per_turn: float
    new_bytes: int
    new_items: int
    new_tokens: int
    input_tokens: int
    bytes_received: int
    # Of a peer: what the endpoint that it asks received from it.
    upstream_bytes: int | None
    ttft_ms_p50: float | None


class TtftGroup(Struct, frozen=True):
    """The turns from this one of a session up to the next group."""

    first_turn: int
    turns: int
    input_tokens_p50: int
    ttft_ms_p50: float


class TraceAlong(Struct, frozen=True):
    """How the time to the first text grows with a session."""

    server: str
    way: str
    groups: list[TtftGroup]


class TraceSettings(Struct, frozen=True):
    """What was replayed."""

    sessions: int
    turns: int
    scale: int
    file: str
    command: str


class TraceReport(Struct, frozen=True):
    """The JSON file."""

    machine: Machine
    settings: TraceSettings
    amplification: list[Amplification]
    ttft: list[TraceAlong]
    failures: list[str]


def amplifications(run: TraceRun) -> list[Amplification]:
    """The rows of one way, kinds without a turn left out."""
    totals = ((kind, run.totals[kind]) for kind in KINDS)
    return [_row(run, kind, total) for kind, total in totals if total.turns or total.failed]


def _row(run: TraceRun, kind: str, totals: TraceTotals) -> Amplification:
    is_peer = run.server != "segue"
    turns = max(1, totals.turns)
    envelope = totals.sent_bytes - totals.items_bytes - totals.head_bytes
    # A peer has no counters: what it received is what was sent to it.
    received = totals.sent_bytes if is_peer else int(totals.received_bytes)
    is_streamed = not run.way.startswith("json")
    return Amplification(
        server=run.server,
        way=run.way,
        kind=kind,
        turns=totals.turns,
        failed=totals.failed,
        restarted=totals.restarted,
        bytes=_ratio(received - totals.head_bytes - envelope, totals.new_bytes),
        items=_ratio(totals.items_validated, totals.new_items),
        tokenized=_ratio(totals.tokens_tokenized, totals.new_tokens),
        computed=_ratio(totals.computed_tokens, totals.new_tokens),
        head_bytes_per_turn=round(totals.head_bytes / turns, 1),
        envelope_bytes_per_turn=round(envelope / turns, 1),
        new_bytes=totals.new_bytes,
        new_items=totals.new_items,
        new_tokens=totals.new_tokens,
        input_tokens=totals.input_tokens,
        bytes_received=received,
        upstream_bytes=int(totals.received_bytes) if is_peer else None,
        ttft_ms_p50=_ms(totals.ttft_s) if is_streamed and totals.ttft_s else None,
    )


def _ratio(done: float, new: float) -> float | None:
    return round(done / new, 4) if new else None


def _ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 2)


def along(run: TraceRun) -> TraceAlong:
    """Median times by the place of a turn in its session."""
    groups = []
    for place, first in enumerate(GROUPS):
        end = GROUPS[place + 1] if place + 1 < len(GROUPS) else float("inf")
        points = [point for point in run.along if first <= point[0] < end]
        if points:
            tokens = round(statistics.median(point[1] for point in points))
            groups.append(
                TtftGroup(first, len(points), tokens, _ms([point[2] for point in points]))
            )
    return TraceAlong(run.server, run.way, groups)


COLUMNS = "way|turns|bytes x|items x|tokenized x|computed x|tools, instr. B|envelope B|TTFT ms"
TITLES = {
    "continuation": "continuations: all of the parent, and something new",
    "reset": "resets: only a part of the parent is kept",
    "root": "first requests of sessions and sub-agents",
}
LEGEND = (
    "bytes, items, tokenized, computed: done for each new one; 1.0: nothing is done again. bytes: of items, received "
    "by the server. tokenized: by the server (of agentic-api: by the endpoint that it asks). computed: prompt tokens "
    "that the engine did not find. Apart: tools and instructions, which agents send with every turn, and the other "
    "fields of a request, bytes a turn. resent: turns whose parent the server no longer had. "
    "TTFT: request to first text, engine without delay."
)


def amplification_table(rows: Sequence[Amplification]) -> Table:
    """Kinds of turns one below the other, ways within."""
    table = empty_table(*COLUMNS.split("|"))
    for kind, title in TITLES.items():
        chosen = [row for row in rows if row.kind == kind]
        if not chosen:
            continue
        table.add_section()
        table.add_row(f"[bold cyan]{title}")
        for row in chosen:
            lost = f" ({row.restarted} resent)" if row.restarted else ""
            failed = f" [red](+{row.failed} failed)" if row.failed else ""
            table.add_row(
                f" {name_of(row)}",
                f"{row.turns:,}{lost}{failed}",
                *(
                    shown(value, ".2f")
                    for value in (row.bytes, row.items, row.tokenized, row.computed)
                ),
                f"{row.head_bytes_per_turn:,.0f}",
                f"{row.envelope_bytes_per_turn:,.0f}",
                shown(row.ttft_ms_p50, ".1f"),
            )
    return table


def name_of(row: Amplification | TraceAlong) -> str:
    """The way; of another server, with its name."""
    return row.way if row.server == "segue" else f"{row.server} {row.way}"


def ttft_table(lines: Sequence[TraceAlong]) -> Table:
    """The time to the first text by turn."""
    names = [_group_words(group.first_turn) for group in lines[0].groups]
    table = empty_table("TTFT ms p50 by turn", *names)
    prompts = [tokens_words(group.input_tokens_p50) for group in lines[0].groups]
    table.add_row(" prompt", *prompts, style="dim")
    for line in lines:
        table.add_row(f" {name_of(line)}", *(f"{group.ttft_ms_p50:.1f}" for group in line.groups))
    return table


def _group_words(first: int) -> str:
    place = GROUPS.index(first) + 1
    if place == len(GROUPS):
        return f"{first}+"
    last = GROUPS[place] - 1
    return str(first) if last == first else f"{first}–{last}"


def ttft_chart(lines: Sequence[TraceAlong]) -> str:
    """The same as a picture."""
    values = [group.ttft_ms_p50 for line in lines for group in line.groups]
    low = max(0.05, min(values) * 0.8)
    high = max(values) * 1.25
    firsts = [group.first_turn for group in lines[0].groups]
    drawn = [
        ChartLine(
            f"{name_of(line)}: {line.groups[-1].ttft_ms_p50:.3g} ms",
            # A colour has the name of a way of `segue bench`.
            line.way.replace("json", "http") if line.server == "segue" else "http-new",
            [(group.first_turn, group.ttft_ms_p50) for group in line.groups],
        )
        for line in lines
    ]
    return line_chart(
        "Time to first text by turn of a recorded session, ms (logarithmic)",
        drawn,
        ChartAxis(1, max(2, firsts[-1]), [(n, str(n)) for n in firsts], is_log=True),
        ChartAxis(low, high, [(tick, f"{tick:g}") for tick in log_ticks(low, high)], is_log=True),
        "turn",
    )
