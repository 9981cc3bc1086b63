"""How do the figures look? Runs in, SVG out: each chart stands alone, in light and dark, without a script or a font.

Three questions, three charts: how long does the loop take by each way (`total_chart`), does a turn become slower as the
chain grows (`along_chart`), and where does a turn's time go (`stage_chart`). Why they are drawn
without a library: docs/decisions/0017-charts.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from segue_bench.figures import BenchRun, baseline, seconds_words, shorter, speed_words

WIDTH = 920
LABEL = 138
ROW = 26
BAR = 16

# In light and in dark. Full history in warm colours, what is chained in cool ones.
COLOURS = {
    "http-new": ("#b4540a", "#f59e4c"),
    "http-full, bare": ("#94340a", "#e2703a"),
    "http-full, cache off": ("#dc7f2e", "#fdba74"),
    "http-full, cache on": ("#c79a13", "#fcd34d"),
    "http-full": ("#dc7f2e", "#fdba74"),
    "http-chained": ("#3b6fd4", "#7aa7ff"),
    "ws": ("#0a7d4f", "#34d399"),
    "ws-stored": ("#0e8a92", "#4dd0d8"),
    "rollout": ("#7a4fc4", "#b79cf5"),
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


# --- parts of a picture ---------------------------------------------------------------------------


def _class(name: str) -> str:
    return "c-" + name.replace(", ", "-").replace(" ", "-").replace("_", "-")


def _style() -> str:
    light, dark = (
        "".join(f".{_class(name)}{{--c:{pair[n]}}}" for name, pair in COLOURS.items())
        for n in (0, 1)
    )
    return (
        f"<style>.chart{{--ink:#1f2430;--soft:#5b6472;--grid:#e3e6ec}}{light}"
        "@media(prefers-color-scheme:dark){.chart{--ink:#e8eaf0;--soft:#a4adbb;--grid:#343a46}"
        f"{dark}}}"
        ".chart text{fill:var(--ink);font:13px system-ui,'Segoe UI',Helvetica,Arial,sans-serif}"
        ".chart .title{font-size:15px;font-weight:600}.chart .soft{fill:var(--soft);font-size:12px}"
        ".chart .grid{stroke:var(--grid)}.chart .spread{stroke:var(--ink);stroke-width:1.5;opacity:.7}"
        ".chart .fill{fill:var(--c)}.chart .line{fill:none;stroke:var(--c);stroke-width:2.5;"
        "stroke-linejoin:round}.chart .thin{stroke-width:1}</style>"
    )


def picture(height: float, label: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'role="img" aria-label="{escape(label)}">'
    )
    return "\n".join([head, _style(), *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(words)}</text>'


def bar(
    x: float, y: float, width: float, height: float, colour: str, title: str, radius: int = 0
) -> str:
    return (
        f'<rect class="fill {_class(colour)}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height}" rx="{radius}"><title>{escape(title)}</title></rect>'
    )


def _path(kind: str, *points: tuple[float, float]) -> str:
    places = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path class="{kind}" d="M{places}"/>'


# --- total time by way and speed ------------------------------------------------------------------


def total_chart(runs: Sequence[BenchRun]) -> str:
    """The whole loop by each way, one panel a speed; all runs have one context."""
    speeds = list(dict.fromkeys(run.tokens_per_s for run in runs))
    columns = min(2, len(speeds))
    parts: list[str] = []
    top = bottom = 0.0
    for number, speed in enumerate(speeds):
        column = number % columns
        top = top if column else bottom
        panel = [run for run in runs if run.tokens_per_s == speed]
        parts += _total_panel(panel, column * WIDTH / columns, top, WIDTH / columns)
        bottom = max(bottom, top + len(panel) * ROW + 50)
    return picture(bottom, "Time of the whole loop, by way and speed", parts)


def _total_panel(runs: Sequence[BenchRun], left: float, top: float, width: float) -> list[str]:
    scale = (width - LABEL - 150) / max(max(run.total_s_each) for run in runs)
    reference = baseline(runs)
    x = left + LABEL
    parts = [
        text(left + 8, top + 20, speed_words(runs[0].tokens_per_s), "title"),
        text(left + width - 24, top + 20, f"{runs[0].turns} turns", "soft", "end"),
    ]
    for number, run in enumerate(runs):
        y = top + 34 + number * ROW
        size = max(1.5, scale * run.total_s)
        low = scale * min(run.total_s_each)
        high = scale * max(run.total_s_each)
        after = x + max(size, high)
        parts += [
            text(x - 8, y + 13, run.name, "", "end"),
            bar(x, y, size, BAR, run.name, f"{run.name}: {run.total_s:.3f} s", 3),
            text(after + 8, y + 13, seconds_words(run.total_s)),
        ]
        if high - low > 1.5:
            parts.append(_path("spread", (x + low, y + BAR / 2), (x + high, y + BAR / 2)))
        if reference is not None and run is not reference:
            change = f"{-shorter(run, reference):+.0%}".replace("-", "−")
            parts.append(text(after + 68, y + 13, change, "soft"))
    return parts


# --- lines ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """From which value to which, where the labels stand, and whether it is logarithmic."""

    low: float
    high: float
    labels: Sequence[tuple[float, str]]
    is_log: bool = False

    def place(self, value: float, start: float, end: float) -> float:
        """Where a value stands between two ends of the picture."""
        value = min(max(value, self.low), self.high)
        low = self.low
        high = self.high
        at = value
        if self.is_log:
            low = math.log(low)
            high = math.log(high)
            at = math.log(at)
        return start + (end - start) * (at - low) / (high - low)


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line, with its label at the right end."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]


def line_chart(
    title: str, lines: Sequence[ChartLine], x: ChartAxis, y: ChartAxis, below: str
) -> str:
    """Lines with their names at their ends; `below` names the horizontal axis."""
    left = 64.0
    top = 44.0
    right = WIDTH - 190.0
    bottom = 314.0
    parts = [text(8, 20, title, "title")]
    for value, words in y.labels:
        at = y.place(value, bottom, top)
        parts += [
            _path("grid", (left, at), (right, at)),
            text(left - 8, at + 4, words, "soft", "end"),
        ]
    for value, words in x.labels:
        parts.append(text(x.place(value, left, right), bottom + 20, words, "soft", "middle"))
    parts.append(text((left + right) / 2, bottom + 38, below, "soft", "middle"))

    def placed(point: tuple[float, float]) -> tuple[float, float]:
        return x.place(point[0], left, right), y.place(point[1], bottom, top)

    drawn = sorted(((line, placed(line.points[-1])) for line in lines), key=lambda pair: pair[1][1])
    heights = spread([end[1] for _, end in drawn], 17)
    for (line, end), height in zip(drawn, heights, strict=True):
        kind = _class(line.colour)
        name = end[0] + 20
        parts += [
            _path(f"line {kind}", *map(placed, line.points)),
            _path(f"line thin {kind}", (end[0] + 3, end[1]), (name - 4, height)),
            f'<circle class="fill {kind}" cx="{name:.1f}" cy="{height:.1f}" r="4"/>',
            text(name + 9, height + 4, line.label),
        ]
    return picture(bottom + 50, title, parts)


def along_chart(runs: Sequence[BenchRun]) -> str:
    """Each turn's time, turn by turn; all runs have one speed and one context."""
    count = max(run.turns for run in runs)
    values = [ms for run in runs for ms in run.turn_ms_along]
    low = min(values) * 0.8
    high = max(values) * 1.25
    step = max(1, round(count / 6 / 5) * 5) if count > 10 else 1
    turns = [1, *(n for n in range(step, count + 1, step) if n > 1)]
    return line_chart(
        f"Time of each turn at {speed_words(runs[0].tokens_per_s)}, ms (logarithmic)",
        [ChartLine(run.name, run.name, list(enumerate(run.turn_ms_along, 1))) for run in runs],
        ChartAxis(1, max(2, count), [(n, str(n)) for n in turns]),
        ChartAxis(low, high, [(tick, f"{tick:g}") for tick in log_ticks(low, high)], is_log=True),
        "turn",
    )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """These places, ascending, moved apart so that labels do not cover each other."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else place)
    excess = (moved[-1] - places[-1]) / 2 if moved else 0.0
    return [place - excess for place in moved]


def log_ticks(low: float, high: float, leads: Sequence[int] = (1, 2, 3, 5, 7)) -> list[float]:
    """Round values between these two."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [lead * 10.0**power for power in powers for lead in leads]
    return [step for step in steps if low <= step <= high]


# --- where a turn's time goes ---------------------------------------------------------------------


def stage_chart(runs: Sequence[BenchRun]) -> str:
    """One bar a way, divided into the stages of a turn; all runs have one speed and one context."""
    scale = (WIDTH - LABEL - 90) / max(sum(run.stages_ms.values()) for run in runs)
    words = f"Where a turn's time goes at {speed_words(runs[0].tokens_per_s)}, ms"
    parts = [text(8, 20, words, "title")]
    for number, run in enumerate(runs):
        x = float(LABEL)
        y = 40.0 + number * 32
        parts.append(text(x - 8, y + 16, run.name, "", "end"))
        for stage, name in STAGE_WORDS.items():
            spent = run.stages_ms.get(stage, 0.0)
            if spent * scale >= 0.2:
                parts.append(bar(x, y, spent * scale, 22, stage, f"{name}: {spent:.2f} ms"))
                x += spent * scale
        parts.append(text(x + 8, y + 16, f"{sum(run.stages_ms.values()):.1f}"))
    x = float(LABEL)
    y = 48.0 + len(runs) * 32
    for stage, name in STAGE_WORDS.items():
        if not any(run.stages_ms.get(stage, 0.0) for run in runs):
            continue
        width = 34 + 7 * len(name)
        if x + width > WIDTH:
            x = float(LABEL)
            y = y + 22
        parts += [bar(x, y, 12, 12, stage, name, 2), text(x + 18, y + 11, name, "soft")]
        x += width
    return picture(y + 26, "Where a turn's time goes", parts)
