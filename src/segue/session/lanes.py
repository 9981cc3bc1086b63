"""Which request runs next on this connection, and what may be forgotten? Pure: no socket, no clock, no turn runs here.

Theory of operation. A connection has lanes, named by `stream_id`; the default lane has no name. Requests of one lane
run one after the other, lanes run in parallel (docs/protocol.md 6.2). A request becomes a `Ticket`:

    event                      ticket                    the lane
    add()                      waits in its lane         gets a queue if it had none
    start()                    runs                      busy until done()
    pause(ticket)              waits for its client      busy, but another lane may have its place
    resume(ticket)             runs as soon as it may    busy
    done(ticket, failed)       is over                   free; the next one may start
    drop_waiting()             all waiting are dropped   keeps what runs

`start` returns what may run now: one request for each free lane, 16 on the connection, lanes in the order in which they
became ready, so that none starves. A create that waits has no events yet.

A steer that its response has not applied (6.10) waits with `hold` for the create that continues the response on the
same lane. If the client owes nothing, the server makes that create itself: `put_first` places it before all that wait
in the lane.

What may be forgotten: a continuation that fails makes its own lane forget the parent; a fork that fails does not,
because the parent belongs to another lane (6.4). A fork that waits keeps its parent alive by pinning it (6.5).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from segue.errors import InvalidRequest, TooMany

Request = TypeVar("Request")
Pin = TypeVar("Pin")
Kept = TypeVar("Kept")

Lane = str | None

# The limits of the protocol (6.2), and our own for waiting requests.
IN_FLIGHT_MAX = 16
NAMES_MAX = 32
WAITING_MAX = 64
# As much as the largest request alone.
WAITING_BYTES_MAX = 64 * 1024 * 1024
# Responses whose steers wait for a create; it may never come.
HELD_MAX = 32
# More turns than a cache holds; an older parent counts as made by the lane that continues it.
MADE_MAX = 10_000


@dataclass(eq=False, slots=True)
class Ticket(Generic[Request, Pin]):
    """A request with its place in a lane."""

    lane: Lane
    request: Request
    parent_id: str | None
    # Whether another lane had made the parent when the request came; then `pin` keeps the parent alive.
    crosses_lanes: bool = False
    pin: Pin | None = None
    # The bytes of its frame.
    size: int = 0


@dataclass(slots=True)
class Lanes(Generic[Request, Pin, Kept]):
    """The lanes of one connection."""

    in_flight_max: int = IN_FLIGHT_MAX
    names_max: int = NAMES_MAX
    waiting_max: int = WAITING_MAX
    waiting_bytes_max: int = WAITING_BYTES_MAX
    # Lists, because lanes are few and most connections are idle: an empty deque or set costs many times as much.
    _names: list[str] = field(default_factory=list)
    _waiting: dict[Lane, deque[Ticket[Request, Pin]]] = field(default_factory=dict)
    _running: dict[Lane, Ticket[Request, Pin]] = field(default_factory=dict)
    # Free lanes with something to do, the one that has waited longest first.
    _ready: list[Lane] = field(default_factory=list)
    # Which lane made a response that this connection still remembers.
    _made_by: dict[str, Lane] = field(default_factory=dict)
    # Lanes whose request waits for its client, and those of them that go on once there is a place.
    _paused: list[Lane] = field(default_factory=list)
    _resuming: list[Lane] = field(default_factory=list)
    # Steers that wait for the next create with this parent, by lane and parent.
    _held: dict[tuple[Lane, str | None], list[Kept]] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._waiting

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def waiting_bytes(self) -> int:
        """How large these are."""
        return sum(ticket.size for queue in self._waiting.values() for ticket in queue)

    @property
    def running(self) -> int:
        """How many requests run."""
        return len(self._running)

    @property
    def named(self) -> int:
        """How many names were used."""
        return len(self._names)

    def name(self, lane: Lane) -> None:
        """Use a lane's name; a name once used stays counted. The 33rd is refused."""
        if lane is None or lane in self._names:
            return
        if len(self._names) >= self.names_max:
            raise InvalidRequest(
                "This WebSocket connection has reached its maximum number of distinct stream IDs "
                f"({self.names_max}). Reuse an existing stream_id or open a new WebSocket connection.",
                code="websocket_stream_limit_reached",
                param="stream_id",
            )
        self._names.append(lane)

    def add(
        self, lane: Lane, request: Request, parent_id: str | None, *, size: int = 0
    ) -> Ticket[Request, Pin]:
        """Put a request at the end of its lane."""
        if self._waiting:
            self._check_room(size)
        crosses_lanes = parent_id is not None and self._made_by.get(parent_id, lane) != lane
        ticket: Ticket[Request, Pin] = Ticket(lane, request, parent_id, crosses_lanes, size=size)
        if lane not in self._waiting:
            self._waiting[lane] = deque()
            if lane not in self._running:
                self._ready.append(lane)
        self._waiting[lane].append(ticket)
        return ticket

    def _check_room(self, size: int) -> None:
        if self.waiting >= self.waiting_max:
            most = self.waiting_max
            raise TooMany(f"Too many requests wait on this connection (at most {most}).")
        size += self.waiting_bytes
        if size > (most := self.waiting_bytes_max):
            raise TooMany(
                f"The requests waiting on one connection may have at most {most} bytes in total."
            )

    def put_first(self, lane: Lane, request: Request, parent_id: str) -> None:
        """Put the server's own continuation before everything that waits in its lane."""
        self._waiting.setdefault(lane, deque()).appendleft(Ticket(lane, request, parent_id))

    def has_waiting(self, lane: Lane, parent_id: str) -> bool:
        """Whether a create that continues this response on this lane waits already."""
        return any(ticket.parent_id == parent_id for ticket in self._waiting.get(lane, ()))

    def hold(self, lane: Lane, parent_id: str, kept: list[Kept]) -> tuple[Lane, list[Kept]] | None:
        """Keep steers for the create that will continue this response. If there are too many, returns the oldest with
        their lane."""
        self._held[lane, parent_id] = kept
        if len(self._held) <= HELD_MAX:
            return None
        oldest = next(iter(self._held))
        return oldest[0], self._held.pop(oldest)

    def take_held(self, ticket: Ticket[Request, Pin]) -> list[Kept]:
        """Remove and return the steers that wait for this create."""
        return self._held.pop((ticket.lane, ticket.parent_id), [])

    def crosses_lanes(self, lane: Lane, parent_id: str) -> bool:
        """Whether another lane of this connection made the parent."""
        return self._made_by.get(parent_id, lane) != lane

    def start(self) -> list[Ticket[Request, Pin]]:
        """The requests that may run now, or go on; they count as running from now on."""
        started: list[Ticket[Request, Pin]] = []
        room = self.in_flight_max - len(self._running) + len(self._paused)
        for lane in self._resuming[: max(room, 0)]:
            self._resuming.remove(lane)
            self._paused.remove(lane)
            started.append(self._running[lane])
        for lane in self._ready[: max(room - len(started), 0)]:
            self._ready.remove(lane)
            queue = self._waiting[lane]
            self._running[lane] = queue.popleft()
            if not queue:
                del self._waiting[lane]
            started.append(self._running[lane])
        return started

    def pause(self, ticket: Ticket[Request, Pin]) -> None:
        """A request waits for its client: another lane may have its place."""
        if ticket.lane not in self._paused:
            self._paused.append(ticket.lane)

    def resume(self, ticket: Ticket[Request, Pin]) -> None:
        """Its client has answered: it goes on once there is a place, before requests that have not started."""
        self._resuming.append(ticket.lane)

    def done(
        self, ticket: Ticket[Request, Pin], *, made: str | None = None, has_failed: bool = False
    ) -> str | None:
        """A request is over. `made` is the response that can now be continued. Returns the parent to be forgotten."""
        lane, parent_id = ticket.lane, ticket.parent_id
        del self._running[lane]
        for lanes in (self._paused, self._resuming):
            if lane in lanes:
                lanes.remove(lane)
        if lane in self._waiting:
            self._ready.append(lane)
        if made is not None:
            self._made_by[made] = lane
            if len(self._made_by) > MADE_MAX:
                del self._made_by[next(iter(self._made_by))]
        if not has_failed or parent_id is None or self.crosses_lanes(lane, parent_id):
            return None
        self._made_by.pop(parent_id, None)
        return parent_id

    def unpin(self, parent_id: str) -> None:
        """A parent was deleted: waiting forks must not keep it."""
        for queue in self._waiting.values():
            for ticket in queue:
                if ticket.parent_id == parent_id:
                    ticket.pin = None

    @property
    def unanswered(self) -> list[Lane]:
        """The lane of every request that runs or waits."""
        waiting = [ticket for queue in self._waiting.values() for ticket in queue]
        return [ticket.lane for ticket in (*self._running.values(), *waiting)]

    def drop_waiting(self) -> int:
        """Forget everything that has not started; returns how many requests that were."""
        dropped = self.waiting
        self._waiting.clear()
        self._ready.clear()
        return dropped
