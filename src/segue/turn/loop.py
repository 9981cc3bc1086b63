"""What does a turn do once it has started? Rounds of render -> sample -> read -> filter -> assemble, then save.

Theory of operation. A `TurnLoop` is one turn while it runs. `run` sends events through its `Running` turn and does not
raise: what goes wrong ends the turn as failed. Each round renders a prompt, asks the engine, reads what it samples and
sends it through the filters of this turn (stop strings, guards) to the assembler, which numbers the events. After each
round `decide` says whether the turn goes on, waits or ends: a hosted tool's output, a steer and a rollout are all this
one loop. A compaction happens inside a round, before its prompt is final.

A scope that is `interruptible` ends with `Interrupted` when a notice comes into the inbox. When `run` returns, the turn
is saved and the assembler holds the response; the caller sends the one terminal event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from time import perf_counter

from msgspec import structs

from segue.errors import ApiError, EngineFailed, Fenced, InvalidRequest, ServerFault, append_timeout
from segue.seams.history import Round, Turn, Warm
from segue.seams.model import Finish, Job, JobStarted, Parsed, Reader, Scene
from segue.seams.prompt import Head, Tokens
from segue.turn.commit import calls_in, commit, warm_after
from segue.turn.compact import (
    ASSUMED_CONTEXT_TOKENS,
    Compacted,
    asking,
    sealed_with,
    stand_in,
    to_bytes,
    worth_keeping,
)
from segue.turn.compose import compose, fitting, measure, set_scene
from segue.turn.decide import Again, Await, End, decide
from segue.turn.filters import StopStrings, Summary
from segue.turn.plan import Composed, FirstPrompt, Plan, Span
from segue.turn.resolve import pair_calls
from segue.turn.resources import Filter, Gate, HostedCalls, NextRound, Resources
from segue.turn.running import ID_BYTES, Interrupted, Running
from segue.turn.sampling import ModelCall
from segue.wire.effects import apply_effects
from segue.wire.items import Call, HostedOutput, Item, Reasoning, Required
from segue.wire.kinds import call_id_of, is_output, required_by
from segue.wire.requests import ReasoningConfig, TextConfig, ToolChoiceName
from segue.wire.response import NO_USAGE, InputDetails, OutputDetails, Usage

log = logging.getLogger(__name__)

# A summary longer than this is no summary. It has at most this share of what a prompt may have, and so have the
# messages that are kept word for word beside it: then the next prompt is far from being compacted again.
SUMMARY_TOKENS_MAX = 2_048
SUMMARY_SHARE = 0.25
KEPT_SHARE = 0.25
# Before the engine says where a job runs.
NOT_STARTED = JobStarted()

# Returns when the turn is as durable as it is to be.
Save = Callable[[Turn], Awaitable[None]]

PROBLEM = "The server had an error while processing your request."


class TurnLoop:
    """One turn, from its first round to its save."""

    # What the dialect sees in this round.
    scene: Scene

    def __init__(self, plan: Plan, running: Running, save: Save, resources: Resources) -> None:
        self.plan = plan
        self.running = running
        self.assembler = running.assembler
        self.save = save
        self.resources = resources
        self.gate: Gate | None = None
        self.hosted: HostedCalls | None = None
        # What this round was given, for the record; the scene may show it in another way.
        self.given = plan.resolved.given
        self.open_calls: dict[str, Call] = plan.resolved.open_calls
        # Rounds that are over.
        self.rounds: list[Round] = [*plan.resolved.earlier]
        # The prompt of this round, and the first one of the turn, which the render cache may keep.
        self.composed: Composed | None = None
        self.first_composed: Composed | None = None
        self.first_prompt: FirstPrompt | None = None
        # The turn as it ended, where the store could not save it yet.
        self.unsaved: Turn | None = None
        self.lineage = resources.trace_lineage(plan)
        # The replica that has read what came before.
        self.route = plan.resolved.parent.route if plan.resolved.parent else None
        self.finish: Finish | None = None
        self.usage = NO_USAGE
        # The tokens that count against the client's limit: those of the answer in all rounds, without summaries.
        self.answer_tokens = 0
        # Where the items of this round begin in the output, and how many tokens it has sampled.
        self.items_before = 0
        self.sampled = 0
        # Whether a filter has cut this round: what is kept of it is then not what was sampled.
        self.is_cut_short = False
        # Whether history begins anew with what this round was given.
        self.is_fresh = False
        # Whether the prompt begins with ids that the record of this turn does not have: of a history sent again.
        self.is_recalled = False

    async def run(self) -> None:
        """The turn to its end, saved."""
        self.running.publish(self.assembler.start())
        plan = self.plan
        try:
            if self.resources.open_gate is not None and (plan.guards.inputs or plan.guards.outputs):
                self.gate = self.resources.open_gate(plan, self.running)
            error = await self._begin_hosted() if plan.resolved.is_hosted else None
            self.scene = set_scene(self.plan, self.resources.prompt_cache)
            past = self.scene.past
            if plan.resolved.parent is None and past is not None and past.warm is not None:
                self.route = past.warm.route
                if isinstance(past.warm.prompt, Tokens):
                    kept = chain.from_iterable(earlier.ids for earlier in self.scene.history())
                    self.is_recalled = any(map(len, kept))
            end = await self._play() if error is None else End("failed", error=error)
            if self.first_composed is not None and plan.resolved.resent is not None:
                wrote = self.rounds if end.status == "completed" else []
                cache = self.resources.prompt_cache
                cache.remember(self.plan, self.first_composed, wrote, self._warm())
            await self._save(end)
        except Exception:
            # A mistake of ours; the client still gets its one terminal event.
            log.exception("turn %s failed unexpectedly", plan.id)
            broken = End("failed", error=ServerFault(PROBLEM))
            self.assembler.conclude(broken, NO_USAGE, int(time.time()))
            given = Round(plan.resolved.given)
            await self._save_failed([*plan.resolved.earlier, given], plan.resolved.open_calls)
        finally:
            if self.gate is not None:
                await self.gate.leave()

    # --- rounds ---

    async def _play(self) -> End:
        """Rounds, until one of them is the last."""
        while True:
            error = await self._round()
            if error is not None:
                return End("failed", error=error)
            if self.finish is not None and not self.plan.generates:
                return End("completed")
            answers = await self._answer() if self.hosted is not None else ()
            answered = {call_id_of(item.value) for item in answers}
            required = [
                owed
                for item in self.rounds[-1].wrote
                if (owed := required_by(item.value)) is not None
                and call_id_of(item.value) not in answered
            ]
            decision = await self._decide(required, answers)
            if isinstance(decision, End):
                if answers and decision.status in ("completed", "incomplete"):
                    await self._keep_answers(answers)
                return decision
            items = decision.items
            self.running.remove_appends()
            if required:
                try:
                    items = (*answers, *await self._appended(items))
                except ApiError as refused:
                    return End("failed", error=refused.kept())
            self._go_on(items, is_answered=bool(answers))
            self.open_calls = pair_calls(self.open_calls, items)

    async def _decide(self, required: Sequence[Required], answers: tuple[Item, ...]) -> Again | End:
        """What follows this round; a rollout first waits for its client."""
        plan, running = self.plan, self.running
        is_spent = self.hosted is not None and self.hosted.is_spent
        decision = decide(
            self.finish,
            running.inbox,
            is_waiting=plan.is_rollout and bool(required),
            answers=() if required or is_spent else answers,
            is_used_up=bool(required or answers) and self._tokens_left() == 0,
        )
        if isinstance(decision, Await):
            await self._wait(required)
            decision = decide(self.finish, running.inbox, is_waiting=True)
        if isinstance(decision, Await):
            return End("failed", error=append_timeout(self.resources.append_s_max))
        return decision

    async def _round(self) -> ApiError | None:
        """One call of the model, read to its end; what went wrong with it, if anything did."""
        plan = self.plan
        reader: Reader | None = None
        filters: list[Filter] = []
        error: ApiError | None = None
        self.finish = None
        self.is_cut_short = False
        if self.gate is not None:
            self.gate.ask(self.scene, is_first=self.first_composed is None)
        try:
            if plan.compacts:
                self.finish = await self._compact()
                self.composed = None
            else:
                self.composed = await self._compose()
                if plan.generates:
                    reader = plan.model.dialect.reader(self.composed.scene)
                    if stops := plan.sampling.stop_strings:
                        filters.append(StopStrings(stops, plan.tally))
                    if self.gate is not None:
                        filters.append(self.gate)
                if self.gate is None or not self.gate.is_shut:
                    self.finish = await self._sample(self.composed, reader, filters)
        except ApiError as refused:
            error = refused.kept()
        except Exception:
            log.exception("a round of turn %s failed", plan.id)
            error = ServerFault(PROBLEM)
        parsed: list[Parsed] = []
        if reader is not None:
            is_cut = self.finish is None or self.finish.reason != "stop"
            parsed = reader.close(is_cut=is_cut)
        if filters or self.gate is not None:
            parsed = await self._close_filters(filters, parsed, error)
        self.running.publish(self.assembler.feed(parsed))
        self._record_round(did_sample=reader is not None)
        return error

    async def _close_filters(
        self, filters: Sequence[Filter], parsed: list[Parsed], error: ApiError | None
    ) -> list[Parsed]:
        """What may still leave of a round that is over. A steer waits for the guards, any other notice ends that."""
        gate = self.gate
        try:
            async with self.running.interruptible(heeds_steers=False):
                for each in filters:
                    if each is not gate:
                        parsed = await each.close(parsed)
                if gate is not None:
                    parsed = gate.drop() if error is not None else await gate.close(parsed)
        except Interrupted:
            parsed = gate.drop() if gate is not None else parsed
        if gate is not None and gate.is_shut:
            self.finish = None
        self.is_cut_short = any(each.is_shut for each in filters)
        return parsed

    async def _compose(self) -> Composed:
        """The prompt of this round; if it passes the client's threshold, of what is left after a compaction."""
        plan = self.plan
        may_truncate = plan.resolved.create.truncation == "auto"
        composed = await compose(plan, self.scene, may_truncate=may_truncate and not plan.threshold)
        # Of messages these are bytes.
        size = ID_BYTES if isinstance(composed.prompt, Tokens) else 1
        self.running.hold(size=size * composed.rendered.tokens_tokenized)
        self.first_composed = self.first_composed or composed
        if plan.threshold and composed.length > plan.threshold and not self.is_fresh:
            if await self._compact() is None:
                return composed if self.running.inbox else fitting(plan, composed)
            composed = await compose(plan, self.scene, may_truncate=may_truncate)
        return fitting(plan, composed)

    def _record_round(self, *, did_sample: bool) -> None:
        """This round is over: it becomes part of the record."""
        assembler, since = self.assembler, self.items_before
        is_cut = self.is_cut_short or (self.gate is not None and self.gate.is_shut)
        last = Round(
            given=self.given,
            wrote=tuple(assembler.items[since:]),
            ids=tuple(assembler.ids[since:]),
            tail=assembler.tail,
            fingerprint=None if is_cut else self.plan.model.dialect.fingerprint,
            did_sample=did_sample,
            is_fresh=self.is_fresh,
        )
        self.rounds.append(last)
        # Ids are kept, and joined to the prompt of the next round.
        self.running.hold(last.wrote, 2 * ID_BYTES * self.sampled)
        self.open_calls = self.open_calls | calls_in(last.wrote)

    def _go_on(self, items: tuple[Item, ...], *, is_answered: bool) -> None:
        """The next round sees this one as its past, warm. `is_answered`: a tool of ours has answered it."""
        is_answered = is_answered or any(isinstance(one.value, HostedOutput) for one in items)
        self.scene = self._scene_after(items, is_answered=is_answered)
        self.running.hold(items)
        self.assembler.answered |= {call_id_of(item.value) for item in items}
        self.given = items
        self.is_fresh = False
        self.items_before = len(self.assembler.items)

    def _scene_after(self, items: tuple[Item, ...], *, is_answered: bool = True) -> Scene:
        scene = self.scene
        head = _unforced(scene.head) if is_answered else scene.head
        effects = apply_effects(scene.effects, items)
        return scene.after(self.rounds[-1], self._warm(), head, items, effects)

    def _warm(self) -> Warm | None:
        """What the last prompt makes fast; one that was truncated would begin elsewhere with nothing warm."""
        composed = self.composed
        if composed is None or composed.is_truncated:
            return None
        last = self.rounds[-1]
        if last.fingerprint is None:
            return None
        return warm_after(
            last.fingerprint,
            self.plan.resolved.head,
            composed.rendered.counted(self.finish.input_tokens if self.finish else None),
            last,
            self.plan.tally.started.route,
        )

    # --- the engine ---

    async def _sample(
        self,
        composed: Composed,
        reader: Reader | None,
        filters: Sequence[Filter],
        tokens_max: int | None = None,
    ) -> Finish | None:
        """Call the model once, and count what that used."""
        plan, tally = self.plan, self.plan.tally
        self.sampled = 0
        tally.started = NOT_STARTED
        if self.running.inbox:
            return None
        call = ModelCall(self.running, tally, reader, filters, composed.rendered.lead)
        is_counted = True
        try:
            return await call.run(plan.model.engine, self._job(composed, tokens_max))
        except Exception:
            # What breaks after the first token has cost as much as a whole answer.
            is_counted = call.tokens > 0
            raise
        finally:
            self.sampled = call.tokens
            if tally.started is not NOT_STARTED:
                self.route = tally.started.route
            if is_counted:
                self._count(composed, call.finish, is_summary=tokens_max is not None)
            tally.spans.append(Span("sample", call.first_at, perf_counter()))

    def _job(self, composed: Composed, tokens_max: int | None) -> Job:
        """What the engine is asked. A warm-up asks for no output: the engine reads the prompt and no more."""
        plan, rendered = self.plan, composed.rendered
        tokens = plan.model.context_tokens
        # Of messages only the endpoint knows how long they are.
        room = tokens - composed.length if tokens and isinstance(composed.prompt, Tokens) else None
        limits = (tokens_max, self._tokens_left(), plan.model.output_tokens_max, room)
        wanted = next((limit for limit in limits if limit is not None), None)
        wanted = wanted if wanted is None or room is None else min(wanted, room)
        is_answer = plan.generates or tokens_max is not None
        is_resumed = bool(self.given) and is_output(self.given[-1].value)
        return Job(
            prompt=composed.prompt if is_answer else rendered.context,
            scene=composed.scene,
            sampling=plan.sampling,
            stops=plan.model.dialect.stops,
            output_tokens_max=wanted if is_answer else 0,
            schema=rendered.schema,
            owner=plan.owner,
            lane=plan.arrival.caller.lane,
            route=self.route,
            lineage=structs.replace(self.lineage, is_resumed=is_resumed),
            model_turns=plan.resolved.model_turns + sum(ended.did_sample for ended in self.rounds),
            cache_salt=self.resources.cache_salt(plan.owner),
        )

    def _tokens_left(self) -> int | None:
        """What the client's limit leaves for this round: it holds for the whole response."""
        limit = self.plan.resolved.create.max_output_tokens
        return None if limit is None else max(0, limit - self.answer_tokens)

    def _count(self, composed: Composed, finish: Finish | None, *, is_summary: bool) -> None:
        """Add what one call of the model used: as the engine counted, or as we did, because the ids are ours."""
        started = self.plan.tally.started
        finish = finish or Finish("stop", started.cached_tokens)
        is_answer = self.plan.generates or self.plan.compacts is not None
        prompt = composed.prompt if is_answer else composed.rendered.context
        given = prompt.length if isinstance(prompt, Tokens) else 0
        given = given if finish.input_tokens is None else finish.input_tokens
        wrote = self.sampled if finish.output_tokens is None else finish.output_tokens
        # What an engine samples for a warm-up, because it samples at least one token, nobody asked for.
        wrote = wrote if is_answer or is_summary else 0
        # A summary has a limit of its own.
        self.answer_tokens += 0 if is_summary else wrote
        # The engine's last word on it.
        read = structs.replace(started, cached_tokens=finish.cached_tokens)
        self.plan.tally.started = read
        if self.first_prompt is None and not is_summary:
            self.first_prompt = FirstPrompt(self.plan, composed, read)
        before, details = self.usage, self.usage.input_tokens_details
        cached = min(finish.cached_tokens or 0, given)
        # An engine with a prefix cache keeps in it what it has computed.
        written = 0 if finish.cached_tokens is None else max(0, given - cached)
        reasoning = before.output_tokens_details.reasoning_tokens + (finish.reasoning_tokens or 0)
        self.usage = Usage(
            before.input_tokens + given,
            InputDetails(details.cached_tokens + cached, details.cache_write_tokens + written),
            before.output_tokens + wrote,
            OutputDetails(reasoning_tokens=reasoning),
            before.total_tokens + given + wrote,
        )

    # --- hosted tools ---

    async def _begin_hosted(self) -> ApiError | None:
        """What is done before the model speaks: files are read and hosted tools run, if the input may pass."""
        if self.resources.hosted is None:
            return None
        self.hosted = self.resources.hosted.load().open(self.plan, self.running, self.gate)
        try:
            self.plan = await self.hosted.begin(self._may_begin)
        except ApiError as error:
            return error
        sent = set(map(id, self.given))
        self.given = self.plan.resolved.given
        self.running.hold([item for item in self.given if id(item) not in sent])
        # What our own tools have done before the model speaks was given to it.
        self.items_before = len(self.assembler.items)
        return None

    async def _may_begin(self, plan: Plan) -> bool:
        scene = set_scene(plan, self.resources.prompt_cache)
        return await self._may_act(scene, is_first=True)

    async def _may_append(self, items: tuple[Item, ...]) -> bool:
        return await self._may_act(structs.replace(self.scene, given=items), is_first=False)

    async def _may_act(self, scene: Scene, *, is_first: bool) -> bool:
        """Whether calls that a person has approved may be made: they have effects, so they wait for the guards."""
        if self.gate is None:
            return True
        try:
            async with self.running.interruptible(heeds_steers=False):
                return await self.gate.clear(scene, is_first=is_first)
        except Interrupted:
            return False

    async def _answer(self) -> tuple[Item, ...]:
        """The outputs of the hosted calls of this round; the calls are then finished items."""
        assert self.hosted is not None
        last, since = self.rounds[-1], self.items_before
        finish, following = self.finish, None
        may_run = finish is not None and finish.reason == "stop"
        if may_run and finish is not None and self.composed is not None:
            following = NextRound(self._scene_after, self._job(self.composed, None), finish)
        answers = await self.hosted.answer(
            last.wrote, self.scene, may_run=may_run, following=following
        )
        if answers:
            wrote = self.assembler.items[since : since + len(last.wrote)]
            self.rounds[-1] = structs.replace(last, wrote=tuple(wrote))
        return answers

    async def _keep_answers(self, answers: tuple[Item, ...]) -> None:
        """The turn ends after answers that the model has not read: the next turn begins with them, warm."""
        self._go_on(answers, is_answered=True)
        answered = {call_id_of(item.value) for item in answers}
        self.open_calls = {
            call_id: call for call_id, call in self.open_calls.items() if call_id not in answered
        }
        self.composed = None
        with suppress(ApiError):
            self.composed = await compose(self.plan, self.scene, may_truncate=False)
        self._record_round(did_sample=False)

    # --- rollouts ---

    async def _appended(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        """What was appended, with its files read and the calls made that it approves."""
        if self.hosted is None:
            if self.resources.hosted is None:
                return items
            self.hosted = self.resources.hosted.load().open(self.plan, self.running, self.gate)
        return await self.hosted.append(items, self.rounds, self._may_append)

    async def _wait(self, required: Sequence[Required]) -> None:
        """Until the client appends, or the timeout expires."""
        running = self.running
        running.wait_for(self.open_calls)
        running.publish([self.assembler.wait_for(required)])
        with suppress(Interrupted):
            async with running.interruptible():
                await asyncio.sleep(self.resources.append_s_max)
                if not running.is_waiting:
                    # The append has come, and waits for a slot.
                    await asyncio.Event().wait()
        running.stop_waiting()

    # --- compaction ---

    async def _compact(self) -> Finish | None:
        """Let the model summarise what it has seen; from here on history begins with the summary."""
        plan, running, assembler, scene = self.plan, self.running, self.assembler, self.scene
        quiet = structs.replace(
            scene.head,
            tool_choice="none",
            text=TextConfig(),
            reasoning=ReasoningConfig(effort="none"),
        )
        request = structs.replace(scene, head=quiet, given=(*scene.given, asking()))
        composed = fitting(plan, await compose(plan, request, may_truncate=True))
        # Read as if tools were allowed: a call is then seen as a call, and no part of the summary.
        read_as = structs.replace(composed.scene, head=structs.replace(quiet, tool_choice="auto"))
        reader = plan.model.dialect.reader(read_as)
        summary = Summary(lambda: running.publish(assembler.compact()))
        limit = plan.threshold or plan.model.context_tokens or ASSUMED_CONTEXT_TOKENS
        tokens_max = min(SUMMARY_TOKENS_MAX, int(limit * SUMMARY_SHARE))
        finish = await self._sample(composed, reader, [summary], tokens_max)
        await summary.close(reader.close(is_cut=True))
        if finish is None and running.inbox:
            return None
        if not summary.text and not plan.compacts:
            # It goes on as it is, as long as it fits.
            return None
        if self.gate is not None and not await self.gate.vet(summary.text):
            if self.gate.is_shut:
                return None
            raise InvalidRequest(
                "The summary of this conversation was blocked by a guard of this server.",
                code="invalid_prompt",
                param="input",
            )
        if finish is None or not summary.text:
            raise EngineFailed("The model wrote no summary to go on with.")
        kept = await asyncio.to_thread(
            worth_keeping,
            list(scene.history()),
            scene.given,
            int(limit * KEPT_SHARE),
            partial(measure, plan),
        )
        kind = plan.compacts or "chain"
        compacted = Compacted(kind, summary.text, sealed_with(kept, kind))
        running.publish(assembler.compacted(to_bytes(compacted)))
        self._record_round(did_sample=False)
        self.given, self.is_fresh = stand_in(compacted), True
        self.scene = structs.replace(scene, past=None, rounds=(), given=self.given)
        self.items_before = len(assembler.items)
        return structs.replace(finish, reason="stop")

    # --- the end ---

    async def _save(self, end: End) -> None:
        """Save before you say: after this the terminal event may leave."""
        began = perf_counter()
        plan, assembler = self.plan, self.assembler
        usage = self.usage
        if not usage.output_tokens_details.reasoning_tokens:
            # Where no engine has counted the reasoning, its ids are counted.
            written = zip(assembler.items, assembler.ids, strict=True)
            count = sum(len(ids) for item, ids in written if isinstance(item.value, Reasoning))
            details = OutputDetails(reasoning_tokens=count)
            usage = structs.replace(usage, output_tokens_details=details)
        if (options := plan.resolved.create.prompt_cache_options) is not None:
            await self._diagnose(options.comparison_response_id)
        response = assembler.conclude(end, usage, int(time.time()))
        if end.status not in ("completed", "incomplete"):
            self.resources.drop_lineage(plan)
        try:
            if plan.is_stored or end.status in ("completed", "incomplete"):
                passed = () if self.gate is None else self.gate.names
                warm = None if self.is_recalled else self._warm()
                rounds, calls = tuple(self.rounds), self.open_calls
                turn = commit(plan, response, rounds, calls, warm, passed, self.lineage, self.route)
                await self.save(turn)
                self.running.saved(turn)
                plan.tally.is_recorded = plan.is_stored
        except Fenced as error:
            # Whatever is known of it in the store is not ours any more; its usage is settled afterwards.
            assembler.conclude(End("failed", error=error), usage, int(time.time()))
        except ApiError as error:
            assembler.conclude(End("failed", error=error), usage, int(time.time()))
            await self._save_failed(self.rounds, plan.resolved.open_calls)
        plan.tally.spans.append(Span("save", began, perf_counter()))

    async def _diagnose(self, compared: str | None) -> None:
        """How the prompt compares with that of the response that the client has named, if it has."""
        diagnose, prompt = self.resources.diagnose, self.first_prompt
        if compared is not None and diagnose is not None and prompt is not None:
            found = await diagnose(prompt, compared, self.plan.arrival.caller.turns)
            response = self.assembler.response
            self.assembler.response = structs.replace(response, prompt_cache_diagnostics=found)

    async def _save_failed(self, rounds: Sequence[Round], open_calls: dict[str, Call]) -> None:
        """A part of the turn may be in the store, as queued or even as completed: that must not stay."""
        plan = self.plan
        if not plan.is_stored:
            return
        failed = commit(plan, self.running.response, tuple(rounds), open_calls)
        try:
            await self.save(failed)
            plan.tally.is_recorded = True
        except Fenced:
            pass
        except ApiError:
            log.warning("could not save turn %s as failed; retrying later", plan.id)
            self.unsaved = failed


def _unforced(head: Head) -> Head:
    """A call that was forced is over after its first time, where one of our own tools has answered it."""
    choice = head.tool_choice
    if choice in ("auto", "none"):
        return head
    if isinstance(choice, ToolChoiceName) and choice.type == "allowed_tools":
        return structs.replace(head, tool_choice=structs.replace(choice, mode="auto"))
    is_clients = isinstance(choice, ToolChoiceName) and choice.type in ("function", "custom")
    return head if is_clients else structs.replace(head, tool_choice="auto")
