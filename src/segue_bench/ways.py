"""By which way does the loop talk to the server? Each way plays the same workload; only the requests differ.

A way opens the session, which is not measured, and then takes one turn after another: the tool's output in, the timing
of the turn out. A way that the server does not support raises `WayNotSupported`, and is left out of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, assert_never, get_args

import msgspec
from msgspec import Raw, Struct

from segue.errors import Misconfigured
from segue_bench.client import (
    ClientConnection,
    ServerAddress,
    Traffic,
    frame,
    open_websocket,
    post,
    read_body,
    read_chunk,
    read_message,
)
from segue_bench.workload import Workload, tool_output, user_message

WayName = Literal["http-new", "http-full", "http-chained", "ws", "ws-stored", "rollout"]
WAYS: tuple[WayName, ...] = get_args(WayName)
N = TypeVar("N", bound=str)


def named_ways(text: str | None, known: Sequence[N], usual: Sequence[N]) -> tuple[N, ...]:
    """The ways that `--ways` names, in the usual order; without it the usual ones."""
    if not text:
        return tuple(usual)
    chosen = [word.strip() for word in text.split(",")]
    for word in chosen:
        if word not in known:
            raise Misconfigured(f"--ways: '{word}' is not one of {', '.join(known)}.")
    return tuple(way for way in known if way in chosen)


ENDS = frozenset(
    (
        b"response.completed",
        b"response.incomplete",
        b"response.failed",
        b"response.done",
        b"error",
    )
)


class WayNotSupported(Exception):
    """The server does not know this way of talking."""


class TurnFailed(Exception):
    """A turn did not end well."""


class _InputDetails(Struct, frozen=True):
    cached_tokens: int = 0


class Usage(Struct, frozen=True):
    """The tokens of a turn."""

    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _InputDetails = _InputDetails()


class ResponseSummary(Struct, frozen=True):
    """What we need of a response."""

    id: str
    previous_response_id: str | None = None
    output: list[Raw] = []
    usage: Usage | None = None
    error: Raw = Raw(b"null")


class _OutputItem(Struct, frozen=True):
    type: str
    call_id: str = ""


class LastEvent(Struct, frozen=True):
    """The last event of a turn."""

    type: str
    response: ResponseSummary | None = None
    response_id: str = ""
    required_input: list[_OutputItem] = []
    error: Raw = Raw(b"null")


LAST = msgspec.json.Decoder(LastEvent)
ITEM = msgspec.json.Decoder(_OutputItem)


@dataclass(frozen=True, slots=True)
class TurnTiming:
    """One turn, as the client saw it."""

    turn_s: float
    ttft_s: float
    # What the turn waited for this client: making the request, and reading the last event. What the client does with
    # earlier events runs beside the server's work.
    client_s: float
    events: int
    last: LastEvent


@dataclass(frozen=True, slots=True)
class WayTarget:
    """What all ways need: the server, the model, the workload."""

    address: ServerAddress
    model: str
    workload: Workload
    output_tokens_max: int | None = None


class Way(Protocol):
    """One session by one way."""

    traffic: Traffic

    def open(self) -> TurnTiming:
        """Send the history so far."""

    def turn(self, output: str) -> TurnTiming:
        """Send the tool's output; receive the next turn."""

    def close(self) -> None:
        """Close the connection."""


# --- what a request consists of -------------------------------------------------------------------


def body(
    target: WayTarget, items: Sequence[bytes], *, store: bool, parent: str | None, more: bytes = b""
) -> bytes:
    """A request, from parts that are encoded already: no client could make one faster."""
    fields = [
        b'"model":' + msgspec.json.encode(target.model),
        b'"store":true' if store else b'"store":false',
        b'"tools":' + target.workload.tools,
        b'"input":[' + b",".join(items) + b"]",
    ]
    if parent is not None:
        fields.append(b'"previous_response_id":"' + parent.encode() + b'"')
    if target.output_tokens_max is not None:
        fields.append(b'"max_output_tokens":%d' % target.output_tokens_max)
    return b"{" + more + b",".join(fields) + b"}"


def open_calls(last: LastEvent) -> list[str]:
    """The ids of the calls that wait for an output."""
    waiting = [item.call_id for item in last.required_input]
    if last.response is not None:
        items = map(ITEM.decode, last.response.output)
        waiting += [item.call_id for item in items if item.type == "function_call"]
    return waiting


def new_items(last: LastEvent, output: str) -> list[bytes]:
    """The tool's output for each open call, or a user's message where nothing was called."""
    return [tool_output(call_id, output) for call_id in open_calls(last)] or [user_message(output)]


def ended(last: LastEvent | None) -> tuple[LastEvent, ResponseSummary]:
    """The last event of the turn before, with its response."""
    assert last is not None, "the session is open"
    assert last.response is not None, "the last event has the whole response"
    return last, last.response


class Stopwatch:
    """Takes the time of one turn, event by event."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.ready_at = 0.0
        self.first_at = 0.0
        self.events = 0

    def ready(self) -> None:
        """The request is made and may be sent."""
        self.ready_at = time.perf_counter()

    def note(self, kind: bytes) -> bool:
        """Note an event; whether it is the last one."""
        self.events += 1
        if not self.first_at and kind.endswith(b".delta"):
            self.first_at = time.perf_counter()
        return kind in ENDS

    def stop(self, data: bytes) -> TurnTiming:
        """The turn has ended with this event."""
        last_at = time.perf_counter()
        last = LAST.decode(data)
        ended = time.perf_counter()
        _check(last)
        client = (self.ready_at - self.began) + (ended - last_at)
        first_at = self.first_at or last_at
        return TurnTiming(ended - self.began, first_at - self.began, client, self.events, last)


def _check(last: LastEvent) -> None:
    if last.type in ("response.completed", "response.incomplete", "response.done"):
        return
    why = last.error if last.response is None else last.response.error
    raise TurnFailed(f"{last.type}: {bytes(why).decode()[:300]}")


# --- HTTP -----------------------------------------------------------------------------------------


def sse_events(connection: ClientConnection) -> Iterator[tuple[bytes, bytes]]:
    """Kind and data of each event, up to the end of the body."""
    rest = b""
    while chunk := read_chunk(connection):
        *whole, rest = (rest + chunk).split(b"\n\n")
        for event in whole:
            head, _, data = event.partition(b"\ndata: ")
            yield head.removeprefix(b"event: "), data


def http_turn(
    connection: ClientConnection,
    watch: Stopwatch,
    data: bytes,
    *,
    is_last: bool = False,
    is_streamed: bool = True,
) -> TurnTiming:
    """Send a request; read its events, or its response in one piece."""
    head = post(connection, data, is_last=is_last)
    if head.status != 200:
        raise TurnFailed(f"status {head.status}: {read_body(connection, head).decode()[:300]}")
    if not is_streamed:
        response = read_body(connection, head)
        watch.note(b"response.completed")
        return watch.stop(b'{"type":"response.completed","response":' + response + b"}")
    timing: TurnTiming | None = None
    for kind, event in sse_events(connection):
        if watch.note(kind):
            timing = watch.stop(event)
    if timing is None:
        raise TurnFailed("the stream ended without a last event")
    return timing


class HttpWay:
    """Over HTTP: with the whole history each turn, or with the id of the stored response before."""

    def __init__(
        self,
        target: WayTarget,
        *,
        is_new: bool = False,
        is_chained: bool = False,
        is_streamed: bool = True,
    ) -> None:
        self._target = target
        self._is_new = is_new
        self._is_chained = is_chained
        self._is_streamed = is_streamed
        self._items = list(target.workload.opening)
        self._last: LastEvent | None = None
        self._connection: ClientConnection | None = None
        self.traffic = Traffic()

    def open(self) -> TurnTiming:
        return self._send(lambda: self._create(self._items, None))

    def turn(self, output: str) -> TurnTiming:
        return self._send(lambda: self._next(output))

    def _next(self, output: str) -> bytes:
        last, response = ended(self._last)
        fresh = new_items(last, output)
        if self._is_chained:
            return self._create(fresh, response.id)
        self._items += [bytes(raw) for raw in response.output]
        self._items += fresh
        return self._create(self._items, None)

    def _create(self, items: Sequence[bytes], parent: str | None) -> bytes:
        more = b'"stream":true,' if self._is_streamed else b""
        return body(self._target, items, store=self._is_chained, parent=parent, more=more)

    def _send(self, make: Callable[[], bytes]) -> TurnTiming:
        watch = Stopwatch()
        data = make()
        watch.ready()
        if self._connection is None:
            self._connection = ClientConnection(self._target.address, self.traffic)
        connection = self._connection
        timing = http_turn(
            connection, watch, data, is_last=self._is_new, is_streamed=self._is_streamed
        )
        self._last = timing.last
        if self._is_new:
            self.close()
        return timing

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


# --- WebSocket ------------------------------------------------------------------------------------

KIND_START = len(b'{"type":"')


def kind_of(event: bytes) -> bytes:
    """The type of an event; most servers write it first."""
    if event.startswith(b'{"type":"'):
        return event[KIND_START : event.index(b'"', KIND_START)]
    return LAST.decode(event).type.encode()


def socket_turn(connection: ClientConnection, watch: Stopwatch, data: bytes) -> TurnTiming:
    """Send a frame; read the events of its turn."""
    connection.send(data)
    while True:
        event = read_message(connection)
        if watch.note(kind_of(event)):
            return watch.stop(event)


class SocketWay:
    """Over one WebSocket, each turn with the id of the response before."""

    def __init__(self, target: WayTarget, *, store: bool = False) -> None:
        self._target = target
        self._store = store
        self._last: LastEvent | None = None
        self.traffic = Traffic()
        self._connection: ClientConnection | None = None

    def open(self) -> TurnTiming:
        self._connection = open_websocket(self._target.address, self.traffic)
        return self._send(lambda: self._create(self._target.workload.opening, None))

    def turn(self, output: str) -> TurnTiming:
        last, response = ended(self._last)
        return self._send(lambda: self._create(new_items(last, output), response.id))

    def _create(self, items: Sequence[bytes], parent: str | None, more: bytes = b"") -> bytes:
        kind = b'"type":"response.create",' + more
        return body(self._target, items, store=self._store, parent=parent, more=kind)

    def _send(self, make: Callable[[], bytes]) -> TurnTiming:
        assert self._connection is not None, "the session is open"
        watch = Stopwatch()
        data = frame(make())
        watch.ready()
        timing = socket_turn(self._connection, watch, data)
        self._last = timing.last
        return timing

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class RolloutWay(SocketWay):
    """One long response for the whole loop: the server waits for the outputs (docs/protocol.md 11).

    The session is opened by an ordinary response, so that the rollout contains the measured turns and nothing else.
    """

    def turn(self, output: str) -> TurnTiming:
        """Append the outputs to the response that waits; where none waits, begin a rollout."""
        last = self._last
        assert last is not None, "the session is open"
        if last.type == "response.done":
            return self._send(lambda: append(last, output))
        _, response = ended(last)
        rollout = b'"rollout":true,'
        try:
            timing = self._send(lambda: self._create(new_items(last, output), response.id, rollout))
        except TurnFailed as error:
            raise WayNotSupported(f"the server refuses rollout mode ({error})") from None
        if timing.last.type != "response.done" and open_calls(timing.last):
            raise WayNotSupported(
                "the server ends the response instead of waiting: no rollout mode"
            )
        return timing


def append(last: LastEvent, output: str) -> bytes:
    """A `response.append` for the calls that the response waits for."""
    items = b",".join(new_items(last, output))
    name = msgspec.json.encode(last.response_id)
    return b'{"type":"response.append","response_id":' + name + b',"input":[' + items + b"]}"


def make_way(name: WayName, target: WayTarget) -> Way:
    """A session by this way, not opened yet."""
    match name:
        case "http-new":
            return HttpWay(target, is_new=True)
        case "http-full":
            return HttpWay(target)
        case "http-chained":
            return HttpWay(target, is_chained=True)
        case "ws":
            return SocketWay(target)
        case "ws-stored":
            return SocketWay(target, store=True)
        case "rollout":
            return RolloutWay(target)
        case _:
            assert_never(name)
