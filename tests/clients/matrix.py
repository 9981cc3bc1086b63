"""Writes the matrix of client and story into docs/clients/README.md, from what the tests have just found.

    pytest -p tests.clients.matrix tests/clients

A test says what came of its cell with `record_property("cell", ...)`; the page is only written where every cell of a
whole run is there, so that a part of the suite cannot take anything out of it.
"""

from __future__ import annotations

import re

import pytest

from tests.clients.agents import AGENTS, version_of
from tests.clients.outside import ROOT
from tests.clients.stories import STORIES

PAGE = ROOT / "docs" / "clients" / "README.md"
BETWEEN = re.compile(r"(<!-- matrix -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURES = re.compile(r"(<!-- figures -->\n).*?(<!-- end -->)", re.DOTALL)

_cells: dict[tuple[str, str], str] = {}
_others: dict[str, str] = {}
_figures: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a finished test says about its cell."""
    if report.when != "call":
        return
    for name, value in report.user_properties:
        if name == "cell":
            client, story, text = value
            _cells[client, story] = text if report.passed else "**fails**"
        if name == "codex":
            _others[value] = "yes" if report.passed else "**fails**"
        if name == "figures" and report.passed:
            _figures.extend(value)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the page, in the process that has heard of all tests."""
    if hasattr(session.config, "workerinput"):
        return
    if len(_cells) < len(AGENTS) * len(STORIES) or not _others or not _figures:
        return
    page = PAGE.read_text()
    page = BETWEEN.sub(lambda found: found[1] + table() + found[2], page)
    PAGE.write_text(
        FIGURES.sub(lambda found: found[1] + "\n".join(_figures) + "\n" + found[2], page)
    )


def table() -> str:
    """The matrix, a row for each story, a column for each client."""
    lines = ["| story | " + " | ".join(AGENTS) + " |", "|---|" + "---|" * len(AGENTS)]
    lines += [
        f"| {story} | " + " | ".join(_cells[client, story] for client in AGENTS) + " |"
        for story in STORIES
    ]
    versions = [
        f"- {name}: " + ", ".join(f"{one} {version_of(one)}" for one in agent.packages)
        for name, agent in AGENTS.items()
    ]
    only = [f"- {text}: {verdict}" for text, verdict in sorted(_others.items())]
    return "\n".join([*lines, "", "Versions:", "", *versions, "", "Also tested:", "", *only, ""])
