"""Do the store and the engines answer, and what do the figures of this process say?"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, runtime_checkable

from msgspec import structs

from segue.engines.queued import servers_of
from segue.observe.metrics import together
from segue.seams.engine_status import EngineStatus
from segue.server.models import ServedModels
from segue.server.names import misnamed
from segue.server.observers import Observers
from segue.server.state import State
from segue.turn.plan import Model

log = logging.getLogger(__name__)

# Store and engines are asked at most this often, however many clients ask: they need no key, and ours are used.
PROBE_S = 1.0
# How long a page of metrics waits for their answers, and else has those of the last time: of a worker whose page is not
# there within two seconds all figures would be missing from the page of its server.
PAGE_S_MAX = 1.0


@runtime_checkable
class EngineWithQueue(Protocol):
    """An engine that has its own queue: the one inside this process."""

    @property
    def load(self) -> tuple[int, int]: ...


class HealthCheck:
    """Whether the store and the engines answer, for `/ready`, `/metrics` and the dashboard."""

    def __init__(self, state: State, served: ServedModels, observers: Observers) -> None:
        self._store = state.store
        self._served = served
        self._observers = observers
        self._peers = state.peers
        self._probe: asyncio.Task[dict[str, bool]] | None = None
        self._probe_at = 0.0
        # What was last answered.
        self._checks: dict[str, bool] = {}
        # What each engine answered when it was first asked.
        self.met: dict[str, bool] = {}
        # What is wrong with the names of models, as the engines list them.
        self.misnamed: list[str] = []
        if self._peers is not None:
            self._peers.on_message("metrics", lambda worker, body: self._write_own_metrics())

    @property
    def _models(self) -> dict[str, Model]:
        """Those that are served now, by name, without aliases."""
        return {model.name: model for model in self._served.models.values()}

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
        return list(misnamed(self._served.settings, self._served.engines))

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
        # A client that asks may leave; the others wait for the same answer.
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

    def servers(self) -> list[EngineStatus]:
        """Every server of the engines, as this process sees it."""
        engines = self._served.engines.items()
        return [server.status(name) for name, engine in engines for server in servers_of(engine)]

    def engines(self, checks: Mapping[str, bool]) -> list[EngineStatus]:
        """The servers of engines by URL, and engines that have none by their kind."""
        kinds = {name: model.engine for name, model in self._served.settings.items()}
        return [
            structs.replace(row, name=kinds.get(row.model, row.name))
            if row.name == row.model
            else row
            for row in self.replicas(checks)
        ]

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
                server.corrected.clear()
                turns, refusals = server.take_sessions()
                metrics.count_sessions(server.name, turns, refusals)
        metrics.note_engines(rows)
        return metrics.write()
