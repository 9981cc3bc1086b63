"""What must hold for the events of any turn, on any transport (docs/protocol.md 2.1, 5.1, 5.2).

`check_turn` takes the events of one turn and gives back the terminal response, or fails with the rule that was broken.
`told_alike` gives a turn's events without what differs from run to run, so that two transports can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]

TERMINAL_STATUS = {
    "response.completed": {"completed"},
    "response.failed": {"failed"},
    "response.incomplete": {"incomplete", "cancelled"},
}
STATUSES = {"queued", "in_progress", "completed", "failed", "incomplete", "cancelled"}

NULL = type(None)
NUMBER = (int, float)

# Every field that a response object must have on every snapshot, with its types (docs/protocol.md 2.1).
RESPONSE_FIELDS: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "object": (str,),
    "created_at": (int,),
    "completed_at": (int, NULL),
    "status": (str,),
    "incomplete_details": (dict, NULL),
    "model": (str,),
    "previous_response_id": (str, NULL),
    "instructions": (str, NULL),
    "output": (list,),
    "error": (dict, NULL),
    "tools": (list,),
    "tool_choice": (str, dict),
    "truncation": (str,),
    "parallel_tool_calls": (bool,),
    "text": (dict,),
    "top_p": NUMBER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "top_logprobs": (int,),
    "temperature": NUMBER,
    "reasoning": (dict, NULL),
    "user": (str, NULL),
    "usage": (dict, NULL),
    "max_output_tokens": (int, NULL),
    "max_tool_calls": (int, NULL),
    "store": (bool,),
    "background": (bool,),
    "service_tier": (str,),
    "metadata": (dict,),
    "safety_identifier": (str, NULL),
    "prompt_cache_key": (str, NULL),
}

LIFECYCLE = {"response": (dict,)}
PLACE = {"item_id": (str,), "output_index": (int,)}
CONTENT = {**PLACE, "content_index": (int,)}
SUMMARY = {**PLACE, "summary_index": (int,)}
COMMAND = {"output_index": (int,), "command_index": (int,)}
LOGPROBS = {"logprobs": (list,)}

# The fields of each event that our server sends, beside `type` and `sequence_number` (docs/protocol.md 5.1).
EVENT_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "response.created": LIFECYCLE,
    "response.queued": LIFECYCLE,
    "response.in_progress": LIFECYCLE,
    "response.completed": LIFECYCLE,
    "response.failed": LIFECYCLE,
    "response.incomplete": LIFECYCLE,
    "response.output_item.added": {"output_index": (int,), "item": (dict,)},
    "response.output_item.done": {"output_index": (int,), "item": (dict,)},
    "response.content_part.added": {**CONTENT, "part": (dict,)},
    "response.content_part.done": {**CONTENT, "part": (dict,)},
    "response.output_text.delta": {**CONTENT, **LOGPROBS, "delta": (str,)},
    "response.output_text.done": {**CONTENT, **LOGPROBS, "text": (str,)},
    "response.reasoning_text.delta": {**CONTENT, "delta": (str,)},
    "response.reasoning_text.done": {**CONTENT, "text": (str,)},
    "response.reasoning_summary_part.added": {**SUMMARY, "part": (dict,)},
    "response.reasoning_summary_part.done": {**SUMMARY, "part": (dict,)},
    "response.reasoning_summary_text.delta": {**SUMMARY, "delta": (str,)},
    "response.reasoning_summary_text.done": {**SUMMARY, "text": (str,)},
    "response.function_call_arguments.delta": {**PLACE, "delta": (str,)},
    "response.function_call_arguments.done": {**PLACE, "arguments": (str,)},
    "response.shell_call_command.added": {**COMMAND, "command": (str,)},
    "response.shell_call_command.delta": {**COMMAND, "delta": (str,)},
    "response.shell_call_command.done": {**COMMAND, "command": (str,)},
    "response.shell_call_output_content.delta": {**PLACE, **COMMAND, "delta": (dict,)},
    "response.shell_call_output_content.done": {**PLACE, **COMMAND, "output": (list,)},
    "response.custom_tool_call_input.delta": {**PLACE, "delta": (str,)},
    "response.custom_tool_call_input.done": {**PLACE, "input": (str,)},
    "response.compaction.compacting": PLACE,
    "response.output_text.annotation.added": {
        **CONTENT,
        "annotation_index": (int,),
        "annotation": (dict,),
    },
    "response.web_search_call.in_progress": PLACE,
    "response.web_search_call.searching": PLACE,
    "response.web_search_call.completed": PLACE,
    "response.mcp_list_tools.in_progress": PLACE,
    "response.mcp_list_tools.completed": PLACE,
    "response.mcp_list_tools.failed": PLACE,
    "response.mcp_call.in_progress": PLACE,
    "response.code_interpreter_call.in_progress": PLACE,
    "response.code_interpreter_call_code.delta": {**PLACE, "delta": (str,)},
    "response.code_interpreter_call_code.done": {**PLACE, "code": (str,)},
    "response.code_interpreter_call.interpreting": PLACE,
    "response.code_interpreter_call.completed": PLACE,
    "response.mcp_call_arguments.delta": {**PLACE, "delta": (str,)},
    "response.mcp_call_arguments.done": {**PLACE, "arguments": (str,)},
    "response.mcp_call.completed": PLACE,
    "response.mcp_call.failed": PLACE,
    "response.steer.accepted": {"steer": (dict,)},
    "response.steer.pending": {"steer": (dict,), "reason": (str,), "required_input": (list,)},
    "response.steer.failed": {"steer": (dict,), "error": (dict,)},
    "response.done": {"response_id": (str,), "required_input": (list,)},
}

# What an output item must have when it is added and when it is done (docs/protocol.md 3).
ITEM_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "message": {"id": (str,), "status": (str,), "role": (str,), "content": (list,)},
    "reasoning": {"id": (str,), "summary": (list,)},
    "function_call": {
        "id": (str,),
        "status": (str,),
        "call_id": (str,),
        "name": (str,),
        "arguments": (str,),
    },
    "custom_tool_call": {
        "id": (str,),
        "status": (str,),
        "call_id": (str,),
        "name": (str,),
        "input": (str,),
    },
    "compaction": {"id": (str,), "encrypted_content": (str,)},
    "shell_call": {
        "id": (str,),
        "status": (str,),
        "call_id": (str,),
        "action": (dict,),
        "environment": (dict,),
    },
    "shell_call_output": {"id": (str,), "status": (str,), "call_id": (str,), "output": (list,)},
    "local_shell_call": {"id": (str,), "status": (str,), "call_id": (str,), "action": (dict,)},
    "apply_patch_call": {"id": (str,), "status": (str,), "call_id": (str,), "operation": (dict,)},
    "tool_search_call": {
        "id": (str,),
        "status": (str,),
        "call_id": (str, NULL),
        "execution": (str,),
    },
    "tool_search_output": {
        "id": (str,),
        "status": (str,),
        "call_id": (str, NULL),
        "execution": (str,),
        "tools": (list,),
    },
}
REMOTE = {"id": (str,), "server_label": (str,)}
ITEM_FIELDS |= {
    "mcp_list_tools": {**REMOTE, "tools": (list,)},
    "mcp_call": {**REMOTE, "name": (str,), "arguments": (str,), "status": (str,)},
    "mcp_approval_request": {**REMOTE, "name": (str,), "arguments": (str,)},
    "web_search_call": {"id": (str,), "status": (str,), "action": (dict,)},
    "code_interpreter_call": {
        "id": (str,),
        "status": (str,),
        "code": (str,),
        "container_id": (str,),
        "outputs": (list, NULL),
    },
}
# Items that our own tools work on: others may begin before they are done.
HOSTED = {
    "mcp_list_tools", "mcp_call", "web_search_call", "shell_call_output", "code_interpreter_call",
}  # fmt: skip
# Only a search that we run ourselves has no call_id, and says so; code has outputs for those who ask.
NULLABLE = {"tool_search_call", "tool_search_output", "code_interpreter_call"}
PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "compaction": "cmp_",
    "shell_call": "sh_",
    "shell_call_output": "sho_",
    "local_shell_call": "lsh_",
    "apply_patch_call": "apc_",
    "tool_search_call": "tsc_",
    "tool_search_output": "tso_",
    "mcp_list_tools": "mcpl_",
    "mcp_call": "mcp_",
    "mcp_approval_request": "mcpr_",
    "web_search_call": "ws_",
    "code_interpreter_call": "ci_",
}

# The kinds of text that are streamed: what ends them, and the key of the whole text there.
STREAMED = {
    "response.output_text.delta": ("response.output_text.done", "text"),
    "response.reasoning_text.delta": ("response.reasoning_text.done", "text"),
    "response.reasoning_summary_text.delta": ("response.reasoning_summary_text.done", "text"),
    "response.function_call_arguments.delta": (
        "response.function_call_arguments.done",
        "arguments",
    ),
    "response.custom_tool_call_input.delta": ("response.custom_tool_call_input.done", "input"),
    "response.shell_call_command.delta": ("response.shell_call_command.done", "command"),
    "response.code_interpreter_call_code.delta": (
        "response.code_interpreter_call_code.done",
        "code",
    ),
    "response.mcp_call_arguments.delta": ("response.mcp_call_arguments.done", "arguments"),
}
DONE_OF = dict(STREAMED.values())
# What is never the same twice.
OWN = {"created_at": "a time", "completed_at": "a time", "encrypted_content": "sealed"}


def check_turn(events: Sequence[Event], lane: str | None = None) -> dict[str, Any]:
    """All rules for one turn that was accepted; its terminal response."""
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(events))), f"numbers are not 0..n: {numbers}"
    assert events[0]["type"] == "response.created", events[0]["type"]
    progress = next(e for e in events[1:] if e["type"] != "response.queued")
    assert progress["type"] == "response.in_progress", progress["type"]
    ends = [index for index, event in enumerate(events) if event["type"] in TERMINAL_STATUS]
    assert ends == [len(events) - 1], f"terminal events at {ends} of {len(events)}"
    response_id = events[0]["response"]["id"]
    for event in events:
        check_event(event, lane)
        if "response" in event:
            assert event["response"]["id"] == response_id, "the response id changed"
    assert events[0]["response"]["output"] == []
    last = events[-1]
    response: dict[str, Any] = last["response"]
    assert response["status"] in TERMINAL_STATUS[last["type"]], response["status"]
    _check_items(events, response)
    return response


def check_event(event: Event, lane: str | None = None) -> None:
    """One event has its fields, in their types, and the name of its lane if it has one."""
    kind = event["type"]
    assert kind in EVENT_FIELDS, f"unknown event {kind}"
    assert type(event["sequence_number"]) is int
    assert event.get("stream_id") == lane, f"{kind} is on lane {event.get('stream_id')}"
    _check_fields(event, EVENT_FIELDS[kind], kind)
    if "response" in event:
        check_response(event["response"])


def check_response(response: Mapping[str, Any]) -> None:
    """A response object is complete, its numbers are numbers, and its parts fit its status."""
    _check_fields(response, RESPONSE_FIELDS, "response")
    assert response["object"] == "response"
    assert response["id"].startswith("resp_")
    status = response["status"]
    assert status in STATUSES, status
    assert "format" in response["text"]
    assert (response["error"] is not None) == (status == "failed")
    assert (response["completed_at"] is not None) == (status == "completed")
    if status == "incomplete":
        assert response["incomplete_details"]["reason"]
    if response["error"] is not None:
        _check_fields(response["error"], {"code": (str,), "message": (str,)}, "error")
    for tool in response["tools"]:
        if tool["type"] == "function":
            assert {"name", "description", "parameters", "strict"} <= tool.keys(), tool
    for item in response["output"]:
        check_item(item)
    if status in ("completed", "incomplete"):
        assert response["usage"] is not None
    if response["usage"] is not None:
        check_usage(response["usage"])


def check_usage(usage: Mapping[str, Any]) -> None:
    """Whole numbers, details included, that add up: Codex cannot read anything else."""
    numbers = {
        "input_tokens": (int,),
        "output_tokens": (int,),
        "total_tokens": (int,),
        "input_tokens_details": (dict,),
        "output_tokens_details": (dict,),
    }
    _check_fields(usage, numbers, "usage")
    cached = usage["input_tokens_details"]
    _check_fields(cached, {"cached_tokens": (int,), "cache_write_tokens": (int,)}, "input details")
    _check_fields(usage["output_tokens_details"], {"reasoning_tokens": (int,)}, "output details")
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def check_item(item: Mapping[str, Any], *, is_added: bool = False) -> None:
    """An output item has its fields; absent is written by leaving out, never as null."""
    kind = item["type"]
    assert kind in ITEM_FIELDS, f"unknown item {kind}"
    _check_fields(item, ITEM_FIELDS[kind], kind)
    assert item["id"].startswith(PREFIXES[kind]), item["id"]
    assert None not in item.values() or kind in NULLABLE, f"null in {item}"
    if "status" in item:
        done = {"completed", "incomplete"}
        if kind == "apply_patch_call":
            done = {"completed", "in_progress"}
        if kind in ("mcp_call", "web_search_call", "code_interpreter_call"):
            done = {"completed", "incomplete", "failed"}
        begun = {"in_progress"}
        if kind == "shell_call_output":
            # As recorded of OpenAI, the output of a container is complete from its beginning.
            begun = {"in_progress", "completed"}
        assert item["status"] in (begun if is_added else done)
    if item.get("call_id") is None and "execution" in ITEM_FIELDS[kind]:
        assert item["execution"] == "server", item
    elif "call_id" in item:
        assert item["call_id"].startswith("call_"), item["call_id"]


def check_refusal(event: Event, status: int, code: str, lane: str | None = None) -> None:
    """An error event in the nested form that every client can read (docs/protocol.md 6.8)."""
    assert event["type"] == "error", event
    assert event["status"] == status, event
    assert type(event["sequence_number"]) is int
    assert event.get("stream_id") == lane, event
    fields = {"type": (str,), "code": (str,), "message": (str,), "param": (str, NULL)}
    _check_fields(event["error"], fields, "error")
    assert event["error"]["code"] == code, event


def without_heartbeats(events: Sequence[Event]) -> list[Event]:
    """The events but for repeated `response.in_progress`, which depend on time."""
    kept: list[Event] = []
    is_first = True
    for event in events:
        if event["type"] == "response.in_progress":
            if not is_first:
                continue
            is_first = False
        kept.append(event)
    return kept


def told_alike(events: Sequence[Event]) -> list[Any]:
    """The same for every telling of a story: no heartbeats, lanes or numbers; ids and times by first use."""
    told = [
        {key: value for key, value in event.items() if key not in ("sequence_number", "stream_id")}
        for event in without_heartbeats(events)
    ]
    return [*_neutral(told, {})]


def _neutral(value: Any, names: dict[str, str]) -> Any:
    """A copy with every id replaced by its prefix and its place, every time by a word."""
    match value:
        case dict():
            return {
                key: OWN[key] if key in OWN and one is not None else _neutral(one, names)
                for key, one in value.items()
            }
        case list():
            return [_neutral(one, names) for one in value]
        case str() if found := re.fullmatch(
            r"(resp|msg|rs|fc|ctc|sh|sho|lsh|apc|tsc|tso|mcpl|mcpr|mcp|ws|call)_[0-9A-Za-z]{8,}",
            value,
        ):
            return names.setdefault(value, f"{found[1]} {len(names)}")
        case _:
            return value


def neutral(value: Any) -> Any:
    """A copy of one value, such as a response, without ids and times."""
    return _neutral(value, {})


def _check_items(events: Sequence[Event], response: Mapping[str, Any]) -> None:
    added: dict[int, Mapping[str, Any]] = {}
    done: dict[int, Mapping[str, Any]] = {}
    parts: dict[tuple[Any, ...], str] = {}
    texts: dict[tuple[Any, ...], str] = {}
    whole: dict[tuple[Any, ...], str] = {}
    for event in events:
        kind = event["type"]
        index = event.get("output_index")
        if kind == "response.output_item.added":
            assert index == len(added), f"output_index {index} after {len(added)} items"
            open_items = [added[one]["type"] for one in added.keys() - done.keys()]
            assert HOSTED.issuperset(open_items), "an item is added inside another"
            check_item(event["item"], is_added=True)
            added[index] = event["item"]
        elif kind == "response.output_item.done":
            assert index in added, f"item {index} is done before it is added"
            assert index not in done, f"item {index} is done twice"
            check_item(event["item"])
            _check_same_item(added[index], event["item"])
            done[index] = event["item"]
        elif index is not None:
            assert index in added, f"{kind} outside of its item"
            assert index not in done, f"{kind} after its item"
            if kind.startswith("response.shell_call_command."):
                assert added[index]["type"] == "shell_call", f"{kind} outside of a shell call"
            else:
                assert event["item_id"] == added[index]["id"], f"{kind} names another item"
            if kind == "response.compaction.compacting" or "_output_content." in kind:
                continue
            _check_part(event, parts, texts, whole)
    assert done.keys() == added.keys(), "an item was never done"
    assert set(parts.values()) <= {"done"}, "a part was never done"
    assert texts.keys() == whole.keys(), "a text was never done, or had no delta"
    assert [done[index] for index in sorted(done)] == response["output"], "the snapshot differs"
    for index, item in done.items():
        assert _texts_of(item) == [text for key, text in whole.items() if key[0] == index], item
    cut = [index for index, item in done.items() if item.get("status") == "incomplete"]
    assert cut in ([], [len(done) - 1]), "an incomplete item is not the last"
    assert not cut or response["status"] != "completed"


def _check_same_item(added: Mapping[str, Any], done: Mapping[str, Any]) -> None:
    for key in ("id", "type", "call_id", "name", "namespace", "role", "async", "execution"):
        assert added.get(key) == done.get(key), f"{key} changed from added to done"
    for key in ("arguments", "input"):
        assert added.get(key, "") in ("", {}), f"an item is added with {key}"
    for key in ("content", "summary"):
        assert not added.get(key), f"an item is added with {key}"
    if added["type"] == "shell_call":
        assert added["action"]["commands"] == [], "an item is added with commands"
    if added["type"] == "apply_patch_call":
        for key in ("type", "path"):
            assert added["operation"][key] == done["operation"][key], f"{key} changed"
        assert not added["operation"].get("diff"), "an item is added with a diff"


def _check_part(
    event: Event,
    parts: dict[tuple[Any, ...], str],
    texts: dict[tuple[Any, ...], str],
    whole: dict[tuple[Any, ...], str],
) -> None:
    kind = event["type"]
    inner = event.get("content_index", event.get("summary_index"))
    key = (event["output_index"], inner)
    has_part = inner is not None
    if "command_index" in event:
        key = (event["output_index"], event["command_index"])
    if kind == "response.shell_call_command.added":
        assert key[1] == len([one for one in texts if one[0] == key[0]]), "commands out of order"
        assert event["command"] == ""
        assert texts.keys() == whole.keys(), "a command begins inside another"
    elif kind.endswith("_part.added"):
        assert key not in parts, "a part is added twice"
        assert event["part"]["text"] == ""
        parts[key] = "open"
    elif kind.endswith("_part.done"):
        assert parts.get(key) == "open", "a part is done that is not open"
        assert event["part"]["text"] == whole[key], "a part's text differs"
        parts[key] = "done"
    elif kind in STREAMED:
        assert not has_part or parts.get(key) == "open", f"{kind} outside of its part"
        assert key not in whole, f"{kind} after its end"
        texts[key] = texts.get(key, "") + event["delta"]
    elif kind == "response.output_text.annotation.added":
        assert key in texts, f"{kind} before the text"
        assert key not in whole, f"{kind} after the end of the text"
    elif kind.split(".")[1] not in HOSTED:
        assert kind in DONE_OF, f"{kind} inside an item"
        assert not has_part or parts.get(key) == "open", f"{kind} outside of its part"
        assert key in texts, f"{kind} without a delta"
        assert event[DONE_OF[kind]] == texts[key], f"{kind} is not its deltas joined"
        whole[key] = event[DONE_OF[kind]]


def _texts_of(item: Mapping[str, Any]) -> list[str]:
    """Every text of an item that is streamed, in order."""
    match item["type"]:
        case "message":
            return [part["text"] for part in item["content"]]
        case "reasoning":
            return [part["text"] for part in (*item["summary"], *item.get("content", ()))]
        case "function_call" | "mcp_call":
            return [item["arguments"]]
        case "mcp_list_tools" | "mcp_approval_request" | "web_search_call" | "shell_call_output":
            return []
        case "shell_call":
            commands: list[str] = item["action"]["commands"]
            return commands
        case "compaction" | "local_shell_call" | "apply_patch_call":
            return []
        case "tool_search_call" | "tool_search_output":
            return []
        case "code_interpreter_call":
            return [item["code"]]
        case _:
            return [item["input"]]


def _check_fields(
    value: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]], what: str
) -> None:
    for name, kinds in fields.items():
        assert name in value, f"{what} has no {name}"
        # By exact type: True is an int for isinstance, and no number for a client.
        assert type(value[name]) in kinds, f"{what}.{name} is {value[name]!r}"
