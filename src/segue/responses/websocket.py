"""How does a WebSocket become turns? A `SocketSession` listens to one socket and serves its lanes.

    frame      -> received -> Lanes.add -> _start_waiting -> a task: _serve -> Runner.begin
    event      -> LaneSubscriber.deliver -> Socket.send
    last event -> LaneSubscriber.deliver -> turn_ended (frees the lane) -> Socket.send; then _start_waiting

Frames come in, `session/lanes` decides what runs, the events of every turn go out with the name of their lane. The
session holds the connection's cache. A close frame from the client cancels what runs; a lost connection lets stored
turns finish.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from msgspec import UNSET, Struct, structs

from segue.accounts.account import Account
from segue.aio import spawn
from segue.errors import (
    ApiError,
    Conflict,
    InvalidRequest,
    Refused,
    ServerFault,
    TooMany,
    Unavailable,
    response_not_found,
    too_large,
)
from segue.ids import current_request
from segue.listener.access_line import AccessLine
from segue.listener.api import Session, SessionStatus
from segue.listener.exchange import ANSWER_WAIT_S, CLIENT_LEFT, UNREAD, answerable
from segue.listener.reconnect import LostCaches
from segue.listener.services import NearTurns, Services
from segue.listener.socket import MessageFault, Socket, SocketClosed
from segue.memory.budget import sent_bytes
from segue.memory.intake import Inflow
from segue.process.beginnings import shutting_down
from segue.responses.steering import EndedResponse, EndedTurns, HeldSteer, Steering
from segue.seams.history import Turn
from segue.seams.store import Turns
from segue.session.lanes import Lane, Lanes, Ticket
from segue.turn.notices import Append, Cancel
from segue.turn.plan import Arrival, Caller, Receipt
from segue.turn.prepare import decode_items
from segue.turn.resolve import pair_calls
from segue.turn.running import Running
from segue.wire import codec
from segue.wire.events import TERMINAL, Event
from segue.wire.items import Item
from segue.wire.kinds import answer_of
from segue.wire.requests import AppendFrame, Create, SteerFrame

log = logging.getLogger(__name__)

# Each connection lives up to this much shorter than the limit, so that not all clients reconnect at once
# (docs/inside/hazards.md F10).
AGE_JITTER = 0.05
# Turns stop when the outbox is full; errors may take this many times as much before the connection closes.
UNREAD_TIMES_MAX = 4
BAD_MESSAGES = {
    "binary": "Binary messages are not supported.",
    "violation": "The frame violates the WebSocket protocol.",
}
# The close code of a connection that was lost without one (RFC 6455, 7.1.5).
LOST = 1006
# Ended turns that are remembered for late steers.
ENDED_MAX = 32


class PendingCreate(Struct, frozen=True):
    """A create in a lane."""

    create: Create
    receipt: Receipt
    # Whether the server made it: the successor of a response that was steered.
    is_automatic: bool = False


ServedTicket = Ticket[PendingCreate, Turn]


class LaneSubscriber:
    """Writes the events of one turn to the socket, each with the name of its lane."""

    __slots__ = ("_session", "_socket", "_suffix", "running", "sent_bytes", "ticket")

    can_catch_up = False

    def __init__(self, session: SocketSession, ticket: ServedTicket) -> None:
        self._session = session
        self._socket = session.socket
        self.ticket = ticket
        self._suffix = None if ticket.lane is None else codec.lane_suffix(ticket.lane)
        self.sent_bytes = 0
        self.running: Running

    def attached(self, running: Running) -> None:
        if running.last >= 0:
            self._session.check_unread()
        self.running = running
        self._session.subscribers[self.ticket] = self

    @property
    def is_full(self) -> bool:
        return self._socket.is_full

    def lose(self) -> None:
        """Nothing to do: no turn of a socket is queued."""

    def deliver(self, events: Sequence[Event]) -> None:
        """Write these events. The lane is free before the terminal event leaves (docs/inside/hazards.md F22)."""
        suffix, last = self._suffix, events[-1]
        if last.type in TERMINAL:
            self._session.turn_ended(self, has_failed=last.type == "response.failed")
        elif last.type == "response.done":
            self._session.turn_waits(self)
        if suffix is None:
            self._socket.send([event.data for event in events])
        else:
            self._socket.send([event.data[:-1] + suffix for event in events])


class LoggedSubscriber(LaneSubscriber):
    """Counts what it writes, for the access log."""

    __slots__ = ()

    def deliver(self, events: Sequence[Event]) -> None:
        self.sent_bytes += sum(len(event.data) for event in events)
        super().deliver(events)


@dataclass(slots=True, eq=False, weakref_slot=True)
class SocketSession:
    """One connection: the listener of its socket."""

    _services: Services
    account: Account
    _sessions: set[Session]
    _lost: LostCaches
    # What its lines in the access log have in common, if there is one.
    _line: AccessLine | None = None
    socket: Socket = field(init=False)
    inflow: Inflow = field(init=False)
    _lanes: Lanes[PendingCreate, Turn, HeldSteer] = field(init=False)
    # The cache of the connection alone, and in front of the store.
    _near: NearTurns = field(init=False)
    _turns: Turns = field(init=False)
    subscribers: dict[ServedTicket, LaneSubscriber] = field(default_factory=dict)
    _ended: EndedTurns = field(default_factory=dict)
    # Made when the first steer comes.
    _steering: Steering | None = None
    # What rollouts were given, until there is a place for them to go on.
    _appends: dict[ServedTicket, Append] = field(default_factory=dict)
    # Frames that came after a large one, while that is decoded.
    _later_frames: list[bytes] = field(default_factory=list)
    _is_decoding: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _age_timer: asyncio.TimerHandle | None = None
    _is_aged: bool = False
    _is_dismissed: bool = False
    _is_erased: bool = False
    _is_closed: bool = False
    _opened_at: float = field(default_factory=perf_counter)
    _turn_count: int = 0
    _create_count: int = 0

    def __post_init__(self) -> None:
        services = self._services
        self.inflow = Inflow(services.memory.intake, self.account.key_id)
        self._lanes = Lanes(waiting_bytes_max=services.limits.body_bytes_max)
        self._near, self._turns = services.open_cache(self.account)

    @property
    def state_bytes(self) -> int:
        return self._near.bytes

    def status(self) -> SessionStatus:
        lanes = self._lanes
        return SessionStatus(
            key=str(id(self)),
            owner=self.account.owner,
            opened_at=self._opened_at,
            lanes=lanes.named + 1,
            running=lanes.running,
            waiting=lanes.waiting,
            turns=self._turn_count,
            state_bytes=self._near.bytes,
        )

    async def erase(self, turn_id: str) -> None:
        self._lanes.unpin(turn_id)
        await self._near.delete(self.account.owner, turn_id)

    # --- frames in ---

    def received(self, text: bytes) -> None:
        """One frame. A large one is decoded in a thread; meanwhile nothing is read, and what was read already waits."""
        if self._is_decoding:
            self._later_frames.append(text)
        elif len(text) > codec.LARGE_BYTES:
            self._is_decoding = True
            self.socket.hold()
            self._spawn(self._receive_large(text))
        else:
            self._on_frame(text)

    async def _receive_large(self, text: bytes) -> None:
        decoded, lane = await asyncio.to_thread(_decode_large, text)
        self._is_decoding = False
        self._on_frame(text, decoded, lane)
        later, self._later_frames = self._later_frames, []
        for frame in later:
            self.received(frame)
        if not self._is_decoding:
            self.socket.release()

    def _on_frame(
        self, text: bytes, decoded: codec.AskedFrame | Exception | None = None, lane: Lane = None
    ) -> None:
        """A create joins its lane, a steer or an append goes to its turn, anything else is refused. `decoded` and
        `lane`: of a frame that was read already."""
        try:
            if self._is_dismissed:
                raise self._why_dismissed()
            create = codec.decode_frame(text) if decoded is None else decoded
            if isinstance(create, Exception):
                raise create
            if not isinstance(create, Create):
                self._received_other(create, len(text))
                return
            if create.stream_id is not UNSET:
                lane = codec.decode_lane(create.stream_id)
                self._lanes.name(lane)
            if self._is_aged:
                raise self._too_old()
            trace = "" if create.client_metadata is UNSET else codec.decode_traceparent(create)
            pending = PendingCreate(create, self._new_receipt(len(text), trace))
            parent_id = create.previous_response_id
            if not self._lanes.is_idle:
                self._check_room(len(text))
            ticket = self._lanes.add(lane, pending, parent_id, size=len(text))
            if ticket.crosses_lanes and parent_id is not None:
                ticket.pin = self._near.held(self.account.owner, parent_id)
            self._start_waiting()
            if self.inflow.grant:
                self._count_waiting()
        except Exception as fault:
            # A bug must not end the connection, nor leave the frame without an answer.
            what = "a WebSocket frame could not be handled"
            error = answerable(fault, what, self.socket.request_id)
            # The lane is echoed also where the frame could not be read as a whole.
            if lane is None and (decoded is None or isinstance(decoded, Create)):
                _, lane = codec.decode_envelope(text)
            self._refuse(error, lane)

    def _new_receipt(self, size: int = 0, trace: str = "") -> Receipt:
        self._create_count += 1
        return Receipt(
            "websocket",
            is_streamed=True,
            request_id=f"{self.socket.request_id}.{self._create_count}",
            client=self.socket.client,
            traceparent=trace,
            bytes_received=size,
        )

    def _check_room(self, size: int) -> None:
        """A create that has to wait counts as long as it does."""
        if not self.inflow.extend(self.inflow.arriving + self._lanes.waiting_bytes + size):
            self._count_waiting()
            raise TooMany("Too many bytes of requests are waiting on this server. Please retry.")

    def _count_waiting(self) -> None:
        self.inflow.count(self.inflow.arriving, self._lanes.waiting_bytes)

    def _received_other(self, frame: SteerFrame | AppendFrame | str, size: int) -> None:
        """A frame of another type than a create."""
        match frame:
            case SteerFrame():
                self.account.quota.count_other_request()
                subscriber = self._find_subscriber(frame.previous_response_id)
                running = None if subscriber is None else subscriber.running
                self._steering = self._steering or Steering(self._send_to_lane, self._ended)
                self._steering.on_steer(frame, running, self.socket.request_id)
            case AppendFrame():
                self._received_append(frame, size)
            case kind:
                known = "'response.create', 'response.steer' and 'response.append'"
                message = f"Invalid event type: '{kind[:64]}'. This server accepts {known}."
                raise InvalidRequest(message, code="invalid_event_type", param="type")

    def _find_subscriber(self, response_id: str) -> LaneSubscriber | None:
        subscribers = self.subscribers.values()
        return next((each for each in subscribers if each.running.id == response_id), None)

    def refused(self, fault: MessageFault, size: int) -> bytes:
        """The error event before the socket closes because of a message; the creates without an answer get theirs."""
        match fault:
            case "too_big":
                error: ApiError = too_large(size, self._services.limits.body_bytes_max)
            case "flood":
                error = TooMany(f"At most {size} frames a second are accepted on one connection.")
            case "late":
                message = f"The message took longer than {self._services.limits.body_s_max:g} s."
                error = Refused(message, status=408, code="request_timeout")
            case "invalid":
                message = "We could not parse the JSON of your request: it is not valid UTF-8."
                error = InvalidRequest(message, code="invalid_json")
            case "binary" | "violation":
                error = Refused(BAD_MESSAGES[fault], status=400, code="invalid_message")
        self._note_refusal(error, self.socket.request_id)
        self._refuse_unanswered(
            ServerFault(
                "The connection is closed because of another message on it. "
                "A response that is stored goes on, and can be retrieved."
            )
        )
        return codec.encode_error_event(error)

    def _refuse_unanswered(self, error: ApiError) -> None:
        """An error event for each create that has no answer yet (docs/inside/hazards.md F9)."""
        self.socket.send([codec.encode_error_event(error, lane) for lane in self._lanes.unanswered])

    def _refuse(self, error: ApiError, lane: Lane, request_id: str = "") -> None:
        """Answer a frame with an error; `request_id`: of the create, if it was one."""
        self._note_refusal(error, request_id or self.socket.request_id)
        self._answer([codec.encode_error_event(error, lane)])

    def _note_refusal(self, error: ApiError, request_id: str) -> None:
        self._services.note_refusal("websocket", error.code, request_id)
        extra = {"request_id": request_id}
        log.debug("message refused: %d %s", error.status, error.code, extra=extra)
        self._log("turn", request_id, error.status, perf_counter(), reason=error.code)

    def _send_to_lane(self, events: Sequence[Event], lane: Lane) -> None:
        if self._is_closed or not events:
            return
        suffix = codec.lane_suffix(lane)
        self._answer([event.data[:-1] + suffix for event in events])

    def _answer(self, events: list[bytes]) -> None:
        """Answer a frame at once, unless the client has left too many answers unread."""
        if self.socket.unread_bytes > UNREAD_TIMES_MAX * self._services.limits.outbox_bytes_max:
            self.socket.close(1008, "too many unread events")
        else:
            self.socket.send(events)

    def check_unread(self) -> None:
        """Refuse events that were sent before where this client, or all together, have left too much unread."""
        unread = self._services.memory.unread
        own_max = UNREAD_TIMES_MAX * self._services.limits.outbox_bytes_max
        if self.socket.unread_bytes > own_max or unread.bytes > unread.bytes_max:
            raise Unavailable(UNREAD, wait_s=ANSWER_WAIT_S)

    # --- turns ---

    def _start_waiting(self) -> None:
        """Start the requests that may run now."""
        # A client that does not read gets no more to read.
        if self._is_closed or self.socket.is_full:
            return
        for ticket in self._lanes.start():
            append = self._appends.pop(ticket, None)
            if append is None:
                self._spawn(self._serve(ticket))
            else:
                self.subscribers[ticket].running.notify(append)
        if self.inflow.grant:
            self._count_waiting()

    async def _serve(self, ticket: ServedTicket) -> None:
        """Prepare a turn and let it run; a refusal frees its lane."""
        pending = ticket.request
        lane = ticket.lane
        account = self.account
        request_id = pending.receipt.request_id
        current_request.set(request_id)
        steers: list[HeldSteer] = []
        try:
            create = pending.create
            parent_id = ticket.parent_id
            parent = ticket.pin
            if parent_id is not None and parent is None:
                # This connection, or one that was lost a moment ago, may have the parent in memory.
                parent = self._near.held(self.account.owner, parent_id)
                parent = parent or self._lost.find(self.account.owner, parent_id)
            if self._steering is not None and (steers := self._lanes.take_held(ticket)):
                before = [item for held in steers for item in held.steer.items]
                create = codec.with_input_before(create, before)
            caller = Caller(
                self.account.owner,
                self._turns,
                parent,
                f"{id(self)}/{lane or ''}",
                may=account.scopes,
                quota=account.turn_quota,
                key_id=account.key_id,
                models=account.limits.models,
            )
            subscribe = LaneSubscriber if self._line is None else LoggedSubscriber
            subscriber = subscribe(self, ticket)
            if create.background:
                message = "'background' is not supported over WebSocket; use HTTP."
                raise InvalidRequest(message, code="unsupported_parameter", param="background")
            if account.is_checked:
                self._services.accounts.check(account)
            if account.is_limited:
                await account.quota.count_request()
            arrival = Arrival(create, caller, pending.receipt)
            await self._services.runner.begin(arrival, subscriber)
        except Exception as fault:
            error = answerable(fault, "a turn could not be prepared", request_id)
            # The client did not ask for an automatic successor, and may continue the steered response itself.
            self._free(ticket, has_failed=not pending.is_automatic)
            if not pending.is_automatic:
                self._note_refusal(error, request_id)
                # None begins while the client does not read: these are as few as its lanes.
                self.socket.send([codec.encode_error_event(error, lane)])
            if self._steering is not None:
                self._steering.give_back(steers, lane)

    def turn_ended(self, subscriber: LaneSubscriber, *, has_failed: bool) -> None:
        """A turn of this connection is over: free its lane. The next turn starts after its last event was sent."""
        ticket, running = subscriber.ticket, subscriber.running
        self.subscribers.pop(ticket, None)
        self._appends.pop(ticket, None)
        self._turn_count += 1
        if self._line is not None:
            error = running.error
            status, reason = (200, "") if error is None else (error.status, error.code)
            self._log_turn(subscriber, status, reason)
        self._ended[running.id] = (EndedResponse(running.assembler), ticket.lane)
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        if self._steering is not None:
            self._hold_steers(self._steering, ticket, running)
        turn = running.turn if ticket.request.create.idempotency_key is not None else None
        if turn is not None and self._near.held(turn.owner, turn.id) is None:
            # An idempotent repeat of a turn of another connection can be continued here too.
            self._spawn(self._near.save(turn))
        self._free(ticket, made=None if has_failed else running.id, has_failed=has_failed)

    def _free(
        self, ticket: ServedTicket, *, made: str | None = None, has_failed: bool = False
    ) -> None:
        """Free the lane of a request. What follows is only scheduled: its last event has not been sent yet."""
        forgotten = self._lanes.done(ticket, made=made, has_failed=has_failed)
        if forgotten is not None:
            self._near.forget(self.account.owner, forgotten)
        is_ending = self._is_aged or self._is_dismissed or self._services.runner.is_draining
        is_last = is_ending and self._lanes.is_idle
        asyncio.get_running_loop().call_soon(self._retire if is_last else self._start_waiting)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        spawn(work, self._tasks)

    # --- steers (docs/protocol.md 6.10) ---

    def _hold_steers(self, steering: Steering, ticket: ServedTicket, running: Running) -> None:
        """Steers that the turn has not applied wait for the create that continues it: the client's, or an automatic
        one."""
        held, lane = steering.unapplied(running), ticket.lane
        if not held:
            return
        soon = asyncio.get_running_loop().call_soon
        if running.response.status not in ("completed", "incomplete"):
            soon(steering.give_back, held, lane)
            return
        dropped = self._lanes.hold(lane, running.id, held)
        if dropped is not None:
            soon(steering.give_back, dropped[1], dropped[0])
        if self._lanes.has_waiting(lane, running.id):
            return
        required = running.required
        if required:
            soon(steering.report_pending, held, required, lane)
            return
        successor = structs.replace(
            ticket.request.create, input=[], previous_response_id=running.id, idempotency_key=None
        )
        pending = PendingCreate(successor, self._new_receipt(), is_automatic=True)
        self._lanes.put_first(lane, pending, running.id)

    # --- rollouts (docs/protocol.md 11) ---

    def turn_waits(self, subscriber: LaneSubscriber) -> None:
        """A rollout waits for its client: another turn may have its place."""
        self._lanes.pause(subscriber.ticket)
        asyncio.get_running_loop().call_soon(self._start_waiting)

    def _received_append(self, frame: AppendFrame, size: int) -> None:
        subscriber = self._find_subscriber(frame.response_id)
        if subscriber is None:
            raise response_not_found(frame.response_id)
        subscriber.running.tally.bytes_received += size
        self._spawn(self._append(subscriber, frame, sent_bytes(size, len(frame.input))))

    async def _append(self, subscriber: LaneSubscriber, frame: AppendFrame, size: int) -> None:
        """Give a waiting rollout the outputs of its calls, which hold `size` bytes; on an error it goes on waiting."""
        running, ticket = subscriber.running, subscriber.ticket
        try:
            if self.account.is_limited:
                # The model is asked once more, as by a create.
                await self.account.quota.count_request()
            with self._services.memory.preparing(size) as room:
                running.tally.items_validated += len(frame.input)
                items = await decode_items(frame.input)
                _check_append(running, items)
                items = await self._services.runner.read(running.owner, items, room)
            # Meanwhile it may have ended, or got another append.
            _check_append(running, items)
            self._appends[ticket] = running.accept_append(items, size)
            self._lanes.resume(ticket)
            self._start_waiting()
        except Exception as fault:
            request_id = ticket.request.receipt.request_id
            error = answerable(fault, "an append could not be handled", request_id)
            self._refuse(error, ticket.lane, request_id)

    # --- the life of the connection ---

    def opened(self, socket: Socket) -> None:
        self.socket = socket
        self._sessions.add(self)
        self._services.count_request("GET", "/v1/responses", 101)
        self._log("open", socket.request_id, 101, self._opened_at)
        self.account.quota.connect()
        age_s = self._services.limits.connection_age_s * (1 - AGE_JITTER * random.random())
        self._age_timer = asyncio.get_running_loop().call_later(age_s, self._reach_age_limit)

    def resumed(self) -> None:
        for subscriber in self.subscribers.values():
            subscriber.running.wake()
        self._start_waiting()

    def closed(self, how: SocketClosed) -> None:
        """The connection is over: a close frame is a cancel, a loss lets stored turns finish."""
        self._is_closed = True
        self._sessions.discard(self)
        self.account.quota.disconnect()
        if self._age_timer is not None:
            self._age_timer.cancel()
        self._lanes.drop_waiting()
        for task in tuple(self._tasks):
            task.cancel()
        for subscriber in tuple(self.subscribers.values()):
            running = subscriber.running
            running.detach(subscriber)
            self._log_turn(subscriber, CLIENT_LEFT, "client_left")
            if running.has_subscribers:
                continue
            if running.is_rollout or not (how.is_lost and running.is_stored):
                running.notify(Cancel())
            else:
                # The client may ask for the rest after it has reconnected.
                self._services.runner.log_events(running)
        self.subscribers.clear()
        self._ended.clear()
        may_keep = how.is_lost and not self._is_erased
        if not (may_keep and self._lost.add(self.account.owner, self._near)):
            self._near.close()
        # The reason in a client's close frame is the client's own text.
        reason, status = how.reason if how.is_lost else "", how.code or LOST
        turns, began_at = self._turn_count, self._opened_at
        self._log("close", self.socket.request_id, status, began_at, turns=turns, reason=reason)

    # --- the access log ---

    def _log_turn(self, subscriber: LaneSubscriber, status: int, reason: str) -> None:
        receipt, turn_id = subscriber.ticket.request.receipt, subscriber.running.id
        more = {"response_id": turn_id, "sent_bytes": subscriber.sent_bytes, "reason": reason}
        self._log("turn", receipt.request_id, status, receipt.received_at, **more)

    def _log(
        self, event: str, request_id: str, status: int, began_at: float, **more: object
    ) -> None:
        """Write a line, if there is an access log."""
        if self._line is None or self._services.write_access is None:
            return
        more |= {"event": event, "request_id": request_id, "status": status}
        more["method"] = "response.create" if event == "turn" else "GET"
        line = structs.replace(self._line, took_s=perf_counter() - began_at, **more)
        self._services.write_access(line)

    def _reach_age_limit(self) -> None:
        """The limit applies only between turns: what runs may finish."""
        self._is_aged = True
        if self._lanes.is_idle:
            self._retire()

    def dismiss(self, *, is_erased: bool = False) -> None:
        """The key was revoked, or everything of its owner was erased: running turns finish, waiting rollouts end,
        nothing more is accepted."""
        if self._is_dismissed:
            return
        self._is_dismissed, self._is_erased = True, is_erased
        for subscriber in tuple(self.subscribers.values()):
            if subscriber.running.is_waiting:
                subscriber.running.notify(Cancel())
        if self._lanes.is_idle:
            self._retire()

    def _retire(self) -> None:
        """Close an idle connection whose time is over, with the reason."""
        if self._is_closed:
            return
        if self._is_dismissed:
            self._refuse(self._why_dismissed(), None)
            if self._is_erased:
                self.socket.close(1001, "everything of this owner was erased")
            else:
                self.socket.close(1008, "the key is not valid any more")
        elif self._is_aged:
            self._refuse(self._too_old(), None)
            self.socket.close(1001, "connection limit reached")
        else:
            self.close()

    def _why_dismissed(self) -> ApiError:
        if not self._is_erased:
            return self._services.accounts.refusal(self.account)
        # The key may be good: the code is the one at which clients open another connection.
        return InvalidRequest(
            "Everything of the owner of this key was erased. Create a new websocket connection to continue.",
            code="websocket_connection_limit_reached",
        )

    def close(self) -> None:
        """Close the socket: the process is stopping."""
        self._refuse_unanswered(shutting_down())
        self.socket.close(1012, "service restart")

    def close_if_idle(self) -> None:
        """The process drains. An idle client must know before its next request: a frame that crosses our close frame is
        lost."""
        if self._lanes.is_idle:
            self.close()

    def _too_old(self) -> InvalidRequest:
        minutes = round(self._services.limits.connection_age_s / 60)
        return InvalidRequest(
            f"Responses websocket connection limit reached ({minutes} minutes). "
            "Create a new websocket connection to continue.",
            code="websocket_connection_limit_reached",
        )


def _decode_large(text: bytes) -> tuple[codec.AskedFrame | Exception, Lane]:
    """What a large frame is, or why it cannot be read, and the lane of one that is no create. Slow, for a thread."""
    try:
        decoded: codec.AskedFrame | Exception = codec.decode_frame(text)
    except Exception as fault:
        decoded = fault
    return decoded, None if isinstance(decoded, Create) else codec.decode_envelope(text)[1]


def _check_append(running: Running, items: Sequence[Item]) -> None:
    """Refuse items that the turn does not wait for."""
    if running.awaited_calls is None:
        message = f"Response with id '{running.id}' is not waiting for the outputs of calls."
        raise Conflict(message, code="response_not_waiting", param="response_id")
    for index, item in enumerate(items):
        if answer_of(item.value) is None:
            message = "'response.append' accepts only the outputs of calls."
            raise InvalidRequest(message, param=f"input[{index}].type")
    pair_calls(running.awaited_calls, items)
