"""The hosted calls of one turn, by values: a made-up tool at the seam, no server and no engine."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest
from msgspec import Raw

from segue.errors import InvalidRequest
from segue.ids import item_ids
from segue.mcp.definitions import McpToolWithSecrets
from segue.mcp.sessions import McpServers
from segue.mcp.tool import mcp
from segue.seams.history import Round
from segue.seams.model import Scene
from segue.seams.prompt import NO_IDS
from segue.seams.tools import HostedCall, Source, ToolResult
from segue.tools.hosted import (
    CUT_OFF,
    NOT_MADE,
    REFUSED_MAX,
    TOO_MANY,
    ServerTools,
    TurnToolCalls,
)
from segue.tools.tool_search import SEARCHES_MAX, tool_search
from segue.turn.assemble import Assembler
from segue.turn.notices import Cancel
from segue.turn.plan import USUAL, Arrival, Caller, Given, Plan, Receipt, Tally
from segue.turn.resolve import resolve
from segue.turn.resources import Gate, Hosted, HostedCalls
from segue.turn.running import Running
from segue.web.tool import SOURCES, web_search
from segue.wire.codec import as_item, decode_create, decode_item, encode
from segue.wire.files import contents
from segue.wire.items import Item, McpCall, McpListTools, SearchAction, UrlSource, WebSearchCall
from tests.contracts.turns import response_of
from tests.hosted import AtHand
from tests.support import until

OWN = {"type": "mcp", "server_label": "own", "require_approval": "never"}
HELLO = {"type": "message", "role": "user", "content": "hi"}
REMOTE_TOOL = {"name": "echo", "input_schema": {"type": "object"}}
REQUEST = {
    "type": "mcp_approval_request",
    "id": "mcpr_1",
    "server_label": "own",
    "name": "echo",
    "arguments": '{"text":"a"}',
}
RESPONSE = {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}
PDF = "data:application/pdf;base64," + base64.b64encode(b"%PDF-1.7 x").decode()


class FakeTool:
    """Answers with the arguments of a call; `act` may wait or raise first."""

    lister: FakeLister

    def __init__(self, act: Callable[[HostedCall], Awaitable[None]] | None = None) -> None:
        self.calls: list[HostedCall] = []
        self.running = self.running_max = 0
        self._act = act

    def check(self, tools: Any, may: Any) -> None:
        """Any server will do."""

    async def call(self, call: HostedCall) -> ToolResult:
        self.calls.append(call)
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        try:
            await asyncio.sleep(0)
            if self._act is not None:
                await self._act(call)
        finally:
            self.running -= 1
        return self.result(call)

    def result(self, call: HostedCall) -> ToolResult:
        done = McpCall(
            id=call.item_id,
            server_label="own",
            name=call.name,
            arguments=call.arguments,
            status="completed",
            output=call.arguments,
        )
        return ToolResult(call.arguments, as_item(done))


class FakeLister(FakeTool):
    def result(self, call: HostedCall) -> ToolResult:
        assert isinstance(call.definition, McpToolWithSecrets)
        label = call.definition.server_label
        tools = [Raw(encode(REMOTE_TOOL))]
        return ToolResult(
            "", as_item(McpListTools(id=call.item_id, server_label=label, tools=tools))
        )


class FakeWeb(FakeTool):
    def result(self, call: HostedCall) -> ToolResult:
        url = f"https://a.com/{call.sources_before + 1}"
        action = SearchAction(query="q", queries=["q"], sources=[UrlSource(url)])
        done = WebSearchCall(id=call.item_id, status="completed", action=Raw(encode(action)))
        return ToolResult(url, as_item(done), (Source(url, "A page"),))


async def read_pdf(data: str) -> str | None:
    await asyncio.sleep(0)
    return f"{len(contents(data) or b'')} bytes"


async def may_act(_: object) -> bool:
    return True


async def may_not_act(_: object) -> bool:
    return False


class Stage:
    """A turn that has started, with its hosted calls."""

    def __init__(self, tool: FakeTool | None = None, limits: Any = None, **fields: Any) -> None:
        self.tool = tool or FakeTool()
        self.lister, self.web = FakeLister(), FakeWeb(self.tool._act)
        self.tool.lister = self.lister
        tools = (web_search(self.web), mcp(cast(McpServers, self.tool)), tool_search())
        self.hosted = ServerTools(tools, read_pdf=read_pdf, **(limits or {}))
        create = {"model": "m", "input": [HELLO], "tools": [OWN]} | fields
        self.plan = plan_of(create, self.hosted)
        first = response_of("resp_1", status="in_progress")
        self.running = Running("ada", Assembler(first, item_ids("resp_1")), is_stored=False)
        self.running.publish(self.running.assembler.start())
        self.calls = TurnToolCalls(self.plan, self.running, self.hosted)

    def pending(self, *values: McpCall | WebSearchCall) -> list[Item]:
        """Calls as the model has just written them."""
        items = [as_item(value) for value in values]
        for item in items:
            self.running.publish(self.running.assembler.begin(item))
        return items

    async def answer(self, *wrote: Item, may_run: bool = True) -> list[str]:
        """What the model reads."""
        scene = Scene(self.plan.resolved.head, None, ())
        answers = await self.calls.answer(wrote, scene, may_run=may_run)
        return [json.loads(item.raw)["output"] for item in answers]

    @property
    def shown(self) -> list[dict[str, Any]]:
        """What the client sees."""
        return [json.loads(item.raw) for item in self.running.assembler.items]


def plan_of(fields: dict[str, Any], hosted: ServerTools) -> Plan:
    create = decode_create(json.dumps(fields).encode())
    assert isinstance(create.input, list)
    given = tuple(decode_item(raw, "input[0]") for raw in create.input)
    return Plan(
        id="resp_1",
        arrival=Arrival(create, Caller("ada", cast(Any, None)), Receipt()),
        resolved=resolve(create, Given(given), None, AtHand(hosted), ("web_search",)),
        model=cast(Any, None),
        sampling=USUAL,
        is_stored=False,
        response=response_of("resp_1", status="in_progress"),
        root_at=0,
        tally=Tally(),
    )


def call_of(item_id: str, arguments: str, name: str = "echo") -> McpCall:
    return McpCall(
        id=item_id, server_label="own", name=name, arguments=arguments, status="in_progress"
    )


def calls_of(count: int) -> list[McpCall]:
    return [call_of(f"mcp_{number}", str(number)) for number in range(count)]


def searches(count: int) -> list[WebSearchCall]:
    action = Raw(encode(SearchAction(query="q")))
    return [WebSearchCall(id=f"ws_{n}", status="in_progress", action=action) for n in range(count)]


def types_of(items: Sequence[Item]) -> list[str]:
    return [json.loads(item.raw)["type"] for item in items]


def test_server_tools_and_their_calls_fit_the_seams() -> None:
    hosted: Hosted = ServerTools(read_pdf=read_pdf)
    calls: Callable[[Plan, Running, Gate | None], HostedCalls] = hosted.open
    assert calls is not None


# --- before the model speaks --------------------------------------------------------------------------


async def test_plan_stays_the_same_where_there_is_nothing_to_do() -> None:
    stage = Stage(tools=[])
    assert await stage.calls.begin(may_act) is stage.plan


async def test_pdf_is_read_before_the_model_speaks() -> None:
    file = {"type": "input_file", "file_data": PDF}
    stage = Stage(tools=[], input=[{"role": "user", "content": [file]}])
    plan = await stage.calls.begin(may_act)
    (item,) = plan.resolved.given
    assert json.loads(item.raw)["content"] == [{**file, "segue:text": "10 bytes"}]


async def test_notice_leaves_a_pdf_unread() -> None:
    file = {"type": "input_file", "file_data": PDF}
    stage = Stage(tools=[], input=[{"role": "user", "content": [file]}])
    stage.running.notify(Cancel())
    assert await stage.calls.begin(may_act) is stage.plan


async def test_server_is_listed_once_and_its_tools_are_offered() -> None:
    stage = Stage()
    plan = await stage.calls.begin(may_act)
    assert types_of(plan.resolved.given) == ["message", "mcp_list_tools"]
    assert [one.qualified_name for one in plan.resolved.head.tools.offers] == ["own.echo"]
    listed = json.loads(plan.resolved.given[1].raw)
    assert stage.shown == [listed]
    again = Stage(input=[HELLO, listed])
    await again.calls.begin(may_act)
    assert (len(stage.lister.calls), again.lister.calls) == (1, [])
    # A listing is no call that counts.
    assert stage.plan.tally.tool_calls == 0


async def test_choice_of_a_tool_that_no_server_lists_is_refused() -> None:
    choice = {"type": "mcp", "server_label": "own", "name": "other"}
    with pytest.raises(InvalidRequest) as refused:
        await Stage(tool_choice=choice).calls.begin(may_act)
    assert (refused.value.code, refused.value.param) == ("unsupported_value", "tool_choice")
    await Stage(tool_choice={**choice, "name": "echo"}).calls.begin(may_act)


async def test_approved_call_is_made_before_the_model_speaks() -> None:
    stage = Stage(input=[HELLO, REQUEST, RESPONSE])
    plan = await stage.calls.begin(may_act)
    assert types_of(plan.resolved.given) == [
        "message",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "segue:tool_output",
        "mcp_list_tools",
    ]
    (call,) = stage.tool.calls
    assert (call.owner, call.name, call.arguments) == ("ada", "echo", '{"text":"a"}')
    made = stage.shown[0]
    assert (made["status"], made["approval_request_id"]) == ("completed", "mcpr_1")


@pytest.mark.parametrize("answer, may", [({"approve": False}, may_act), ({}, may_not_act)])
async def test_call_is_not_made_without_approval_or_against_the_guards(
    answer: dict[str, Any], may: Callable[[object], Awaitable[bool]]
) -> None:
    stage = Stage(input=[HELLO, REQUEST, {**RESPONSE, **answer}])
    await stage.calls.begin(may)
    assert stage.tool.calls == []


async def test_appended_approval_makes_the_call_of_an_earlier_round() -> None:
    stage = Stage()
    request, response, file = (
        decode_item(json.dumps(value).encode(), "input[0]")
        for value in (
            REQUEST,
            RESPONSE,
            {**HELLO, "content": [{"type": "input_file", "file_data": PDF}]},
        )
    )
    rounds = [Round((), (request,), (NO_IDS,))]
    # A request that the history does not have cannot be approved.
    assert await stage.calls.append((response,), (), may_act) == (response,)
    assert await stage.calls.append((response,), rounds, may_not_act) == (response,)
    items = await stage.calls.append((response, file), rounds, may_act)
    assert types_of(items) == [
        "mcp_approval_response",
        "mcp_call",
        "segue:tool_output",
        "message",
    ]
    assert "10 bytes" in items[-1].raw.decode()
    # What was approved and made is not made again.
    assert await stage.calls.append(items, rounds, may_act) == items
    assert len(stage.tool.calls) == 1


# --- after a round ------------------------------------------------------------------------------------


async def test_calls_run_side_by_side_and_are_answered_in_order() -> None:
    stage = Stage()
    assert await stage.answer(*stage.pending(*calls_of(3))) == ["0", "1", "2"]
    assert stage.tool.running_max == 3
    assert [one["status"] for one in stage.shown] == ["completed"] * 3
    assert stage.plan.tally.tool_calls == 3
    assert [span.stage for span in stage.plan.tally.spans] == ["tools"]


async def test_calls_run_one_after_the_other_where_the_request_says_so() -> None:
    stage = Stage(parallel_tool_calls=False)
    assert await stage.answer(*stage.pending(*calls_of(3))) == ["0", "1", "2"]
    assert stage.tool.running_max == 1


async def test_tool_gets_the_secrets_of_its_own_definition() -> None:
    secret = {**OWN, "authorization": "hush"}
    other = {**OWN, "server_label": "other"}
    stage = Stage(tools=[other, secret])
    await stage.answer(*stage.pending(*calls_of(1)))
    (call,) = stage.tool.calls
    assert isinstance(call.definition, McpToolWithSecrets)
    assert (call.definition.server_label, call.definition.authorization) == ("own", "hush")


async def test_call_of_a_tool_that_the_request_does_not_list_fails() -> None:
    stage = Stage(tools=[])
    (text,) = await stage.answer(*stage.pending(*calls_of(1)))
    assert "does not list the tool 'own'" in text
    assert (stage.shown[0]["status"], stage.tool.calls) == ("failed", [])


async def test_calls_over_the_limit_fail_and_the_response_ends_after_some() -> None:
    stage = Stage(max_tool_calls=1)
    wrote = stage.pending(*calls_of(REFUSED_MAX + 1))
    assert await stage.answer(*wrote) == ["0", *[f"Error: {TOO_MANY}"] * REFUSED_MAX]
    assert (len(stage.tool.calls), stage.calls.is_spent) == (1, False)
    assert stage.shown[1]["error"]["message"] == TOO_MANY
    (more,) = stage.pending(call_of("mcp_x", ""))
    await stage.answer(more)
    assert stage.calls.is_spent


async def test_long_output_is_cut_for_model_and_client() -> None:
    stage = Stage(limits={"output_bytes_max": 5})
    (text,) = await stage.answer(*stage.pending(call_of("mcp_1", "aéé€")))
    assert text == stage.shown[0]["output"] == "aéé" + CUT_OFF


async def test_tool_that_raises_fails_its_call_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def act(call: HostedCall) -> None:
        if call.name == "crash":
            raise RuntimeError("broken")

    stage = Stage(FakeTool(act))
    wrote = stage.pending(call_of("mcp_1", "0"), call_of("mcp_2", "hush", "crash"))
    with caplog.at_level(logging.ERROR):
        texts = await stage.answer(*wrote)
    assert texts == ["0", "Error: The tool could not be run."]
    assert [one["status"] for one in stage.shown] == ["completed", "failed"]
    assert "resp_1" in caplog.text
    assert "hush" not in caplog.text


async def test_slow_tool_is_stopped_at_its_limit() -> None:
    async def act(_: HostedCall) -> None:
        await asyncio.sleep(60)

    stage = Stage(FakeTool(act), limits={"call_s_max": 0.01})
    (text,) = await stage.answer(*stage.pending(*calls_of(1)))
    assert text == "Error: The tool did not answer within 0.01 s."
    assert (stage.shown[0]["status"], stage.tool.running) == ("failed", 0)


async def test_timeout_of_the_tool_itself_is_a_fault_of_the_tool() -> None:
    async def act(_: HostedCall) -> None:
        raise TimeoutError

    stage = Stage(FakeTool(act))
    assert await stage.answer(*stage.pending(*calls_of(1))) == ["Error: The tool could not be run."]


async def test_notice_stops_the_calls_that_run() -> None:
    async def act(_: HostedCall) -> None:
        await asyncio.sleep(60)

    stage = Stage(FakeTool(act))
    answering = asyncio.create_task(stage.answer(*stage.pending(*calls_of(2))))
    await until(lambda: stage.tool.running == 2)
    stage.running.notify(Cancel())
    assert await answering == [NOT_MADE] * 2
    assert [one["status"] for one in stage.shown] == ["incomplete"] * 2
    assert stage.tool.running == 0


async def test_calls_of_a_model_that_was_stopped_are_not_made() -> None:
    stage = Stage()
    assert await stage.answer(*stage.pending(*calls_of(1)), may_run=False) == [NOT_MADE]
    assert (stage.tool.calls, stage.shown[0]["status"]) == ([], "incomplete")


# --- searches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("include", [[], [SOURCES]])
async def test_sources_are_numbered_cited_and_shown_where_included(include: list[str]) -> None:
    stage = Stage(tools=[{"type": "web_search"}], include=include)
    texts = await stage.answer(*stage.pending(*searches(2)))
    assert texts == ["https://a.com/1", "https://a.com/2"]
    # One after the other, so that the second knows how many sources the first has found.
    assert (stage.web.running_max, [one.sources_before for one in stage.web.calls]) == (1, [0, 1])
    assert ["sources" in one["action"] for one in stage.shown] == [bool(include)] * 2
    assert stage.running.assembler.cite is not None
    (mark,) = stage.running.assembler.cite("It rains [2].")
    assert json.loads(bytes(mark))["url"] == "https://a.com/2"


async def test_tool_search_loads_deferred_tools_so_many_times() -> None:
    rain = {"type": "function", "name": "rain_map", "defer_loading": True}
    stage = Stage(tools=[rain, {"type": "tool_search"}])
    scene = Scene(stage.plan.resolved.head, None, ())

    def search(number: int) -> Item:
        value = {
            "type": "tool_search_call",
            "id": f"tsc_{number}",
            "execution": "server",
            "arguments": {"query": "rain"},
        }
        return decode_item(json.dumps(value).encode(), "input[0]")

    wrote = [search(number) for number in range(SEARCHES_MAX)]
    answers = await stage.calls.answer(wrote, scene, may_run=True)
    outputs = [json.loads(item.raw) for item in answers]
    assert [one["id"] for one in outputs] == [f"tso_{n}" for n in range(SEARCHES_MAX)]
    assert {one["tools"][0]["name"] for one in outputs} == {"rain_map"}
    assert stage.shown == outputs
    assert await stage.calls.answer([search(99)], scene, may_run=True) == ()
