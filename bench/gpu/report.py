"""What came of it? Results in; tables for people, one JSON and one chart out.

Rounds of the same case are put together: the seconds of all their turns, the medians of their turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.gpu.cases import Case, Figures
from segue_bench.charts import WIDTH, bar, picture, text
from segue_bench.figures import percentile, tokens_words
from segue_bench.machine import Machine, describe

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
}
# Form of the engine by its name, and what is served.
GROUPS = {
    "plain": ("written", ""),
    "rust": ("written", "rust"),
    "tuned": ("written", "tuned"),
    "fast": ("written, speculation", ""),
    "fast-rust": ("written, speculation", "rust"),
    "real": ("real", ""),
    "real-rust": ("real", "rust"),
    "real-tuned": ("real", "tuned"),
}


class Row(Struct, frozen=True, kw_only=True):
    """One way at one context: all its rounds."""

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
    tokens_per_s: float
    prompt_first: int
    prompt_last: int
    computed_per_turn: float | None
    sent_per_turn: float
    cpu_ms: dict[str, float]
    # Against the same ids sent straight to the same vLLM: which share of the median turn is more than that.
    beyond_ids: float | None = None


class Results(Struct, frozen=True):
    """The whole JSON file."""

    machine: Machine
    notes: dict[str, str]
    rows: list[Row]
    failed: list[tuple[Case, str]]


def rows_of(figures: Sequence[Figures]) -> list[Row]:
    """One row for all rounds of a case, in the order of the tables."""
    merged: dict[Case, list[Figures]] = {}
    for one in figures:
        if not one.failed:
            case = msgspec.structs.replace(one.case, round=0)
            merged.setdefault(case, []).append(one)
    rows = [_row(case, rounds) for case, rounds in merged.items()]
    order = [name for name, _ in ROWS.values()]
    rows.sort(key=lambda r: (r.model, r.conversations, r.context, order.index(r.name)))
    floors = {_place(row): row.turn_ms_p50 for row in rows if row.way == "ids"}
    return [
        msgspec.structs.replace(row, beyond_ids=round(1 - floors[_place(row)] / row.turn_ms_p50, 4))
        if _place(row) in floors
        else row
        for row in rows
    ]


def _place(row: Row) -> tuple[str, int, int]:
    return row.model, row.context, row.conversations


def _row(case: Case, rounds: Sequence[Figures]) -> Row:
    model, form = GROUPS[case.engine]
    ttft = [ms for one in rounds for ms in one.ttft_ms]
    computed = [one.computed_per_turn for one in rounds if one.computed_per_turn is not None]

    def mean(values: Sequence[float]) -> float:
        return round(statistics.mean(values), 2)

    return Row(
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


def tables(rows: Sequence[Row]) -> str:
    """One Markdown table for each model, context and number of conversations."""
    lines: list[str] = []
    for place in dict.fromkeys(map(_place, rows)):
        some = [row for row in rows if _place(row) == place]
        chat = next((row for row in some if row.way == "chat" and "-" not in row.engine), None)
        model, context, conversations = place
        lines += [
            f"\n**{model}, {tokens_words(context)}, {conversations} at once, {some[0].turns} turns**\n",
            "| way | loop | against vLLM chat | TTFT p50, p95 | turn p50 | beyond the floor | tokens/s"
            " | CPU a turn: gateway, vLLM's front | computed a turn | sent |",
            "|" + "---|" * 10,
        ]
        for row in some:
            change = (
                f"{row.loop_s / row.turns / (chat.loop_s / chat.turns) - 1:+.0%}" if chat else ""
            )
            beyond = "" if row.beyond_ids is None else f"{row.beyond_ids:.1%}"
            cpu = f"{row.cpu_ms.get('gateway', 0):.0f}, {row.cpu_ms['front']:.0f} ms"
            lines.append(
                f"| {row.name} | {row.loop_s:.2f} s | {change} | {row.ttft_ms_p50:.0f},"
                f" {row.ttft_ms_p95:.0f} ms | {row.turn_ms_p50:.0f} ms | {beyond} |"
                f" {row.tokens_per_s:.0f} | {cpu} | {row.computed_per_turn} |"
                f" {row.sent_per_turn / 1e3:.0f} kB |".replace("-", "−")
            )
    return "\n".join(lines)


# --- chart ----------------------------------------------------------------------------------------

LABEL = 166.0
PANELS = (
    ("written", 100_000, 1, "100k tokens, one conversation"),
    ("written, speculation", 100_000, 1, "the same with n-gram speculation"),
    ("real", 20_000, 32, "SmolLM2, 20k tokens, 32 conversations"),
    ("written", 20_000, 1, "20k tokens, one conversation"),
)

LEGEND = "Median turn in ms, 100 tokens written, on one H200. Strong: until the first token. Pale: while vLLM writes."


def chart(rows: Sequence[Row]) -> str:
    """The median turn by each way, divided where the first token comes."""
    parts: list[str] = []
    top = bottom = 0.0
    for number, (model, context, conversations, words) in enumerate(PANELS):
        some = [row for row in rows if _place(row) == (model, context, conversations)]
        some = [row for row in some if row.way not in ("ws-stored", "http-off")]
        if not some:
            continue
        left, top = number % 2 * WIDTH / 2, top if number % 2 else bottom
        parts += _panel(some, left, top, words)
        bottom = max(bottom, top + 50 + 24 * len(some))
    parts.append(text(8, bottom + 12, LEGEND, "soft"))
    return picture(bottom + 24, "A turn in front of a real vLLM on an H200, by each way", parts)


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


def report(figures: Sequence[Figures], json_path: Path | None, svg_path: Path | None) -> None:
    """Print the tables; write the files that are asked for."""
    rows = rows_of(figures)
    print(tables(rows))
    failed = [(one.case, one.failed) for one in figures if one.failed]
    for case, why in failed:
        print(f"\nfailed: {case}: {why}")
    if json_path is not None:
        # Drawing it again elsewhere must not change where it was measured.
        known = json_path.read_bytes() if json_path.exists() else b""
        machine = msgspec.json.decode(known, type=Results).machine if known else describe()
        results = Results(machine, NOTES, rows, failed)
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    if svg_path is not None:
        svg_path.write_text(chart(rows))


NOTES = {
    "written": "Qwen3-0.6B's dimensions and vocabulary, made weights, temperature 0",
    "written, speculation": "the same, n-gram speculation with 8 guesses a step",
    "real": "SmolLM2-135M, temperature 0.7",
    "tuned": "--api-server-count 4 and VLLM_USE_FASTOKENS=1",
    "rust": "VLLM_USE_RUST_FRONTEND=1",
}
