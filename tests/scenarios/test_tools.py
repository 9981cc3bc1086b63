"""Tools in every shape, told with real sockets: over JSON, SSE and WebSocket the client gets the same calls.

Every kind of call is played by the scripted engine, its events are checked against the contract and against the types
of the official client, and the next turn goes on from its output.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.clients.outside import misfits
from tests.events import check_turn
from tests.support import MODEL, WEATHER, Served, fetch, metric, serving, wire

Body = dict[str, Any]
Ask = Callable[[Body], Any]

PATCH = {"type": "update_file", "path": "a.py", "diff": '@@\n-x\n+"y"\n'}
CRM = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [
        {"type": "function", "name": "find", "description": "Finds.", "defer_loading": True},
        {"type": "custom", "name": "note", "async": True},
    ],
}


@asynccontextmanager
async def scripted(folder: Path, *turns: Body, **flags: object) -> AsyncIterator[Served]:
    """A server whose model says these turns."""
    script = folder / "script.json"
    script.write_text(json.dumps({"turns": turns}, ensure_ascii=False))
    async with serving(script=str(script), **flags) as served:
        yield served


def calling(name: str, /, **arguments: Any) -> Body:
    return {"calls": [{"name": name, "arguments": arguments}]}


@asynccontextmanager
async def asking(served: Served, way: str) -> AsyncIterator[Ask]:
    """One way to ask for a turn; its events, checked, or for plain JSON only the response."""

    async def by_json(body: Body) -> list[Body]:
        answer = await fetch(served, "POST", "/v1/responses", {"model": MODEL, **body})
        assert answer.status == 200, answer.body
        return [answer.json]

    async def by_sse(body: Body) -> list[Body]:
        body = {"model": MODEL, "stream": True, **body}
        answer = await fetch(served, "POST", "/v1/responses", body)
        check_turn(answer.events)
        return answer.events

    if way != "websocket":
        yield by_json if way == "json" else by_sse
        return
    async with wire(served) as socket:

        async def by_socket(body: Body) -> list[Body]:
            await socket.create(**body)
            events = await socket.events()
            check_turn(events)
            return events

        yield by_socket


def response_of(told: list[Body]) -> Body:
    found: Body = told[-1].get("response", told[-1])
    return found


WAYS = ["json", "sse", "websocket"]
ways = pytest.mark.parametrize("way", WAYS)

# How each tool is listed, what the model writes, what the client gets and what it answers.
SHAPES: dict[str, tuple[Body, Body, Body, Body]] = {
    "shell": (
        {"type": "shell"},
        calling("shell", commands=["ls -l", 'echo "ü"'], timeout_ms=900),
        {
            "type": "shell_call",
            "action": {
                "commands": ["ls -l", 'echo "ü"'],
                "timeout_ms": 900,
                "max_output_length": None,
            },
            "environment": {"type": "local"},
        },
        {
            "type": "shell_call_output",
            "output": [
                {"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
            ],
        },
    ),
    "local_shell": (
        {"type": "local_shell"},
        calling("local_shell", command=["ls", "-l"], env={"A": "b"}),
        {
            "type": "local_shell_call",
            "action": {
                "type": "exec",
                "command": ["ls", "-l"],
                "env": {"A": "b"},
                "timeout_ms": None,
                "user": None,
                "working_directory": None,
            },
        },
        {"type": "local_shell_call_output", "output": "a.py"},
    ),
    "apply_patch": (
        {"type": "apply_patch"},
        calling("apply_patch", **PATCH),
        {"type": "apply_patch_call", "operation": PATCH},
        {"type": "apply_patch_call_output", "status": "completed", "output": "Done."},
    ),
    "namespace": (
        CRM,
        calling("crm.find", name="Ada"),
        {
            "type": "function_call",
            "name": "find",
            "namespace": "crm",
            "arguments": '{"name": "Ada"}',
        },
        {"type": "function_call_output", "output": "42"},
    ),
    "custom": (
        {"type": "custom", "name": "exec", "format": {"type": "text"}},
        {"calls": [{"name": "exec", "input": 'const a = "b";\n'}]},
        {"type": "custom_tool_call", "name": "exec", "input": 'const a = "b";\n'},
        {"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "ok"}]},
    ),
    "tool_search": (
        {"type": "tool_search", "execution": "client", "description": "Finds tools."},
        calling("tool_search", query="weather"),
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "weather"}},
        {"type": "tool_search_output", "execution": "client", "tools": [WEATHER]},
    ),
}


def answer_to(call: Body, answer: Body) -> Body:
    if answer["type"] == "local_shell_call_output":
        return {**answer, "id": call["call_id"]}
    return {**answer, "call_id": call["call_id"]}


async def run_tool(shape: str, way: str, folder: Path) -> list[Body]:
    """A turn with a call, a turn with its output, and all of it sent again by a client that keeps its own history."""
    tool, turn, wanted, answer = SHAPES[shape]
    async with (
        scripted(folder, turn, {"text": "Thanks."}, check_rendering=True) as served,
        asking(served, way) as ask,
    ):
        told = await ask({"input": "Go", "tools": [tool]})
        first = response_of(told)
        (call,) = first["output"]
        assert {key: call[key] for key in wanted} == wanted
        assert call["call_id"].startswith("call_")
        assert call["status"] == first["status"] == "completed"
        output = answer_to(call, answer)
        after = await ask({"input": [output], "tools": [tool], "previous_response_id": first["id"]})
        chained = response_of(after)
        assert chained["output"][0]["content"][0]["text"] == "Thanks."
        history = [{"role": "user", "content": "Go"}, call, output]
        resent = await ask({"input": history, "tools": [tool], "store": False})
        assert response_of(resent)["usage"]["input_tokens"] == chained["usage"]["input_tokens"]
    return [*told, *after, *resent]


@pytest.mark.parametrize("way", ["json", "websocket"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_client_runs_a_tool_of_each_shape(shape: str, way: str, tmp_path: Path) -> None:
    await run_tool(shape, way, tmp_path)


async def test_calls_of_each_shape_fit_the_types_of_the_official_client(tmp_path: Path) -> None:
    """Also where a call was forced, and where it was cut off."""
    told: list[Body] = []
    for shape in SHAPES:
        told += await run_tool(shape, "sse", tmp_path)
    for shape in ("shell", "apply_patch"):
        told += await force(shape, "sse")
    told += await cut_off(tmp_path)
    assert misfits(told) == []


async def force(shape: str, way: str) -> list[Body]:
    body = {"input": "Go", "tools": [WEATHER, {"type": shape}], "tool_choice": {"type": shape}}
    async with serving() as served, asking(served, way) as ask:
        told: list[Body] = await ask(body)
    return told


@ways
@pytest.mark.parametrize("shape", ["shell", "apply_patch"])
async def test_client_forces_a_builtin(shape: str, way: str) -> None:
    (call,) = response_of(await force(shape, way))["output"]
    assert call["type"] == f"{shape}_call"


LONG = "echo " + "word " * 100


async def cut_off(folder: Path) -> list[Body]:
    async with (
        scripted(folder, calling("shell", commands=["ls", LONG])) as served,
        asking(served, "sse") as ask,
    ):
        told: list[Body] = await ask(
            {"input": "Go", "tools": [{"type": "shell"}], "max_output_tokens": 60}
        )
    return told


async def test_call_that_is_cut_off_has_what_was_written_of_it(tmp_path: Path) -> None:
    (call,) = response_of(await cut_off(tmp_path))["output"]
    assert call["status"] == "incomplete"
    assert call["action"]["commands"][0] == "ls"
    assert LONG.startswith(call["action"]["commands"][1])


@ways
async def test_output_of_an_async_call_comes_turns_later(way: str, tmp_path: Path) -> None:
    turns = [
        {"calls": [{"name": "crm.note", "input": "a"}]},
        {"text": "Meanwhile."},
        {"text": "Still."},
        {"text": "Noted."},
    ]
    async with scripted(tmp_path, *turns) as served, asking(served, way) as ask:
        told = response_of(await ask({"input": "Note", "tools": [CRM]}))
        (call,) = told["output"]
        assert call["async"] is True
        assert (call["namespace"], call["name"]) == ("crm", "note")
        for text in ("And?", "And now?"):
            told = response_of(
                await ask({"input": text, "tools": [CRM], "previous_response_id": told["id"]})
            )
        output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
        body = {"input": [output], "tools": [CRM], "previous_response_id": told["id"]}
        last = response_of(await ask(body))
        assert last["output"][0]["content"][0]["text"] == "Noted."
        # It was answered; a second answer has no call.
        again = {"model": MODEL, **body, "previous_response_id": last["id"]}
        refused = await fetch(served, "POST", "/v1/responses", again)
        assert refused.json["error"]["code"] == "invalid_function_call_output"


ADDED = {
    "type": "additional_tools",
    "role": "developer",
    "tools": [
        {
            "type": "namespace",
            "name": "functions",
            "tools": [{"type": "custom", "name": "exec"}, {"type": "function", "name": "wait"}],
        },
        {"type": "shell"},
    ],
}


@ways
async def test_client_brings_its_tools_as_an_item(way: str, tmp_path: Path) -> None:
    """As Codex does: no top-level tools, in no turn of the chain."""
    turns = [
        {"calls": [{"name": "functions.exec", "input": "ls"}]},
        calling("shell", commands=["ls"]),
        {"text": "Done."},
    ]
    async with (
        scripted(tmp_path, *turns, check_rendering=True) as served,
        asking(served, way) as ask,
    ):
        first = response_of(await ask({"input": [ADDED, {"role": "user", "content": "Go"}]}))
        (call,) = first["output"]
        assert (call["type"], call["namespace"]) == ("custom_tool_call", "functions")
        output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
        body = {"input": [output], "previous_response_id": first["id"], "tool_choice": "required"}
        second = response_of(await ask(body))
        assert second["output"][0]["type"] == "shell_call"
        assert second["tools"] == []
        assert await metric(served, "segue_tool_decodes_total") == 1


async def test_tool_of_an_item_is_forced_by_name() -> None:
    given = [ADDED, {"role": "user", "content": "Go"}]
    async with serving() as served, asking(served, "json") as ask:
        for choice, kind in (
            ({"type": "function", "name": "wait"}, "function_call"),
            ({"type": "custom", "name": "exec"}, "custom_tool_call"),
            ({"type": "shell"}, "shell_call"),
        ):
            told = response_of(await ask({"input": given, "tool_choice": choice}))
            assert told["output"][0]["type"] == kind
            after = {"input": "Go on", "previous_response_id": told["id"], "tool_choice": choice}
            refused = await fetch(served, "POST", "/v1/responses", {"model": MODEL, **after})
            # Only what it owes is missing: the tool is known along the chain.
            assert refused.json["error"]["code"] == "missing_function_call_output"
        unknown = {"input": given, "tool_choice": {"type": "function", "name": "nobody"}}
        refused = await fetch(served, "POST", "/v1/responses", {"model": MODEL, **unknown})
        assert (refused.status, refused.json["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("way", ["json", "websocket"])
async def test_call_that_a_limit_cut_off_is_not_owed(tmp_path: Path, way: str) -> None:
    long = calling("get_weather", city="word " * 50)
    async with scripted(tmp_path, long) as served, asking(served, way) as ask:
        cut = response_of(await ask({"input": "Go", "tools": [WEATHER], "max_output_tokens": 40}))
        (call,) = cut["output"]
        assert (cut["status"], call["type"], call["status"]) == (
            "incomplete",
            "function_call",
            "incomplete",
        )
        after = {"input": "Go on", "previous_response_id": cut["id"], "max_output_tokens": 1}
        assert response_of(await ask(after))["status"] == "incomplete"
        # Whoever has run it all the same may say what came of it.
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
        assert response_of(await ask(after | {"input": [output]}))["status"] == "incomplete"
        # The same as a whole history.
        resent = [{"role": "user", "content": "Go"}, call, {"role": "user", "content": "Go on"}]
        assert response_of(await ask({"input": resent, "max_output_tokens": 1}))


async def test_tools_of_items_are_known_after_a_restart(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'turns.db'}"
    turns = [{"text": "Hello."}, calling("functions.wait")]
    async with scripted(tmp_path, *turns, store=store) as served, asking(served, "json") as ask:
        first = response_of(await ask({"input": [ADDED, {"role": "user", "content": "Hi"}]}))
    async with scripted(tmp_path, *turns, store=store) as served, asking(served, "json") as ask:
        told = response_of(await ask({"input": "Go", "previous_response_id": first["id"]}))
    assert (told["output"][0]["namespace"], told["output"][0]["name"]) == ("functions", "wait")


SCHEMA = {"type": "object", "properties": {"city": {"const": "Oslo"}}, "required": ["city"]}
FORMAT = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}}


@ways
async def test_settings_of_an_item_hold_along_the_chain_until_the_next(way: str) -> None:
    def update(**fields: Any) -> list[Body]:
        return [{"type": "configuration_update", **fields}, {"role": "user", "content": "Go"}]

    async with serving() as served, asking(served, way) as ask:
        told = response_of(await ask({"input": update(text=FORMAT, reasoning={"effort": "high"})}))
        for given in ("And now?", update(reasoning={"effort": "low"})):
            assert json.loads(told["output"][0]["content"][0]["text"]) == {"city": "Oslo"}
            assert told["text"]["format"]["name"] == "city"
            assert told["reasoning"]["effort"] == "high"
            told = response_of(await ask({"input": given, "previous_response_id": told["id"]}))
        assert told["reasoning"]["effort"] == "low"
        assert told["text"]["format"]["name"] == "city"
        plain = update(text={"format": {"type": "text"}})
        told = response_of(await ask({"input": plain, "previous_response_id": told["id"]}))
        assert told["output"][0]["content"][0]["text"].startswith("I play a script")
        assert told["text"]["format"] == {"type": "text"}


PAY = {
    "type": "function",
    "name": "pay",
    "description": "Pays a bill.",
    "parameters": {"type": "object", "properties": {"amount": {"type": "integer"}}},
    "defer_loading": True,
}
SEARCHABLE = [PAY, CRM, {"type": "tool_search"}]
FIND = calling("tool_search", query="pay a bill")


@ways
async def test_server_searches_and_the_model_goes_on_in_the_same_response(
    way: str, tmp_path: Path
) -> None:
    turns = [FIND, calling("pay", amount=7), {"text": "Paid."}]
    async with (
        scripted(tmp_path, *turns, check_rendering=True) as served,
        asking(served, way) as ask,
    ):
        told = await ask({"input": "Pay my bill", "tools": SEARCHABLE})
        first = response_of(told)
        search, found, call = first["output"]
        assert (search["type"], search["execution"]) == ("tool_search_call", "server")
        assert (search["call_id"], search["arguments"]) == (None, {"query": "pay a bill"})
        assert (found["type"], found["call_id"]) == ("tool_search_output", None)
        assert found["tools"] == [{**PAY, "strict": None}]
        assert (call["type"], call["name"]) == ("function_call", "pay")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
        follow = {"input": [output], "tools": SEARCHABLE, "previous_response_id": first["id"]}
        last = response_of(await ask(follow))
        assert last["output"][0]["content"][0]["text"] == "Paid."
        # What we have answered ourselves is output, and nothing that the client sent.
        path = f"/v1/responses/{first['id']}/input_items"
        listed = (await fetch(served, "GET", path)).json
        assert [one["type"] for one in listed["data"]] == ["message"]
        # A client that keeps its own history sends all of it back, and the model reads the same.
        history = [{"role": "user", "content": "Pay my bill"}, *first["output"], output]
        resent = response_of(await ask({"input": history, "tools": SEARCHABLE, "store": False}))
        assert resent["usage"]["input_tokens"] == last["usage"]["input_tokens"]
        assert resent["output"][0]["content"][0]["text"] == "Paid."
    if way == "sse":
        assert misfits(told) == []


async def test_search_beside_a_call_leaves_both_answered(tmp_path: Path) -> None:
    """The call is the client's to answer, so the response ends; what was found is there for the next one."""
    both = {"calls": [*FIND["calls"], {"name": "crm.note", "input": "x"}]}
    crm = {**CRM, "tools": [CRM["tools"][0], {"type": "custom", "name": "note"}]}
    tools = [PAY, crm, {"type": "tool_search"}]
    turns = [both, calling("pay", amount=7)]
    async with (
        scripted(tmp_path, *turns, check_rendering=True) as served,
        asking(served, "websocket") as ask,
    ):
        first = response_of(await ask({"input": "Pay and note", "tools": tools}))
        kinds = [one["type"] for one in first["output"]]
        assert kinds == ["tool_search_call", "custom_tool_call", "tool_search_output"]
        call_id = first["output"][1]["call_id"]
        output = {"type": "custom_tool_call_output", "call_id": call_id, "output": "ok"}
        body = {"input": [output], "tools": tools, "previous_response_id": first["id"]}
        second = response_of(await ask(body))
        assert second["output"][0]["name"] == "pay"


async def test_rollout_waits_for_the_client_and_never_for_our_own_search(tmp_path: Path) -> None:
    both = {"calls": [*FIND["calls"], *calling("shell", commands=["ls"])["calls"]]}
    turns = [FIND, both, calling("pay", amount=7), {"text": "Paid."}]
    tools = [*SEARCHABLE, {"type": "shell"}]
    kinds = ["shell_call_output", "function_call_output"]
    told: list[Body] = []
    async with (
        scripted(tmp_path, *turns, check_rendering=True) as served,
        wire(served) as socket,
    ):
        await socket.create(input="Pay", tools=tools, rollout=True)
        while not told or told[-1]["type"] != "response.completed":
            told.append(await socket.next())
            if told[-1]["type"] != "response.done":
                continue
            (owed,) = told[-1]["required_input"]
            assert owed["type"] == kinds.pop(0)
            answer = SHAPES["shell" if owed["type"] == "shell_call_output" else "namespace"][3]
            output = {**answer, "call_id": owed["call_id"]}
            response_id = told[-1]["response_id"]
            await socket.send(
                {"type": "response.append", "response_id": response_id, "input": [output]}
            )
    assert [one["type"] for one in check_turn(told)["output"]] == [
        "tool_search_call",
        "tool_search_output",
        "tool_search_call",
        "shell_call",
        "tool_search_output",
        "function_call",
        "message",
    ]


async def test_what_was_found_belongs_to_the_conversation(tmp_path: Path) -> None:
    turns = [FIND, {"text": "Found."}, calling("pay", amount=7)]
    async with scripted(tmp_path, *turns) as served, asking(served, "json") as ask:
        name = (await fetch(served, "POST", "/v1/conversations", {})).json["id"]
        await ask({"input": "Look", "tools": SEARCHABLE, "conversation": name})
        listed = await fetch(served, "GET", f"/v1/conversations/{name}/items?order=asc")
        assert [one["type"] for one in listed.json["data"]] == [
            "message",
            "tool_search_call",
            "tool_search_output",
            "message",
        ]
        told = response_of(await ask({"input": "Pay", "conversation": name}))
        assert told["output"][0]["name"] == "pay"


async def test_model_that_searches_in_circles_comes_to_an_end(tmp_path: Path) -> None:
    async with scripted(tmp_path, FIND) as served, asking(served, "sse") as ask:
        told = response_of(await ask({"input": "Pay", "tools": SEARCHABLE}))
        found = [one["tools"] for one in told["output"] if one["type"] == "tool_search_output"]
        assert told["status"] == "completed"
        assert len(found) == 16
        limited = response_of(await ask({"input": "Pay", "tools": SEARCHABLE, "max_tool_calls": 1}))
        found = [one["tools"] for one in limited["output"] if one["type"] == "tool_search_output"]
        assert [bool(tools) for tools in found] == [True, *[False] * 9]


async def test_search_that_is_cut_off_is_not_made(tmp_path: Path) -> None:
    long = calling("tool_search", query="word " * 100)
    async with scripted(tmp_path, long) as served, asking(served, "sse") as ask:
        told = await ask({"input": "Pay", "tools": SEARCHABLE, "max_output_tokens": 40})
    (search,) = response_of(told)["output"]
    assert (search["type"], search["status"]) == ("tool_search_call", "incomplete")


async def test_what_was_found_is_known_after_a_restart(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'turns.db'}"
    turns = [FIND, {"text": "Found."}, calling("crm.find")]
    crm = {**CRM, "tools": CRM["tools"][:1]}
    tools = [crm, {"type": "tool_search"}]
    ask_for = calling("tool_search", query="crm")
    async with (
        scripted(tmp_path, ask_for, *turns[1:], store=store) as served,
        asking(served, "json") as ask,
    ):
        first = response_of(await ask({"input": "Look", "tools": tools}))
        assert first["output"][1]["tools"][0]["name"] == "crm"
    async with (
        scripted(tmp_path, ask_for, *turns[1:], store=store) as served,
        asking(served, "json") as ask,
    ):
        again = await fetch(served, "GET", f"/v1/responses/{first['id']}")
        assert again.json["output"] == first["output"]
        # The search itself is not offered any more: what it found still is.
        told = response_of(await ask({"input": "Go", "previous_response_id": first["id"]}))
        (call,) = told["output"]
        assert (call["namespace"], call["name"]) == ("crm", "find")


async def test_forced_search_is_over_after_its_first_time() -> None:
    body = {"input": "Go", "tools": SEARCHABLE, "tool_choice": {"type": "tool_search"}}
    async with serving() as served, asking(served, "json") as ask:
        told = response_of(await ask(body))
    kinds = [one["type"] for one in told["output"]]
    assert kinds == ["tool_search_call", "tool_search_output", "message"]


MCP = {
    "type": "mcp",
    "server_label": "x",
    "server_url": "https://example.com",
    "headers": {"X-Key": "hush"},
    "authorization": "hush",
}
HOSTED = [
    {"type": "web_search"},
    {"type": "file_search", "vector_store_ids": ["vs_1"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "computer"},
    {"type": "programmatic_tool_calling"},
    {"type": "shell", "environment": {"type": "container_auto"}},
]


@ways
async def test_hosted_tools_beside_others_are_taken_and_not_offered(way: str) -> None:
    async with serving() as served, asking(served, way) as ask:
        tools = [*HOSTED, WEATHER]
        told = response_of(await ask({"input": "Hello", "tools": tools, "tool_choice": "none"}))
        assert [one["type"] for one in told["output"]] == ["message"]
        assert [one["type"] for one in told["tools"]] == [one["type"] for one in tools]
        bare = response_of(await ask({"input": "Hello", "tools": [WEATHER], "tool_choice": "none"}))
        assert told["usage"]["input_tokens"] == bare["usage"]["input_tokens"]


@pytest.mark.parametrize(
    "choice",
    [
        *({"type": tool["type"]} for tool in HOSTED),
        {"type": "mcp", "server_label": "x"},
        {"type": "web_search_preview"},
        {"type": "computer_use_preview"},
        "required",
    ],
)
async def test_forcing_a_hosted_tool_is_refused(choice: Any) -> None:
    body = {"model": MODEL, "input": "Hello", "tools": HOSTED, "tool_choice": choice}
    async with serving() as served, wire(served) as socket:
        plain = await fetch(served, "POST", "/v1/responses", body)
        await socket.send({"type": "response.create", **body})
        event = await socket.next()
    assert (plain.status, plain.json["error"]["code"]) == (400, "unsupported_value")
    assert plain.json["error"]["param"] == "tool_choice"
    assert event["error"] == plain.json["error"]


async def test_secrets_are_neither_echoed_nor_kept(tmp_path: Path) -> None:
    """Not in a response, not in a list of items, not in the database."""
    path = tmp_path / "turns.db"
    given = [
        {"type": "additional_tools", "tools": [MCP, WEATHER]},
        {"role": "user", "content": "x"},
    ]
    async with serving(store=f"sqlite:///{path}") as served, asking(served, "sse") as ask:
        told = await ask({"input": given})
        answer = response_of(told)
        listed = await fetch(served, "GET", f"/v1/responses/{answer['id']}/input_items")
    assert answer["output"][0]["name"] == "get_weather"
    assert listed.json["data"][-1]["tools"][0]["server_label"] == "x"
    assert "hush" not in json.dumps(told) + listed.body.decode()
    assert b"hush" not in stored_bytes(tmp_path)


def stored_bytes(folder: Path) -> bytes:
    """Everything that a database has written."""
    files = list(folder.glob("turns.db*"))
    assert files
    return b"".join(file.read_bytes() for file in files)


HISTORY = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "rain"}},
    {"type": "file_search_call", "id": "fs_1", "queries": ["rain"], "status": "completed"},
    {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "container_id": "c", "status": "completed"},
    {"type": "mcp_call", "id": "mcp_1", "server_label": "x", "name": "n", "arguments": "{}", "output": "o"},
    {"type": "program", "id": "p_1", "call_id": "c9", "code": "1"},
]  # fmt: skip


async def test_items_of_hosted_tools_in_a_history_are_read_by_the_model() -> None:
    async with serving() as served, asking(served, "json") as ask:
        user = {"role": "user", "content": "Hello"}
        before = response_of(await ask({"input": [user]}))["usage"]["input_tokens"]
        for item in HISTORY:
            told = response_of(await ask({"input": [item, user]}))
            assert told["status"] == "completed"
            assert told["usage"]["input_tokens"] > before + 5


BAD = [
    ({"type": "shell_call", "call_id": "c", "action": {"commands": "ls"}}, "input[0].action.commands"),
    ({"type": "apply_patch_call", "call_id": "c", "operation": {"type": "move"}}, "input[0].operation.type"),
    ({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x"}]}, "input[0].output[0]"),
    ({"type": "additional_tools", "tools": [{"type": "odd"}]}, "input[0].tools[0].type"),
    ({"type": "additional_tools", "tools": [{"type": "function", "name": "f", "parameters": 7}]},
     "input[0].tools[0].parameters"),
    ({"type": "configuration_update", "reasoning": {"effort": "huge"}}, "input[0].reasoning.effort"),
    ({"type": "configuration_update", "text": {"format": {"type": "json_schema"}}}, "input[0].text.format.schema"),
]  # fmt: skip


@pytest.mark.parametrize("item, param", BAD)
async def test_item_of_a_wrong_shape_is_refused_by_its_place(item: Body, param: str) -> None:
    async with serving() as served:
        answer = await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": [item]})
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
