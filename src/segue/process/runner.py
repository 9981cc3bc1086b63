"""Who owns the turns that run in this process?

A `Runner` prepares turns, lets them run, and ends them when the process goes. A turn that runs is a task of its own:
its subscribers come and go, and it always ends with exactly one terminal event. What only some requests need has its
own file: idempotency keys, conversations, following a turn again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from msgspec import structs

from segue.aio import cancel_all, in_background, spawn
from segue.errors import ApiError, CallerError, Fenced, TooMany, TryLater, Unavailable
from segue.ids import item_ids
from segue.memory.budget import Memory, sent_bytes
from segue.process.afterwards import Afterwards, EndedTurn
from segue.process.beginnings import Beginnings, shutting_down
from segue.process.conversations import ConversationTurns, acquire, join
from segue.process.event_writer import EventWriter
from segue.process.idempotency import Repeats
from segue.process.pace import BACKGROUND_S_MAX, HEARTBEAT_S, Heartbeat, StartLimit
from segue.process.patient_turns import PatientTurns
from segue.process.queued import with_request
from segue.process.registry import OtherWorkers, TurnRegistry
from segue.seams.history import Round, Turn
from segue.seams.store import Conversations, EventLog, IdempotencyKeys, Turns
from segue.turn.admit import check_unseen
from segue.turn.assemble import Assembler
from segue.turn.checks import check_items
from segue.turn.commit import commit, entry_of, weigh_turn
from segue.turn.compact import CompactionKind
from segue.turn.compose import count
from segue.turn.decide import End
from segue.turn.loop import TurnLoop
from segue.turn.notices import Drain
from segue.turn.plan import Caller, FirstPrompt, Model, Models, Plan, Span, Tally
from segue.turn.prepare import prepare
from segue.turn.resources import Resources
from segue.turn.running import Running, Subscriber
from segue.wire.codec import check_item_ids
from segue.wire.items import Item
from segue.wire.requests import Create
from segue.wire.response import NO_USAGE, Response

log = logging.getLogger(__name__)

# After the grace period: how long a turn may take to end itself.
END_S_MAX = 2.0
# Background turns wait for their engine inside the process; beyond this a client must come back later.
BACKGROUND_MAX = 1_000
# How long to wait before a failed write to the store is retried; doubled up to a minute.
RETRY_S, RETRY_S_MAX = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Records:
    """Where turns are recorded beside their own store."""

    afterwards: Afterwards
    log: EventLog
    idempotency_keys: IdempotencyKeys
    conversations: Conversations


class Runner:
    """The turns that run in this process, and what they need."""

    def __init__(
        self,
        resources: Resources,
        records: Records,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        background_s_max: float = BACKGROUND_S_MAX,
        outlives: bool = True,
    ) -> None:
        """`outlives`: the store outlives this process, and so do turns that are queued in it."""
        self.resources = resources
        self.is_draining = False
        self.memory = Memory()
        self.heartbeat_s = heartbeat_s
        self.background_s_max = background_s_max
        self._outlives = outlives
        self.records = records
        self._start_limit = StartLimit()
        self._beginnings = Beginnings()
        self._tasks: set[asyncio.Task[None]] = set()
        # The turns that others end, or whose key or conversation they give away, if this process seems dead.
        self._leased: set[str] = set()
        # The tasks of turns that are queued, by id, and those that this process has let go of.
        self._queued: dict[str, asyncio.Task[None]] = {}
        self._left: set[str] = set()
        # Those of the queued turns whose beginning is being written: the store may say already that they run.
        self._starting: set[str] = set()
        # Writes that the store has still to take; a stop does not wait for them.
        self._retries: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()
        self.registry = registry = TurnRegistry(records.log)
        self._repeats = Repeats(records.idempotency_keys, records.log, registry, self._spawn)
        self.find, self.reach, self.look = registry.find, registry.reach, registry.look
        self.follow, self.forget = registry.follow, registry.forget
        self.is_fenced = registry.fenced.__contains__

    def meet(self, others: OtherWorkers) -> None:
        """There are other workers: their turns can be followed here."""
        self.registry.others = others

    async def __aenter__(self) -> Runner:
        afterwards = in_background("ended_turns", self.records.afterwards.work)
        await self._stack.enter_async_context(afterwards)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.drain(0)
        await self.records.afterwards.drained()
        await self._stack.aclose()
        await cancel_all(self._retries)

    @property
    def models(self) -> Models:
        return self.resources.models

    @property
    def running_count(self) -> int:
        return len(self.registry.running)

    # --- beginning ---

    async def begin(
        self, create: Create, caller: Caller, tally: Tally, subscriber: Subscriber, transport: str
    ) -> Running:
        """A turn for this request; or the turn that its idempotency key stands for already."""
        with self._beginnings.enter():
            await self._start_limit.enter()
            start = partial(self._begin, create, caller, tally, subscriber, transport)
            if create.idempotency_key is None:
                return await start(self.registry.new_id())
            return await self._repeats.begin(create, caller.owner, caller.turns, subscriber, start)

    async def _begin(
        self,
        create: Create,
        caller: Caller,
        tally: Tally,
        subscriber: Subscriber | None,
        transport: str,
        turn_id: str,
        queued: Turn | None = None,
        first: int = 0,
    ) -> Running:
        conversation: ConversationTurns | None = None
        if create.conversation is not None:
            conversation = await self._acquire(create, caller, turn_id)
            caller = replace(caller, turns=conversation, joined=conversation.joined)
        try:
            plan = await self._prepare(create, caller, tally, turn_id)
            if queued is not None:
                created_at = queued.response.created_at
                response = structs.replace(plan.response, created_at=created_at)
                plan = replace(plan, response=response)
            if plan.response.background:
                await self._queue(plan, caller)
            return self.start(plan, caller.turns, subscriber, transport, conversation, first)
        except BaseException:
            if conversation is not None:
                await asyncio.shield(self._release(conversation, turn_id))
            raise

    async def prepare(
        self, create: Create, caller: Caller, tally: Tally, compacts: CompactionKind | None = None
    ) -> Plan:
        """A plan, or a refusal. It holds a slot of the caller's quota: call `give_up` if you do not start the plan."""
        with self._beginnings.enter():
            return await self._prepare(create, caller, tally, self.registry.new_id(), compacts)

    async def _prepare(
        self,
        create: Create,
        caller: Caller,
        tally: Tally,
        turn_id: str,
        compacts: CompactionKind | None = None,
    ) -> Plan:
        _refuse_if(self.is_draining)
        items = len(create.input) if isinstance(create.input, list) else 1
        size = sent_bytes(tally.bytes_received, items)
        with self.memory.preparing(size):
            plan = await prepare(create, caller, tally, self.resources, turn_id, compacts)
        try:
            _refuse_if(self.is_draining)
        except Unavailable:
            self.give_up(plan)
            raise
        return plan

    def give_up(self, plan: Plan) -> None:
        """Release what a plan holds that is not started."""
        if plan.quota is not None:
            plan.quota.release()

    async def read(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        """These items with the contents of their URLs, where the operator allows that."""
        hosted = self.resources.hosted
        return items if hosted is None else await hosted.fetch(items)

    async def joining(self, create: Create, caller: Caller) -> Caller:
        """The caller, with the conversation that the request names."""
        joined = await join(create, caller.owner, caller.turns, self.records.conversations)
        if joined is None:
            return caller
        turns = ConversationTurns(caller.turns, self.records.conversations, joined)
        return replace(caller, turns=turns, joined=joined)

    async def count_tokens(self, plan: Plan) -> int:
        """How many tokens the engine would be given for this plan."""
        hosted = self.resources.hosted
        if plan.resolved.is_hosted and hosted is not None:
            plan = await hosted.read_files(plan)
        return await count(plan, self.resources.prompt_cache)

    @property
    def background_room(self) -> int:
        """How many more turns may run in the background."""
        return BACKGROUND_MAX - sum(one.is_background for one in self.registry.running.values())

    async def _queue(self, plan: Plan, caller: Caller) -> None:
        """A background response is stored before the client hears that it is queued."""
        try:
            if self.background_room <= 0:
                raise TooMany(f"At most {BACKGROUND_MAX} responses run in the background.")
            turn = _unanswered(plan, plan.response)
            if self._outlives:
                create, seals = plan.resolved.create, self.resources.seals
                turn = await with_request(turn, create, caller.key, seals)
            await caller.turns.save(turn)
        except BaseException:
            self.give_up(plan)
            raise

    async def resume(self, turn: Turn, create: Create, caller: Caller) -> None:
        """Run a turn that another process had queued; `TryLater` if it must wait, any other error if it is refused."""
        with self._beginnings.enter():
            first = await self._next_number(turn)
            await self._begin(create, caller, Tally(), None, "http", turn.id, turn, first)

    async def refuse(self, turn: Turn, error: ApiError, turns: Turns) -> None:
        """End a turn as failed that another process had queued and that cannot be run any more."""
        first = await self._next_number(turn)
        assembler = Assembler(turn.response, item_ids(turn.id), first=first)
        events = assembler.start()
        response = assembler.conclude(End("failed", error=error), NO_USAGE, int(time.time()))
        await turns.save(replace(turn, response=response, request=b""))
        await self.records.log.append(turn.owner, turn.id, [*events, assembler.end()])

    async def _next_number(self, turn: Turn) -> int:
        """The number of the event after those that are in the log."""
        logged = await self.records.log.read_after(turn.owner, turn.id, -1)
        return logged[-1].number + 1 if logged else 0

    def start(
        self,
        plan: Plan,
        turns: Turns,
        subscriber: Subscriber | None,
        transport: str,
        conversation: ConversationTurns | None = None,
        first: int = 0,
    ) -> Running:
        """Let it run. Its first events leave before this returns to the event loop."""
        seal = partial(self.resources.seals.seal, plan.owner)
        running = Running(
            plan.owner,
            Assembler(plan.response, item_ids(plan.id), plan.model.reasoning, seal, first),
            is_stored=plan.is_stored,
            is_rollout=plan.is_rollout,
            can_be_steered=plan.can_be_steered,
        )
        running.check = partial(_check_later, plan.model, conversation is not None)
        # One that was taken over from the queue was sent to another process.
        sent, items = plan.tally.bytes_received, len(plan.resolved.given)
        weighed = sent_bytes(sent, items) if sent else weigh_turn(_given(plan), plan.resolved)
        running.input_bytes = weighed
        if plan.is_stored and (plan.response.background or plan.key):
            self.log_events(running)
        if subscriber is not None:
            running.attach(subscriber)
        self.registry.running[plan.id] = running
        if plan.is_stored and (plan.response.background or plan.key or conversation):
            self._leased.add(plan.id)
        self._spawn(self._run(plan, running, turns, transport, conversation))
        return running

    def _spawn(
        self, work: Coroutine[None, None, None], tasks: set[asyncio.Task[None]] | None = None
    ) -> None:
        """A task of its own: a turn that fails must not end its neighbours, as in a task group. It is waited for at
        shutdown."""
        spawn(work, self._tasks if tasks is None else tasks)

    def log_events(self, running: Running) -> None:
        """Write the events of this turn to the log, from the oldest that is still known."""
        running.log_events(EventWriter(self.records.log, running.owner, running.id))

    # --- running ---

    async def _run(
        self,
        plan: Plan,
        running: Running,
        turns: Turns,
        transport: str,
        conversation: ConversationTurns | None,
    ) -> None:
        heartbeat = Heartbeat(running, self.heartbeat_s)
        if running.is_background:
            turns = PatientTurns(turns, lambda: self.is_draining)
            running.on_begin = partial(self._leave_queue, plan, running, turns, heartbeat)
            task = asyncio.current_task()
            if self._outlives and task is not None:
                self._queued[plan.id] = task
                if self.is_draining:
                    self._let_go(self._starting)
        loop = TurnLoop(plan, running, turns, self.resources)
        try:
            await loop.run()
        except asyncio.CancelledError:
            if plan.id not in self._left:
                raise
        finally:
            heartbeat.stop()
            self._queued.pop(plan.id, None)
            if plan.id in self._left:
                await self._leave(plan, running)
            else:
                await self._end(plan, running, turns, transport, conversation, loop.first_prompt)

    async def _end(
        self,
        plan: Plan,
        running: Running,
        turns: Turns,
        transport: str,
        conversation: ConversationTurns | None,
        prompt: FirstPrompt | None,
    ) -> None:
        """The turn is saved: release what it holds, send its terminal event, and keep what may be asked for again."""
        if conversation is not None:
            await self._release(conversation, plan.id)
        response = running.assembler.response
        if plan.quota is not None:
            plan.quota.release(response.usage.total_tokens if response.usage else 0)
        running.publish([running.assembler.end()])
        sent_at = perf_counter()
        if prompt is not None and self.resources.report_prompt is not None:
            # Before anything else is awaited: who has the terminal event and asks for the report finds that it is made.
            await self.resources.report_prompt(prompt, running.held_bytes)
        plan.tally.spans.append(Span("send", sent_at, sent_at))
        if running.event_writer is not None:
            await running.event_writer.finish()
        if plan.key:
            await self._repeats.ended(plan, running)
        elif plan.is_stored and running.event_writer is None and transport != "http":
            # Its last events may be on a connection that is lost, which is not noticed yet.
            self.registry.keep_ended(running)
        del self.registry.running[plan.id]
        self.registry.fenced.discard(plan.id)
        self._leased.discard(plan.id)
        if running.unsaved is not None and running.is_background:
            self._retry(partial(turns.save, running.unsaved))
        await self.records.afterwards.put(_ended(plan, running, transport, sent_at))

    async def _leave_queue(
        self, plan: Plan, running: Running, turns: Turns, heartbeat: Heartbeat
    ) -> None:
        """The engine begins with a turn that was queued; from here on its time counts."""
        if self._outlives:
            begun = structs.replace(plan.response, status="in_progress")
            await self._save_begun(_unanswered(plan, begun), turns)
        self._queued.pop(plan.id, None)
        heartbeat.end_after(self.background_s_max)
        running.publish([running.assembler.leave_queue()])

    async def _save_begun(self, turn: Turn, turns: Turns) -> None:
        """Nothing of it leaves before the store has this: until then another process may take it over. A stop waits for
        it: who takes turns over leaves alone what runs."""
        self._starting.add(turn.id)
        try:
            await turns.save(turn)
        except (Fenced, TryLater):
            # Another process has it, or will: this one stops, and the store is away.
            self._left.add(turn.id)
            raise asyncio.CancelledError from None
        finally:
            self._starting.discard(turn.id)

    async def _leave(self, plan: Plan, running: Running) -> None:
        """Let go of a turn that is queued in the store: another process runs it."""
        self._left.discard(plan.id)
        self.give_up(plan)
        if running.event_writer is not None:
            await running.event_writer.finish()
        del self.registry.running[plan.id]
        self._leased.discard(plan.id)
        running.abandon()

    def _retry(self, write: Callable[[], Awaitable[None]]) -> None:
        """A client waits for this to be written, and the store still says otherwise."""
        self._spawn(_until_written(write), self._retries)

    # --- conversations ---

    async def _acquire(self, create: Create, caller: Caller, turn_id: str) -> ConversationTurns:
        """The conversation, locked for this turn. A client that leaves meanwhile must not keep it locked."""
        acquiring = asyncio.create_task(
            acquire(create, caller.owner, caller.turns, self.records.conversations, turn_id)
        )
        try:
            return await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            self._spawn(self._give_back(acquiring, turn_id))
            raise

    async def _give_back(self, acquiring: asyncio.Task[ConversationTurns], turn_id: str) -> None:
        try:
            conversation = await acquiring
        except ApiError:
            return
        await self._release(conversation, turn_id)

    async def _release(self, conversation: ConversationTurns, turn_id: str) -> None:
        """Unlock the conversation; where the store cannot be reached now, soon."""
        try:
            await conversation.release(turn_id)
        except ApiError:
            self._retry(partial(conversation.release, turn_id))

    # --- ending ---

    def fenced(self) -> None:
        """This process stood still, and others have ended what it ran and given away what it held."""
        self._let_go()
        for turn_id in self._leased - self._left:
            self.registry.fenced.add(turn_id)
            self.registry.running[turn_id].notify(Drain())

    async def drain(self, grace_s: float) -> None:
        """Take no new turns; give those that run this long, then end them as failed."""
        self.is_draining = True
        self._let_go(self._starting)
        await self._wait_for_ends(grace_s)
        self._beginnings.refuse()
        for running in tuple(self.registry.running.values()):
            running.notify(Drain())
        await self._wait_for_ends(END_S_MAX, with_others=False)

    def _let_go(self, kept: Container[str] = ()) -> None:
        """Turns that are queued are for another process, or for the next one; these are kept."""
        for turn_id, task in self._queued.items():
            if turn_id not in kept:
                self._left.add(turn_id)
                task.cancel()

    async def _wait_for_ends(self, s_max: float, *, with_others: bool = True) -> None:
        """Until no request is being prepared and no turn runs here, or is followed from here; at most so long."""
        others = self.registry.others if with_others else None
        with suppress(TimeoutError):
            async with asyncio.timeout(s_max):
                while waiting := [
                    *self._beginnings.settled,
                    *self._tasks,
                    *(others.tasks if others else ()),
                ]:
                    await asyncio.wait(waiting)


def _unanswered(plan: Plan, response: Response) -> Turn:
    """A turn to which nothing was answered yet. What it holds in memory is counted as that of a running turn."""
    return replace(commit(plan, response, _given(plan), plan.resolved.open_calls), bytes=0)


def _given(plan: Plan) -> tuple[Round, ...]:
    return (*plan.resolved.earlier, Round(plan.resolved.given))


def _refuse_if(is_draining: bool) -> None:
    if is_draining:
        raise shutting_down()


async def _until_written(write: Callable[[], Awaitable[None]]) -> None:
    pause_s = RETRY_S
    while True:
        await asyncio.sleep(pause_s)
        try:
            await write()
            return
        except Fenced:
            return
        except ApiError:
            pause_s = min(2 * pause_s, RETRY_S_MAX)


def _check_later(model: Model, is_joined: bool, items: tuple[Item, ...], tally: Tally) -> None:
    """Items that come later are checked as those that came first."""
    check_items(items)
    if is_joined:
        check_item_ids(items)
    check_unseen(items, model, tally)


def _ended(plan: Plan, running: Running, transport: str, sent_at: float) -> EndedTurn:
    response = running.assembler.response
    entry = running.turn.usage if running.turn is not None else None
    if entry is None or entry.status != response.status:
        entry = entry_of(plan.owner, response, is_hosted=plan.resolved.is_hosted)
    assert entry is not None, "a turn is settled once it has ended"
    parent_id, error = response.previous_response_id, running.error
    # One that failed is not always a turn, but continues its parent's chain.
    named = running.turn or plan.resolved.parent
    chain = (named and named.chain) or plan.id
    place = (transport, sent_at, parent_id, plan.lane)
    if error is None:
        return EndedTurn(entry, plan.tally, *place, chain=chain)
    is_callers = isinstance(error, CallerError)
    return EndedTurn(entry, plan.tally, *place, error.code, error.status, is_callers, chain)
