"""How does a small benchmark run and print? Its candidates take turns, and the result is one table of plain text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TypeVar

from segue.printable import say

Name = TypeVar("Name")
Result = TypeVar("Result")


def interleaved(
    candidates: Mapping[Name, Callable[[], Result]], rounds: int, warm_ups: int = 1
) -> dict[Name, list[Result]]:
    """Each candidate once a round, each round beginning with another one, so that a noisy machine is noisy for all.

    Warm-up rounds are not counted.
    """
    results: dict[Name, list[Result]] = {name: [] for name in candidates}
    for number in range(warm_ups + rounds):
        for name in rotated(list(candidates), number):
            result = candidates[name]()
            if number >= warm_ups:
                results[name].append(result)
    return results


def rotated(items: Sequence[Name], by: int) -> list[Name]:
    """The same items, beginning with another one."""
    first = by % len(items)
    return [*items[first:], *items[:first]]


def installed(candidates: Mapping[str, Sequence[str]]) -> list[str]:
    """The candidates whose packages are there; the others are named and left out."""
    missing = {
        name: [package for package in packages if find_spec(package) is None]
        for name, packages in candidates.items()
    }
    for name, packages in missing.items():
        if packages:
            say(f"{name} is left out: {', '.join(packages)} not installed")
    return [name for name, packages in missing.items() if not packages]


def print_table(columns: str, rows: Iterable[Sequence[object]]) -> None:
    """Each column is a heading and a format, as in `history {:,}|CPU ms {:.2f}`; only the first is on the left."""
    headings = [column.partition("{")[0].strip() for column in columns.split("|")]
    formats = [column[column.index("{") :] for column in columns.split("|")]
    lines = [headings]
    lines += [
        [form.format(value) for form, value in zip(formats, row, strict=True)] for row in rows
    ]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        say("   ".join([f"{first:<{widths[0]}}", *cells]))
