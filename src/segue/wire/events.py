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


class Numbered(Struct, frozen=True, tag_field="type"):
    sequence_number: int


class OfResponse(Numbered, frozen=True):
    response: Raw


class Created(OfResponse, tag="response.created", frozen=True): ...


class Queued(OfResponse, tag="response.queued", frozen=True): ...


class InProgress(OfResponse, tag="response.in_progress", frozen=True): ...


class Completed(OfResponse, tag="response.completed", frozen=True): ...


class Failed(OfResponse, tag="response.failed", frozen=True): ...


class Incomplete(OfResponse, tag="response.incomplete", frozen=True): ...


class OfItem(Numbered, frozen=True):
    output_index: int
    item: Raw


class OutputItemAdded(OfItem, tag="response.output_item.added", frozen=True): ...


class OutputItemDone(OfItem, tag="response.output_item.done", frozen=True): ...


class Inside(Numbered, frozen=True):
    item_id: str
    output_index: int


class InContent(Inside, frozen=True):
    content_index: int


class ContentPartAdded(InContent, tag="response.content_part.added", frozen=True):
    part: ContentPart


class ContentPartDone(InContent, tag="response.content_part.done", frozen=True):
    part: ContentPart


class OutputTextDelta(InContent, tag="response.output_text.delta", frozen=True):
    delta: str
    logprobs: list[Raw]
    obfuscation: str | UnsetType = UNSET


class OutputTextDone(InContent, tag="response.output_text.done", frozen=True):
    text: str
    logprobs: list[Raw]


class AnnotationAdded(InContent, tag="response.output_text.annotation.added", frozen=True):
    annotation_index: int
    annotation: Raw


class RefusalDelta(InContent, tag="response.refusal.delta", frozen=True):
    delta: str


class RefusalDone(InContent, tag="response.refusal.done", frozen=True):
    refusal: str


class ReasoningTextDelta(InContent, tag="response.reasoning_text.delta", frozen=True):
    delta: str


class ReasoningTextDone(InContent, tag="response.reasoning_text.done", frozen=True):
    text: str


class InSummary(Inside, frozen=True):
    summary_index: int


class SummaryPartAdded(InSummary, tag="response.reasoning_summary_part.added", frozen=True):
    part: SummaryText


class SummaryPartDone(InSummary, tag="response.reasoning_summary_part.done", frozen=True):
    part: SummaryText
    status: Literal["incomplete"] | UnsetType = UNSET


class SummaryTextDelta(InSummary, tag="response.reasoning_summary_text.delta", frozen=True):
    delta: str


class SummaryTextDone(InSummary, tag="response.reasoning_summary_text.done", frozen=True):
    text: str


class ArgumentsDelta(Inside, tag="response.function_call_arguments.delta", frozen=True):
    delta: str


class ArgumentsDone(Inside, tag="response.function_call_arguments.done", frozen=True):
    arguments: str


class CustomInputDelta(Inside, tag="response.custom_tool_call_input.delta", frozen=True):
    delta: str


class CustomInputDone(Inside, tag="response.custom_tool_call_input.done", frozen=True):
    input: str


class Compacting(Inside, tag="response.compaction.compacting", frozen=True): ...


class OfCommand(Numbered, frozen=True):
    output_index: int
    command_index: int


class ShellCommandAdded(OfCommand, tag="response.shell_call_command.added", frozen=True):
    command: str


class ShellCommandDelta(OfCommand, tag="response.shell_call_command.delta", frozen=True):
    delta: str


class ShellCommandDone(OfCommand, tag="response.shell_call_command.done", frozen=True):
    command: str


class ShellOutputDelta(Inside, tag="response.shell_call_output_content.delta", frozen=True):
    command_index: int
    delta: Raw


class ShellOutputDone(Inside, tag="response.shell_call_output_content.done", frozen=True):
    command_index: int
    output: list[Raw]


class WebSearchInProgress(Inside, tag="response.web_search_call.in_progress", frozen=True): ...


class WebSearchSearching(Inside, tag="response.web_search_call.searching", frozen=True): ...


class WebSearchCompleted(Inside, tag="response.web_search_call.completed", frozen=True): ...


class FileSearchInProgress(Inside, tag="response.file_search_call.in_progress", frozen=True): ...


class FileSearchSearching(Inside, tag="response.file_search_call.searching", frozen=True): ...


class FileSearchCompleted(Inside, tag="response.file_search_call.completed", frozen=True): ...


class CodeInProgress(Inside, tag="response.code_interpreter_call.in_progress", frozen=True): ...


class CodeInterpreting(Inside, tag="response.code_interpreter_call.interpreting", frozen=True): ...


class CodeCompleted(Inside, tag="response.code_interpreter_call.completed", frozen=True): ...


class CodeDelta(Inside, tag="response.code_interpreter_call_code.delta", frozen=True):
    delta: str


class CodeDone(Inside, tag="response.code_interpreter_call_code.done", frozen=True):
    code: str


class ImageInProgress(Inside, tag="response.image_generation_call.in_progress", frozen=True): ...


class ImageGenerating(Inside, tag="response.image_generation_call.generating", frozen=True): ...


class ImagePartial(Inside, tag="response.image_generation_call.partial_image", frozen=True):
    partial_image_index: int
    partial_image_b64: str


class ImageCompleted(Inside, tag="response.image_generation_call.completed", frozen=True): ...


class McpListInProgress(Inside, tag="response.mcp_list_tools.in_progress", frozen=True): ...


class McpListCompleted(Inside, tag="response.mcp_list_tools.completed", frozen=True): ...


class McpListFailed(Inside, tag="response.mcp_list_tools.failed", frozen=True): ...


class McpCallInProgress(Inside, tag="response.mcp_call.in_progress", frozen=True): ...


class McpCallCompleted(Inside, tag="response.mcp_call.completed", frozen=True): ...


class McpCallFailed(Inside, tag="response.mcp_call.failed", frozen=True): ...


class McpArgumentsDelta(Inside, tag="response.mcp_call_arguments.delta", frozen=True):
    delta: str


class McpArgumentsDone(Inside, tag="response.mcp_call_arguments.done", frozen=True):
    arguments: str


class SteerRef(Struct, frozen=True, omit_defaults=True):
    """Which steer is meant; its input goes back only where it failed."""

    previous_response_id: str
    id: str | UnsetType = UNSET
    input: Raw | UnsetType = UNSET


class SteerError(Struct, frozen=True):
    type: str
    code: str
    message: str


class SteerAccepted(Numbered, tag="response.steer.accepted", frozen=True):
    steer: SteerRef


class SteerPending(Numbered, tag="response.steer.pending", frozen=True):
    steer: SteerRef
    required_input: list[Required]
    reason: Literal["waiting_for_required_input"] = "waiting_for_required_input"


class SteerFailed(Numbered, tag="response.steer.failed", frozen=True):
    steer: SteerRef
    error: SteerError


class Done(Numbered, tag="response.done", frozen=True):
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


class ErrorEvent(Numbered, tag="error", frozen=True):
    """Refused before it started; always nested, always with its status (docs/protocol.md 6.8)."""

    status: int
    error: ErrorDetail
    retry_after: float | UnsetType = UNSET


# Every type of event that we may send: the ones above that no other is made of.
EVENT_TYPES = tuple(
    kind
    for kind in tuple(vars().values())
    if isinstance(kind, type) and issubclass(kind, Numbered) and not kind.__subclasses__()
)
