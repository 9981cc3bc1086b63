"""The search for tools: what is meant is found, and nothing else is loaded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.seams.model import Scene
from segue.seams.prompt import Head
from segue.seams.tools import HostedCall
from segue.tools.tool_search import FOUND_MAX, search, tool_search
from segue.wire.codec import decode_item, decode_tools
from segue.wire.tools import Offer, Tools, ToolSearchTool


def function(name: str, description: str = "", *parameters: str) -> dict[str, Any]:
    properties = {one: {"type": "string"} for one in parameters}
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties},
        "defer_loading": True,
    }


def deferred(*tools: dict[str, Any]) -> tuple[Offer, ...]:
    listed = [*tools, {"type": "tool_search"}]
    return decode_tools(json.dumps(listed).encode(), None)[0].deferred


OFFERS = deferred(
    function("get_weather", "The weather of a city.", "city", "day"),
    function("sendEmail", "Sends a message by mail.", "recipient", "subject"),
    {
        "type": "namespace",
        "name": "crm",
        "description": "Customers and their orders.",
        "tools": [
            function("list_customers", "All customers of a region.", "region"),
            function("get_order", "One order, by its number.", "order_id"),
            {"type": "custom", "name": "report", "defer_loading": True},
        ],
    },
    function("delete_file", "Removes a file.", "path"),
    function("parseHTTPLog2", "", "sinceDay"),
)


@pytest.mark.parametrize(
    "wanted, first",
    [
        ("weather", "get_weather"),
        ("What will the WEATHER be in this city?", "get_weather"),
        ("send email", "sendEmail"),
        ("mail", "sendEmail"),
        ("subject", "sendEmail"),
        ("customer", "crm.list_customers"),
        ("orders by number", "crm.get_order"),
        ("crm.report", "crm.report"),
        ("please load delete_file", "delete_file"),
        ("http", "parseHTTPLog2"),
        ("log 2", "parseHTTPLog2"),
        ("since_day", "parseHTTPLog2"),
        ("read_logs", "parseHTTPLog2"),
    ],
)
def test_tool_that_is_meant_comes_first(wanted: str, first: str) -> None:
    assert search(wanted, OFFERS)[0].qualified_name == first


def test_namespace_finds_all_that_it_holds() -> None:
    names = {offer.qualified_name for offer in search("crm", OFFERS)}

    assert names == {"crm.list_customers", "crm.get_order", "crm.report"}


@pytest.mark.parametrize("wanted", ["", "???", "telepathy"])
def test_what_nobody_offers_is_not_found(wanted: str) -> None:
    assert search(wanted, OFFERS) == []


def test_search_loads_only_so_many() -> None:
    offers = deferred(*(function(f"tool_{n}", "Reads.") for n in range(50)))

    assert len(search("reads", offers)) == FOUND_MAX


def test_word_in_a_name_counts_more_than_in_a_description() -> None:
    offers = deferred(
        function("one", "Rain."), function("two", "", "rain"), function("rain_map", "A long text.")
    )

    assert [offer.tool.name for offer in search("rain", offers)] == ["rain_map", "two", "one"]


def test_tools_that_fit_alike_keep_the_order_of_the_request() -> None:
    offers = deferred(*(function(f"read_{name}", "Reads.") for name in "cab"))

    assert [offer.tool.name for offer in search("read", offers)] == ["read_c", "read_a", "read_b"]


def test_tool_of_the_meant_namespace_goes_before_its_namesake() -> None:
    spaces = [
        {"type": "namespace", "name": name, "tools": [function("report")]} for name in ("hr", "crm")
    ]

    found = search("crm report", deferred(*spaces))

    assert [offer.qualified_name for offer in found] == ["crm.report", "hr.report"]


@given(st.text(max_size=40))
def test_any_words_may_be_asked(wanted: str) -> None:
    found = search(wanted, OFFERS)

    assert len(found) <= FOUND_MAX
    assert len({offer.qualified_name for offer in found}) == len(found)
    assert found == search(wanted, OFFERS)


@pytest.mark.parametrize("arguments", ['{"query":"order"}', '{"paths":["x","order"]}', '"order"'])
async def test_output_holds_whole_definitions_under_their_namespace(arguments: str) -> None:
    raw = f'{{"type":"tool_search_call","id":"tsc_7","execution":"server","arguments":{arguments}}}'
    call = decode_item(raw.encode(), "input[0]").value
    (kind,) = tool_search().kinds
    assert kind.tool is not None
    assert kind.answer is not None
    begun, asked = kind.answer(call, lambda struct: ""), kind.request(call)
    assert begun is not None
    scene = Scene(Head(tools=Tools(deferred=OFFERS)), None, ())

    result = await kind.tool.call(
        HostedCall("ada", str(begun.id), ToolSearchTool(), "", asked.arguments, scene=scene)
    )

    output = json.loads(result.item.raw)

    space, *_ = output.pop("tools")
    assert output == {
        "type": "tool_search_output",
        "id": "tso_7",
        "call_id": None,
        "execution": "server",
        "status": "completed",
    }
    assert (space["type"], space["name"]) == ("namespace", "crm")
    assert space["description"] == "Customers and their orders."
    assert space["tools"][0] == {
        **function("get_order", "One order, by its number.", "order_id"),
        "strict": None,
    }
