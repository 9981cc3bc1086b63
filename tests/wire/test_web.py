from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from segue.errors import InvalidRequest
from segue.wire.codec import decode_tools, encode
from segue.wire.web import (
    WEB_FUNCTIONS,
    FindInPageAction,
    OpenPageAction,
    SearchAction,
    as_call,
    domains_of,
    read_action,
    read_definition,
    with_web,
)


@pytest.mark.parametrize(
    "name, arguments, action",
    [
        ("search", '{"query":" rain "}', SearchAction(query="rain", queries=["rain"])),
        ("search", '{"q":"rain"}', SearchAction(query="rain", queries=["rain"])),
        ("web_search", '{"query":"rain"}', SearchAction(query="rain", queries=["rain"])),
        ("open_page", '{"url":"https://a.com"}', OpenPageAction(url="https://a.com")),
        ("web_search", '{"type":"open_page","url":"u"}', OpenPageAction(url="u")),
        ("find_in_page", '{"url":"u","pattern":"p"}', FindInPageAction(url="u", pattern="p")),
        ("find_in_page", '{"url":"u","query":"p"}', FindInPageAction(url="u", pattern="p")),
        ("search", "not json", SearchAction(query="")),
        ("search", '{"query":7}', SearchAction(query="")),
        ("search", "", SearchAction(query="")),
        ("search", "[" * 100_000, SearchAction(query="")),
    ],
)
def test_arguments_of_a_model_are_read_kindly(name: str, arguments: str, action: object) -> None:
    assert read_action(name, arguments) == action


@given(
    st.sampled_from(["search", "open_page", "find_in_page"]),
    st.text(max_size=40),
    st.text(max_size=40),
)
def test_action_and_call_say_the_same(name: str, url: str, words: str) -> None:
    asked = {"search": {"query": words.strip()}, "open_page": {"url": url}}
    arguments = asked.get(name, {"url": url, "pattern": words})
    action = read_action(name, json.dumps(arguments))
    again, written = as_call(encode(action))
    assert (again, json.loads(written)) == (name, arguments)


def test_functions_are_closed_objects() -> None:
    assert [one.name for one in WEB_FUNCTIONS] == ["search", "open_page", "find_in_page"]
    for one in WEB_FUNCTIONS:
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
    read = read_definition(json.dumps(tool).encode())
    assert domains_of(read) == (["a.com"], ["b.a.com"])
    assert read.user_location
    assert read.user_location.city == "Kyiv"


@pytest.mark.parametrize(
    "wrong",
    [{"filters": {"allowed_domains": "a.com"}}, {"filters": []}, {"search_context_size": "huge"}],
)
def test_filter_that_cannot_be_understood_is_refused_with_the_request(
    wrong: dict[str, object],
) -> None:
    """It would otherwise be a filter that lets everything through."""
    with pytest.raises(InvalidRequest):
        decode_tools(json.dumps([{"type": "web_search", **wrong}]).encode(), None)


def test_tool_that_is_called_like_a_function_of_the_search_is_refused() -> None:
    web = {"type": "namespace", "name": "web", "tools": [{"type": "function", "name": "search"}]}
    found, _ = decode_tools(json.dumps([web, {"type": "web_search"}]).encode(), None)

    assert with_web(found, is_on=False) is found
    with pytest.raises(InvalidRequest, match=r"Two tools have the same name: 'web.search'"):
        with_web(found, is_on=True)
