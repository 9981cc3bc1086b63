"""What does the item that the model is writing look like, as it stands? Pure.

An `OpenItem` gathers what was said; `value_of` is the item of the wire that it makes, empty when it is added and whole
when it is done.
"""

from __future__ import annotations

from typing import assert_never

import msgspec
from msgspec import UNSET, Raw, UnsetType

from segue.turn.plan import ReasoningView
from segue.turn.values import ItemOpened
from segue.wire.calls import (
    CommandSaid,
    CommandScanner,
    local_shell_action,
    other_commands,
    patch_operation,
    search_arguments,
    shell_action,
)
from segue.wire.codec import DeltaTemplate, encode
from segue.wire.events import ContentPart
from segue.wire.items import (
    ApplyPatchCall,
    CustomToolCall,
    DeleteFile,
    FunctionCall,
    LocalShellCall,
    McpApprovalRequest,
    McpCall,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    ShellCall,
    Status,
    SummaryText,
    ToolSearchCall,
    Value,
    WebSearchCall,
)
from segue.wire.web import read_action

PREFIX = {
    "message": "msg",
    "reasoning": "rs",
    "function": "fc",
    "custom": "ctc",
    "shell": "sh",
    "local_shell": "lsh",
    "apply_patch": "apc",
    "tool_search": "tsc",
    "mcp": "mcp",
    "mcp_approval": "mcpr",
    "web_search": "ws",
}
LOCAL = Raw(b'{"type":"local"}')
NO_ARGUMENTS = Raw(b"{}")


class OpenItem:
    """The item that is being written."""

    __slots__ = (
        "annotations",
        "call_id",
        "commands",
        "delta",
        "id",
        "index",
        "logprobs",
        "opened",
        "pieces",
    )

    def __init__(self, opened: ItemOpened, item_id: str, call_id: str, index: int) -> None:
        self.opened = opened
        self.id = item_id
        self.call_id = call_id
        self.index = index
        self.pieces: list[str] = []
        # Of a message, where they were asked for.
        self.logprobs: list[Raw] = []
        # Of a message that is whole: what it cites.
        self.annotations: list[Raw] = []
        self.delta: DeltaTemplate | None = None
        # Finds the commands of a shell call as they are written.
        self.commands = CommandScanner() if opened.kind == "shell" else None


def value_of(
    item: OpenItem, text: str, status: Status, reasoning: ReasoningView, *, is_added: bool = False
) -> Value:
    """The item as it stands: empty when it is added, whole when it is done."""
    opened = item.opened
    namespace: str | UnsetType = opened.namespace or UNSET
    is_async: bool | UnsetType = True if opened.is_async else UNSET
    match opened.kind:
        case "message":
            part = OutputText(text=text, annotations=item.annotations, logprobs=item.logprobs)
            return Message(
                id=item.id, status=status, role="assistant", content=[] if is_added else [part]
            )
        case "reasoning":
            has_content = reasoning == "text" and not is_added
            has_summary = reasoning == "summary" and not is_added
            return Reasoning(
                id=item.id,
                summary=[SummaryText(text=text)] if has_summary else [],
                content=[ReasoningText(text=text)] if has_content else UNSET,
            )
        case "function":
            return FunctionCall(
                id=item.id,
                status=status,
                call_id=item.call_id,
                name=opened.name,
                arguments=text,
                namespace=namespace,
                is_async=is_async,
            )
        case "custom":
            return CustomToolCall(
                id=item.id,
                status=status,
                call_id=item.call_id,
                name=opened.name,
                input=text,
                namespace=namespace,
                is_async=is_async,
            )
        case "shell":
            commands = item.commands.commands if item.commands else []
            return ShellCall(
                id=item.id,
                status=status,
                call_id=item.call_id,
                action=shell_action(text, [] if is_added else commands),
                environment=LOCAL,
            )
        case "local_shell":
            action = local_shell_action(text)
            return LocalShellCall(id=item.id, status=status, call_id=item.call_id, action=action)
        case "apply_patch":
            operation = patch_operation(text)
            if is_added and not isinstance(operation, DeleteFile):
                operation = msgspec.structs.replace(operation, diff="")
            return ApplyPatchCall(
                id=item.id,
                # This item knows no third status: one that is not whole is still in progress.
                status="in_progress" if status == "incomplete" else status,
                call_id=item.call_id,
                operation=operation,
            )
        case "tool_search":
            return ToolSearchCall(
                id=item.id,
                status=status,
                call_id=item.call_id or None,
                execution=opened.execution or "server",
                arguments=NO_ARGUMENTS if is_added else search_arguments(text),
            )
        case "mcp":
            return McpCall(
                id=item.id,
                status=status,
                server_label=opened.namespace or "",
                name=opened.name,
                arguments=text,
            )
        case "web_search":
            return WebSearchCall(
                id=item.id, status=status, action=Raw(encode(read_action(opened.name, text)))
            )
        case "mcp_approval":
            return McpApprovalRequest(
                id=item.id,
                server_label=opened.namespace or "",
                name=opened.name,
                arguments="" if is_added else text,
            )
        case _:
            assert_never(opened.kind)


def last_commands(scanner: CommandScanner, arguments: str) -> list[CommandSaid]:
    """What is still to be told of the commands when the arguments are over."""
    parsed = scanner.close()
    if scanner.commands:
        return parsed
    for index, command in enumerate(other_commands(arguments)):
        scanner.commands.append(command)
        parsed.extend(
            [
                CommandSaid("begun", index, ""),
                CommandSaid("more", index, command),
                CommandSaid("whole", index, command),
            ]
        )
    return parsed


def part_of(
    item: OpenItem, text: str, reasoning: ReasoningView
) -> ContentPart | SummaryText | None:
    """The content part that an item of this kind wraps its text in, if it has one."""
    match item.opened.kind:
        case "message":
            return OutputText(text=text, annotations=item.annotations, logprobs=item.logprobs)
        case "reasoning" if reasoning == "text":
            return ReasoningText(text=text)
        case "reasoning" if reasoning == "summary":
            return SummaryText(text=text)
        case _:
            return None
