"""What becomes of a connection's steers (docs/protocol.md 6.10)?

Each is taken on by its turn, or goes back with the reason. One that outlives its turn is held for the create that
continues it; the session knows which that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET, Raw

from segue.errors import (
    ID_CHARS_MAX,
    ApiError,
    Conflict,
    InvalidRequest,
    NotFound,
    ServerFault,
    TooMany,
)
from segue.ids import new_id
from segue.session.lanes import Lane
from segue.turn.assemble import Assembler, steer_failed
from segue.turn.plan import Tally
from segue.turn.running import Running
from segue.turn.values import Steer
from segue.wire.codec import decode_steered
from segue.wire.events import Event, SteerRef
from segue.wire.items import Item, Required
from segue.wire.requests import SteerFrame

# What one steer may bring; a steer is a remark, not a history.
STEER_BYTES_MAX = 1024 * 1024
# Steers that may wait for one response (docs/protocol.md 9 row 11).
STEERS_MAX = 16
# Turns that are over and still known by name to those who would steer them.
OVER_MAX = 32

Send = Callable[[Sequence[Event], Lane], None]


@dataclass(frozen=True, slots=True)
class HeldSteer:
    """A steer that has outlived its response, and who numbers what is said of it."""

    steer: Steer
    assembler: Assembler


class Steering:
    """The steers of one connection."""

    __slots__ = ("_over", "_send", "_waiting")

    def __init__(self, send: Send) -> None:
        self._send = send
        # Turns that are over, for those who would still steer them.
        self._over: dict[str, tuple[Assembler, Lane]] = {}
        # Steers that came by this connection and wait for their response to end.
        self._waiting: list[str] = []

    def take(self, frame: SteerFrame, running: Running | None) -> None:
        """A steer: taken on by the turn that it is for, or given back with the reason."""
        target = frame.previous_response_id
        given = Raw(b"null") if frame.input is UNSET else frame.input
        try:
            steerable = self._check(running, target)
            if frame.stream_id is not UNSET:
                raise InvalidRequest(
                    "'response.steer' takes no 'stream_id': it goes to its response's lane.",
                    code="invalid_input",
                )
            if memoryview(given).nbytes > STEER_BYTES_MAX:
                raise InvalidRequest(
                    f"A steer may have at most {STEER_BYTES_MAX} bytes.", code="invalid_input"
                )
            steer = Steer(new_id("steer"), given, _items(given, steerable))
            steerable.steer(steer)
            self._waiting.append(steer.id)
        except ApiError as error:
            self._refuse(running, target, given, error)

    def end(self, running: Running, lane: Lane) -> list[HeldSteer]:
        """A turn of this connection is over: the steers that came by it and were not applied."""
        self._over[running.id] = (running.assembler, lane)
        if len(self._over) > OVER_MAX:
            del self._over[next(iter(self._over))]
        own = [steer for steer in running.steers if steer.id in self._waiting]
        for steer in own:
            self._waiting.remove(steer.id)
        return [HeldSteer(steer, running.assembler) for steer in own]

    def pend(self, held: Sequence[HeldSteer], required: Sequence[Required], lane: Lane) -> None:
        """These steers wait for what the client owes."""
        self._send([one.assembler.pend(one.steer, required) for one in held], lane)

    def give_back(self, held: Sequence[HeldSteer], lane: Lane) -> None:
        """These steers could not be applied."""
        error = ServerFault("The steer could not be applied.", code="successor_creation_failed")
        self._send([one.assembler.fail(error, one.steer.input, one.steer) for one in held], lane)

    def clear(self) -> None:
        """The connection is over."""
        self._over.clear()

    def _check(self, running: Running | None, target: str) -> Running:
        """The turn that a steer is for, if it can still be steered."""
        if running is None and target in self._over:
            status = self._over[target][0].response.status
            message = f"Response with id '{target}' is {status}."
            if status == "completed":
                raise Conflict(message, code="response_already_completed")
            raise Conflict(message, code="response_not_active")
        if running is None:
            raise NotFound(
                f"Response with id '{target[:ID_CHARS_MAX]}' not found on this connection.",
                code="response_not_found",
            )
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

    def _refuse(self, running: Running | None, target: str, given: Raw, error: ApiError) -> None:
        if running is not None:
            running.publish([running.assembler.fail(error, given)])
        elif target in self._over:
            assembler, lane = self._over[target]
            self._send([assembler.fail(error, given)], lane)
        else:
            ref = SteerRef(previous_response_id=target[:ID_CHARS_MAX], input=given)
            self._send([steer_failed(ref, error)], None)


def _items(given: Raw, running: Running) -> tuple[Item, ...]:
    """What a steer says, if the create that will bring it may: once it is taken on, the answer stops for it."""
    try:
        items = decode_steered(given)
        # The successor counts for itself.
        running.check(items, Tally())
    except InvalidRequest as error:
        error.code = "invalid_input"
        raise
    return items
