"""The real pipeline without a port: a `Runner` with real stores, a real dialect, and an engine that notes its prompts.

A `Stage` is one process: it can be asked for turns on a connection of its own or on the process's store, and it tells
exactly which ids reached the engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segue.engines.scripted import Script, ScriptedEngine
from segue.process.afterwards import Afterwards, EndedTurn
from segue.process.chains import Lineages
from segue.process.runner import Records, Runner
from segue.resent.render_cache import RenderCache
from segue.seals.cipher import RingSeals, new_key
from segue.seams.model import Dialect, Engine, EngineFacts, Finish, Ids, Job, Piece
from segue.seams.prompt import Tokens
from segue.seams.store import Turns
from segue.stores.memory import MemoryConversations, MemoryEventLog, MemoryIdempotencyKeys
from segue.stores.memory_turns import LayeredTurns, MemoryTurns
from segue.stores.sqlite import SqliteStore
from segue.turn.plan import Arrival, Caller, Model, Receipt, Tally
from segue.turn.resources import Resources
from segue.turn.running import Running
from segue.wire.codec import decode_create
from segue.wire.events import Event
from tests.contracts.engine import chatml

OWNER = "ada"
WAIT_S = 20
BUDGET = 256 * 1024 * 1024


@dataclass
class RecordingEngine:
    """An engine around another one that keeps every job and what was sampled for it, and can be told to fail."""

    inner: Engine
    jobs: list[Job] = field(default_factory=list)
    # Jobs that asked for no output: warm-ups, where the engine only reads.
    warmed: list[Job] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    # Raised by the next job, after this many pieces.
    fault: Exception | None = None
    fault_after: int = 0

    @property
    def can_constrain(self) -> bool:
        return self.inner.can_constrain

    @property
    def grammars(self) -> frozenset[str]:
        return self.inner.grammars

    @property
    def facts(self) -> EngineFacts:
        return self.inner.facts

    async def is_ready(self) -> bool:
        return await self.inner.is_ready()

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        fault, after = self.fault, self.fault_after
        self.fault = None
        ids: list[int] = []
        if job.output_tokens_max != 0:
            self.jobs.append(job)
            self.sampled.append(ids)
        else:
            self.warmed.append(job)
        async with aclosing(self.inner.sample(job)) as pieces:
            count = 0
            async for piece in pieces:
                if fault is not None and (count >= after or isinstance(piece, Finish)):
                    raise fault
                count += 1
                if isinstance(piece, Ids):
                    ids.extend(piece.ids)
                yield piece

    @property
    def prompt(self) -> list[int]:
        """The ids of the last prompt."""
        return flat(self.jobs[-1])


def flat(job: Job) -> list[int]:
    """The ids of a job's prompt."""
    assert isinstance(job.prompt, Tokens)
    return job.prompt.flat().tolist()


class Listener:
    """A subscriber with room for everything."""

    can_catch_up = False

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_full = False
        self.is_over = asyncio.Event()

    def attached(self, running: Running) -> None:
        pass

    def lose(self) -> None:
        pass

    def deliver(self, events: Sequence[Event]) -> None:
        self.events += events
        if events[-1].is_terminal:
            self.is_over.set()

    async def all(self) -> list[dict[str, Any]]:
        """Every event of the turn, once it has ended."""
        async with asyncio.timeout(WAIT_S):
            await self.is_over.wait()
        return [json.loads(event.data) for event in self.events]


@dataclass(frozen=True)
class Told:
    """A turn that is over: its events and what it cost."""

    events: list[dict[str, Any]]
    tally: Tally

    @property
    def response(self) -> dict[str, Any]:
        found: dict[str, Any] = self.events[-1]["response"]
        return found


@dataclass
class Connection:
    """The cache of one connection, before the process's store."""

    near: MemoryTurns
    turns: Turns


@dataclass
class Stage:
    """One process."""

    runner: Runner
    records: Records
    store: Turns
    engine: RecordingEngine
    dialect: Dialect
    settled: list[EndedTurn]

    def connect(self) -> Connection:
        near = MemoryTurns(BUDGET)
        return Connection(near, LayeredTurns(near, self.store))

    async def start(
        self, connection: Connection | None, listener: Listener, **fields: Any
    ) -> Running:
        """Prepare a turn and let it run; refused where the server would refuse it."""
        create = decode_create(json.dumps({"model": "m", **fields}).encode())
        turns = self.store if connection is None else connection.turns
        known = None
        if connection is not None and create.previous_response_id is not None:
            known = connection.near.held(OWNER, create.previous_response_id)
        lane = "" if connection is None else "default"
        caller = Caller(OWNER, turns, known, lane=lane)
        arrival = Arrival(create, caller, Receipt("test", is_streamed=True))
        return await self.runner.begin(arrival, listener)

    async def turn(self, connection: Connection | None = None, **fields: Any) -> Told:
        """One whole turn."""
        listener = Listener()
        running = await self.start(connection, listener, **fields)
        return Told(await listener.all(), running.tally)


@asynccontextmanager
async def staged(
    path: Path,
    script: Script | None = None,
    *,
    tokens_per_s: float = 0,
    context_tokens: int = 100_000,
    heartbeat_s: float = 15,
    background_s_max: float = 3600,
    wrap: Callable[[Turns], Turns] = lambda turns: turns,
) -> AsyncIterator[Stage]:
    """A process on this database; the model has two names."""
    sqlite = await SqliteStore.open(path, durability="relaxed")
    try:
        dialect = chatml()
        engine = RecordingEngine(ScriptedEngine(dialect, script, tokens_per_s))
        model = Model("m", engine, dialect, context_tokens)
        store = LayeredTurns(MemoryTurns(BUDGET, stored_only=True), wrap(sqlite.turns))
        settled: list[EndedTurn] = []
        afterwards = Afterwards(sqlite.ledger, [settled.append])
        records = Records(
            afterwards, MemoryEventLog(BUDGET), MemoryIdempotencyKeys(), MemoryConversations(BUDGET)
        )
        lineages = Lineages()
        resources = Resources(
            {"m": model, "alias": model},
            RingSeals([new_key()]),
            RenderCache(0),
            trace_lineage=lineages.trace,
            drop_lineage=lineages.drop,
        )
        limits = {"heartbeat_s": heartbeat_s, "background_s_max": background_s_max}
        async with Runner(resources, records, **limits) as runner:
            yield Stage(runner, records, store, engine, dialect, settled)
    finally:
        await sqlite.close()
