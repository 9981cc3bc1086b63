"""What does a page tell its reader to type?

In: Markdown. Out: its fenced blocks as steps, in order. `sh`, `python` and `js` blocks are run; others are only shown,
unless a mark says more. A mark is an HTML comment on the line directly before a block, so that a reader never sees it:

    <!-- play: skip needs a GPU -->           not run; the reason is required
    <!-- play: until serves -->               runs in the background; the next step comes when it has printed this
    <!-- play: file segue.toml -->            is saved under this name instead of being run
    <!-- play: input y -->                    is typed into it
    <!-- play: exit 1 -->                     ends with this status instead of 0
    <!-- play: quiet -->                      may print nothing
    <!-- play: replace 30 with 1 -->          is run with this change
    <!-- play: expect -->                     on a shown block: the last step has printed these lines in this order;
                                              "…" stands for anything

Several marks stand on lines of their own. A mark that cannot be read, or stands before no block, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FENCE = re.compile(r"^( *)(```+)(\w*)\s*$")
MARK = re.compile(r"^\s*<!-- play: (\w+)(?: (.+?))? -->$")
RUN = ("sh", "python", "js")
SAME = {"bash": "sh", "shell": "sh", "console": "sh", "javascript": "js", "py": "python"}
NEEDS_VALUE = {"skip", "until", "file", "input", "exit", "replace"}
NEEDS_NONE = {"quiet", "expect"}


class BadPage(Exception):
    """A page whose marks or blocks cannot be read."""


@dataclass(frozen=True)
class Step:
    """One block of a page."""

    place: str
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def is_run(self) -> bool:
        return self.language in RUN and not self.marks.keys() & {"skip", "file"}


def steps_of(page: Path, section: str | None = None) -> list[Step]:
    """The blocks of a page, or of one section of it (up to the next heading of the same or a higher level)."""
    lines = list(enumerate(page.read_text("utf-8").splitlines(), 1))
    if section is not None:
        lines = list(_section(lines, section))
        if not lines:
            raise BadPage(f"{page.name} has no section '{section}'")
    return list(_steps(page.name, lines))


def _section(lines: list[tuple[int, str]], title: str) -> Iterator[tuple[int, str]]:
    level = 0
    is_code = False
    for number, line in lines:
        is_code ^= FENCE.match(line) is not None
        heading = None if is_code else re.match(r"(#+) (.+)", line)
        if heading and level and len(heading[1]) <= level:
            return
        if heading and heading[2] == title:
            level = len(heading[1])
        if level:
            yield number, line


def _steps(name: str, lines: list[tuple[int, str]]) -> Iterator[Step]:
    marks: dict[str, str] = {}
    fence: re.Match[str] | None = None
    start, text = 0, []
    for number, line in lines:
        place = f"{name}:{number}"
        if fence is not None:
            if line.strip() == fence[2]:
                code = "\n".join(one.removeprefix(fence[1]) for one in text) + "\n"
                yield Step(f"{name}:{start}", SAME.get(fence[3], fence[3]), code, marks)
                fence, marks = None, {}
            else:
                text.append(line)
        elif found := FENCE.match(line):
            fence, start, text = found, number, []
        elif mark := MARK.match(line):
            marks = marks | {mark[1]: _checked(place, mark[1], mark[2] or "")}
        elif "play:" in line and "<!--" in line:
            raise BadPage(f"{place}: this mark cannot be read: {line.strip()}")
        elif marks:
            raise BadPage(f"{place}: the mark before this line belongs to no block")
    if fence is not None or marks:
        raise BadPage(f"{name}: a block or a mark at the end is not finished")


def _checked(place: str, word: str, value: str) -> str:
    if word not in NEEDS_VALUE | NEEDS_NONE:
        raise BadPage(f"{place}: there is no mark '{word}'")
    if (word in NEEDS_VALUE) != bool(value):
        needs = "needs a value" if word in NEEDS_VALUE else "takes no value"
        raise BadPage(f"{place}: the mark '{word}' {needs}")
    return value
