"""How are results shown: in a terminal, as JSON, as a page, as a badge?"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from segue_conform.case import LEVELS, Json, Level, Result, printable

MARKS = {"passed": "ok", "failed": "FAILED", "absent": "absent", "not run": "not run"}


@dataclass(frozen=True)
class Report:
    """The results of one run, of which server and when."""

    server: str
    model: str
    began: str
    version: str
    results: Sequence[Result]

    @property
    def holds(self) -> bool:
        """Whether every `must` that could be tried passed."""
        tried = (result for result in self.results if result.verdict != "not run")
        return all(result.verdict == "passed" for result in tried if result.case.level == "must")


def counts(results: Iterable[Result]) -> Counter[str]:
    return Counter(result.verdict for result in results)


def by_level(results: Sequence[Result], level: Level) -> list[Result]:
    return [result for result in results if result.case.level == level]


def summary(results: Sequence[Result]) -> str:
    """What came of all cases, by level."""
    lines = []
    for level in LEVELS:
        found = counts(by_level(results, level))
        tried = found.total() - found["not run"]
        rest = [f"{found[key]} {key}" for key in ("failed", "absent", "not run") if found[key]]
        lines.append(
            f"{level:7} {found['passed']} of {tried} passed" + "".join(f", {text}" for text in rest)
        )
    return "\n".join(lines)


def line_of(result: Result) -> str:
    """One line of the terminal."""
    case = result.case
    why = f"\n         {result.why}" if result.verdict in ("failed", "absent") else ""
    return f"{MARKS[result.verdict]:8} {case.level:7} {case.name:38} {case.claim}{why}"


def as_text(report: Report, everything: bool) -> str:
    """The report for a terminal: what did not pass, or everything, and the sums."""
    shown = [
        result for result in report.results if everything or result.verdict in ("failed", "absent")
    ]
    skipped = {result.why for result in report.results if result.verdict == "not run"}
    head = printable(f"{report.server}, model {report.model}")
    lines = [head, "", *map(line_of, shown)]
    lines += [f"not run: what {why}" for why in sorted(skipped)]
    return "\n".join([*lines, "", summary(report.results)])


def as_json(report: Report) -> Json:
    """The report for programs."""
    return {
        "server": report.server,
        "model": report.model,
        "began": report.began,
        "version": report.version,
        "holds": report.holds,
        "counts": {level: dict(counts(by_level(report.results, level))) for level in LEVELS},
        "cases": [
            {
                "name": result.case.name,
                "claim": result.case.claim,
                "level": result.case.level,
                "source": result.case.source,
                "verdict": result.verdict,
                "why": result.why,
                "seconds": round(result.seconds, 3),
            }
            for result in report.results
        ],
    }


STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 2rem; }
td, th { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #8884; }
td:first-child { white-space: nowrap; font-weight: 600; }
.passed { color: #1a7f37; } .failed { color: #cf222e; } .absent { color: #9a6700; } .not-run { color: #777; }
small { opacity: .7; display: block; } code { font-size: .9em; }
"""


def as_page(report: Report) -> str:
    """The report as one page that needs nothing else."""
    parts = dict.fromkeys(result.case.part for result in report.results)
    tables = "".join(
        _table(part, [r for r in report.results if r.case.part == part]) for part in parts
    )
    sums = "".join(
        f"<tr><td>{line[:7].strip()}</td><td>{line[8:]}</td></tr>"
        for line in summary(report.results).splitlines()
    )
    title = f"Conformance of {html.escape(report.server)}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
        f"<p>Model <code>{html.escape(report.model)}</code>, {report.began}, {report.version}.</p>"
        f"<table>{sums}</table>{tables}</html>\n"
    )


def _table(part: str, results: Sequence[Result]) -> str:
    rows = "".join(
        f'<tr><td class="{result.verdict.replace(" ", "-")}">{MARKS[result.verdict]}</td><td>{result.case.level}</td>'
        f"<td>{html.escape(result.case.claim)}<small>{html.escape(result.why)}</small></td>"
        f"<td><code>{html.escape(result.case.name)}</code><small>{html.escape(result.case.source)}</small></td></tr>"
        for result in results
    )
    passed = counts(results)["passed"]
    return f"<h2>{html.escape(part)} <small>{passed} of {len(results)}</small></h2><table>{rows}</table>"


def as_badge(report: Report) -> str:
    """A badge: how many cases of `must` passed, of those that there are."""
    found = counts(by_level(report.results, "must"))
    words = f"{found['passed']} of {found.total()} must"
    colour = (
        "#1a7f37"
        if report.holds and not found["not run"]
        else "#9a6700"
        if report.holds
        else "#cf222e"
    )
    left, right = 112, 10 + 7 * len(words)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="Responses API: {words}">'
        f'<rect width="{left}" height="20" fill="#555"/><rect x="{left}" width="{right}" height="20" fill="{colour}"/>'
        f'<g fill="#fff" font-family="Verdana,sans-serif" font-size="11"><text x="8" y="14">Responses API</text>'
        f'<text x="{left + 6}" y="14">{words}</text></g></svg>\n'
    )
