"""Lanes: who runs, who waits, what is forgotten; against a naive model and against the rules' own table."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from segue.errors import InvalidRequest, TooMany
from segue.session.lanes import (
    IN_FLIGHT_MAX,
    MADE_MAX,
    NAMES_MAX,
    WAITING_MAX,
    Lane,
    Lanes,
    Ticket,
)

NAMES = ["a", "b", "c", "d", "e", "f"]


@dataclass(eq=False)
class Naive:
    """One request as the naive model sees it."""

    lane: Lane
    parent_id: str | None
    pin: object
    state: str = "waits"
    # When nothing of its own lane stood before it any more.
    ready_at: int | None = None
    ticket: Ticket[int, object] | None = None


@dataclass
class Model:
    """Lanes, written as a list and a few searches."""

    requests: list[Naive] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    made_by: dict[str, Lane] = field(default_factory=dict)
    now: int = 0

    def of(self, state: str) -> list[Naive]:
        return [one for one in self.requests if one.state == state]

    def settle(self) -> None:
        """Note which heads of free lanes have become ready."""
        self.now += 1
        busy = {one.lane for one in self.of("runs")}
        for one in self.of("waits"):
            if one.lane not in busy and one.ready_at is None:
                one.ready_at = self.now
            busy.add(one.lane)


class LaneMachine(RuleBasedStateMachine):
    """Any order of adding, starting and ending, with limits small enough to be met."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: Lanes[int, object, str] = Lanes(in_flight_max=3, names_max=4, waiting_max=7)
        self.model = Model()
        self.count = 0

    @rule(
        lane=st.none() | st.sampled_from(NAMES),
        parent=st.none() | st.integers(0, 3),
    )
    def client_asks(self, lane: Lane, parent: int | None) -> None:
        if lane is not None:
            if lane not in self.model.names and len(self.model.names) == 4:
                with pytest.raises(InvalidRequest) as told:
                    self.lanes.name(lane)
                assert told.value.code == "websocket_stream_limit_reached"
                return
            self.model.names.add(lane)
        self.lanes.name(lane)
        made = list(self.model.made_by)[-4:]
        parent_id = made[parent % len(made)] if made and parent is not None else None
        pin = object()
        number = len(self.model.requests)
        if len(self.model.of("waits")) == 7:
            with pytest.raises(TooMany):
                self.lanes.add(lane, number, parent_id)
            return
        ticket = self.lanes.add(lane, number, parent_id)
        crosses_lanes = parent_id is not None and self.model.made_by[parent_id] != lane
        assert ticket.crosses_lanes == crosses_lanes
        ticket.pin = pin if crosses_lanes else None
        self.model.requests.append(Naive(lane, parent_id, pin if crosses_lanes else None))
        self.model.settle()

    @rule()
    def session_starts_what_may(self) -> None:
        ready = [one for one in self.model.of("waits") if one.ready_at is not None]
        ready.sort(key=lambda one: one.ready_at or 0)
        expected = ready[: 3 - len(self.model.of("runs"))]

        started = self.lanes.start()

        assert [ticket.request for ticket in started] == [
            self.model.requests.index(one) for one in expected
        ]
        for one, ticket in zip(expected, started, strict=True):
            assert (ticket.lane, ticket.parent_id, ticket.pin) == (one.lane, one.parent_id, one.pin)
            one.state, one.ticket = "runs", ticket

    @precondition(lambda self: self.model.of("runs"))
    @rule(pick=st.integers(0, 2), how=st.sampled_from(["made", "failed", "cancelled"]))
    def turn_ends(self, pick: int, how: str) -> None:
        running = self.model.of("runs")
        one = running[pick % len(running)]
        assert one.ticket is not None
        self.count += 1
        made = f"resp_{self.count}" if how == "made" else None

        forgotten = self.lanes.done(one.ticket, made=made, has_failed=how == "failed")

        one.state = "over"
        parent_id = one.parent_id
        is_own = parent_id is not None and self.model.made_by.get(parent_id, one.lane) == one.lane
        assert forgotten == (parent_id if how == "failed" and is_own else None)
        if forgotten is not None:
            self.model.made_by.pop(forgotten, None)
        if made is not None:
            self.model.made_by[made] = one.lane
        self.model.settle()

    @precondition(lambda self: self.model.of("waits"))
    @rule()
    def connection_goes(self) -> None:
        waiting = self.model.of("waits")

        assert self.lanes.drop_waiting() == len(waiting)

        for one in waiting:
            one.state = "dropped"

    @invariant()
    def one_runs_in_a_lane_and_three_on_the_connection(self) -> None:
        running = [one.lane for one in self.model.of("runs")]
        assert len(running) == len(set(running)) <= 3

    @invariant()
    def nothing_starts_twice_or_overtakes(self) -> None:
        for lane in {one.lane for one in self.model.requests}:
            order = ["over", "runs", "waits"]
            of_lane = [one.state for one in self.model.requests if one.lane == lane]
            states = [state for state in of_lane if state != "dropped"]
            assert states == sorted(states, key=order.index)

    @invariant()
    def counts_are_right(self) -> None:
        assert self.lanes.waiting == len(self.model.of("waits"))
        busy = self.model.of("waits") + self.model.of("runs")
        assert self.lanes.is_idle == (not busy)


LaneMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, derandomize=True
)
TestLanes = LaneMachine.TestCase


def fill(lanes: Lanes[str, None], *asked: tuple[Lane, str]) -> None:
    for lane, request in asked:
        lanes.name(lane)
        lanes.add(lane, request, None)


def requests(tickets: list[Ticket[str, None]]) -> list[str]:
    return [ticket.request for ticket in tickets]


# --- the contract's own figures ---------------------------------------------------------------------


def test_limits_are_those_of_the_contract() -> None:
    assert (IN_FLIGHT_MAX, NAMES_MAX, WAITING_MAX) == (16, 32, 64)


def test_sixteen_run_and_the_seventeenth_waits_for_a_place() -> None:
    lanes: Lanes[str, None] = Lanes()
    fill(lanes, *((f"l{n}", str(n)) for n in range(17)))

    started = lanes.start()

    assert requests(started) == [str(n) for n in range(16)]
    assert lanes.start() == []
    lanes.done(started[7])
    assert requests(lanes.start()) == ["16"]


def test_thirty_third_name_is_refused_in_the_contracts_words() -> None:
    lanes: Lanes[str, None] = Lanes()
    for n in range(32):
        lanes.name(f"l{n}")

    lanes.name("l7")
    lanes.name(None)
    with pytest.raises(InvalidRequest) as told:
        lanes.name("l32")

    assert told.value.code == "websocket_stream_limit_reached"
    assert told.value.param == "stream_id"
    assert told.value.message == (
        "This WebSocket connection has reached its maximum number of distinct stream IDs (32). "
        "Reuse an existing stream_id or open a new WebSocket connection."
    )


def test_name_stays_counted_when_its_lane_is_empty() -> None:
    lanes: Lanes[str, None] = Lanes(names_max=1)
    fill(lanes, ("a", "1"))
    lanes.done(lanes.start()[0])

    with pytest.raises(InvalidRequest):
        lanes.name("b")


def test_sixty_fifth_waiting_request_is_refused_as_too_many() -> None:
    lanes: Lanes[str, None] = Lanes()
    fill(lanes, (None, "runs"))
    running = lanes.start()
    fill(lanes, *((None, str(n)) for n in range(64)))

    with pytest.raises(TooMany) as told:
        lanes.add(None, "64", None)

    assert told.value.status == 429
    lanes.done(running[0])
    lanes.start()
    lanes.add(None, "64", None)


def test_busy_lane_does_not_starve_the_others() -> None:
    """With one place, lanes take turns: a lane that has just run goes behind those that wait."""
    lanes: Lanes[str, None] = Lanes(in_flight_max=1)
    fill(lanes, ("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), (None, "n1"), ("b", "b2"))

    order = []
    while not lanes.is_idle:
        (ticket,) = lanes.start()
        order.append(ticket.request)
        lanes.done(ticket)

    assert order == ["a1", "b1", "n1", "a2", "b2", "a3"]


# --- what is forgotten: docs/protocol.md 6.4 and 6.5 -----------------------------------------------------


@pytest.mark.parametrize(
    "made_on, continued_on, has_failed, is_forgotten",
    [
        ("a", "a", True, True),
        ("a", "a", False, False),
        (None, None, True, True),
        (None, None, False, False),
        # A fork that fails leaves the parent to its own lane.
        ("a", "b", True, False),
        ("a", None, True, False),
        (None, "a", True, False),
        ("a", "b", False, False),
        # Nobody here made it: it came from the store, and the lane that names it may forget it.
        ("elsewhere", "a", True, True),
    ],
)
def test_failed_continuation_forgets_its_parent_and_a_failed_fork_does_not(
    made_on: Lane, continued_on: Lane, has_failed: bool, is_forgotten: bool
) -> None:
    lanes: Lanes[str, None] = Lanes()
    if made_on != "elsewhere":
        fill(lanes, (made_on, "first"))
        lanes.done(lanes.start()[0], made="resp_1")
    lanes.name(continued_on)
    lanes.add(continued_on, "second", "resp_1")
    (ticket,) = lanes.start()

    forgotten = lanes.done(ticket, has_failed=has_failed)

    assert forgotten == ("resp_1" if is_forgotten else None)


def test_failed_first_turn_forgets_nothing() -> None:
    lanes: Lanes[str, None] = Lanes()
    fill(lanes, ("a", "first"))

    assert lanes.done(lanes.start()[0], has_failed=True) is None


def test_waiting_fork_is_to_pin_its_parent_and_a_continuation_is_not() -> None:
    """A continuation must find its parent when it starts: what fails before it in its lane makes it fail too."""
    lanes: Lanes[str, str] = Lanes()
    lanes.add("a", "first", None)
    lanes.done(lanes.start()[0], made="resp_1")

    assert not lanes.add("a", "continues", "resp_1").crosses_lanes
    assert lanes.add("b", "forks", "resp_1").crosses_lanes


def test_fork_that_fails_after_its_parents_lane_has_moved_on_forgets_nothing() -> None:
    lanes: Lanes[str, str] = Lanes()
    lanes.add("a", "first", None)
    lanes.done(lanes.start()[0], made="resp_1")
    lanes.add("b", "forks", "resp_1").pin = "pin"
    (fork,) = lanes.start()
    lanes.add("a", "continues", "resp_1")
    lanes.done(lanes.start()[0], made="resp_2")

    assert lanes.done(fork, has_failed=True) is None


def test_lane_remembers_the_makers_of_the_latest_responses_only() -> None:
    """A connection that lives for an hour must not remember every id that it ever made."""
    lanes: Lanes[str, None] = Lanes()
    for n in range(MADE_MAX + 10):
        lanes.add("a", "", None)
        lanes.done(lanes.start()[0], made=f"resp_{n}")

    assert lanes.crosses_lanes("b", f"resp_{MADE_MAX + 9}")
    assert not lanes.crosses_lanes("b", "resp_9")
    assert lanes.crosses_lanes("b", "resp_10")


# --- rollouts that wait, and steers that outlive their response -------------------------------------------


def running(lanes: Lanes[str, object, str], *names: Lane) -> list[Ticket[str, object]]:
    for name in names:
        lanes.add(name, f"request of {name}", None)
    return lanes.start()


def test_request_that_waits_for_its_client_gives_its_place_away() -> None:
    lanes: Lanes[str, object, str] = Lanes(in_flight_max=1)
    (first,) = running(lanes, "a")
    assert running(lanes, "b") == []
    lanes.pause(first)
    (second,) = lanes.start()
    assert second.lane == "b"
    lanes.resume(first)
    assert lanes.start() == []
    lanes.done(second)
    assert lanes.start() == [first]
    lanes.done(first)
    assert lanes.is_idle


def test_request_that_goes_on_is_before_those_that_have_not_begun() -> None:
    lanes: Lanes[str, object, str] = Lanes(in_flight_max=1)
    (first,) = running(lanes, "a")
    lanes.pause(first)
    (second,) = running(lanes, "b", "c")
    lanes.resume(first)
    lanes.done(second)
    assert lanes.start() == [first]


def test_lane_of_a_waiting_request_stays_its_own() -> None:
    lanes: Lanes[str, object, str] = Lanes()
    (first,) = running(lanes, "a")
    lanes.pause(first)
    assert running(lanes, "a") == []
    lanes.done(first)
    assert [one.lane for one in lanes.start()] == ["a"]


def test_servers_own_continuation_goes_first_and_takes_the_steers_along() -> None:
    lanes: Lanes[str, object, str] = Lanes()
    (first,) = running(lanes, "a")
    lanes.add("a", "another chain", None)
    assert not lanes.has_waiting("a", "resp_1")
    lanes.hold("a", "resp_1", ["shorter"])
    lanes.put_first("a", "successor", "resp_1")
    lanes.done(first, made="resp_1")
    (successor,) = lanes.start()
    assert successor.request == "successor"
    assert lanes.take_held(successor) == ["shorter"]
    assert lanes.take_held(successor) == []


def test_steers_wait_for_their_own_lane_and_parent() -> None:
    lanes: Lanes[str, object, str] = Lanes()
    lanes.hold("a", "resp_1", ["shorter"])
    lanes.add("b", "fork", "resp_1")
    lanes.add("a", "other", "resp_2")
    for ticket in lanes.start():
        assert lanes.take_held(ticket) == []
    lanes.add("c", "fresh", None)
    (ticket,) = lanes.start()
    assert lanes.take_held(ticket) == []


def test_requests_that_wait_are_bounded_in_bytes_together() -> None:
    lanes: Lanes[str, None, str] = Lanes(waiting_bytes_max=100)
    # One alone may be as large as it likes: the connection has its own limit for that.
    lanes.add(None, "first", None, size=150)
    assert [one.request for one in lanes.start()] == ["first"]
    lanes.add(None, "second", None, size=60)
    with pytest.raises(TooMany, match="100 bytes"):
        lanes.add("a", "third", None, size=41)
    lanes.add("a", "third", None, size=40)
    assert [one.request for one in lanes.start()] == ["third"]
    lanes.add("a", "fourth", None, size=40)
