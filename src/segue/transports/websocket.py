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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from websockets.http11 import Request

from segue.errors import ApiError, InvalidRequest, Refused, ServerFault, Unavailable, too_large
from segue.session.lanes import Lane, Lanes, Ticket
from segue.transports.desk import LOCAL, Desk
from segue.transports.socket import Closed, Refusal, Socket
from segue.turn.running import Running
from segue.turn.values import Cancel, Owner, Tally, Turn
from segue.wire.codec import (
    decode_create,
    decode_envelope,
    decode_lane,
    encode_error_body,
    encode_error_event,
    lane_suffix,
    with_lane,
)
from segue.wire.events import Event
from segue.wire.requests import Create

log = logging.getLogger(__name__)

PATHS = frozenset({"/v1/responses", "/v1/responses/"})

# Each connection lives up to this much shorter than the limit, so that they do not all come back at once (F10).
AGE_JITTER = 0.05


@dataclass(frozen=True, slots=True)
class Asked:
    """A create that waits for its turn, with what it has cost so far."""

    create: Create
    tally: Tally


ServedTicket = Ticket[Asked, Turn]


class LaneSink:
    """Hears one turn and writes its events to the socket, each with the name of its lane."""

    __slots__ = ("_session", "_suffix", "_ticket", "running")

    def __init__(self, session: Session, ticket: ServedTicket) -> None:
        self._session = session
        self._ticket = ticket
        self._suffix = None if ticket.lane is None else lane_suffix(ticket.lane)
        self.running: Running | None = None

    @property
    def is_full(self) -> bool:
        """Whether the socket's reader is too far behind."""
        return self._session.socket.is_full

    def deliver(self, events: Sequence[Event]) -> None:
        """Write these events. The lane is free before the terminal event leaves (hazards.md F22)."""
        suffix = self._suffix
        if events[-1].is_terminal:
            self._session.turn_ended(self, self._ticket, events[-1])
        if suffix is None:
            self._session.socket.send([event.data for event in events])
        else:
            self._session.socket.send([with_lane(event.data, suffix) for event in events])


class Session:
    """One connection: a listener of its socket."""

    def __init__(self, desk: Desk, sessions: set[Session]) -> None:
        self._desk = desk
        self._sessions = sessions
        self._lanes: Lanes[Asked, Turn] = Lanes()
        self._near, self._turns = desk.open_cache()
        self._sinks: set[LaneSink] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._age_timer: asyncio.TimerHandle | None = None
        self._is_aged = False
        self._is_closed = False
        self.socket: Socket

    @property
    def state_bytes(self) -> int:
        """What the connection's cache holds."""
        return self._near.bytes

    async def erase(self, owner: Owner, turn_id: str) -> None:
        """A turn was deleted: this connection must not remember it either."""
        self._lanes.unpin(turn_id)
        await self._near.delete(owner, turn_id)

    def opened(self, socket: Socket) -> None:
        """The handshake is done."""
        self.socket = socket
        self._sessions.add(self)
        age_s = self._desk.limits.connection_age_s * (1 - AGE_JITTER * random.random())
        self._age_timer = asyncio.get_running_loop().call_later(age_s, self._come_of_age)

    def received(self, text: bytes) -> None:
        """One frame: a create that joins its lane, or an answer that says what is wrong with it."""
        lane: Lane = None
        try:
            create = self._decode(text)
            lane = decode_lane(create)
            self._lanes.name(lane)
            self._check_age()
            parent_id = create.previous_response_id
            pin = None if parent_id is None else self._near.held(LOCAL, parent_id)
            asked = Asked(create, Tally(bytes_received=len(text)))
            self._lanes.add(lane, asked, parent_id, pin)
        except ApiError as error:
            self._refuse(error, _lane_of_error(text, lane))
            return
        self._start_what_may()

    def refused(self, kind: Literal["binary", "too_big", "invalid"], size: int) -> bytes | None:
        """The in-band word before the socket closes on a message that it cannot take."""
        match kind:
            case "too_big":
                error: ApiError = too_large(size, self._desk.limits.body_bytes_max)
            case "binary":
                error = Refused(
                    "Binary messages are not supported.", status=400, code="invalid_message"
                )
            case "invalid":
                return None
        self._desk.note_refusal("websocket", error.code)
        return encode_error_event(error)

    def resumed(self) -> None:
        """The reader has caught up."""
        for sink in self._sinks:
            if sink.running is not None:
                sink.running.make_room()

    def closed(self, how: Closed) -> None:
        """The connection is over: a close frame is a cancel, a loss lets stored turns finish."""
        self._is_closed = True
        self._sessions.discard(self)
        if self._age_timer is not None:
            self._age_timer.cancel()
        self._lanes.drop_waiting()
        for task in tuple(self._tasks):
            task.cancel()
        for sink in tuple(self._sinks):
            running = sink.running
            assert running is not None
            running.detach(sink)
            if not (how.is_lost and running.is_stored):
                running.tell(Cancel())
        self._sinks.clear()

    def turn_ended(self, sink: LaneSink, ticket: ServedTicket, last: Event) -> None:
        """A turn of this connection is over: free its lane, forget what must be forgotten, start the next."""
        self._sinks.discard(sink)
        assert sink.running is not None
        has_failed = last.type == "response.failed"
        self._free(ticket, made=None if has_failed else sink.running.id, has_failed=has_failed)

    def _decode(self, text: bytes) -> Create:
        create = decode_create(text)
        if create.type != "response.create":
            name = "nothing" if not create.type else f"'{create.type[:64]}'"
            raise InvalidRequest(
                f"Invalid event type: {name}. This server takes 'response.create'.",
                code="invalid_event_type",
                param="type",
            )
        return create

    def _refuse(self, error: ApiError, lane: Lane) -> None:
        self._desk.note_refusal("websocket", error.code)
        self.socket.send([encode_error_event(error, lane)])

    def _start_what_may(self) -> None:
        for ticket in self._lanes.start():
            task = asyncio.create_task(self._serve(ticket))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, ticket: ServedTicket) -> None:
        """Prepare a turn whose time has come, and let it run."""
        asked, parent_id = ticket.request, ticket.parent_id
        known = ticket.pin
        if known is None and parent_id is not None:
            known = self._near.held(LOCAL, parent_id)
        try:
            plan = await self._desk.runner.prepare(
                asked.create,
                owner=LOCAL,
                turns=self._turns,
                tally=asked.tally,
                known=known,
                lane=f"{id(self)}/{ticket.lane or ''}",
            )
        except Exception as fault:
            error = (
                fault if isinstance(fault, ApiError) else ServerFault("The server had an error.")
            )
            if error is not fault:
                log.exception("a request could not be prepared")
            self._free(ticket, has_failed=True)
            self._refuse(error, ticket.lane)
            return
        sink = LaneSink(self, ticket)
        self._sinks.add(sink)
        sink.running = self._desk.runner.start(plan, self._turns, sink, "websocket")

    def _free(
        self, ticket: ServedTicket, *, made: str | None = None, has_failed: bool = False
    ) -> None:
        forgotten = self._lanes.done(ticket, made=made, has_failed=has_failed)
        if forgotten is not None:
            self._near.forget(LOCAL, forgotten)
        self._start_what_may()
        if self._is_aged and self._lanes.is_idle:
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
        if not self._is_closed:
            self._refuse(self._too_old(), None)
            self.socket.close(1001, "connection limit reached")

    def leave(self) -> None:
        """The process is going away."""
        self.socket.close(1012, "service restart")


def _lane_of_error(text: bytes, lane: Lane) -> Lane:
    """The lane that an error is echoed on, also where the frame could not be read as a whole."""
    if lane is not None:
        return lane
    try:
        return decode_envelope(text)[1]
    except ApiError:
        return None


class Lobby:
    """Accepts upgrades: every session of the process begins here."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.sessions: set[Session] = set()

    def accept(self, request: Request) -> Session | Refusal:
        """A session for this upgrade, or the status that refuses it before the handshake."""
        path = request.path.partition("?")[0]
        error: ApiError
        if path not in PATHS:
            error = Refused(f"Unknown request URL: {path[:256]}.", status=404, code="unknown_url")
        elif not self._desk.limits.is_websocket_on:
            error = Refused(
                "WebSocket mode is switched off here; use HTTP.",
                status=426,
                code="upgrade_required",
            )
        elif self._desk.runner.is_draining:
            error = Unavailable("The server is shutting down. Please retry.")
        else:
            return Session(self._desk, self.sessions)
        self._desk.note_refusal("websocket", error.code)
        wait_s = error.wait_s
        headers = () if wait_s is None else (("retry-after", str(math.ceil(wait_s))),)
        return Refusal(error.status, headers, encode_error_body(error))

    async def erase(self, owner: Owner, turn_id: str) -> None:
        """Make every connection forget a deleted turn."""
        for session in tuple(self.sessions):
            await session.erase(owner, turn_id)

    def leave(self) -> None:
        """Close all sockets: the process is going away."""
        for session in tuple(self.sessions):
            session.leave()
