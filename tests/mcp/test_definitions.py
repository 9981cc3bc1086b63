"""What a server lists becomes offers: those that the request allows, each with or without a person's yes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import Raw

from segue.errors import InvalidRequest
from segue.mcp.definitions import check_servers, is_same_server, listing, servers_of
from segue.mcp.tool import mcp
from segue.tools.hosted import ServerTools
from segue.wire.codec import as_item, decode_item, decode_tools
from segue.wire.effects import NO_EFFECTS, apply_effects
from segue.wire.items import Hints, HostedOutput, McpListTools, RemoteTool
from segue.wire.requests import ToolChoiceName
from segue.wire.tools import Tools, forced_offers

READ = RemoteTool("read", Raw(b'{"type":"object"}'), "Reads.", Hints(True))
WRITE = RemoteTool("write", Raw(b'{"type":"object"}'), "Writes.", Hints(False))
PLAIN = RemoteTool("plain")
ALL = (READ, WRITE, PLAIN)


def tools(*others: dict[str, Any], **fields: Any) -> Tools:
    tool = {"type": "mcp", "server_label": "own", **fields}
    return decode_tools(json.dumps([tool, *others]).encode(), None)[0]


async def read_pdf(data: str) -> None: ...


HOSTED = ServerTools([mcp(None)], read_pdf=read_pdf)


def with_listed(found: Tools, listed: Sequence[McpListTools]) -> Tools:
    """The tools of a request whose history has these lists."""
    effects = apply_effects(NO_EFFECTS, map(as_item, listed))
    return HOSTED.offer(found, effects, None, ())


def offered(found: Tools) -> dict[str, bool]:
    """The tools by name, and whether a person is asked."""
    server = servers_of(found)["own"]
    found = with_listed(found, [listing("mcpl_1", server, ALL)])
    return {one.tool.name: one.needs_approval for one in found.offers}


@pytest.mark.parametrize(
    "allowed, names",
    [
        (None, ["read", "write", "plain"]),
        (["write", "nothing"], ["write"]),
        ([], []),
        ({"tool_names": ["read", "plain"]}, ["read", "plain"]),
        ({"read_only": True}, ["read"]),
        ({"read_only": False}, ["write", "plain"]),
        ({"tool_names": ["write", "read"], "read_only": True}, ["read"]),
    ],
)
def test_model_knows_the_tools_that_are_allowed(allowed: Any, names: list[str]) -> None:
    assert list(offered(tools(allowed_tools=allowed))) == names


@pytest.mark.parametrize(
    "asking, asked",
    [
        (None, ["read", "write", "plain"]),
        ("always", ["read", "write", "plain"]),
        ("never", []),
        ({"never": {"tool_names": ["plain"]}}, ["read", "write"]),
        ({"never": {"read_only": True}}, ["write", "plain"]),
        ({"always": {"tool_names": ["write"]}}, ["read", "write", "plain"]),
        ({"always": {"tool_names": ["read"]}, "never": {"read_only": True}}, [*"rwp"]),
    ],
)
def test_person_is_asked_unless_the_request_says_otherwise(asking: Any, asked: list[str]) -> None:
    wanted = ["read", "write", "plain"] if asked == [*"rwp"] else asked
    found = offered(tools(require_approval=asking))
    assert [name for name, is_asked in found.items() if is_asked] == wanted


@pytest.mark.parametrize(
    "fields, wrong",
    [
        ({"allowed_tools": "read"}, "allowed_tools"),
        ({"allowed_tools": [1]}, "allowed_tools"),
        ({"require_approval": "sometimes"}, "require_approval"),
        ({"require_approval": {"never": ["a"]}}, "require_approval"),
    ],
)
def test_definition_of_a_wrong_shape_is_refused(fields: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_servers(tools(**fields))
    assert refused.value.param == f"tools[0].{wrong}"


def test_definition_of_the_right_shape_is_taken() -> None:
    check_servers(tools(require_approval={"never": {}}, allowed_tools={}))


def test_same_list_leaves_the_tools_as_they_are() -> None:
    found = tools(require_approval="never")
    listed = [listing("mcpl_1", servers_of(found)["own"], ALL)]
    once = with_listed(found, listed)

    assert with_listed(once, listed) is once
    assert not once.is_told_like(found)
    assert with_listed(once, []).offers == ()
    assert {one.kind for one in once.offers} == {"mcp"}
    assert [one.qualified_name for one in once.offers] == ["own.read", "own.write", "own.plain"]


def test_deferred_server_waits_for_a_search() -> None:
    alone = tools(defer_loading=True)
    assert len(offered(alone)) == 3
    found = tools({"type": "tool_search"}, defer_loading=True, server_description="Files.")
    found = with_listed(found, [listing("mcpl_1", servers_of(found)["own"], ALL)])
    (search,) = found.offers
    assert "own: Files." in str(search.tool.description)
    assert [one.tool.name for one in found.deferred] == ["read", "write", "plain"]


def test_choice_names_a_server_and_perhaps_one_of_its_tools() -> None:
    found = tools({"type": "function", "name": "read"})
    found = with_listed(found, [listing("mcpl_1", servers_of(found)["own"], ALL)])

    def forced(**fields: str) -> list[str]:
        choice = ToolChoiceName(type="mcp", **fields)
        return [one.qualified_name for one in forced_offers(choice, found.offers)]

    assert forced(server_label="own") == ["own.read", "own.write", "own.plain"]
    assert forced(server_label="own", name="read") == ["own.read"]
    assert forced(server_label="other") == []
    by_name = ToolChoiceName(type="function", name="read")
    assert [one.kind for one in forced_offers(by_name, found.offers)] == ["function"]


def test_secrets_are_no_part_of_what_is_kept() -> None:
    found = tools(authorization="hush", headers={"X": "hush"})

    assert b"hush" not in found.raw + found.echo
    same = {"type": "mcp", "server_label": "own", "authorization": "hush", "headers": {"X": "hush"}}
    assert decode_tools(json.dumps([same]).encode(), found) == (found, False)
    assert decode_tools(json.dumps([{**same, "authorization": "x"}]).encode(), found)[1]
    assert is_same_server(servers_of(tools())["own"], servers_of(found)["own"])
    assert not is_same_server(servers_of(tools(allowed_tools=[]))["own"], servers_of(found)["own"])


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"output": "o"}, "o"),
        ({"error": {"type": "http_error", "code": 500, "message": "no"}}, "Error: no"),
        (
            {"error": {"type": "mcp_tool_execution_error", "content": [{"text": "no"}]}},
            "Error: no",
        ),
        ({"error": "no", "approval_request_id": "mcpr_1"}, "Error: no"),
        ({"output": None, "error": None}, "[The output of this call is not available.]"),
    ],
)
def test_call_that_a_client_sends_back_is_followed_by_what_was_said(
    fields: dict[str, Any], words: str
) -> None:
    call = {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "n", "arguments": "{}"}
    item = decode_item(json.dumps({**call, **fields}).encode(), "input[0]")
    made_in = fields.get("approval_request_id", "mcp_1")

    output = as_item(HostedOutput(call_id=made_in, output=words))
    assert HOSTED.with_outputs((item,)) == (item, output)
    other = as_item(McpListTools(id="l", server_label="s", tools=[]))
    assert HOSTED.with_outputs((other,)) == (other,)


def test_tool_of_a_server_that_is_called_like_another_is_refused() -> None:
    own = {"type": "namespace", "name": "own", "tools": [{"type": "function", "name": "read"}]}
    found = tools(own)
    with pytest.raises(InvalidRequest, match=r"Two tools have the same name: 'own.read'"):
        offered(found)

    dotted = {"type": "mcp", "server_label": "own.a"}
    found = tools(dotted)
    listed = [
        listing("mcpl_1", servers_of(found)["own"], [RemoteTool("a.b")]),
        listing("mcpl_2", servers_of(found)["own.a"], [RemoteTool("b")]),
    ]
    with pytest.raises(InvalidRequest, match=r"Two tools have the same name: 'own.a.b'"):
        with_listed(found, listed)


def test_server_that_lists_a_tool_twice_offers_it_once() -> None:
    found = tools()
    listed = listing("mcpl_1", servers_of(found)["own"], [READ, WRITE, READ])

    assert [one.tool.name for one in with_listed(found, [listed]).offers] == ["read", "write"]
