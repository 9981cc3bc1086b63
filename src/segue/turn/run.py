"""Who owns the turns that run in this process?

A `Runner` prepares turns, lets them run, knows them by id, and ends them when the process goes. A turn that runs is a
task of its own: it is heard by sinks that come and go, and it always ends with exactly one terminal event.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from segue.errors import Unavailable
from segue.ids import item_ids
from segue.turn.admit import Models, Plan
from segue.turn.assemble import Assembler
from segue.turn.compact import Kind
from segue.turn.compose import count
from segue.turn.perform import perform
from segue.turn.prepare import prepare
from segue.turn.recall import RenderCache
from segue.turn.running import Running, Sink
from segue.turn.seams import Seals, Turns
from segue.turn.settle import Afterwards, Settled, entry_of
from segue.turn.values import Cancel, Drain, Owner, Tally, Turn
from segue.wire.requests import Create
from segue.wire.response import Response

# Silence is a fault: some clients give up after minutes, some proxies after one (hazards.md F1, F3).
HEARTBEAT_S = 15.0
# A stored turn whose client was lost may go on this long.
UNHEARD_S_MAX = 1800.0
# A rollout whose client never answers ends after this long.
APPEND_S_MAX = 600.0
# After the grace: what a turn may take to end itself.
END_S_MAX = 2.0


class Runner:
    """The turns that run in this process, and what they need."""

    def __init__(
        self,
        models: Models,
        afterwards: Afterwards,
        seals: Seals,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        append_s_max: float = APPEND_S_MAX,
        recall: RenderCache | None = None,
    ) -> None:
        self.models = models
        self.afterwards = afterwards
        self._seals = seals
        self._append_s_max = append_s_max
        self.is_draining = False
        self._heartbeat_s = heartbeat_s
        self._recall = recall or RenderCache(0)
        self._runnings: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._worker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Runner:
        self._worker = asyncio.create_task(self.afterwards.work())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.drain(0)
        await self.afterwards.drained()
        assert self._worker is not None
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)

    @property
    def running_count(self) -> int:
        """How many turns run."""
        return len(self._runnings)

    def find(self, owner: Owner, turn_id: str) -> Running | None:
        """A turn that runs here, if it is this owner's."""
        running = self._runnings.get(turn_id)
        return running if running is not None and running.owner == owner else None

    async def prepare(
        self,
        create: Create,
        *,
        owner: Owner,
        turns: Turns,
        tally: Tally,
        known: Turn | None = None,
        lane: str = "",
        compacts: Kind | None = None,
    ) -> Plan:
        """Everything that may be refused, before a word is said."""
        self._refuse_if_draining()
        plan = await prepare(
            create,
            self.models,
            self._seals,
            owner=owner,
            turns=turns,
            tally=tally,
            known=known,
            lane=lane,
            compacts=compacts,
        )
        self._refuse_if_draining()
        return replace(plan, append_s_max=self._append_s_max)

    def _refuse_if_draining(self) -> None:
        if self.is_draining:
            raise Unavailable("The server is shutting down. Please retry elsewhere or later.")

    async def count_tokens(self, plan: Plan) -> int:
        """How many tokens the engine would be given for this plan."""
        return await count(plan, self._recall)

    def start(self, plan: Plan, turns: Turns, sink: Sink, transport: str) -> Running:
        """Let it run, heard by this sink. Its first events leave before this returns to the loop."""
        seal = partial(self._seals.seal, plan.owner)
        assembler = Assembler(plan.response, item_ids(plan.id), plan.model.reasoning, seal)
        running = Running(plan.owner, assembler, is_stored=plan.is_stored)
        running.attach(sink)
        self._runnings[plan.id] = running
        task = asyncio.create_task(self._run(plan, running, turns, transport))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return running

    async def drain(self, grace_s: float) -> None:
        """Take no new turns; give those that run this long, then end them as failed."""
        self.is_draining = True
        if self._tasks and grace_s > 0:
            await asyncio.wait(tuple(self._tasks), timeout=grace_s)
        for running in tuple(self._runnings.values()):
            running.tell(Drain())
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=END_S_MAX)

    async def _run(self, plan: Plan, running: Running, turns: Turns, transport: str) -> None:
        running.publish(running.assembler.start())
        pulse = Pulse(running, self._heartbeat_s)
        try:
            await perform(plan, running, turns, self._recall)
        finally:
            pulse.stop()
            del self._runnings[plan.id]
            running.publish([running.assembler.end()])
            plan.tally.mark("sent")
        await self.afterwards.put(_settled(plan, running.response, transport))


def _settled(plan: Plan, response: Response, transport: str) -> Settled:
    entry = entry_of(plan.owner, response)
    assert entry is not None, "a turn is settled once it has ended"
    return Settled(entry, plan.tally, transport, response.previous_response_id, plan.lane)


class Pulse:
    """Breaks a turn's silence, and ends a turn that nobody has heard for too long."""

    __slots__ = ("_every_s", "_running", "_timer", "_unheard_since")

    def __init__(self, running: Running, every_s: float) -> None:
        self._running = running
        self._every_s = every_s
        self._unheard_since: float | None = None
        self._timer = asyncio.get_running_loop().call_later(every_s, self._beat)

    def stop(self) -> None:
        """The turn is over."""
        self._timer.cancel()

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due_at = self._running.published_at + self._every_s
        if due_at <= loop.time():
            self._running.publish([self._running.assembler.heartbeat()])
            due_at = loop.time() + self._every_s
        if self._running.is_heard:
            self._unheard_since = None
        elif self._unheard_since is None:
            self._unheard_since = loop.time()
        elif loop.time() - self._unheard_since > UNHEARD_S_MAX:
            self._running.tell(Cancel())
        self._timer = loop.call_at(due_at, self._beat)
