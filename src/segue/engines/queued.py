"""How does a job get to a server of an engine, and when is that server not used?

A server runs a limited number of jobs; the others wait in a fair queue in front of it (`fair_queue.py`). One that
cannot be reached, breaks off, or returns only errors is not used for a while, longer each time. What only one of
several owners has met (errors, a broken answer, a limit) is held against the jobs of that owner and of nobody else:

    up        takes jobs                                 fails: down
    down      takes none until its time is over          then: on trial
    on trial  takes one job, no others                   answers: up; fails: down, for twice as long

A drained server, which the operator has taken out of service, takes no new jobs until it is returned: jobs that run
there are finished. A removed server has a successor, which takes its jobs.

There is no background task: health is learnt from jobs. `is_ready` asks the server, and one that answers is used again
at once; one that does not answer goes on getting jobs until a job fails there. A job that finds its server down before
its first token waits a moment for it and is then refused.

This is all that a model with one URL needs. Where there are several, `replicas/router.py` chooses among these.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from operator import attrgetter

from msgspec import Struct, structs

from segue.border.believed import Correction, believed
from segue.border.refusals import EngineLost, NotServed, not_served
from segue.engines.fair_queue import FairQueue
from segue.errors import ApiError, CallerError, EngineFailed, TooMany, Unavailable
from segue.seams.engine_status import EngineStatus
from segue.seams.history import Owner
from segue.seams.model import Engine, Job, JobStarted, Piece

log = logging.getLogger(__name__)

# How long a server is not used after its first failure, and at most.
PAUSE_S = 0.5
PAUSE_S_MAX = 15.0
# How long a job waits for a server that is down: for a restart at a load balancer, not for an outage.
DOWN_S_MAX = 2.0
# So many errors in a row are the server's fault; a single error may be the job's.
ERRORS_MAX = 3
# So many owners must have met errors, where there are as many: one may send what no server can answer.
SEVERAL = 2
# Owners whose jobs wait at one server; beyond it the first one is forgotten.
HOLDS_MAX = 1_024
# How many jobs a server is sent at once where neither it nor the operator says: what vLLM and SGLang take.
PARALLEL_MAX = 256
# A job that waits longer is logged, so often at most.
WAITING_S, WAITING_LOG_S = 1.0, 60.0
# How long a server is not used at most because it asks for that (`Retry-After`).
RETRY_AFTER_S_MAX = 60.0

CORRECTED: Mapping[Correction, str] = {
    "counts": "reports token counts that cannot be true: Segue's own are used",
    "length": "writes more than a request allows: it is stopped there",
}

ALL_DRAINED = "All engines of this model are drained by the operator. Please retry later."


class ServerLoad(Struct, frozen=True, array_like=True):
    """What a process has at a server, or several processes together."""

    running: int = 0
    waiting: int = 0
    # Tokens that it has computed for them lately.
    work: float = 0.0


NO_LOAD = ServerLoad()


class _Hold(Struct):
    """Why the jobs of one owner are not sent for a while."""

    until: float = 0.0
    # In a row, without an answer in between.
    failures: int = 0


class QueuedEngine:
    """An `Engine` that is one server, with the queue in front of it and what is known of its health."""

    # Read for every turn, so without a call of ours.
    facts = property(attrgetter("engine.facts"))

    def __init__(self, name: str, engine: Engine, slots: int = 0, *, model: str = "") -> None:
        """`slots`: how many jobs at once, as the operator says; 0: as the server says. `model` is what it calls it."""
        # Itself; a router has several.
        self.servers: Sequence[QueuedEngine] = (self,)
        self.name = name
        self.engine = engine
        self.can_constrain = engine.can_constrain
        self.grammars = engine.grammars
        self._model = model
        self.down_s_max = DOWN_S_MAX
        self._slots = slots
        self.queue = FairQueue(slots or PARALLEL_MAX)
        self.queue.on_wait = self._note_waiting
        # What the server said of itself when the queue was last made as long as its slots.
        self._fitted: object = None
        # Called when a job has to wait or the limit has changed, where other processes have jobs there too: it gives
        # the queue this process's share of the slots.
        self.on_demand: Callable[[], None] | None = None
        # What the other processes have there, as far as they have said.
        self.others = NO_LOAD
        self._logged_at = -WAITING_LOG_S
        # In a row, without an answer in between.
        self.failures = 0
        self.errors = 0
        self.down_until = 0.0
        # Who has sent jobs here, but no more than matter; whose jobs have failed since the last answer; and whose jobs
        # wait, though others' do not.
        self._owners: set[Owner] = set()
        self._erring: set[Owner] = set()
        self._holds: dict[Owner, _Hold] = {}
        # What it said when it was last asked; for operators, jobs do not care.
        self.is_answering = True
        # When it last answered again after a failure, by the wall clock.
        self.recovered_at = 0.0
        # Whether the operator has taken it out of service; who serves the model since it was removed; whether it takes
        # jobs, being neither.
        self.is_drained = False
        self.successor: Engine | None = None
        self.is_open = True
        # Since the last page of metrics: jobs by why they came here, and what was not believed.
        self.choices: Counter[str] = Counter()
        self.corrected: Counter[str] = Counter()
        self._logged: set[Correction] = set()

    def usable_at(self, owner: Owner) -> float:
        """When the next job of this owner may be sent."""
        hold = self._holds.get(owner)
        return self.down_until if hold is None else max(self.down_until, hold.until)

    @property
    def slots(self) -> int:
        """How many jobs it may have at once, of all processes."""
        return self._slots or self.engine.facts.slots or PARALLEL_MAX

    def status(self, model: str) -> EngineStatus:
        """What an operator sees of it; `model` is what it is called here."""
        is_up = self.is_answering and asyncio.get_running_loop().time() >= self.down_until
        queue = self.queue
        return EngineStatus(model, self.name, is_up, queue.running, queue.waiting, self.is_drained)

    def take_sessions(self) -> tuple[Counter[str], Counter[str]]:
        """Jobs by how their prompts came, and refusals by reason, since this was asked last; none of most engines."""
        found: tuple[Counter[str], Counter[str]] = getattr(
            self.engine, "session_counts", (Counter(), Counter())
        )
        turns, refusals = map(Counter, found)
        for count in found:
            count.clear()
        return turns, refusals

    async def is_ready(self) -> bool:
        """Ask it. An answer brings it back, silence does not take it away."""
        is_answering = await self.engine.is_ready()
        if is_answering:
            if not self.is_answering:
                self.recovered_at = time.time()
            self._note_answer(None)
        self.is_answering = is_answering
        return is_answering and self.is_open

    async def sample(self, job: Job, *, may_wait: bool = True) -> AsyncGenerator[Piece, None]:
        """The name of the server, so that the next turn may come back to it, and then its pieces. `may_wait`: for a
        server that is down, or for its successor; a router goes elsewhere instead."""
        give_up_at = asyncio.get_running_loop().time() + self.down_s_max if may_wait else 0.0
        # Whether the client has a piece of the answer, so that it cannot begin again.
        has_pieces = False
        owner = job.owner
        if job.is_ahead and not self._has_room:
            return
        if len(self._owners) < SEVERAL:
            self._owners.add(owner)
        while True:
            if not self.is_open:
                if self.successor is None or not may_wait:
                    raise Unavailable(ALL_DRAINED, wait_s=PAUSE_S_MAX)
                async with aclosing(self.successor.sample(job)) as others:
                    async for piece in others:
                        yield piece
                return
            if self.failures or owner in self._holds:
                await self._wait_until_usable(owner, give_up_at)
            if self.engine.facts is not self._fitted:
                self._fit_queue()
            failures = self.failures
            await self.queue.acquire(owner, job.lane, job.lineage.priority)
            if self.failures > failures or not self.is_open:
                # It went down, or was removed or drained, while this job waited for a slot.
                self.queue.release()
                continue
            is_known = job.route == self.name
            if may_wait:
                self.choices["parent" if is_known else "beginning"] += 1
            started = JobStarted(
                route=self.name,
                moved="" if is_known or job.route is None else "removed",
                recovered_at=self.recovered_at,
            )
            try:
                yield started
                said = believed(self.engine, job, self.name, self._note_correction)
                async with aclosing(said) as pieces:
                    async for piece in pieces:
                        if isinstance(piece, JobStarted):
                            yield structs.replace(
                                started, cached_tokens=piece.cached_tokens, worker=piece.worker
                            )
                            continue
                        if not has_pieces:
                            has_pieces = True
                            if self.failures or self.errors or self._holds:
                                self._note_answer(owner)
                        yield piece
                return
            except ApiError as error:
                self.note_error(error, owner)
                if isinstance(error, NotServed):
                    raise not_served(self.name, self._model, self.engine.facts.models) from error
                if has_pieces or not may_wait or not isinstance(error, Unavailable):
                    raise
            finally:
                self.queue.release()

    async def _wait_until_usable(self, owner: Owner, give_up_at: float) -> None:
        """Wait until a job may be tried, or refuse it if that takes too long."""
        clock = asyncio.get_running_loop().time
        while self.is_open and (wait_s := self.usable_at(owner) - clock()) > 0:
            if clock() + wait_s > give_up_at:
                raise refusal([self], wait_s)
            await asyncio.sleep(wait_s)
        if self.failures:
            # It gets no other job until it has answered this one.
            self.down_until = clock() + _pause_s(self.failures)
            # It may come back as another: what it says of itself is asked again.
            await self.engine.is_ready()

    # --- slots ---

    @property
    def _has_room(self) -> bool:
        """Whether a job that nobody waits for may be sent: another one finds a slot all the same, or none is there."""
        running = self.queue.running + self.others.running
        return self.is_open and not self.failures and (running == 0 or running + 1 < self.slots)

    def set_slots(self, slots: int) -> None:
        """So many jobs at once from now on; 0: as the server says."""
        self._slots = slots
        self._fit_queue()

    def _fit_queue(self) -> None:
        self._fitted = self.engine.facts
        if self.on_demand is not None:
            self.on_demand()
        elif self.is_open and self.slots != self.queue.slots:
            self.queue.resize(self.slots)

    def _note_waiting(self, slot: asyncio.Future[None]) -> None:
        """A job has to wait for this slot."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._logged_at + WAITING_LOG_S:
            loop.call_later(WAITING_S, self._log_waiting, slot)
        if self.on_demand is not None:
            self.on_demand()

    def _log_waiting(self, slot: asyncio.Future[None]) -> None:
        now = asyncio.get_running_loop().time()
        if not slot.done() and now >= self._logged_at + WAITING_LOG_S:
            self._logged_at = now
            # Those of all processes, as far as they have said: so the figures are those of the metrics.
            others, queue = self.others, self.queue
            log.warning(
                "engine %s is full: %d requests run and %d wait, one of them for %g s (see engine_parallel)",
                self.name, queue.running + others.running, queue.waiting + others.waiting, WAITING_S,
            )  # fmt: skip

    # --- out of service ---

    def remove(self, successor: Engine) -> None:
        """It takes no more jobs: those that wait for a slot are woken and go to its successor, as all do that come
        later."""
        log.info("engine %s is removed; %d jobs still run there", self.name, self.queue.running)
        self.successor = successor
        self._close()

    def set_drained(self, is_drained: bool) -> None:
        """Take it out of service, or bring it back at once."""
        if is_drained == self.is_drained:
            return
        self.is_drained = is_drained
        if is_drained:
            still = self.queue.running
            log.info("engine %s is drained: no new jobs, %d still run there", self.name, still)
            self._close()
            return
        log.info("engine %s is returned: it takes jobs again", self.name)
        self.failures = self.errors = 0
        self.down_until = 0.0
        self._holds.clear()
        self.is_open = self.successor is None
        self._fit_queue()

    def _close(self) -> None:
        self.is_open = False
        self._fit_queue()
        # Everybody who waits is let through, to go elsewhere.
        self.queue.resize(sys.maxsize)

    # --- health ---

    def note_error(self, error: ApiError, owner: Owner) -> None:
        """What an error with a job of this owner means for the health of the server."""
        now = asyncio.get_running_loop().time()
        # The first sentence; the others are for the client.
        reason = error.message.partition(".")[0]
        if isinstance(error, Unavailable):
            self._note_failure(now, reason, error.wait_s)
        elif isinstance(error, EngineFailed):
            self.errors += 1
            self._erring.add(owner)
            if self.errors < ERRORS_MAX and not isinstance(error, EngineLost):
                return
            if len(self._owners) >= SEVERAL > len(self._erring):
                self._hold(now, owner, reason)
            else:
                self._note_failure(now, reason)
        elif isinstance(error, CallerError | TooMany):
            self._note_answer(owner)
            if isinstance(error, TooMany):
                self._note_retry_after(now, owner, error.wait_s)

    def _hold(self, now: float, owner: Owner, reason: str, wait_s: float | None = None) -> None:
        """Send no job of this owner for a while: nobody else has met this."""
        hold = self._holds.pop(owner, None) or _Hold()
        while len(self._holds) >= HOLDS_MAX:
            del self._holds[next(iter(self._holds))]
        self._holds[owner] = hold
        if wait_s is None:
            hold.failures = min(hold.failures + 1, 20)
            wait_s = _pause_s(hold.failures)
        hold.until = now + wait_s
        log.warning(
            "engine %s is not used for %.1f s for the owner %s (%s)",
            self.name,
            wait_s,
            owner,
            reason,
        )

    def _note_failure(self, now: float, reason: str, wait_s: float | None = None) -> None:
        """It did not answer, or broke off; `wait_s` is the `Retry-After` that it sent."""
        self.failures = min(self.failures + 1, 20)
        pause = max(_pause_s(self.failures), min(wait_s or 0.0, PAUSE_S_MAX))
        self.down_until = now + pause
        log.warning("engine %s failed (%s); not retried for %.1f s", self.name, reason, pause)

    def _note_retry_after(self, now: float, owner: Owner, wait_s: float | None) -> None:
        """It answered 429: nothing is wrong with it. `wait_s` is the `Retry-After` that it sent. What others still may
        do there only it knows, so they ask it."""
        # A second is what we tell the client where the engine says nothing.
        if wait_s is not None and wait_s > 1.0:
            self._hold(now, owner, "it asks us to wait", min(wait_s, RETRY_AFTER_S_MAX))

    def _note_answer(self, owner: Owner | None) -> None:
        """It answered a job of this owner, or a question of ours."""
        if self.failures:
            log.info("engine %s works again", self.name)
            self.recovered_at = time.time()
        self.failures = self.errors = 0
        self._erring.clear()
        self.down_until = 0.0
        if owner is not None:
            self._holds.pop(owner, None)

    def _note_correction(self, what: Correction) -> None:
        self.corrected[what] += 1
        if what not in self._logged:
            self._logged.add(what)
            log.warning("engine %s %s (logged once)", self.name, CORRECTED[what])


def _pause_s(failures: int) -> float:
    """Twice as long each time, and not the same for all processes that wait."""
    pause = min(PAUSE_S * 2.0 ** (failures - 1), PAUSE_S_MAX)
    return pause * random.uniform(0.8, 1.2)


def refusal(servers: Sequence[QueuedEngine], wait_s: float) -> Unavailable:
    """Why none of these servers takes a job now: they ask us to wait, or they do not answer."""
    now, wait_s = asyncio.get_running_loop().time(), max(1.0, wait_s)
    if any(now >= server.down_until for server in servers):
        message = f"The engine asks this server to wait: please retry in {math.ceil(wait_s)} s."
        return Unavailable(message, wait_s=wait_s)
    return Unavailable("No engine answers. Please retry later.", wait_s=wait_s)


def forget(engines: Callable[[], Mapping[str, Engine]]) -> Callable[[Owner], None]:
    """What makes the servers of these engines forget an owner of whom everything was erased."""

    def forget_owner(owner: Owner) -> None:
        for server in [server for engine in engines().values() for server in servers_of(engine)]:
            getattr(server.engine, "forget_owner", lambda owner: None)(owner)

    return forget_owner


def servers_of(engine: Engine) -> Sequence[QueuedEngine]:
    """The servers that an engine has: one, those of a router, or none, as one that runs in this process."""
    found: Sequence[QueuedEngine] = getattr(engine, "servers", ())
    return found
