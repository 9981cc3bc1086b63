"""How does a report look on a slide? One HTML page that needs nothing from outside, in light and dark.

A report in, the page out: how much shorter the loop is, three charts for each context, every figure, and the command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from segue_bench.charts import (
    along_chart,
    baseline,
    seconds_words,
    speed_words,
    stage_chart,
    tokens_words,
    total_chart,
)
from segue_bench.figures import Run, shorter
from segue_bench.machine import Machine
from segue_bench.report import LEGEND, Report, cells_of, context_line, groups

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfd;--card:#fff;--ink:#1f2430;--soft:#5b6472;--line:#e3e6ec;--good:#0a7d4f}
@media(prefers-color-scheme:dark){:root{--bg:#12151c;--card:#1a1e27;--ink:#e8eaf0;--soft:#a4adbb;--line:#2c3240;
--good:#34d399}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
main{max-width:1040px;margin:0 auto;padding:40px 24px 64px}h1{font-size:30px;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:20px;margin:44px 0 12px}p{margin:6px 0}.soft{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:14px;margin:28px 0 8px}
.card,.panel{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px}
.card b{display:block;font-size:34px;line-height:1.15;color:var(--good);letter-spacing:-.02em}
.card.flat b{color:var(--ink)}.panel{margin:14px 0;overflow-x:auto}
.panel svg{display:block;width:100%;height:auto;min-width:560px}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:5px 8px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}tr.head td{font-weight:600;padding-top:16px}
.good{color:var(--good);font-weight:600}code{font:13px ui-monospace,Menlo,monospace}
"""


def page(report: Report) -> str:
    """One self-contained page."""
    contexts = sorted({run.context_tokens for run in report.runs})
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>Segue bench</title><style>{STYLE}</style></head><body><main>",
        "<h1>The same agent loop, by each way of talking to the server</h1>",
        f'<p class="soft">{escape(context_line(report))}</p>',
        _cards(report.runs, contexts[-1]) if contexts else "",
    ]
    for context in reversed(contexts):
        parts += _context_part([r for r in report.runs if r.context_tokens == context])
    parts += [
        "<h2>What it comes to</h2><ul>",
        *(f"<li>{escape(finding)}</li>" for finding in report.findings),
        "</ul>",
        "<h2>All figures</h2>",
        f'<div class="panel">{_html_table(report.runs)}</div>',
        f'<p class="soft">{escape(LEGEND)}</p>',
    ]
    for way, why in report.left_out.items():
        parts.append(f"<p><b>{escape(way)}</b> was left out: {escape(why)}.</p>")
    parts += [
        f"<p>Run it yourself: <code>{escape(report.settings.command)}</code></p>",
        f'<p class="soft">{escape(report.machine.at)} · {escape(_versions(report.machine))}</p>',
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def _versions(machine: Machine) -> str:
    return ", ".join(f"{name} {version}" for name, version in machine.packages.items())


def _cards(runs: Sequence[Run], context: int) -> str:
    """How much shorter the loop is on a socket, a card a speed."""
    cards = []
    for group in groups([run for run in runs if run.context_tokens == context]):
        held = baseline(group)
        socket = next((run for run in group if run.way == "ws"), None)
        if held is None or socket is None:
            continue
        gain = shorter(socket, held)
        kind = "card" if gain >= 0.1 else "card flat"
        cards.append(
            f'<div class="{kind}"><b>{gain:.0%}</b>shorter at {speed_words(held.tokens_per_s)}<br>'
            f'<span class="soft">{seconds_words(held.total_s)} → {seconds_words(socket.total_s)}, '
            f"{tokens_words(context)} tokens</span></div>"
        )
    if not cards:
        return ""
    return (
        f'<div class="cards">{"".join(cards)}</div><p class="soft">WebSocket with previous_response_id '
        "against HTTP with the full history each turn, render cache off.</p>"
    )


def charts(report: Report) -> dict[str, str]:
    """The charts of the largest context, by name, each an SVG of its own."""
    context = max((run.context_tokens for run in report.runs), default=0)
    runs = [run for run in report.runs if run.context_tokens == context]
    if not runs:
        return {}
    shown = detailed(runs)
    return {"total": total_chart(runs), "along": along_chart(shown), "stages": stage_chart(shown)}


def _context_part(runs: Sequence[Run]) -> Iterator[str]:
    context = tokens_words(runs[0].context_tokens)
    yield f"<h2>{context} tokens of context</h2>"
    yield f'<div class="panel">{total_chart(runs)}</div>'
    shown = detailed(runs)
    yield f'<div class="panel">{along_chart(shown)}</div>'
    yield f'<div class="panel">{stage_chart(shown)}</div>'


def detailed(runs: Sequence[Run]) -> list[Run]:
    """The speed whose turns are shown in detail: the fastest that has a limit, else the only one there is."""
    by_speed = sorted({run.tokens_per_s or 0.0 for run in runs})
    chosen = by_speed[-1]
    return [run for run in runs if (run.tokens_per_s or 0.0) == chosen]


def _html_table(runs: Sequence[Run]) -> str:
    names = [
        "way",
        "total",
        "low–high s",
        "vs full",
        "turn p50 ms",
        "p99 ms",
        "TTFT ms",
        "api",
        "inference",
        "client",
        "sent kB",
        "recv kB",
        "tokenized",
        "CPU ms",
    ]
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for group in groups(runs):
        first, held = group[0], baseline(group)
        title = (
            f"{tokens_words(first.context_tokens)} tokens, {speed_words(first.tokens_per_s)}, "
            f"{first.turns} turns"
        )
        rows.append(f'<tr class="head"><td colspan="{len(names)}">{title}</td></tr>')
        for run in group:
            cells = cells_of(run, held)
            good = [
                ' class="good"' if n == 3 and c.startswith("-") else "" for n, c in enumerate(cells)
            ]
            row = zip(good, cells, strict=True)
            rows.append("<tr>" + "".join(f"<td{g}>{escape(c)}</td>" for g, c in row) + "</tr>")
    return f"<table>{''.join(rows)}</table>"
