"""By which way does the loop talk to the server? Each way plays the same story; only the road differs.

A way opens the session, which is not measured, and then takes one turn after another: the tool's output in, what was
heard out. A way that the server does not know says so with `Unknown`, and is left out of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
from msgspec import Raw, Struct

from segue_bench.line import (
    Address,
    Line,
    frame,
    post,
    read_body,
    read_chunk,
    read_message,
    upgrade,
)
from segue_bench.story import Story, answer, go_on

WayName = Literal["http-new", "http-full", "http-chained", "ws", "ws-stored", "rollout"]
WAYS: tuple[WayName, ...] = (
    "http-new",
    "http-full",
    "http-chained",
    "ws",
    "ws-stored",
    "rollout",
)

ENDS = frozenset(
    {
        b"response.completed",
        b"response.incomplete",
        b"response.failed",
        b"response.done",
        b"error",
    }
)


class Unknown(Exception):
    """The server does not know this way of talking."""


class TurnFailed(Exception):
    """A turn did not end well."""


class InputDetails(Struct, frozen=True):
    """A part of the usage."""

    cached_tokens: int = 0


class Usage(Struct, frozen=True):
    """What the server says it counted."""

    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: InputDetails = InputDetails()


class Reply(Struct, frozen=True):
    """What we need of a response."""

    id: str
    status: str = ""
    output: list[Raw] = []
    usage: Usage | None = None
    error: Raw = Raw(b"null")


class OutputItem(Struct, frozen=True):
    """What we need of an output item."""

    type: str
    call_id: str = ""


class Last(Struct, frozen=True):
    """The last event of a turn."""

    type: str
    response: Reply | None = None
    response_id: str = ""
    required_input: list[OutputItem] = []
    error: Raw = Raw(b"null")


LAST = msgspec.json.Decoder(Last)
ITEM = msgspec.json.Decoder(OutputItem)


@dataclass(frozen=True, slots=True)
class Heard:
    """One turn, as the client saw it."""

    turn_s: float
    ttft_s: float
    # What the turn waited for this client: making the request, and reading the last event. What it does with the
    # events before that is beside the server's work.
    client_s: float
    events: int
    last: Last


@dataclass(frozen=True, slots=True)
class Talk:
    """What all ways need to know: whom to ask, which model, which story."""

    address: Address
    model: str
    story: Story
    output_tokens_max: int | None = None


class Way(Protocol):
    """One session by one way."""

    bytes_sent: int
    bytes_received: int

    def open(self) -> Heard:
        """Put the session in place."""

    def turn(self, output: str) -> Heard:
        """Give the tool's output; hear the next turn."""

    def close(self) -> None:
        """Hang up."""


# --- what a request consists of -------------------------------------------------------------------


def body(
    talk: Talk, items: Sequence[bytes], *, store: bool, parent: str | None, more: bytes = b""
) -> bytes:
    """A request, from parts that are encoded already: no client could make one faster."""
    fields = [
        b'"model":' + msgspec.json.encode(talk.model),
        b'"store":true' if store else b'"store":false',
        b'"tools":' + talk.story.tools,
        b'"input":[' + b",".join(items) + b"]",
    ]
    if parent is not None:
        fields.append(b'"previous_response_id":"' + parent.encode() + b'"')
    if talk.output_tokens_max is not None:
        fields.append(b'"max_output_tokens":%d' % talk.output_tokens_max)
    return b"{" + more + b",".join(fields) + b"}"


def new_items(last: Last, output: str) -> list[bytes]:
    """The tool's output for each open call, or a user's message where nothing was called."""
    calls = [one.call_id for one in last.required_input]
    if last.response is not None:
        found = (ITEM.decode(raw) for raw in last.response.output)
        calls += [one.call_id for one in found if one.type == "function_call"]
    return [answer(call_id, output) for call_id in calls] or [go_on(output)]


def opened(last: Last | None) -> tuple[Last, Reply]:
    """The end of the turn before, with its response."""
    assert last is not None, "the session is open"
    assert last.response is not None, "an ended response is told as a whole"
    return last, last.response


class _Watch:
    """Takes the time of one turn, event by event."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.ready_at = 0.0
        self.first_at = 0.0
        self.events = 0

    def ready(self) -> None:
        """The request is made and may leave."""
        self.ready_at = time.perf_counter()

    def note(self, kind: bytes) -> bool:
        """Note an event; whether it is the last one."""
        self.events += 1
        if not self.first_at and kind.endswith(b".delta"):
            self.first_at = time.perf_counter()
        return kind in ENDS

    def heard(self, data: bytes) -> Heard:
        """The turn is over."""
        last_at = time.perf_counter()
        last = LAST.decode(data)
        ended = time.perf_counter()
        _check(last)
        client = (self.ready_at - self.began) + (ended - last_at)
        first_at = self.first_at or last_at
        return Heard(ended - self.began, first_at - self.began, client, self.events, last)


def _check(last: Last) -> None:
    if last.type in ("response.completed", "response.incomplete", "response.done"):
        return
    why = last.error if last.response is None else last.response.error
    raise TurnFailed(f"{last.type}: {bytes(why).decode()[:300]}")


# --- HTTP -----------------------------------------------------------------------------------------


def sse_events(line: Line) -> Iterator[tuple[bytes, bytes]]:
    """Kind and data of each event, up to the end of the body."""
    rest = b""
    while chunk := read_chunk(line):
        *whole, rest = (rest + chunk).split(b"\n\n")
        for event in whole:
            head, _, data = event.partition(b"\ndata: ")
            yield head.removeprefix(b"event: "), data


class HttpWay:
    """Over HTTP: with the whole history each turn, or behind the stored response before."""

    def __init__(self, talk: Talk, *, is_new: bool = False, is_chained: bool = False) -> None:
        self._talk = talk
        self._is_new = is_new
        self._is_chained = is_chained
        self._items = list(talk.story.opening)
        self._last: Last | None = None
        self._line: Line | None = None
        self.bytes_sent = 0
        self.bytes_received = 0

    def open(self) -> Heard:
        """The first request, with everything that happened so far."""
        return self._ask(lambda: self._create(self._items, None))

    def turn(self, output: str) -> Heard:
        """The next turn."""
        return self._ask(lambda: self._next(output))

    def _next(self, output: str) -> bytes:
        last, reply = opened(self._last)
        fresh = new_items(last, output)
        if self._is_chained:
            return self._create(fresh, reply.id)
        self._items += [bytes(raw) for raw in reply.output]
        self._items += fresh
        return self._create(self._items, None)

    def _create(self, items: Sequence[bytes], parent: str | None) -> bytes:
        more = b'"stream":true,'
        return body(self._talk, items, store=self._is_chained, parent=parent, more=more)

    def _ask(self, make: Callable[[], bytes]) -> Heard:
        watch = _Watch()
        data = make()
        watch.ready()
        line = self._line or self._connect()
        sent, received = line.bytes_sent, line.bytes_received
        head = post(line, data, is_last=self._is_new)
        if head.status != 200:
            raise TurnFailed(f"status {head.status}: {read_body(line, head).decode()[:300]}")
        heard: Heard | None = None
        for kind, event in sse_events(line):
            if watch.note(kind):
                heard = watch.heard(event)
        if heard is None:
            raise TurnFailed("the stream ended without a last event")
        self.bytes_sent += line.bytes_sent - sent
        self.bytes_received += line.bytes_received - received
        self._last = heard.last
        if self._is_new:
            self.close()
        return heard

    def _connect(self) -> Line:
        self._line = Line(self._talk.address)
        return self._line

    def close(self) -> None:
        """Hang up."""
        if self._line is not None:
            self._line.close()
            self._line = None


# --- WebSocket ------------------------------------------------------------------------------------

KIND_START = len(b'{"type":"')


def kind_of(event: bytes) -> bytes:
    """The type of an event; servers write it first, and where not it is looked for."""
    if event.startswith(b'{"type":"'):
        return event[KIND_START : event.index(b'"', KIND_START)]
    return msgspec.json.decode(event, type=Last).type.encode()


class SocketWay:
    """Over one WebSocket, each turn behind the one before."""

    def __init__(self, talk: Talk, *, store: bool = False) -> None:
        self._talk = talk
        self._store = store
        self._line = Line(talk.address)
        self._last: Last | None = None
        self.bytes_sent = 0
        self.bytes_received = 0

    def open(self) -> Heard:
        """Upgrade, and the first request."""
        upgrade(self._line)
        return self._ask(lambda: self._create(self._talk.story.opening, None))

    def turn(self, output: str) -> Heard:
        """The next turn."""
        last, reply = opened(self._last)
        return self._ask(lambda: self._create(new_items(last, output), reply.id))

    def _create(self, items: Sequence[bytes], parent: str | None) -> bytes:
        more = b'"type":"response.create",'
        return body(self._talk, items, store=self._store, parent=parent, more=more)

    def _ask(self, make: Callable[[], bytes]) -> Heard:
        line = self._line
        sent, received = line.bytes_sent, line.bytes_received
        watch = _Watch()
        data = frame(make())
        watch.ready()
        line.send(data)
        while True:
            event = read_message(line)
            if watch.note(kind_of(event)):
                break
        heard = watch.heard(event)
        self.bytes_sent += line.bytes_sent - sent
        self.bytes_received += line.bytes_received - received
        self._last = heard.last
        return heard

    def close(self) -> None:
        """Hang up."""
        self._line.close()


class RolloutWay(SocketWay):
    """One long response for the whole loop: the server waits for the outputs (docs/protocol.md 11).

    The session is opened by an ordinary response, so that the rollout holds the measured turns and nothing else.
    """

    def turn(self, output: str) -> Heard:
        """Append the outputs to the response that waits; where none waits, begin one."""
        last = self._last
        assert last is not None, "the session is open"
        if last.type == "response.done":
            return self._ask(lambda: append(last, output))
        _, reply = opened(last)
        try:
            heard = self._ask(lambda: self._begin(new_items(last, output), reply.id))
        except TurnFailed as error:
            raise Unknown(f"the server refuses rollout mode ({error})") from None
        if heard.last.type != "response.done" and has_calls(heard.last):
            raise Unknown("the server ends the response instead of waiting: no rollout mode")
        return heard

    def _begin(self, items: Sequence[bytes], parent: str) -> bytes:
        more = b'"type":"response.create","rollout":true,'
        return body(self._talk, items, store=False, parent=parent, more=more)


def has_calls(last: Last) -> bool:
    """Whether a response ended with calls that nobody has answered."""
    output = last.response.output if last.response is not None else []
    return any(ITEM.decode(raw).type == "function_call" for raw in output)


def append(last: Last, output: str) -> bytes:
    """A `response.append` for the calls that the response waits for."""
    items = b",".join(new_items(last, output))
    name = msgspec.json.encode(last.response_id)
    return b'{"type":"response.append","response_id":' + name + b',"input":[' + items + b"]}"


def open_way(name: WayName, talk: Talk) -> Way:
    """A session by this way, not opened yet."""
    match name:
        case "http-new":
            return HttpWay(talk, is_new=True)
        case "http-full":
            return HttpWay(talk)
        case "http-chained":
            return HttpWay(talk, is_chained=True)
        case "ws":
            return SocketWay(talk)
        case "ws-stored":
            return SocketWay(talk, store=True)
        case "rollout":
            return RolloutWay(talk)
