"""Every row of the table: what a client gets that has missed events of a turn."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from segue.process.replay import Replay, decide_replay, end_after
from segue.wire.events import Event
from segue.wire.response import Response
from tests.contracts.turns import response_of

DELTA, END = Event("response.output_text.delta", 5, b""), Event("response.completed", 6, b"")


def stored(status: Any, *, background: bool = False) -> Response:
    return structs.replace(response_of("resp_1", status=status), background=background)


@pytest.mark.parametrize(
    "last, logged, response, replay",
    [
        (None, None, stored("in_progress"), "unreachable"),
        (None, [], stored("queued"), "unreachable"),
        (None, [DELTA], stored("in_progress"), "unreachable"),
        (4, [DELTA], None, "unreachable"),
        (4, [DELTA, END], stored("completed"), "unreachable"),
        (None, None, stored("failed", background=True), "end"),
        (9, None, stored("failed", background=True), "not_kept"),
        (None, None, stored("failed"), "not_kept"),
        (None, None, stored("completed", background=True), "not_kept"),
        (None, None, None, "not_kept"),
        (9, None, None, "not_kept"),
        (5, [DELTA], None, "logged_then_live"),
        (9, [DELTA], stored("in_progress"), "logged_then_live"),
        (9, [], None, "not_kept"),
        (None, [DELTA], None, "not_kept"),
        (None, [DELTA], stored("failed"), "not_kept"),
        (None, [DELTA, END], None, "logged"),
        (None, [DELTA, END], stored("completed"), "logged"),
        (None, [], stored("completed"), "end"),
        (None, [], stored("failed"), "end"),
        (None, [], stored("cancelled"), "end"),
        (None, [], None, "logged"),
    ],
)
def test_each_row_of_the_table(
    last: int | None, logged: list[Event] | None, response: Response | None, replay: Replay
) -> None:
    assert decide_replay(last, logged, response) == replay


@pytest.mark.parametrize(
    "before, status, has_had",
    [
        ([END], "completed", True),
        ([END], "failed", False),
        ([DELTA], "completed", False),
        ([], "completed", False),
        (None, "completed", False),
    ],
)
def test_end_is_sent_once(before: list[Event] | None, status: str, has_had: bool) -> None:
    sent = [(event.type, event.number) for event in end_after(before, stored(status), 7)]
    assert sent == ([] if has_had else [(f"response.{status}", 7)])
