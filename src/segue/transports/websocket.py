"""How does a WebSocket become turns? A `Session` listens to one socket and serves its lanes.

Frames come in, `session/lanes` decides what runs, every turn's events go out with the name of their lane. The session
holds the connection's cache. A close frame from the client cancels what runs; a loss lets stored turns finish
(product.md 3).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass

from msgspec import UNSET, Raw, structs
from websockets.datastructures import Headers
from websockets.http11 import Request

from segue.errors import (
    ID_CHARS_MAX,
    ApiError,
    Conflict,
    InvalidRequest,
    NotFound,
    Refused,
    ServerFault,
    TooMany,
    Unauthenticated,
    Unavailable,
    response_not_found,
    too_large,
)
from segue.ids import new_id
from segue.session.lanes import Lane, Lanes, Ticket
from segue.transports.auth import Account, bearer, offered
from segue.transports.desk import Desk, NearTurns
from segue.transports.socket import Closed, Refusal, Socket
from segue.transports.socket import Refused as Kind
from segue.turn.assemble import Assembler, steer_failed
from segue.turn.prepare import Asker, decode_items
from segue.turn.resolve import pair_calls
from segue.turn.running import Running
from segue.turn.values import Append, Cancel, Owner, Steer, Tally, Turn
from segue.wire.codec import (
    decode_append,
    decode_create,
    decode_envelope,
    decode_lane,
    decode_steer,
    decode_steered,
    encode_error_body,
    encode_error_event,
    lane_suffix,
    with_input_before,
    with_lane,
)
from segue.wire.events import Event, SteerRef
from segue.wire.items import Required, answer_of, required_by
from segue.wire.requests import AppendFrame, Create, SteerFrame

log = logging.getLogger(__name__)

# Agents leave the version out, or name their own product.
PATHS = frozenset(
    f"{prefix}/responses{end}" for prefix in ("/v1", "", "/v1/codex") for end in ("", "/")
)

# Each connection lives up to this much shorter than the limit, so that they do not all come back at once (F10).
AGE_JITTER = 0.05
# What one steer may bring; a steer is a remark, not a history.
STEER_BYTES_MAX = 1024 * 1024
# Steers that may wait for one response (protocol.md 9 row 11).
STEERS_MAX = 16
# Caches of lost connections; beyond this the oldest goes.
LOST_MAX = 256
# Over how many seconds those who were turned away come back.
CROWDED_S = 4.0
# Turns that are over and still known by name to those who would steer them.
OVER_MAX = 32


@dataclass(frozen=True, slots=True)
class Asked:
    """A create that waits for its turn, with what it has cost so far."""

    create: Create
    tally: Tally
    # Whether it is our own: the successor of a response that was steered.
    is_automatic: bool = False


@dataclass(frozen=True, slots=True)
class HeldSteer:
    """A steer that has outlived its response, and who numbers what is said of it."""

    steer: Steer
    assembler: Assembler


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


class LaneSink:
    """Hears one turn and writes its events to the socket, each with the name of its lane."""

    __slots__ = ("_session", "_suffix", "running", "ticket")

    def __init__(self, session: Session, ticket: ServedTicket) -> None:
        self._session = session
        self.ticket = ticket
        self._suffix = None if ticket.lane is None else lane_suffix(ticket.lane)
        self.running: Running

    def hear(self, running: Running) -> None:
        """The turn that its lane has waited for."""
        self.running = running
        self._session.turn_began(self)

    @property
    def is_full(self) -> bool:
        """Whether the socket's reader is too far behind."""
        return self._session.socket.is_full

    def deliver(self, events: Sequence[Event]) -> None:
        """Write these events. The lane is free before the terminal event leaves (hazards.md F22)."""
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

    def __init__(self, desk: Desk, lobby: Lobby, account: Account) -> None:
        self._desk = desk
        self._sessions = lobby.sessions
        self._lost = lobby.lost
        self.account = account
        self.owner = account.owner
        self._lanes: Lanes[Asked, Turn, HeldSteer] = Lanes()
        self._near, self._turns = desk.open_cache(account)
        self._sinks: set[LaneSink] = set()
        # Turns that are over, for those who would still steer them.
        self._over: OrderedDict[str, tuple[Assembler, Lane]] = OrderedDict()
        # What rollouts were given, until there is a place for them to go on.
        self._appends: dict[ServedTicket, Append] = {}
        # Steers that came by this connection and wait for their response to end.
        self._steers: set[str] = set()
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
        self.account.quota.connections += 1
        age_s = self._desk.limits.connection_age_s * (1 - AGE_JITTER * random.random())
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
            asked = Asked(create, Tally(bytes_received=len(text), quota=self.account.quota))
            self._lanes.add(lane, asked, parent_id, pin)
        except ApiError as error:
            self._refuse(error, _lane_of_error(text, lane))
            return
        self._start_what_may()

    def _received_other(self, kind: str, text: bytes) -> None:
        """A frame of another type than a create."""
        match kind:
            case "response.steer":
                self._received_steer(decode_steer(text))
            case "response.append":
                self._received_append(decode_append(text), len(text))
            case _:
                raise InvalidRequest(
                    f"Invalid event type: '{kind[:64]}'. This server takes 'response.create', "
                    "'response.steer' and 'response.append'.",
                    code="invalid_event_type",
                    param="type",
                )

    def refused(self, kind: Kind, size: int) -> bytes | None:
        """The in-band word before the socket closes on a message that it cannot take."""
        match kind:
            case "too_big":
                error: ApiError = too_large(size, self._desk.limits.body_bytes_max)
            case "binary":
                error = Refused(
                    "Binary messages are not supported.", status=400, code="invalid_message"
                )
            case "flood":
                error = TooMany(f"At most {size} frames a second are taken on one connection.")
            case "invalid":
                return None
        self._desk.note_refusal("websocket", error.code)
        return encode_error_event(error)

    def resumed(self) -> None:
        """The reader has caught up."""
        for sink in self._sinks:
            sink.running.make_room()

    def closed(self, how: Closed) -> None:
        """The connection is over: a close frame is a cancel, a loss lets stored turns finish."""
        self._is_closed = True
        self._sessions.discard(self)
        self.account.quota.connections -= 1
        if self._age_timer is not None:
            self._age_timer.cancel()
        self._lanes.drop_waiting()
        for task in tuple(self._tasks):
            task.cancel()
        for sink in tuple(self._sinks):
            running = sink.running
            running.detach(sink)
            if running.is_heard:
                continue
            if running.is_rollout or not (how.is_lost and running.is_stored):
                running.tell(Cancel())
            else:
                # Whoever was lost may ask for the rest.
                self._desk.runner.write_down(running)
        self._sinks.clear()
        self._over.clear()
        if not (how.is_lost and self._lost.keep(self.owner, self._near)):
            self._near.leave()

    # --- steering (protocol.md 6.10) ---

    def _received_steer(self, frame: SteerFrame) -> None:
        """A steer: taken on by the turn that it is for, or given back with the reason."""
        target = frame.previous_response_id
        given = Raw(b"null") if frame.input is UNSET else frame.input
        sink = next((one for one in self._sinks if one.running.id == target), None)
        try:
            running = self._steerable(sink, target)
            if frame.stream_id is not UNSET:
                raise InvalidRequest(
                    "'response.steer' takes no 'stream_id': it goes to its response's lane.",
                    code="invalid_input",
                )
            if memoryview(given).nbytes > STEER_BYTES_MAX:
                raise InvalidRequest(
                    f"A steer may have at most {STEER_BYTES_MAX} bytes.", code="invalid_input"
                )
            steer = Steer(new_id("steer"), given, decode_steered(given))
            running.steer(steer)
            self._steers.add(steer.id)
        except ApiError as error:
            if error.code in ("invalid_value", "invalid_request"):
                error.code = "invalid_input"
            self._refuse_steer(sink, target, given, error)

    def _refuse_steer(
        self, sink: LaneSink | None, target: str, given: Raw, error: ApiError
    ) -> None:
        if sink is not None:
            sink.running.publish([sink.running.assembler.fail(error, given)])
        elif target in self._over:
            assembler, lane = self._over[target]
            self._send([assembler.fail(error, given).data], lane)
        else:
            ref = SteerRef(previous_response_id=target[:ID_CHARS_MAX], input=given)
            self._send([steer_failed(ref, error).data], None)

    def _send(self, events: list[bytes], lane: Lane) -> None:
        suffix = None if lane is None else lane_suffix(lane)
        self.socket.send(events if suffix is None else [with_lane(one, suffix) for one in events])

    def _steerable(self, sink: LaneSink | None, target: str) -> Running:
        """The turn that this steer is for, if it can still be steered."""
        if sink is None and target in self._over:
            status = self._over[target][0].response.status
            message = f"Response with id '{target}' is {status}."
            if status == "completed":
                raise Conflict(message, code="response_already_completed")
            raise Conflict(message, code="response_not_active")
        if sink is None:
            raise NotFound(
                f"Response with id '{target[:ID_CHARS_MAX]}' not found on this connection.",
                code="response_not_found",
            )
        running = sink.running
        if not running.can_be_steered:
            raise InvalidRequest(
                f"Response with id '{running.id}' cannot be steered.", code="steering_not_supported"
            )
        if len(running.steers) >= STEERS_MAX:
            raise TooMany(
                f"At most {STEERS_MAX} steers may wait for a response.",
                code="too_many_pending_steers",
            )
        return running

    def _learn(self, running: Running) -> None:
        """The turn may have begun on another connection, and been repeated here: this one can go on from it too."""
        if running.turn is not None and self._near.held(self.owner, running.id) is None:
            self._spawn(self._near.save(running.turn))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _pass_on(self, sink: LaneSink) -> None:
        """The steers of a turn that is over wait for the create that continues it: the client's, or our own."""
        running, ticket = sink.running, sink.ticket
        own = [steer for steer in running.steers if steer.id in self._steers]
        held = [HeldSteer(steer, running.assembler) for steer in own]
        self._steers -= {one.steer.id for one in held}
        if not held:
            return
        if running.response.status not in ("completed", "incomplete"):
            asyncio.get_running_loop().call_soon(self._give_back, held, ticket.lane)
            return
        forgotten = self._lanes.hold(ticket.lane, running.id, held)
        if forgotten is not None:
            asyncio.get_running_loop().call_soon(self._give_back, forgotten[1], forgotten[0])
        if self._lanes.has_waiting(ticket.lane, running.id):
            return
        items = running.assembler.items
        required = [one for item in items if (one := required_by(item.value)) is not None]
        if required:
            asyncio.get_running_loop().call_soon(self._pend, held, required, ticket.lane)
            return
        inherited = structs.replace(
            ticket.request.create, input=[], previous_response_id=running.id, idempotency_key=None
        )
        tally = Tally(quota=self.account.quota)
        self._lanes.put_first(ticket.lane, Asked(inherited, tally, is_automatic=True), running.id)

    def _pend(self, held: Sequence[HeldSteer], required: list[Required], lane: Lane) -> None:
        if not self._is_closed:
            self._send([one.assembler.pend(one.steer, required).data for one in held], lane)

    def _give_back(self, held: Sequence[HeldSteer], lane: Lane) -> None:
        """These steers could not be applied."""
        error = ServerFault("The steer could not be applied.", code="successor_creation_failed")
        events = [one.assembler.fail(error, one.steer.input, one.steer).data for one in held]
        if events and not self._is_closed:
            self._send(events, lane)

    # --- rollouts (product.md 4) ---

    def turn_waits(self, sink: LaneSink) -> None:
        """A rollout waits for its client: its place may be another's."""
        self._lanes.pause(sink.ticket)
        asyncio.get_running_loop().call_soon(self._start_what_may)

    def _received_append(self, frame: AppendFrame, size: int) -> None:
        sink = next((one for one in self._sinks if one.running.id == frame.response_id), None)
        if sink is None:
            raise response_not_found(frame.response_id)
        sink.ticket.request.tally.bytes_received += size
        self._spawn(self._append(sink, frame))

    async def _append(self, sink: LaneSink, frame: AppendFrame) -> None:
        """Give a waiting rollout what it asked for, or say what is wrong; then it goes on waiting."""
        running = sink.running
        try:
            items = await decode_items(frame.input, sink.ticket.request.tally)
            if running.owed is None:
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
            running.check(items)
            pair_calls(running.owed, items)
        except ApiError as error:
            self._refuse(error, sink.ticket.lane)
            return
        running.owed = None
        self._appends[sink.ticket] = Append(items)
        self._lanes.resume(sink.ticket)
        self._start_what_may()

    # --- turns ---

    def turn_began(self, sink: LaneSink) -> None:
        """A turn of this connection runs."""
        self._sinks.add(sink)

    def turn_ended(self, sink: LaneSink, last: Event) -> None:
        """A turn of this connection is over: free its lane, forget what must be forgotten, start the next."""
        self._sinks.discard(sink)
        self._appends.pop(sink.ticket, None)
        self._turn_count += 1
        self._over[sink.running.id] = (sink.running.assembler, sink.ticket.lane)
        if len(self._over) > OVER_MAX:
            self._over.popitem(last=False)
        self._pass_on(sink)
        self._learn(sink.running)
        has_failed = last.type == "response.failed"
        made = None if has_failed else sink.running.id
        self._free(sink.ticket, made=made, has_failed=has_failed)

    def _refuse(self, error: ApiError, lane: Lane) -> None:
        self._desk.note_refusal("websocket", error.code)
        self.socket.send([encode_error_event(error, lane)])

    def _start_what_may(self) -> None:
        if self._is_closed:
            return
        for ticket in self._lanes.start():
            appended = self._appends.pop(ticket, None)
            if appended is None:
                self._spawn(self._serve(ticket))
            else:
                running = next(one.running for one in self._sinks if one.ticket is ticket)
                running.tell(appended)

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
        asker = Asker(self.owner, self._turns, known, lane)
        sink = LaneSink(self, ticket)
        try:
            _refuse_background(create)
            await self._desk.book.check(self.account)
            self.account.quota.ask()
            await self._desk.runner.begin(create, asker, asked.tally, sink, "websocket")
        except Exception as fault:
            error = (
                fault if isinstance(fault, ApiError) else ServerFault("The server had an error.")
            )
            if error is not fault:
                log.exception("a request could not be prepared")
            self._free(ticket, has_failed=True)
            if not asked.is_automatic:
                self._refuse(error, ticket.lane)
            self._give_back(held, ticket.lane)
            return

    def _free(
        self, ticket: ServedTicket, *, made: str | None = None, has_failed: bool = False
    ) -> None:
        forgotten = self._lanes.done(ticket, made=made, has_failed=has_failed)
        if forgotten is not None:
            self._near.forget(self.owner, forgotten)
        self._start_what_may()
        is_leaving = self._is_aged or self._is_dismissed or self._desk.runner.is_draining
        if is_leaving and self._lanes.is_idle:
            # After the terminal event of the turn that just ended, which has not left yet.
            asyncio.get_running_loop().call_soon(self._retire)

    def _check_age(self) -> None:
        if self._is_aged:
            raise self._too_old()

    def _too_old(self) -> InvalidRequest:
        minutes = round(self._desk.limits.connection_age_s / 60)
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
        for sink in tuple(self._sinks):
            if sink.running.owed is not None:
                sink.running.tell(Cancel())
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


class LostCaches:
    """What connections remembered that were lost a moment ago, for whoever comes back (product.md 3; off by default).

    In memory only, and only for the same owner.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._caches: deque[tuple[Owner, NearTurns]] = deque()

    @property
    def bytes(self) -> int:
        """What is held."""
        return sum(cache.bytes for _, cache in self._caches)

    def keep(self, owner: Owner, cache: NearTurns) -> bool:
        """Keep a lost connection's cache for a moment; False if it is not worth it."""
        if self._keep_s <= 0 or not cache.bytes:
            return False
        if len(self._caches) >= LOST_MAX:
            self._drop(self._caches[0])
        kept = (owner, cache)
        self._caches.append(kept)
        asyncio.get_running_loop().call_later(self._keep_s, self._drop, kept)
        return True

    def find(self, owner: Owner, turn_id: str) -> Turn | None:
        """A turn that a lost connection of this owner remembered."""
        for whose, cache in self._caches:
            if whose == owner and (turn := cache.held(owner, turn_id)) is not None:
                return turn
        return None

    async def erase(self, owner: Owner, turn_id: str) -> None:
        """A turn was deleted."""
        for whose, cache in tuple(self._caches):
            if whose == owner:
                await cache.delete(owner, turn_id)

    def _drop(self, kept: tuple[Owner, NearTurns]) -> None:
        if kept in self._caches:
            self._caches.remove(kept)
            kept[1].leave()


def _header(headers: Headers, name: str) -> str:
    """A header's value, or nothing; one that is there twice is both, and so none that we know."""
    return ", ".join(headers.get_all(name))


def _secret_in(headers: Headers) -> str | None:
    """The secret that an upgrade presents: in its Authorization header, or, from a browser, among its subprotocols."""
    secret = bearer(_header(headers, "Authorization"))
    return offered(headers.get_all("Sec-WebSocket-Protocol")) if secret is None else secret


class Lobby:
    """Accepts upgrades: every session of the process begins here."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.sessions: set[Session] = set()
        self.lost = LostCaches(desk.limits.reconnect_s)

    def accept(self, request: Request) -> Session | Refusal | Awaitable[Session | Refusal]:
        """A session for this upgrade, or the status that refuses it before the handshake; at once where the key is
        known."""
        try:
            self._check(request)
            secret = _secret_in(request.headers)
            account = self._desk.book.known(secret)
            if account is None:
                return self._look_up(secret)
            return self._open(account)
        except ApiError as error:
            return self._refuse(error)

    def _check(self, request: Request) -> None:
        """All that can be refused without asking who it is."""
        path = request.path.partition("?")[0]
        headers, limits = request.headers, self._desk.limits
        self._desk.gate.check(_header(headers, "Host"), _header(headers, "Origin"))
        if path not in PATHS:
            raise Refused(f"Unknown request URL: {path[:256]}.", status=404, code="unknown_url")
        if not limits.is_websocket_on:
            raise Refused(
                "WebSocket mode is switched off here; use HTTP.",
                status=426,
                code="upgrade_required",
            )
        if self._desk.runner.is_draining:
            raise Unavailable("The server is shutting down. Please retry.")
        if len(self.sessions) >= limits.connections_max:
            # Not all at the same time: those who were turned away come back over a few seconds.
            wait_s = 1 + CROWDED_S * random.random()
            raise Unavailable("Too many connections. Please retry.", wait_s=wait_s)

    async def _look_up(self, secret: str | None) -> Session | Refusal:
        try:
            return self._open(await self._desk.book.find(secret))
        except ApiError as error:
            return self._refuse(error)

    def _open(self, account: Account) -> Session:
        account.check_scope("responses")
        account.quota.check_connections()
        return Session(self._desk, self, account)

    def _refuse(self, error: ApiError) -> Refusal:
        self._desk.note_refusal("websocket", error.code)
        headers: tuple[tuple[str, str], ...] = ()
        if error.wait_s is not None:
            headers += (("retry-after", str(math.ceil(error.wait_s))),)
        if isinstance(error, Unauthenticated):
            headers += (("www-authenticate", error.challenge),)
        return Refusal(error.status, headers, encode_error_body(error))

    def dismiss(self, account: Account) -> None:
        """Whoever came in with this key may not stay."""
        for session in tuple(self.sessions):
            if session.account is account:
                session.dismiss()

    async def erase(self, owner: Owner, turn_id: str) -> None:
        """Make every connection forget a deleted turn."""
        for session in tuple(self.sessions):
            await session.erase(owner, turn_id)
        await self.lost.erase(owner, turn_id)

    def leave_idle(self) -> None:
        """Close the sockets that wait; the others close behind their last turn, in the same breath."""
        for session in tuple(self.sessions):
            session.leave_if_idle()

    def leave(self) -> None:
        """Close all sockets: the process is going away."""
        for session in tuple(self.sessions):
            session.leave()
