"""Who owns the turns that run in this process?

A `Runner` prepares turns, lets them run, and ends them when the process goes. A turn that runs is a task of its own:
its subscribers come and go, and it always ends with exactly one terminal event. What only some requests need has its
own file: idempotency keys, conversations, following a turn again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple

from msgspec import structs

from segue.aio import cancel_all, in_background, spawn
from segue.errors import (
    ApiError,
    CallerError,
    Fenced,
    ServerFault,
    TooMany,
    TryLater,
)
from segue.ids import item_ids
from segue.memory.budget import Memory, MemoryRoom, sent_bytes
from segue.process.afterwards import Afterwards, EndedTurn
from segue.process.beginnings import Beginnings, shutting_down
from segue.process.conversations import LockedConversation, acquire, join, unlock
from segue.process.event_writer import EventWriter
from segue.process.idempotency import Repeats
from segue.process.pace import BACKGROUND_S_MAX, HEARTBEAT_S, Heartbeat, StartLimit
from segue.process.patient_save import save_patiently
from segue.process.registry import OtherWorkers, TurnRegistry
from segue.process.sealed_requests import with_request
from segue.seams.access import Room
from segue.seams.history import Owner, Round, Turn
from segue.seams.store import Conversations, EventLog, IdempotencyKeys, Turns
from segue.turn.admit import check_unseen
from segue.turn.assemble import Assembler
from segue.turn.checks import check_items
from segue.turn.commit import commit, entry_of, weigh_turn
from segue.turn.compose import count
from segue.turn.decide import End
from segue.turn.loop import Save, TurnLoop
from segue.turn.notices import Drain
from segue.turn.plan import Arrival, Caller, Model, Models, Plan, Receipt, Span
from segue.turn.prepare import prepare
from segue.turn.resources import Resources
from segue.turn.running import Running, Subscriber
from segue.wire.codec import check_item_ids
from segue.wire.items import Item, contains_media, weigh
from segue.wire.requests import Create
from segue.wire.response import NO_USAGE, Response

log = logging.getLogger(__name__)

# After the grace period: how long a turn may take to end itself.
END_S_MAX = 2.0
# Background turns wait for their engine inside the process; beyond this a client must come back later.
BACKGROUND_MAX = 1_000
# How long to wait before a failed write to the store is retried; doubled up to a minute.
RETRY_S, RETRY_S_MAX = 1.0, 60.0
RETRIES_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Records:
    """Where turns are recorded beside their own store."""

    afterwards: Afterwards
    log: EventLog
    idempotency_keys: IdempotencyKeys
    conversations: Conversations


class TakenOver(NamedTuple):
    """What a turn keeps that another process had queued."""

    created_at: int
    # The number of the event after those that are in the log.
    next_number: int


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
        memory: Memory | None = None,
    ) -> None:
        """`outlives`: the store outlives this process, and so do turns that are queued in it."""
        self.resources = resources
        self.is_draining = False
        self._memory = memory or Memory()
        self.heartbeat_s = heartbeat_s
        self.background_s_max = background_s_max
        self._outlives = outlives
        self.records = records
        self._start_limit = StartLimit()
        self._beginnings = Beginnings()
        # What a stop waits for: turns, and what releases a key or a conversation.
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
        self.registry = TurnRegistry(records.log)
        self._repeats = Repeats(
            records.idempotency_keys, records.log, self.registry, self._tasks, self._retry_a_few
        )

    def connect_workers(self, others: OtherWorkers) -> None:
        """There are other workers: their turns can be followed here."""
        self.registry.others = others

    def reload(self, resources: Resources, background_s_max: float) -> None:
        """New turns have these; those that run do not notice."""
        self.resources = resources
        self.background_s_max = background_s_max

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

    async def begin(self, arrival: Arrival, subscriber: Subscriber) -> Running:
        """A turn for this request; or the turn that its idempotency key stands for already."""
        with self._beginnings.enter():
            await self._start_limit.enter()
            if arrival.create.idempotency_key is None:
                return await self._begin_as(arrival, subscriber, self.registry.new_id())
            begin_as = partial(self._begin_as, arrival, subscriber)
            return await self._repeats.begin(arrival, subscriber, begin_as)

    async def compact(self, arrival: Arrival, subscriber: Subscriber) -> tuple[Plan, Running]:
        """A turn that writes a summary instead of an answer, and its plan."""
        with self._beginnings.enter(), self._room_for(arrival) as room:
            plan = await self._prepare(arrival, self.registry.new_id(), room)
            return plan, self._start(plan, subscriber)

    async def count_tokens(self, arrival: Arrival) -> int:
        """How many tokens the engine would be given for this request."""
        caller = arrival.caller
        conversations = self.records.conversations
        joined = await join(arrival.create, caller.owner, caller.turns, conversations, self._memory)
        if joined is not None:
            arrival = structs.replace(arrival, caller=structs.replace(caller, joined=joined))
        with self._room_for(arrival) as room:
            with self._beginnings.enter():
                plan = await self._prepare(arrival, self.registry.new_id(), room)
            try:
                hosted = self.resources.hosted
                if plan.resolved.is_hosted and hosted is not None:
                    plan = await hosted.load().read_files(plan)
                return await count(plan, self.resources.prompt_cache)
            finally:
                self._give_up(plan)

    async def _begin_as(
        self,
        arrival: Arrival,
        subscriber: Subscriber | None,
        turn_id: str,
        taken_over: TakenOver | None = None,
    ) -> Running:
        """Prepare a turn and let it run under this id."""
        conversation: LockedConversation | None = None
        if arrival.create.conversation is not None:
            conversation = await self._acquire(arrival, turn_id, is_new=taken_over is None)
            caller = structs.replace(arrival.caller, joined=conversation.joined)
            arrival = structs.replace(arrival, caller=caller)
        try:
            with self._room_for(arrival) as room:
                plan = await self._make_ready(await self._prepare(arrival, turn_id, room))
                if taken_over is not None:
                    response = structs.replace(plan.response, created_at=taken_over.created_at)
                    plan = structs.replace(plan, response=response)
                if plan.response.background:
                    await self._queue(plan, is_new=taken_over is None)
                return self._start(plan, subscriber, conversation, taken_over)
        except BaseException:
            if conversation is not None:
                await asyncio.shield(self._release(conversation, turn_id))
            raise

    def _room_for(self, arrival: Arrival) -> MemoryRoom:
        """Memory for a request until its turn runs, which counts what it holds."""
        _refuse_if(self.is_draining)
        sent = arrival.create.input
        items = len(sent) if isinstance(sent, list) else 1
        size = sent_bytes(arrival.receipt.bytes_read, items)
        if (joined := arrival.caller.joined) is not None:
            size += weigh(joined.new_items)
        return self._memory.preparing(size)

    async def _prepare(self, arrival: Arrival, turn_id: str, room: MemoryRoom) -> Plan:
        """A plan, or a refusal. It holds a slot of the caller's quota: call `_give_up` if you do not start it."""
        plan = await prepare(arrival, self.resources, turn_id, room)
        try:
            _refuse_if(self.is_draining)
            # References may stand for much more than was sent.
            if (more := plan.resolved.given_bytes - room.bytes) > 0:
                await room.take(more)
        except BaseException:
            self._give_up(plan)
            raise
        return plan

    async def _make_ready(self, plan: Plan) -> Plan:
        """The plan, with what its hosted tools need made ready; a request that is only counted needs nothing."""
        hosted = self.resources.hosted
        if hosted is None or not plan.generates or not plan.resolved.head.tools.hosted:
            return plan
        try:
            return await hosted.load().prepare(plan)
        except BaseException:
            self._give_up(plan)
            raise

    def _give_up(self, plan: Plan) -> None:
        """Release what a plan holds that is not started."""
        if (quota := plan.arrival.caller.quota) is not None:
            quota.release()
        self._leave_tools(plan)

    def _leave_tools(self, plan: Plan) -> None:
        """Nobody waits until its hosted tools have let go of what they made ready."""
        for leave in plan.leaves:
            spawn(leave(), self._tasks)

    async def read(self, owner: Owner, items: tuple[Item, ...], room: Room) -> tuple[Item, ...]:
        """These items with the contents of this owner's files, and of their URLs, where the operator allows that."""
        hosted = self.resources.hosted
        if hosted is None or not contains_media(items):
            return items
        return await hosted.load().fetch(owner, items, room)

    @property
    def background_room(self) -> int:
        """How many more turns may run in the background."""
        return BACKGROUND_MAX - sum(
            running.is_background for running in self.registry.running.values()
        )

    async def _queue(self, plan: Plan, *, is_new: bool) -> None:
        """A background response is stored before the client hears that it is queued."""
        caller = plan.arrival.caller
        turn = None
        try:
            if self.background_room <= 0:
                raise TooMany(f"At most {BACKGROUND_MAX} responses run in the background.")
            turn = _unanswered(plan, plan.response)
            if self._outlives:
                create = plan.arrival.create
                turn = await with_request(turn, create, caller.key, self.resources.seals)
            await caller.turns.save(turn)
        except BaseException:
            self._give_up(plan)
            if turn is not None and is_new:
                # It may be written, though the answer was lost, and would be run by the next process.
                self._retry_a_few(partial(caller.turns.delete, plan.owner, plan.id))
            raise

    async def resume(self, turn: Turn, create: Create, caller: Caller) -> None:
        """Run a turn that another process had queued; `TryLater` if it must wait, any other error if it is refused."""
        with self._beginnings.enter():
            taken_over = TakenOver(turn.response.created_at, await self._next_number(turn))
            await self._begin_as(Arrival(create, caller, Receipt()), None, turn.id, taken_over)

    async def refuse(self, turn: Turn, error: ApiError, turns: Turns) -> None:
        """End a turn as failed that another process had queued and that cannot be run any more."""
        assembler = Assembler(turn.response, item_ids(turn.id), first=await self._next_number(turn))
        events = assembler.start()
        response = assembler.conclude(End("failed", error=error), NO_USAGE, int(time.time()))
        await turns.save(structs.replace(turn, response=response, request=b""))
        await self.records.log.append(turn.owner, turn.id, [*events, assembler.end()])

    async def _next_number(self, turn: Turn) -> int:
        """The number of the event after those that are in the log."""
        logged = await self.records.log.read_after(turn.owner, turn.id, -1)
        return logged[-1].number + 1 if logged else 0

    def _start(
        self,
        plan: Plan,
        subscriber: Subscriber | None,
        conversation: LockedConversation | None = None,
        taken_over: TakenOver | None = None,
    ) -> Running:
        """Let it run. Its first events leave before this returns to the event loop."""
        seal = partial(self.resources.seals.seal, plan.owner)
        # A turn that was taken over from the queue was sent to another process.
        size, given = plan.arrival.receipt.bytes_read, plan.resolved.given
        held = weigh_turn(_given(plan), plan.resolved, plan.response)
        held = max(held, sent_bytes(size, len(given)))
        first = 0 if taken_over is None else taken_over.next_number
        running = Running(
            plan.owner,
            Assembler(plan.response, item_ids(plan.id), plan.model.reasoning, seal, first),
            is_stored=plan.is_stored,
            is_rollout=plan.is_rollout,
            can_be_steered=plan.can_be_steered,
            tally=plan.tally,
            check=partial(_check_later, plan.model, conversation is not None),
            input_bytes=held,
            transport=plan.arrival.receipt.transport,
            received_at=plan.arrival.receipt.received_at,
        )
        if plan.is_stored and (plan.response.background or plan.key):
            self.log_events(running)
        if subscriber is not None:
            running.attach(subscriber)
        self.registry.running[plan.id] = running
        if plan.is_stored and (plan.response.background or plan.key or conversation):
            self._leased.add(plan.id)
        spawn(self._run(plan, running, conversation), self._tasks)
        return running

    def log_events(self, running: Running) -> None:
        """Write the events of this turn to the log, from the oldest that is still known."""
        running.log_events(EventWriter(self.records.log, running.owner, running.id))

    # --- running ---

    async def _run(
        self, plan: Plan, running: Running, conversation: LockedConversation | None
    ) -> None:
        turns = plan.arrival.caller.turns
        save: Save = turns.save if conversation is None else conversation.save
        heartbeat = Heartbeat(running, self.heartbeat_s)
        if running.is_background:
            save = partial(save_patiently, save, turns.read, lambda: self.is_draining)
            running.enqueue(partial(self._leave_queue, plan, running, save, heartbeat))
            task = asyncio.current_task()
            if self._outlives and task is not None:
                self._queued[plan.id] = task
                if self.is_draining:
                    self._let_go(self._starting)
        loop = TurnLoop(plan, running, save, self.resources)
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
                await self._end(loop, conversation)

    async def _end(self, loop: TurnLoop, conversation: LockedConversation | None) -> None:
        """The turn is saved: release what it holds, send its terminal event, and keep what may be asked for again."""
        plan, running = loop.plan, loop.running
        if conversation is not None:
            await self._release(conversation, plan.id)
        response = running.assembler.response
        if (quota := plan.arrival.caller.quota) is not None:
            quota.release(plan.id, response.usage.total_tokens if response.usage else 0)
        running.publish([running.assembler.end()])
        sent_at = perf_counter()
        self._leave_tools(plan)
        if loop.first_prompt is not None and self.resources.report_prompt is not None:
            # Before anything else is awaited: who has the terminal event and asks for the report finds that it is made.
            await self.resources.report_prompt(loop.first_prompt, running.held_bytes)
        plan.tally.spans.append(Span("send", sent_at, sent_at))
        if running.event_writer is not None:
            await running.event_writer.finish()
        if plan.key:
            await self._repeats.ended(plan, running)
        elif plan.is_stored and running.event_writer is None and plan.arrival.receipt.is_streamed:
            # Its last events may be on a connection that is lost, which is not noticed yet.
            self.registry.keep_ended(running)
        del self.registry.running[plan.id]
        self._memory.freed.set()
        self.registry.fenced.discard(plan.id)
        self._leased.discard(plan.id)
        if loop.unsaved is not None and running.is_background:
            self._retry(partial(loop.save, loop.unsaved))
        await self.records.afterwards.put(_ended(plan, running, sent_at))

    async def _leave_queue(
        self, plan: Plan, running: Running, save: Save, heartbeat: Heartbeat
    ) -> None:
        """The engine begins with a turn that was queued; from here on its time counts."""
        if self._outlives:
            begun = structs.replace(plan.response, status="in_progress")
            await self._save_begun(_unanswered(plan, begun), save)
        self._queued.pop(plan.id, None)
        heartbeat.end_after(self.background_s_max)
        running.publish([running.assembler.leave_queue()])

    async def _save_begun(self, turn: Turn, save: Save) -> None:
        """Nothing of it leaves before the store has this: until then another process may take it over. A stop waits for
        it: who takes turns over leaves alone what runs."""
        self._starting.add(turn.id)
        writing = asyncio.ensure_future(save(turn))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # A store writes what it was asked to all the same: the end of the turn has to come after it.
            await asyncio.gather(writing, return_exceptions=True)
            raise
        except (Fenced, TryLater):
            # Another process has it, or will: this one stops, and the store is away.
            self._left.add(turn.id)
            raise asyncio.CancelledError from None
        finally:
            self._starting.discard(turn.id)

    async def _leave(self, plan: Plan, running: Running) -> None:
        """Let go of a turn that is queued in the store: another process runs it."""
        self._left.discard(plan.id)
        self._give_up(plan)
        if running.event_writer is not None:
            await running.event_writer.finish()
        del self.registry.running[plan.id]
        self._leased.discard(plan.id)
        running.abandon()

    def _retry(self, write: Callable[[], Awaitable[object]]) -> None:
        """A client waits for this to be written, and the store still says otherwise."""
        spawn(_until_written(write), self._retries)

    def _retry_a_few(self, write: Callable[[], Awaitable[object]]) -> None:
        """The same where there is most likely nothing to write: a store that is away for long gets no more of these."""
        if len(self._retries) < RETRIES_MAX:
            self._retry(write)

    # --- conversations ---

    async def _acquire(self, arrival: Arrival, turn_id: str, *, is_new: bool) -> LockedConversation:
        """The conversation, locked for this turn. A client that leaves meanwhile must not keep it locked, and neither
        must a write whose answer was lost; but a turn that is not new comes again under the same id."""
        create = arrival.create
        caller = arrival.caller
        conversations = self.records.conversations
        acquiring = asyncio.create_task(
            acquire(create, caller.owner, caller.turns, conversations, self._memory, turn_id)
        )
        free = partial(unlock, caller.owner, create.conversation_id or "", turn_id, conversations)
        try:
            return await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            spawn(self._give_back(acquiring, turn_id, free), self._tasks)
            raise
        except (TryLater, ServerFault):
            if is_new:
                self._retry_a_few(free)
            raise

    async def _give_back(
        self,
        acquiring: asyncio.Task[LockedConversation],
        turn_id: str,
        free: Callable[[], Awaitable[None]],
    ) -> None:
        try:
            conversation = await acquiring
        except CallerError:
            return
        except ApiError:
            self._retry_a_few(free)
            return
        await self._release(conversation, turn_id)

    async def _release(self, conversation: LockedConversation, turn_id: str) -> None:
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
    return structs.replace(commit(plan, response, _given(plan), plan.resolved.open_calls), bytes=0)


def _given(plan: Plan) -> tuple[Round, ...]:
    return (*plan.resolved.earlier, Round(plan.resolved.given))


def _refuse_if(is_draining: bool) -> None:
    if is_draining:
        raise shutting_down()


async def _until_written(write: Callable[[], Awaitable[object]]) -> None:
    pause_s = RETRY_S
    is_owed = True
    while is_owed:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_S_MAX)
        try:
            await write()
            is_owed = False
        except ApiError as error:
            # Others have written the end of a turn that this process had to give away.
            is_owed = not isinstance(error, Fenced)


def _check_later(model: Model, is_joined: bool, items: Sequence[Item]) -> int:
    """Items that come later are checked as those that came first; how many of their contents the model is not shown."""
    check_items(items)
    if is_joined:
        check_item_ids(items)
    return check_unseen(items, model)


def _ended(plan: Plan, running: Running, sent_at: float) -> EndedTurn:
    response = running.assembler.response
    entry = running.turn.usage if running.turn is not None else None
    if entry is None or entry.status != response.status:
        is_hosted, model = plan.resolved.is_hosted, plan.model.name
        key_id = plan.arrival.caller.key_id
        entry = entry_of(plan.owner, response, model, is_hosted=is_hosted, key_id=key_id)
    assert entry is not None, "a turn is settled once it has ended"
    error = running.error
    # A turn that failed is not always saved, but continues its parent's chain.
    link = running.turn or plan.resolved.parent
    return EndedTurn(
        entry,
        plan.tally,
        plan.arrival.receipt,
        sent_at=sent_at,
        parent_id=response.previous_response_id,
        lane=plan.arrival.caller.lane,
        error=None if error is None else error.code,
        error_status=0 if error is None else error.status,
        is_callers_fault=isinstance(error, CallerError),
        chain=(link and link.chain) or plan.id,
    )
