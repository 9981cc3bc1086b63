"""What happens in one turn, from beginning to end.

`prepare` may raise and says nothing to the client: validate -> find -> resolve -> admit. `perform` speaks and does not
raise: created first, then render -> sample -> read -> assemble, then save, then exactly one terminal event, then
everything that the client does not wait for. A `Runner` owns the turns that run in this process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import Raw

from segue.errors import (
    ApiError,
    InvalidRequest,
    ServerFault,
    Unavailable,
    context_overflow,
    parent_not_found,
)
from segue.ids import new_id
from segue.turn.admit import Models, Plan, admit
from segue.turn.assemble import Assembler
from segue.turn.decide import End, decide
from segue.turn.recall import RenderCache
from segue.turn.resolve import resolve
from segue.turn.running import Running, Sink
from segue.turn.seams import Reader, Turns
from segue.turn.settle import Afterwards, Settled, commit
from segue.turn.values import (
    Cancel,
    Drain,
    Entry,
    Finish,
    Ids,
    Job,
    Owner,
    Rendered,
    Round,
    Scene,
    Tally,
    Tokens,
    Turn,
)
from segue.wire.codec import decode_item, user_message
from segue.wire.items import Item, Reasoning
from segue.wire.requests import Create
from segue.wire.response import InputDetails, OutputDetails, Usage

log = logging.getLogger(__name__)

# Silence is a fault: some clients give up after minutes, some proxies after one (hazards.md F1, F3).
HEARTBEAT_S = 15.0
# A stored turn whose client was lost may go on this long.
UNHEARD_S_MAX = 1800.0
# How much JSON is decoded before the loop may serve somebody else: about 1 ms.
SLICE_BYTES = 256 * 1024
# An input of a million items is refused before its items are looked at.
ITEMS_MAX = 100_000
# Rendering more than this many bytes moves to a thread: the tokenizer lets others run meanwhile.
INLINE_RENDER_BYTES = 32 * 1024

# After the grace: what a turn may take to end itself.
END_S_MAX = 2.0

NO_USAGE = Usage(0, InputDetails(), 0, OutputDetails(), 0)

now = time.perf_counter


@dataclass(frozen=True, slots=True)
class Played:
    """What became of a turn, before it is saved."""

    end: End
    rendered: Rendered | None
    finish: Finish | None


class Runner:
    """The turns that run in this process, and what they need."""

    def __init__(
        self,
        models: Models,
        afterwards: Afterwards,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        recall: RenderCache | None = None,
    ) -> None:
        self.models = models
        self.afterwards = afterwards
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
    def count(self) -> int:
        """How many turns run."""
        return len(self._runnings)

    def find(self, owner: Owner, turn_id: str) -> Running | None:
        """A turn that runs here, if it is this owner's."""
        running = self._runnings.get(turn_id)
        return running if running is not None and running.owner == owner else None

    async def prepare(
        self, create: Create, *, owner: Owner, turns: Turns, tally: Tally, known: Turn | None = None
    ) -> Plan:
        """Everything that may be refused, before a word is said."""
        if self.is_draining:
            raise Unavailable("The server is shutting down. Please retry elsewhere or later.")
        began = now()
        given = await _decode_given(create, tally)
        validated = now()
        parent = await _find_parent(create, owner, turns, tally, known)
        resolved = resolve(create, given, parent)
        tally.tool_decodes += resolved.did_decode_tools
        plan = admit(
            resolved,
            self.models,
            owner=owner,
            turn_id=new_id("resp"),
            now=int(time.time()),
            tally=tally,
        )
        tally.stage_s["validate"] = validated - began
        tally.stage_s["resolve"] = now() - validated
        return plan

    def start(self, plan: Plan, turns: Turns, sink: Sink, transport: str) -> Running:
        """Let it run, heard by this sink. Its first events leave before this returns to the loop."""
        running = Running(plan.id, plan.owner, plan.response, is_stored=plan.is_stored)
        running.attach(sink)
        self._runnings[plan.id] = running
        task = asyncio.create_task(self._perform(plan, running, turns, transport))
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

    async def _perform(self, plan: Plan, running: Running, turns: Turns, transport: str) -> None:
        assembler = Assembler(plan.response, new_id, plan.model.reasoning)
        running.publish(assembler.start())
        pulse = Pulse(running, assembler, self._heartbeat_s)
        try:
            scene = self._set_scene(plan)
            played = await _play(plan, scene, running, assembler)
            self._remember(plan, played.rendered)
            await _finish(plan, played, assembler, turns)
        except Exception:
            # A mistake of ours; the client still gets its one terminal event.
            log.exception("turn %s broke", plan.id)
            fault = ServerFault("The server had an error while processing your request.")
            assembler.conclude(End("failed", error=fault), NO_USAGE, int(time.time()))
        finally:
            pulse.stop()
            del self._runnings[plan.id]
            running.response = assembler.response
            running.publish([assembler.end()])
        await self.afterwards.put(_settled(plan, assembler, transport))

    def _set_scene(self, plan: Plan) -> Scene:
        """What the dialect will see; the beginning of a history that was sent again is looked up."""
        resolved, model = plan.resolved, plan.model
        given, recalled = resolved.given, None
        rounds: tuple[Round, ...] = ()
        if resolved.parent is None:
            fingerprint = model.dialect.fingerprint
            recalled, count = self._recall.find(plan.owner, fingerprint, resolved.head, given)
            if recalled is not None:
                rounds, given = (Round(given[:count]),), given[count:]
        return Scene(
            resolved.head,
            resolved.parent,
            given,
            rounds,
            root_at=plan.root_at,
            recalled=recalled,
            can_constrain=model.engine.can_constrain,
        )

    def _remember(self, plan: Plan, rendered: Rendered | None) -> None:
        """Keep the prompt of a history that came as a whole, for when it comes again."""
        resolved = plan.resolved
        if resolved.parent is None and rendered is not None:
            self._recall.keep(
                plan.owner,
                plan.model.dialect.fingerprint,
                resolved.head,
                resolved.given,
                rendered.context,
                rendered.tokens_reused,
            )


async def _decode_given(create: Create, tally: Tally) -> tuple[Item, ...]:
    """The new items, decoded in slices so that a large input holds nobody up for long."""
    match create.input:
        case None:
            return ()
        case str() as text:
            tally.items_validated += 1
            return (user_message(text),)
        case raws:
            pass
    if len(raws) > ITEMS_MAX:
        raise InvalidRequest(
            f"Too many input items: {len(raws)}, at most {ITEMS_MAX}.", param="input"
        )
    tally.items_validated += len(raws)
    items: list[Item] = []
    held = 0
    for index, raw in enumerate(raws):
        held += _size(raw)
        items.append(decode_item(raw, f"input[{index}]"))
        if held > SLICE_BYTES:
            held = 0
            await asyncio.sleep(0)
    return tuple(items)


def _size(raw: Raw) -> int:
    return memoryview(raw).nbytes


async def _find_parent(
    create: Create, owner: Owner, turns: Turns, tally: Tally, known: Turn | None
) -> Turn | None:
    """The parent that the request names, unless the caller knows it already; or a refusal."""
    parent_id = create.previous_response_id
    if parent_id is None:
        return None
    if known is not None:
        tally.found_in = "connection"
        return known
    parent = await turns.find(owner, parent_id)
    tally.found_in = "missing" if parent is None else "store"
    if parent is None:
        raise parent_not_found(parent_id)
    return parent


async def _play(plan: Plan, scene: Scene, running: Running, assembler: Assembler) -> Played:
    """Render, sample, read: everything between the first events and the end. Never raises an `Exception`."""
    rendered: Rendered | None = None
    finish: Finish | None = None
    reader: Reader | None = None
    error: ApiError | None = None
    try:
        rendered = await _render(plan, scene)
        if plan.generates:
            reader = plan.model.dialect.reader(scene)
            finish = await _sample(plan, rendered, scene, reader, running, assembler)
    except ApiError as refused:
        error = refused
    except Exception:
        log.exception("turn %s failed", plan.id)
        error = ServerFault("The server had an error while processing your request.")
    if error is not None:
        end = End("failed", error=error)
    elif not plan.generates:
        end = End("completed")
    else:
        end = decide(finish, running.notice())
    if reader is not None:
        try:
            running.publish(assembler.feed(reader.close(is_cut=end.is_cut)))
        except Exception:
            log.exception("turn %s could not be closed", plan.id)
            end = End(
                "failed", error=ServerFault("The server had an error while reading the model.")
            )
    return Played(end, rendered, finish)


async def _render(plan: Plan, scene: Scene) -> Rendered:
    """The prompt; in a thread if it is long, refused if it does not fit."""
    began = now()
    render = plan.model.dialect.render
    is_long = _unrendered_bytes(scene) > INLINE_RENDER_BYTES
    rendered = await asyncio.to_thread(render, scene) if is_long else render(scene)
    tally = plan.tally
    tally.tokens_tokenized += rendered.tokens_tokenized
    tally.tokens_reused += rendered.tokens_reused
    tally.stage_s["render"] = now() - began
    prompt = rendered.prompt
    if isinstance(prompt, Tokens) and prompt.length >= plan.model.context_tokens:
        raise context_overflow(prompt.length, plan.model.context_tokens)
    return rendered


def _unrendered_bytes(scene: Scene) -> int:
    """About how much text rendering will have to look at."""
    fresh = sum(len(item.raw) for item in scene.given)
    past = scene.past
    if scene.recalled is not None:
        return fresh
    if past is None:
        return fresh + len(scene.head.tools.raw) + len(scene.head.instructions or "")
    is_warm = past.warm is not None and past.warm.head.tools is scene.head.tools
    return fresh if is_warm else fresh + sum(turn.bytes for turn in past.lineage())


async def _sample(
    plan: Plan,
    rendered: Rendered,
    scene: Scene,
    reader: Reader,
    running: Running,
    assembler: Assembler,
) -> Finish | None:
    """Let the model speak until it stops, is stopped, or breaks off."""
    prompt, past = rendered.prompt, scene.past
    used = prompt.length if isinstance(prompt, Tokens) else 0
    room = plan.model.context_tokens - used
    asked = plan.resolved.create.max_output_tokens
    job = Job(
        prompt=prompt,
        scene=scene,
        sampling=plan.resolved.sampling,
        stops=plan.model.dialect.stops,
        output_tokens_max=room if asked is None else min(asked, room),
        schema=rendered.schema,
        route=past.warm.route if past is not None and past.warm is not None else None,
        model_turns=plan.resolved.model_turns,
    )
    if rendered.lead:
        running.publish(assembler.feed(reader.feed(Ids(rendered.lead))))
    stage_s = plan.tally.stage_s
    began = first_at = now()
    try:
        async with (
            running.interruptible(),
            aclosing(plan.model.engine.sample(job)) as pieces,
        ):
            async for piece in pieces:
                if isinstance(piece, Finish):
                    return piece
                if first_at == began:
                    first_at = now()
                    stage_s["first_token"] = first_at - began
                if isinstance(piece, Ids):
                    plan.tally.tokens_sampled += len(piece.ids)
                running.publish(assembler.feed(reader.feed(piece)))
                await running.room()
    except TimeoutError:
        if running.notice() is None:
            raise
    finally:
        stage_s["sample"] = now() - first_at
    return None


async def _finish(plan: Plan, played: Played, assembler: Assembler, turns: Turns) -> None:
    """Save before you say: after this the terminal event may leave."""
    usage = _usage(plan, played, assembler)
    assembler.conclude(played.end, usage, int(time.time()))
    route = played.finish.route if played.finish else None
    turn = commit(plan, played.rendered, assembler, route)
    began = now()
    try:
        if plan.is_stored or played.end.status in ("completed", "incomplete"):
            await turns.save(turn)
    except ApiError as error:
        assembler.conclude(End("failed", error=error), usage, int(time.time()))
    except Exception:
        log.exception("turn %s could not be saved", plan.id)
        fault = ServerFault("The server could not save this response.")
        assembler.conclude(End("failed", error=fault), usage, int(time.time()))
    plan.tally.stage_s["save"] = now() - began


def _usage(plan: Plan, played: Played, assembler: Assembler) -> Usage:
    finish = played.finish or Finish("stop")
    given = (
        _input_tokens(plan, played.rendered) if finish.input_tokens is None else finish.input_tokens
    )
    wrote = plan.tally.tokens_sampled if finish.output_tokens is None else finish.output_tokens
    reasoning = finish.reasoning_tokens
    if reasoning is None:
        both = zip(assembler.items, assembler.ids, strict=True)
        reasoning = sum(len(ids) for item, ids in both if isinstance(item.value, Reasoning))
    cached = finish.cached_tokens
    return Usage(
        input_tokens=given,
        input_tokens_details=InputDetails(cached_tokens=cached),
        output_tokens=wrote,
        output_tokens_details=OutputDetails(reasoning_tokens=reasoning),
        total_tokens=given + wrote,
    )


def _input_tokens(plan: Plan, rendered: Rendered | None) -> int:
    if rendered is None:
        return 0
    prompt = rendered.prompt if plan.generates else rendered.context
    return prompt.length if isinstance(prompt, Tokens) else 0


def _settled(plan: Plan, assembler: Assembler, transport: str) -> Settled:
    response = assembler.response
    usage = response.usage
    assert usage is not None
    entry = Entry(
        turn_id=plan.id,
        owner=plan.owner,
        model=plan.model.name,
        status=response.status,
        input_tokens=usage.input_tokens,
        cached_tokens=usage.input_tokens_details.cached_tokens,
        output_tokens=usage.output_tokens,
        ended_at=int(time.time()),
    )
    return Settled(entry, response, plan.tally, transport, plan.is_stored, now())


class Pulse:
    """Breaks a turn's silence, and ends a turn that nobody has heard for too long."""

    __slots__ = ("_assembler", "_every_s", "_running", "_timer", "_unheard_since")

    def __init__(self, running: Running, assembler: Assembler, every_s: float) -> None:
        self._running = running
        self._assembler = assembler
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
            self._running.publish([self._assembler.heartbeat()])
            due_at = loop.time() + self._every_s
        if self._running.is_heard:
            self._unheard_since = None
        elif self._unheard_since is None:
            self._unheard_since = loop.time()
        elif loop.time() - self._unheard_since > UNHEARD_S_MAX:
            self._running.tell(Cancel())
        self._timer = loop.call_at(due_at, self._beat)
