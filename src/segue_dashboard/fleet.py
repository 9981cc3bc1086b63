"""What do all processes that share the store know of the replicas of their engines, and which processes are there?

`GET /dashboard/fleet`, for operators: the fleet view of the dashboard asks for it every few seconds. Nothing runs here
between requests.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from segue.listener.api import Route
from segue.listener.exchange import Exchange
from segue.observe.replicas import ReplicaKey, ReplicaTotals
from segue.seams.engine_status import EngineState, EngineStatus
from segue.seams.history import Owner
from segue.wire.codec import encode as encode_json
from segue_dashboard.history import RecentTurns

if TYPE_CHECKING:
    from segue.cluster.peers import Peers

SUBJECT = "fleet_view"
# The newest of each process, and of all together: what travels every two seconds between machines while a page is open.
CONVERSATIONS_MAX = 200

# The name of a chain -> the replicas that served it -> when its turns began there, in milliseconds since the epoch.
Visits = dict[str, dict[str, list[float]]]


class LostPrefixes(Struct, frozen=True):
    """What a replica was expected to have and computed again, for one reason."""

    reason: str
    turns: int
    tokens: int


class ReplicaRow(Struct, frozen=True, kw_only=True):
    """A replica, as all processes together see it. Sums begin when each process does."""

    model: str
    name: str
    state: EngineState
    running: int
    waiting: int
    # Prompt tokens that it computes in a second, as measured; None where nothing is known yet.
    prefill_tokens_s: float | None = None
    turns: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    lost: list[LostPrefixes] = []


class ProcessRow(Struct, frozen=True):
    """A process that serves."""

    machine: str
    pid: int
    started_at: float
    responses_running: int
    connections: int


class ConversationRow(Struct, frozen=True):
    """A conversation of the caller, by its recent turns at all processes."""

    # Its first response.
    id: str
    turns: int
    # That of the last turn.
    replica: str
    moves: int


class FleetPart(Struct, frozen=True):
    """What one process knows."""

    process: ProcessRow
    replicas: list[ReplicaRow]
    visits: Visits = {}


class FleetView(Struct, frozen=True, kw_only=True):
    """The answer: all replicas, and the processes that have answered, of so many."""

    object: Literal["fleet"] = "fleet"
    replicas: list[ReplicaRow]
    conversations: list[ConversationRow]
    processes: list[ProcessRow]
    processes_known: int


_part = msgspec.msgpack.Decoder(FleetPart).decode


class FleetReports:
    """What this process knows, and what all together know."""

    def __init__(
        self,
        engines: Callable[[], list[EngineStatus]],
        totals: Mapping[ReplicaKey, ReplicaTotals],
        load: Callable[[], tuple[int, int]],
        history: RecentTurns,
        peers: Peers | None,
    ) -> None:
        """`load`: responses that run here, open connections."""
        self._engines = engines
        self._totals = totals
        self._load = load
        self._history = history
        self._peers = peers
        self._started_at = time.time()
        if peers is not None:
            peers.on_message(SUBJECT, self._on_peer_request)

    @property
    def routes(self) -> tuple[Route, ...]:
        return (Route("GET", r"/dashboard/fleet", self._serve, "operator"),)

    async def _serve(self, exchange: Exchange) -> None:
        await exchange.answer(200, encode_json(await self.view(exchange.owner)))

    async def _on_peer_request(self, worker: str, body: bytes) -> bytes:
        return msgspec.msgpack.encode(self._own(body.decode()))

    async def view(self, owner: Owner) -> FleetView:
        """All replicas and processes, and the conversations of this owner."""
        parts = [self._own(owner)]
        processes_known = 1
        if self._peers is not None:
            others = self._peers.others
            processes_known += len(others)
            answers = await self._peers.ask(SUBJECT, owner.encode(), others)
            parts += map(_part, answers.values())
        processes = [part.process for part in parts]
        processes.sort(key=lambda process: (process.machine, process.pid))
        return FleetView(
            replicas=joined_rows(row for part in parts for row in part.replicas),
            conversations=joined_visits(part.visits for part in parts)[:CONVERSATIONS_MAX],
            processes=processes,
            processes_known=processes_known,
        )

    def _own(self, owner: Owner) -> FleetPart:
        process = ProcessRow(platform.node(), os.getpid(), self._started_at, *self._load())
        return FleetPart(
            process, [self._row(engine) for engine in self._engines()], self._visits(owner)
        )

    def _visits(self, owner: Owner) -> Visits:
        visits: Visits = {}
        for _, turn in self._history.after(0, owner):
            if replica := turn.tally.started.route:
                began_ms = self._history.wall_ms + turn.receipt.received_at * 1000
                visits.setdefault(turn.chain, {}).setdefault(replica, []).append(began_ms)
        return dict(islice(visits.items(), CONVERSATIONS_MAX))

    def _row(self, engine: EngineStatus) -> ReplicaRow:
        totals = self._totals.get((engine.model, engine.name)) or ReplicaTotals()
        return ReplicaRow(
            model=engine.model,
            name=engine.name,
            state=engine.state,
            running=engine.running or 0,
            waiting=engine.waiting or 0,
            prefill_tokens_s=totals.prefill_tokens_s,
            turns=totals.turns,
            input_tokens=totals.input_tokens,
            cached_tokens=totals.cached_tokens,
            output_tokens=totals.output_tokens,
            lost=[LostPrefixes(reason, *sums) for reason, sums in totals.lost.items()],
        )


def joined_visits(parts: Iterable[Visits]) -> list[ConversationRow]:
    """One row for each conversation, the latest first; its turns in the order in which they began, at any process."""
    chains: dict[str, list[tuple[float, str]]] = {}
    for chain, places in (row for part in parts for row in part.items()):
        visits = ((at_ms, replica) for replica, times in places.items() for at_ms in times)
        chains.setdefault(chain, []).extend(visits)
    ordered = {chain: sorted(visits) for chain, visits in chains.items()}
    rows = [
        ConversationRow(
            chain, len(visits), visits[-1][1], sum(a[1] != b[1] for a, b in pairwise(visits))
        )
        for chain, visits in ordered.items()
    ]
    return sorted(rows, key=lambda row: ordered[row.id][-1], reverse=True)


SUMMED = (
    "running",
    "waiting",
    "turns",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
)


def joined_rows(rows: Iterable[ReplicaRow]) -> list[ReplicaRow]:
    """One row for each replica. It is up or drained if all processes say so, else down."""
    groups: dict[ReplicaKey, list[ReplicaRow]] = {}
    for row in rows:
        groups.setdefault((row.model, row.name), []).append(row)
    return [_joined(group) for _, group in sorted(groups.items())]


def _joined(rows: list[ReplicaRow]) -> ReplicaRow:
    states = {row.state for row in rows}
    lost: dict[str, LostPrefixes] = {}
    for loss in (loss for row in rows for loss in row.lost):
        before = lost.get(loss.reason, LostPrefixes(loss.reason, 0, 0))
        lost[loss.reason] = LostPrefixes(
            loss.reason, before.turns + loss.turns, before.tokens + loss.tokens
        )
    rates = [row.prefill_tokens_s for row in rows if row.prefill_tokens_s is not None]
    return msgspec.structs.replace(
        rows[0],
        **{name: sum(getattr(row, name) for row in rows) for name in SUMMED},
        state="down" if "down" in states else "up" if "up" in states else "drained",
        prefill_tokens_s=sum(rates) / len(rates) if rates else None,
        lost=sorted(lost.values(), key=lambda loss: -loss.tokens),
    )
