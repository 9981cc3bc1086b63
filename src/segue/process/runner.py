"""Who owns the turns that run in this process?

A `Runner` prepares turns, lets them run, knows them by id, and ends them when the process goes. A turn that runs is a
task of its own: it is heard by sinks that come and go, and it always ends with exactly one terminal event. A request
that repeats another by its idempotency key hears that one's turn instead of starting its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

from msgspec import UNSET, structs

from segue.cluster.peers import Peers
from segue.cluster.remote import Kept, RemoteTurns
from segue.errors import ApiError, Conflict, TooMany, Unavailable
from segue.ids import item_ids, new_id
from segue.process.conversations import (
    ATTEMPTS_MAX,
    Joined,
    JoinedTurns,
    join,
    speak,
    too_many_writers,
)
from segue.process.event_writer import EventWriter
from segue.process.render_cache import RenderCache
from segue.process.start_limit import StartLimit
from segue.tools.hosted import Hosted, with_pdfs
from segue.tools.inputs import ReadUrl, attach
from segue.turn.admit import check_unseen
from segue.turn.assemble import Assembler
from segue.turn.commit import Afterwards, EndedTurn, commit, entry_of
from segue.turn.compact import Kind
from segue.turn.compose import count
from segue.turn.loop import perform
from segue.turn.plan import Guards, Model, Models, Plan, Tally
from segue.turn.prepare import Caller, prepare
from segue.turn.resolve import check_items
from segue.turn.running import Running, Subscriber
from segue.turn.seams import Bus, Conversations, EventLog, IdempotencyKeys, Seals, Turns
from segue.turn.values import Cancel, Claim, Drain, Owner, Round
from segue.wire.codec import encode
from segue.wire.items import Item
from segue.wire.requests import Create
from segue.wire.response import ENDED, Response

log = logging.getLogger(__name__)

# Silence is a fault: some clients give up after minutes, some proxies after one (docs/hazards.md F1, F3).
HEARTBEAT_S = 15.0
# A stored turn whose client was lost may go on this long.
UNHEARD_S_MAX = 1800.0
# A rollout whose client never answers ends after this long.
APPEND_S_MAX = 600.0
# After the grace: what a turn may take to end itself.
END_S_MAX = 2.0
# Background turns wait for their engine inside the process; beyond this a client must come back later.
BACKGROUND_MAX = 1_000
# How often a request may find its key taken by one that is then refused.
CLAIMS_MAX = 5
# How long to wait before what the store has not taken is written again; doubled up to a minute.
MEND_S, MEND_S_MAX = 1.0, 60.0
# How long a repeat waits for a turn of another worker that has its key and has not begun, and how often it looks.
REPEAT_S_MAX = 15.0
REPEAT_LOOK_S, REPEAT_PAUSE_S_MAX = 0.05, 0.5
# The same for a turn that is not to be stored, and so is not heard elsewhere: it may still be refused.
UNSTORED_S_MAX = 0.5
# Events of ended turns that a repeat may still ask for, where no log has them.
ENDED_BYTES_MAX = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Records:
    """What a turn leaves behind beside itself."""

    afterwards: Afterwards
    log: EventLog
    idempotency_keys: IdempotencyKeys
    conversations: Conversations


class Runner:
    """The turns that run in this process, and what they need."""

    def __init__(
        self,
        models: Models,
        records: Records,
        seals: Seals,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        append_s_max: float = APPEND_S_MAX,
        render_cache: RenderCache | None = None,
        hosted: Hosted | None = None,
        read_url: ReadUrl | None = None,
        guards: Mapping[Owner, Guards] | None = None,
    ) -> None:
        self.models = models
        self.is_draining = False
        self._records = records
        self._seals = seals
        self._read_url = read_url
        self._append_s_max = append_s_max
        self._heartbeat_s = heartbeat_s
        self._render_cache = render_cache or RenderCache(0)
        # Owners with guards of their own.
        self._guards = guards or {}
        self._hosted = hosted or Hosted()
        self._turnstile = StartLimit()
        self._runnings: dict[str, Running] = {}
        self._ended: OrderedDict[str, Running] = OrderedDict()
        self._sizes: dict[str, int] = {}
        # What ended turns that may be heard again hold in memory.
        self.ended_bytes = 0
        # Requests with a key that are not turns yet; set when that is settled.
        self._preparing: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Ends of turns that the store has still to take; nobody waits for them at a stop.
        self._mending: set[asyncio.Task[None]] = set()
        self._worker: asyncio.Task[None] | None = None
        self._remote: RemoteTurns | None = None

    def meet(self, bus: Bus, peers: Peers, turns: Turns) -> None:
        """There are other workers: their turns can be heard here, and ours there."""
        silence_s = 2 * self._heartbeat_s
        kept = Kept(turns, self._records.log)
        self._remote = RemoteTurns(bus, peers, self._find_here, kept, silence_s)

    async def __aenter__(self) -> Runner:
        self._worker = asyncio.create_task(self._records.afterwards.work())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.drain(0)
        await self._records.afterwards.drained()
        assert self._worker is not None
        idle = (self._worker, *self._mending)
        for task in idle:
            task.cancel()
        await asyncio.gather(*idle, return_exceptions=True)

    @property
    def running_count(self) -> int:
        """How many turns run."""
        return len(self._runnings)

    @property
    def runnings(self) -> Iterable[Running]:
        """The turns that run, the oldest first."""
        return self._runnings.values()

    def find(self, owner: Owner, turn_id: str) -> Running | None:
        """A turn that runs or is heard here, if it is this owner's."""
        here = self._find_here(owner, turn_id)
        if here is None and self._remote is not None:
            return self._remote.find(owner, turn_id)
        return here

    def _find_here(self, owner: Owner, turn_id: str) -> Running | None:
        running = self._runnings.get(turn_id)
        return running if running is not None and running.owner == owner else None

    async def reach(self, owner: Owner, turn_id: str, turns: Turns) -> Running | None:
        """A turn while it runs, in this worker or in another one."""
        found = self.find(owner, turn_id)
        if found is not None or self._remote is None or not self._remote.has_others:
            return found
        turn = await turns.read(owner, turn_id)
        if turn is not None and turn.response.status in ENDED:
            return None
        return await self._remote.reach(owner, turn_id)

    async def look(self, owner: Owner, turn_id: str) -> bytes | None:
        """A stored turn while it runs, in this worker or in another one, as it stands, encoded."""
        here = self._find_here(owner, turn_id)
        if here is not None:
            return encode(here.visible) if here.is_stored else None
        return None if self._remote is None else await self._remote.look(owner, turn_id)

    # --- beginning ---

    async def begin(
        self, create: Create, caller: Caller, tally: Tally, subscriber: Subscriber, transport: str
    ) -> Running:
        """A turn for this request, heard by this sink; or the turn that its key stands for already."""
        await self._turnstile.enter()
        if create.idempotency_key is None:
            return await self._begin(create, caller, tally, subscriber, transport, new_id("resp"))
        claim = claim_of(create, caller.owner)
        is_settled = self._preparing[claim.turn_id] = asyncio.Event()
        try:
            for _ in range(CLAIMS_MAX):
                held = await self._take(claim)
                if held.turn_id == claim.turn_id:
                    break
                repeated = await self._repeat(held, claim, caller.turns, subscriber)
                if repeated is not None:
                    return repeated
            else:
                raise _sought_after()
            try:
                return await self._begin(
                    create, caller, tally, subscriber, transport, claim.turn_id
                )
            except BaseException:
                await asyncio.shield(self._records.idempotency_keys.release(claim))
                raise
        finally:
            if self._preparing.get(claim.turn_id) is is_settled:
                del self._preparing[claim.turn_id]
            is_settled.set()

    async def _take(self, claim: Claim) -> Claim:
        """Whoever holds the key, once that is settled: a request that is still being prepared may be refused, and then
        the key is free again."""
        for _ in range(CLAIMS_MAX):
            held = await self._claim(claim)
            is_settled = self._preparing.get(held.turn_id)
            if held.turn_id == claim.turn_id or is_settled is None:
                return held
            await is_settled.wait()
            if self._hearable(held) is not None:
                return held
        raise _sought_after()

    async def _claim(self, claim: Claim) -> Claim:
        """Ask for the key. A client that leaves meanwhile must not keep it."""
        asking = asyncio.create_task(self._records.idempotency_keys.claim(claim))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            is_settled = self._preparing[claim.turn_id] = asyncio.Event()
            self._spawn(self._unclaim(asking, claim, is_settled))
            raise

    async def _unclaim(
        self, asking: asyncio.Task[Claim], claim: Claim, is_settled: asyncio.Event
    ) -> None:
        try:
            if (await asking).turn_id == claim.turn_id:
                await self._records.idempotency_keys.release(claim)
        finally:
            del self._preparing[claim.turn_id]
            is_settled.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _over(self, owner: Owner, turn_id: str) -> Running | None:
        running = self._ended.get(turn_id)
        return running if running is not None and running.owner == owner else None

    def _hearable(self, held: Claim) -> Running | None:
        return self._runnings.get(held.turn_id) or self._ended.get(held.turn_id)

    async def _begin(
        self,
        create: Create,
        caller: Caller,
        tally: Tally,
        subscriber: Subscriber,
        transport: str,
        turn_id: str,
    ) -> Running:
        if create.conversation_id is not None:
            caller = await self._speaking(create, caller, turn_id)
        try:
            plan = await self.prepare(create, caller, tally, turn_id=turn_id)
            return await self._start(plan, caller.turns, subscriber, transport)
        except BaseException:
            # Only where there is something to wait for: a refusal must leave before its socket closes.
            if caller.joined is not None:
                await asyncio.shield(self._fall_silent(caller.turns, turn_id))
            raise

    async def joining(self, create: Create, caller: Caller) -> Caller:
        """Who asks, with the conversation that the request names."""
        joined = await join(create, caller.owner, caller.turns, self._records.conversations)
        return caller if joined is None else self._joined(caller, joined)

    def _joined(self, caller: Caller, joined: Joined) -> Caller:
        turns = JoinedTurns(caller.turns, self._records.conversations, joined)
        return replace(caller, turns=turns, joined=joined)

    async def _speaking(self, create: Create, caller: Caller, turn_id: str) -> Caller:
        """The same, once this turn is the one that speaks in that conversation. A client that leaves meanwhile must not
        keep others from it."""
        asking = asyncio.create_task(self._speak(create, caller, turn_id))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._spawn(self._unspeak(asking, turn_id))
            raise

    async def _speak(self, create: Create, caller: Caller, turn_id: str) -> Caller:
        conversations = self._records.conversations
        for _ in range(ATTEMPTS_MAX):
            joined = await join(create, caller.owner, caller.turns, conversations)
            assert joined is not None, "the request names a conversation"
            spoken = await speak(joined, turn_id, conversations)
            if spoken is not None:
                return self._joined(caller, spoken)
        assert create.conversation_id is not None
        raise too_many_writers(create.conversation_id)

    async def _unspeak(self, asking: asyncio.Task[Caller], turn_id: str) -> None:
        try:
            caller = await asking
        except ApiError:
            return
        await self._fall_silent(caller.turns, turn_id)

    async def _fall_silent(self, turns: Turns, turn_id: str) -> None:
        """If this turn speaks in a conversation, it does so no more; where the store cannot be told now, soon."""
        if not isinstance(turns, JoinedTurns):
            return
        try:
            await turns.fall_silent(turn_id)
        except ApiError:
            self._mend(partial(turns.fall_silent, turn_id))

    async def prepare(
        self,
        create: Create,
        caller: Caller,
        tally: Tally,
        *,
        turn_id: str | None = None,
        compacts: Kind | None = None,
    ) -> Plan:
        """Everything that may be refused, before a word is said. A plan has a place; a turn that starts gives it back
        at its end, and whoever does not start one does so himself."""
        self._refuse_if_draining()
        await caller.quota.hold()
        try:
            plan = await prepare(
                create,
                caller,
                tally,
                self.models,
                self._seals,
                read_url=self._read_url,
                has_web="web_search" in self._hosted.tools and "web_search" in caller.may,
            )
            self._hosted.check(plan.resolved.head.tools, caller.may)
            self._refuse_if_draining()
        except BaseException:
            caller.quota.release()
            raise
        response = structs.replace(plan.response, id=turn_id or plan.id)
        return replace(
            plan,
            id=response.id,
            response=response,
            compacts=compacts or plan.compacts,
            append_s_max=self._append_s_max,
            guards=self._guards.get(plan.owner, plan.guards),
        )

    def _refuse_if_draining(self) -> None:
        if self.is_draining:
            raise Unavailable("The server is shutting down. Please retry elsewhere or later.")

    async def read(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        """These items with what their addresses stand for, where the operator allows that."""
        return items if self._read_url is None else await attach(items, self._read_url)

    async def count_tokens(self, plan: Plan) -> int:
        """How many tokens the engine would be given for this plan."""
        return await count(await with_pdfs(plan, self._hosted), self._render_cache)

    async def _start(
        self, plan: Plan, turns: Turns, subscriber: Subscriber, transport: str
    ) -> Running:
        if plan.response.background:
            try:
                await self._queue(plan, turns)
            except BaseException:
                plan.quota.release()
                raise
        return self.start(plan, turns, subscriber, transport)

    async def _queue(self, plan: Plan, turns: Turns) -> None:
        """Whoever is told that it is queued can fetch it from now on, whatever happens to us."""
        self._refuse_if_crowded()
        given = (*plan.resolved.earlier, Round(plan.resolved.given))
        await turns.save(commit(plan, plan.response, given, plan.resolved.open_calls, None))

    def _refuse_if_crowded(self) -> None:
        if sum(one.is_background for one in self._runnings.values()) >= BACKGROUND_MAX:
            raise TooMany(f"At most {BACKGROUND_MAX} responses run in the background.")

    def start(self, plan: Plan, turns: Turns, subscriber: Subscriber, transport: str) -> Running:
        """Let it run, heard by this sink. Its first events leave before this returns to the loop."""
        seal = partial(self._seals.seal, plan.owner)
        running = Running(
            plan.owner,
            Assembler(plan.response, item_ids(plan.id), plan.model.reasoning, seal),
            is_stored=plan.is_stored,
            is_rollout=plan.is_rollout,
            can_be_steered=plan.can_be_steered,
        )
        running.check = partial(_check_later, plan.model)
        if plan.is_stored and (plan.response.background or plan.is_keyed):
            self.log_events(running)
        running.attach(subscriber)
        self._runnings[plan.id] = running
        self._spawn(self._run(plan, running, turns, transport))
        return running

    def log_events(self, running: Running) -> None:
        """Keep the events of this turn for those who ask later; from the oldest that is still known."""
        running.log_events(EventWriter(self._records.log, running.owner, running.id))

    async def _run(self, plan: Plan, running: Running, turns: Turns, transport: str) -> None:
        running.publish(running.assembler.start())
        pulse = Pulse(running, self._heartbeat_s)
        try:
            await perform(plan, running, turns, self._render_cache, self._hosted)
        finally:
            pulse.stop()
            await self._fall_silent(turns, plan.id)
            plan.quota.release(_tokens_of(running.response))
            running.publish([running.assembler.end()])
            plan.tally.mark("sent")
            if running.event_writer is not None:
                await running.event_writer.finish()
            if plan.is_keyed:
                await self._keep(plan, running)
            elif plan.is_stored and running.event_writer is None and transport != "http":
                # Its last events may be on a line that is lost, and nobody has noticed yet.
                self._remember(running)
            del self._runnings[plan.id]
            if running.unsaved is not None and running.is_background:
                self._mend(partial(turns.save, running.unsaved))
        await self._records.afterwards.put(_settled(plan, running.response, transport))

    # --- hearing it again ---

    async def follow(self, owner: Owner, turn_id: str, subscriber: Subscriber, after: int) -> bool:
        """Hear a turn's events behind this number: what was written down, and what is still to come.

        False if some of them are not there any more, or never were.
        """
        running = self.find(owner, turn_id) or self._over(owner, turn_id)
        if running is not None and running.attach(subscriber, after=after):
            return True
        written = await self._records.log.read_after(owner, turn_id, after)
        running = self.find(owner, turn_id)
        others = self._remote if self._remote and self._remote.has_others else None
        if running is None and others and not (written and written[-1].is_terminal):
            # It may have ended in another worker a moment ago, which has not written all of it down yet.
            running = await others.reach(owner, turn_id)
            if running is not None and running.attach(subscriber, after=after):
                return True
            written = await self._records.log.read_after(owner, turn_id, after)
        if written is None:
            return False
        if running is not None:
            return bool(written) and running.attach_after(subscriber, written)
        if written and not written[-1].is_terminal:
            return False
        if written:
            subscriber.deliver(written)
        return True

    def _mend(self, write: Callable[[], Awaitable[None]]) -> None:
        """Somebody waits for this to be written, and the store still says otherwise."""
        mending = asyncio.create_task(_until_written(write))
        self._mending.add(mending)
        mending.add_done_callback(self._mending.discard)

    async def _keep(self, plan: Plan, running: Running) -> None:
        """A repeat hears what the model made of it; what was broken off by somebody's leaving may be asked again."""
        has_left = any(isinstance(one, Cancel) for one in running.inbox)
        if self._is_drained(running) or (has_left and not running.is_background):
            claim = Claim(plan.owner, plan.key, plan.id, b"", plan.is_stored)
            try:
                await self._records.idempotency_keys.release(claim)
            except ApiError:
                log.warning("the key of turn %s could not be let go of", plan.id)
            return
        self._remember(running)

    def _remember(self, running: Running) -> None:
        """Keep the events of a turn that is over, for as long as there is room."""
        if running.is_stored:
            running.turn = None
        running.release()
        self._ended[running.id] = running
        self._sizes[running.id] = running.bytes
        self.ended_bytes += running.bytes
        while len(self._ended) > 1 and self.ended_bytes > ENDED_BYTES_MAX:
            self._drop(next(iter(self._ended)))

    def _drop(self, turn_id: str) -> None:
        del self._ended[turn_id]
        self.ended_bytes -= self._sizes.pop(turn_id)

    def _is_drained(self, running: Running) -> bool:
        is_told = any(isinstance(one, Drain) for one in running.inbox)
        return is_told and running.response.status == "failed"

    def forget(self, owner: Owner, turn_id: str) -> None:
        """A turn was deleted."""
        if self._over(owner, turn_id) is not None:
            self._drop(turn_id)

    async def _repeat(
        self, held: Claim, claim: Claim, turns: Turns, subscriber: Subscriber
    ) -> Running | None:
        """The turn that this key stands for, from its first event on; None if that was refused, and the key is ours."""
        if held.digest != claim.digest:
            raise Conflict(
                "This idempotency key was used for another request.",
                code="idempotency_key_reused",
                param="idempotency_key",
            )
        running = self._hearable(held)
        if running is None:
            running = await self._retold(held, turns) or await self._heard_elsewhere(
                held, claim, turns
            )
        if running is None:
            return None
        if not running.attach(subscriber):
            written = await self._records.log.read_after(held.owner, held.turn_id, -1)
            if not written or not running.attach_after(subscriber, written):
                raise _gone(held)
        return running

    async def _heard_elsewhere(self, held: Claim, claim: Claim, turns: Turns) -> Running | None:
        """The turn of a key that another worker holds, while it runs there or once it is over; None if that worker let
        go of the key, and it is ours."""
        loop, pause_s = asyncio.get_running_loop(), REPEAT_LOOK_S
        until = loop.time() + (REPEAT_S_MAX if held.is_stored else UNSTORED_S_MAX)
        others = self._remote
        while others is not None and (held.is_stored or others.has_others):
            running = await others.reach(held.owner, held.turn_id) if held.is_stored else None
            running = running or await self._retold(held, turns)
            if running is not None:
                return running
            if (await self._claim(claim)).turn_id == claim.turn_id:
                return None
            if loop.time() > until or await _has_ended(held, turns):
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, REPEAT_PAUSE_S_MAX)
        raise _gone(held)

    async def _retold(self, held: Claim, turns: Turns) -> Running | None:
        turn = await turns.find(held.owner, held.turn_id)
        written = await self._records.log.read_after(held.owner, held.turn_id, -1)
        if turn is None or not written or not written[-1].is_terminal:
            return None
        running = Running(held.owner, Assembler.over(turn.response), is_stored=True)
        running.turn = turn
        running.publish(written)
        return running

    # --- ending ---

    async def drain(self, grace_s: float) -> None:
        """Take no new turns; give those that run this long, then end them as failed."""
        self.is_draining = True
        heard = self._remote.tasks if self._remote is not None else ()
        if (self._tasks or heard) and grace_s > 0:
            await asyncio.wait((*self._tasks, *heard), timeout=grace_s)
        for running in tuple(self._runnings.values()):
            running.notify(Drain())
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=END_S_MAX)


async def _until_written(write: Callable[[], Awaitable[None]]) -> None:
    pause_s = MEND_S
    while True:
        await asyncio.sleep(pause_s)
        try:
            await write()
            return
        except ApiError:
            pause_s = min(2 * pause_s, MEND_S_MAX)


def claim_of(create: Create, owner: Owner) -> Claim:
    """The claim of a request on its key; how it is to be answered is no part of what it asks."""
    assert create.idempotency_key is not None
    asked = structs.replace(
        create,
        type=UNSET,
        stream=None,
        stream_id=UNSET,
        stream_options=None,
        client_metadata=UNSET,
    )
    return Claim(
        owner=owner,
        key=create.idempotency_key,
        turn_id=new_id("resp"),
        digest=blake2b(encode(asked), digest_size=16).digest(),
        is_stored=create.store is not False,
    )


def _check_later(model: Model, items: Sequence[Item], tally: Tally) -> None:
    """What comes later is checked as what came first."""
    check_items(items)
    check_unseen(items, model, tally)


def _sought_after() -> Unavailable:
    return Unavailable("This idempotency key is asked for by too many at once.")


async def _has_ended(held: Claim, turns: Turns) -> bool:
    """Whether nothing more is to be expected of this turn."""
    turn = await turns.read(held.owner, held.turn_id)
    return turn is not None and turn.response.status in ENDED


def _gone(held: Claim) -> Conflict:
    return Conflict(
        f"The request with this idempotency key became the response '{held.turn_id}', "
        "whose events are not at hand here.",
        code="idempotency_key_spent",
        param="idempotency_key",
    )


def _tokens_of(response: Response) -> int:
    return response.usage.total_tokens if response.usage else 0


def _settled(plan: Plan, response: Response, transport: str) -> EndedTurn:
    entry = entry_of(plan.owner, response)
    assert entry is not None, "a turn is settled once it has ended"
    code = response.error.code if response.error else None
    return EndedTurn(entry, plan.tally, transport, response.previous_response_id, plan.lane, code)


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
            # Whoever does not read hears no silence, and a snapshot for each beat would have no end.
            if not self._running.is_stalled:
                self._running.publish([self._running.assembler.heartbeat()])
            due_at = loop.time() + self._every_s
        if self._running.has_subscribers:
            self._unheard_since = None
        elif self._unheard_since is None:
            self._unheard_since = loop.time()
        elif loop.time() - self._unheard_since > UNHEARD_S_MAX:
            self._running.notify(Cancel())
        self._timer = loop.call_at(due_at, self._beat)
