"""What kind of item is this? One row for each item type, and all that the server knows of the type stands in it.

A row says: the prefix of its ids; whether it is a call or an output, who answers it and in which words an error speaks
of it; whether the model writes it and how it is shown to the model; how it is built from what the model wrote and which
events say so; what our own tools do with it. Whoever needs one of these facts looks it up here, by the struct
(`kind_of`) or by the name that a reader gives to an item (`kind_named`).

A new item type is a struct in `items`, its events in `events`, and a row here. No field of a row has a default; a
struct without a row, two rows of one name or prefix, and an output without its call are errors at import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypedDict, TypeVar, cast, get_args

import msgspec
from msgspec import UNSET, Raw, Struct, structs

from segue.wire.calls import (
    local_shell_action,
    patch_operation,
    search_arguments,
    shell_action,
)
from segue.wire.codec import encode
from segue.wire.events import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPart,
    CustomInputDelta,
    CustomInputDone,
    Inside,
    McpArgumentsDelta,
    McpArgumentsDone,
    McpCallCompleted,
    McpCallFailed,
    McpCallInProgress,
    McpListCompleted,
    McpListFailed,
    McpListInProgress,
    Numbered,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    SummaryTextDelta,
    SummaryTextDone,
    WebSearchCompleted,
    WebSearchInProgress,
    WebSearchSearching,
)
from segue.wire.items import (
    AdditionalTools,
    ApplyPatchCall,
    ApplyPatchCallOutput,
    Body,
    Call,
    CallOutput,
    CodeInterpreterCall,
    Compaction,
    CompactionSummary,
    CompactionTrigger,
    ComputerCall,
    ComputerCallOutput,
    ConfigurationUpdate,
    CustomToolCall,
    CustomToolCallOutput,
    DeleteFile,
    FileSearchCall,
    FunctionCall,
    FunctionCallOutput,
    HostedOutput,
    ImageGenerationCall,
    ItemReference,
    ItemStatus,
    ItemValue,
    LocalShellCall,
    LocalShellCallOutput,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    McpListTools,
    Message,
    OutputText,
    Program,
    ProgramOutput,
    Reasoning,
    ReasoningText,
    Required,
    ShellCall,
    ShellCallOutput,
    SummaryText,
    ToolSearchCall,
    ToolSearchOutput,
    WebSearchCall,
)
from segue.wire.mcp import error_of
from segue.wire.tools import CallKind, Execution
from segue.wire.web import called_by, read_action

V = TypeVar("V", bound=Body)
C = TypeVar(
    "C", FunctionCall, CustomToolCall, ComputerCall, ShellCall, LocalShellCall, ApplyPatchCall
)
R = TypeVar("R")

# What an item is to a model; "nothing" where it says what the model knows already.
Shown = Literal["nothing", "think", "talk", "call", "response", "user", "system", "tools"]
# Whose output a call waits for. "both": the client approves, and then our own tool answers.
AnsweredBy = Literal["client", "server", "both", "nobody"]
ReasoningView = Literal["text", "summary", "hidden"]

LOCAL = Raw(b'{"type":"local"}')
NO_ARGUMENTS = Raw(b"{}")
STOPPED = Raw(b'"The response ended before the server had answered."')


# --- what a row consists of ------------------------------------------------------------------------


class Draft(Struct, frozen=True, kw_only=True):
    """What the model has written of an item so far, and what we have given to it."""

    id: str
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    is_async: bool = False
    execution: Execution | None = None
    text: str = ""
    status: ItemStatus = "in_progress"
    # Whether this is the item as `output_item.added` has it; most are empty there.
    is_added: bool = True
    logprobs: list[Raw] = []
    annotations: list[Raw] = []
    commands: list[str] = []


class Where(TypedDict):
    """What every event inside an item says."""

    sequence_number: int
    item_id: str
    output_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEvents:
    """The events of a text that the client reads as it is written."""

    delta: type[Numbered]
    # What every delta says beside its item and its text.
    place: Mapping[str, int | list[Raw]]
    done: Callable[[Where, Draft], Numbered]
    # The content part around the text.
    part: Callable[[Draft], ContentPart | SummaryText] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """How an item comes about that the model writes."""

    # What the client reads meanwhile: the text, the commands of a shell one by one, or nothing until it is done. An
    # item that is held is not even added before its arguments are whole, because its fields are made of them.
    progress: TextEvents | Literal["commands", "nothing", "held"]
    build: Callable[[Draft], ItemValue]


class ToolRequest(Struct, frozen=True):
    """What a tool of ours is asked: by which definition of the request, which function of it, with which arguments."""

    definition: str
    function: str
    arguments: str


class Outline(Struct, frozen=True):
    """Just enough of an output item to know whether one of our own tools answered it."""

    type: str | None = None
    status: str | None = None
    execution: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedWork(Generic[V]):
    """What one of our own tools does with an item."""

    # Its key among the tools that the server runs.
    tool: str
    begun: tuple[type[Inside], ...]
    ended: Callable[[V], type[Inside]]
    request: Callable[[V], ToolRequest]
    failed: Callable[[V, str, int], V]
    # The item when the response ends before the tool does.
    stopped: Callable[[V], V]
    # The item without its arguments, and these: where no model writes the item, they follow in events all the same.
    apart: Callable[[V], tuple[V, str]] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPairing(Generic[V]):
    """A call, for which an output is owed."""

    call_id: Callable[[V], str | None]
    answered_by: Callable[[V], AnsweredBy]
    # The outline of the output that the client owes; None where it never owes one.
    required: Callable[[V], Required] | None
    # Which function it calls, by the one name that the model sees; empty where the type of the item says it.
    called: Callable[[V], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPairing(Generic[V]):
    """An output, which answers a call."""

    # The name of the kind of call; None where our own tools answer calls of several kinds.
    to: str | None
    call_id: Callable[[V], str | None]
    is_from_client: Callable[[V], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[V]):
    """One item type."""

    struct: type[V]
    # What readers, tools and pairs call it.
    name: str
    # Of the ids that we make; None where only clients make such an item.
    prefix: str | None
    pairing: CallPairing[V] | OutputPairing[V] | None
    is_model_written: Callable[[V], bool]
    shown: Callable[[V], Shown]
    streamed: Streamed | None
    hosted: HostedWork[V] | None
    # Whether usage counts it, once it is done, as a tool call that this server has answered.
    is_tool_use: Callable[[Outline], bool]

    @property
    def type(self) -> str:
        """The word on the wire."""
        return _tag(self.struct)

    @property
    def words(self) -> str:
        """The type in an error message."""
        return self.type.replace("_", " ").replace("mcp", "MCP")


AnyKind = Kind[ItemValue]


def _tag(struct: type[Struct]) -> str:
    return str(struct.__struct_config__.tag)


# --- how rows are made: what all rows of a sort have in common ------------------------------------


def _always(fact: R) -> Callable[[object], R]:
    return lambda value: fact


YES, NO = _always(True), _always(False)
CALL: Callable[[object], Shown] = _always("call")
RESPONSE: Callable[[object], Shown] = _always("response")
SYSTEM: Callable[[object], Shown] = _always("system")
CLIENT: Callable[[object], AnsweredBy] = _always("client")
SERVER: Callable[[object], AnsweredBy] = _always("server")
NAMELESS = _always("")


def _any(kind: Kind[V]) -> AnyKind:
    """The type checker has seen that a row fits its struct; from here on the look-up by struct sees to it."""
    return cast("AnyKind", kind)


def _call(
    struct: type[V],
    name: str,
    prefix: str | None,
    *,
    call_id: Callable[[V], str | None],
    answered_by: Callable[[V], AnsweredBy],
    required: Callable[[V], Required] | None,
    called: Callable[[V], str],
    streamed: Streamed | None,
    hosted: HostedWork[V] | None,
    is_tool_use: Callable[[Outline], bool],
    is_model_written: Callable[[V], bool] = YES,
    shown: Callable[[V], Shown] = CALL,
) -> AnyKind:
    pairing = CallPairing(
        call_id=call_id, answered_by=answered_by, required=required, called=called
    )
    return _any(
        Kind(
            struct=struct,
            name=name,
            prefix=prefix,
            pairing=pairing,
            is_model_written=is_model_written,
            shown=shown,
            streamed=streamed,
            hosted=hosted,
            is_tool_use=is_tool_use,
        )
    )


def _client_call(
    struct: type[C],
    name: str,
    prefix: str | None,
    *,
    called: Callable[[C], str],
    streamed: Streamed | None,
) -> AnyKind:
    """A call that the client answers, by its call_id."""

    def required(value: C) -> Required:
        function = value.name if isinstance(value, FunctionCall) else UNSET
        return Required(type=f"{_tag(struct)}_output", call_id=value.call_id, name=function)

    return _call(
        struct,
        name,
        prefix,
        call_id=lambda value: value.call_id,
        answered_by=CLIENT,
        required=required,
        called=called,
        streamed=streamed,
        hosted=None,
        is_tool_use=NO,
    )


def _foreign_call(struct: type[V], call_id: Callable[[V], str | None]) -> AnyKind:
    """A call that another server made and answered: it is accepted and shown."""
    return _call(
        struct,
        _tag(struct),
        None,
        call_id=call_id,
        answered_by=_always("nobody"),
        required=None,
        called=NAMELESS,
        streamed=None,
        hosted=None,
        is_tool_use=NO,
    )


def _output(
    struct: type[V],
    to: str | None,
    *,
    call_id: Callable[[V], str | None],
    is_from_client: Callable[[V], bool],
    prefix: str | None = None,
    shown: Callable[[V], Shown] = RESPONSE,
    is_tool_use: Callable[[Outline], bool] = NO,
) -> AnyKind:
    pairing = OutputPairing(to=to, call_id=call_id, is_from_client=is_from_client)
    return _plain(struct, prefix, shown=shown, pairing=pairing, is_tool_use=is_tool_use)


def _plain(
    struct: type[V],
    prefix: str | None,
    *,
    shown: Callable[[V], Shown],
    is_model_written: Callable[[V], bool] = NO,
    pairing: OutputPairing[V] | None = None,
    streamed: Streamed | None = None,
    hosted: HostedWork[V] | None = None,
    is_tool_use: Callable[[Outline], bool] = NO,
) -> AnyKind:
    """An item that is no call; its name is its type."""
    return _any(
        Kind(
            struct=struct,
            name=_tag(struct),
            prefix=prefix,
            pairing=pairing,
            is_model_written=is_model_written,
            shown=shown,
            streamed=streamed,
            hosted=hosted,
            is_tool_use=is_tool_use,
        )
    )


# --- texts, and items made of what the model wrote ------------------------------------------------

MESSAGE_TEXT = TextEvents(
    delta=OutputTextDelta,
    place={"content_index": 0, "logprobs": []},
    done=lambda at, draft: OutputTextDone(
        **at, content_index=0, text=draft.text, logprobs=draft.logprobs
    ),
    part=lambda draft: _output_text(draft),
)
REASONING_TEXT = TextEvents(
    delta=ReasoningTextDelta,
    place={"content_index": 0},
    done=lambda at, draft: ReasoningTextDone(**at, content_index=0, text=draft.text),
    part=lambda draft: ReasoningText(text=draft.text),
)
SUMMARY_TEXT = TextEvents(
    delta=SummaryTextDelta,
    place={"summary_index": 0},
    done=lambda at, draft: SummaryTextDone(**at, summary_index=0, text=draft.text),
    part=lambda draft: SummaryText(text=draft.text),
)
FUNCTION_ARGUMENTS = TextEvents(
    delta=ArgumentsDelta,
    place={},
    done=lambda at, draft: ArgumentsDone(**at, arguments=draft.text),
    part=None,
)
CUSTOM_INPUT = TextEvents(
    delta=CustomInputDelta,
    place={},
    done=lambda at, draft: CustomInputDone(**at, input=draft.text),
    part=None,
)
MCP_ARGUMENTS = TextEvents(
    delta=McpArgumentsDelta,
    place={},
    done=lambda at, draft: McpArgumentsDone(**at, arguments=draft.text),
    part=None,
)


def _output_text(draft: Draft) -> OutputText:
    return OutputText(text=draft.text, annotations=draft.annotations, logprobs=draft.logprobs)


def _message(draft: Draft) -> Message:
    content = [] if draft.is_added else [_output_text(draft)]
    return Message(id=draft.id, status=draft.status, role="assistant", content=[*content])


def _reasoning_text(draft: Draft) -> Reasoning:
    content = UNSET if draft.is_added else [ReasoningText(text=draft.text)]
    return Reasoning(id=draft.id, content=content)


def _reasoning_summary(draft: Draft) -> Reasoning:
    return Reasoning(id=draft.id, summary=[] if draft.is_added else [SummaryText(text=draft.text)])


# Reasoning as the operator lets clients see it.
REASONING: dict[ReasoningView, Streamed] = {
    "text": Streamed(progress=REASONING_TEXT, build=_reasoning_text),
    "summary": Streamed(progress=SUMMARY_TEXT, build=_reasoning_summary),
    "hidden": Streamed(progress="nothing", build=lambda draft: Reasoning(id=draft.id)),
}


class _CallFields(TypedDict):
    id: str
    status: ItemStatus
    call_id: str


def _call_fields(draft: Draft) -> _CallFields:
    return {"id": draft.id, "status": draft.status, "call_id": draft.call_id}


def _function_call(draft: Draft) -> FunctionCall:
    return FunctionCall(
        **_call_fields(draft),
        name=draft.name,
        arguments=draft.text,
        namespace=draft.namespace or UNSET,
        is_async=True if draft.is_async else UNSET,
    )


def _custom_call(draft: Draft) -> CustomToolCall:
    return CustomToolCall(
        **_call_fields(draft),
        name=draft.name,
        input=draft.text,
        namespace=draft.namespace or UNSET,
        is_async=True if draft.is_async else UNSET,
    )


def _shell_call(draft: Draft) -> ShellCall:
    return ShellCall(
        **_call_fields(draft),
        action=shell_action(draft.text, draft.commands),
        environment=LOCAL,
    )


def _local_shell_call(draft: Draft) -> LocalShellCall:
    return LocalShellCall(**_call_fields(draft), action=local_shell_action(draft.text))


def _apply_patch_call(draft: Draft) -> ApplyPatchCall:
    operation = patch_operation(draft.text)
    if draft.is_added and not isinstance(operation, DeleteFile):
        operation = structs.replace(operation, diff="")
    call = ApplyPatchCall(**_call_fields(draft), operation=operation)
    # This item knows no third status: one that is not whole is still in progress.
    return structs.replace(call, status="in_progress") if draft.status == "incomplete" else call


def _tool_search_call(draft: Draft) -> ToolSearchCall:
    return ToolSearchCall(
        id=draft.id,
        status=draft.status,
        call_id=draft.call_id or None,
        execution=draft.execution or "server",
        arguments=NO_ARGUMENTS if draft.is_added else search_arguments(draft.text),
    )


def _mcp_call(draft: Draft) -> McpCall:
    return McpCall(
        id=draft.id,
        status=draft.status,
        server_label=draft.namespace or "",
        name=draft.name,
        arguments=draft.text,
    )


def _mcp_approval_request(draft: Draft) -> McpApprovalRequest:
    return McpApprovalRequest(
        id=draft.id,
        server_label=draft.namespace or "",
        name=draft.name,
        arguments="" if draft.is_added else draft.text,
    )


def _web_search_call(draft: Draft) -> WebSearchCall:
    action = Raw(encode(read_action(draft.name, draft.text)))
    return WebSearchCall(id=draft.id, status=draft.status, action=action)


# --- our own tools --------------------------------------------------------------------------------


def _is_ended_call(outline: Outline) -> bool:
    return outline.status in ("completed", "failed")


def _web_request(value: WebSearchCall) -> ToolRequest:
    action = bytes(value.action).decode() if isinstance(value.action, Raw) else "{}"
    return ToolRequest("web_search", "web_search", action)


def _failed_mcp_call(value: McpCall, message: str, code: int) -> McpCall:
    error = error_of("mcp_protocol_error", message, code)
    return structs.replace(value, status="failed", error=error)


MCP_CALL_WORK: HostedWork[McpCall] = HostedWork(
    tool="mcp",
    begun=(McpCallInProgress,),
    ended=lambda value: McpCallCompleted if value.status == "completed" else McpCallFailed,
    request=lambda value: ToolRequest(value.server_label, value.name, value.arguments),
    failed=_failed_mcp_call,
    stopped=lambda value: structs.replace(value, status="incomplete"),
    apart=lambda value: (structs.replace(value, arguments=""), value.arguments),
)
MCP_LIST_WORK: HostedWork[McpListTools] = HostedWork(
    tool="mcp_list",
    begun=(McpListInProgress,),
    ended=lambda value: McpListFailed if isinstance(value.error, Raw) else McpListCompleted,
    request=lambda value: ToolRequest(value.server_label, "", ""),
    failed=lambda value, message, _: structs.replace(value, error=Raw(encode(message))),
    stopped=lambda value: structs.replace(value, error=STOPPED),
    apart=None,
)
WEB_SEARCH_WORK: HostedWork[WebSearchCall] = HostedWork(
    tool="web_search",
    begun=(WebSearchInProgress, WebSearchSearching),
    ended=_always(WebSearchCompleted),
    request=_web_request,
    failed=lambda value, message, code: structs.replace(value, status="failed"),
    stopped=lambda value: structs.replace(value, status="incomplete"),
    apart=None,
)


# --- the table ------------------------------------------------------------------------------------


def _shown_message(value: Message) -> Shown:
    shown: dict[str, Shown] = {"assistant": "talk", "user": "user"}
    return shown.get(value.role, "system")


def _qualified(value: FunctionCall | CustomToolCall) -> str:
    return f"{value.namespace}.{value.name}" if value.namespace else value.name


def _of_server(value: McpCall | McpApprovalRequest) -> str:
    return f"{value.server_label}.{value.name}"


def _search_id(value: ToolSearchCall | ToolSearchOutput) -> str | None:
    """Our own searches have no call_id: call and output have the same letters after their prefix."""
    if value.call_id or value.execution != "server" or not value.id:
        return value.call_id or None
    return f"search_{value.id.rpartition('_')[2]}"


ROWS: tuple[AnyKind, ...] = (
    _plain(
        Message,
        "msg",
        shown=_shown_message,
        is_model_written=lambda value: value.role == "assistant",
        streamed=Streamed(progress=MESSAGE_TEXT, build=_message),
    ),
    _plain(
        Reasoning,
        "rs",
        shown=_always("think"),
        is_model_written=YES,
        streamed=REASONING["text"],
    ),
    _client_call(
        FunctionCall,
        "function",
        "fc",
        called=_qualified,
        streamed=Streamed(progress=FUNCTION_ARGUMENTS, build=_function_call),
    ),
    _output(
        FunctionCallOutput,
        "function",
        call_id=lambda value: value.call_id or None,
        is_from_client=YES,
    ),
    _client_call(
        CustomToolCall,
        "custom",
        "ctc",
        called=_qualified,
        streamed=Streamed(progress=CUSTOM_INPUT, build=_custom_call),
    ),
    _output(
        CustomToolCallOutput,
        "custom",
        call_id=lambda value: value.call_id or None,
        is_from_client=YES,
    ),
    _client_call(ComputerCall, "computer", None, called=NAMELESS, streamed=None),
    _output(
        ComputerCallOutput, "computer", call_id=lambda value: value.call_id, is_from_client=YES
    ),
    _client_call(
        ShellCall,
        "shell",
        "sh",
        called=NAMELESS,
        streamed=Streamed(progress="commands", build=_shell_call),
    ),
    _output(ShellCallOutput, "shell", call_id=lambda value: value.call_id, is_from_client=YES),
    _client_call(
        LocalShellCall,
        "local_shell",
        "lsh",
        called=NAMELESS,
        streamed=Streamed(progress="held", build=_local_shell_call),
    ),
    _output(
        LocalShellCallOutput,
        "local_shell",
        # The older type has no call_id of its own: its id names the call.
        call_id=lambda value: value.call_id or value.id or None,
        is_from_client=YES,
    ),
    _client_call(
        ApplyPatchCall,
        "apply_patch",
        "apc",
        called=NAMELESS,
        streamed=Streamed(progress="held", build=_apply_patch_call),
    ),
    _output(
        ApplyPatchCallOutput, "apply_patch", call_id=lambda value: value.call_id, is_from_client=YES
    ),
    _call(
        ToolSearchCall,
        "tool_search",
        "tsc",
        call_id=_search_id,
        answered_by=lambda value: "server" if value.execution == "server" else "client",
        required=lambda value: Required(
            type="tool_search_output", call_id=value.call_id or "", execution="client"
        ),
        called=NAMELESS,
        streamed=Streamed(progress="nothing", build=_tool_search_call),
        hosted=None,
        # Its output is counted.
        is_tool_use=NO,
    ),
    _output(
        ToolSearchOutput,
        "tool_search",
        prefix="tso",
        call_id=_search_id,
        is_from_client=lambda value: value.execution != "server",
        is_tool_use=lambda outline: outline.execution == "server",
    ),
    _call(
        McpCall,
        "mcp",
        "mcp",
        # The model made an approved call when it asked for the approval.
        call_id=lambda value: None if value.approval_request_id else value.id or None,
        answered_by=SERVER,
        required=None,
        called=_of_server,
        streamed=Streamed(progress=MCP_ARGUMENTS, build=_mcp_call),
        hosted=MCP_CALL_WORK,
        is_tool_use=_is_ended_call,
        is_model_written=lambda value: not value.approval_request_id,
        shown=lambda value: "nothing" if isinstance(value.approval_request_id, str) else "call",
    ),
    _call(
        McpApprovalRequest,
        "mcp_approval",
        "mcpr",
        call_id=lambda value: value.id or None,
        answered_by=_always("both"),
        required=lambda value: Required(
            type="mcp_approval_response", approval_request_id=value.id or ""
        ),
        called=_of_server,
        streamed=Streamed(progress="held", build=_mcp_approval_request),
        hosted=None,
        is_tool_use=NO,
    ),
    _output(
        McpApprovalResponse,
        "mcp_approval",
        call_id=lambda value: value.approval_request_id,
        is_from_client=YES,
        # What an approved call returns follows it.
        shown=lambda value: "nothing" if value.approve else "response",
    ),
    # What servers have listed is among the tools.
    _plain(McpListTools, "mcpl", shown=_always("nothing"), hosted=MCP_LIST_WORK),
    _call(
        WebSearchCall,
        "web_search",
        "ws",
        call_id=lambda value: value.id or None,
        answered_by=SERVER,
        required=None,
        called=lambda value: called_by(value.action) if isinstance(value.action, Raw) else "",
        streamed=Streamed(progress="held", build=_web_search_call),
        hosted=WEB_SEARCH_WORK,
        is_tool_use=_is_ended_call,
        shown=lambda value: "call" if isinstance(value.action, Raw) else "nothing",
    ),
    _output(HostedOutput, None, call_id=lambda value: value.call_id, is_from_client=NO),
    _foreign_call(FileSearchCall, _always(None)),
    _foreign_call(CodeInterpreterCall, _always(None)),
    _foreign_call(ImageGenerationCall, _always(None)),
    _foreign_call(Program, lambda value: value.call_id or None),
    _output(
        ProgramOutput, "program", call_id=lambda value: value.call_id or None, is_from_client=NO
    ),
    _plain(AdditionalTools, None, shown=_always("tools")),
    _plain(ConfigurationUpdate, None, shown=SYSTEM),
    _plain(Compaction, "cmp", shown=SYSTEM),
    _plain(CompactionSummary, None, shown=SYSTEM),
    _plain(CompactionTrigger, None, shown=SYSTEM),
    _plain(ItemReference, None, shown=SYSTEM),
)


def table(rows: Iterable[AnyKind], structs: Iterable[type[Struct]]) -> dict[type, AnyKind]:
    """The rows by their structs, if there is exactly one for each and they agree with one another."""
    kinds = {kind.struct: kind for kind in rows}
    names = [kind.name for kind in kinds.values()]
    prefixes = [kind.prefix for kind in kinds.values() if kind.prefix]
    answered = {
        kind.pairing.to for kind in kinds.values() if isinstance(kind.pairing, OutputPairing)
    }
    owed = {kind.name for kind in kinds.values() if _is_owed(kind)}
    for what, wrong in (
        ("item types without a row, or rows without a type", kinds.keys() ^ set(structs)),
        ("names of several rows", {one for one in names if names.count(one) > 1}),
        ("prefixes of several rows", {one for one in prefixes if prefixes.count(one) > 1}),
        ("outputs without their call", answered - {None} - set(names)),
        ("calls that the client owes an output that does not exist", owed - answered),
    ):
        if wrong:
            raise TypeError(f"wire/kinds.py has {what}: {wrong}")
    return {**kinds}


def _is_owed(kind: AnyKind) -> bool:
    return isinstance(kind.pairing, CallPairing) and kind.pairing.required is not None


_kinds = table(ROWS, get_args(ItemValue))
_named = {kind.name: kind for kind in ROWS}
_typed = {kind.type: kind for kind in ROWS}
# The words of the two pairing errors (docs/protocol.md 9 row 18), by kind of call.
CALL_WORDS = {
    call.name: (call.words, output.words)
    for output in ROWS
    if isinstance(output.pairing, OutputPairing) and output.pairing.to is not None
    for call in [_named[output.pairing.to]]
}


# --- look-ups -------------------------------------------------------------------------------------


def kind_of(value: ItemValue) -> AnyKind:
    """The row of an item."""
    return _kinds[type(value)]


def kind_named(name: Literal["message", "reasoning"] | CallKind) -> AnyKind:
    """The row of an item that the model opens."""
    return _named[name]


def prefix_of(struct: type[ItemValue]) -> str:
    """What the ids of items that we make begin with."""
    prefix = _kinds[struct].prefix
    assert prefix is not None, f"{struct.__name__} is made by clients only"
    return prefix


def call_of(value: ItemValue) -> Call | None:
    """The call that the client must answer, if this item is one."""
    kind = kind_of(value)
    pairing = kind.pairing
    if not isinstance(pairing, CallPairing) or pairing.answered_by(value) not in ("client", "both"):
        return None
    call_id = pairing.call_id(value)
    if call_id is None:
        return None
    return Call(call_id, kind.name, getattr(value, "is_async", None) is True)


def answer_of(value: ItemValue) -> CallOutput | None:
    """The call that this item of a client answers, if it answers one."""
    pairing = kind_of(value).pairing
    if not isinstance(pairing, OutputPairing) or not pairing.is_from_client(value):
        return None
    assert pairing.to is not None, "what a client answers has a kind"
    return CallOutput(pairing.call_id(value), pairing.to)


def required_by(value: ItemValue) -> Required | None:
    """The outline of the output that the client owes now; none for a call that need not be answered yet."""
    call, pairing = call_of(value), kind_of(value).pairing
    if call is None or call.is_async or not isinstance(pairing, CallPairing):
        return None
    assert pairing.required is not None, "what a client owes has an outline"
    return pairing.required(value)


def hosted_call_of(value: ItemValue) -> str | None:
    """The id of a call that our own tools answer, as `HostedOutput` names it."""
    pairing = kind_of(value).pairing
    if not isinstance(pairing, CallPairing):
        return None
    return pairing.call_id(value) if pairing.answered_by(value) in ("server", "both") else None


def call_id_of(value: ItemValue) -> str:
    """The id that joins a call and its output, whoever answers; empty where there is none."""
    pairing = kind_of(value).pairing
    return (pairing.call_id(value) or "") if pairing is not None else ""


def called(value: ItemValue) -> str:
    """Which function a call calls, by the one name that the model sees; empty where the item alone does not say."""
    pairing = kind_of(value).pairing
    return pairing.called(value) if isinstance(pairing, CallPairing) else ""


def is_call(value: ItemValue) -> bool:
    """Whether this item is a call, whoever answers it."""
    return isinstance(kind_of(value).pairing, CallPairing)


def is_output(value: ItemValue) -> bool:
    """Whether this item answers a call, whoever wrote it."""
    return isinstance(kind_of(value).pairing, OutputPairing)


def is_model_written(value: ItemValue) -> bool:
    """Whether the model wrote this item: neighbours of this sort belong to one model turn."""
    return kind_of(value).is_model_written(value)


def shown_as(value: ItemValue) -> Shown:
    """What this item is to a model."""
    return kind_of(value).shown(value)


def hosted_work(value: ItemValue) -> HostedWork[ItemValue]:
    """What our own tools do with this item, which is one of theirs."""
    hosted = kind_of(value).hosted
    assert hosted is not None, f"no tool of ours works on a {kind_of(value).type}"
    return hosted


def is_pending(value: ItemValue) -> bool:
    """Whether the model has made this call of one of our own tools, and it is not answered yet."""
    kind = kind_of(value)
    is_ours = kind.hosted is not None and kind.streamed is not None
    return is_ours and getattr(value, "status", None) == "in_progress"


_outline = msgspec.json.Decoder(Outline)


def is_hosted_result(output: Raw) -> bool:
    """Whether one of our own tools has answered this output item, as usage counts it."""
    outline = _outline.decode(output)
    kind = _typed.get(outline.type or "")
    return kind is not None and kind.is_tool_use(outline)
