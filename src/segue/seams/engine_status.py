"""What does an operator see of a server of an engine, in one process and in all of them together?

In: the view of each process. Out: one row for each server. Values only; JSON keys are those of `segue engines --json`,
of the dashboard and of what workers send each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import Struct

EngineState = Literal["up", "down", "drained"]


class EngineStatus(Struct, frozen=True):
    """One server of an engine: its URL, or the name of an engine without one. Its load is None where it is not
    counted."""

    model: str
    name: str
    is_up: bool
    running: int | None = None
    waiting: int | None = None
    is_drained: bool = False

    @property
    def state(self) -> EngineState:
        """In a word; whether a drained engine is up matters only when it is returned."""
        return "drained" if self.is_drained else "up" if self.is_up else "down"


def joined(
    rows: Iterable[EngineStatus], is_up: Callable[[Iterable[bool]], bool] = all
) -> list[EngineStatus]:
    """Each server once, as all processes together see it: `is_up` says whether all of them must reach it, or any."""
    groups: dict[tuple[str, str], list[EngineStatus]] = {}
    for row in rows:
        groups.setdefault((row.model, row.name), []).append(row)
    return [
        EngineStatus(
            model=model,
            name=name,
            is_up=is_up(row.is_up for row in group),
            running=_added(row.running for row in group),
            waiting=_added(row.waiting for row in group),
            is_drained=all(row.is_drained for row in group),
        )
        for (model, name), group in groups.items()
    ]


def _added(counts: Iterable[int | None]) -> int | None:
    """None where no process counts."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
