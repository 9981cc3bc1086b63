"""What does a turn do once it has started? Rounds of render -> sample -> read -> gate -> assemble, then save.

`perform` speaks through its running turn and does not raise: what goes wrong ends the turn as failed. After each round
`decide` says whether it goes on, waits or ends; a rollout, a compaction and a steer are all this one loop. After it the
assembler holds the response as it was saved, and the caller sends the one terminal event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import assert_never

from msgspec import structs

from segue.errors import ApiError, EngineFailed, InvalidRequest, ServerFault
from segue.guards.gate import Gate, open_gate
from segue.process.render_cache import RenderCache
from segue.tools.hosted import Hosted, HostedCalls, approvals
from segue.turn.commit import calls_in, commit, warm_after
from segue.turn.compact import (
    Compacted,
    asking,
    sealed_with,
    stand_in,
    to_bytes,
    worth_keeping,
)
from segue.turn.compose import Composed, compose, fitting, measure, remember, set_scene
from segue.turn.decide import Again, Await, End, decide
from segue.turn.effects import apply_effects
from segue.turn.filters import StopReader
from segue.turn.plan import Plan
from segue.turn.play import NO_USAGE, Play
from segue.turn.resolve import pair_calls
from segue.turn.running import Running
from segue.turn.sample import sample, tokens_left
from segue.turn.seams import Reader, Turns
from segue.turn.values import (
    Finish,
    Head,
    ItemOpened,
    ItemText,
    Parsed,
    Piece,
    Round,
    Scene,
    Turn,
    Warm,
)
from segue.wire.items import (
    HostedOutput,
    Item,
    Reasoning,
    Required,
    ToolSearchOutput,
)
from segue.wire.kinds import required_by
from segue.wire.requests import ReasoningConfig, TextConfig, ToolChoiceName
from segue.wire.response import OutputDetails, Usage

log = logging.getLogger(__name__)

# A summary longer than this is no summary. It has at most this share of what a prompt may have, and so has what is kept
# word for word beside it: then the next prompt is far from being compacted again.
SUMMARY_TOKENS_MAX = 2_048
SUMMARY_SHARE = 0.25
KEPT_SHARE = 0.25

PROBLEM = "The server had an error while processing your request."

now = time.perf_counter


async def perform(
    plan: Plan, running: Running, turns: Turns, render_cache: RenderCache, hosted: Hosted
) -> None:
    """Play the turn to its end and save it."""
    assembler = running.assembler
    gate = open_gate(plan, running)
    try:
        hosted_calls = HostedCalls(plan, running, hosted)
        plan, error = await _open(plan, running, hosted_calls, gate, render_cache)
        scene, resolved = set_scene(plan, render_cache), plan.resolved
        rounds = [*resolved.earlier]
        play = Play(plan, running, hosted_calls, scene, resolved.given, resolved.open_calls, rounds)
        play.gate = gate
        # What our own tools have done before the model speaks was given to it.
        play.items_before = len(assembler.items)
        end = await _play(play) if error is None else End("failed", error=error)
        if play.first is not None:
            remember(plan, play.first, render_cache)
        await _save(play, end, turns)
    except Exception:
        # A mistake of ours; the client still gets its one terminal event.
        log.exception("turn %s broke", plan.id)
        assembler.conclude(End("failed", error=ServerFault(PROBLEM)), NO_USAGE, int(time.time()))
        await _save_failed(
            plan, running, turns, [*plan.resolved.earlier, Round(plan.resolved.given)]
        )
    finally:
        if gate is not None:
            await gate.close()


# --- the loop -----------------------------------------------------------------------------------------


async def _open(
    plan: Plan,
    running: Running,
    hosted_calls: HostedCalls,
    gate: Gate | None,
    render_cache: RenderCache,
) -> tuple[Plan, ApiError | None]:
    """What is done before the model speaks: files are read, and our own tools run, if what was given may pass."""
    try:
        plan = await hosted_calls.with_files()
        if (
            gate is not None
            and approvals(plan.resolved.given)
            and not await _clears(gate, running, set_scene(plan, render_cache), is_first=True)
        ):
            return plan, None
        return await hosted_calls.open(), None
    except ApiError as error:
        return plan, error


async def _clears(gate: Gate, running: Running, scene: Scene, *, is_first: bool) -> bool:
    """Whether calls that a person has approved may be made: they have effects, so they wait for the verdict."""
    try:
        async with running.interruptible(heeds_steers=False):
            return await gate.clear(scene, is_first=is_first)
    except TimeoutError:
        return False


async def _play(play: Play) -> End:
    """Rounds, until one of them is the last."""
    plan, running = play.plan, play.running
    while True:
        error = await _round(play)
        if error is not None:
            return End("failed", error=error)
        if play.finish is not None and not plan.generates:
            return End("completed")
        required = _required(play)
        answers = await _answer(play)
        decision = decide(
            play.finish,
            running.inbox,
            is_waiting=plan.is_rollout and bool(required),
            answers=() if required or play.hosted_calls.is_spent else answers,
            is_used_up=tokens_left(play) == 0,
        )
        if isinstance(decision, Await):
            await _wait(play, required)
            decision = decide(play.finish, running.inbox, is_waiting=True)
        match decision:
            case End():
                if answers and decision.status in ("completed", "incomplete"):
                    await _keep(play, answers)
                return decision
            case Await():
                return End("failed", error=_too_late(plan))
            case Again(items):
                running.take_append()
                if required:
                    try:
                        items = (*answers, *await _appended(play, items))
                    except ApiError as error:
                        return End("failed", error=error)
                _go_on(play, items)
                play.open_calls = pair_calls(play.open_calls, items)
            case _:
                assert_never(decision)


async def _round(play: Play) -> ApiError | None:
    """One call of the model, read to its end; what went wrong with it, if anything did."""
    running, reader = play.running, None
    error: ApiError | None = None
    play.finish = None
    if play.gate is not None:
        play.gate.ask(play.scene, is_first=play.first is None)
    try:
        if play.plan.compacts:
            play.finish = await _compact(play)
            play.composed = None
        else:
            play.composed = await _compose(play)
            if play.plan.generates:
                reader = play.plan.model.dialect.reader(play.composed.scene)
                if strings := play.plan.sampling.stop_strings:
                    reader = StopReader(reader, strings)
            if play.gate is None or not play.gate.is_shut:
                play.finish = await sample(play, play.composed, reader)
    except ApiError as refused:
        error = refused
    except Exception:
        log.exception("turn %s failed", play.plan.id)
        error = ServerFault(PROBLEM)
    parsed: list[Parsed] = []
    if reader is not None:
        is_cut = play.finish is None or play.finish.reason == "length"
        parsed = reader.close(is_cut=is_cut)
    if play.gate is not None:
        parsed = await _through_gate(play, play.gate, parsed, error)
    running.publish(running.assembler.feed(parsed))
    play.has_stopped = isinstance(reader, StopReader) and reader.has_stopped
    _note(play, did_sample=reader is not None)
    return error


async def _through_gate(
    play: Play, gate: Gate, parsed: list[Parsed], error: ApiError | None
) -> list[Parsed]:
    """What may still be told of a round that is over. A steer waits for the guards, everything else ends that."""
    try:
        async with play.running.interruptible(heeds_steers=False):
            parsed = gate.drop() if error is not None else await gate.last(parsed)
    except TimeoutError:
        parsed = gate.drop()
    if gate.is_shut:
        play.finish = None
    return parsed


async def _compose(play: Play) -> Composed:
    """The prompt of this round; if it passes the client's threshold, of what is left after a compaction."""
    plan, running = play.plan, play.running
    may_truncate = plan.resolved.create.truncation == "auto"
    composed = await compose(plan, play.scene, may_truncate=may_truncate and not plan.threshold)
    play.first = play.first or composed
    if plan.threshold and composed.length > plan.threshold and not play.is_fresh:
        if await _compact(play) is None:
            return composed if running.inbox else fitting(plan, composed)
        composed = await compose(plan, play.scene, may_truncate=may_truncate)
    return fitting(plan, composed)


def _note(play: Play, *, did_sample: bool) -> None:
    """This round is over: it becomes part of the record."""
    assembler, since = play.running.assembler, play.items_before
    last = Round(
        given=play.given,
        wrote=tuple(assembler.items[since:]),
        ids=tuple(assembler.ids[since:]),
        tail=assembler.tail,
        # Where a guard or a stop string has cut the answer short, what is kept of it is not what was sampled.
        fingerprint=None
        if _is_shut(play) or play.has_stopped
        else play.plan.model.dialect.fingerprint,
        did_sample=did_sample,
        is_fresh=play.is_fresh,
    )
    play.rounds.append(last)
    play.open_calls = play.open_calls | calls_in(last.wrote)


async def _answer(play: Play) -> tuple[Item, ...]:
    """What our own tools say to the calls of this round; the calls are then finished items."""
    last, since = play.rounds[-1], play.items_before
    may_run = play.finish is not None and play.finish.reason == "stop"
    answers = await play.hosted_calls.answer(last.wrote, play.scene, may_run=may_run)
    if answers:
        wrote = play.running.assembler.items[since : since + len(last.wrote)]
        play.rounds[-1] = structs.replace(last, wrote=tuple(wrote))
    return answers


async def _appended(play: Play, items: tuple[Item, ...]) -> tuple[Item, ...]:
    """What was appended, with its files read and the calls made that it approves; none, if it may not pass."""
    items = await play.hosted_calls.read(items)
    if play.gate is not None and approvals(items):
        scene = structs.replace(play.scene, given=items)
        if not await _clears(play.gate, play.running, scene, is_first=False):
            return items
    return await play.hosted_calls.approve(items, play.rounds)


async def _keep(play: Play, answers: tuple[Item, ...]) -> None:
    """The turn ends behind answers that the model has not read: the next turn begins with them, warm."""
    _go_on(play, answers)
    play.composed = None
    with suppress(ApiError):
        play.composed = await compose(play.plan, play.scene, may_truncate=False)
    _note(play, did_sample=False)


def _go_on(play: Play, items: tuple[Item, ...]) -> None:
    """The next round sees this one as its past, warm."""
    plan, scene, last = play.plan, play.scene.as_one(), play.rounds[-1]
    so_far = Turn(
        id=plan.id,
        owner=plan.owner,
        parent_id=scene.past.id if scene.past else None,
        parent=scene.past,
        rounds=(*scene.rounds, structs.replace(last, given=scene.given)),
        response=plan.response,
        is_stored=False,
        open_calls=play.open_calls,
        model_turns=0,
        warm=_warm(play),
        root_at=plan.root_at,
    )
    play.scene = structs.replace(
        scene,
        head=_unforced(scene.head, items),
        past=so_far,
        rounds=(),
        given=items,
        effects=apply_effects(scene.effects, items),
    )
    play.given, play.is_fresh = items, False
    play.items_before = len(play.running.assembler.items)


def _unforced(head: Head, items: tuple[Item, ...]) -> Head:
    """A call that was forced is over after its first time, where one of our own tools has answered it."""
    choice = head.tool_choice
    is_answered = any(isinstance(one.value, HostedOutput | ToolSearchOutput) for one in items)
    if not is_answered or choice in ("auto", "none"):
        return head
    if isinstance(choice, ToolChoiceName) and choice.type == "allowed_tools":
        return structs.replace(head, tool_choice=structs.replace(choice, mode="auto"))
    is_clients = isinstance(choice, ToolChoiceName) and choice.type in ("function", "custom")
    return head if is_clients else structs.replace(head, tool_choice="auto")


def _warm(play: Play) -> Warm | None:
    """What the last prompt makes fast; one that was truncated would begin elsewhere with nothing warm."""
    if play.composed is None or play.composed.is_truncated:
        return None
    if _is_shut(play) or play.has_stopped:
        return None
    plan = play.plan
    return warm_after(
        plan.model.dialect.fingerprint,
        plan.resolved.head,
        play.composed.rendered,
        play.rounds[-1],
        play.begun.route,
    )


def _is_shut(play: Play) -> bool:
    return play.gate is not None and play.gate.is_shut


# --- waiting for the client ---------------------------------------------------------------------------


def _required(play: Play) -> list[Required]:
    """What the client owes for the calls of this round."""
    written = play.rounds[-1].wrote
    return [one for item in written if (one := required_by(item.value)) is not None]


async def _wait(play: Play, required: list[Required]) -> None:
    """Until something arrives, or nobody believes in it any more."""
    running = play.running
    running.awaited_calls = play.open_calls
    running.publish([running.assembler.wait_for(required)])
    with suppress(TimeoutError):
        async with running.interruptible():
            await asyncio.sleep(play.plan.append_s_max)
            if not running.is_waiting:
                # It has come, and waits for a place.
                await asyncio.Event().wait()
    running.awaited_calls = None


def _too_late(plan: Plan) -> ApiError:
    return ServerFault(
        f"The rollout waited {plan.append_s_max:g} s for the outputs of its calls.",
        code="append_timeout",
    )


# --- compaction ---------------------------------------------------------------------------------------


async def _compact(play: Play) -> Finish | None:
    """Let the model sum up what it has seen; from here on history begins with that."""
    plan, running = play.plan, play.running
    assembler, scene = running.assembler, play.scene
    quiet = structs.replace(
        scene.head, tool_choice="none", text=TextConfig(), reasoning=ReasoningConfig(effort="none")
    )
    asked = structs.replace(scene, head=quiet, given=(*scene.given, asking()))
    composed = fitting(plan, await compose(plan, asked, may_truncate=True))
    # Read as if tools were allowed: a call is then seen as one, and no part of the summary.
    heard = structs.replace(composed.scene, head=structs.replace(quiet, tool_choice="auto"))
    reader = plan.model.dialect.reader(heard)
    summary = Summary(reader, lambda: running.publish(assembler.compact()))
    limit = plan.threshold or plan.model.context_tokens
    tokens_max = min(SUMMARY_TOKENS_MAX, int(limit * SUMMARY_SHARE))
    finish = await sample(play, composed, summary, tokens_max)
    summary.close(is_cut=True)
    if finish is None and running.inbox:
        return None
    if not summary.text and not plan.compacts:
        # It goes on as it is, as long as it fits.
        return None
    if play.gate is not None and not await play.gate.vet(summary.text):
        if play.gate.is_shut:
            return None
        raise InvalidRequest(
            "The summary of this conversation was blocked by a guard of this server.",
            code="invalid_prompt",
            param="input",
        )
    if finish is None or not summary.text:
        raise EngineFailed("The model wrote no summary to go on with.")
    history = list(scene.history())
    kept = await asyncio.to_thread(
        worth_keeping, history, scene.given, int(limit * KEPT_SHARE), partial(measure, plan)
    )
    kind = plan.compacts or "chain"
    compacted = Compacted(kind, summary.text, sealed_with(kept, kind))
    running.publish(assembler.compacted(to_bytes(compacted)))
    _note(play, did_sample=False)
    play.given, play.is_fresh = stand_in(compacted), True
    play.scene = structs.replace(scene, past=None, rounds=(), given=play.given, recalled=None)
    play.items_before = len(assembler.items)
    return structs.replace(finish, reason="stop")


class Summary:
    """A reader that keeps the text to itself, and nothing else that the model may say."""

    def __init__(self, reader: Reader, on_begun: Callable[[], None]) -> None:
        self._reader = reader
        self._on_begun = on_begun
        self._is_text = False
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """What the model wrote."""
        return "".join(self._pieces).strip()

    @property
    def is_over(self) -> bool:
        """As its reader says."""
        return self._reader.is_over

    def feed(self, piece: Piece) -> list[Parsed]:
        """Nothing for the client."""
        return self._keep(self._reader.feed(piece))

    def close(self, *, is_cut: bool) -> list[Parsed]:
        """Nothing for the client."""
        return self._keep(self._reader.close(is_cut=is_cut))

    def _keep(self, parsed: list[Parsed]) -> list[Parsed]:
        for one in parsed:
            if isinstance(one, ItemOpened):
                self._is_text = one.kind == "message"
            elif isinstance(one, ItemText) and self._is_text:
                if not self._pieces:
                    self._on_begun()
                self._pieces.append(one.text)
        return []


# --- the end ------------------------------------------------------------------------------------------


async def _save(play: Play, end: End, turns: Turns) -> None:
    """Save before you say: after this the terminal event may leave."""
    began = now()
    plan, assembler = play.plan, play.running.assembler
    usage = _with_thoughts(play)
    assembler.conclude(end, usage, int(time.time()))
    try:
        if plan.is_stored or end.status in ("completed", "incomplete"):
            made = commit(
                plan,
                assembler.response,
                tuple(play.rounds),
                play.open_calls,
                _warm(play),
                () if play.gate is None else play.gate.names,
            )
            await turns.save(made)
            play.running.turn = made
            plan.tally.is_recorded = plan.is_stored
    except ApiError as error:
        assembler.conclude(End("failed", error=error), usage, int(time.time()))
        await _save_failed(plan, play.running, turns, play.rounds)
    plan.tally.stage_s["save"] = now() - began
    plan.tally.mark("saved")


async def _save_failed(plan: Plan, running: Running, turns: Turns, rounds: Sequence[Round]) -> None:
    """A part of it may be in the store, as queued or even as completed: that must not stay."""
    if not plan.is_stored:
        return
    running.unsaved = commit(
        plan, running.response, tuple(rounds), plan.resolved.open_calls, warm=None
    )
    try:
        await turns.save(running.unsaved)
        running.unsaved = None
        plan.tally.is_recorded = True
    except ApiError:
        log.warning("turn %s could not be saved as failed", plan.id)


def _with_thoughts(play: Play) -> Usage:
    """The usage of the whole turn; where no engine has counted the thoughts, their ids are counted."""
    usage = play.usage
    if usage.output_tokens_details.reasoning_tokens:
        return usage
    written = zip(play.running.assembler.items, play.running.assembler.ids, strict=True)
    thought = sum(len(ids) for item, ids in written if isinstance(item.value, Reasoning))
    return structs.replace(usage, output_tokens_details=OutputDetails(reasoning_tokens=thought))
