"""Which replica of an engine takes a job?

The one that served the parent, because it holds the prefix, as long as it is healthy; else the one with the fewest
jobs. A replica takes so many jobs at a time; the others wait in front of it, and places go round between owners, and
within an owner between its lanes, so that nobody's hundred jobs stand before somebody's one.

A replica that cannot be reached, breaks off, or gives nothing but errors is left alone for a while, longer each time:

    up        takes jobs                                 fails: down
    down      takes none until its time is over          then: on trial
    on trial  takes one job, the others stay away        answers: up; fails: down, for twice as long

Nothing runs in the background. Health is learnt from jobs, and from `is_ready`, which asks every replica. A job moves
to another replica only before its first token; where no replica is up it waits a moment for one, then it is refused.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import msgspec
from msgspec import Struct

from segue.engines.upstream import Lost
from segue.errors import CallerError, EngineFailed, Unavailable
from segue.turn.seams import Engine
from segue.turn.values import Job, JobStarted, Piece

log = logging.getLogger(__name__)

# How long a replica is left alone after its first failure, and at most.
PAUSE_S = 0.5
PAUSE_S_MAX = 15.0
# How long a job waits for a replica when none is up: a restart behind a load balancer, not an outage.
PATIENCE_S = 2.0
# So many errors in a row are the replica's fault; one may be the job's, and must not cost the others a replica.
ERRORS_MAX = 3
# How many replicas may break while they work on one job: it may be the job that breaks them.
BREAKS_MAX = 2
# What may wait in front of one replica. At one job a second this is already minutes of waiting.
WAITING_MAX = 1024

# Who asks: an owner, and one of its lanes.
Waiting = tuple[str, str]


class Health(Struct, frozen=True):
    """What an operator sees of a replica."""

    name: str
    is_up: bool
    running: int
    waiting: int


class FairQueue:
    """So many at a time; places go round between owners, and within each between its lanes."""

    def __init__(self, places: int) -> None:
        self._places = places
        self.running = 0
        self.waiting = 0
        # Those at the front have waited longest for a turn of their own.
        self._owners: dict[str, dict[str, deque[asyncio.Future[None]]]] = {}

    async def enter(self, caller: Waiting) -> None:
        """Wait for a place."""
        if self.running < self._places:
            self.running += 1
            return
        if self.waiting >= WAITING_MAX:
            raise Unavailable("Too many requests wait for this model. Please retry later.")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        owner, lane = caller
        self._owners.setdefault(owner, {}).setdefault(lane, deque()).append(place)
        self.waiting += 1
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()
            raise
        finally:
            self.waiting -= 1

    def leave(self) -> None:
        """Give the place to the next one, if somebody waits."""
        while self._owners:
            place = self._next()
            if not place.done():
                place.set_result(None)
                return
        self.running -= 1

    def _next(self) -> asyncio.Future[None]:
        """The first of the lane whose turn it is, of the owner whose turn it is; both go to the end of their row."""
        owner = next(iter(self._owners))
        lanes = self._owners.pop(owner)
        lane = next(iter(lanes))
        places = lanes.pop(lane)
        place = places.popleft()
        if places:
            lanes[lane] = places
        if lanes:
            self._owners[owner] = lanes
        return place


class Replica:
    """One engine, its turnstile and what is known of its health."""

    def __init__(self, name: str, engine: Engine, places: int) -> None:
        self.name = name
        self.engine = engine
        self.turnstile = FairQueue(places)
        # In a row, without an answer in between.
        self.failures = 0
        self._errors = 0
        self._down_until = 0.0

    @property
    def load(self) -> int:
        """How many jobs it has, at work or waiting."""
        return self.turnstile.running + self.turnstile.waiting

    def is_up(self, now: float) -> bool:
        """Whether it may be given a job."""
        return now >= self._down_until

    def wait_s(self, now: float) -> float:
        """How long until it may be tried again."""
        return max(0.0, self._down_until - now)

    def try_out(self, now: float) -> None:
        """A job goes to it. If it has failed before, the others stay away until it has answered."""
        if self.failures:
            self._down_until = now + self._pause_s()

    def failed(self, now: float, wait_s: float | None = None) -> None:
        """It did not answer, or broke off; it may have said how long it wants to be left alone."""
        self.failures = min(self.failures + 1, 20)
        pause = max(self._pause_s(), min(wait_s or 0.0, PAUSE_S_MAX))
        self._down_until = now + pause
        log.warning("engine %s failed, left alone for %.1f s", self.name, pause)

    def erred(self, now: float) -> None:
        """It answered, with an error."""
        self._errors += 1
        if self._errors >= ERRORS_MAX:
            self.failed(now)

    def answered(self) -> None:
        """It works."""
        if self.failures:
            log.info("engine %s is back", self.name)
        self.failures = 0
        self._errors = 0
        self._down_until = 0.0

    def _pause_s(self) -> float:
        """Twice as long each time, and never the same for all who wait."""
        pause = min(PAUSE_S * 2.0 ** (self.failures - 1), PAUSE_S_MAX)
        return pause * random.uniform(0.8, 1.2)


class RoutedEngine:
    """An `Engine` in front of its replicas. `asker` says for whom a job is."""

    def __init__(
        self,
        replicas: Mapping[str, Engine],
        *,
        parallel_max: int = 64,
        caller: Callable[[Job], Waiting] = lambda job: ("", ""),
        patience_s: float = PATIENCE_S,
    ) -> None:
        assert replicas, "at least one replica"
        self._replicas = {
            name: Replica(name, engine, parallel_max) for name, engine in replicas.items()
        }
        self._asker = caller
        self._patience_s = patience_s

    @property
    def can_constrain(self) -> bool:
        """Whether every replica can be held to a JSON schema."""
        return all(one.engine.can_constrain for one in self._replicas.values())

    @property
    def grammars(self) -> frozenset[str]:
        """What every replica can be held to."""
        return frozenset.intersection(*(one.engine.grammars for one in self._replicas.values()))

    async def is_ready(self) -> bool:
        """Ask all of them; one is enough. What they answer is remembered."""
        loop = asyncio.get_running_loop()
        replicas = self._replicas.values()
        answers = await asyncio.gather(*(one.engine.is_ready() for one in replicas))
        for replica, is_up in zip(replicas, answers, strict=True):
            if is_up:
                replica.answered()
            elif replica.is_up(loop.time()):
                replica.failed(loop.time())
        return any(answers)

    def replicas(self) -> list[Health]:
        """How they are, for metrics."""
        now = asyncio.get_running_loop().time()
        return [
            Health(one.name, one.is_up(now), one.turnstile.running, one.turnstile.waiting)
            for one in self._replicas.values()
        ]

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        """The name of the chosen replica, so that the next turn may come back to it, and then what it says."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._patience_s
        # Replicas that broke on this job: it is not given to them again.
        broken: set[Replica] = set()
        while True:
            replica = await self._enter(job, give_up_at, broken)
            has_spoken = False
            try:
                yield JobStarted(route=replica.name)
                async with aclosing(replica.engine.sample(job)) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, JobStarted):
                            yield msgspec.structs.replace(piece, route=replica.name)
                            continue
                        if not has_spoken:
                            has_spoken = True
                            replica.answered()
                        yield piece
                return
            except Unavailable as error:
                replica.failed(loop.time(), error.wait_s)
                if has_spoken:
                    raise
            except EngineFailed as error:
                if isinstance(error, Lost):
                    replica.failed(loop.time())
                else:
                    replica.erred(loop.time())
                broken.add(replica)
                is_enough = len(broken) >= BREAKS_MAX
                if has_spoken or is_enough or self._choose(None, loop.time(), broken) is None:
                    raise
            except CallerError:
                replica.answered()
                raise
            finally:
                replica.turnstile.leave()

    async def _enter(self, job: Job, give_up_at: float, broken: set[Replica]) -> Replica:
        """A place at a replica that is up."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            replica = self._choose(job.route, now, broken)
            if replica is None:
                await self._wait(now, give_up_at, broken)
                continue
            replica.try_out(now)
            failures = replica.failures
            await replica.turnstile.enter(self._asker(job))
            if replica.failures <= failures:
                return replica
            # It went down while we waited in front of it.
            replica.turnstile.leave()

    def _choose(self, route: str | None, now: float, broken: set[Replica]) -> Replica | None:
        up = [one for one in self._replicas.values() if one.is_up(now) and one not in broken]
        same = self._replicas.get(route) if route is not None else None
        if same is not None and same in up:
            return same
        return min(up, key=lambda one: one.load, default=None)

    async def _wait(self, now: float, give_up_at: float, broken: set[Replica]) -> None:
        """Until the first of the others may be tried again, if that is soon."""
        others = [one for one in self._replicas.values() if one not in broken]
        wait_s = min((one.wait_s(now) for one in others), default=PAUSE_S_MAX)
        if now + wait_s > give_up_at:
            raise Unavailable("No engine answers. Please retry later.", wait_s=max(1.0, wait_s))
        await asyncio.sleep(wait_s)
