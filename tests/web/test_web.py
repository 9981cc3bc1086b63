"""The web search as a hosted tool: an index, an engine, pages, and what the model and the client are told of them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from segue.errors import InvalidRequest, Unavailable
from segue.seams.tools import HostedCall, ToolResult
from segue.server.tools import build_fetcher, build_web
from segue.settings.checks import load_settings
from segue.web.cite import cite
from segue.web.html import TEXT_CHARS_MAX, Link, Page
from segue.web.index import IndexWeb, build
from segue.web.search import Hit, WebQuery
from segue.web.url import failed
from segue.web.web import MATCHES_MAX, PATTERN_CHARS_MAX, SIZES, WebTool, matches_text
from segue.wire.codec import decode_tools

URL = "https://docs.a.com"
PAGE = Page(
    "https://b.org/page", "A page", "Rain falls. " * 2_000, (Link("https://b.org/next", "next"),)
)


class CannedWeb:
    """A web of one page, which counts who asks."""

    def __init__(self, *, is_down: bool = False) -> None:
        self.asked: list[object] = []
        self.is_down = is_down

    async def search(self, asked: WebQuery) -> Sequence[Hit]:
        self.asked.append(asked)
        if self.is_down:
            raise Unavailable("The search engine does not answer.")
        return [
            Hit(f"https://b.org/{number}", f"Hit {number}", "words")
            for number in range(asked.hits_max)
        ]

    async def open_page(self, url: str) -> Page | None:
        self.asked.append(url)
        if "moved" in url:
            return Page("https://elsewhere.com/", "Moved", "text")
        if url != PAGE.url:
            raise failed(url, "it answered 404.")
        return PAGE


@pytest.fixture
def index(tmp_path: Path) -> IndexWeb:
    folder = tmp_path / "papers"
    folder.mkdir()
    (folder / "rain.md").write_text("# About rain\n\nClouds bring rain.\n")
    build(folder, tmp_path / "i.db", URL)
    return IndexWeb(tmp_path / "i.db")


async def ask(
    tool: WebTool,
    name: str,
    before: int = 0,
    owner: str = "me",
    tool_is: dict[str, Any] | None = None,
    **arguments: str,
) -> ToolResult:
    listed = json.dumps([{"type": "web_search", **(tool_is or {})}]).encode()
    (definition,) = decode_tools(listed, None)[0].definitions
    call = HostedCall(owner, "ws_1", definition, name, json.dumps(arguments), before)
    return await tool.call(call)


def shown(ran: ToolResult) -> dict[str, Any]:
    return json.loads(ran.item.raw)


async def test_index_alone_is_a_web(index: IndexWeb) -> None:
    tool = WebTool(index, None)
    ran = await ask(tool, "search", query="rain")
    assert shown(ran) == {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {
            "type": "search",
            "query": "rain",
            "queries": ["rain"],
            "sources": [{"type": "url", "url": f"{URL}/rain.md"}],
        },
    }
    assert ran.text.startswith(f"[1] About rain\n{URL}/rain.md\n")
    opened = await ask(tool, "open_page", before=1, url=f"{URL}/rain.md")
    assert shown(opened)["action"] == {"type": "open_page", "url": f"{URL}/rain.md"}
    assert opened.text.startswith("[2] About rain")
    assert "Clouds bring rain." in opened.text
    answer = "Clouds do it [2]."
    (mark,) = cite(answer, [*ran.sources, *opened.sources])
    assert (answer[mark.start_index : mark.end_index], mark.url) == ("[2]", f"{URL}/rain.md")
    found = await ask(tool, "find_in_page", url=f"{URL}/rain.md", pattern="BRING  rain")
    assert shown(found)["action"] == {
        "type": "find_in_page",
        "pattern": "BRING  rain",
        "url": f"{URL}/rain.md",
    }
    assert "1 found" in found.text


async def test_own_documents_come_before_the_web(index: IndexWeb) -> None:
    ran = await ask(
        WebTool(index, CannedWeb()), "search", query="rain", tool_is={"search_context_size": "low"}
    )
    assert [one.url for one in ran.sources] == [
        f"{URL}/rain.md",
        *(f"https://b.org/{n}" for n in range(3)),
    ]
    assert [line[:3] for line in ran.text.split("\n\n") if line[0] == "["] == [
        "[1]",
        "[2]",
        "[3]",
        "[4]",
    ]


async def test_without_external_access_nobody_outside_is_asked(index: IndexWeb) -> None:
    live = CannedWeb()
    tool, off = WebTool(index, live), {"external_web_access": False}
    assert len((await ask(tool, "search", query="rain", tool_is=off)).sources) == 1
    refused = await ask(tool, "open_page", url=PAGE.url, tool_is=off)
    assert shown(refused)["status"] == "failed"
    assert "not available" in refused.text
    assert live.asked == []
    await ask(tool, "open_page", url=PAGE.url)
    again = await ask(tool, "find_in_page", url=PAGE.url, pattern="rain", tool_is=off)
    assert shown(again)["status"] == "completed"
    assert live.asked == [PAGE.url]


async def test_page_that_was_read_is_kept_for_its_owner_only() -> None:
    live = CannedWeb()
    tool = WebTool(None, live)
    await ask(tool, "open_page", url=PAGE.url)
    await ask(tool, "open_page", url=PAGE.url)
    assert len(live.asked) == 1
    await ask(tool, "open_page", url=PAGE.url, owner="another")
    assert len(live.asked) == 2


async def test_size_and_place_are_passed_on() -> None:
    live = CannedWeb()
    tool_is = {
        "search_context_size": "high",
        "user_location": {"type": "approximate", "city": "Kyiv"},
        "filters": {"allowed_domains": ["b.org"]},
    }
    await ask(WebTool(None, live), "search", query="rain", tool_is=tool_is)
    (asked,) = live.asked
    assert isinstance(asked, WebQuery)
    assert (asked.hits_max, asked.allowed, asked.location.city) == (
        SIZES["high"].hits,
        ("b.org",),
        "Kyiv",
    )
    long = [
        len(
            (
                await ask(
                    WebTool(None, CannedWeb()),
                    "open_page",
                    url=PAGE.url,
                    tool_is={"search_context_size": size},
                )
            ).text
        )
        for size in SIZES
    ]
    assert long == sorted(long)
    assert long[0] < 5_000


async def test_domains_hold_for_pages_and_for_where_they_lead() -> None:
    live = CannedWeb()
    tool, tool_is = WebTool(None, live), {"filters": {"allowed_domains": ["b.org"]}}
    remote = await ask(tool, "open_page", url="https://other.com/", tool_is=tool_is)
    assert shown(remote)["status"] == "failed"
    assert live.asked == []
    moved = await ask(tool, "open_page", url="https://b.org/moved", tool_is=tool_is)
    assert shown(moved)["status"] == "failed"
    assert moved.sources == ()
    assert "text" not in moved.text


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("search", {}),
        ("open_page", {}),
        ("open_page", {"url": "nonsense"}),
        ("open_page", {"url": "http://169.254.169.254/"}),
        ("open_page", {"url": "https://b.org/missing"}),
        ("find_in_page", {"url": PAGE.url}),
        ("search", {"query": "rain"}),
    ],
)
async def test_what_goes_wrong_is_told_and_shown(name: str, arguments: dict[str, str]) -> None:
    ran = await ask(WebTool(None, CannedWeb(is_down=True)), name, **arguments)
    item = shown(ran)
    assert item["status"] == "failed"
    assert item["action"]["type"] == name
    assert ran.text
    assert ran.sources == ()


async def test_documents_are_found_while_the_engine_is_away(index: IndexWeb) -> None:
    ran = await ask(WebTool(index, CannedWeb(is_down=True)), "search", query="rain")
    assert len(ran.sources) == 1


def test_places_are_told_once_and_not_endlessly() -> None:
    told = matches_text(PAGE, "rain falls")
    assert told.startswith("2000 found")
    assert told.count("\n\n") <= MATCHES_MAX
    assert "does not contain" in matches_text(PAGE, "snow (")
    with pytest.raises(InvalidRequest, match="1 to 32 words"):
        matches_text(PAGE, "a " * 33)
    with pytest.raises(InvalidRequest, match="at most 1,000 characters"):
        matches_text(PAGE, "a" * (PATTERN_CHARS_MAX + 1))


@pytest.mark.parametrize(
    "text, pattern",
    [
        ("It RAINS\n\there.", "rains HERE"),
        ("Stra\u00dfe \u0130stanbul", "istanbul"),
        ("\u039f\u0394\u039f\u03a3", "\u03bf\u03b4\u03bf\u03c2"),
        ("\u03bf\u03b4\u03bf\u03c2 a", "\u039f\u0394\u039f\u03a3 A"),
    ],
)
def test_words_are_found_whatever_their_case_and_the_white_space(text: str, pattern: str) -> None:
    assert matches_text(Page("u", "t", f"a {text} b"), pattern).startswith("1 found")


def test_words_that_are_nearly_everywhere_are_not_searched_for_long() -> None:
    """It is one step that nothing interrupts: 1 s for this pattern, and 18 s for a longer one, when it was a regular
    expression."""
    page = Page("u", "t", "a" * TEXT_CHARS_MAX)
    began = time.thread_time()
    assert "does not contain" in matches_text(page, "a" * (PATTERN_CHARS_MAX - 1) + "b")
    assert time.thread_time() - began < 0.2


@pytest.mark.parametrize(
    "flags, is_there",
    [({}, False), ({"fetch": "public"}, True), ({"search_url": "http://127.0.0.1:9"}, True)],
)
async def test_search_is_there_if_anything_is_behind_it(
    flags: dict[str, str], is_there: bool
) -> None:
    settings = load_settings({"engine": "scripted", **flags}, {})
    async with AsyncExitStack() as stack:
        tool = build_web(settings, build_fetcher(settings), stack)
        assert (tool is not None) is is_there


async def test_pages_are_not_opened_while_fetching_is_off() -> None:
    settings = load_settings({"engine": "scripted", "search_url": "http://127.0.0.1:9"}, {})
    async with AsyncExitStack() as stack:
        tool = build_web(settings, build_fetcher(settings), stack)
        assert tool is not None
        ran = await ask(tool, "open_page", url="http://1.1.1.1/")
    assert "switched off" in ran.text
