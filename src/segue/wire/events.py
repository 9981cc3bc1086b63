"""Every event that a client may see (docs/protocol.md 5.1), and the encoded form in which one travels.

A typed event is encoded once; from then on it is an `Event`: its type, its number, its bytes. SSE wraps the bytes,
a named lane adds its name to them, plain JSON looks only at the last one.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from segue.wire.items import OutputText, ReasoningText, Refusal, Required, SummaryText

TERMINAL = frozenset({"response.completed", "response.failed", "response.incomplete"})

ContentPart = OutputText | Refusal | ReasoningText


class Event(Struct, frozen=True):
    """One event, ready to leave."""

    type: str
    number: int
    data: bytes

    @property
    def is_terminal(self) -> bool:
        """Whether nothing of this turn may follow."""
        return self.type in TERMINAL


class Numbered(Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int


class OfResponse(Numbered, frozen=True, kw_only=True):
    response: Raw


class Created(OfResponse, tag="response.created", frozen=True):
    pass


class Queued(OfResponse, tag="response.queued", frozen=True):
    pass


class InProgress(OfResponse, tag="response.in_progress", frozen=True):
    pass


class Completed(OfResponse, tag="response.completed", frozen=True):
    pass


class Failed(OfResponse, tag="response.failed", frozen=True):
    pass


class Incomplete(OfResponse, tag="response.incomplete", frozen=True):
    pass


class OfItem(Numbered, frozen=True, kw_only=True):
    output_index: int
    item: Raw


class OutputItemAdded(OfItem, tag="response.output_item.added", frozen=True):
    pass


class OutputItemDone(OfItem, tag="response.output_item.done", frozen=True):
    pass


class Inside(Numbered, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class InContent(Inside, frozen=True, kw_only=True):
    content_index: int


class ContentPartAdded(InContent, tag="response.content_part.added", frozen=True, kw_only=True):
    part: ContentPart


class ContentPartDone(InContent, tag="response.content_part.done", frozen=True, kw_only=True):
    part: ContentPart


class OutputTextDelta(InContent, tag="response.output_text.delta", frozen=True, kw_only=True):
    delta: str
    logprobs: list[Raw]
    obfuscation: str | UnsetType = UNSET


class OutputTextDone(InContent, tag="response.output_text.done", frozen=True, kw_only=True):
    text: str
    logprobs: list[Raw]


class AnnotationAdded(
    InContent, tag="response.output_text.annotation.added", frozen=True, kw_only=True
):
    annotation_index: int
    annotation: Raw


class RefusalDelta(InContent, tag="response.refusal.delta", frozen=True, kw_only=True):
    delta: str


class RefusalDone(InContent, tag="response.refusal.done", frozen=True, kw_only=True):
    refusal: str


class ReasoningTextDelta(InContent, tag="response.reasoning_text.delta", frozen=True, kw_only=True):
    delta: str


class ReasoningTextDone(InContent, tag="response.reasoning_text.done", frozen=True, kw_only=True):
    text: str


class InSummary(Inside, frozen=True, kw_only=True):
    summary_index: int


class SummaryPartAdded(
    InSummary, tag="response.reasoning_summary_part.added", frozen=True, kw_only=True
):
    part: SummaryText


class SummaryPartDone(
    InSummary, tag="response.reasoning_summary_part.done", frozen=True, kw_only=True
):
    part: SummaryText
    status: Literal["incomplete"] | UnsetType = UNSET


class SummaryTextDelta(
    InSummary, tag="response.reasoning_summary_text.delta", frozen=True, kw_only=True
):
    delta: str


class SummaryTextDone(
    InSummary, tag="response.reasoning_summary_text.done", frozen=True, kw_only=True
):
    text: str


class ArgumentsDelta(
    Inside, tag="response.function_call_arguments.delta", frozen=True, kw_only=True
):
    delta: str


class ArgumentsDone(Inside, tag="response.function_call_arguments.done", frozen=True, kw_only=True):
    arguments: str


class CustomInputDelta(
    Inside, tag="response.custom_tool_call_input.delta", frozen=True, kw_only=True
):
    delta: str


class CustomInputDone(
    Inside, tag="response.custom_tool_call_input.done", frozen=True, kw_only=True
):
    input: str


class Compacting(Inside, tag="response.compaction.compacting", frozen=True):
    pass


class OfCommand(Numbered, frozen=True, kw_only=True):
    output_index: int
    command_index: int


class ShellCommandAdded(
    OfCommand, tag="response.shell_call_command.added", frozen=True, kw_only=True
):
    command: str


class ShellCommandDelta(
    OfCommand, tag="response.shell_call_command.delta", frozen=True, kw_only=True
):
    delta: str


class ShellCommandDone(
    OfCommand, tag="response.shell_call_command.done", frozen=True, kw_only=True
):
    command: str


class ShellOutputDelta(
    Inside, tag="response.shell_call_output_content.delta", frozen=True, kw_only=True
):
    command_index: int
    delta: Raw


class ShellOutputDone(
    Inside, tag="response.shell_call_output_content.done", frozen=True, kw_only=True
):
    command_index: int
    output: list[Raw]


class WebSearchInProgress(Inside, tag="response.web_search_call.in_progress", frozen=True):
    pass


class WebSearchSearching(Inside, tag="response.web_search_call.searching", frozen=True):
    pass


class WebSearchCompleted(Inside, tag="response.web_search_call.completed", frozen=True):
    pass


class FileSearchInProgress(Inside, tag="response.file_search_call.in_progress", frozen=True):
    pass


class FileSearchSearching(Inside, tag="response.file_search_call.searching", frozen=True):
    pass


class FileSearchCompleted(Inside, tag="response.file_search_call.completed", frozen=True):
    pass


class CodeInProgress(Inside, tag="response.code_interpreter_call.in_progress", frozen=True):
    pass


class CodeInterpreting(Inside, tag="response.code_interpreter_call.interpreting", frozen=True):
    pass


class CodeCompleted(Inside, tag="response.code_interpreter_call.completed", frozen=True):
    pass


class CodeDelta(Inside, tag="response.code_interpreter_call_code.delta", frozen=True, kw_only=True):
    delta: str


class CodeDone(Inside, tag="response.code_interpreter_call_code.done", frozen=True, kw_only=True):
    code: str


class ImageInProgress(Inside, tag="response.image_generation_call.in_progress", frozen=True):
    pass


class ImageGenerating(Inside, tag="response.image_generation_call.generating", frozen=True):
    pass


class ImagePartial(
    Inside, tag="response.image_generation_call.partial_image", frozen=True, kw_only=True
):
    partial_image_index: int
    partial_image_b64: str


class ImageCompleted(Inside, tag="response.image_generation_call.completed", frozen=True):
    pass


class McpListInProgress(Inside, tag="response.mcp_list_tools.in_progress", frozen=True):
    pass


class McpListCompleted(Inside, tag="response.mcp_list_tools.completed", frozen=True):
    pass


class McpListFailed(Inside, tag="response.mcp_list_tools.failed", frozen=True):
    pass


class McpCallInProgress(Inside, tag="response.mcp_call.in_progress", frozen=True):
    pass


class McpCallCompleted(Inside, tag="response.mcp_call.completed", frozen=True):
    pass


class McpCallFailed(Inside, tag="response.mcp_call.failed", frozen=True):
    pass


class McpArgumentsDelta(Inside, tag="response.mcp_call_arguments.delta", frozen=True, kw_only=True):
    delta: str


class McpArgumentsDone(Inside, tag="response.mcp_call_arguments.done", frozen=True, kw_only=True):
    arguments: str


class SteerRef(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which steer is meant; its input goes back only where it failed."""

    previous_response_id: str
    id: str | UnsetType = UNSET
    input: Raw | UnsetType = UNSET


class SteerError(Struct, frozen=True, kw_only=True):
    type: str
    code: str
    message: str


class SteerAccepted(Numbered, tag="response.steer.accepted", frozen=True, kw_only=True):
    steer: SteerRef


class SteerPending(Numbered, tag="response.steer.pending", frozen=True, kw_only=True):
    steer: SteerRef
    required_input: list[Required]
    reason: Literal["waiting_for_required_input"] = "waiting_for_required_input"


class SteerFailed(Numbered, tag="response.steer.failed", frozen=True, kw_only=True):
    steer: SteerRef
    error: SteerError


class Done(Numbered, tag="response.done", frozen=True, kw_only=True):
    """A rollout waits for these (docs/protocol.md 11). Experimental, and no terminal event."""

    response_id: str
    required_input: list[Required]


class ErrorDetail(Struct, frozen=True):
    """What went wrong, in the one shape that HTTP bodies and error events share."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct, frozen=True):
    """The body of an HTTP refusal."""

    error: ErrorDetail


class ErrorEvent(Numbered, tag="error", frozen=True, kw_only=True):
    """Refused before it started; always nested, always with its status (docs/protocol.md 6.8)."""

    status: int
    error: ErrorDetail
    retry_after: float | UnsetType = UNSET


Typed = (
    Created
    | Queued
    | InProgress
    | Completed
    | Failed
    | Incomplete
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | AnnotationAdded
    | RefusalDelta
    | RefusalDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | SummaryPartAdded
    | SummaryPartDone
    | SummaryTextDelta
    | SummaryTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
    | Compacting
    | ShellCommandAdded
    | ShellCommandDelta
    | ShellCommandDone
    | ShellOutputDelta
    | ShellOutputDone
    | WebSearchInProgress
    | WebSearchSearching
    | WebSearchCompleted
    | FileSearchInProgress
    | FileSearchSearching
    | FileSearchCompleted
    | CodeInProgress
    | CodeInterpreting
    | CodeCompleted
    | CodeDelta
    | CodeDone
    | ImageInProgress
    | ImageGenerating
    | ImagePartial
    | ImageCompleted
    | McpListInProgress
    | McpListCompleted
    | McpListFailed
    | McpCallInProgress
    | McpCallCompleted
    | McpCallFailed
    | McpArgumentsDelta
    | McpArgumentsDone
    | SteerAccepted
    | SteerPending
    | SteerFailed
    | Done
    | ErrorEvent
)
