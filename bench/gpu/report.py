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
from bench.gpu.servers import BLOCKS, FAMILIES, FORMS, engine_name
from segue_bench.charts import WIDTH, bar, picture, text
from segue_bench.figures import percentile, tokens_words

# In the order of the tables: the way, in words, and the colour of another chart.
WAY_WORDS = {
    "ids": ("vLLM, ids", "client"),
    "chat": ("vLLM chat", "http-new"),
    "responses": ("vLLM Responses", "http-full, bare"),
    "agentic": ("agentic-api, socket", "rollout"),
    "http-off": ("Segue HTTP, cache off", "ws-stored"),
    "http": ("Segue HTTP", "http-chained"),
    "ws": ("Segue socket", "ws"),
    "ws-stored": ("Segue socket, stored", "ws"),
}
# Claude Code's loop has a table for each kind of it.
AGENT_WORDS = {
    "cc-messages": ("vLLM Messages", "http-new"),
    "cc-chat": ("vLLM chat", "http-full, bare"),
    "cc-segue-messages": ("Segue Messages", "ws"),
    "cc-segue-chat": ("Segue chat", "http-chained"),
}
WAY_WORDS |= {
    f"{way}-{kind}": (f"{name}, {kind}", colour)
    for kind in KINDS
    for way, (name, colour) in AGENT_WORDS.items()
}
# Forms of an engine, in the order of the tables.
FORM_WORDS = {"": "", "tuned": "tuned", "rust": "Rust", "one": "step one", "two": "step two"}
BLOCKS_WORDS = "blocks of 128"
# Model and form of the engine, by its name.
GROUPS = {
    "tuned": ("written", "tuned"),
    "real": ("real", ""),
    "real-rust": ("real", "rust"),
    "real-tuned": ("real", "tuned"),
    "exact": ("real, float32, little room", "two"),
    "exact-bf16": ("real, little room", "two"),
}
MODELS = {"plain": "written", "fast": "small, speculation", "big": "Qwen3-8B's shape"}
GROUPS |= {
    engine_name(family, form, blocks): (MODELS[family], f"{form}{' 128' if blocks else ''}")
    for family, *_ in FAMILIES
    for form in FORMS
    for blocks in ((), BLOCKS)
}
# Of another chart, where the same way has another form.
COLOURS = {("tuned", "chat"): "http-full, cache off", ("rust", "chat"): "http-full, cache on"}


def name_of(engine: str, way: str) -> str:
    """A row in words, such as `Segue socket, Rust, blocks of 128`."""
    form, _, blocks = GROUPS[engine][1].partition(" ")
    if (form, blocks, way) == ("", "", "ids"):
        return "vLLM, ids (the floor)"
    words = (WAY_WORDS[way][0], FORM_WORDS[form], BLOCKS_WORDS if blocks else "")
    return ", ".join(filter(None, words))


def _order(row: Row) -> tuple[int, int, bool]:
    form, _, blocks = GROUPS[row.engine][1].partition(" ")
    return list(FORM_WORDS).index(form), list(WAY_WORDS).index(row.way), bool(blocks)


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
    # vLLM's own mean time for the new part of a prompt; None where it counts none.
    prefill_ms: float | None = None
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
    rows.sort(key=lambda row: (*_place(row), *_order(row)))
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
    ttft = [ms for one in rounds for ms in one.ttft_ms]
    prefill = [one.engine_ms["prefill"] for one in rounds if "prefill" in one.engine_ms]
    computed = [one.computed_per_turn for one in rounds if one.computed_per_turn is not None]

    def mean(values: Sequence[float]) -> float:
        return round(statistics.mean(values), 2)

    return Row(
        machine=machine,
        model=GROUPS[case.engine][0],
        name=name_of(case.engine, case.way),
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
        prefill_ms=mean(prefill) if prefill else None,
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


# --- round by round -------------------------------------------------------------------------------

PAIR_HEADINGS = (
    "way",
    "TTFT p50",
    "less vLLM's prefill",
    "TTFT against the ids, each round",
    "against the ids on Rust",
    "loop against the ids, each round",
    "against the ids on Rust",
)


def pairs_table(machines: Sequence[Sequence[Figures]]) -> str:
    """Each way beside the ids of the same round, straight and on the Rust front end; where these were measured."""
    lines: list[str] = []
    for number, figures in enumerate(machines, 1):
        good = {one.case: one for one in figures if not one.failed}
        rows = {(_place(row), row.name): row for row in rows_of(number, figures)}
        places = dict.fromkeys(place for place, _ in rows)
        for place in places:
            some = [row for (at, _), row in rows.items() if at == place]
            if not any(_form(row.engine) in ("one", "two") for row in some):
                continue
            model, conversations, context, _ = place
            lines += [
                f"\nMachine {number}, *{model}*, {tokens_words(context)}, {conversations} at once\n",
                f"| {' | '.join(PAIR_HEADINGS)} |",
                "|" + "---|" * len(PAIR_HEADINGS),
                *(_pair_line(row, good) for row in some),
            ]
    return "\n".join(lines)


def _form(engine: str) -> str:
    return GROUPS[engine][1].partition(" ")[0]


def _pair_line(row: Row, good: dict[Case, Figures]) -> str:
    family = row.engine.partition("-")[0]
    family = family if family in MODELS else "plain"
    rounds = [
        one
        for case, one in good.items()
        if (case.engine, case.way, case.context) == (row.engine, row.way, row.context)
        and case.conversations == row.conversations
    ]
    shares: list[str] = []
    for value in (_ttft, _loop):
        for form in ("", "rust"):
            base = engine_name(family, form, ())
            same = [
                (one, good.get(replace(one.case, engine=base, way="ids")))
                for one in sorted(rounds, key=lambda one: one.case.round)
            ]
            shares.append(
                " ".join(f"{value(one) / value(ids):.2f}" for one, ids in same if ids is not None)
            )
    less = "–" if row.prefill_ms is None else f"{row.ttft_ms_p50 - row.prefill_ms:.0f} ms"
    cells = (row.name, f"{row.ttft_ms_p50:.0f} ms", less, *shares)
    return f"| {' | '.join(cells)} |"


def _ttft(one: Figures) -> float:
    return statistics.median(one.ttft_ms)


def _loop(one: Figures) -> float:
    return one.loop_s


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


def _colour(row: Row) -> str:
    return COLOURS.get((GROUPS[row.engine][1], row.way), WAY_WORDS[row.way][1])


def _panel(rows: Sequence[Row], left: float, top: float, words: str) -> list[str]:
    scale = (WIDTH / 2 - LABEL - 70) / max(row.turn_ms_p50 for row in rows)
    parts = [text(left + 8, top + 20, words, "title")]
    for number, row in enumerate(rows):
        x, y = left + LABEL, top + 34 + 24 * number
        first = scale * row.ttft_ms_p50
        told = f"{row.name}: {row.turn_ms_p50:.0f} ms, first token after {row.ttft_ms_p50:.0f} ms"
        parts += [
            text(x - 8, y + 13, row.name, "", "end"),
            bar(x, y, first, 16, _colour(row), told),
            bar(x + first, y, scale * row.turn_ms_p50 - first, 16, "sample", told),
            text(x + scale * row.turn_ms_p50 + 8, y + 13, f"{row.turn_ms_p50:.0f}"),
        ]
    return parts


def report(machines: Sequence[Path], json_path: Path | None, svg_path: Path | None) -> None:
    """Print the tables of the results of each machine; write the files that are asked for."""
    rows: list[Row] = []
    failed: list[tuple[Case, str]] = []
    figures_of: list[list[Figures]] = []
    for number, path in enumerate(machines, 1):
        figures = results(path)
        rows += rows_of(number, figures)
        figures_of.append(figures)
        failed += [(one.case, one.failed) for one in figures if one.failed]
    print(tables(rows))
    if paired := pairs_table(figures_of):
        print(paired)
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
    "step one, step two": "segue_vllm in the vLLM; with its scheduler",
    "Qwen3-8B's shape": "made weights, temperature 0",
}
