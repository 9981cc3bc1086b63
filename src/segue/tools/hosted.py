"""What do hosted tools answer to the calls of the model? Sampling pauses, the tool runs here, sampling goes on.

A *hosted call* is a call that a tool of this server answers. `ServerTools` are these tools; `TurnToolCalls` runs the
calls of one turn: what is to be done before the model speaks, and the calls of each round. No tool is named here: all
that is particular to one is in its `HostedTool`. What a tool returns is data: it becomes a `HostedOutput` after the
call, for the model alone, or an item of its own; and the finished item is what the client sees. Every call has a limit
in time and in bytes, and all of them together in number. A notice that ends the turn stops what runs; a steer waits
until it is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import NamedTuple

from msgspec import Raw, structs

from segue.errors import InvalidRequest
from segue.seams.access import Room
from segue.seams.history import Owner, Round, Turn
from segue.seams.model import Scene
from segue.seams.tools import (
    AnyHostedKind,
    Emit,
    HostedCall,
    HostedTool,
    ShowProgress,
    Source,
    Task,
    ToolResult,
    TurnAhead,
    TurnStart,
    unseen,
)
from segue.tools.ahead import ReadAhead, reads_ahead
from segue.tools.inputs import (
    OpenFile,
    ReadPdf,
    ReadUrl,
    attach,
    attach_files,
    read_pdfs,
)
from segue.turn.plan import Plan, Span
from segue.turn.resolve import tools_of
from segue.turn.resources import Gate, NextRound
from segue.turn.running import Interrupted, Running
from segue.wire.codec import as_item, encode, raw_tools
from segue.wire.drafts import Streamed
from segue.wire.effects import Effects, apply_effects
from segue.wire.events import Inside
from segue.wire.items import HostedOutput, Item, ItemValue, weigh
from segue.wire.kinds import approved_by
from segue.wire.requests import ToolChoiceName
from segue.wire.tools import Offer, ToolDefinition, Tools, forced_offers, tag_of

log = logging.getLogger(__name__)

# How many hosted calls one response may have, whatever the request says.
CALLS_MAX = 128
# How many calls over the limit are refused before the response ends.
REFUSED_MAX = 8
# As MCP numbers them.
TIMED_OUT, REFUSED = -32001, -32600

NOT_MADE = "The call was not made, because the response ended before."
TOO_MANY = "The call was not made: no more tool calls are allowed in this response."
CUT_OFF = "\n[What follows was left out: the output is too long.]"


class _Work(NamedTuple):
    """A call, and the item that a tool works on for it: the call itself, or one of the tool's own."""

    tool: HostedTool
    kind: AnyHostedKind
    call: ItemValue
    item: Item
    scene: Scene | None

    @property
    def item_id(self) -> str:
        return str(self.item.value.id)

    @property
    def has_own_item(self) -> bool:
        return self.kind.answer is not None


class ServerTools:
    """The tools that this process runs, in the order in which the model is offered them."""

    def __init__(
        self,
        tools: Sequence[HostedTool] = (),
        *,
        read_pdf: ReadPdf,
        read_url: ReadUrl | None = None,
        open_file: OpenFile | None = None,
        call_s_max: float = 60.0,
        output_bytes_max: int = 128 * 1024,
    ) -> None:
        self.tools = tuple(tools)
        # Reads the PDF files of an input, and the URLs in it where the operator allows that.
        self.read_pdf = read_pdf
        self._read_url = read_url
        # Reads the files that clients have uploaded.
        self._open_file = open_file
        # What each hosted call may take.
        self.call_s_max = call_s_max
        self.output_bytes_max = output_bytes_max
        self.kinds = {kind.struct: (tool, kind) for tool in self.tools for kind in tool.kinds}

    # --- what a request means ---

    def offer(
        self, tools: Tools, effects: Effects, tools_before: Tools | None, may: Container[str]
    ) -> Tools:
        for tool in self.tools:
            tool.check(tools, may)
        return self.with_offers(tools, effects, tools_before, may)

    def with_offers(
        self, tools: Tools, effects: Effects, tools_before: Tools | None, may: Container[str]
    ) -> Tools:
        """The tools with what hosted tools offer."""
        offers: list[Offer] = []
        late: set[tuple[str, str]] = set()
        for tool in self.tools:
            definitions = [one for one in tools.known if isinstance(one, tool.definitions)]
            if definitions and (tool.scope is None or tool.scope in may):
                offers += tool.offers(tools, effects, tools_before)
            if tool.begin is not None and tool.is_set_up:
                late |= {(tag_of(one), tool.key(one)) for one in definitions}
        return tools.with_hosted(offers, frozenset(late))

    def with_outputs(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        # In our own history the two are apart, because the model wrote the one and was given the other.
        spelled: list[Item] = []
        for item in items:
            spelled.append(item)
            tool, _ = self.kinds.get(type(item.value), (None, None))
            if tool is not None and (words := tool.words(item.value)) is not None:
                spelled.append(_output_item(item.value, words))
        return tuple(spelled)

    # --- files ---

    async def fetch(self, owner: Owner, items: tuple[Item, ...], room: Room) -> tuple[Item, ...]:
        if self._open_file is not None:
            items = await attach_files(items, owner, self._open_file, room)
        return items if self._read_url is None else await attach(items, self._read_url, room)

    async def read_files(self, plan: Plan) -> Plan:
        return _with_given(plan, await read_pdfs(plan.resolved.given, self.read_pdf))

    # --- calls ---

    async def prepare(self, plan: Plan) -> Plan:
        head, parent = plan.resolved.head, plan.resolved.parent
        for tool in self.tools:
            is_asked = any(isinstance(one, tool.definitions) for one in head.tools.known)
            if tool.prepare is None or not is_asked or plan.compacts:
                continue
            ahead = TurnAhead(
                owner=plan.owner,
                tools=head.tools,
                shown=plan.response.tools,
                shown_before=parent.response.tools if parent else None,
                given=plan.resolved.given,
                earlier=partial(_earlier, parent),
                is_stored=plan.is_stored,
                include=tuple(plan.resolved.create.include or ()),
                may=plan.arrival.caller.may,
                parent=parent,
            )
            try:
                ready = await tool.prepare(ahead)
            except BaseException:
                for leave in plan.leaves:
                    await asyncio.shield(leave())
                raise
            plan = _with_given(plan, (*plan.resolved.given, *ready.notes))
            plan = structs.replace(
                plan,
                response=structs.replace(plan.response, tools=ready.shown),
                streamed={**plan.streamed, **ready.streamed},
                leaves=plan.leaves if ready.leave is None else (*plan.leaves, ready.leave),
            )
        return plan

    def open(self, plan: Plan, running: Running, gate: Gate | None) -> TurnToolCalls:
        return TurnToolCalls(plan, running, self, gate)

    def work_on(self, item: ItemValue) -> _Work:
        """The work on an item that no model wrote."""
        return _Work(*self.kinds[type(item)], item, as_item(item), None)

    def work_for(
        self, call: Item, scene: Scene, new_id: Callable[[type[ItemValue]], str]
    ) -> _Work | None:
        """The work on an item that the model wrote, if it is a call of a tool of ours."""
        value = call.value
        tool, kind = self.kinds.get(type(value), (None, None))
        if tool is not None and kind is not None and kind.answer is None:
            is_pending = kind.is_call and getattr(value, "status", None) == "in_progress"
            return _Work(tool, kind, value, call, scene) if is_pending else None
        for tool, kind in self.kinds.values():
            if kind.answer is not None and (item := kind.answer(value, new_id)) is not None:
                return _Work(tool, kind, value, as_item(item), scene)
        return None


def _earlier(parent: Turn | None) -> Iterator[Item]:
    """The items of a chain, the newest first."""
    turn = parent
    while turn is not None:
        for one in reversed(turn.rounds):
            yield from reversed((*one.given, *one.wrote))
        turn = turn.parent


def _with_given(plan: Plan, given: tuple[Item, ...]) -> Plan:
    if given is plan.resolved.given:
        return plan
    resolved = structs.replace(plan.resolved, given=given, given_bytes=weigh(given))
    return structs.replace(plan, resolved=resolved)


class TurnToolCalls:
    """The hosted calls of one turn."""

    def __init__(
        self, plan: Plan, running: Running, hosted: ServerTools, gate: Gate | None = None
    ) -> None:
        self._plan = plan
        self._running = running
        self._hosted = hosted
        self._gate = gate
        self._count = self._refused = 0
        # How many calls each tool was asked for, and what lets those of a serial tool run one after the other.
        self._counts: dict[str, int] = {}
        self._locks = {tool.name: asyncio.Lock() for tool in hosted.tools if tool.is_serial}
        # What the tools have found, in the order in which the model was shown it.
        self._sources: dict[str, list[Source]] = {tool.name: [] for tool in hosted.tools}
        # The answers to the calls, by the items that were worked on, until they are given to the model.
        self._answers: dict[str, Item] = {}
        # The tools as the request gave them, secrets included: read for the first call, dropped with the turn.
        self._definitions: dict[tuple[str, str], ToolDefinition] | None = None
        kinds = {struct: kind for struct, (_, kind) in hosted.kinds.items()}
        streamed: dict[type[ItemValue], Streamed] = {}
        for tool in hosted.tools:
            streamed.update(tool.streamed(plan.response.tools))
        running.assembler.host(kinds, {**streamed, **plan.streamed})

    @property
    def is_spent(self) -> bool:
        return self._refused > REFUSED_MAX

    # --- before the model speaks ---

    async def begin(self, may_act: Callable[[Plan], Awaitable[bool]]) -> Plan:
        """The plan with its files read, and what its tools do before the model speaks done."""
        self._plan = plan = _with_given(self._plan, await self._read(self._plan.resolved.given))
        resolved, parent = plan.resolved, plan.resolved.parent
        tasks = self._tasks(resolved.given, parent.rounds if parent else ())
        allowed = [task for task in tasks if task.after is not None]
        if allowed and not await may_act(plan):
            return plan
        given = await self._do_allowed(resolved.given, allowed)
        own = [task.item for task in tasks if task.after is None]
        listed = () if plan.compacts else await self._do([self._hosted.work_on(one) for one in own])
        if listed or given != resolved.given:
            effects = apply_effects(resolved.effects, listed)
            tools = self._hosted.with_offers(
                resolved.head.tools, effects, None, plan.arrival.caller.may
            )
            head = structs.replace(resolved.head, tools=tools)
            given = (*given, *listed)
            resolved = structs.replace(
                resolved, head=head, effects=effects, given=given, given_bytes=weigh(given)
            )
            self._plan = plan = structs.replace(plan, resolved=resolved)
        _check_forced(plan)
        return plan

    async def append(
        self,
        items: tuple[Item, ...],
        rounds: Sequence[Round],
        may_act: Callable[[tuple[Item, ...]], Awaitable[bool]],
    ) -> tuple[Item, ...]:
        items = await self._read(items)
        tasks = self._tasks(items, rounds, is_appended=True)
        if not tasks or not await may_act(items):
            return items
        return await self._do_allowed(items, tasks)

    async def _read(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        """These items with the text of their PDF files; unchanged, if a notice comes meanwhile."""
        try:
            async with self._running.interruptible(heeds_steers=False):
                return await read_pdfs(items, self._hosted.read_pdf)
        except Interrupted:
            return items

    def _tasks(
        self, given: tuple[Item, ...], rounds: Iterable[Round], *, is_appended: bool = False
    ) -> list[Task]:
        """What the tools have to do before the model goes on with these items."""
        resolved = self._plan.resolved
        asking = {struct for tool in self._hosted.tools for struct in tool.acts_on}
        is_asked = any(type(item.value) in asking for item in given)
        if not is_asked and (is_appended or not resolved.head.tools.late):
            return []
        start = TurnStart(
            given=given,
            earlier=tuple(item for one in rounds for item in (*one.given, *one.wrote)),
            tools=resolved.head.tools,
            effects=resolved.effects,
            tools_before=tools_of(resolved.parent) if resolved.parent else None,
            new_id=self._running.assembler.item_id,
            is_appended=is_appended,
        )
        return [
            task
            for tool in self._hosted.tools
            if tool.begin is not None
            for task in tool.begin(start)
        ]

    async def _do_allowed(self, given: tuple[Item, ...], tasks: Sequence[Task]) -> tuple[Item, ...]:
        """These items, and after each one that allows a call that call, made and answered."""
        if not tasks:
            return given
        work = [self._hosted.work_on(task.item) for task in tasks]
        done = await self._do(work)
        made = {
            id(task.after): (item, self._answer_of(one))
            for task, one, item in zip(tasks, work, done, strict=True)
        }
        return tuple(item for one in given for item in (one, *made.get(id(one), ())))

    async def _do(self, work: Sequence[_Work]) -> tuple[Item, ...]:
        """Items that no model wrote, from their beginning to their end."""
        if not work:
            return ()
        running = self._running
        await running.begin()
        for one in work:
            running.publish(running.assembler.begin(one.item))
        await self._run(work)
        done = {item.value.id: item for item in running.assembler.items}
        return tuple(done[one.item_id] for one in work)

    # --- after a round ---

    async def answer(
        self,
        wrote: Sequence[Item],
        scene: Scene,
        *,
        may_run: bool,
        following: NextRound | None = None,
    ) -> tuple[Item, ...]:
        new_id = self._running.assembler.item_id
        found = (self._hosted.work_for(item, scene, new_id) for item in wrote)
        work = self._within_limits([one for one in found if one is not None])
        ahead: ReadAhead | None = None
        if work and may_run:
            # What the guards have not seen is not read either.
            if following is not None and self._gate is None and reads_ahead(following):
                ahead = ReadAhead(self._plan, following)
            try:
                await self._run(work, ahead)
            finally:
                if ahead is not None:
                    await ahead.stop()
        else:
            self._running.publish(self._running.assembler.abandon())
        answers = tuple(
            self._answer_of(one)
            for one in work
            if one.item_id in self._answers or not one.tool.is_inside
        )
        if ahead is not None:
            ahead.settle(answers)
        return answers

    def _within_limits(self, work: Sequence[_Work]) -> list[_Work]:
        """Without the calls of tools of which the model asks for too many: they have no answer."""
        for one in work:
            self._counts[one.tool.name] = self._counts.get(one.tool.name, 0) + 1
        return [
            one
            for one in work
            if one.tool.calls_max is None or self._counts[one.tool.name] <= one.tool.calls_max
        ]

    def _answer_of(self, work: _Work) -> Item:
        """What the model reads. A call that was not made is answered too, by an item of its own if it must be one."""
        made = self._answers.pop(work.item_id, None)
        if made is not None:
            return made
        if not work.has_own_item:
            return _output_item(work.call, NOT_MADE)
        assembler = self._running.assembler
        if all(item.value.id != work.item_id for item in assembler.items):
            self._running.publish([*assembler.begin(work.item), *assembler.abandon()])
        return next(item for item in assembler.items if item.value.id == work.item_id)

    # --- running ---

    async def _run(self, work: Sequence[_Work], ahead: ReadAhead | None = None) -> None:
        """All of these, side by side where the request allows it; what a notice stops is left undone. A steer waits,
        whether it came before they began or after (docs/protocol.md 6.10)."""
        running, began = self._running, perf_counter()
        try:
            async with running.interruptible(heeds_steers=False):
                if self._plan.resolved.head.parallel_tool_calls:
                    async with asyncio.TaskGroup() as group:
                        for index, one in enumerate(work):
                            group.create_task(
                                self._run_one(one, self._show(work[:index], one, ahead))
                            )
                else:
                    for index, one in enumerate(work):
                        await self._run_one(one, self._show(work[:index], one, ahead))
        except Interrupted:
            pass
        finally:
            if not all(one.tool.is_inside for one in work):
                self._plan.tally.spans.append(Span("tools", began, perf_counter()))
            running.publish(running.assembler.abandon())

    def _show(self, before: Sequence[_Work], work: _Work, ahead: ReadAhead | None) -> ShowProgress:
        """Takes what a call shows of its result; it can be read ahead once all calls before it are answered."""
        if ahead is None:
            return unseen

        def answers(make: Callable[[str], ToolResult], text: str) -> tuple[Item, ...]:
            known = [self._answers[one.item_id] for one in before]
            return (*known, _answer(work, self._public(make(text), work)))

        def show(text: str, make: Callable[[str], ToolResult]) -> None:
            if all(one.item_id in self._answers for one in before):
                ahead.show(text, partial(answers, make))

        return show

    async def _run_one(self, work: _Work, show: ShowProgress) -> None:
        """One call, from its start to its answer."""
        tool, running = work.tool, self._running
        async with self._locks[tool.name] if tool.is_serial else nullcontext():
            if work.has_own_item:
                running.publish(running.assembler.begin(work.item))
            # What the guards have not seen is held back.
            held: list[tuple[type[Inside], dict[str, object]]] = []
            if not work.kind.is_call or self._may_call():
                self._plan.tally.tool_calls += work.kind.is_call and not tool.is_inside
                result = self._public(await self._call(work, held, show), work)
            else:
                result = _failed(work, TOO_MANY, REFUSED)
            answer = _answer(work, result)
            if self._gate is not None and not tool.is_inside:
                is_read = work.kind.is_call and not work.has_own_item
                if not await self._gate.admit((result.item, answer) if is_read else (result.item,)):
                    return
            if result.sources:
                self._sources[tool.name] += result.sources
                running.assembler.cite = self._cite
            self._answers[work.item_id] = answer
            for event, fields in held:
                running.publish([running.assembler.progress(work.item_id, event, fields)])
            running.publish(running.assembler.finish(result.item))

    def _cite(self, text: str) -> list[Raw]:
        found = (
            encode(annotation)
            for tool in self._hosted.tools
            if tool.cite is not None and self._sources[tool.name]
            for annotation in tool.cite(text, self._sources[tool.name])
        )
        # Two tools may have found the same.
        return [*map(Raw, dict.fromkeys(found))]

    def _may_call(self) -> bool:
        wanted = self._plan.resolved.create.max_tool_calls
        limit = CALLS_MAX if wanted is None else min(wanted, CALLS_MAX)
        is_allowed = self._count < limit
        self._count += is_allowed
        self._refused += not is_allowed
        return is_allowed

    async def _call(
        self, work: _Work, held: list[tuple[type[Inside], dict[str, object]]], show: ShowProgress
    ) -> ToolResult:
        """The tool at work, within its time."""
        tool, kind = work.tool, work.kind
        wanted = kind.request(work.call)
        definition = self._definition(tool, wanted.key, work.scene)
        if definition is None or kind.tool is None:
            message = f"The request does not list the tool '{wanted.key}'."
            return _failed(work, message, REFUSED)
        limit = tool.call_s_max or self._hosted.call_s_max
        call = HostedCall(
            owner=self._plan.owner,
            item_id=work.item_id,
            definition=definition,
            name=wanted.function,
            arguments=wanted.arguments,
            sources_before=len(self._sources[tool.name]),
            scene=work.scene,
            emit=self._emit(work, held),
            show=show,
        )
        deadline = asyncio.timeout(limit)
        try:
            async with deadline:
                return await kind.tool.call(call)
        except Exception:
            if deadline.expired():
                return _failed(work, f"The tool did not answer within {limit:g} s.", TIMED_OUT)
            # A fault of the server. The traceback contains no argument and no header.
            log.exception("turn %s: the hosted tool %s failed", self._plan.id, tool.name)
            return _failed(work, "The tool could not be run.", REFUSED)

    def _emit(self, work: _Work, held: list[tuple[type[Inside], dict[str, object]]]) -> Emit:
        """Sends what the tool says while it works; with guards in the turn, nothing before they have seen it all."""
        running = self._running

        async def emit(event: type[Inside], /, **fields: object) -> None:
            assert event in work.kind.emitted, f"{work.tool.name} does not declare {event.__name__}"
            if self._gate is not None and not work.tool.is_inside:
                held.append((event, fields))
                return
            running.publish([running.assembler.progress(work.item_id, event, fields)])
            await running.wait_for_room()

        return emit

    def _definition(self, tool: HostedTool, key: str, scene: Scene | None) -> ToolDefinition | None:
        if self._definitions is None:
            self._definitions = {
                (tool.name, tool.key(definition)): definition
                for tool in self._hosted.tools
                for definition in self._definitions_of(tool)
            }
        found = self._definitions.get((tool.name, key))
        if found is None and scene is not None:
            # An item that came while the turn ran may have brought it.
            brought = _readable(tool, scene.effects.carried)
            found = next((one for one in brought if tool.key(one) == key), None)
        return found

    def _definitions_of(self, tool: HostedTool) -> list[ToolDefinition]:
        """The definitions of a tool, the newest last. Those of the history have no secrets any more; those of this
        request are read once with theirs."""
        resolved = self._plan.resolved
        tools = resolved.head.tools
        if tool.with_secrets is None:
            return _readable(tool, tools.carried + tools.definitions)
        given = raw_tools(resolved.create, tool.definitions)
        return [*_readable(tool, tools.carried), *map(tool.with_secrets, given)]

    def _public(self, result: ToolResult, work: _Work) -> ToolResult:
        """The result for model and client: cut at the limit, and as this request may see it."""
        data, limit = result.text.encode(), self._hosted.output_bytes_max
        if len(data) > limit:
            text = data[:limit].decode(errors="ignore") + CUT_OFF
            result = structs.replace(result, text=text)
        public = work.tool.public(result, work.item.value, self._plan.resolved.create)
        return structs.replace(result, item=as_item(public))


def _readable(tool: HostedTool, definitions: Iterable[ToolDefinition]) -> list[ToolDefinition]:
    """Those of these definitions that are the tool's, as it reads them."""
    own = [one for one in definitions if isinstance(one, tool.definitions)]
    if tool.with_secrets is None:
        return own
    return [tool.with_secrets(Raw(encode(definition))) for definition in own]


def _answer(work: _Work, result: ToolResult) -> Item:
    """What the model reads."""
    return result.item if work.has_own_item else _output_item(work.call, result.text)


def _output_item(call: ItemValue, text: str) -> Item:
    """The output of a call, for the model. It names the item in which the model made the call."""
    return as_item(HostedOutput(call_id=approved_by(call) or str(call.id or ""), output=text))


def _failed(work: _Work, message: str, code: int) -> ToolResult:
    failed = work.kind.failed(work.item.value, message, code)
    return ToolResult(f"Error: {message}", as_item(failed))


def _check_forced(plan: Plan) -> None:
    """Refuse a choice of a tool that turned out not to be offered."""
    head = plan.resolved.head
    if not head.tools.late or plan.compacts:
        return
    choice = head.tool_choice
    kinds = {kind for kind, _ in head.tools.late}
    is_forcing = choice == "required" or (
        isinstance(choice, ToolChoiceName)
        and (choice.type in kinds or (choice.type == "allowed_tools" and choice.mode == "required"))
    )
    known = head.tools.offers + plan.resolved.effects.offers + head.tools.deferred
    if is_forcing and not forced_offers(choice, known):
        message = "'tool_choice' forces a tool that no server of this request has listed."
        raise InvalidRequest(message, code="unsupported_value", param="tool_choice")
