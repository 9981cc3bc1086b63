"""A session by values: frames in, events out, and what becomes of its turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from segue.accounts.account import LOCAL
from segue.errors import InvalidRequest, TooMany
from segue.listener.reconnect import LostCaches
from segue.listener.socket import SocketClosed
from segue.responses.websocket import SocketSession
from segue.settings.values import Settings
from tests.contracts.turns import make_turn
from tests.listener.doubles import Begun, Stage, ticks

CLOSE = SocketClosed(1000, False, "")
LOSS = SocketClosed(None, True, "connection lost")


class PeerSocket:
    """The socket as its session sees it: keeps what was sent and how it was closed."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.closed: list[tuple[int, str]] = []
        self.is_full = False
        self.unread_bytes = 0
        self.request_id = "req_1"
        self.client = "test"
        self.on_send: Callable[[dict[str, Any]], None] = lambda event: None

    def send(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            event = json.loads(message)
            self.on_send(event)
            self.events.append(event)

    def close(self, code: int, reason: str = "") -> None:
        self.closed.append((code, reason))

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    @property
    def codes(self) -> list[str]:
        return [event["error"]["code"] for event in self.events if event["type"] == "error"]


@dataclass
class Connection:
    """One open connection to a stage."""

    stage: Stage = field(default_factory=Stage)
    reconnect_s: float = 0

    def __post_init__(self) -> None:
        self.socket = PeerSocket()
        self.sessions: set[SocketSession] = set()
        self.lost = LostCaches(self.reconnect_s)
        account = self.stage.accounts.known(None)
        assert account is not None
        self.session = SocketSession(self.stage.services, account, self.sessions, self.lost)
        self.session.opened(self.socket)  # type: ignore[arg-type]

    async def create(self, lane: str | None = None, **fields: object) -> None:
        frame = {"type": "response.create", "model": "m", "input": "x"} | fields
        if lane is not None:
            frame["stream_id"] = lane
        await self.receive(frame)

    async def receive(self, frame: object) -> None:
        self.session.received(json.dumps(frame).encode())
        await ticks()

    @property
    def begun(self) -> list[Begun]:
        return self.stage.runner.begun


@pytest.fixture
async def peer() -> Connection:
    return Connection()


async def test_events_leave_in_order_and_with_the_name_of_their_lane(peer: Connection) -> None:
    await peer.create("a")
    await peer.create()
    first, second = peer.begun
    first.publish("response.in_progress")
    second.end()
    first.end()
    assert [(event["type"], event.get("stream_id")) for event in peer.socket.events] == [
        ("response.created", "a"),
        ("response.created", None),
        ("response.in_progress", "a"),
        ("response.completed", None),
        ("response.completed", "a"),
    ]


async def test_create_waits_for_its_own_lane_and_for_no_other(peer: Connection) -> None:
    await peer.create("a")
    await peer.create("a")
    await peer.create("b")
    assert [event["stream_id"] for event in peer.socket.events] == ["a", "b"]
    peer.begun[0].end()
    await ticks()
    assert len(peer.begun) == 3


async def test_lane_is_free_before_its_terminal_event_leaves(peer: Connection) -> None:
    running: list[int] = []
    peer.socket.on_send = lambda event: running.append(peer.session.status().running)
    await peer.create()
    peer.begun[0].end()
    assert running == [1, 0]


async def test_next_turn_of_a_lane_starts_after_the_terminal_event_was_sent(
    peer: Connection,
) -> None:
    await peer.create()
    await peer.create()
    peer.begun[0].end()
    assert len(peer.begun) == 1
    await ticks()
    assert peer.socket.types == ["response.created", "response.completed", "response.created"]


@pytest.mark.parametrize(
    "frame, code",
    [
        ([], "invalid_value"),
        ({"type": "response.create", "model": 1}, "invalid_value"),
        ({"type": "response.unknown"}, "invalid_event_type"),
        ({"type": "response.create", "stream_id": ""}, "invalid_stream_id"),
        ({"type": "response.append", "response_id": "resp_0", "input": []}, "not_found"),
    ],
)
async def test_frame_that_is_no_request_is_answered_with_an_error(
    peer: Connection, frame: object, code: str
) -> None:
    await peer.receive(frame)
    assert peer.socket.types == ["error"]
    assert peer.stage.refusals == [("websocket", peer.socket.codes[0])]
    assert peer.socket.codes == [code]
    assert not peer.begun


async def test_refused_create_is_answered_in_its_lane_and_the_next_one_runs(
    peer: Connection,
) -> None:
    peer.stage.runner.fault = TooMany("Not so fast.")
    await peer.create("a")
    await peer.create("a")
    error, created = peer.socket.events
    assert (error["type"], error["stream_id"]) == ("error", "a")
    assert error["error"]["code"] == "rate_limit_exceeded"
    assert created["type"] == "response.created"
    assert peer.stage.refusals == [("websocket", "rate_limit_exceeded")]


async def test_bug_in_a_turn_is_a_server_error_and_the_connection_goes_on(
    peer: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    peer.stage.runner.fault = RuntimeError("secret")
    await peer.create()
    await peer.create()
    assert peer.socket.types == ["error", "response.created"]
    assert peer.socket.codes == ["server_error"]
    assert "secret" not in json.dumps(peer.socket.events)
    assert "a turn could not be prepared" in caplog.text


async def test_background_belongs_to_http(peer: Connection) -> None:
    await peer.create(background=True)
    assert peer.socket.codes == ["unsupported_parameter"]


async def test_parent_of_a_continuation_is_looked_up_once(peer: Connection) -> None:
    await peer.create()
    peer.begun[0].end()
    peer.stage.near.looked_up.clear()
    await peer.create(previous_response_id="resp_1")
    assert peer.stage.near.looked_up == ["resp_1"]
    known = peer.begun[1].caller.known
    assert known is not None
    assert known.id == "resp_1"


async def test_waiting_fork_keeps_its_parent(peer: Connection) -> None:
    await peer.create("a")
    peer.begun[0].end()
    await peer.create("b")
    await peer.create("b", previous_response_id="resp_1")
    peer.stage.near.turns.clear()
    peer.begun[1].end()
    await ticks()
    assert peer.begun[2].caller.known is not None


async def test_failed_continuation_forgets_its_parent_and_a_failed_fork_does_not(
    peer: Connection,
) -> None:
    near = peer.stage.near
    await peer.create("a")
    peer.begun[0].end()
    await peer.create("b", previous_response_id="resp_1")
    peer.begun[1].end("response.failed")
    assert "resp_1" in near.turns
    await peer.create("a", previous_response_id="resp_1")
    peer.begun[2].end("response.failed")
    assert "resp_1" not in near.turns


async def test_turn_that_was_repeated_from_another_connection_can_be_continued_here(
    peer: Connection,
) -> None:
    await peer.create(idempotency_key="key")
    running = peer.begun[0].running
    running.saved(make_turn("resp_1", owner=LOCAL))
    peer.begun[0].publish("response.completed")
    await ticks()
    assert "resp_1" in peer.stage.near.turns


async def test_close_frame_cancels_what_runs(peer: Connection) -> None:
    await peer.create("a")
    await peer.create("b", store=False)
    await peer.create("b")
    peer.session.closed(CLOSE)
    await ticks()
    assert [begun.is_cancelled for begun in peer.begun] == [True, True]
    assert peer.stage.near.is_closed
    assert not peer.sessions


async def test_lost_connection_lets_stored_turns_finish_and_logs_their_events(
    peer: Connection,
) -> None:
    await peer.create("a")
    await peer.create("b", store=False)
    peer.session.closed(LOSS)
    assert [begun.is_cancelled for begun in peer.begun] == [False, True]
    assert peer.stage.runner.logged == ["resp_1"]
    assert not peer.begun[0].running.has_subscribers


async def test_lost_connections_cache_is_found_by_the_next_one() -> None:
    stage = Stage()
    first = Connection(stage, reconnect_s=60)
    await first.create()
    first.begun[0].end()
    first.session.closed(LOSS)
    assert not stage.near.is_closed
    kept = first.lost.find(LOCAL, "resp_1")
    assert kept is not None
    assert first.lost.find("eve", "resp_1") is None


async def test_cache_of_an_owner_that_is_erased_is_not_kept_for_the_next_connection() -> None:
    stage = Stage()
    first = Connection(stage, reconnect_s=60)
    await first.create()
    first.session.dismiss(is_erased=True)
    first.begun[0].end()
    first.session.closed(LOSS)
    assert stage.near.is_closed
    assert first.lost.find(LOCAL, "resp_1") is None


async def test_client_that_does_not_read_gets_nothing_more_to_read(peer: Connection) -> None:
    peer.socket.is_full = True
    await peer.create()
    assert not peer.begun
    peer.socket.is_full = False
    peer.session.resumed()
    await ticks()
    assert len(peer.begun) == 1


async def test_client_that_does_not_read_its_errors_is_closed(peer: Connection) -> None:
    peer.socket.unread_bytes = 5 * peer.stage.limits.outbox_bytes_max
    await peer.receive({"type": "response.unknown"})
    assert peer.socket.closed == [(1008, "too many unread events")]


async def test_old_connection_ends_after_its_last_turn() -> None:
    peer = Connection(Stage(limits=Settings(connection_age_s=0)))
    await peer.create()
    await peer.create()
    assert peer.socket.codes == ["websocket_connection_limit_reached"]
    assert peer.socket.closed == []
    peer.begun[0].end()
    await ticks()
    assert peer.socket.types == ["response.created", "error", "response.completed", "error"]
    assert peer.socket.codes == ["websocket_connection_limit_reached"] * 2
    assert peer.socket.closed == [(1001, "connection limit reached")]


async def test_connection_of_a_revoked_key_ends_once_it_is_idle(peer: Connection) -> None:
    await peer.create()
    peer.session.dismiss()
    await peer.create("b")
    assert peer.socket.codes == ["invalid_api_key"]
    assert peer.socket.closed == []
    peer.begun[0].end()
    await ticks()
    assert peer.socket.types[-2:] == ["response.completed", "error"]
    assert peer.socket.closed == [(1008, "the key is not valid any more")]


async def test_connection_of_an_owner_that_is_erased_does_not_say_that_its_key_is_wrong(
    peer: Connection,
) -> None:
    """The key may be good: its client opens another connection."""
    await peer.create()
    peer.session.dismiss(is_erased=True)
    await peer.create("b")
    peer.begun[0].end()
    await ticks()
    assert peer.socket.codes == ["websocket_connection_limit_reached"] * 2
    assert peer.socket.closed == [(1001, "everything of this owner was erased")]


async def test_idle_connection_leaves_a_draining_process_at_once_and_a_busy_one_after_its_turn() -> (
    None
):
    idle, busy = Connection(), Connection()
    await busy.create()
    for peer in (idle, busy):
        peer.stage.runner.is_draining = True
        peer.session.close_if_idle()
    assert (idle.socket.closed, busy.socket.closed) == ([(1012, "service restart")], [])
    busy.begun[0].end()
    await ticks()
    assert busy.socket.closed == [(1012, "service restart")]


async def test_bad_message_is_reported_for_every_create_without_an_answer(
    peer: Connection,
) -> None:
    await peer.create("a")
    await peer.create("a")
    last = json.loads(peer.session.refused("binary", 3))
    assert [event.get("stream_id") for event in peer.socket.events[1:]] == ["a", "a"]
    assert last["error"]["code"] == "invalid_message"


async def test_steer_of_an_ended_turn_is_sent_back_with_the_reason(peer: Connection) -> None:
    await peer.create("a")
    peer.begun[0].end()
    for target in ("resp_1", "resp_unknown"):
        frame = {"type": "response.steer", "previous_response_id": target, "input": "x"}
        await peer.receive(frame)
    ended, unknown = peer.socket.events[-2:]
    assert ended["error"]["code"] == "response_already_completed"
    assert ended["stream_id"] == "a"
    assert unknown["error"]["code"] == "response_not_found"


async def test_turn_that_cannot_be_prepared_has_a_message_of_its_own(peer: Connection) -> None:
    peer.stage.runner.fault = InvalidRequest("No such thing.", param="input")
    await peer.create()
    assert peer.socket.events[0]["error"]["message"] == "No such thing."
    assert peer.socket.events[0]["error"]["param"] == "input"
