"""What came of it? Results in; tables for people, one JSON and one chart out.

Rounds of the same case are put together: the seconds of all their turns, the medians of their turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bench.gpu.agents import KINDS
from bench.gpu.cases import PLAIN_WAYS, Case, Figures
from segue_bench.charts import WIDTH, bar, picture, text
from segue_bench.figures import percentile, tokens_words

# In the order of the tables: engine's form and way, words, and the colour of another chart.
ROWS = {
    ("", "ids"): ("vLLM, ids (the floor)", "client"),
    ("", "chat"): ("vLLM chat", "http-new"),
    ("", "responses"): ("vLLM Responses", "http-full, bare"),
    ("tuned", "chat"): ("vLLM chat, tuned", "http-full, cache off"),
    ("tuned", "responses"): ("vLLM Responses, tuned", "http-full, cache off"),
    ("rust", "chat"): ("vLLM chat, Rust", "http-full, cache on"),
    ("", "agentic"): ("agentic-api, socket", "rollout"),
    ("", "http-off"): ("Segue HTTP, cache off", "ws-stored"),
    ("", "http"): ("Segue HTTP", "http-chained"),
    ("", "ws"): ("Segue socket", "ws"),
    ("", "ws-stored"): ("Segue socket, stored", "ws"),
    ("rust", "ids"): ("vLLM, ids, Rust", "client"),
    ("rust", "ws"): ("Segue socket, Rust", "ws"),
    ("tuned", "ws"): ("Segue socket, tuned", "ws"),
    ("rust", "http"): ("Segue HTTP, Rust", "http-chained"),
    ("tuned", "http"): ("Segue HTTP, tuned", "http-chained"),
    ("tuned", "ids"): ("vLLM, ids, tuned", "client"),
}
# Claude Code's loop has a table for each kind of it.
AGENT_ROWS = {
    "cc-messages": ("vLLM Messages", "http-new"),
    "cc-chat": ("vLLM chat", "http-full, bare"),
    "cc-segue-messages": ("Segue Messages", "ws"),
    "cc-segue-chat": ("Segue chat", "http-chained"),
}
FORMS = ("", "tuned", "rust")
ROWS |= {
    (form, f"{way}-{kind}"): (f"{name}, {kind}" + (f", {form.title()}" if form else ""), colour)
    for kind in KINDS
    for way, (name, colour) in AGENT_ROWS.items()
    for form in FORMS
}
# Form of the engine by its name, and what is served.
GROUPS = {
    "plain": ("written", ""),
    "rust": ("written", "rust"),
    "tuned": ("written", "tuned"),
    "fast": ("small, speculation", ""),
    "fast-rust": ("small, speculation", "rust"),
    "real": ("real", ""),
    "real-rust": ("real", "rust"),
    "real-tuned": ("real", "tuned"),
}


class Row(Struct, frozen=True, kw_only=True):
    """One way at one context on one machine: all its rounds."""

    machine: int
    model: str
    name: str
    engine: str
    way: str
    context: int
    conversations: int
    turns: int
    loop_s: float
    loop_s_each: list[float]
    ttft_ms_p50: float
    ttft_ms_p95: float
    turn_ms_p50: float
    # As the client saw them: where a front end lags behind its engine, they come in bursts.
    tokens_per_s: float
    prompt_first: int
    prompt_last: int
    computed_per_turn: float | None
    sent_per_turn: float
    cpu_ms: dict[str, float]
    # Which share of the median turn is more than the same ids take, sent straight to the same vLLM.
    beyond_ids: float | None = None
    # How much longer each loop was than that of the ids in the same round: 0.02 is 2 % longer.
    loop_beyond_ids: list[float] = []


class Results(Struct, frozen=True):
    """The whole JSON file."""

    notes: dict[str, str]
    rows: list[Row]
    failed: list[tuple[Case, str]]


def rows_of(machine: int, figures: Sequence[Figures]) -> list[Row]:
    """One row for all rounds of a case, in the order of the tables."""
    merged: dict[Case, list[Figures]] = {}
    for one in sorted(figures, key=lambda one: one.case.round):
        if not one.failed:
            case = replace(one.case, round=0)
            merged.setdefault(case, []).append(one)
    rows = [
        _beyond(_row(machine, case, rounds), rounds, merged.get(replace(case, way="ids"), []))
        for case, rounds in merged.items()
    ]
    order = [name for name, _ in ROWS.values()]
    rows.sort(key=lambda row: (*_place(row), order.index(row.name)))
    return rows


def _beyond(row: Row, rounds: Sequence[Figures], straight: Sequence[Figures]) -> Row:
    """The row beside the same ids, sent straight to the same vLLM."""
    if not straight:
        return row
    floor_ms = round(statistics.median(ms for one in straight for ms in one.turn_ms), 1)
    loops = {one.case.round: one.loop_s for one in straight}
    return replace(
        row,
        beyond_ids=round(1 - floor_ms / row.turn_ms_p50, 4),
        loop_beyond_ids=[
            round(one.loop_s / loops[one.case.round] - 1, 4)
            for one in rounds
            if one.case.round in loops
        ],
    )


def _place(row: Row) -> tuple[str, int, int, str]:
    """What stands in one table."""
    return row.model, row.conversations, row.context, _kind(row)


def _kind(row: Row) -> str:
    """Which of Claude Code's loops this is, if it is one."""
    return "" if row.way in PLAIN_WAYS else row.way.rpartition("-")[2]


def _row(machine: int, case: Case, rounds: Sequence[Figures]) -> Row:
    model, form = GROUPS[case.engine]
    ttft = [ms for one in rounds for ms in one.ttft_ms]
    computed = [one.computed_per_turn for one in rounds if one.computed_per_turn is not None]

    def mean(values: Sequence[float]) -> float:
        return round(statistics.mean(values), 2)

    return Row(
        machine=machine,
        model=model,
        name=ROWS[form, case.way][0],
        engine=case.engine,
        way=case.way,
        context=case.context,
        conversations=case.conversations,
        turns=case.turns * len(rounds),
        loop_s=round(sum(one.loop_s for one in rounds), 3),
        loop_s_each=[one.loop_s for one in rounds],
        ttft_ms_p50=round(statistics.median(ttft), 1),
        ttft_ms_p95=round(percentile(ttft, 0.95), 1),
        turn_ms_p50=round(statistics.median(ms for one in rounds for ms in one.turn_ms), 1),
        tokens_per_s=mean([one.tokens_per_s for one in rounds]),
        prompt_first=rounds[0].prompt_first,
        prompt_last=rounds[0].prompt_last,
        computed_per_turn=mean(computed) if computed else None,
        sent_per_turn=mean([one.sent_per_turn for one in rounds]),
        cpu_ms={name: mean([one.cpu_ms[name] for one in rounds]) for name in rounds[0].cpu_ms},
    )


# What a loop is compared with: vLLM's chat, and for Claude Code's loop its own Messages.
BASES = ("vLLM chat", "vLLM Messages")
HEADINGS = (
    "way",
    "20 turns",
    "against vLLM chat",
    "TTFT p50, p95",
    "turn p50",
    "more than the ids",
    "loop against the ids, each round",
    "CPU a turn: gateway, vLLM's front end",
    "computed a turn",
    "sent a turn",
)


def tables(rows: Sequence[Row]) -> str:
    """One Markdown table for each model, context and number of conversations on each machine."""
    lines: list[str] = []
    for machine, place in dict.fromkeys((row.machine, _place(row)) for row in rows):
        some = [row for row in rows if (row.machine, _place(row)) == (machine, place)]
        model, conversations, context, kind = place
        speed = next((f", {row.tokens_per_s:.0f} tokens/s" for row in some if row.way == "ids"), "")
        many = f"{conversations} conversations" if conversations > 1 else "one conversation"
        lines += [
            f"\nMachine {machine}, *{model}*, {tokens_words(context)}, {many}{speed}"
            + (f", Claude Code's loop, {kind}" if kind else "")
            + "\n",
            f"| {' | '.join(HEADINGS)} |".replace("vLLM chat", BASES[bool(kind)]),
            "|" + "---|" * len(HEADINGS),
        ]
        lines += [_line(row, some) for row in some]
    return "\n".join(lines)


def _line(row: Row, some: Sequence[Row]) -> str:
    """A row of a table. Loops of another length are brought to 20 turns."""
    base = f"cc-messages-{_kind(row)}" if _kind(row) else "chat"
    plain = [one for one in some if not GROUPS[one.engine][1] and one.way == base]
    change = (
        f"{row.loop_s / row.turns * plain[0].turns / plain[0].loop_s - 1:+.0%}" if plain else ""
    )
    beyond = "" if row.beyond_ids is None else f"{row.beyond_ids:.1%}"
    gateway = f"{row.cpu_ms['gateway']:.0f}" if "gateway" in row.cpu_ms else "–"
    cells = (
        row.name,
        f"{20 * row.loop_s / row.turns:.2f} s",
        change.replace("-", "−"),
        f"{row.ttft_ms_p50:.0f}, {row.ttft_ms_p95:.0f} ms",
        f"{row.turn_ms_p50:.0f} ms",
        beyond.replace("-", "−"),
        " ".join(f"{share:+.1%}" for share in row.loop_beyond_ids).replace("-", "−"),
        f"{gateway}, {row.cpu_ms['front']:.0f} ms",
        "–" if row.computed_per_turn is None else f"{row.computed_per_turn:.0f}",
        f"{row.sent_per_turn / 1e3:.0f} kB",
    )
    return f"| {' | '.join(cells)} |"


# --- chart ----------------------------------------------------------------------------------------

LABEL = 166.0
NOT_DRAWN = (
    *("Segue socket, stored", "Segue HTTP, cache off", "Segue socket, tuned"),
    *("vLLM Responses, tuned", "vLLM, ids, Rust"),
)
PANELS = (
    ("written", 100_000, 1, "100k tokens, one conversation"),
    ("small, speculation", 100_000, 1, "100k, 12 layers, n-gram speculation: 2,400 tokens/s"),
    ("real", 20_000, 32, "SmolLM2, 20k tokens, 32 conversations"),
    ("written", 20_000, 1, "20k tokens, one conversation"),
)

LEGEND = (
    "Median turn in ms, 100 tokens written, one H200, vLLM 0.26. Strong: until the first token. Pale: vLLM writes.",
    "tuned: 4 API processes and a faster tokenizer. Rust: vLLM's own Rust front end, which has no Responses API.",
)


def chart(rows: Sequence[Row]) -> str:
    """The median turn by each way, divided where the first token comes."""
    parts: list[str] = []
    top = bottom = 0.0
    for number, (model, context, conversations, words) in enumerate(PANELS):
        some = [row for row in rows if _place(row) == (model, conversations, context, "")]
        some = [row for row in some if row.name not in NOT_DRAWN]
        if not some:
            continue
        left, top = number % 2 * WIDTH / 2, top if number % 2 else bottom
        parts += _panel(some, left, top, words)
        bottom = max(bottom, top + 50 + 24 * len(some))
    parts += [text(8, bottom + 12 + 18 * n, line, "soft") for n, line in enumerate(LEGEND)]
    return picture(bottom + 42, "A turn in front of a real vLLM on an H200, by each way", parts)


def _panel(rows: Sequence[Row], left: float, top: float, words: str) -> list[str]:
    scale = (WIDTH / 2 - LABEL - 70) / max(row.turn_ms_p50 for row in rows)
    colours = dict(ROWS.values())
    parts = [text(left + 8, top + 20, words, "title")]
    for number, row in enumerate(rows):
        x, y = left + LABEL, top + 34 + 24 * number
        first = scale * row.ttft_ms_p50
        told = f"{row.name}: {row.turn_ms_p50:.0f} ms, first token after {row.ttft_ms_p50:.0f} ms"
        parts += [
            text(x - 8, y + 13, row.name, "", "end"),
            bar(x, y, first, 16, colours[row.name], told),
            bar(x + first, y, scale * row.turn_ms_p50 - first, 16, "sample", told),
            text(x + scale * row.turn_ms_p50 + 8, y + 13, f"{row.turn_ms_p50:.0f}"),
        ]
    return parts


def report(machines: Sequence[Path], json_path: Path | None, svg_path: Path | None) -> None:
    """Print the tables of the results of each machine; write the files that are asked for."""
    rows: list[Row] = []
    failed: list[tuple[Case, str]] = []
    for number, path in enumerate(machines, 1):
        figures = results(path)
        rows += rows_of(number, figures)
        failed += [(one.case, one.failed) for one in figures if one.failed]
    print(tables(rows))
    for case, why in failed:
        print(f"\nfailed: {case}: {why}")
    if json_path is not None:
        data = msgspec.json.encode(Results(NOTES, rows, failed))
        json_path.write_bytes(msgspec.json.format(data, indent=1) + b"\n")
    if svg_path is not None:
        svg_path.write_text(chart([row for row in rows if row.machine == 1]))


def results(path: Path) -> list[Figures]:
    """What was measured so far."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Figures) for line in lines]


NOTES = {
    "machines": "one H200, 16 cores of a Xeon, Linux 6.18, Python 3.12.3, torch 2.11.0, vLLM 0.26.0, all on loopback",
    "written": "Qwen3-0.6B's dimensions and vocabulary, made weights, temperature 0",
    "small, speculation": "12 layers of it with 2 key heads, n-gram speculation with 8 guesses a step",
    "real": "SmolLM2-135M, temperature 0.7",
    "tuned": "--api-server-count 4 and VLLM_USE_FASTOKENS=1",
    "rust": "VLLM_USE_RUST_FRONTEND=1",
}
