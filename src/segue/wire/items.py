"""What an item means: every type of the contract, checked, and kept to the byte.

In: the JSON of one item. Out: an `Item`, the verbatim bytes beside a typed value. Fields that we do not
know stay in the bytes and go back to the client as they came. Fields that we do know are checked.
Nothing here decides what a turn does with an item (docs/protocol.md 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import filterfalse
from typing import Literal, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.wire.requests import (
    CacheBreakpoint,
    Effort,
    MaybeFlag,
    MaybeText,
    RawField,
    TextFormat,
    Whole,
)
from segue.wire.tools import CustomTool, Execution, FunctionTool, ToolDefinition

ItemStatus = Literal["in_progress", "completed", "incomplete"]


# Nothing in an item refers back to it, so the garbage collector need not look: for a long input it would hold the loop.
class _Part(Struct, frozen=True, tag_field="type", kw_only=True, gc=False):
    """One piece of a message's or an output's content."""


class _InputPart(_Part, frozen=True, kw_only=True):
    prompt_cache_breakpoint: CacheBreakpoint | UnsetType | None = UNSET


class InputText(_InputPart, tag="input_text", frozen=True, kw_only=True):
    text: str


class InputImage(_InputPart, tag="input_image", frozen=True, kw_only=True):
    image_url: MaybeText = UNSET
    file_id: MaybeText = UNSET
    detail: MaybeText = UNSET

    @property
    def data_url(self) -> str | None:
        """The picture itself. An address is not handed to an engine, which would follow it, in the operator's network,
        for the author of the request (docs/inside/hazards.md T10)."""
        url = self.image_url
        return url if isinstance(url, str) and url.startswith("data:") else None


class InputFile(_InputPart, tag="input_file", frozen=True, kw_only=True):
    file_id: MaybeText = UNSET
    file_url: MaybeText = UNSET
    file_data: MaybeText = UNSET
    filename: MaybeText = UNSET
    detail: MaybeText = UNSET
    # The text of a PDF, once the server has read it.
    text: MaybeText = msgspec.field(name="segue:text", default=UNSET)


class InputAudio(_InputPart, tag="input_audio", frozen=True, kw_only=True):
    input_audio: RawField = UNSET
    audio_url: MaybeText = UNSET


class TopLogprob(Struct, frozen=True):
    """A token that could have stood there. `token` is its text as far as it is text, `bytes` is exact."""

    token: str
    bytes: list[int]
    logprob: float


class Logprob(TopLogprob, frozen=True):
    """A token that was sampled, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class UrlCitation(Struct, frozen=True, tag_field="type", tag="url_citation", kw_only=True):
    """A mark in a text, `text[start_index:end_index]`, that stands for a page."""

    start_index: int
    end_index: int
    title: str
    url: str


class OutputText(_Part, tag="output_text", frozen=True, kw_only=True):
    text: str
    annotations: list[Raw] | UnsetType | None = UNSET
    logprobs: list[Raw] | UnsetType | None = UNSET


class Refusal(_Part, tag="refusal", frozen=True, kw_only=True):
    refusal: str


class ReasoningText(_Part, tag="reasoning_text", frozen=True, kw_only=True):
    text: str


class SummaryText(_Part, tag="summary_text", frozen=True, kw_only=True):
    text: str


MessagePart = InputText | InputImage | InputFile | InputAudio | OutputText | Refusal
OutputPart = InputText | InputImage | InputFile | InputAudio | OutputText


class Body(Struct, frozen=True, tag_field="type", kw_only=True, gc=False):
    """What every item may carry."""

    id: MaybeText = UNSET


class Message(Body, tag="message", frozen=True, kw_only=True):
    status: ItemStatus | UnsetType | None = UNSET
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[MessagePart]
    phase: Literal["commentary", "final_answer"] | UnsetType | None = UNSET


class FunctionCall(Body, tag="function_call", frozen=True, kw_only=True):
    status: ItemStatus | UnsetType | None = UNSET
    call_id: str
    name: str
    arguments: str
    namespace: MaybeText = UNSET
    is_async: MaybeFlag = msgspec.field(name="async", default=UNSET)


class FunctionCallOutput(Body, tag="function_call_output", frozen=True, kw_only=True):
    call_id: MaybeText = UNSET
    output: str | list[OutputPart]
    name: MaybeText = UNSET
    namespace: MaybeText = UNSET
    status: ItemStatus | UnsetType | None = UNSET


class CustomToolCall(Body, tag="custom_tool_call", frozen=True, kw_only=True):
    status: ItemStatus | UnsetType | None = UNSET
    call_id: str
    name: str
    input: str
    namespace: MaybeText = UNSET
    is_async: MaybeFlag = msgspec.field(name="async", default=UNSET)


class CustomToolCallOutput(Body, tag="custom_tool_call_output", frozen=True, kw_only=True):
    call_id: MaybeText = UNSET
    output: str | list[OutputPart]
    name: MaybeText = UNSET
    status: ItemStatus | UnsetType | None = UNSET


class Reasoning(Body, tag="reasoning", frozen=True, kw_only=True):
    summary: list[SummaryText] = []
    content: list[ReasoningText] | UnsetType | None = UNSET
    encrypted_content: MaybeText = UNSET
    status: ItemStatus | UnsetType | None = UNSET


class UrlSource(Struct, frozen=True, tag_field="type", tag="url"):
    """A page that a search has found."""

    url: str


class SearchAction(Struct, frozen=True, tag_field="type", tag="search", kw_only=True):
    query: str
    queries: list[str] = []
    # Shown where the request asks for them.
    sources: list[UrlSource] | UnsetType = UNSET


class OpenPageAction(Struct, frozen=True, tag_field="type", tag="open_page", kw_only=True):
    url: str


class FindInPageAction(Struct, frozen=True, tag_field="type", tag="find_in_page", kw_only=True):
    pattern: str
    url: str


WebAction = SearchAction | OpenPageAction | FindInPageAction


class WebSearchCall(Body, tag="web_search_call", frozen=True, kw_only=True):
    action: RawField = UNSET
    status: MaybeText = UNSET


class FileSearchCall(Body, tag="file_search_call", frozen=True, kw_only=True):
    queries: list[str] | UnsetType = UNSET
    results: RawField = UNSET
    status: MaybeText = UNSET


class CodeInterpreterCall(Body, tag="code_interpreter_call", frozen=True, kw_only=True):
    code: MaybeText = UNSET
    container_id: MaybeText = UNSET
    outputs: RawField = UNSET
    status: MaybeText = UNSET


class ImageGenerationCall(Body, tag="image_generation_call", frozen=True, kw_only=True):
    result: MaybeText = UNSET
    status: MaybeText = UNSET


class ComputerCall(Body, tag="computer_call", frozen=True, kw_only=True):
    call_id: str
    action: RawField = UNSET
    actions: RawField = UNSET
    pending_safety_checks: RawField = UNSET
    status: MaybeText = UNSET


class ComputerCallOutput(Body, tag="computer_call_output", frozen=True, kw_only=True):
    call_id: str
    output: Raw
    acknowledged_safety_checks: RawField = UNSET
    status: MaybeText = UNSET


class Hints(Struct, frozen=True, rename={"read_only": "readOnlyHint"}):
    """Hints of a server about a tool; only this one is used."""

    read_only: bool | None = None


class RemoteTool(Struct, frozen=True):
    """One tool, as `mcp_list_tools` shows it."""

    name: str
    input_schema: Raw = Raw(b"{}")
    description: str | None = None
    annotations: Hints | None = None


class McpListTools(Body, tag="mcp_list_tools", frozen=True, kw_only=True):
    server_label: str
    tools: list[Raw]
    error: RawField = UNSET


class McpCall(Body, tag="mcp_call", frozen=True, kw_only=True):
    server_label: str
    name: str
    arguments: str
    output: MaybeText = UNSET
    error: RawField = UNSET
    status: MaybeText = UNSET
    approval_request_id: MaybeText = UNSET


class McpApprovalRequest(Body, tag="mcp_approval_request", frozen=True, kw_only=True):
    server_label: str
    name: str
    arguments: str


class McpApprovalResponse(Body, tag="mcp_approval_response", frozen=True, kw_only=True):
    approval_request_id: str
    approve: bool
    reason: MaybeText = UNSET


class ShellAction(Struct, frozen=True, kw_only=True):
    commands: list[str]
    timeout_ms: Whole | UnsetType | None = UNSET
    max_output_length: Whole | UnsetType | None = UNSET


class ShellCall(Body, tag="shell_call", frozen=True, kw_only=True):
    call_id: str
    action: ShellAction
    environment: RawField = UNSET
    status: MaybeText = UNSET


class ShellExit(Struct, tag_field="type", tag="exit", frozen=True):
    exit_code: Whole


class ShellTimeout(Struct, tag_field="type", tag="timeout", frozen=True): ...


class ShellOutput(Struct, frozen=True):
    """What one command printed, and how it ended."""

    stdout: str
    stderr: str
    outcome: ShellExit | ShellTimeout


class ShellCallOutput(Body, tag="shell_call_output", frozen=True, kw_only=True):
    call_id: str
    output: list[ShellOutput]
    max_output_length: Whole | UnsetType | None = UNSET
    status: MaybeText = UNSET


class LocalShellAction(Struct, tag_field="type", tag="exec", frozen=True, kw_only=True):
    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: Whole | UnsetType | None = UNSET
    user: MaybeText = UNSET
    working_directory: MaybeText = UNSET


class LocalShellCall(Body, tag="local_shell_call", frozen=True, kw_only=True):
    call_id: str
    action: LocalShellAction
    status: MaybeText = UNSET


class LocalShellCallOutput(Body, tag="local_shell_call_output", frozen=True, kw_only=True):
    output: str
    call_id: MaybeText = UNSET
    status: MaybeText = UNSET


class CreateFile(Struct, tag_field="type", tag="create_file", frozen=True):
    path: str
    diff: str


class UpdateFile(Struct, tag_field="type", tag="update_file", frozen=True):
    path: str
    diff: str


class DeleteFile(Struct, tag_field="type", tag="delete_file", frozen=True):
    path: str


PatchOperation = CreateFile | UpdateFile | DeleteFile


class ApplyPatchCall(Body, tag="apply_patch_call", frozen=True, kw_only=True):
    call_id: str
    operation: PatchOperation
    status: MaybeText = UNSET


class ApplyPatchCallOutput(Body, tag="apply_patch_call_output", frozen=True, kw_only=True):
    call_id: str
    status: MaybeText = UNSET
    output: MaybeText = UNSET


class ToolSearchCall(Body, tag="tool_search_call", frozen=True, kw_only=True):
    call_id: MaybeText = UNSET
    execution: Execution | UnsetType = UNSET
    arguments: RawField = UNSET
    status: MaybeText = UNSET


class ToolSearchOutput(Body, tag="tool_search_output", frozen=True, kw_only=True):
    tools: list[ToolDefinition]
    call_id: MaybeText = UNSET
    execution: Execution | UnsetType = UNSET
    status: MaybeText = UNSET


class AdditionalTools(Body, tag="additional_tools", frozen=True, kw_only=True):
    tools: list[ToolDefinition]
    role: MaybeText = UNSET


class ReasoningUpdate(Struct, frozen=True):
    effort: Effort | None = None


class TextUpdate(Struct, frozen=True):
    format: TextFormat | None = None


class ConfigurationUpdate(Body, tag="configuration_update", frozen=True, kw_only=True):
    reasoning: ReasoningUpdate | UnsetType | None = UNSET
    text: TextUpdate | UnsetType | None = UNSET


class Program(Body, tag="program", frozen=True, kw_only=True):
    call_id: MaybeText = UNSET
    code: str
    fingerprint: MaybeText = UNSET


class ProgramOutput(Body, tag="program_output", frozen=True, kw_only=True):
    call_id: MaybeText = UNSET
    result: RawField = UNSET
    status: MaybeText = UNSET


class Compaction(Body, tag="compaction", frozen=True, kw_only=True):
    encrypted_content: str


class CompactionSummary(Body, tag="compaction_summary", frozen=True, kw_only=True):
    """Codex's other name for a compaction item."""

    encrypted_content: str


class CompactionTrigger(Body, tag="compaction_trigger", frozen=True, kw_only=True): ...


class ItemReference(Body, tag="item_reference", frozen=True, kw_only=True): ...


class HostedOutput(Body, tag="segue:tool_output", frozen=True, kw_only=True):
    """The output of one of our own tools, for the model. It follows the call in the history, and no client sees it: the
    client has the call's own item. `call_id` is the id of the item in which the model made the call."""

    call_id: str
    output: str


_Talk = Message | FunctionCall | FunctionCallOutput | CustomToolCall | CustomToolCallOutput
_Hosted = Reasoning | WebSearchCall | FileSearchCall | CodeInterpreterCall | ImageGenerationCall
_Computer = ComputerCall | ComputerCallOutput
_Mcp = McpListTools | McpCall | McpApprovalRequest | McpApprovalResponse
_Shell = ShellCall | ShellCallOutput | LocalShellCall | LocalShellCallOutput
_Tools = ApplyPatchCall | ApplyPatchCallOutput | ToolSearchCall | ToolSearchOutput | AdditionalTools
_Program = ConfigurationUpdate | Program | ProgramOutput
_Other = Compaction | CompactionSummary | CompactionTrigger | ItemReference | HostedOutput
ItemValue = _Talk | _Hosted | _Computer | _Mcp | _Shell | _Tools | _Program | _Other

# Calls that the client always answers, by their call_id.
_NamedCall = FunctionCall | CustomToolCall
ClientCall = _NamedCall | ComputerCall | ShellCall | LocalShellCall | ApplyPatchCall


class Item(Struct, frozen=True, gc=False):
    """The bytes of an item as they came or will leave, and what they mean."""

    raw: bytes
    value: ItemValue


# What an item costs beside its bytes: the objects themselves. And a value in a list of it, however short it is.
ITEM_BYTES, VALUE_BYTES = 500, 60


def weigh(items: Iterable[Item]) -> int:
    """What these items hold in memory: their bytes, and a typed form whose text is as long, or longer where it is not
    ASCII."""
    items = [*items]
    raws = [item.raw for item in items]
    longer = sum(map(len, filterfalse(bytes.isascii, raws)))
    inside = sum([weigh_values(item.value) for item in items])
    return ITEM_BYTES * len(raws) + 2 * sum(map(len, raws)) + longer + inside


def weigh_values(value: ItemValue) -> int:
    """What the values in the lists of an item hold beside their bytes. Most items have none, or parts."""
    parts: str | Sequence[object]
    match value:
        case FunctionCall() | CustomToolCall():
            return 0
        case Reasoning():
            parts = (*value.summary, *(value.content or ()))
        case Message():
            parts = value.content
        case FunctionCallOutput() | CustomToolCallOutput():
            parts = value.output
        case _:
            return VALUE_BYTES * _count(value)
    if isinstance(parts, str):
        return 0
    marks = 0
    for part in parts:
        if isinstance(part, OutputText):
            marks += len(part.annotations or ()) + len(part.logprobs or ())
    return VALUE_BYTES * (len(parts) + marks)


def _count(value: object) -> int:
    """How many values stand in the lists and dictionaries of this."""
    match value:
        case list() | tuple():
            return len(value) + sum(map(_count, value))
        case dict():
            return 2 * len(value)
        case Struct():
            # A tool has many fields, of which most are left out.
            own = 2 if isinstance(value, FunctionTool | CustomTool) else 0
            return own + sum(_count(getattr(value, name)) for name in value.__struct_fields__)
        case _:
            return 0


class Call(NamedTuple):
    """A call that the client may answer, and must unless it is asynchronous or was cut off."""

    call_id: str
    kind: str
    is_optional: bool = False


class CallOutput(NamedTuple):
    """The call that an output answers: `call_id` is None where the type allows leaving it out."""

    call_id: str | None
    kind: str


class Required(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client owes for a call, in outline (docs/protocol.md 6.10)."""

    type: str
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    execution: Literal["client"] | UnsetType = UNSET
    approval_request_id: str | UnsetType = UNSET


def contains_media(items: Iterable[Item]) -> bool:
    """Whether there are files, images or audio among the contents of these items."""
    return any(
        isinstance(part, InputFile | InputImage | InputAudio)
        for item in items
        for part in _parts(item.value)
    )


def _parts(value: ItemValue) -> Sequence[object]:
    match value:
        case (
            Message(content=list() as parts)
            | FunctionCallOutput(output=list() as parts)
            | CustomToolCallOutput(output=list() as parts)
        ):
            return parts
        case _:
            return ()


def count_media(value: ItemValue, sees_images: bool = False) -> int:
    """How many images and sounds this item contains that a model is not shown."""
    return sum(
        isinstance(part, InputAudio)
        or (isinstance(part, InputImage) and not (sees_images and part.data_url))
        for part in _parts(value)
    )
