"""What does a person see in a terminal: columns, a little colour, a progress bar?

Everything but the bar is plain text and needs no library: a server is operated where `rich` is not installed.
"""

from __future__ import annotations

import argparse
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal

# How progress is shown: the name of a step, what of it is done, and all of it.
Steps = Callable[[str, int, int], None]

Style = Literal["bold", "green", "red"]
CODES: dict[Style, int] = {"bold": 1, "red": 31, "green": 32}


class WideHelp(argparse.HelpFormatter):
    """The help of a command, with room for the longer flags."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def as_columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows under each other, never cut: a narrow terminal folds them."""
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            text + " " * (width - cells(text)) for text, width in zip(row, widths, strict=True)
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def cells(text: str) -> int:
    """How many columns of a terminal a text takes: wide characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in text
    )


def styled(text: str, style: Style) -> str:
    """The text in a colour, where standard output is a terminal that has colours."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    if is_plain or not sys.stdout.isatty():
        return text
    return f"\033[{CODES[style]}m{text}\033[0m"


@contextmanager
def progress_bar() -> Iterator[Steps]:
    """A bar on standard error, which begins again with each step; none where that is no terminal, or without `rich`."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda step, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=None)

        def show(step: str, done: int, total: int) -> None:
            progress.update(bar, description=step, completed=done, total=total)

        yield show
