"""Whose turn is it on this connection, and what may be forgotten? Pure: no socket, no clock, no turn runs here.

Theory of operation. A connection has lanes, named by `stream_id`; the default lane has no name. Requests of one lane
run one after the other, lanes run beside each other (protocol.md 6.2). A request becomes a `Ticket`:

    event                      ticket                    the lane
    add()                      waits in its lane         gets a queue if it had none
    start()                    runs                      busy until done()
    done(ticket, failed)       is over                   free; the next one may start
    drop_waiting()             all waiting are dropped   keeps what runs

`start` hands out what may run now: one for each free lane, 16 on the connection, lanes in the order in which they
became ready, so that none starves. A create that waits is silent.

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

Lane = str | None

# The limits of the contract (6.2), and of our own for what waits.
IN_FLIGHT_MAX = 16
NAMES_MAX = 32
WAITING_MAX = 64
# More than a cache holds of real turns; a parent older than that counts as its continuer's own.
MADE_MAX = 10_000


@dataclass(eq=False, slots=True)
class Ticket(Generic[Request, Pin]):
    """A request with its place in a lane. `pin` keeps a fork's parent alive while the fork waits."""

    lane: Lane
    request: Request
    parent_id: str | None
    pin: Pin | None = None


@dataclass(slots=True)
class Lanes(Generic[Request, Pin]):
    """The lanes of one connection."""

    in_flight_max: int = IN_FLIGHT_MAX
    names_max: int = NAMES_MAX
    waiting_max: int = WAITING_MAX
    _names: set[str] = field(default_factory=set)
    _waiting: dict[Lane, deque[Ticket[Request, Pin]]] = field(default_factory=dict)
    _running: dict[Lane, Ticket[Request, Pin]] = field(default_factory=dict)
    # Free lanes with something to do, the one that has waited longest first.
    _ready: deque[Lane] = field(default_factory=deque)
    # Which lane made a response that this connection still remembers.
    _made_by: dict[str, Lane] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._waiting

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._waiting.values()))

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
        self._names.add(lane)

    def add(
        self, lane: Lane, request: Request, parent_id: str | None, pin: Pin | None = None
    ) -> None:
        """Put a request at the end of its lane."""
        if self.waiting >= self.waiting_max:
            raise TooMany(
                f"Too many requests wait on this connection (at most {self.waiting_max})."
            )
        ticket = Ticket(lane, request, parent_id, pin if self.is_fork(lane, parent_id) else None)
        if lane not in self._waiting:
            self._waiting[lane] = deque()
            if lane not in self._running:
                self._ready.append(lane)
        self._waiting[lane].append(ticket)

    def is_fork(self, lane: Lane, parent_id: str | None) -> bool:
        """Whether another lane of this connection made the parent."""
        return parent_id in self._made_by and self._made_by[parent_id] != lane

    def start(self) -> list[Ticket[Request, Pin]]:
        """The requests that may run now; they count as running from here on."""
        started: list[Ticket[Request, Pin]] = []
        while self._ready and len(self._running) < self.in_flight_max:
            lane = self._ready.popleft()
            queue = self._waiting[lane]
            ticket = queue.popleft()
            if not queue:
                del self._waiting[lane]
            self._running[lane] = ticket
            started.append(ticket)
        return started

    def done(
        self, ticket: Ticket[Request, Pin], *, made: str | None = None, has_failed: bool = False
    ) -> str | None:
        """A request is over. `made` is the response that can now be continued. Returns what is to be forgotten."""
        del self._running[ticket.lane]
        if ticket.lane in self._waiting:
            self._ready.append(ticket.lane)
        if made is not None:
            self._made_by[made] = ticket.lane
            if len(self._made_by) > MADE_MAX:
                del self._made_by[next(iter(self._made_by))]
        parent_id = ticket.parent_id
        if not has_failed or parent_id is None or self.is_fork(ticket.lane, parent_id):
            return None
        self._made_by.pop(parent_id, None)
        return parent_id

    def unpin(self, parent_id: str) -> None:
        """A parent was deleted: forks that wait for their start must not keep it."""
        for queue in self._waiting.values():
            for ticket in queue:
                if ticket.parent_id == parent_id:
                    ticket.pin = None

    def drop_waiting(self) -> int:
        """Forget everything that has not started; says how many that were."""
        dropped = self.waiting
        self._waiting.clear()
        self._ready.clear()
        return dropped
