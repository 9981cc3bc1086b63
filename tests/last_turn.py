"""What happened last? A scenario that fails prints the last turn as its client saw it, and the server's timeline of it.

The clients of `tests.support` note here what they receive, and the dashboard's observer notes which turns have ended.
This is a plugin of pytest: `tests/scenarios/conftest.py` takes its hooks; for any other file use `-p tests.last_turn`.
The section is in the report of the teardown, because observers receive a turn a moment after its end.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from segue.process.afterwards import EndedTurn

# What is remembered, and what is printed: the section stays within a screen or two.
KEPT_MAX = 400
FIRST, LAST = 8, 32
CHARS_MAX = 120
MARKS_MAX = 16

events: deque[str | bytes] = deque(maxlen=KEPT_MAX)
ended: deque[EndedTurn] = deque(maxlen=1)
HAS_FAILED = pytest.StashKey[bool]()


def note(event: str | bytes) -> None:
    """Remember an event, or the body of an answer, as it came."""
    events.append(event)


def note_body(status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Remember what an HTTP request was answered with: the events of a stream, or all of it."""
    if headers.get("content-type", "").startswith("text/event-stream"):
        for line in body.splitlines():
            if line.startswith(b"data: {"):
                note(line.removeprefix(b"data: "))
    else:
        note(b"HTTP %d %b" % (status, body[:CHARS_MAX]))


def line_of(event: str | bytes) -> tuple[str, str]:
    """The type of an event, and its line."""
    text = event if isinstance(event, str) else event.decode(errors="replace")
    try:
        value: dict[str, Any] = json.loads(text)
        kind, number = value.pop("type"), value.pop("sequence_number", "-")
    except (ValueError, TypeError, KeyError, AttributeError):
        return "", f"        {text[:CHARS_MAX]}"
    # The id of an item is in its first event; what is left fits the line better without it.
    value.pop("item_id", None)
    return kind, f"{number:>6}  {kind:<40} {json.dumps(value)[:CHARS_MAX]}"


def last_events(seen: Sequence[str | bytes]) -> list[str]:
    """The lines of the last turn: from the last `response.created` on, the middle left out if there are many."""
    lines = [line_of(event) for event in seen]
    starts = [n for n, (kind, _) in enumerate(lines) if kind == "response.created"]
    found = [line for _, line in lines[starts[-1] if starts else 0 :]]
    if len(found) > FIRST + LAST:
        left_out = len(found) - FIRST - LAST
        found[FIRST:-LAST] = [f"        … {left_out} more …"]
    return found


def timeline(turn: EndedTurn) -> list[str]:
    """When the turn passed its stages, in milliseconds from the first."""
    marks = sorted(turn.marks.items(), key=lambda mark: mark[1])
    began = marks[0][1] if marks else 0.0
    head = f"turn {turn.entry.turn_id} over {turn.receipt.transport}: {turn.entry.status} {turn.error or ''}".rstrip()
    return [head, *(f"{(at - began) * 1000:>10.1f} ms  {name}" for name, at in marks[:MARKS_MAX])]


def section() -> str:
    """All of it, as it is printed."""
    lines = ["events of the last turn, as the client received them:", *last_events(events)]
    if not events:
        lines.append("        none through the clients of tests.support")
    lines.append("timeline of the last turn that ended in this process:")
    lines += timeline(ended[-1]) if ended else ["        none"]
    return "\n".join(lines)


@pytest.fixture(autouse=True)
def remember_the_last_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin anew, and hear of every turn that ends."""
    from segue_dashboard.history import RecentTurns

    events.clear()
    ended.clear()
    observe = RecentTurns.observe

    def observed(self: RecentTurns, turn: EndedTurn) -> None:
        ended.append(turn)
        observe(self, turn)

    monkeypatch.setattr(RecentTurns, "observe", observed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the section to the teardown of a test that has failed."""
    report = yield
    if report.when == "call" and report.failed:
        item.stash[HAS_FAILED] = True
    elif report.when == "teardown" and item.stash.get(HAS_FAILED, False):
        report.sections.append(("Last turn, at teardown", section()))
    return report
