"""What has changed since a watcher last looked?

Turns that are over are put into one ring, and counted; nothing more happens while nobody watches. A watcher has a place
in the ring and the bytes of its last picture. It asks, at most a few times a second, and gets everything new as one
message, or nothing. So there is no queue: a slow reader asks less often, and is told how much it missed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from segue import __version__
from segue.dashboard.together import together
from segue.dashboard.views import (
    MARKS,
    Look,
    Memory,
    Picture,
    Refusal,
    Replica,
    Share,
    Totals,
    TurnRow,
    Viewer,
    connections,
    running_rows,
    turn_row,
)
from segue.errors import TooMany
from segue.transports.websocket import SessionStatus
from segue.turn.commit import EndedTurn
from segue.turn.running import Running
from segue.turn.values import Owner

log = logging.getLogger(__name__)

# A few minutes of a busy agent, under a megabyte; what a page shows of the past is less.
RING_MAX = 1_000
# One message: what a page can draw before the next one comes.
TURNS_MAX = 250
# Pages open at once; each costs about a millisecond a second.
WATCHERS_MAX = 32
# Codes are our own and few, but transports pass them on as text.
REFUSALS_MAX = 64
# As many as there may be keys with a page of their own; the first ones stay.
OWNERS_MAX = 10_000
# While something happens, and while nothing does.
TICK_S = 0.25
IDLE_S = 1.0
# How long after a turn, or a new page, something still happens.
CALM_S = 2.0
# How often engines are asked for their health while somebody watches.
PROBE_S = 5.0

encode = msgspec.json.encode
_look = msgspec.json.Decoder(Look).decode
_share = msgspec.json.Decoder(Share).decode


async def nobody(question: bytes) -> Mapping[str, bytes]:
    """There are no other workers."""
    return {}


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the present is read: each value where it lives."""

    models: Sequence[str]
    sessions: Callable[[], Iterable[SessionStatus]]
    runnings: Callable[[], Iterable[Running]]
    memory: Callable[[], Sequence[Memory]]
    # Asks all engines; then `replicas` knows how they are.
    probe: Callable[[], Awaitable[Mapping[str, bool]]]
    replicas: Callable[[Mapping[str, bool]], Sequence[Replica]]
    backlog: Callable[[], int]
    # Asks the other workers of the house; and how this one is called among them.
    ask: Callable[[bytes], Awaitable[Mapping[str, bytes]]] = nobody
    worker: str = ""
    # The same for all workers of a house.
    process: str = ""


class Hello(Struct, frozen=True, tag_field="type", tag="hello"):
    """The first message: what does not change while the process lives."""

    version: str
    # Another one after a restart: what a page knows of the old process is over.
    process: str
    started_ms: float
    models: Sequence[str]
    marks: Sequence[str]
    is_operator: bool


class Update(Struct, frozen=True, tag_field="type", tag="update"):
    """What is new: the present where it changed, and the turns that ended."""

    now_ms: float
    missed: int
    turns: Sequence[TurnRow]
    picture: msgspec.Raw | None


class Feed:
    """The recent past of a process, and who watches it."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._ring: deque[tuple[int, EndedTurn]] = deque(maxlen=RING_MAX)
        self._count = 0
        self._totals = Totals()
        self._owners: dict[Owner, Totals] = {}
        self._refusals: dict[tuple[str, str], Refusal] = {}
        self._watcher_count = 0
        self._checks: Mapping[str, bool] = {}
        self._probing: asyncio.Task[None] | None = None
        self._probe_at = 0.0
        self._calm_at = 0.0
        self._salt = secrets.token_bytes(16)
        self._started_ms = time.time() * 1000
        self._wall_ms = self._started_ms - time.perf_counter() * 1000
        self._process = sources.process or secrets.token_hex(8)

    def observe(self, settled: EndedTurn) -> None:
        """Remember a turn that is over. Called for every turn, watched or not."""
        self._count += 1
        self._ring.append((self._count, settled))
        self._totals.add(settled)
        owner = settled.entry.owner
        if owner in self._owners or len(self._owners) < OWNERS_MAX:
            self._owners.setdefault(owner, Totals()).add(settled)
        self._calm_at = time.perf_counter() + CALM_S

    def note_refusal(self, transport: str, code: str) -> None:
        """Remember that a request was refused before it became a turn."""
        known = self._refusals.get((transport, code))
        if known is not None:
            known.count += 1
            known.at_ms = self._now_ms()
        elif len(self._refusals) < REFUSALS_MAX:
            self._refusals[transport, code] = Refusal(transport, code, 1, self._now_ms())

    @contextmanager
    def watching(self, viewer: Viewer) -> Iterator[Watcher]:
        """A place in the feed while inside."""
        if self._watcher_count >= WATCHERS_MAX:
            raise TooMany(f"Too many dashboards are open (at most {WATCHERS_MAX}).")
        self._watcher_count += 1
        # A page that has just opened waits for what the engines answer.
        self._calm_at = time.perf_counter() + CALM_S
        try:
            yield Watcher(self, viewer)
        finally:
            self._watcher_count -= 1
            if not self._watcher_count and self._probing is not None:
                self._probing.cancel()

    @property
    def pause_s(self) -> float:
        """How long a watcher waits before it asks again."""
        is_busy = time.perf_counter() < self._calm_at or any(True for _ in self._sources.runnings())
        return TICK_S if is_busy else IDLE_S

    def hello(self, viewer: Viewer) -> Hello:
        """What a watcher is told first."""
        return Hello(
            version=__version__,
            process=self._process,
            started_ms=self._started_ms,
            models=self._sources.models,
            marks=MARKS,
            is_operator=viewer.is_operator,
        )

    def turns_after(self, number: int, viewer: Viewer) -> tuple[int, list[TurnRow], int]:
        """The viewer's turns after this place: the new place, the last of the turns, and how many were left out."""
        fresh: list[tuple[int, EndedTurn]] = []
        for one in reversed(self._ring):
            if one[0] <= number:
                break
            if one[1].entry.owner == viewer.owner:
                fresh.append(one)
        listed = fresh[:TURNS_MAX][::-1]
        rows = [turn_row(n, settled, self._wall_ms, self._salt) for n, settled in listed]
        return self._count, rows, len(fresh) - len(rows)

    def share(self, viewer: Viewer, number: int) -> Share:
        """This worker's part of what a watcher is told."""
        place, turns, missed = self.turns_after(number, viewer)
        return Share(place, turns, missed, self.picture(viewer))

    async def answer(self, question: bytes) -> bytes:
        """The same, for a watcher at another worker."""
        look = _look(question)
        return encode(self.share(look.viewer, look.places.get(self._sources.worker, 0)))

    async def shares(self, viewer: Viewer, places: dict[str, int]) -> dict[str, Share]:
        """What every worker of the house tells this watcher, this one first."""
        own = self._sources.worker
        found = {own: self.share(viewer, places.get(own, 0))}
        others = await self._sources.ask(encode(Look(viewer, places)))
        found |= {worker: _share(body) for worker, body in others.items()}
        if any(one.turns or one.picture.running_count for one in found.values()):
            self._calm_at = time.perf_counter() + CALM_S
        return found

    def picture(self, viewer: Viewer) -> Picture:
        """The present, as far as this worker knows it."""
        self._keep_probing()
        sources, may = self._sources, viewer.is_operator
        running_count, running = running_rows(sources.runnings(), viewer)
        totals = self._totals if may else self._owners.get(viewer.owner, Totals())
        return Picture(
            totals=totals,
            connections=connections(sources.sessions(), viewer, self._wall_ms, self._salt),
            running_count=running_count,
            running=running,
            memory=sources.memory() if may else (),
            replicas=sources.replicas(self._checks) if may else (),
            refusals=list(self._refusals.values()) if may else (),
            backlog=sources.backlog() if may else None,
        )

    def _now_ms(self) -> float:
        return round(self._wall_ms + time.perf_counter() * 1000)

    def _keep_probing(self) -> None:
        """Ask the engines now and then, beside the stream: one that does not answer must not hold it up."""
        now = time.perf_counter()
        if now < self._probe_at or (self._probing is not None and not self._probing.done()):
            return
        self._probe_at = now + PROBE_S
        self._probing = asyncio.create_task(self._probe())

    async def _probe(self) -> None:
        try:
            self._checks = await self._sources.probe()
        except Exception:
            log.exception("the engines could not be asked")


class Watcher:
    """One open page: its place in the feed."""

    def __init__(self, feed: Feed, viewer: Viewer) -> None:
        self._feed = feed
        self._viewer = viewer
        # How much of each worker's past it has been told.
        self._places: dict[str, int] = {}
        self._last = b""

    def hello(self) -> bytes:
        """The first message."""
        return encode(self._feed.hello(self._viewer))

    async def update(self) -> bytes | None:
        """Everything new since the last call, from all workers, as one message, or nothing."""
        shares = await self._feed.shares(self._viewer, self._places)
        self._places = {worker: share.number for worker, share in shares.items()}
        turns = [turn for share in shares.values() for turn in share.turns]
        missed = sum(share.missed for share in shares.values())
        picture = encode(together([share.picture for share in shares.values()]))
        if picture == self._last and not turns:
            return None
        is_same, self._last = picture == self._last, picture
        raw = None if is_same else msgspec.Raw(picture)
        return encode(Update(time.time() * 1000, missed, turns, raw))
