"""What becomes of a connection's steers (docs/protocol.md 6.10)?

Each steer is accepted by its turn, or sent back with the reason. A steer that was not applied before its turn ended is
held for the create that continues the turn; the session knows which one that is. A connection without steers has no
`Steering`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
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
from segue.listener.exchange import answerable
from segue.session.lanes import Lane
from segue.turn.assemble import Assembler, steer_failed
from segue.turn.notices import Steer
from segue.turn.running import Running
from segue.wire.codec import decode_body, decode_item, user_message
from segue.wire.events import Event, SteerRef
from segue.wire.items import Item, Message, Required
from segue.wire.requests import SteerFrame

# The size of one steer: a remark, not a history.
STEER_BYTES_MAX = 1024 * 1024
# What it may bring, and the keys that its messages may have.
ITEMS_MAX = 64
KEYS = frozenset({"type", "role", "content"})
# Steers that may wait for one response (docs/protocol.md 9 row 11).
STEERS_MAX = 16


_given: msgspec.json.Decoder[str | list[Raw]] = msgspec.json.Decoder(str | list[Raw])
_fields = msgspec.json.Decoder(dict[str, Raw])


class EndedResponse:
    """What is kept of a response that has ended, for steers that come too late: not the response itself."""

    __slots__ = ("_id", "_numbers", "status")

    def __init__(self, assembler: Assembler) -> None:
        self._id = assembler.response.id
        self.status = assembler.response.status
        self._numbers = assembler.numbers

    def fail(self, error: ApiError, given: Raw) -> Event:
        """A steer is refused."""
        ref = SteerRef(previous_response_id=self._id, input=given)
        return steer_failed(ref, error, next(self._numbers))


SendToLane = Callable[[Sequence[Event], Lane], None]
# The last turns of a connection by id, for steers that come too late.
EndedTurns = dict[str, tuple[EndedResponse, Lane]]


@dataclass(frozen=True, slots=True)
class HeldSteer:
    """A steer that was not applied before its response ended, with the assembler that numbers its events."""

    steer: Steer
    assembler: Assembler


class Steering:
    """The steers of one connection."""

    __slots__ = ("_ended", "_send", "_waiting")

    def __init__(self, send: SendToLane, ended: EndedTurns) -> None:
        self._send = send
        self._ended = ended
        # Ids of steers of this connection that wait for their response to end.
        self._waiting: list[str] = []

    def on_steer(self, frame: SteerFrame, running: Running | None, request_id: str) -> None:
        """Hand a steer to its turn, or send it back with the reason."""
        target = frame.previous_response_id
        given = Raw(b"null") if frame.input is UNSET else frame.input
        # What is too long does not go back either.
        is_long = memoryview(given).nbytes > STEER_BYTES_MAX
        given = Raw(b"null") if is_long else given
        try:
            steerable = self._check(running, target)
            if frame.stream_id is not UNSET:
                message = "'response.steer' takes no 'stream_id': it goes to its response's lane."
                raise InvalidRequest(message, code="invalid_input")
            if is_long:
                message = f"A steer may have at most {STEER_BYTES_MAX} bytes."
                raise InvalidRequest(message, code="invalid_input")
            steer = Steer(new_id("steer"), given, _items(given, steerable))
            steerable.steer(steer)
            self._waiting.append(steer.id)
        except Exception as fault:
            error = answerable(fault, "a steer could not be handled", request_id)
            self._refuse(running, target, given, error)

    def unapplied(self, running: Running) -> list[HeldSteer]:
        """The steers of this connection that an ended turn has not applied."""
        own = [steer for steer in running.steers if steer.id in self._waiting]
        for steer in own:
            self._waiting.remove(steer.id)
        return [HeldSteer(steer, running.assembler) for steer in own]

    def report_pending(
        self, held: Sequence[HeldSteer], required: Sequence[Required], lane: Lane
    ) -> None:
        """These steers wait until the client has sent what it owes."""
        self._send([each.assembler.pend(each.steer, required) for each in held], lane)

    def give_back(self, held: Sequence[HeldSteer], lane: Lane) -> None:
        """These steers could not be applied."""
        error = ServerFault("The steer could not be applied.", code="successor_creation_failed")
        events = [each.assembler.fail(error, each.steer.input, each.steer) for each in held]
        self._send(events, lane)

    def _check(self, running: Running | None, target: str) -> Running:
        """The turn of a steer, if it can still be steered."""
        if running is None and target in self._ended:
            status = self._ended[target][0].status
            message = f"Response with id '{target}' is {status}."
            if status == "completed":
                raise Conflict(message, code="response_already_completed")
            raise Conflict(message, code="response_not_active")
        if running is None:
            message = f"Response with id '{target[:ID_CHARS_MAX]}' not found on this connection."
            raise NotFound(message, code="response_not_found")
        if not running.can_be_steered:
            message = f"Response with id '{running.id}' cannot be steered."
            raise InvalidRequest(message, code="steering_not_supported")
        if len(running.steers) >= STEERS_MAX:
            message = f"At most {STEERS_MAX} steers may wait for a response."
            raise TooMany(message, code="too_many_pending_steers")
        return running

    def _refuse(self, running: Running | None, target: str, given: Raw, error: ApiError) -> None:
        if running is not None:
            running.publish([running.assembler.fail(error, given)])
        elif target in self._ended:
            response, lane = self._ended[target]
            self._send([response.fail(error, given)], lane)
        else:
            ref = SteerRef(previous_response_id=target[:ID_CHARS_MAX], input=given)
            self._send([steer_failed(ref, error)], None)


def _items(given: Raw, running: Running) -> tuple[Item, ...]:
    """The items of a steer, checked now as the turn's own input: once accepted, a steer stops the answer."""
    try:
        items = decode_steered(given)
        # The create that brings them counts them for itself.
        running.check(items)
    except InvalidRequest as error:
        error.code = "invalid_input"
        raise
    return items


def decode_steered(given: Raw) -> tuple[Item, ...]:
    """The user messages of a steer, or a refusal: no other role and no other item may steer (docs/protocol.md 6.10)."""
    asked = decode_body(_given, given, "input")
    if isinstance(asked, str):
        if not asked:
            raise _bad("'input' must not be empty.")
        return (user_message(asked),)
    if not 1 <= len(asked) <= ITEMS_MAX:
        raise _bad(f"'input' must have from 1 to {ITEMS_MAX} messages.")
    steered = tuple(decode_item(raw, f"input[{index}]") for index, raw in enumerate(asked))
    for index, item in enumerate(steered):
        is_users = isinstance(item.value, Message) and item.value.role == "user"
        if not is_users or not KEYS.issuperset(_fields.decode(item.raw)):
            rule = "must be a user message with nothing but 'type', 'role' and 'content'"
            raise _bad(f"'input[{index}]' {rule}.")
    return steered


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_input", param="input")
