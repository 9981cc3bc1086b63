"""How does a report look on a slide? One HTML page that needs nothing from outside, in light and dark.

A report in, the page out: how much shorter the loop is, three charts for each context, every figure, and the command.
"""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment

from segue_bench.charts import along_chart, stage_chart, total_chart
from segue_bench.figures import (
    BenchRun,
    baseline,
    seconds_words,
    shorter,
    speed_words,
    tokens_words,
)
from segue_bench.report import COLUMNS, GAIN, LEGEND, BenchReport, cells_of, context_line, groups

# From here on a gain is shown as one.
GAIN_MIN = 0.1

PAGE = """\
<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>Segue bench</title><style>
:root{color-scheme:light dark;--bg:#fbfbfd;--card:#fff;--ink:#1f2430;--soft:#5b6472;--line:#e3e6ec;--good:#0a7d4f}
@media(prefers-color-scheme:dark){:root{--bg:#12151c;--card:#1a1e27;--ink:#e8eaf0;--soft:#a4adbb;--line:#2c3240;
--good:#34d399}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
main{max-width:1040px;margin:0 auto;padding:40px 24px 64px}h1{font-size:30px;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:20px;margin:44px 0 12px}p{margin:6px 0}.soft{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:14px;margin:28px 0 8px}
.card,.panel{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px}
.card b{display:block;font-size:34px;line-height:1.15;letter-spacing:-.02em}
.panel{margin:14px 0;overflow-x:auto}.panel svg{display:block;width:100%;height:auto;min-width:560px}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:5px 8px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}tr.head td{font-weight:600;padding-top:16px}
.good{color:var(--good);font-weight:600}code{font:13px ui-monospace,Menlo,monospace}
</style></head><body><main>
<h1>The same agent loop over each transport</h1>
<p class="soft">{{ context_line }}</p>
{% if cards %}<div class="cards">
{% for gain, is_good, speed, times in cards %}
<div class="card"><b{{ ' class="good"'|safe if is_good }}>{{ gain }}</b>shorter at {{ speed }}<br>
<span class="soft">{{ times }}</span></div>
{% endfor %}
</div>
<p class="soft">WebSocket with previous_response_id against HTTP with the full history each turn, render cache off.</p>
{% endif %}
{% for context, pictures in contexts %}<h2>{{ context }} tokens of context</h2>
{% for picture in pictures %}<div class="panel">{{ picture|safe }}</div>
{% endfor %}{% endfor %}
<h2>Findings</h2><ul>{% for finding in report.findings %}<li>{{ finding }}</li>{% endfor %}</ul>
<h2>All figures</h2><div class="panel"><table><tr>{% for name in columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for title, rows in tables %}<tr class="head"><td colspan="{{ columns|length }}">{{ title }}</td></tr>
{% for row in rows %}<tr>{% for cell in row %}
<td{{ ' class="good"'|safe if loop.index0 == gain_column and cell.startswith('-') }}>{{ cell }}</td>
{%- endfor %}</tr>
{% endfor %}{% endfor %}</table></div>
<p class="soft">{{ legend }}</p>
{% for way, why in report.left_out.items() %}<p><b>{{ way }}</b> was left out: {{ why }}.</p>
{% endfor %}
<p>Run it yourself: <code>{{ report.settings.command }}</code></p>
<p class="soft">{{ report.machine.at }} · {{ versions }}</p>
</main></body></html>
"""


def page(report: BenchReport) -> str:
    """One self-contained page."""
    contexts = sorted({run.context_tokens for run in report.runs}, reverse=True)
    by_context = [[r for r in report.runs if r.context_tokens == tokens] for tokens in contexts]
    versions = (f"{name} {version}" for name, version in report.machine.packages.items())
    template = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
    return template.render(
        report=report,
        context_line=context_line(report),
        cards=_cards(by_context[0]) if by_context else [],
        contexts=[
            (tokens_words(runs[0].context_tokens), _pictures(runs).values()) for runs in by_context
        ],
        columns=COLUMNS.split("|"),
        gain_column=GAIN,
        tables=[(_title(group[0]), _rows(group)) for group in groups(report.runs)],
        legend=LEGEND,
        versions=", ".join(versions),
    )


def charts(report: BenchReport) -> dict[str, str]:
    """The charts of the largest context, by name, each an SVG of its own."""
    context = max((run.context_tokens for run in report.runs), default=0)
    runs = [run for run in report.runs if run.context_tokens == context]
    return _pictures(runs) if runs else {}


def _pictures(runs: Sequence[BenchRun]) -> dict[str, str]:
    # The turns of one speed are shown in detail: the fastest that has a limit.
    fastest = max(run.tokens_per_s or 0.0 for run in runs)
    detailed = [run for run in runs if (run.tokens_per_s or 0.0) == fastest]
    return {
        "total": total_chart(runs),
        "along": along_chart(detailed),
        "stages": stage_chart(detailed),
    }


def _cards(runs: Sequence[BenchRun]) -> list[tuple[str, bool, str, str]]:
    """How much shorter the loop is on a WebSocket, a card a speed."""
    cards = []
    for group in groups(runs):
        full = baseline(group)
        socket = next((run for run in group if run.way == "ws"), None)
        if full is not None and socket is not None:
            gain = shorter(socket, full)
            times = f"{seconds_words(full.total_s)} → {seconds_words(socket.total_s)}"
            context = f"{times}, {tokens_words(full.context_tokens)} tokens"
            card = (f"{gain:.0%}", gain >= GAIN_MIN, speed_words(full.tokens_per_s), context)
            cards.append(card)
    return cards


def _title(run: BenchRun) -> str:
    context = tokens_words(run.context_tokens)
    speed = speed_words(run.tokens_per_s)
    return f"{context} tokens, {speed}, {run.turns} turns"


def _rows(group: Sequence[BenchRun]) -> list[list[str]]:
    reference = baseline(group)
    return [cells_of(run, reference) for run in group]
