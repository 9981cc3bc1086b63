"""Writes the matrix of client and story into docs/clients/README.md, from what the tests have just found.

    pytest -p tests.clients.matrix tests/clients

A test says what came of its cell with `record_property("cell", ...)`, or `"coder"` for the agents on Messages and Chat
Completions; a table is only written where every cell of it is there, so that a part of the suite cannot take anything
out of it.
"""

from __future__ import annotations

import re

import pytest

from tests.clients.agents import AGENTS, version_of
from tests.clients.coders import CODER_STORIES, CODERS, coder_version
from tests.clients.outside import ROOT
from tests.clients.stories import STORIES

PAGE = ROOT / "docs" / "clients" / "README.md"
BETWEEN = re.compile(r"(<!-- matrix -->\n).*?(<!-- end -->)", re.DOTALL)
CODED = re.compile(r"(<!-- coders -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURES = re.compile(r"(<!-- figures -->\n).*?(<!-- end -->)", re.DOTALL)

_cells: dict[tuple[str, str], str] = {}
_others: dict[str, str] = {}
_figures: list[str] = []
_coders: dict[tuple[str, str], str] = {}
_claude: dict[str, str] = {}


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
        if name == "coder":
            client, story, text = value
            _coders[client, story] = text if report.passed else "**fails**"
        if name == "claude":
            _claude[value] = "yes" if report.passed else "**fails**"
        if name == "figures" and report.passed:
            _figures.extend(value)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the page, in the process that has heard of all tests."""
    if hasattr(session.config, "workerinput"):
        return
    page = PAGE.read_text()
    if len(_cells) == len(AGENTS) * len(STORIES) and _others and _figures:
        page = BETWEEN.sub(lambda found: found[1] + table() + found[2], page)
        figures = "\n".join(_figures)
        page = FIGURES.sub(lambda found: found[1] + figures + "\n" + found[2], page)
    if len(_coders) == len(CODERS) * len(CODER_STORIES) and _claude:
        page = CODED.sub(lambda found: found[1] + coders_table() + found[2], page)
    PAGE.write_text(page)


def coders_table() -> str:
    """The matrix of the other APIs, a row for each client, a column for each story."""
    lines = ["| client | version | " + " | ".join(CODER_STORIES) + " |"]
    lines += ["|---|---|" + "---|" * len(CODER_STORIES)]
    lines += [
        f"| {name} | {coder_version(coder)} | "
        + " | ".join(_coders[name, story] for story in CODER_STORIES)
        + " |"
        for name, coder in CODERS.items()
    ]
    only = [f"- {text}: {verdict}" for text, verdict in sorted(_claude.items())]
    return "\n".join([*lines, "", "Also tested:", "", *only, ""])


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
