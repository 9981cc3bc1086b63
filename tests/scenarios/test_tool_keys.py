"""Which keys may have the server run tools: each kind is opted into by a scope, over HTTP and over sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from segue.accounts.hashes import issue_key
from tests.mcp_server import remote
from tests.scenarios.test_mcp import DONE, OWN, echoing, hosting, hosting_own
from tests.scenarios.test_web_search import ANSWER, SEARCH, WEB, searching
from tests.support import MODEL, WEATHER, Served, fetch, wire

Body = dict[str, Any]


async def key_for(served: Served, *scopes: str, owner: str = "ada") -> dict[str, str]:
    """The headers of a key of an owner that is good for these, beside the API."""
    app = served.app
    _, secret = await issue_key(
        app.state.store.keys, app.state.hashes, "k", owner, ("responses", "models", *scopes)
    )
    return {"Authorization": f"Bearer {secret}"}


async def types_of(served: Served, headers: dict[str, str], **fields: Any) -> list[str]:
    body = {"model": MODEL, "input": "Go", **fields}
    answer = await fetch(served, "POST", "/v1/responses", body, headers)
    assert answer.status == 200, answer.body
    return [one["type"] for one in answer.json["output"]]


async def test_search_is_offered_to_keys_that_may_search(tmp_path: Path) -> None:
    """To another key it is as if there were none: agents list it whether they need it or not."""
    async with searching(tmp_path, SEARCH, ANSWER, auth="keys") as served:
        may, may_not = await key_for(served, "web_search"), await key_for(served, "mcp")
        assert await types_of(served, may, tools=[WEB]) == ["web_search_call", "message"]
        # Where nothing is offered, what looks like a call is text.
        assert await types_of(served, may_not, tools=[WEB], tool_choice="none") == ["message"]
        alone = {"model": MODEL, "input": "Go", "tools": [WEB]}
        refused = await fetch(served, "POST", "/v1/responses", alone, may_not)
        assert (refused.status, refused.json["error"]["param"]) == (400, "tools")
        forced = {"model": MODEL, "input": "Go", "tools": [WEB], "tool_choice": WEB}
        refused = await fetch(served, "POST", "/v1/responses", forced, may_not)
        assert (refused.status, refused.json["error"]["code"]) == (400, "unsupported_value")
        async with wire(served, additional_headers=may_not) as socket:
            last = await socket.turn(input="Go", tools=[WEB], tool_choice="none")
            assert [one["type"] for one in last["response"]["output"]] == ["message"]


async def test_keys_of_one_owner_continue_each_other_with_their_own_tools(tmp_path: Path) -> None:
    """What the model is told differs, so the prompt is made anew: it is checked cold each time."""
    turns = [SEARCH, ANSWER, {"text": "Yes."}, SEARCH, ANSWER]
    async with searching(tmp_path, *turns, auth="keys") as served:
        may, may_not = await key_for(served, "web_search"), await key_for(served)
        chain: Body = {"model": MODEL, "input": "Go", "tools": [WEB, WEATHER]}
        kinds, sizes = [], []
        for headers in (may, may_not, may):
            told = (await fetch(served, "POST", "/v1/responses", chain, headers)).json
            kinds.append([one["type"] for one in told["output"]])
            sizes.append(told["usage"]["input_tokens"])
            chain["previous_response_id"] = told["id"]
    assert kinds == [["web_search_call", "message"], ["message"], ["web_search_call", "message"]]
    assert sizes[1] < sizes[0], "the second was not told of a search"


@pytest.mark.parametrize("scopes", [(), ("web_search", "mcp_url")])
async def test_servers_of_the_operator_need_a_scope(scopes: tuple[str], tmp_path: Path) -> None:
    async with hosting_own(tmp_path, echoing("a"), DONE, auth="keys") as (served, far):
        may, may_not = await key_for(served, "mcp"), await key_for(served, *scopes)
        body = {"model": MODEL, "input": "Go", "tools": [OWN]}
        refused = await fetch(served, "POST", "/v1/responses", body, may_not)
        effects = [{"type": "additional_tools", "tools": [OWN]}]
        body = {"model": MODEL, "input": effects}
        assert (await fetch(served, "POST", "/v1/responses", body, may_not)).status == 403
        body = {"model": MODEL, "input": "Go", "tools": [OWN]}
        async with wire(served, additional_headers=may_not) as socket:
            await socket.send({"type": "response.create", **body})
            event = await socket.next()
        assert (far.headers, far.calls) == ([], [])
        assert await types_of(served, may, tools=[OWN]) == ["mcp_list_tools", "mcp_call", "message"]
    assert refused.status == 403
    assert refused.json["error"]["code"] == "insufficient_permissions"
    assert "'mcp'" in refused.json["error"]["message"]
    assert event["error"] == refused.json["error"]


async def test_servers_by_address_need_a_scope_of_their_own(tmp_path: Path) -> None:
    async with remote() as far:
        flags: Body = {"mcp_hosts": [far.url.split("/")[2]], "auth": "keys"}
        tool = {**OWN, "server_url": far.url}
        async with hosting(tmp_path, echoing("a"), DONE, mcp=[], **flags) as served:
            may, may_not = await key_for(served, "mcp_url"), await key_for(served, "mcp")
            body = {"model": MODEL, "input": "Go", "tools": [tool]}
            refused = await fetch(served, "POST", "/v1/responses", body, may_not)
            assert (refused.status, far.headers) == (403, [])
            assert "'mcp_url'" in refused.json["error"]["message"]
            told = await types_of(served, may, tools=[tool])
    assert told == ["mcp_list_tools", "mcp_call", "message"]
