"""Which replica of an engine takes a job?

`routing/placement.py` chooses, from what a `RouteBook` knows of replicas and chains. Each replica
runs a limited number of jobs; the others wait in a fair queue in front of it (`routing/fair_queue.py`).

A replica that cannot be reached, breaks off, or returns only errors is not used for a while, longer each time:

    up        takes jobs                                 fails: down
    down      takes none until its time is over          then: on trial
    on trial  takes one job, no others                   answers: up; fails: down, for twice as long

A drained replica, which the operator has taken out of service, takes no new jobs until it is returned: jobs that run
there are finished, those that wait for it go to another one.

There is no background task: health is learnt from jobs. `is_ready` asks every replica, and one that answers is used
again at once; one that does not answer goes on getting jobs until a job fails there. A job moves to another replica
only before its first token; where no replica is up, it waits a moment and is then refused.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import sys
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from typing import Protocol

import msgspec
from msgspec import Struct, structs

from segue.engines.upstream import EngineLost, NotServed, not_served
from segue.errors import ApiError, CallerError, EngineFailed, TooMany, Unavailable
from segue.routing.book import NO_LOAD, OthersLoad, RouteBook, Visit
from segue.routing.fair_queue import FairQueue
from segue.routing.placement import ReplicaLoad, choose
from segue.seams.model import Engine, EngineFacts, Finish, Job, JobStarted, Moved, Piece

log = logging.getLogger(__name__)

# How long a replica is not used after its first failure, and at most.
PAUSE_S = 0.5
PAUSE_S_MAX = 15.0
# How long a job waits for a replica when none is up: for a restart behind a load balancer, not for an outage.
ALL_DOWN_S = 2.0
# So many errors in a row are the replica's fault; a single error may be the job's.
ERRORS_MAX = 3
# How many replicas may fail with one job: it may be the job that breaks them.
FAILURES_MAX = 2
# How many jobs a server is sent at once where neither it nor the operator says: what vLLM and SGLang take.
PARALLEL_MAX = 256
# A job that waits longer for one replica is logged, so often at most.
WAITING_S, WAITING_LOG_S = 1.0, 60.0
# How long a replica is left alone at most because it asks for that (`Retry-After`).
RETRY_AFTER_S_MAX = 60.0

ALL_DRAINED = "All engines of this model are drained by the operator. Please retry later."


class ReplicaHealth(Struct, frozen=True):
    """What an operator sees of a replica."""

    name: str
    is_up: bool
    running: int
    waiting: int
    is_drained: bool = False


class SlotShare(Protocol):
    """What this process has of the slots of a replica that it shares with other processes."""

    def fit(self, limit: int, *, is_open: bool) -> None:
        """So many slots for all of them; a replica that is not open takes no more jobs."""

    def look(self) -> None:
        """A job has to wait."""


class _Replica:
    """One engine, its queue and what is known of its health."""

    def __init__(self, name: str, engine: Engine, slots: int) -> None:
        self.name = name
        self.engine = engine
        # As the operator says; 0: as the engine says.
        self._slots = slots
        self.queue = FairQueue(slots or PARALLEL_MAX)
        # What this process has of the slots, where there are others.
        self._share: SlotShare | None = None
        self._logged_at = -WAITING_LOG_S
        # In a row, without an answer in between.
        self.failures = 0
        self.errors = 0
        self.down_until = 0.0
        # Until when it wants no requests of ours, as it says.
        self.wait_until = 0.0
        # What it said when it was last asked; for operators, jobs do not care.
        self.is_ready = True
        # Whether the operator has taken it away, or out of service.
        self.is_removed = False
        self.is_drained = False
        # When it last answered again after a failure, by the wall clock.
        self.recovered_at = 0.0

    @property
    def usable_at(self) -> float:
        return max(self.down_until, self.wait_until)

    @property
    def takes_jobs(self) -> bool:
        return not (self.is_removed or self.is_drained)

    @property
    def slots(self) -> int:
        """How many jobs it may have at once, of all processes."""
        return self._slots or self.engine.facts.slots or PARALLEL_MAX

    async def enter(self, job: Job, now: float, book: RouteBook) -> None:
        """Wait for a slot."""
        self._fit_queue()
        if self.queue.is_free or now < self._logged_at + WAITING_LOG_S:
            await self.queue.enter(job.owner, job.lane, job.lineage.priority)
            return
        timer = asyncio.get_running_loop().call_later(WAITING_S, self._log_waiting, book)
        try:
            await self.queue.enter(job.owner, job.lane, job.lineage.priority)
        finally:
            timer.cancel()

    def _log_waiting(self, book: RouteBook) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._logged_at + WAITING_LOG_S:
            self._logged_at = now
            # Those of all processes, as far as they have said: so the figures are those of the metrics.
            others, queue = book.others.get(self.name, NO_LOAD), self.queue
            log.warning(
                "engine %s is full: %d requests run and %d wait, one of them for %g s (see engine_parallel)",
                self.name, queue.running + others.running, queue.waiting + others.waiting, WAITING_S,
            )  # fmt: skip

    def set_slots(self, slots: int) -> None:
        """So many jobs at once from now on; 0: as the engine says."""
        self._slots = slots
        self._fit_queue()

    def remove(self) -> None:
        """It takes no more jobs: those that wait for a slot are woken, to go elsewhere."""
        log.info("engine %s is removed; %d jobs still run there", self.name, self.queue.running)
        self.is_removed = True
        self._fit_queue()
        self.queue.resize(sys.maxsize)

    def set_drained(self, is_drained: bool) -> None:
        """Take it out of service, or bring it back at once."""
        if is_drained == self.is_drained:
            return
        self.is_drained = is_drained
        if is_drained:
            running = self.queue.running
            log.info("engine %s is drained: no new jobs, %d still run there", self.name, running)
            self._fit_queue()
            self.queue.resize(sys.maxsize)
        else:
            log.info("engine %s is returned: it takes jobs again", self.name)
            self.failures, self.errors, self.down_until, self.wait_until = 0, 0, 0.0, 0.0
            self._fit_queue()

    def _fit_queue(self) -> None:
        if self._share is not None:
            self._share.fit(self.slots, is_open=self.takes_jobs)
        elif self.slots != self.queue.slots and self.takes_jobs:
            self.queue.resize(self.slots)

    def share(self, share: SlotShare) -> None:
        """Other processes have jobs there too: the limit is for all of them."""
        self._share = share
        self.queue.on_wait = share.look
        self.queue.resize(0)
        self._fit_queue()

    def start_trial(self, now: float) -> None:
        """A job goes to it. Because it has failed before, it gets no other job until it has answered."""
        self.down_until = now + self._pause_s()

    def failed(self, now: float, reason: str, wait_s: float | None = None) -> None:
        """It did not answer, or broke off; `wait_s` is the `Retry-After` that it sent."""
        self.failures = min(self.failures + 1, 20)
        pause = max(self._pause_s(), min(wait_s or 0.0, PAUSE_S_MAX))
        self.down_until = now + pause
        log.warning("engine %s failed (%s); not retried for %.1f s", self.name, reason, pause)

    def asked_to_wait(self, now: float, wait_s: float | None) -> None:
        """It answered 429; `wait_s` is the `Retry-After` that it sent, which is for all requests of this server."""
        # A second is what we tell the client where the engine says nothing.
        if wait_s is not None and wait_s > 1.0:
            pause = min(wait_s, RETRY_AFTER_S_MAX)
            self.wait_until = now + pause
            log.warning("engine %s asks us to wait; not used for %g s", self.name, pause)

    def returned_error(self, now: float, reason: str) -> None:
        """It answered, but with an error."""
        self.errors += 1
        if self.errors >= ERRORS_MAX:
            self.failed(now, reason)

    def answered(self) -> None:
        if self.failures:
            log.info("engine %s works again", self.name)
            self.recovered_at = time.time()
        self.failures, self.errors, self.down_until = 0, 0, 0.0

    def _pause_s(self) -> float:
        """Twice as long each time, and not the same for all processes that wait."""
        pause = min(PAUSE_S * 2.0 ** (self.failures - 1), PAUSE_S_MAX)
        return pause * random.uniform(0.8, 1.2)


class RoutedEngine:
    """An `Engine` in front of its replicas."""

    def __init__(
        self,
        replicas: Mapping[str, Engine],
        *,
        parallel_max: int = 0,
        all_down_s: float = ALL_DOWN_S,
        model: str = "",
    ) -> None:
        """`model` is what the replicas call it."""
        self._replicas: dict[str, _Replica] = {}
        self._drained: frozenset[str] = frozenset()
        self._all_down_s = all_down_s
        self._model = model
        self.book = RouteBook()
        # Makes the share of this process in the slots of a replica, where there are other processes.
        self._share: Callable[[str, FairQueue], SlotShare] | None = None
        self.can_constrain = True
        self.grammars: frozenset[str] = frozenset()
        if replicas:
            self.set_replicas(replicas, parallel_max)

    def set_replicas(self, replicas: Mapping[str, Engine], parallel_max: int) -> None:
        """These replicas take jobs from now on; what is known of those that stay is kept. Jobs that run at a replica
        that goes are finished there, those that wait for it go to another one."""
        assert replicas, "at least one replica"
        before, self._replicas = self._replicas, {}
        for name, engine in replicas.items():
            known = before.get(name)
            if known is None or known.engine is not engine:
                known = _Replica(name, engine, parallel_max)
                if self._share is not None:
                    known.share(self._share(name, known.queue))
            known.set_slots(parallel_max)
            self._replicas[name] = known
        for one in before.values():
            if self._replicas.get(one.name) is not one:
                one.remove()
        self.set_drained(self._drained)
        self.can_constrain = all(engine.can_constrain for engine in replicas.values())
        self.grammars = frozenset.intersection(*(engine.grammars for engine in replicas.values()))

    def set_drained(self, names: Collection[str]) -> None:
        """These replicas take no new jobs from now on; all others do. It holds for those added later too."""
        self._drained = frozenset(names)
        for one in self._replicas.values():
            one.set_drained(one.name in self._drained)

    def share_slots(self, share: Callable[[str, FairQueue], SlotShare]) -> None:
        """There are other processes: the limits of replicas are for all of them together."""
        if self._share is None:
            self._share = share
            for one in self._replicas.values():
                one.share(share(one.name, one.queue))

    @property
    def facts(self) -> EngineFacts:
        """What holds for all replicas; where they differ, the one with the smallest context."""
        known = [one.engine.facts for one in self._replicas.values()]
        facts = min(known, key=lambda facts: facts.context_tokens or sys.maxsize)
        is_poorer = facts.ids_alone and any(one.ids_alone is False for one in known)
        return structs.replace(facts, ids_alone=False) if is_poorer else facts

    def facts_of_each(self) -> dict[str, EngineFacts]:
        """What each replica says of itself."""
        return {one.name: one.engine.facts for one in self._replicas.values()}

    async def is_ready(self) -> bool:
        """Ask all replicas; one is enough. An answer brings a replica back, silence does not take it away."""
        replicas = list(self._replicas.values())
        answers = await asyncio.gather(*(one.engine.is_ready() for one in replicas))
        for replica, is_ready in zip(replicas, answers, strict=True):
            if is_ready and not replica.is_ready:
                replica.recovered_at = time.time()
            replica.is_ready = is_ready
            if is_ready:
                replica.answered()
        return any(one.is_ready for one in replicas if one.takes_jobs)

    def replicas(self) -> list[ReplicaHealth]:
        """The health of all replicas, for metrics."""
        now = asyncio.get_running_loop().time()
        return [
            ReplicaHealth(
                one.name,
                one.is_ready and now >= one.down_until,
                one.queue.running,
                one.queue.waiting,
                one.is_drained,
            )
            for one in self._replicas.values()
        ]

    def loads(self) -> dict[str, OthersLoad]:
        """What this process has at each replica, for other processes."""
        now = asyncio.get_running_loop().time()
        return {
            one.name: OthersLoad(
                one.queue.running, one.queue.waiting, self.book.pace(one.name).work.at(now)
            )
            for one in self._replicas.values()
        }

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        """The name of the chosen replica, so that the next turn may come back to it, and then its pieces."""
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + self._all_down_s
        # Replicas that failed with this job: they do not get it again.
        failed: set[_Replica] = set()
        # Whether the client has a piece of the answer, so that no other replica can begin again.
        has_pieces = False
        while True:
            replica, visit = await self._enter(job, failed, give_up_at)
            started = JobStarted(
                route=replica.name,
                moved=self._why_moved(job, replica, failed),
                recovered_at=replica.recovered_at,
            )
            try:
                yield started
                async with aclosing(replica.engine.sample(job)) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, JobStarted | Finish):
                            piece = self.book.checked(job, piece, replica.name)
                            visit.cached_tokens = piece.cached_tokens
                        if isinstance(piece, JobStarted):
                            yield msgspec.structs.replace(
                                started, cached_tokens=piece.cached_tokens, worker=piece.worker
                            )
                            continue
                        if not has_pieces:
                            has_pieces = True
                            visit.note_first(clock())
                            if replica.failures or replica.errors:
                                replica.answered()
                        yield piece
                return
            except ApiError as error:
                if not self._may_retry(error, replica, failed) or has_pieces:
                    if isinstance(error, NotServed):
                        names = replica.engine.facts.models
                        raise not_served(replica.name, self._model, names) from error
                    raise
            finally:
                replica.queue.leave()
                visit.end(clock())
                if visit.found_little and replica.recovered_at:
                    self.book.note_forgot(replica.name, replica.recovered_at)

    async def _enter(
        self, job: Job, failed: set[_Replica], give_up_at: float
    ) -> tuple[_Replica, Visit]:
        """A replica that is up, and a slot in it. Where none is up, wait until one can be tried, if that is soon."""
        route = await self.book.route(job) if len(self._replicas) > 1 else job.route
        while True:
            now = asyncio.get_running_loop().time()
            others = self._takers(failed)
            up = [one for one in others if now >= one.usable_at]
            if not up:
                wait_s = min((one.usable_at - now for one in others), default=PAUSE_S_MAX)
                if now + wait_s > give_up_at:
                    if not any(one.takes_jobs for one in self._replicas.values()):
                        raise Unavailable(ALL_DRAINED, wait_s=wait_s)
                    raise _refusal(others, now, max(1.0, wait_s))
                await asyncio.sleep(wait_s)
                continue
            replica, visit = self._choose(up, job, route, now)
            if replica.failures:
                replica.start_trial(now)
                # It may come back as another: what it says of itself is asked again.
                await replica.engine.is_ready()
            failures = replica.failures
            try:
                await replica.enter(job, now, self.book)
            except BaseException:
                visit.end(now)
                raise
            if replica.failures <= failures and replica.takes_jobs:
                visit.begin(asyncio.get_running_loop().time())
                return replica, visit
            visit.end(now)
            # It went down, or was removed or drained, while this job waited for a slot.
            replica.queue.leave()

    def _choose(
        self, up: list[_Replica], job: Job, route: str | None, now: float
    ) -> tuple[_Replica, Visit]:
        """One of these that are up."""
        by_name = {one.name: one for one in up}
        # One that has left the settings is as if it had never been.
        is_known = route in self._replicas and not self.book.has_forgotten(route, job)
        route = route if is_known else None
        is_there = route in by_name or len(self._replicas) == 1
        asked = self.book.asked(job, route, now, is_there=is_there)
        choice = choose([self._load(one, now) for one in up], asked)
        return by_name[choice.name], self.book.chose(job, choice, asked, now)

    def _load(self, one: _Replica, now: float) -> ReplicaLoad:
        queue = one.queue
        return self.book.load(
            one.name, running=queue.running, waiting=queue.waiting, slots=one.slots, now=now
        )

    def _may_retry(self, error: ApiError, replica: _Replica, failed: set[_Replica]) -> bool:
        """Note what an error means for the health of the replica; whether another one may take the job."""
        now = asyncio.get_running_loop().time()
        # The first sentence; the others are for the client.
        reason = error.message.partition(".")[0]
        if isinstance(error, Unavailable):
            replica.failed(now, reason, error.wait_s)
            return True
        if isinstance(error, CallerError | TooMany):
            replica.answered()
        if isinstance(error, TooMany):
            # A limit of the key that we have there: nothing is wrong with the replica, and another may have another.
            failed.add(replica)
            replica.asked_to_wait(now, error.wait_s)
            return self._is_another_up(failed, now)
        if not isinstance(error, EngineFailed):
            return False
        failed.add(replica)
        if isinstance(error, EngineLost):
            replica.failed(now, reason)
        else:
            replica.returned_error(now, reason)
        return len(failed) < FAILURES_MAX and self._is_another_up(failed, now)

    def _is_another_up(self, failed: set[_Replica], now: float) -> bool:
        return any(now >= one.usable_at for one in self._takers(failed))

    def _takers(self, failed: set[_Replica]) -> list[_Replica]:
        """The replicas that may get a job which has failed at these."""
        return [one for one in self._replicas.values() if one.takes_jobs and one not in failed]

    def _why_moved(self, job: Job, to: _Replica, failed: set[_Replica]) -> Moved:
        """Why a job is not at the replica that served its parent."""
        if job.route is None or job.route == to.name:
            return ""
        home = self._replicas.get(job.route)
        if home is None:
            return "removed"
        if home.is_drained:
            return "drained"
        is_down = home in failed or asyncio.get_running_loop().time() < home.usable_at
        return "down" if is_down else "busy"


def _refusal(others: list[_Replica], now: float, wait_s: float) -> Unavailable:
    """Why no replica takes a job now: they ask us to wait, or they do not answer."""
    if any(now >= one.down_until for one in others):
        seconds = math.ceil(wait_s)
        message = f"The engine asks this server to wait: please retry in {seconds} s."
        return Unavailable(message, wait_s=wait_s)
    return Unavailable("No engine answers. Please retry later.", wait_s=wait_s)
