"""Every item and every tool of the contract (docs/protocol.md 3 and 4) as a client sends it, each of four ways."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from segue.wire.codec import decode_item
from segue.wire.kinds import answer_of, call_of
from tests.support import WEATHER, ServedProcess, fetch, served_process
from tests.ways import WAYS, ask, made, refused
from tests.wire.test_items import EXAMPLES as ITEMS
from tests.wire.test_tools import EXAMPLES as TOOLS
from tests.wire.test_tools import MCP

# A picture of one pixel.
PIXEL = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489"
        "0000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
    )
).decode()


def is_alone(raw: str) -> bool:
    """Whether an item can stand alone: it neither opens a debt, nor pays one, nor points elsewhere."""
    value = decode_item(raw.encode(), "x").value
    kind = str(value.__struct_config__.tag)
    if kind in ("item_reference", "compaction_trigger", "compaction", "compaction_summary"):
        return False  # They mean something only where they were made.
    if '"file_id"' in raw:
        return False
    call = call_of(value)
    return (call is None or call.is_optional) and answer_of(value) is None


ALONE = [raw for raw in ITEMS if is_alone(raw)]

# A call and its output, as a client that keeps its own history resends them.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "function": (
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ),
    "function with parts": (
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "sunny"}],
        },
    ),
    "function without a call_id": (
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "name": "f", "output": "sunny"},
    ),
    "custom": (
        {"type": "custom_tool_call", "call_id": "c1", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
    ),
    "computer": (
        {"type": "computer_call", "id": "cu_1", "call_id": "c1", "action": {"type": "screenshot"}},
        {
            "type": "computer_call_output",
            "call_id": "c1",
            "output": {"type": "computer_screenshot", "image_url": "data:,"},
        },
    ),
    "shell": (
        {"type": "shell_call", "id": "s", "call_id": "c1", "action": {"commands": ["ls"]}},
        {
            "type": "shell_call_output",
            "call_id": "c1",
            "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
    ),
    "local shell": (
        {
            "type": "local_shell_call",
            "id": "c1",
            "call_id": "c1",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "local_shell_call_output", "id": "c1", "output": "{}"},
    ),
    "apply_patch": (
        {
            "type": "apply_patch_call",
            "call_id": "c1",
            "operation": {"type": "delete_file", "path": "p"},
        },
        {"type": "apply_patch_call_output", "call_id": "c1", "status": "completed"},
    ),
    "tool search": (
        {
            "type": "tool_search_call",
            "id": "t",
            "call_id": "c1",
            "execution": "client",
            "arguments": {},
        },
        {
            "type": "tool_search_output",
            "call_id": "c1",
            "execution": "client",
            "status": "completed",
            "tools": [],
        },
    ),
    "mcp approval": (
        {
            "type": "mcp_approval_request",
            "id": "c1",
            "server_label": "s",
            "name": "n",
            "arguments": "{}",
        },
        {"type": "mcp_approval_response", "approval_request_id": "c1", "approve": True},
    ),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    folder = tmp_path_factory.mktemp("items")
    with served_process("--store", "memory", cwd=folder) as served:
        yield served


@pytest.mark.parametrize("way", WAYS)
async def test_item_of_each_type_is_taken_and_listed(served: ServedProcess, way: str) -> None:
    """Every example that can stand alone, each in a request of its own; none is lost from the list."""
    for raw in ALONE:
        item = json.loads(raw)
        response = await made(served, way, input=[{"role": "user", "content": "Look:"}, item])
        answer = await fetch(served, "GET", f"/v1/responses/{response['id']}/input_items")
        (shown, _) = answer.json["data"]
        assert shown["type"] == item.get("type", "message"), raw
        for key, value in item.items():
            if key not in ("content", "id", "status"):
                assert shown[key] == value, raw


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PAIRS)
async def test_call_and_its_output_are_taken_back(
    served: ServedProcess, way: str, name: str
) -> None:
    """Together they are history; a call without its output, or an output without its call, is refused."""
    call, output = PAIRS[name]
    told = await ask(served, way, input=[{"role": "user", "content": "Go"}, call, output])
    assert told.status == 200, told.error
    assert told.text
    assert (await refused(served, way, input=[call]))[1:] == (
        "missing_function_call_output",
        "input",
    )
    assert (await refused(served, way, input=[output]))[1:] == (
        "invalid_function_call_output",
        "input",
    )


@pytest.mark.parametrize("way", WAYS)
async def test_easy_forms_mean_the_same(served: ServedProcess, way: str) -> None:
    """A string, an untyped message, a typed one, and parts: the model is shown the same."""
    part = {"type": "input_text", "text": "Hello"}
    forms: list[Any] = [
        "Hello",
        [{"content": "Hello", "role": "user"}],
        [{"type": "message", "role": "user", "content": "Hello"}],
        [{"type": None, "role": "user", "content": [part]}],
        [
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "user",
                "content": [part],
            }
        ],
    ]
    told = [await ask(served, way, input=form) for form in forms]
    assert len({one.text for one in told}) == 1
    assert len({one.response["usage"]["input_tokens"] for one in told}) == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer"])
async def test_every_role_is_taken(served: ServedProcess, way: str, role: str) -> None:
    history = [{"role": role, "content": "Hm."}, {"role": "user", "content": "Hello"}]
    await made(served, way, input=history)


@pytest.mark.parametrize("way", WAYS)
async def test_phase_of_an_assistants_message_is_kept(served: ServedProcess, way: str) -> None:
    history = [
        {"role": "assistant", "phase": phase, "content": "Hm."}
        for phase in ("commentary", "final_answer")
    ]
    response = await made(served, way, input=[*history, {"role": "user", "content": "Go on"}])
    path = f"/v1/responses/{response['id']}/input_items?order=asc"
    shown = (await fetch(served, "GET", path)).json["data"]
    assert [item.get("phase") for item in shown] == ["commentary", "final_answer", None]


@pytest.mark.parametrize("way", WAYS)
async def test_picture_and_file_are_taken_by_a_model_without_eyes(
    served: ServedProcess, way: str
) -> None:
    parts = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "auto"},
        {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGk="},
    ]
    await made(served, way, input=[{"role": "user", "content": parts}])


@pytest.mark.parametrize("way", WAYS)
async def test_files_that_were_not_uploaded_are_refused_in_words(
    served: ServedProcess, way: str
) -> None:
    parts = [{"type": "input_file", "file_id": "file_1"}]
    told = await ask(served, way, input=[{"role": "user", "content": parts}])
    assert (told.status, told.error["code"]) == (404, "file_not_found")
    assert "No such File object: file_1" in told.error["message"]


@pytest.mark.parametrize("way", WAYS)
async def test_tool_of_each_type_may_be_listed(served: ServedProcess, way: str) -> None:
    """A tool that nobody here can run is echoed as it came and does no harm; secrets are not echoed."""
    for raw in TOOLS:
        tool = json.loads(raw)
        response = await made(served, way, input="Hello", tools=[tool], tool_choice="none")
        (echo,) = response["tools"]
        assert echo["type"] == tool["type"]
        assert "hush" not in json.dumps(response)
    response = await made(served, way, input="Hello", tools=[json.loads(MCP), WEATHER])
    assert "hush" not in json.dumps(response)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "kind", ["file_search", "web_search", "computer", "image_generation", "code_interpreter", "mcp"]
)
async def test_hosted_tool_that_is_forced_is_refused(
    served: ServedProcess, way: str, kind: str
) -> None:
    choice = {"type": kind, "server_label": "s"} if kind == "mcp" else {"type": kind}
    found = await refused(served, way, input="x", tools=[WEATHER], tool_choice=choice)
    assert found == (400, "unsupported_value", "tool_choice")


@pytest.mark.parametrize("way", WAYS)
async def test_async_call_may_be_answered_in_any_later_request(
    served: ServedProcess, way: str
) -> None:
    call = {"type": "function_call", "call_id": "c9", "name": "f", "arguments": "{}", "async": True}
    first = await made(served, way, input=[{"role": "user", "content": "Start"}, call])
    second = await made(served, way, input="Meanwhile?", previous_response_id=first["id"])
    output = {"type": "function_call_output", "call_id": "c9", "output": "done"}
    third = await made(served, way, input=[output], previous_response_id=second["id"])
    again = await refused(served, way, input=[output], previous_response_id=third["id"])
    assert again[1] == "invalid_function_call_output"


@pytest.mark.parametrize("way", WAYS)
async def test_reference_stands_for_an_item_of_the_history(served: ServedProcess, way: str) -> None:
    """By its id alone, or with its type; one that nobody knows is not found."""
    first = await made(served, way, input="The word is heron.")
    item_id = first["output"][0]["id"]
    for reference in ({"type": "item_reference", "id": item_id}, {"id": item_id}):
        told = await ask(served, way, input=[reference, {"role": "user", "content": "Again?"}])
        assert told.status == 200, told.error
    found = await refused(served, way, input=[{"type": "item_reference", "id": "msg_nobody"}])
    assert found == (404, "item_not_found", "input[0].id")
