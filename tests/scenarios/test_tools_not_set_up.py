"""Tools that the server would have to run and that are not set up: a warning beside other tools, else a refusal."""

from __future__ import annotations

import logging

import pytest

from tests.support import MODEL, fetch, serving, until
from tests.ways import WAYS, made, refused

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
SEARCH = {"type": "web_search"}
HOSTED = (
    "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation",
    "computer", "programmatic_tool_calling",
)  # fmt: skip
SENTENCE = "The model was not offered the tool 'web_search'"


def asked(*tools: object, **fields: object) -> dict[str, object]:
    return {"model": MODEL, "input": "Hello", "tools": tools, "store": False, **fields}


@pytest.mark.parametrize("streams", [False, True])
async def test_client_is_warned_of_a_tool_beside_others(streams: bool) -> None:
    async with serving() as served:
        body = asked(WEATHER, SEARCH, {"type": "file_search"}, SEARCH, stream=streams)
        answer = await fetch(served, "POST", "/v1/responses", body)
        assert answer.status == 200
        warnings = answer.headers["x-segue-warnings"]
        assert warnings.count(SENTENCE) == 1
        assert "'file_search'" in warnings
        plain = await fetch(served, "POST", "/v1/responses", asked(WEATHER))
        assert "x-segue-warnings" not in plain.headers


async def test_log_names_each_tool_once(caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        return [each.message for each in caplog.records if "not set up" in each.message]

    with caplog.at_level(logging.WARNING):
        async with serving() as served:
            for way in (*WAYS, *WAYS):
                await made(served, way, input="Hello", tools=[WEATHER, SEARCH])
            await made(served, "json", input="Hello", tools=[WEATHER, {"type": "computer"}])
            await until(lambda: len(lines()) == 2)
    assert ["web_search" in line for line in lines()] == [True, False]


@pytest.mark.parametrize("kind", HOSTED)
async def test_tool_that_stands_alone_is_refused(kind: str) -> None:
    async with serving() as served:
        for way in WAYS:
            found = await refused(served, way, input="x", tools=[{"type": kind}])
            assert found == (400, "unsupported_value", "tools")
        answer = await fetch(served, "POST", "/v1/responses", asked({"type": kind}))
        assert f"'{kind}'" in answer.json["error"]["message"]
        # A model that may call nothing misses nothing.
        unused = asked({"type": kind}, tool_choice="none")
        assert (await fetch(served, "POST", "/v1/responses", unused)).status == 200


async def test_shell_in_a_container_and_mcp_without_servers_are_not_swallowed() -> None:
    container = {"type": "shell", "environment": {"type": "container_auto"}}
    remote = {"type": "mcp", "server_label": "s", "server_url": "http://127.0.0.1:1/mcp"}
    async with serving() as served:
        for tool in (container, remote):
            found = await refused(served, "json", input="x", tools=[tool])
            assert found == (400, "unsupported_value", "tools")
            beside = await fetch(served, "POST", "/v1/responses", asked(WEATHER, tool))
            assert f"'{tool['type']}'" in beside.headers["x-segue-warnings"]
        local = await fetch(served, "POST", "/v1/responses", asked({"type": "shell"}))
        assert "x-segue-warnings" not in local.headers


async def test_tool_of_an_item_counts_as_well() -> None:
    brought = {"type": "additional_tools", "tools": [SEARCH]}
    items = [brought, {"role": "user", "content": "Hello"}]
    async with serving() as served:
        found = await refused(served, "json", input=items)
        assert found == (400, "unsupported_value", "tools")
        answer = await fetch(served, "POST", "/v1/responses", asked(WEATHER) | {"input": items})
        assert SENTENCE in answer.headers["x-segue-warnings"]


async def test_operator_has_every_such_request_refused() -> None:
    async with serving(unknown_tools="refuse") as served:
        for way in WAYS:
            found = await refused(served, way, input="x", tools=[WEATHER, SEARCH])
            assert found == (400, "unsupported_value", "tools")
            await made(served, way, input="x", tools=[WEATHER])


async def test_tool_that_is_set_up_is_no_reason_to_warn() -> None:
    async with serving(search_url="http://127.0.0.1:9/{query}", fetch="public") as served:
        answer = await fetch(served, "POST", "/v1/responses", asked(SEARCH))
        assert (answer.status, "x-segue-warnings" in answer.headers) == (200, False)
