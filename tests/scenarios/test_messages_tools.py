"""Tools that the server runs for clients of the Messages API: what they find comes as blocks, and comes back so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.message_events import BASH, HELLO, ask, both, events_of, joined
from tests.scenarios.test_mcp import DONE, OWN, echoing, hosting_own
from tests.scenarios.test_tools import calling, scripted
from tests.scenarios.test_web_search import ANSWER, FIND, OPEN, SEARCH, URL, searching
from tests.support import serving

SEARCHES = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]


def kinds(message: dict[str, Any]) -> list[str]:
    return [block["type"] for block in message["content"]]


async def test_search_is_a_call_with_its_results_and_the_text_cites(tmp_path: Path) -> None:
    async with searching(tmp_path, SEARCH, OPEN, FIND, ANSWER) as served:
        message = await both(served, tools=SEARCHES)
        use, result, opened, page, find, _, text = message["content"]
        # The prompt with what comes back is the same as the one that the model has seen.
        answered = {"role": "assistant", "content": message["content"]}
        again = await ask(served, [*HELLO, answered, *HELLO], tools=SEARCHES)
        assert again.status == 200, again.json
    assert kinds(message) == [
        *("server_tool_use", "web_search_tool_result"),
        *("server_tool_use", "web_fetch_tool_result"),
        *("server_tool_use", "web_fetch_tool_result"),
        "text",
    ]
    assert use["input"] == {"query": "rain"}
    assert result["tool_use_id"] == use["id"]
    first, *_ = result["content"]
    assert first["url"] == f"{URL}/rain.md"
    assert first["encrypted_content"]
    assert "Clouds bring rain" not in str(result)
    assert opened["input"] == {"url": f"{URL}/rain.md"}
    assert "Clouds bring rain" in page["content"]["content"]["source"]["data"]
    assert find["input"]["pattern"] == "bring rain"
    assert text["citations"][0]["url"] == f"{URL}/rain.md"
    counted = {"web_search_requests": 1, "web_fetch_requests": 2}
    assert message["usage"]["server_tool_use"] == counted
    assert message["stop_reason"] == "end_turn"


async def test_what_was_found_comes_back_to_the_model(tmp_path: Path) -> None:
    """The client sends the sealed results back, and the model reads what it read then, not that it is lost."""
    async with searching(tmp_path, SEARCH, ANSWER) as served:
        message = await both(served, tools=SEARCHES)
        answered = {"role": "assistant", "content": message["content"]}
        body = {"model": "scripted", "messages": [*HELLO, answered, *HELLO], "tools": SEARCHES}
        bare = [
            {**block, "content": [{**page, "encrypted_content": ""} for page in block["content"]]}
            if block["type"] == "web_search_tool_result"
            else block
            for block in message["content"]
        ]
        lost = {**body, "messages": [*HELLO, {"role": "assistant", "content": bare}, *HELLO]}
        lengths = [
            (await ask(served, path="/v1/messages/count_tokens", **one)).json["input_tokens"]
            for one in (body, lost)
        ]
    assert lengths[0] > lengths[1]


async def test_search_that_is_not_set_up_is_refused_by_its_name() -> None:
    async with serving() as served:
        answer = await ask(served, tools=SEARCHES)
    assert answer.status == 400
    assert "web_search" in answer.json["error"]["message"]


async def test_tools_of_a_remote_server_are_calls_with_their_results(tmp_path: Path) -> None:
    toolset = [{"type": "mcp_toolset", "mcp_server_name": OWN["server_label"]}]
    beta = {"anthropic-beta": "mcp-client-2025-11-20"}
    turns = (echoing("one", "two"), DONE)
    async with hosting_own(tmp_path, *turns) as (served, _):
        whole = (await ask(served, tools=toolset, headers=beta)).json
        streamed = await ask(served, tools=toolset, headers=beta, stream=True)
        message = joined(events_of(streamed.body))
        answered = {"role": "assistant", "content": message["content"]}
        again = await ask(served, [*HELLO, answered, *HELLO], tools=toolset, headers=beta)
    assert again.status == 200, again.json
    for one in (whole, message):
        uses = [block for block in one["content"] if block["type"] == "mcp_tool_use"]
        results = [block for block in one["content"] if block["type"] == "mcp_tool_result"]
        assert [use["input"] for use in uses] == [{"text": "one"}, {"text": "two"}]
        assert {use["server_name"] for use in uses} == {"own"}
        assert {use["id"] for use in uses} == {result["tool_use_id"] for result in results}
        assert all(not result["is_error"] for result in results)
        assert kinds(one)[-1] == "text"


async def test_deferred_tools_are_found_by_a_search_of_the_server(tmp_path: Path) -> None:
    """The search, what it found and the call of it come back, and the tool can be called without another search."""
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    tools = [{**BASH, "defer_loading": True}, search]
    turns = (
        calling("tool_search", query="runs a command"),
        calling("bash", command="ls"),
        DONE,
    )
    async with scripted(tmp_path, *turns, check_rendering=True) as served:
        message = await both(served, tools=tools)
        use, result, call = message["content"]
        assert (use["name"], result["tool_use_id"]) == ("tool_search_tool_bm25", use["id"])
        names = [one["tool_name"] for one in result["content"]["tool_references"]]
        assert (names, call["name"]) == (["bash"], "bash")
        given = {"type": "tool_result", "tool_use_id": call["id"], "content": "a b"}
        history = [
            *HELLO,
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": [given]},
        ]
        done = await both(served, history, tools=tools)
        assert done["content"][-1]["text"] == "Done."
