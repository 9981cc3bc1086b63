"""How does a WebSocket become turns? A `Session` listens to one socket and serves its lanes.

Frames come in, `session/lanes` decides what runs, every turn's events go out with the name of their lane. The session
holds the connection's cache. A close frame from the client cancels what runs; a loss lets stored turns finish.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from msgspec import structs

from segue.accounts.account import Account
from segue.errors import (
    ApiError,
    Conflict,
    InvalidRequest,
    Refused,
    ServerFault,
    TooMany,
    Unauthenticated,
    response_not_found,
    too_large,
)
from segue.session.lanes import Lane, Lanes, Ticket
from segue.transports.reconnect import LostCaches
from segue.transports.services import Services
from segue.transports.socket import Closed, Socket
from segue.transports.socket import Refused as Kind
from segue.transports.steering import HeldSteer, Steering
from segue.turn.plan import Caller, Tally
from segue.turn.prepare import decode_items
from segue.turn.resolve import pair_calls
from segue.turn.running import Running
from segue.turn.values import Append, Cancel, Owner, Turn
from segue.wire.codec import (
    decode_append,
    decode_create,
    decode_envelope,
    decode_lane,
    decode_steer,
    decode_traceparent,
    encode_error_event,
    lane_suffix,
    with_input_before,
    with_lane,
)
from segue.wire.events import Event
from segue.wire.items import Item
from segue.wire.kinds import answer_of, required_by
from segue.wire.requests import AppendFrame, Create

log = logging.getLogger(__name__)

# Each connection lives up to this much shorter than the limit, so that they do not all come back at once
# (docs/hazards.md F10).
AGE_JITTER = 0.05
# Turns stop when the outbox is full; what else is said may take so many times as much.
UNREAD_TIMES_MAX = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """A create that waits for its turn, with what it has cost so far."""

    create: Create
    tally: Tally
    # Whether it is our own: the successor of a response that was steered.
    is_automatic: bool = False


ServedTicket = Ticket[Asked, Turn]


@dataclass(frozen=True, slots=True)
class Glance:
    """What can be seen of a connection from outside."""

    # The first part of the names of its lanes, as turns carry them.
    key: str
    owner: Owner
    opened_at: float
    lanes: int
    running: int
    waiting: int
    turns: int
    state_bytes: int


class LaneSubscriber:
    """Hears one turn and writes its events to the socket, each with the name of its lane."""

    __slots__ = ("_session", "_suffix", "running", "ticket")

    def __init__(self, session: Session, ticket: ServedTicket) -> None:
        self._session = session
        self.ticket = ticket
        self._suffix = None if ticket.lane is None else lane_suffix(ticket.lane)
        self.running: Running

    def attached(self, running: Running) -> None:
        """The turn that its lane has waited for."""
        self.running = running
        self._session.turn_began(self)

    @property
    def is_full(self) -> bool:
        """Whether the socket's reader is too far behind."""
        return self._session.socket.is_full

    def deliver(self, events: Sequence[Event]) -> None:
        """Write these events. The lane is free before the terminal event leaves (docs/hazards.md F22)."""
        suffix, last = self._suffix, events[-1]
        if last.is_terminal:
            self._session.turn_ended(self, last)
        elif last.type == "response.done":
            self._session.turn_waits(self)
        if suffix is None:
            self._session.socket.send([event.data for event in events])
        else:
            self._session.socket.send([with_lane(event.data, suffix) for event in events])


class Session:
    """One connection: a listener of its socket."""

    def __init__(
        self, services: Services, account: Account, sessions: set[Session], lost: LostCaches
    ) -> None:
        self._services = services
        self._sessions = sessions
        self._lost = lost
        self.account = account
        self.owner = account.owner
        self._lanes: Lanes[Asked, Turn, HeldSteer] = Lanes(
            waiting_bytes_max=services.limits.body_bytes_max
        )
        self._near, self._turns = services.open_cache(account)
        self._subscribers: dict[ServedTicket, LaneSubscriber] = {}
        self._steering = Steering(self._send)
        # What rollouts were given, until there is a place for them to go on.
        self._appends: dict[ServedTicket, Append] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._age_timer: asyncio.TimerHandle | None = None
        self._is_aged = False
        self._is_dismissed = False
        self._is_closed = False
        self._opened_at = time.perf_counter()
        self._turn_count = 0
        self.socket: Socket

    @property
    def state_bytes(self) -> int:
        """What the connection's cache holds."""
        return self._near.bytes

    @property
    def unread_bytes(self) -> int:
        """What waits for its client to read."""
        return self.socket.unread_bytes

    def glance(self) -> Glance:
        """What it is doing now."""
        lanes = self._lanes
        return Glance(
            key=str(id(self)),
            owner=self.owner,
            opened_at=self._opened_at,
            lanes=lanes.named + 1,
            running=lanes.running,
            waiting=lanes.waiting,
            turns=self._turn_count,
            state_bytes=self._near.bytes,
        )

    async def erase(self, owner: Owner, turn_id: str) -> None:
        """A turn was deleted: this connection must not remember it either."""
        self._lanes.unpin(turn_id)
        await self._near.delete(owner, turn_id)

    def opened(self, socket: Socket) -> None:
        """The handshake is done."""
        self.socket = socket
        self._sessions.add(self)
        self.account.quota.connect()
        age_s = self._services.limits.connection_age_s * (1 - AGE_JITTER * random.random())
        self._age_timer = asyncio.get_running_loop().call_later(age_s, self._come_of_age)

    def received(self, text: bytes) -> None:
        """One frame: a create that joins its lane, a steer, an append, or an answer that says what is wrong with it."""
        lane: Lane = None
        try:
            self._check_dismissed()
            create = _decode(text)
            if not isinstance(create, Create):
                self._received_other(create, text)
                return
            lane = decode_lane(create)
            self._lanes.name(lane)
            self._check_age()
            parent_id = create.previous_response_id
            pin = None if parent_id is None else self._near.held(self.owner, parent_id)
            tally = Tally(
                bytes_received=len(text),
                traceparent=decode_traceparent(create),
            )
            asked = Asked(create, tally)
            self._lanes.add(lane, asked, parent_id, pin, size=len(text))
        except ApiError as error:
            self._refuse(error, _lane_of_error(text, lane))
            return
        except Exception:
            # A mistake of ours must not take the connection with it, nor leave the frame without an answer.
            log.exception("a frame could not be read")
            self._refuse(ServerFault("The server had an error."), lane)
            return
        self._start_what_may()

    def _received_other(self, kind: str, text: bytes) -> None:
        """A frame of another type than a create."""
        match kind:
            case "response.steer":
                frame = decode_steer(text)
                subscriber = self._sink(frame.previous_response_id)
                self._steering.take(frame, None if subscriber is None else subscriber.running)
            case "response.append":
                self._received_append(decode_append(text), len(text))
            case _:
                raise InvalidRequest(
                    f"Invalid event type: '{kind[:64]}'. This server takes 'response.create', "
                    "'response.steer' and 'response.append'.",
                    code="invalid_event_type",
                    param="type",
                )

    def refused(self, kind: Kind, size: int) -> bytes:
        """The in-band word before the socket closes on a message that it cannot take; before it, one for each create
        that has not been answered: none of them is lost in silence (docs/hazards.md F9)."""
        match kind:
            case "too_big":
                error: ApiError = too_large(size, self._services.limits.body_bytes_max)
            case "binary":
                error = Refused(
                    "Binary messages are not supported.", status=400, code="invalid_message"
                )
            case "flood":
                error = TooMany(f"At most {size} frames a second are taken on one connection.")
            case "invalid":
                error = InvalidRequest(
                    "We could not parse the JSON of your request: it is not valid UTF-8.",
                    code="invalid_json",
                )
            case "violation":
                error = Refused(
                    "The frame breaks the rules of WebSocket.", status=400, code="invalid_message"
                )
        self._services.note_refusal("websocket", error.code)
        cut = ServerFault(
            "The connection is closed because of another message on it. "
            "A response that is stored goes on, and can be retrieved."
        )
        self.socket.send([encode_error_event(cut, lane) for lane in self._lanes.unanswered])
        return encode_error_event(error)

    def resumed(self) -> None:
        """The reader has caught up."""
        for subscriber in self._subscribers.values():
            subscriber.running.wake()
        self._start_what_may()

    def closed(self, how: Closed) -> None:
        """The connection is over: a close frame is a cancel, a loss lets stored turns finish."""
        self._is_closed = True
        self._sessions.discard(self)
        self.account.quota.disconnect()
        if self._age_timer is not None:
            self._age_timer.cancel()
        self._lanes.drop_waiting()
        for task in tuple(self._tasks):
            task.cancel()
        for subscriber in tuple(self._subscribers.values()):
            running = subscriber.running
            running.detach(subscriber)
            if running.has_subscribers:
                continue
            if running.is_rollout or not (how.is_lost and running.is_stored):
                running.notify(Cancel())
            else:
                # Whoever was lost may ask for the rest.
                self._services.runner.log_events(running)
        self._subscribers.clear()
        self._steering.clear()
        if not (how.is_lost and self._lost.keep(self.owner, self._near)):
            self._near.leave()

    # --- steering (docs/protocol.md 6.10) ---

    def _sink(self, response_id: str) -> LaneSubscriber | None:
        return next(
            (one for one in self._subscribers.values() if one.running.id == response_id), None
        )

    def _send(self, events: Sequence[Event], lane: Lane) -> None:
        if self._is_closed or not events:
            return
        suffix = None if lane is None else lane_suffix(lane)
        data = [event.data for event in events]
        self._say(data if suffix is None else [with_lane(one, suffix) for one in data])

    def _pass_on(self, subscriber: LaneSubscriber) -> None:
        """The steers of a turn that is over wait for the create that continues it: the client's, or our own."""
        running, ticket = subscriber.running, subscriber.ticket
        held = self._steering.end(running, ticket.lane)
        if not held:
            return
        soon = asyncio.get_running_loop().call_soon
        if running.response.status not in ("completed", "incomplete"):
            soon(self._steering.give_back, held, ticket.lane)
            return
        forgotten = self._lanes.hold(ticket.lane, running.id, held)
        if forgotten is not None:
            soon(self._steering.give_back, forgotten[1], forgotten[0])
        if self._lanes.has_waiting(ticket.lane, running.id):
            return
        items = running.assembler.items
        required = [one for item in items if (one := required_by(item.value)) is not None]
        if required:
            soon(self._steering.pend, held, required, ticket.lane)
            return
        inherited = structs.replace(
            ticket.request.create, input=[], previous_response_id=running.id, idempotency_key=None
        )
        tally = Tally()
        self._lanes.put_first(ticket.lane, Asked(inherited, tally, is_automatic=True), running.id)

    # --- rollouts (docs/protocol.md 11) ---

    def turn_waits(self, subscriber: LaneSubscriber) -> None:
        """A rollout waits for its client: its place may be another's."""
        self._lanes.pause(subscriber.ticket)
        asyncio.get_running_loop().call_soon(self._start_what_may)

    def _received_append(self, frame: AppendFrame, size: int) -> None:
        subscriber = self._sink(frame.response_id)
        if subscriber is None:
            raise response_not_found(frame.response_id)
        subscriber.ticket.request.tally.bytes_received += size
        self._spawn(self._append(subscriber, frame))

    async def _append(self, subscriber: LaneSubscriber, frame: AppendFrame) -> None:
        """Give a waiting rollout what it asked for, or say what is wrong; then it goes on waiting."""
        running = subscriber.running
        try:
            items = await decode_items(frame.input, subscriber.ticket.request.tally)
            _check_append(running, items)
            items = await self._services.runner.read(items)
            # It may have been given up meanwhile, or been given what it waits for.
            _check_append(running, items)
            running.check(items, subscriber.ticket.request.tally)
        except ApiError as error:
            self._refuse(error, subscriber.ticket.lane)
            return
        running.awaited_calls = None
        self._appends[subscriber.ticket] = Append(items)
        self._lanes.resume(subscriber.ticket)
        self._start_what_may()

    # --- turns ---

    def turn_began(self, subscriber: LaneSubscriber) -> None:
        """A turn of this connection runs."""
        self._subscribers[subscriber.ticket] = subscriber

    def turn_ended(self, subscriber: LaneSubscriber, last: Event) -> None:
        """A turn of this connection is over: free its lane, forget what must be forgotten, start the next."""
        self._subscribers.pop(subscriber.ticket, None)
        self._appends.pop(subscriber.ticket, None)
        self._turn_count += 1
        self._pass_on(subscriber)
        self._learn(subscriber.running)
        has_failed = last.type == "response.failed"
        made = None if has_failed else subscriber.running.id
        self._free(subscriber.ticket, made=made, has_failed=has_failed)

    def _learn(self, running: Running) -> None:
        """The turn may have begun on another connection, and been repeated here: this one can go on from it too."""
        if running.turn is not None and self._near.held(self.owner, running.id) is None:
            self._spawn(self._near.save(running.turn))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, error: ApiError, lane: Lane) -> None:
        self._services.note_refusal("websocket", error.code)
        self._say([encode_error_event(error, lane)])

    def _say(self, events: list[bytes]) -> None:
        """Answer a frame at once, unless its sender has left too many answers unread."""
        if self.socket.unread_bytes > UNREAD_TIMES_MAX * self._services.limits.outbox_bytes_max:
            self.socket.close(1008, "answers are not read")
        else:
            self.socket.send(events)

    def _start_what_may(self) -> None:
        # A client that does not read gets no more to read.
        if self._is_closed or self.socket.is_full:
            return
        for ticket in self._lanes.start():
            appended = self._appends.pop(ticket, None)
            if appended is None:
                self._spawn(self._serve(ticket))
            else:
                self._subscribers[ticket].running.notify(appended)

    async def _serve(self, ticket: ServedTicket) -> None:
        """Prepare a turn whose time has come, and let it run."""
        asked, parent_id = ticket.request, ticket.parent_id
        held = self._lanes.take_held(ticket)
        create = asked.create
        if held:
            create = with_input_before(create, [item for one in held for item in one.steer.items])
        known = ticket.pin
        if known is None and parent_id is not None:
            known = self._near.held(self.owner, parent_id) or self._lost.find(self.owner, parent_id)
        lane = f"{id(self)}/{ticket.lane or ''}"
        account = self.account
        caller = Caller(
            self.owner, self._turns, known, lane, may=account.scopes, quota=account.quota
        )
        subscriber = LaneSubscriber(self, ticket)
        try:
            _refuse_background(create)
            await self._services.accounts.check(self.account)
            await self.account.quota.take_request()
            await self._services.runner.begin(create, caller, asked.tally, subscriber, "websocket")
        except Exception as fault:
            error = (
                fault if isinstance(fault, ApiError) else ServerFault("The server had an error.")
            )
            if error is not fault:
                log.exception("a request could not be prepared")
            # Nobody asked for a successor that cannot be: the client may go on from the steered response itself.
            self._free(ticket, has_failed=not asked.is_automatic)
            if not asked.is_automatic:
                self._refuse(error, ticket.lane)
            self._steering.give_back(held, ticket.lane)
            return

    def _free(
        self, ticket: ServedTicket, *, made: str | None = None, has_failed: bool = False
    ) -> None:
        forgotten = self._lanes.done(ticket, made=made, has_failed=has_failed)
        if forgotten is not None:
            self._near.forget(self.owner, forgotten)
        self._start_what_may()
        is_leaving = self._is_aged or self._is_dismissed or self._services.runner.is_draining
        if is_leaving and self._lanes.is_idle:
            # After the terminal event of the turn that just ended, which has not left yet.
            asyncio.get_running_loop().call_soon(self._retire)

    def _check_age(self) -> None:
        if self._is_aged:
            raise self._too_old()

    def _too_old(self) -> InvalidRequest:
        minutes = round(self._services.limits.connection_age_s / 60)
        return InvalidRequest(
            f"Responses websocket connection limit reached ({minutes} minutes). "
            "Create a new websocket connection to continue.",
            code="websocket_connection_limit_reached",
        )

    def _come_of_age(self) -> None:
        """The limit applies only between turns: what runs may finish."""
        self._is_aged = True
        if self._lanes.is_idle:
            self._retire()

    def _retire(self) -> None:
        if self._is_closed:
            return
        if self._is_dismissed:
            self._refuse(_dismissed(), None)
            self.socket.close(1008, "the key is not valid any more")
            return
        if self._is_aged:
            self._refuse(self._too_old(), None)
            self.socket.close(1001, "connection limit reached")
        else:
            self.leave()

    # --- keys ---

    def dismiss(self) -> None:
        """The key was taken back: what runs may finish, what waits for the client ends, nothing more is taken."""
        if self._is_dismissed:
            return
        self._is_dismissed = True
        for subscriber in tuple(self._subscribers.values()):
            if subscriber.running.awaited_calls is not None:
                subscriber.running.notify(Cancel())
        if self._lanes.is_idle:
            self._retire()

    def _check_dismissed(self) -> None:
        if self._is_dismissed:
            raise _dismissed()

    def leave(self) -> None:
        """The process is going away."""
        self.socket.close(1012, "service restart")

    def leave_if_idle(self) -> None:
        """The process drains. A client must hear it before it asks again: a frame that crosses our close is lost."""
        if self._lanes.is_idle:
            self.leave()


def _dismissed() -> Unauthenticated:
    return Unauthenticated("Incorrect API key provided.", is_wrong=True)


def _check_append(running: Running, items: Sequence[Item]) -> None:
    """Refuse what the turn does not wait for."""
    if running.awaited_calls is None:
        raise Conflict(
            f"Response with id '{running.id}' does not wait for anything.",
            code="response_not_waiting",
            param="response_id",
        )
    for index, item in enumerate(items):
        if answer_of(item.value) is None:
            raise InvalidRequest(
                "'response.append' takes the outputs of calls and nothing else.",
                param=f"input[{index}].type",
            )
    pair_calls(running.awaited_calls, items)


def _refuse_background(create: Create) -> None:
    if create.background:
        raise InvalidRequest(
            "'background' belongs to HTTP.", code="unsupported_parameter", param="background"
        )


def _decode(text: bytes) -> Create | str:
    """The create in this frame, or the type of a frame that is none."""
    try:
        create = decode_create(text)
    except InvalidRequest as wrong:
        try:
            kind = decode_envelope(text)[0]
        except InvalidRequest:
            raise wrong from None
        if kind in ("response.steer", "response.append"):
            return kind
        raise
    return create if create.type == "response.create" else create.type or "nothing"


def _lane_of_error(text: bytes, lane: Lane) -> Lane:
    """The lane that an error is echoed on, also where the frame could not be read as a whole."""
    return decode_envelope(text)[1] if lane is None else lane
