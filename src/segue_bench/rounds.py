"""How does a small benchmark run and print? Its candidates take turns, and the result is one table of plain text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name")
Result = TypeVar("Result")


def interleaved(
    candidates: Mapping[Name, Callable[[int], Result]], rounds: int, warm_ups: int = 1
) -> dict[Name, list[Result]]:
    """Each candidate once a round, each round beginning with another one, so that a noisy machine is noisy for all.

    Warm-up rounds are not counted.
    """
    results: dict[Name, list[Result]] = {name: [] for name in candidates}
    for number in range(warm_ups + rounds):
        for name in rotated(list(candidates), number):
            result = candidates[name](number)
            if number >= warm_ups:
                results[name].append(result)
    return results


def rotated(items: Sequence[Name], by: int) -> list[Name]:
    """The same items, beginning with another one."""
    first = by % len(items)
    return [*items[first:], *items[:first]]


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """The first column on the left, the others on the right."""
    lines = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        print("   ".join([f"{first:<{widths[0]}}", *cells]), flush=True)
