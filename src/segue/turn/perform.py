"""What does a turn do once it has started? Render -> sample -> read -> assemble, then save.

`perform` speaks through its running turn and does not raise: what goes wrong ends the turn as failed. After it the
assembler holds the response as it was saved, and the caller sends the one terminal event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, replace

from msgspec import structs

from segue.errors import ApiError, ServerFault, context_overflow
from segue.turn.admit import Plan
from segue.turn.assemble import Assembler
from segue.turn.decide import End, decide
from segue.turn.recall import Asked, RenderCache
from segue.turn.running import Running
from segue.turn.seams import Reader, Turns
from segue.turn.settle import commit
from segue.turn.truncate import truncate
from segue.turn.values import Finish, IdArray, Ids, Job, Prompt, Rendered, Round, Scene, Tokens
from segue.wire.items import Reasoning
from segue.wire.response import InputDetails, OutputDetails, Usage

log = logging.getLogger(__name__)

# Rendering more than this many bytes moves to a thread: the tokenizer lets others run meanwhile.
INLINE_RENDER_BYTES = 32 * 1024
# What `truncation: auto` leaves free for the answer, as a share of the context.
ANSWER_SHARE = 0.1
# Each pass drops what seems enough by its bytes; tokens differ from bytes, so it may take a few.
TRUNCATE_PASSES_MAX = 8

NO_USAGE = Usage(0, InputDetails(), 0, OutputDetails(), 0)

now = time.perf_counter


@dataclass(slots=True)
class Play:
    """What has become of a turn so far."""

    scene: Scene
    rendered: Rendered | None = None
    finish: Finish | None = None
    is_truncated: bool = False


async def perform(
    plan: Plan, running: Running, assembler: Assembler, turns: Turns, recall: RenderCache
) -> None:
    """Play the turn to its end and save it."""
    try:
        play = Play(_set_scene(plan, recall))
        end = await _play(plan, play, running, assembler)
        _remember(plan, play, recall)
        await _save(plan, play, end, assembler, turns)
    except Exception:
        # A mistake of ours; the client still gets its one terminal event.
        log.exception("turn %s broke", plan.id)
        fault = ServerFault("The server had an error while processing your request.")
        assembler.conclude(End("failed", error=fault), NO_USAGE, int(time.time()))


def _asked(plan: Plan) -> Asked:
    resolved = plan.resolved
    fingerprint = plan.model.dialect.fingerprint
    return Asked(plan.owner, fingerprint, resolved.head, resolved.given, plan.root_at)


def _set_scene(plan: Plan, recall: RenderCache) -> Scene:
    """What the dialect will see; the beginning of a history that was sent again is looked up."""
    resolved = plan.resolved
    given, recalled = resolved.given, None
    rounds: tuple[Round, ...] = ()
    if resolved.parent is None:
        recalled, count = recall.find(_asked(plan))
        if recalled is not None:
            rounds, given = (Round(given[:count]),), given[count:]
    return Scene(
        resolved.head,
        resolved.parent,
        given,
        rounds,
        root_at=plan.root_at,
        recalled=recalled,
        can_constrain=plan.model.engine.can_constrain,
    )


def _remember(plan: Plan, play: Play, recall: RenderCache) -> None:
    """Keep the prompt of a history that came as a whole, for when it comes again."""
    rendered = play.rendered
    if plan.resolved.parent is None and rendered is not None and not play.is_truncated:
        is_recalled = play.scene.recalled is not None
        recalled_items = len(play.scene.rounds[0].given) if is_recalled else 0
        recall.keep(_asked(plan), rendered.context, recalled_items)


async def _play(plan: Plan, play: Play, running: Running, assembler: Assembler) -> End:
    """Everything between the first events and the end of the model's turn."""
    reader: Reader | None = None
    error: ApiError | None = None
    try:
        play.rendered = await _render(plan, play)
        if plan.generates:
            reader = plan.model.dialect.reader(play.scene)
        play.finish = await _sample(plan, play.rendered, play.scene, reader, running, assembler)
    except ApiError as refused:
        error = refused
    except Exception:
        log.exception("turn %s failed", plan.id)
        error = ServerFault("The server had an error while processing your request.")
    if error is not None:
        end = End("failed", error=error)
    elif plan.generates or play.finish is None:
        end = decide(play.finish, running.notice())
    else:
        end = End("completed")
    if reader is not None:
        running.publish(assembler.feed(reader.close(is_cut=end.is_cut)))
    return end


async def _render(plan: Plan, play: Play) -> Rendered:
    """The prompt, if it fits; shortened from its start where the client allows that."""
    began = now()
    rendered = await _render_once(plan, play.scene)
    tokens_max = plan.model.context_tokens
    if plan.resolved.create.truncation == "auto":
        target = int(tokens_max * (1 - ANSWER_SHARE))
        for _ in range(TRUNCATE_PASSES_MAX):
            if _length(rendered) <= target:
                break
            play.is_truncated = True
            play.scene = truncate(play.scene, 1 - target / _length(rendered))
            rendered = await _render_once(plan, play.scene)
    plan.tally.stage_s["render"] = now() - began
    if _length(rendered) >= tokens_max:
        raise context_overflow(_length(rendered), tokens_max)
    return rendered


async def _render_once(plan: Plan, scene: Scene) -> Rendered:
    """Render, in a thread if it is long."""
    dialect = plan.model.dialect
    is_long = _unrendered_bytes(scene, dialect.fingerprint) > INLINE_RENDER_BYTES
    rendered = await asyncio.to_thread(dialect.render, scene) if is_long else dialect.render(scene)
    if plan.model.checks_rendering:
        _check_rendering(plan, scene, rendered)
    if isinstance(rendered.context, Tokens):  # Messages count in bytes.
        plan.tally.tokens_tokenized += rendered.tokens_tokenized
        plan.tally.tokens_reused += rendered.tokens_reused
    return rendered


def _check_rendering(plan: Plan, scene: Scene, rendered: Rendered) -> None:
    """The operator's doubt: with nothing warm the prompt must be the same, token for token."""
    past = None
    for turn in scene.past.lineage() if scene.past else ():
        past = replace(turn, parent=past, warm=None)
    cold = plan.model.dialect.render(structs.replace(scene, past=past, recalled=None))
    if _flat(rendered.prompt) != _flat(cold.prompt):
        raise ServerFault("A warm prompt differs from a cold one. Please report this.")


def _flat(prompt: Prompt) -> IdArray[int] | bytes:
    return prompt.flat() if isinstance(prompt, Tokens) else b",".join(prompt.chunks())


def _length(rendered: Rendered) -> int:
    """How many tokens the prompt has, where we can know."""
    prompt = rendered.prompt
    return prompt.length if isinstance(prompt, Tokens) else 0


def _unrendered_bytes(scene: Scene, fingerprint: str) -> int:
    """About how much text rendering will have to look at."""
    fresh = sum(len(item.raw) for item in scene.given)
    past = scene.past
    if scene.recalled is not None:
        return fresh
    warm = past.warm if past is not None else None
    if warm is not None and warm.head is scene.head and warm.fingerprint == fingerprint:
        return fresh
    older = sum(len(item.raw) for one in scene.history() for item in (*one.given, *one.wrote))
    return fresh + older + len(scene.head.tools.raw) + len(scene.head.instructions or "")


def _job(plan: Plan, rendered: Rendered, scene: Scene) -> Job:
    """What the engine is asked. A warm-up asks for no output: the engine reads the prompt and no more."""
    resolved, past = plan.resolved, scene.past
    room = plan.model.context_tokens - _length(rendered)
    asked = resolved.create.max_output_tokens or plan.model.output_tokens_max
    wanted = room if asked is None else min(asked, room)
    return Job(
        prompt=rendered.prompt if plan.generates else rendered.context,
        scene=scene,
        sampling=plan.sampling,
        stops=plan.model.dialect.stops,
        output_tokens_max=wanted if plan.generates else 0,
        schema=rendered.schema,
        owner=plan.owner,
        lane=plan.lane,
        route=past.warm.route if past is not None and past.warm is not None else None,
        model_turns=resolved.model_turns,
    )


async def _sample(
    plan: Plan,
    rendered: Rendered,
    scene: Scene,
    reader: Reader | None,
    running: Running,
    assembler: Assembler,
) -> Finish | None:
    """Let the model speak until it stops, is stopped, or breaks off."""
    tally = plan.tally
    if reader is not None and rendered.lead:
        running.publish(assembler.feed(reader.feed(Ids(rendered.lead))))
    began = first_at = now()
    try:
        async with (
            running.interruptible(),
            aclosing(plan.model.engine.sample(_job(plan, rendered, scene))) as pieces,
        ):
            async for piece in pieces:
                if isinstance(piece, Finish):
                    return piece
                if first_at == began:
                    first_at = now()
                    tally.stage_s["first_token"] = first_at - began
                if isinstance(piece, Ids):
                    tally.tokens_sampled += len(piece.ids)
                if reader is not None:
                    running.publish(assembler.feed(reader.feed(piece)))
                    await running.room()
    except TimeoutError:
        if running.notice() is None:
            raise
    finally:
        tally.stage_s["sample"] = now() - first_at
    return None


async def _save(plan: Plan, play: Play, end: End, assembler: Assembler, turns: Turns) -> None:
    """Save before you say: after this the terminal event may leave."""
    began = now()
    usage = _usage(plan, play, assembler)
    assembler.conclude(end, usage, int(time.time()))
    # What was truncated is not kept warm: with nothing warm the next turn would begin elsewhere.
    rendered = None if play.is_truncated else play.rendered
    route = play.finish.route if play.finish else None
    try:
        if plan.is_stored or end.status in ("completed", "incomplete"):
            await turns.save(commit(plan, rendered, assembler, route))
            plan.tally.is_recorded = plan.is_stored
    except ApiError as error:
        assembler.conclude(End("failed", error=error), usage, int(time.time()))
    plan.tally.stage_s["save"] = now() - began


def _usage(plan: Plan, play: Play, assembler: Assembler) -> Usage:
    """What the engine counted, or what we did: the ids are ours."""
    finish = play.finish or Finish("stop")
    given = _input_tokens(plan, play.rendered)
    if finish.input_tokens is not None:
        given = finish.input_tokens
    wrote = plan.tally.tokens_sampled if finish.output_tokens is None else finish.output_tokens
    reasoning = finish.reasoning_tokens
    if reasoning is None:
        both = zip(assembler.items, assembler.ids, strict=True)
        reasoning = sum(len(ids) for item, ids in both if isinstance(item.value, Reasoning))
    return Usage(
        input_tokens=given,
        input_tokens_details=InputDetails(cached_tokens=finish.cached_tokens),
        output_tokens=wrote,
        output_tokens_details=OutputDetails(reasoning_tokens=reasoning),
        total_tokens=given + wrote,
    )


def _input_tokens(plan: Plan, rendered: Rendered | None) -> int:
    if rendered is None:
        return 0
    prompt = rendered.prompt if plan.generates else rendered.context
    return prompt.length if isinstance(prompt, Tokens) else 0
