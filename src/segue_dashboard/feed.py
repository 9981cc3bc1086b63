"""What has changed since a watcher last asked?

A watcher is one open page. It has a position in the history and the bytes of its last snapshot. It asks, at most a few
times a second, and gets everything new as one message, or nothing. So there is no queue: a slow reader asks less often,
and gets the number of turns that it missed. Without a watcher nothing here runs.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import msgspec
from msgspec import Struct

from segue import __version__
from segue.errors import TooMany
from segue.listener.api import SessionStatus
from segue.seams.engine_status import EngineStatus
from segue.turn.running import Running
from segue_dashboard import views
from segue_dashboard.history import RecentTurns
from segue_dashboard.together import together
from segue_dashboard.views import (
    CacheUse,
    Connections,
    Look,
    Picture,
    TurnView,
    Viewer,
    WorkerShare,
)

log = logging.getLogger(__name__)

# One message: what a page can draw before the next one comes.
TURNS_MAX = 250
# Pages open at once; each costs about a millisecond a second.
WATCHERS_MAX = 32
# All connections are looked at once for all pages, so many in one turn of the loop. That may take one part in so many
# of the time: with thousands of connections the pages are renewed less often.
STATUSES_A_TURN = 250
SURVEY_PART = 50
# Pause between two messages while something happens, and while nothing does.
TICK_S = 0.25
IDLE_S = 1.0
# How long after a turn, or after a page was opened, something still happens.
CALM_S = 2.0
# How often engines are asked for their health while a page is open.
PROBE_S = 5.0

encode = msgspec.json.encode
_look = msgspec.json.Decoder(Look).decode
_share = msgspec.json.Decoder(WorkerShare).decode


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the present is read: each value where it lives."""

    models: Callable[[], Sequence[str]]
    sessions: Callable[[], Iterable[SessionStatus]]
    runnings: Callable[[], Iterable[Running]]
    memory: Callable[[], Sequence[CacheUse]]
    # Checks all engines; `replicas` turns the result into rows.
    probe: Callable[[], Awaitable[Mapping[str, bool]]]
    replicas: Callable[[Mapping[str, bool]], Sequence[EngineStatus]]
    backlog: Callable[[], int]
    lag_ms: Callable[[], float]
    has_containers: bool = False
    # Asks the other workers of the same parent process, if there are any; and the name of this worker among them.
    ask: Callable[[bytes], Awaitable[Mapping[str, bytes]]] | None = None
    worker: str = ""
    # The same for all workers of one parent process.
    process: str = ""


class Hello(Struct, frozen=True, tag_field="type", tag="hello"):
    """The first message: what does not change while the process lives."""

    version: str
    # Different after a restart: what a page knows of the old process is out of date.
    process: str
    started_ms: float
    models: Sequence[str]
    marks: Sequence[str]
    is_operator: bool
    # Whether there is anything to ask of `/v1/containers`.
    has_containers: bool


class Update(Struct, frozen=True, tag_field="type", tag="update"):
    """What is new: the present where it changed, and the turns that ended."""

    now_ms: float
    missed: int
    turns: Sequence[TurnView]
    picture: msgspec.Raw | None


class Feed:
    """The messages for the open pages of the dashboard."""

    def __init__(self, history: RecentTurns, sources: Sources) -> None:
        self.history = history
        self._sources = sources
        self._watcher_count = 0
        self._checks: Mapping[str, bool] = {}
        self._probing: asyncio.Task[None] | None = None
        self._probe_at = 0.0
        # When a page was opened, or another worker had something new.
        self._stirred_at = float("-inf")
        # The connections as they were looked at last, in the order of their age; and what each viewer sees of them.
        self._statuses: list[SessionStatus] = []
        self._seen: dict[Viewer, Connections] = {}
        self._survey_at = float("-inf")
        self._surveying = asyncio.Lock()
        self._salt = secrets.token_bytes(16)
        self._process = sources.process or secrets.token_hex(8)

    @contextmanager
    def watching(self, viewer: Viewer) -> Iterator[Watcher]:
        """A watcher while inside."""
        if self._watcher_count >= WATCHERS_MAX:
            raise TooMany(f"Too many dashboards are open (at most {WATCHERS_MAX}).")
        self._watcher_count += 1
        # A page that has just opened waits for the health of the engines.
        self._stirred_at = time.perf_counter()
        try:
            yield Watcher(self, viewer)
        finally:
            self._watcher_count -= 1
            if not self._watcher_count and self._probing is not None:
                self._probing.cancel()

    @property
    def pause_s(self) -> float:
        """How long a watcher waits before it asks again."""
        calm_at = max(self._stirred_at, self.history.ended_at) + CALM_S
        is_busy = time.perf_counter() < calm_at or any(True for _ in self._sources.runnings())
        return TICK_S if is_busy else IDLE_S

    def hello(self, viewer: Viewer) -> Hello:
        """The first message to a watcher."""
        return Hello(
            version=__version__,
            process=self._process,
            started_ms=self.history.started_ms,
            models=self._sources.models(),
            marks=views.MARKS,
            is_operator=viewer.is_operator,
            has_containers=self._sources.has_containers,
        )

    def share(self, viewer: Viewer, number: int) -> WorkerShare:
        """This worker's part of an update: the viewer's turns after this position, and the present."""
        turns = self.history.after(number, viewer.owner)
        listed = turns[:TURNS_MAX][::-1]
        rows = [views.turn_row(n, turn, self.history.wall_ms, self._salt) for n, turn in listed]
        missed = len(turns) - len(rows)
        return WorkerShare(self.history.count, rows, missed, self.picture(viewer))

    async def answer(self, question: bytes) -> bytes:
        """This worker's part of an update, for a watcher at another worker."""
        look = _look(question)
        await self._survey()
        return encode(self.share(look.viewer, look.places.get(self._sources.worker, 0)))

    async def shares(self, viewer: Viewer, places: dict[str, int]) -> dict[str, WorkerShare]:
        """The parts of all workers of the same parent process, this one first."""
        await self._survey()
        own = self._sources.worker
        shares = {own: self.share(viewer, places.get(own, 0))}
        if self._sources.ask is not None:
            others = await self._sources.ask(encode(Look(viewer, places)))
            shares |= {worker: _share(body) for worker, body in others.items()}
        if any(share.turns or share.picture.running_count for share in shares.values()):
            self._stirred_at = time.perf_counter()
        return shares

    def picture(self, viewer: Viewer) -> Picture:
        """The present, as far as this worker knows it."""
        self._start_probe()
        sources = self._sources
        history = self.history
        may = viewer.is_operator
        running_count, running = views.running_rows(sources.runnings(), viewer)
        return Picture(
            totals=history.totals if may else history.totals_of(viewer.owner),
            connections=self._connections(viewer),
            running_count=running_count,
            running=running,
            memory=sources.memory() if may else (),
            replicas=sources.replicas(self._checks) if may else (),
            refusals=history.refusals if may else (),
            backlog=sources.backlog() if may else None,
            lag_ms=round(sources.lag_ms()) if may else None,
        )

    async def _survey(self) -> None:
        """Look at all connections, unless that was done a moment ago."""
        async with self._surveying:
            if time.perf_counter() < self._survey_at:
                return
            cpu_s = 0.0
            statuses: list[SessionStatus] = []
            sessions = iter(self._sources.sessions())
            while True:
                began = time.thread_time()
                some = list(islice(sessions, STATUSES_A_TURN))
                cpu_s += time.thread_time() - began
                statuses += some
                if len(some) < STATUSES_A_TURN:
                    break
                await asyncio.sleep(0)
            statuses.sort(key=lambda status: status.opened_at)
            self._statuses = statuses
            self._seen = {}
            self._survey_at = time.perf_counter() + max(TICK_S / 2, SURVEY_PART * cpu_s)

    def _connections(self, viewer: Viewer) -> Connections:
        """What this viewer sees of the last survey; several pages of one viewer see the same."""
        if viewer not in self._seen:
            shown = views.connections(self._statuses, viewer, self.history.wall_ms, self._salt)
            self._seen[viewer] = shown
        return self._seen[viewer]

    def _start_probe(self) -> None:
        """Check the engines now and then, beside the stream: an engine that does not answer must not delay it."""
        now = time.perf_counter()
        if now < self._probe_at or (self._probing is not None and not self._probing.done()):
            return
        self._probe_at = now + PROBE_S
        self._probing = asyncio.create_task(self._probe())

    async def _probe(self) -> None:
        try:
            self._checks = await self._sources.probe()
        except Exception:
            log.exception("health check of the engines failed")


class Watcher:
    """One open page: its position in the history of each worker."""

    def __init__(self, feed: Feed, viewer: Viewer) -> None:
        self._feed = feed
        self._viewer = viewer
        self._places: dict[str, int] = {}
        self._last = b""

    def hello(self) -> bytes:
        return encode(self._feed.hello(self._viewer))

    async def update(self) -> bytes | None:
        """Everything new since the last call, from all workers, as one message, or None."""
        shares = await self._feed.shares(self._viewer, self._places)
        self._places = {worker: share.number for worker, share in shares.items()}
        turns = [turn for share in shares.values() for turn in share.turns]
        missed = sum(share.missed for share in shares.values())
        picture = encode(together([share.picture for share in shares.values()]))
        if picture == self._last and not turns:
            return None
        is_same = picture == self._last
        self._last = picture
        raw = None if is_same else msgspec.Raw(picture)
        return encode(Update(time.time() * 1000, missed, turns, raw))
