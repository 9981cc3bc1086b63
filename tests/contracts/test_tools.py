"""What every tool that the server runs keeps to: calls of MCP servers, their lists, and the web search over an index,
an engine and pages, each on real files and sockets.

The search for tools asks nobody: `tests/tools/test_tool_search.py` has it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from msgspec import Raw

from segue.mcp.definitions import with_secrets
from segue.mcp.hosts import McpHosts
from segue.mcp.sessions import McpServer, McpServers
from segue.seams.tools import HostedCall, Tool, ToolResult
from segue.web.fetch import Fetcher, Policy
from segue.web.index import IndexWeb, build
from segue.web.search import JsonEngine, JsonSearch
from segue.web.web import LiveWeb, WebTool
from segue.wire.tools import WebSearchTool
from tests.mcp_server import remote

WAIT_S = 30
SECRET = "hush-7f3a"


@dataclass
class Case:
    """A tool, and how it is asked for what."""

    tool: Tool
    # The type of its items.
    kind: str
    definition: dict[str, Any]
    # Function and arguments of a call that works with this word in it, and of one that the world does not answer well.
    good: Callable[[str], tuple[str, str]]
    bad: tuple[str, str]
    # One that waits until it is stopped, where the tool has any such; and whether it runs, and was stopped.
    slow: tuple[str, str] | None = None
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    was_stopped: asyncio.Event = field(default_factory=asyncio.Event)
    # What it is asked for when it is to fail, where the definition says so.
    bad_definition: dict[str, Any] | None = None

    def call(self, item_id: str, asked: tuple[str, str], owner: str = "ada", n: int = 0) -> Any:
        """The call, which is awaited by whoever makes it."""
        is_bad = asked is self.bad and self.bad_definition is not None
        definition = self.bad_definition if is_bad else self.definition
        raw = Raw(json.dumps({**(definition or {}), "authorization": SECRET}).encode())
        is_mcp = self.kind != "web_search_call"
        read = with_secrets(raw) if is_mcp else msgspec.json.decode(raw, type=WebSearchTool)
        return self.tool.call(HostedCall(owner, item_id, read, *asked, sources_before=n))


def no_hosts() -> McpHosts:
    return McpHosts((), Fetcher(Policy()))


def echo(word: str) -> tuple[str, str]:
    return "echo", json.dumps({"text": word})


OWN = {"type": "mcp", "server_label": "own"}


@asynccontextmanager
async def mcp_calls(folder: Path) -> AsyncIterator[Case]:
    async with remote() as far:
        servers = McpServers([McpServer("own", url=far.url)], no_hosts())
        slow = ("wait", '{"text":"x"}')
        case = Case(servers, "mcp_call", OWN, echo, ("fail", '{"text":"no"}'), slow)
        case.has_begun, case.was_stopped = far.has_begun, far.was_stopped
        yield case
        await servers.aclose()


@asynccontextmanager
async def mcp_lists(folder: Path) -> AsyncIterator[Case]:
    async with remote() as far:
        table = [McpServer("own", url=far.url), McpServer("gone", command=("no-such-program",))]
        servers = McpServers(table, no_hosts())
        gone = {**OWN, "server_label": "gone"}
        yield Case(
            servers.lister,
            "mcp_list_tools",
            OWN,
            lambda _: ("", ""),
            ("", "{}"),
            bad_definition=gone,
        )
        await servers.aclose()


WEB = {"type": "web_search"}
RAIN = {"results": [{"url": "https://a.com/rain", "title": "Rain", "content": "It rains."}]}


def search(word: str) -> tuple[str, str]:
    return "search", json.dumps({"query": word})


@asynccontextmanager
async def web_by_index(folder: Path) -> AsyncIterator[Case]:
    papers = folder / "papers"
    papers.mkdir()
    (papers / "rain.md").write_text("# About rain\n\nClouds bring rain.\n")
    build(papers, folder / "i.db", "https://docs.a.com")
    missing = ("open_page", '{"url":"https://docs.a.com/none.md"}')
    yield Case(WebTool(IndexWeb(folder / "i.db"), None), "web_search_call", WEB, search, missing)


@asynccontextmanager
async def searching_site(case: Case) -> AsyncIterator[str]:
    """An engine and pages; what is asked for `slow` is never answered."""

    async def answer(request: web.Request) -> web.Response:
        if "slow" in str(request.rel_url):
            case.has_begun.set()
            try:
                await asyncio.sleep(WAIT_S)
            except asyncio.CancelledError:
                case.was_stopped.set()
                raise
        if request.path == "/search":
            return web.json_response(RAIN)
        return web.Response(status=404 if "none" in request.path else 200, text="It rains.")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def web_by_engine(folder: Path) -> AsyncIterator[Case]:
    bad = ("search", '{"query":""}')
    case = Case(WebTool(None, None), "web_search_call", WEB, search, bad, search("slow"))
    async with searching_site(case) as url:
        engine = JsonSearch(JsonEngine(url))
        fetcher = Fetcher(Policy())
        case.tool = WebTool(None, LiveWeb(engine, fetcher))
        yield case
        engine.close()
        fetcher.close()


@asynccontextmanager
async def web_by_pages(folder: Path) -> AsyncIterator[Case]:
    def page(word: str) -> tuple[str, str]:
        return "open_page", json.dumps({"url": f"{url}/{word}"})

    case = Case(WebTool(None, None), "web_search_call", WEB, page, ("", ""))
    async with searching_site(case) as url:
        # The operator's own, so that loopback may be read.
        fetcher = Fetcher(Policy("own"))
        case.tool = WebTool(None, LiveWeb(None, fetcher))
        case.bad, case.slow = page("none"), page("slow")
        yield case
        fetcher.close()


Opener = Callable[[Path], AbstractAsyncContextManager[Case]]
OPENERS: list[Opener] = [
    mcp_calls,
    mcp_lists,
    web_by_index,
    web_by_engine,
    web_by_pages,
]


@pytest.fixture(params=OPENERS, ids=lambda one: one.__name__)
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    opener: Opener = request.param
    async with opener(tmp_path) as found:
        yield found


def shown(ran: ToolResult) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran.item.raw)
    return found


def has_failed(ran: ToolResult) -> bool:
    item = shown(ran)
    return item.get("status") == "failed" or bool(item.get("error"))


async def test_tool_finishes_the_item_that_it_was_called_for(case: Case) -> None:
    async with asyncio.timeout(WAIT_S):
        ran = await case.call("item_1", case.good("rain"))
    item = shown(ran)
    assert (item["type"], item["id"]) == (case.kind, "item_1")
    assert item.get("status", "completed") == "completed"
    assert not has_failed(ran)
    assert ran.item.value.id == "item_1"


async def test_what_goes_wrong_is_told_and_not_raised(case: Case) -> None:
    """The item says that it failed; where the model has asked, it reads why. The tool goes on."""
    async with asyncio.timeout(WAIT_S):
        ran = await case.call("item_1", case.bad)
        assert has_failed(ran)
        assert (shown(ran)["type"], shown(ran)["id"]) == (case.kind, "item_1")
        assert ran.text or case.kind == "mcp_list_tools"
        assert not has_failed(await case.call("item_2", case.good("rain")))


async def test_arguments_that_nobody_can_read_are_told_too(case: Case) -> None:
    name = case.good("rain")[0]
    async with asyncio.timeout(WAIT_S):
        for written in ("", "{", "[]", "null", "7", '{"url": 7}', "[" * 10_000):
            ran = await case.call("item_1", (name, written))
            assert has_failed(ran) or case.kind == "mcp_list_tools", written


async def test_secrets_of_a_definition_are_not_told(case: Case) -> None:
    async with asyncio.timeout(WAIT_S):
        for asked in (case.good("rain"), case.bad):
            ran = await case.call("item_1", asked)
            assert SECRET not in ran.text + ran.item.raw.decode() + repr(ran.sources)


async def test_calls_beside_each_other_do_not_mix(case: Case) -> None:
    words = ["rain", "Rain", "RAIN"]
    async with asyncio.timeout(WAIT_S):
        made = await asyncio.gather(
            *(
                case.call(f"{word}{n}", case.good(word), f"owner {n}")
                for word in words
                for n in (1, 2)
            )
        )
    assert [shown(ran)["id"] for ran in made] == [f"{word}{n}" for word in words for n in (1, 2)]
    if case.kind == "mcp_call":
        assert [ran.text for ran in made] == [word for word in words for _ in (1, 2)]


async def test_sources_are_numbered_behind_those_that_there_are(case: Case) -> None:
    async with asyncio.timeout(WAIT_S):
        ran = await case.call("item_1", case.good("rain"), n=4)
    assert ("[5]" in ran.text) == bool(ran.sources)
    assert bool(ran.sources) == (case.kind == "web_search_call")


async def test_being_cancelled_stops_the_work_at_once(case: Case) -> None:
    """Whoever does the work hears of it, and the next call is answered."""
    if case.slow is None:
        calling = asyncio.create_task(case.call("item_1", case.good("rain")))
        await asyncio.sleep(0)
    else:
        calling = asyncio.create_task(case.call("item_1", case.slow))
        async with asyncio.timeout(WAIT_S):
            await case.has_begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    async with asyncio.timeout(WAIT_S):
        if case.slow is not None:
            await case.was_stopped.wait()
        assert not has_failed(await case.call("item_2", case.good("rain")))
