"""How is an item built from what the model writes, and what does the client read meanwhile?

In: a `Draft`, what the model has written so far. Out: the item as it is added, empty, and as it is done, whole; and the
events of its text. Which type is written how is one `Streamed` for each; the table of `kinds` refers to them. The order
and the numbers of events are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypedDict

from msgspec import UNSET, Raw, Struct, structs

from segue.wire import events, items
from segue.wire.calls import (
    local_shell_action,
    patch_operation,
    search_arguments,
    shell_action,
    web_action,
)
from segue.wire.codec import encode
from segue.wire.tools import Execution

LOCAL = Raw(b'{"type":"local"}')
NO_ARGUMENTS = Raw(b"{}")


class Draft(Struct, frozen=True, kw_only=True):
    """What the model has written of an item so far, and what we have given to it."""

    id: str
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    is_async: bool = False
    execution: Execution | None = None
    text: str = ""
    status: items.ItemStatus = "in_progress"
    # Whether this is the item as `output_item.added` has it; most are empty there.
    is_added: bool = True
    logprobs: list[Raw] = []
    annotations: list[Raw] = []
    commands: list[str] = []


class Where(TypedDict):
    """The fields of every event inside an item."""

    sequence_number: int
    item_id: str
    output_index: int


class TextEvents(Struct, frozen=True):
    """The events of a text that the client reads as it is written."""

    delta: type[events.Numbered]
    done: Callable[[Where, Draft], events.Numbered]
    # The fields of every delta beside its item and its text.
    place: Mapping[str, int | list[Raw]] = {}
    # The content part around the text.
    part: Callable[[Draft], events.ContentPart | items.SummaryText] | None = None


class CommandEvents(Struct, frozen=True):
    """The events of commands among the arguments, which the client reads one by one as they are written."""

    added: type[events.Numbered]
    delta: type[events.Numbered]
    done: type[events.Numbered]


class Streamed(Struct, frozen=True):
    """How an item is built that the model writes."""

    # What the client reads meanwhile: the text, commands one by one, or nothing until it is done. An item that is held
    # is not even added before its arguments are whole, because its fields are made of them.
    progress: TextEvents | CommandEvents | Literal["nothing", "held"]
    build: Callable[[Draft], items.ItemValue]


def _output_text(draft: Draft) -> items.OutputText:
    return items.OutputText(text=draft.text, annotations=draft.annotations, logprobs=draft.logprobs)


MESSAGE_TEXT = TextEvents(
    events.OutputTextDelta,
    lambda at, draft: events.OutputTextDone(
        **at, content_index=0, text=draft.text, logprobs=draft.logprobs
    ),
    {"content_index": 0, "logprobs": []},
    _output_text,
)
REASONING_TEXT = TextEvents(
    events.ReasoningTextDelta,
    lambda at, draft: events.ReasoningTextDone(**at, content_index=0, text=draft.text),
    {"content_index": 0},
    lambda draft: items.ReasoningText(text=draft.text),
)
SUMMARY_TEXT = TextEvents(
    events.SummaryTextDelta,
    lambda at, draft: events.SummaryTextDone(**at, summary_index=0, text=draft.text),
    {"summary_index": 0},
    lambda draft: items.SummaryText(text=draft.text),
)
FUNCTION_ARGUMENTS = TextEvents(
    events.ArgumentsDelta, lambda at, draft: events.ArgumentsDone(**at, arguments=draft.text)
)
CUSTOM_INPUT = TextEvents(
    events.CustomInputDelta, lambda at, draft: events.CustomInputDone(**at, input=draft.text)
)
CODE = TextEvents(events.CodeDelta, lambda at, draft: events.CodeDone(**at, code=draft.text))
MCP_ARGUMENTS = TextEvents(
    events.McpArgumentsDelta, lambda at, draft: events.McpArgumentsDone(**at, arguments=draft.text)
)


def _message(draft: Draft) -> items.Message:
    content = [] if draft.is_added else [_output_text(draft)]
    return items.Message(id=draft.id, status=draft.status, role="assistant", content=[*content])


def _reasoning_text(draft: Draft) -> items.Reasoning:
    content = UNSET if draft.is_added else [items.ReasoningText(text=draft.text)]
    return items.Reasoning(id=draft.id, content=content)


def _reasoning_summary(draft: Draft) -> items.Reasoning:
    summary = [] if draft.is_added else [items.SummaryText(text=draft.text)]
    return items.Reasoning(id=draft.id, summary=summary)


# Reasoning as the operator lets clients see it.
REASONING: dict[str, Streamed] = {
    "text": Streamed(REASONING_TEXT, _reasoning_text),
    "summary": Streamed(SUMMARY_TEXT, _reasoning_summary),
    "hidden": Streamed("nothing", lambda draft: items.Reasoning(id=draft.id)),
}


class _CallFields(TypedDict):
    id: str
    status: items.ItemStatus
    call_id: str


def _call_fields(draft: Draft) -> _CallFields:
    return {"id": draft.id, "status": draft.status, "call_id": draft.call_id}


def _function_call(draft: Draft) -> items.FunctionCall:
    return items.FunctionCall(
        **_call_fields(draft),
        name=draft.name,
        arguments=draft.text,
        namespace=draft.namespace or UNSET,
        is_async=True if draft.is_async else UNSET,
    )


def _custom_call(draft: Draft) -> items.CustomToolCall:
    return items.CustomToolCall(
        **_call_fields(draft),
        name=draft.name,
        input=draft.text,
        namespace=draft.namespace or UNSET,
        is_async=True if draft.is_async else UNSET,
    )


def _shell_call(draft: Draft) -> items.ShellCall:
    action = shell_action(draft.text, draft.commands)
    return items.ShellCall(**_call_fields(draft), action=action, environment=LOCAL)


def _local_shell_call(draft: Draft) -> items.LocalShellCall:
    return items.LocalShellCall(**_call_fields(draft), action=local_shell_action(draft.text))


def _apply_patch_call(draft: Draft) -> items.ApplyPatchCall:
    operation = patch_operation(draft.text)
    if draft.is_added and not isinstance(operation, items.DeleteFile):
        operation = structs.replace(operation, diff="")
    call = items.ApplyPatchCall(**_call_fields(draft), operation=operation)
    # This item knows no third status: one that is not whole is still in progress.
    return structs.replace(call, status="in_progress") if draft.status == "incomplete" else call


def _tool_search_call(draft: Draft) -> items.ToolSearchCall:
    return items.ToolSearchCall(
        id=draft.id,
        status=draft.status,
        # A search of our own needs none: call and output have the same letters after their prefix.
        call_id=draft.call_id if draft.execution == "client" else None,
        execution=draft.execution or "server",
        arguments=NO_ARGUMENTS if draft.is_added else search_arguments(draft.text),
    )


def _mcp_call(draft: Draft) -> items.McpCall:
    return items.McpCall(
        id=draft.id,
        status=draft.status,
        server_label=draft.namespace or "",
        name=draft.name,
        arguments=draft.text,
    )


def _mcp_approval_request(draft: Draft) -> items.McpApprovalRequest:
    return items.McpApprovalRequest(
        id=draft.id,
        server_label=draft.namespace or "",
        name=draft.name,
        arguments="" if draft.is_added else draft.text,
    )


def _web_search_call(draft: Draft) -> items.WebSearchCall:
    action = Raw(encode(web_action(draft.name, draft.text)))
    return items.WebSearchCall(id=draft.id, status=draft.status, action=action)


def _code_call(draft: Draft) -> items.CodeInterpreterCall:
    return items.CodeInterpreterCall(id=draft.id, status=draft.status, code=draft.text)


MESSAGE = Streamed(MESSAGE_TEXT, _message)
FUNCTION_CALL = Streamed(FUNCTION_ARGUMENTS, _function_call)
CUSTOM_CALL = Streamed(CUSTOM_INPUT, _custom_call)
SHELL_COMMANDS = CommandEvents(
    events.ShellCommandAdded, events.ShellCommandDelta, events.ShellCommandDone
)
SHELL_CALL = Streamed(SHELL_COMMANDS, _shell_call)
LOCAL_SHELL_CALL = Streamed("held", _local_shell_call)
APPLY_PATCH_CALL = Streamed("held", _apply_patch_call)
TOOL_SEARCH_CALL = Streamed("nothing", _tool_search_call)
MCP_CALL = Streamed(MCP_ARGUMENTS, _mcp_call)
MCP_APPROVAL_REQUEST = Streamed("held", _mcp_approval_request)
WEB_SEARCH_CALL = Streamed("held", _web_search_call)
CODE_CALL = Streamed(CODE, _code_call)
