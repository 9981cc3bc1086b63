"""How does it look? Runs in, SVG out: each chart stands for itself, in light and dark, without a script or a font.

Three questions, three charts: how long does the loop take by each way (`total_chart`), does a turn become slower as the
chain grows (`along_chart`), and where does a turn's time go (`stage_chart`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from segue_bench.figures import Run, shorter

WIDTH = 920
LABEL = 138
ROW = 26
BAR = 16

# Full history in warm colours, what is chained in cool ones.
COLOURS = {
    "http-new": ("#b4540a", "#f59e4c"),
    "http-full, bare": ("#94340a", "#e2703a"),
    "http-full, cache off": ("#dc7f2e", "#fdba74"),
    "http-full, cache on": ("#c79a13", "#fcd34d"),
    "http-chained": ("#3b6fd4", "#7aa7ff"),
    "ws": ("#0a7d4f", "#34d399"),
    "ws-stored": ("#0e8a92", "#4dd0d8"),
    "rollout": ("#7a4fc4", "#b79cf5"),
}
STAGE_COLOURS = {
    "client": ("#9aa1ad", "#7d8590"),
    "validate": ("#e0b23a", "#f2cc60"),
    "resolve": ("#c98a1b", "#d9a040"),
    "render": ("#d1552c", "#ff8b5e"),
    "first_token": ("#8fb8f2", "#5b8bd6"),
    "sample": ("#c3dbfb", "#36578a"),
    "save": ("#7a4fc4", "#b79cf5"),
    "rest": ("#5f6b7a", "#aab4c0"),
}
STAGE_WORDS = {
    "client": "client",
    "validate": "validate",
    "resolve": "resolve",
    "render": "render and tokenize",
    "first_token": "engine: first token",
    "sample": "engine: sampling",
    "save": "save",
    "rest": "transport and waiting",
}


def _class(name: str) -> str:
    return "c-" + name.replace(", ", "-").replace(" ", "-").replace("_", "-")


def _style() -> str:
    pairs = {**COLOURS, **STAGE_COLOURS}
    light = "".join(f".{_class(k)}{{--c:{v[0]}}}" for k, v in pairs.items())
    dark = "".join(f".{_class(k)}{{--c:{v[1]}}}" for k, v in pairs.items())
    return (
        "<style>.chart{--ink:#1f2430;--soft:#5b6472;--grid:#e3e6ec}"
        f"{light}"
        "@media(prefers-color-scheme:dark){.chart{--ink:#e8eaf0;--soft:#a4adbb;--grid:#343a46}"
        f"{dark}}}"
        ".chart text{fill:var(--ink);font:13px system-ui,'Segoe UI',Helvetica,Arial,sans-serif}"
        ".chart .title{font-size:15px;font-weight:600}.chart .soft{fill:var(--soft);font-size:12px}"
        ".chart .good{font-weight:600}.chart .grid{stroke:var(--grid)}"
        ".chart .fill{fill:var(--c)}.chart .line{fill:none;stroke:var(--c);stroke-width:2.5;"
        "stroke-linejoin:round}</style>"
    )


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'role="img" aria-label="{escape(label)}">'
    )
    return "\n".join([head, _style(), *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(words)}</text>'


def speed_words(speed: float | None) -> str:
    """A speed, for people."""
    if speed is None:
        return "speed of the server's model"
    return f"{speed:,.0f} tokens/s" if speed else "unlimited speed"


def tokens_words(tokens: int) -> str:
    """A context, for people."""
    return f"{tokens / 1000:g}k" if tokens >= 1000 else str(tokens)


def seconds_words(seconds: float) -> str:
    """A duration with three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def baseline(runs: Sequence[Run]) -> Run | None:
    """What others are held against: full history over HTTP with nothing recalled."""
    full = [run for run in runs if run.way == "http-full" and run.piece_cache is not False]
    full = [run for run in full if not run.render_cache]
    return full[0] if full else None


# --- total time by way and speed ------------------------------------------------------------------


def total_chart(runs: Sequence[Run]) -> str:
    """The whole loop by each way, one panel a speed; all runs have one context."""
    speeds = list(dict.fromkeys(run.tokens_per_s for run in runs))
    columns = min(2, len(speeds))
    width = WIDTH / columns
    parts: list[str] = []
    top = 0.0
    for first in range(0, len(speeds), columns):
        row = speeds[first : first + columns]
        heights = [0.0]
        for column, speed in enumerate(row):
            panel = [run for run in runs if run.tokens_per_s == speed]
            drawn, height = _total_panel(panel, column * width, top, width)
            parts += drawn
            heights.append(height)
        top += max(heights)
    return _svg(top, "Time of the whole loop, by way and speed", parts)


def _total_panel(
    runs: Sequence[Run], left: float, top: float, width: float
) -> tuple[list[str], float]:
    room = width - LABEL - 150
    longest = max(max(run.total_s_each) for run in runs)
    held = baseline(runs)
    parts = [
        _text(left + 8, top + 20, speed_words(runs[0].tokens_per_s), "title"),
        _text(left + width - 24, top + 20, f"{runs[0].turns} turns", "soft", "end"),
    ]
    y = top + 34
    for run in runs:
        size = max(1.5, room * run.total_s / longest)
        low, high = (room * one / longest for one in (min(run.total_s_each), max(run.total_s_each)))
        x = left + LABEL
        parts += [
            _text(x - 8, y + 13, run.name, "", "end"),
            f'<rect class="fill {_class(run.name)}" x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" '
            f'height="{BAR}" rx="3"><title>{escape(run.name)}: {run.total_s:.3f} s</title></rect>',
            _text(x + max(size, high) + 8, y + 13, seconds_words(run.total_s)),
        ]
        if high - low > 1.5:
            parts.append(
                f'<path d="M{x + low:.1f} {y + BAR / 2}H{x + high:.1f}" stroke="var(--ink)" '
                'stroke-width="1.5" opacity=".7"/>'
            )
        if held is not None and run is not held:
            gain = shorter(run, held)
            words = f"{-gain:+.0%}".replace("-", "−")
            parts.append(_text(x + max(size, high) + 68, y + 13, words, "soft"))
        y += ROW
    return parts, y - top + 16


# --- turn time along the chain --------------------------------------------------------------------


def along_chart(runs: Sequence[Run]) -> str:
    """Each turn's time, turn by turn; all runs have one speed and one context."""
    left, top, width, height = 64.0, 44.0, WIDTH - 64.0 - 190.0, 270.0
    count = max(run.turns for run in runs)
    values = [one for run in runs for one in run.turn_ms_along]
    low, high = min(values) * 0.8, max(values) * 1.25
    x = _scale(1, max(2, count), left, left + width)
    y = _log_scale(low, high, top + height, top)
    words = f"Time of each turn at {speed_words(runs[0].tokens_per_s)}, ms (logarithmic)"
    parts = [_text(8, 20, words, "title")]
    for tick in _log_ticks(low, high):
        parts += [
            f'<path class="grid" d="M{left} {y(tick):.1f}h{width}"/>',
            _text(left - 8, y(tick) + 4, f"{tick:g}", "soft", "end"),
        ]
    for turn in _turn_ticks(count):
        parts.append(_text(x(turn), top + height + 20, str(turn), "soft", "middle"))
    parts.append(_text(left + width / 2, top + height + 38, "turn", "soft", "middle"))
    for run in runs:
        points = " ".join(f"{x(n + 1):.1f},{y(ms):.1f}" for n, ms in enumerate(run.turn_ms_along))
        parts.append(f'<polyline class="line {_class(run.name)}" points="{points}"/>')
    ends = sorted(runs, key=lambda run: y(run.turn_ms_along[-1]))
    places = spread([y(run.turn_ms_along[-1]) for run in ends], 17)
    for run, at in zip(ends, places, strict=True):
        end = x(run.turns)
        parts += [
            f'<path class="line {_class(run.name)}" style="stroke-width:1" '
            f'd="M{end + 3:.1f} {y(run.turn_ms_along[-1]):.1f}L{end + 16:.1f} {at:.1f}"/>',
            f'<circle class="fill {_class(run.name)}" cx="{end + 20:.1f}" cy="{at:.1f}" r="4"/>',
            _text(end + 29, at + 4, run.name),
        ]
    return _svg(top + height + 50, "Turn time along the chain", parts)


def spread(places: Sequence[float], gap: float) -> list[float]:
    """These places, ascending, moved apart so that labels do not cover each other."""
    found: list[float] = []
    for place in places:
        found.append(max(place, found[-1] + gap) if found else place)
    excess = (found[-1] - places[-1]) / 2 if found else 0.0
    return [place - excess for place in found]


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (end - start) * (value - low) / (high - low)


def _log_scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    line = _scale(math.log(low), math.log(high), start, end)
    return lambda value: line(math.log(value))


def _log_ticks(low: float, high: float) -> list[float]:
    steps = [
        lead * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for lead in (1, 2, 3, 5, 7)
    ]
    return [step for step in steps if low <= step <= high]


def _turn_ticks(count: int) -> list[int]:
    step = max(1, round(count / 6 / 5) * 5) if count > 10 else 1
    return [1, *(n for n in range(step, count + 1, step) if n > 1)]


# --- where a turn's time goes ---------------------------------------------------------------------


def stage_chart(runs: Sequence[Run]) -> str:
    """One bar a way, cut into the stages of a turn; all runs have one speed and one context."""
    room = WIDTH - LABEL - 90
    longest = max(sum(run.stages_ms.values()) for run in runs)
    words = f"Where a turn's time goes at {speed_words(runs[0].tokens_per_s)}, ms"
    parts = [_text(8, 20, words, "title")]
    y = 40.0
    for run in runs:
        parts.append(_text(LABEL - 8, y + 16, run.name, "", "end"))
        x = float(LABEL)
        for stage in STAGE_COLOURS:
            size = room * run.stages_ms.get(stage, 0.0) / longest
            if size < 0.2:
                continue
            parts.append(
                f'<rect class="fill {_class(stage)}" x="{x:.1f}" y="{y:.1f}" width="{size:.1f}" '
                f'height="22"><title>{escape(STAGE_WORDS[stage])}: '
                f"{run.stages_ms[stage]:.2f} ms</title></rect>"
            )
            x += size
        parts.append(_text(x + 8, y + 16, f"{sum(run.stages_ms.values()):.1f}"))
        y += 32
    x = float(LABEL)
    y += 8
    for stage in STAGE_COLOURS:
        if not any(run.stages_ms.get(stage, 0.0) for run in runs):
            continue
        width = 34 + 7 * len(STAGE_WORDS[stage])
        if x + width > WIDTH:
            x, y = float(LABEL), y + 22
        parts += [
            f'<rect class="fill {_class(stage)}" x="{x:.1f}" y="{y:.1f}" width="12" height="12" '
            'rx="2"/>',
            _text(x + 18, y + 11, STAGE_WORDS[stage], "soft"),
        ]
        x += width
    return _svg(y + 26, "Where a turn's time goes", parts)
