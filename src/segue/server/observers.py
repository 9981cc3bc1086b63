"""Who learns of a turn that has ended, and how does the operator see the health of the process?"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from segue.aio import in_background
from segue.engines.queued import servers_of
from segue.observe.access import AccessLog
from segue.observe.audit import Audit
from segue.observe.metrics import Metrics, together
from segue.observe.traces import Traces
from segue.process.afterwards import AccessLine, Afterwards, EndedTurn, Observer
from segue.process.runner import Runner
from segue.seams.engine_status import EngineStatus
from segue.seams.history import Owner
from segue.server.models import ServedModels
from segue.server.names import misnamed
from segue.server.state import State
from segue.turn.plan import Model
from segue_dashboard.history import RecentTurns

log = logging.getLogger(__name__)

# Store and engines are asked at most this often, whoever wants to know: anybody may, and it is done with our keys.
PROBE_S = 1.0
# How long a page of metrics waits for their answers, and else has those of the last time: of a worker whose page is not
# there within two seconds all figures would be missing from the page of its server.
PAGE_S_MAX = 1.0


# Settings that bound what a process uses.
LIMITS = (
    "body_bytes_max",
    "body_s_max",
    "connection_age_s",
    "connection_state_bytes_max",
    "connections_max",
    "connections_state_bytes_max",
    "frames_burst_max",
    "frames_per_s",
    "handshake_s_max",
    "memory_bytes_max",
    "outbox_bytes_max",
    "process_state_bytes_max",
    "render_cache_bytes_max",
    "reuse_bytes_max",
    "write_s_max",
)


@dataclass(frozen=True, slots=True)
class Observers:
    """Metrics, the dashboard's history, and the queue that feeds them with ended turns."""

    metrics: Metrics
    history: RecentTurns
    afterwards: Afterwards
    refusals: Sequence[Callable[[str, str, str], None]]
    write_access: Callable[[AccessLine], None] | None
    audit: Audit | None

    def note_refusal(self, transport: str, code: str, request_id: str) -> None:
        """A request was refused before it became a turn."""
        for note in self.refusals:
            note(transport, code, request_id)

    def note_operation(self, event: str, owner: Owner, key_id: str, request_id: str) -> None:
        """An operator has changed an API key."""
        if self.audit is not None:
            self.audit.note_operation(event, owner, key_id, request_id)


@asynccontextmanager
async def open_observers(state: State) -> AsyncIterator[Observers]:
    """Metrics and history always, traces and audit log where they are configured; both drain on the way out."""
    settings, metrics, history = state.settings, Metrics(), RecentTurns()
    metrics.note_limits({name: getattr(settings, name) for name in LIMITS})
    observers: list[Observer] = [metrics.observe, history.observe]
    observers += [UnseenMedia().observe, log_failure]
    if settings.reuse_bytes_max:
        # The others count what it finds.
        observers.insert(0, state.reuse.observe)
    # Needed only where a key limits what is kept in memory.
    state.accounts.on_bounded = lambda: observers.append(state.trim)
    refusals = [metrics.note_refusal, history.note_refusal]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(in_background("loop_lag", metrics.watch_loop))
        if settings.otel_endpoint:
            traces = Traces(settings.otel_endpoint, settings.otel_headers)
            observers.append((await stack.enter_async_context(traces)).observe)
        audit = None
        if settings.audit_log:
            audit = await stack.enter_async_context(Audit(settings.audit_log))
            observers.append(audit.observe)
            refusals.append(audit.note_refusal)
        write_access = None
        if settings.access_log:
            place, log_format = settings.access_log, settings.log_format
            log_file = AccessLog(place, log_format, workers=settings.workers)
            access = await stack.enter_async_context(log_file)
            write_access = access.write
        afterwards = Afterwards(state.store.ledger, observers)
        yield Observers(metrics, history, afterwards, refusals, write_access, audit)


def log_failure(turn: EndedTurn) -> None:
    """A turn that failed is in the log by its ids; one that failed by a mistake of its caller only at `debug`, as every
    refused request."""
    if turn.error is not None:
        level = logging.DEBUG if turn.is_callers_fault else logging.INFO
        what = (turn.entry.turn_id, turn.outcome, turn.error_status, turn.error)
        extra = {"request_id": turn.receipt.request_id}
        log.log(level, "turn %s %s: %d %s", *what, extra=extra)


class UnseenMedia:
    """Says once of each model that it was sent what it cannot see or hear."""

    def __init__(self) -> None:
        self._models: set[str] = set()

    def observe(self, turn: EndedTurn) -> None:
        model = turn.entry.model
        if turn.tally.media_told and model not in self._models:
            self._models.add(model)
            log.warning(
                "model '%s' cannot take in images or audio: they were replaced by a description; "
                "set sees_images = true if it sees images, or unseen = 'refuse' to refuse such requests",
                model,
                extra={"request_id": turn.receipt.request_id},
            )


@runtime_checkable
class EngineWithQueue(Protocol):
    """An engine that has its own queue: the one inside this process."""

    @property
    def load(self) -> tuple[int, int]: ...


class HealthCheck:
    """Whether the store and the engines answer, for `/ready`, `/metrics` and the dashboard."""

    def __init__(
        self, state: State, runner: Runner, observers: Observers, served: ServedModels
    ) -> None:
        self._store = state.store
        self._served = served
        self._observers = observers
        self._peers = None if state.cluster is None else state.cluster.peers
        self._runner = runner
        self._probe: asyncio.Task[dict[str, bool]] | None = None
        self._probe_at = 0.0
        # What was last answered.
        self._checks: dict[str, bool] = {}
        # What each engine answered when it was first asked.
        self.met: dict[str, bool] = {}
        # What is wrong with the names of models, as the engines list them.
        self.misnamed: list[str] = []
        if self._peers is not None:
            self._peers.answer("metrics", lambda worker, body: self._write_own_metrics())

    @property
    def _models(self) -> dict[str, Model]:
        """Those that are served now, by name, without aliases."""
        return {model.name: model for model in self._runner.models.values()}

    async def meet_engines(self) -> None:
        """Ask every engine about itself. One that does not answer is asked again with its first job."""
        await asyncio.gather(*(self._meet(name) for name in self._models))
        for name, model in self._models.items():
            chosen, said = model.context_tokens_set or 0, model.engine.facts.context_tokens
            if said is not None and chosen > said:
                log.warning(
                    "model %s: context_tokens is %d, the engine takes %d", name, chosen, said
                )
        self.misnamed = self._misnamed()

    def _misnamed(self) -> list[str]:
        engines = {name: model.engine for name, model in self._models.items()}
        return list(misnamed(self._served.settings, engines))

    async def _meet(self, name: str) -> None:
        self.met[name] = await self._models[name].engine.is_ready()

    def renew(self) -> None:
        """There are other engines: the next question is asked at once."""
        self._probe = None

    async def check(self) -> dict[str, bool]:
        """What the store and every engine answered when they were last asked, at most a second ago."""
        now = asyncio.get_running_loop().time()
        if self._probe is None or (self._probe.done() and now >= self._probe_at):
            self._probe_at = now + PROBE_S
            self._probe = asyncio.create_task(self._ask_all())
        # Whoever asks may leave; the others wait for the same answer.
        return dict(await asyncio.shield(self._probe))

    async def _ask_all(self) -> dict[str, bool]:
        models = self._models
        engines = [model.engine.is_ready() for model in models.values()]
        answers = await asyncio.gather(self._store.is_ready(), *engines)
        # Of an engine that was away at the start, or that has another model now.
        before, self.misnamed = self.misnamed, self._misnamed()
        for problem in self.misnamed:
            if problem not in before:
                log.warning("%s", problem)
        names = ("store", *(f"engine:{name}" for name in models))
        self._checks = dict(zip(names, answers, strict=True))
        return self._checks

    def replicas(self, checks: Mapping[str, bool]) -> list[EngineStatus]:
        """Each server of an engine that has some, else what the engine last answered."""
        rows: list[EngineStatus] = []
        for name, model in self._models.items():
            engine = model.engine
            if servers := servers_of(engine):
                rows += [server.status(name) for server in servers]
            elif f"engine:{name}" in checks:
                load = engine.load if isinstance(engine, EngineWithQueue) else (None, None)
                rows.append(EngineStatus(name, name, checks[f"engine:{name}"], *load))
        return rows

    async def write_metrics(self) -> bytes:
        """The page that Prometheus reads, of all workers of one parent process."""
        if self._peers is None:
            return await self._write_own_metrics()
        others, own = await asyncio.gather(
            self._peers.ask("metrics", b"", self._peers.siblings), self._write_own_metrics()
        )
        return together([own, *others.values()])

    async def _write_own_metrics(self) -> bytes:
        with suppress(TimeoutError):
            async with asyncio.timeout(PAGE_S_MAX):
                await self._observers.afterwards.drained()
                await self.check()
        rows = self.replicas(self._checks)
        metrics = self._observers.metrics
        for model in self._models.values():
            for server in servers_of(model.engine):
                metrics.count_jobs(server.name, server.choices, server.corrected)
                server.choices.clear()
                server.corrected = 0
        metrics.note_engines(rows)
        return metrics.write()
