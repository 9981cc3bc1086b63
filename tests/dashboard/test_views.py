"""What a watcher sees is its own; an operator sees totals, and nobody's conversations."""

from segue.turn.plan import Span
from segue_dashboard.views import CELLS_MAX, CONNECTIONS_LISTED_MAX, Viewer, connections, turn_row
from tests.dashboard.made import glance, settled

SALT = b"salt"
ANNA = Viewer("anna", is_operator=False)
OPERATOR = Viewer("operator", is_operator=True)


def test_key_sees_only_its_own_connections() -> None:
    seen = connections([glance(1), glance(2, "bert"), glance(3)], ANNA, 0.0, SALT)

    assert (seen.count, seen.lanes, seen.waiting) == (2, 4, 2)
    assert [row.turns for row in seen.rows] == [3, 1]


def test_operator_counts_all_connections_and_lists_none_of_others() -> None:
    seen = connections([glance(1), glance(2, "bert", running=3)], OPERATOR, 0.0, SALT)

    assert (seen.count, seen.running, seen.cells) == (2, 3, "03")
    assert seen.rows == []


def test_thousands_of_connections_fit_one_update() -> None:
    seen = connections((glance(n, running=n % 12) for n in range(6_000)), ANNA, 0.0, SALT)

    assert seen.count == 6_000
    assert len(seen.rows) == CONNECTIONS_LISTED_MAX
    assert len(seen.cells) == CELLS_MAX
    assert all(row.running == 11 for row in seen.rows), "the busiest are listed"


def test_lost_tokens_and_their_reason_are_shown() -> None:
    turn = settled()
    assert turn_row(1, turn, wall_ms=0.0, salt=SALT).lost == 0
    turn.tally.lost = ("tools_changed", 900)
    row = turn_row(1, turn, wall_ms=0.0, salt=SALT)
    assert (row.lost, row.lost_reason) == (900, "tools_changed")


def test_marks_are_milliseconds_after_the_request_was_read() -> None:
    marks = {"received": 10.0, "validated": 10.001, "first_token": 10.25, "sent": 10.5}
    row = turn_row(7, settled(marks=marks), wall_ms=1_000_000.0, salt=SALT)

    assert row.at_ms == 1_010_000.0
    assert row.marks == (0.0, 1.0, None, None, 250.0, None, None, 500.0, None)


def test_turn_without_any_stage_still_has_a_row() -> None:
    row = turn_row(1, settled(marks={}), wall_ms=0.0, salt=SALT)

    assert row.marks[0] == 0.0
    assert set(row.marks[1:]) == {None}


def test_lanes_of_a_connection_share_its_name_and_hide_what_it_is_made_of() -> None:
    one = turn_row(1, settled(lane="140234/review"), 0.0, SALT)
    two = turn_row(2, settled(lane="140234/"), 0.0, SALT)

    assert (one.lane, two.lane) == ("review", "")
    assert one.connection == two.connection
    assert "140234" not in one.connection
    assert turn_row(3, settled(lane=""), 0.0, SALT).connection == ""


def test_pause_for_a_tool_is_told_beside_the_marks() -> None:
    over = settled(marks={"received": 10.0, "first_token": 10.5})
    over.tally.tool_calls = 2
    over.tally.spans.append(Span("tools", 10.6, 10.9))

    row = turn_row(1, over, 0.0, b"salt")

    assert (row.tools, row.pauses) == (2, ((600.0, 900.0),))
