"""What does the page show? Values made from the state of the process; no content, only ids and figures.

A key sees its own turns, lanes and connections. An operator sees totals of the whole process, the caches and the
engines, and only its own conversations. On the loopback without keys there is one owner, who is both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest

from msgspec import Struct

from segue.ids import shown_id
from segue.listener.api import SessionStatus
from segue.process.afterwards import MARKS as TIMELINE
from segue.process.afterwards import EndedTurn
from segue.seams.engine_status import EngineStatus
from segue.seams.history import Owner
from segue.seams.model import JobStarted
from segue.turn.running import Running

# The order in which a turn passes its marks; the page draws a stage between each and the next.
MARKS = ("received", *TIMELINE)

# What one update may carry: more is counted, but not listed.
CONNECTIONS_LISTED_MAX = 48
CELLS_MAX = 4_096
RUNNING_LISTED_MAX = 64
# This is the cache of one connection: over several workers the largest counts, not the sum.
FULLEST = "largest connection"
# The last pauses of a turn; there are no more than its hosted calls.
PAUSES_LISTED_MAX = 32
# A cell of the map of connections is one digit.
CELL_MAX = 9


@dataclass(frozen=True, slots=True)
class Viewer:
    """Whose turns may be shown, and whether the totals of the process may."""

    owner: Owner
    is_operator: bool


class TurnView(Struct, frozen=True):
    """A turn that ended."""

    number: int
    id: str
    parent: str | None
    connection: str
    lane: str
    model: str
    transport: str
    status: str
    error: str | None
    # When its request was read, in milliseconds since the epoch.
    at_ms: float
    # Milliseconds after that, in the order of MARKS.
    marks: tuple[float | None, ...]
    tokenized: int
    reused: int
    input: int
    output: int
    bytes: int
    found_in: str | None
    # Calls of server-side tools, and when sampling paused for them, in milliseconds like the marks.
    tools: int = 0
    pauses: tuple[tuple[float, float], ...] = ()
    # Images and audio that were described in words.
    unseen: int = 0
    # Prompt tokens that the engine had in its prefix cache.
    cached: int = 0
    replica: str | None = None
    request_id: str = ""
    # Tokens that an earlier prompt had and that were computed again, and why.
    lost: int = 0
    lost_reason: str | None = None
    # Which conversation it belongs to, where its parent ran at another machine.
    chain: str = ""


class RunningRow(Struct, frozen=True):
    """A running turn."""

    id: str
    parent: str | None
    model: str
    created_at: int


class ConnectionRow(Struct, frozen=True):
    """An open WebSocket connection."""

    id: str
    opened_ms: float
    lanes: int
    running: int
    waiting: int
    turns: int
    bytes: int


class Connections(Struct, frozen=True):
    """The open WebSocket connections: their number, the busiest as rows, one digit of load for each."""

    count: int
    lanes: int
    running: int
    waiting: int
    cells: str
    rows: Sequence[ConnectionRow]


class CacheUse(Struct, frozen=True):
    """A cache: its size and its limit."""

    name: str
    bytes: int
    bytes_max: int


class Totals(Struct):
    """Sums over all turns since the start."""

    turns: int = 0
    failed: int = 0
    tokenized: int = 0
    reused: int = 0
    input: int = 0
    output: int = 0
    bytes: int = 0


class RefusalCount(Struct):
    """How many requests were refused with this code before they became turns, and when the last was."""

    transport: str
    code: str
    count: int
    at_ms: float


class Picture(Struct, frozen=True):
    """The present, as one viewer may see it."""

    totals: Totals
    connections: Connections
    running_count: int
    running: Sequence[RunningRow]
    memory: Sequence[CacheUse]
    replicas: Sequence[EngineStatus]
    refusals: Sequence[RefusalCount]
    backlog: int | None
    # How late the event loop was at most in the last minute.
    lag_ms: float | None = None


class WorkerShare(Struct, frozen=True):
    """One worker's part of an update: the position in its history, the turns since, and the present."""

    number: int
    turns: Sequence[TurnView]
    missed: int
    picture: Picture


class Look(Struct, frozen=True):
    """What a watcher asks the other workers: for whom, and its position in the history of each."""

    viewer: Viewer
    places: dict[str, int]


def name_connection(key: str, salt: bytes) -> str:
    """A short name for a connection: the same for all its lanes, without internal ids."""
    return hashlib.blake2s(key.encode(), key=salt, digest_size=3).hexdigest() if key else ""


def turn_row(number: int, turn: EndedTurn, wall_ms: float, salt: bytes) -> TurnView:
    """A turn for the page; `wall_ms` is the wall clock at the zero of the process's own clock."""
    entry = turn.entry
    tally = turn.tally
    marks = turn.marks
    began = marks["received"]
    connection, _, lane = turn.lane.partition("/")
    reason, lost = tally.lost or (None, 0)

    def ms(at: float) -> float:
        return round((at - began) * 1000, 3)

    return TurnView(
        number=number,
        id=turn.shown_id,
        parent=turn.shown_parent,
        connection=name_connection(connection, salt),
        lane=lane,
        model=entry.model,
        transport=turn.receipt.transport,
        status=entry.status,
        error=turn.error,
        at_ms=round(wall_ms + began * 1000, 3),
        marks=tuple(ms(marks[name]) if name in marks else None for name in MARKS),
        tokenized=tally.tokens_tokenized,
        reused=tally.tokens_reused,
        input=entry.input_tokens,
        output=entry.output_tokens,
        bytes=tally.bytes_received,
        found_in=tally.found_in,
        tools=tally.tool_calls,
        pauses=tuple((ms(since), ms(to)) for since, to in turn.pauses[-PAUSES_LISTED_MAX:]),
        unseen=tally.media_told,
        cached=entry.cached_tokens,
        replica=_place(tally.started),
        request_id=turn.receipt.request_id,
        lost=lost,
        lost_reason=reason,
        chain=turn.chain,
    )


def _place(started: JobStarted) -> str | None:
    """The replica, and its worker where it has several."""
    return f"{started.route}, worker {started.worker}" if started.worker else started.route


def running_rows(runnings: Iterable[Running], viewer: Viewer) -> tuple[int, list[RunningRow]]:
    """The number of running turns, and the oldest of the viewer's own."""
    seen = [running for running in runnings if viewer.is_operator or running.owner == viewer.owner]
    own = [running for running in seen if running.owner == viewer.owner][:RUNNING_LISTED_MAX]
    return len(seen), list(map(_running_row, own))


def _running_row(running: Running) -> RunningRow:
    response, transport = running.response, running.transport
    parent = response.previous_response_id
    return RunningRow(
        shown_id(response.id, transport),
        parent and shown_id(parent, transport),
        response.model,
        response.created_at,
    )


def load_of(connection: SessionStatus | ConnectionRow) -> tuple[int, int]:
    """Orders connections by how busy they are."""
    return connection.running + connection.waiting, connection.turns


def connections(
    sessions: Iterable[SessionStatus], viewer: Viewer, wall_ms: float, salt: bytes
) -> Connections:
    """The connections that this viewer may count, the oldest first, and the busiest of its own."""
    seen = [session for session in sessions if viewer.is_operator or session.owner == viewer.owner]
    own = (session for session in seen if session.owner == viewer.owner)
    busiest = nlargest(CONNECTIONS_LISTED_MAX, own, key=load_of)
    return Connections(
        count=len(seen),
        lanes=sum(session.lanes for session in seen),
        running=sum(session.running for session in seen),
        waiting=sum(session.waiting for session in seen),
        cells="".join(str(min(session.running, CELL_MAX)) for session in seen[:CELLS_MAX]),
        rows=[
            ConnectionRow(
                name_connection(session.key, salt),
                round(wall_ms + session.opened_at * 1000),
                session.lanes,
                session.running,
                session.waiting,
                session.turns,
                session.state_bytes,
            )
            for session in busiest
        ],
    )
