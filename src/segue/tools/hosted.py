"""What do hosted tools answer to the calls of the model? Sampling pauses, the tool runs here, sampling goes on.

A *hosted call* is a call that a tool of this server answers. `TurnToolCalls` runs those of one turn: it makes the calls
that a person has approved, lists the tools of remote servers before the model speaks, and answers the calls of a round.
What a tool returns is data: it becomes a `HostedOutput` after the call, for the model alone, and the finished item is
what the client sees. Every call has a limit in time and in bytes, and all of them together in number. A notice that
ends the turn stops what runs; a steer waits until it is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter

from msgspec import Raw, structs

from segue.errors import InvalidRequest
from segue.seams.history import Round
from segue.seams.model import Scene
from segue.seams.tools import HostedCall, Source, Tool, ToolResult
from segue.tools.inputs import ReadPdf, ReadUrl, attach, read_pdfs
from segue.tools.tool_search import answer
from segue.turn.plan import Plan, Span
from segue.turn.resolve import still_listed
from segue.turn.resources import Gate
from segue.turn.running import Interrupted, Running
from segue.web.cite import cite
from segue.wire.codec import as_item, definitions_in, encode
from segue.wire.effects import apply_effects
from segue.wire.items import (
    Item,
    ItemValue,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    McpListTools,
    ToolSearchCall,
    WebSearchCall,
)
from segue.wire.kinds import hosted_work, is_pending
from segue.wire.mcp import output_item, servers_of, with_listed
from segue.wire.requests import ToolChoiceName
from segue.wire.tools import Tools, forced_offers, name_of
from segue.wire.web import without_sources

log = logging.getLogger(__name__)

# How many hosted calls one response may have, whatever the request says.
CALLS_MAX = 128
# How many calls over the limit are refused before the response ends.
REFUSED_MAX = 8
# How often the tools of one response are searched for.
SEARCHES_MAX = 16
# The value of `include` that shows what a search has found.
SOURCES = "web_search_call.action.sources"
# As MCP numbers them.
TIMED_OUT, REFUSED = -32001, -32600

NOT_MADE = "The call was not made, because the response ended before."
TOO_MANY = "The call was not made: no more tool calls are allowed in this response."
CUT_OFF = "\n[What follows was left out: the output is too long.]"

# What a hosted tool works on.
_Begun = McpListTools | McpCall | WebSearchCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTools:
    """The tools that this process runs, by the kind of their calls."""

    tools: Mapping[str, Tool] = field(default_factory=dict)
    # Refuses a request that names an MCP server that cannot be called, or not by this caller. A server without MCP
    # accepts such tools, and the model does not see them.
    refuse: Callable[[Tools, Container[str]], None] | None = None
    # Reads the PDF files of an input, and the URLs in it where the operator allows that.
    read_pdf: ReadPdf
    read_url: ReadUrl | None = None
    # What each hosted call may take.
    call_s_max: float = 60.0
    output_bytes_max: int = 128 * 1024

    def check(self, tools: Tools, may: Container[str]) -> None:
        if self.refuse is not None:
            self.refuse(tools, may)

    async def fetch(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        return items if self.read_url is None else await attach(items, self.read_url)

    async def read_files(self, plan: Plan) -> Plan:
        return _with_given(plan, await read_pdfs(plan.resolved.given, self.read_pdf))

    def open(self, plan: Plan, running: Running, gate: Gate | None) -> TurnToolCalls:
        return TurnToolCalls(plan, running, self, gate)


def _with_given(plan: Plan, given: tuple[Item, ...]) -> Plan:
    if given is plan.resolved.given:
        return plan
    return replace(plan, resolved=structs.replace(plan.resolved, given=given))


class TurnToolCalls:
    """The hosted calls of one turn."""

    def __init__(
        self, plan: Plan, running: Running, hosted: ServerTools, gate: Gate | None = None
    ) -> None:
        self._plan = plan
        self._running = running
        self._hosted = hosted
        self._gate = gate
        self._count = self._refused = self._searches = 0
        # Sources are numbered through the whole response, so that searches run one after the other.
        self._searching = asyncio.Lock()
        # What the tools have found, in the order in which the model was shown it.
        self._sources: list[Source] = []
        # The outputs of the calls, until they are given to the model.
        self._outputs: dict[str, Item] = {}
        # The tools as the request gave them, secrets included: read for the first call, dropped with the turn.
        self._definitions: dict[str, Raw] | None = None

    @property
    def is_spent(self) -> bool:
        return self._refused > REFUSED_MAX

    # --- before the model speaks ---

    async def begin(self, may_act: Callable[[Plan], Awaitable[bool]]) -> Plan:
        """The plan with its files read, the approved calls made, and the tools of its remote servers in it."""
        plan = self._plan = _with_given(self._plan, await self._read(self._plan.resolved.given))
        resolved, parent = plan.resolved, plan.resolved.parent
        if approvals(resolved.given) and not await may_act(plan):
            return plan
        given = await self._approve(resolved.given, parent.rounds if parent else ())
        listed = () if plan.compacts else await self._list()
        if listed or given != resolved.given:
            effects = apply_effects(resolved.effects, listed)
            tools = resolved.head.tools
            tools = with_listed(tools, still_listed(tools, effects, None))
            head = structs.replace(resolved.head, tools=tools)
            given = (*given, *listed)
            resolved = structs.replace(resolved, head=head, effects=effects, given=given)
            plan = replace(plan, resolved=resolved)
        _check_forced(plan)
        return plan

    async def append(
        self,
        items: tuple[Item, ...],
        rounds: Sequence[Round],
        may_act: Callable[[tuple[Item, ...]], Awaitable[bool]],
    ) -> tuple[Item, ...]:
        items = await self._read(items)
        if approvals(items) and not await may_act(items):
            return items
        return await self._approve(items, rounds)

    async def _read(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        """These items with the text of their PDF files; unchanged, if a notice comes meanwhile."""
        try:
            async with self._running.interruptible(heeds_steers=False):
                return await read_pdfs(items, self._hosted.read_pdf)
        except Interrupted:
            return items

    async def _list(self) -> tuple[Item, ...]:
        """The lists of the servers that have not listed their tools in this history."""
        if "mcp_list" not in self._hosted.tools:
            return ()
        resolved, new_id = self._plan.resolved, self._running.assembler.item_id
        tools = resolved.head.tools
        before = still_listed(tools, resolved.effects, resolved.parent)
        known = {one.server_label for one in before}
        return await self._work(
            [
                as_item(McpListTools(id=new_id(McpListTools), server_label=label, tools=[]))
                for label in servers_of(tools)
                if label not in known
            ]
        )

    async def _approve(self, given: tuple[Item, ...], before: Iterable[Round]) -> tuple[Item, ...]:
        """These items, and after each approval the call that it allows, made and answered."""
        approved = approvals(given)
        if not approved:
            return given
        earlier = (item for one in before for item in (*one.given, *one.wrote))
        values = (item.value for item in (*earlier, *given))
        requests = {one.id: one for one in values if isinstance(one, McpApprovalRequest)}
        calls = [
            McpCall(
                id=self._running.assembler.item_id(McpCall),
                status="in_progress",
                server_label=request.server_label,
                name=request.name,
                arguments=request.arguments,
                approval_request_id=request.id,
            )
            for request_id in approved
            if (request := requests.get(request_id)) is not None
        ]
        made: dict[str, tuple[Item, Item]] = {}
        for item in await self._work([*map(as_item, calls)]):
            assert isinstance(item.value, McpCall)
            made[str(item.value.approval_request_id)] = item, self._output_of(item.value)
        items: list[Item] = []
        for item in given:
            items.append(item)
            if isinstance(item.value, McpApprovalResponse):
                items += made.get(item.value.approval_request_id, ())
        return tuple(items)

    async def _work(self, begun: Sequence[Item]) -> tuple[Item, ...]:
        """Items that no model wrote, from their beginning to their end."""
        if not begun:
            return ()
        running = self._running
        await running.begin()
        for item in begun:
            running.publish(running.assembler.begin(item))
        await self._run(begun)
        ids = {item.value.id for item in begun}
        return tuple(item for item in running.assembler.items if item.value.id in ids)

    # --- after a round ---

    async def answer(
        self, wrote: Sequence[Item], scene: Scene, *, may_run: bool
    ) -> tuple[Item, ...]:
        pending = [item for item in wrote if is_pending(item.value)]
        if pending and may_run:
            await self._run(pending)
        else:
            self._running.publish(self._running.assembler.abandon())
        answers = [self._output_of(item.value) for item in pending]
        if may_run:
            answers += await self._search(wrote, scene)
        return tuple(answers)

    async def _search(self, wrote: Sequence[Item], scene: Scene) -> list[Item]:
        """The search for tools, which needs nothing but the deferred tools."""
        running = self._running
        calls = [item.value for item in wrote if isinstance(item.value, ToolSearchCall)]
        calls = [call for call in calls if call.execution == "server"]
        if self._searches + len(calls) > SEARCHES_MAX:
            return []
        self._searches += len(calls)
        answers: list[Item] = []
        for call in calls:
            offers = scene.deferred if self._may_call() else ()
            output = await asyncio.to_thread(answer, call, offers)
            begun = structs.replace(output.value, status="in_progress", tools=[])
            running.publish(running.assembler.begin(as_item(begun)))
            running.publish(running.assembler.finish(output))
            answers.append(output)
        return answers

    def _output_of(self, call: ItemValue) -> Item:
        return self._outputs.pop(str(call.id), None) or output_item(_call_id(call), NOT_MADE)

    # --- running ---

    async def _run(self, begun: Sequence[Item]) -> None:
        """All of these, side by side where the request allows it; what a notice stops is left undone. A steer waits,
        whether it came before they began or after (docs/protocol.md 6.10)."""
        running, began = self._running, perf_counter()
        try:
            async with running.interruptible(heeds_steers=False):
                if self._plan.resolved.head.parallel_tool_calls:
                    async with asyncio.TaskGroup() as group:
                        for item in begun:
                            group.create_task(self._run_one(item))
                else:
                    for item in begun:
                        await self._run_one(item)
        except Interrupted:
            pass
        finally:
            self._plan.tally.spans.append(Span("tools", began, perf_counter()))
            running.publish(running.assembler.abandon())

    async def _run_one(self, begun: Item) -> None:
        """One call, from its start to its output."""
        value, running = begun.value, self._running
        assert isinstance(value, _Begun), "no other item is hosted"
        is_listing = isinstance(value, McpListTools)
        if is_listing or self._may_call():
            self._plan.tally.tool_calls += not is_listing
            async with self._searching if isinstance(value, WebSearchCall) else nullcontext():
                result = self._shown(await self._call(value), value)
                self._sources += result.sources
            if result.sources:
                running.assembler.cite = self._cite
        else:
            result = _failed(value, TOO_MANY, REFUSED)
        output = output_item(_call_id(value), result.text)
        found = (result.item,) if is_listing else (result.item, output)
        if self._gate is not None and not await self._gate.admit(found):
            return
        self._outputs[str(value.id)] = output
        running.publish(running.assembler.finish(result.item))

    def _cite(self, text: str) -> list[Raw]:
        return [Raw(encode(one)) for one in cite(text, self._sources)]

    def _may_call(self) -> bool:
        wanted = self._plan.resolved.create.max_tool_calls
        limit = CALLS_MAX if wanted is None else min(wanted, CALLS_MAX)
        is_allowed = self._count < limit
        self._count += is_allowed
        self._refused += not is_allowed
        return is_allowed

    async def _call(self, value: _Begun) -> ToolResult:
        """The tool at work, within its time."""
        work = hosted_work(value)
        wanted = work.request(value)
        definition, tool = self._definition(wanted.definition), self._hosted.tools.get(work.tool)
        if definition is None or tool is None:
            message = f"The request does not list the tool '{wanted.definition}'."
            return _failed(value, message, REFUSED)
        limit = self._hosted.call_s_max
        call = HostedCall(
            owner=self._plan.owner,
            item_id=str(value.id),
            definition=definition,
            name=wanted.function,
            arguments=wanted.arguments,
            sources_before=len(self._sources),
        )
        deadline = asyncio.timeout(limit)
        try:
            async with deadline:
                return await tool.call(call)
        except Exception:
            if deadline.expired():
                return _failed(value, f"The tool did not answer within {limit:g} s.", TIMED_OUT)
            # A fault of the server. The traceback contains no argument and no header.
            log.exception("turn %s: the hosted tool %s failed", self._plan.id, work.tool)
            return _failed(value, "The tool could not be run.", REFUSED)

    def _definition(self, key: str) -> Raw | None:
        if self._definitions is None:
            resolved = self._plan.resolved
            # Those of the history have no secrets any more; the definitions of this request go before.
            carried = [(tool, Raw(encode(tool))) for tool in resolved.head.tools.carried]
            given = (*carried, *definitions_in(resolved.create))
            self._definitions = {name: raw for tool, raw in given if (name := name_of(tool))}
        return self._definitions.get(key)

    def _shown(self, result: ToolResult, begun: _Begun) -> ToolResult:
        """The result for model and client: still tied to its approval, without sources that the request does not
        include, and cut at the limit."""
        text, value = result.text, result.item.value
        if isinstance(value, McpCall) and isinstance(begun, McpCall):
            value = structs.replace(value, approval_request_id=begun.approval_request_id)
        included = self._plan.resolved.create.include or ()
        if isinstance(value, WebSearchCall) and SOURCES not in included:
            value = without_sources(value)
        data, limit = text.encode(), self._hosted.output_bytes_max
        if len(data) > limit:
            text = data[:limit].decode(errors="ignore") + CUT_OFF
            if isinstance(value, McpCall) and isinstance(value.output, str):
                value = structs.replace(value, output=text)
        return structs.replace(result, text=text, item=as_item(value))


def _call_id(call: ItemValue) -> str:
    """What the output of this call names: the request that a person has approved, or else the call."""
    return str(getattr(call, "approval_request_id", None) or call.id)


def _failed(value: _Begun, message: str, code: int) -> ToolResult:
    failed = hosted_work(value).failed(value, message, code)
    return ToolResult(f"Error: {message}", as_item(failed))


def approvals(given: Sequence[Item]) -> list[str]:
    """The requests that these items approve, and that no call among them has followed."""
    values = [item.value for item in given]
    made = {one.approval_request_id for one in values if isinstance(one, McpCall)}
    responses = [one for one in values if isinstance(one, McpApprovalResponse) and one.approve]
    ids = [one.approval_request_id for one in responses]
    return [request_id for request_id in ids if request_id not in made]


def _check_forced(plan: Plan) -> None:
    """Refuse a choice of a tool that no server has listed."""
    head = plan.resolved.head
    if not servers_of(head.tools) or plan.compacts:
        return
    choice = head.tool_choice
    is_forcing = choice == "required" or (
        isinstance(choice, ToolChoiceName)
        and (choice.type == "mcp" or (choice.type == "allowed_tools" and choice.mode == "required"))
    )
    known = head.tools.offers + plan.resolved.effects.offers + head.tools.deferred
    if is_forcing and not forced_offers(choice, known):
        message = "'tool_choice' forces a tool that no server of this request has listed."
        raise InvalidRequest(message, code="unsupported_value", param="tool_choice")
