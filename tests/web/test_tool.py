"""The web search as a hosted tool: what a model is offered, and what clients and models read of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw

from segue.errors import InvalidRequest
from segue.seams.tools import HostedCall, ToolResult
from segue.tools.hosted import ServerTools
from segue.web.tool import FUNCTIONS, LOST, web_search, words_of
from segue.wire.codec import decode_item, decode_tools
from segue.wire.effects import NO_EFFECTS
from segue.wire.tools import Tools, WebSearchTool


class NoTool:
    async def call(self, call: HostedCall) -> ToolResult:
        raise AssertionError("nothing is called here")


async def read_pdf(data: str) -> None: ...


def offered(
    tools: Tools, *, is_on: bool = True, scopes: tuple[str, ...] = ("web_search",)
) -> Tools:
    hosted = ServerTools([web_search(NoTool() if is_on else None)], read_pdf=read_pdf)
    return hosted.offer(tools, NO_EFFECTS, None, scopes)


def tools_of(*definitions: dict[str, Any]) -> Tools:
    return decode_tools(json.dumps(definitions).encode(), None)[0]


def test_functions_are_closed_objects() -> None:
    assert [one.name for one in FUNCTIONS] == ["search", "open_page", "find_in_page"]
    for one in FUNCTIONS:
        assert isinstance(one.parameters, Raw)
        schema = json.loads(bytes(one.parameters))
        assert schema["required"] == list(schema["properties"])


@pytest.mark.parametrize(
    "kind",
    ["web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"],
)
def test_settings_of_the_tool_are_read(kind: str) -> None:
    filters = {"allowed_domains": ["a.com"], "blocked_domains": ["b.a.com"]}
    tool = {
        "type": kind,
        "search_context_size": "high",
        "filters": filters,
        "user_location": {"type": "approximate", "city": "Kyiv"},
    }
    found = tools_of(tool)
    (read,) = found.definitions
    assert isinstance(read, WebSearchTool)
    assert read.filters
    assert (read.filters.allowed_domains, read.filters.blocked_domains) == (["a.com"], ["b.a.com"])
    assert read.user_location
    assert read.user_location.city == "Kyiv"
    names = [offer.qualified_name for offer in offered(found).offers]
    assert names == ["web.search", "web.open_page", "web.find_in_page"]


@pytest.mark.parametrize(
    "wrong",
    [{"filters": {"allowed_domains": "a.com"}}, {"filters": []}, {"search_context_size": "huge"}],
)
def test_filter_that_cannot_be_understood_is_refused_with_the_request(
    wrong: dict[str, object],
) -> None:
    """It would otherwise be a filter that lets everything through."""
    with pytest.raises(InvalidRequest):
        tools_of({"type": "web_search", **wrong})


def test_tool_that_is_called_like_a_function_of_the_search_is_refused() -> None:
    web = {"type": "namespace", "name": "web", "tools": [{"type": "function", "name": "search"}]}
    found = tools_of(web, {"type": "web_search"})

    assert offered(found, is_on=False) is found
    assert offered(found, scopes=("mcp",)) is found
    with pytest.raises(InvalidRequest, match=r"Two tools have the same name: 'web.search'"):
        offered(found)


def test_same_offers_leave_the_tools_as_they_are() -> None:
    once = offered(tools_of({"type": "web_search"}))
    assert offered(once) is once
    assert offered(once, is_on=False).offers == ()


@pytest.mark.parametrize(
    "action, words",
    [
        ({"type": "search", "query": "q"}, LOST),
        ({"type": "search", "query": "q", "sources": [{"type": "url", "url": "u"}]}, f"{LOST}\nu"),
        ({"type": "open_page", "url": "u"}, f"{LOST}\nu"),
        ({"type": "dance"}, LOST),
        (None, None),
    ],
)
def test_search_that_a_client_sends_back_has_lost_what_it_found(
    action: dict[str, Any] | None, words: str | None
) -> None:
    call = {"type": "web_search_call", "id": "ws_1"} | ({"action": action} if action else {})
    assert words_of(decode_item(json.dumps(call).encode(), "input[0]").value) == words
