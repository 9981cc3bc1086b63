"""What kind of item is this? One row for each item type, with everything that the server knows about the type.

A row has: the prefix of its ids; whether it is a call or an output, and who answers it; whether the model writes it and
how it is shown to a model; how it is built from what the model wrote. All other files look these facts up here, by the
item's struct (`KINDS`) or by the name under which a reader opens it (`NAMED`). What a tool of this server does with an
item is not known here: that is a row of the tool (`seams/tools.py`).

A new item type is a struct in `items`, its events in `events`, its draft in `drafts` if the model writes it, and a row
here. No field of a row has a default; a struct without a row, two rows with one name or prefix, and an output without
its call are errors at import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, cast, get_args

import msgspec
from msgspec import UNSET, Raw, Struct

from segue.wire import drafts, items
from segue.wire.calls import PYTHON, web_function
from segue.wire.items import ItemValue, Required

V = TypeVar("V", bound=items.Body)
C = TypeVar("C", bound=items.ClientCall)
R = TypeVar("R")

# What an item is to a model; "nothing" where the model knows it from elsewhere.
Shown = Literal["nothing", "think", "talk", "call", "response", "user", "system", "tools"]
# Whose output a call waits for. "both": the client approves, and then our own tool answers.
AnsweredBy = Literal["client", "server", "both", "none"]

# --- what a row consists of ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallPairing(Generic[V]):
    """A call, for which an output is owed."""

    call_id: Callable[[V], str | None]
    answered_by: Callable[[V], AnsweredBy]
    # The outline of the output that the client owes now, if it owes one; None where it never does.
    required: Callable[[V], Required | None] | None
    # Which function it calls, by the one name that the model sees; empty where the type of the item is the name.
    called: Callable[[V], str]


@dataclass(frozen=True, slots=True)
class OutputPairing(Generic[V]):
    """An output, which answers a call."""

    # The name of the kind of call; None where our own tools answer calls of several kinds.
    to: str | None
    call_id: Callable[[V], str | None]
    is_from_client: Callable[[V], bool]


@dataclass(frozen=True, slots=True)
class ItemKind(Generic[V]):
    """One item type."""

    struct: type[V]
    # What readers, tools and pairs call it.
    name: str
    # Of the ids that we make; None where only clients make such an item.
    prefix: str | None
    pairing: CallPairing[V] | OutputPairing[V] | None
    is_model_written: Callable[[V], bool]
    shown: Callable[[V], Shown]
    streamed: drafts.Streamed | None

    @property
    def type(self) -> str:
        """The word on the wire."""
        return _tag(self.struct)


AnyItemKind = ItemKind[ItemValue]


def _tag(struct: type[Struct]) -> str:
    return str(struct.__struct_config__.tag)


# --- how rows are made: what all rows of a sort have in common ------------------------------------


def _always(fact: R) -> Callable[[object], R]:
    return lambda value: fact


YES, NO = _always(True), _always(False)
THINK: Callable[[object], Shown] = _always("think")
CALL: Callable[[object], Shown] = _always("call")
RESPONSE: Callable[[object], Shown] = _always("response")
SYSTEM: Callable[[object], Shown] = _always("system")
CLIENT: Callable[[object], AnsweredBy] = _always("client")
SERVER: Callable[[object], AnsweredBy] = _always("server")
BOTH: Callable[[object], AnsweredBy] = _always("both")
NAMELESS, NO_ID = _always(""), _always(None)


def _client_call(
    struct: type[C],
    name: str,
    prefix: str | None,
    streamed: drafts.Streamed | None,
    called: Callable[[C], str] = NAMELESS,
) -> ItemKind[C]:
    """A call that the client answers, by its call_id."""
    output = f"{_tag(struct)}_output"

    def required(value: C) -> Required | None:
        if _is_optional(value):
            return None
        function = value.name if isinstance(value, items.FunctionCall) else UNSET
        return Required(type=output, call_id=value.call_id, name=function)

    pairing: CallPairing[C] = CallPairing(lambda value: value.call_id, CLIENT, required, called)
    return ItemKind(struct, name, prefix, pairing, YES, CALL, streamed)


def _foreign_call(struct: type[V], call_id: Callable[[V], str | None] = NO_ID) -> ItemKind[V]:
    """A call that another server made and answered: it is accepted and shown."""
    pairing: CallPairing[V] = CallPairing(call_id, _always("none"), None, NAMELESS)
    return ItemKind(struct, _tag(struct), None, pairing, YES, CALL, None)


def _given(struct: type[V], prefix: str | None, shown: Callable[[V], Shown]) -> ItemKind[V]:
    """An item that no model writes: tools, a setting, a compaction."""
    return ItemKind(struct, _tag(struct), prefix, None, NO, shown, None)


def _output(
    struct: type[V],
    to: str | None,
    call_id: Callable[[V], str | None],
    *,
    prefix: str | None = None,
    is_from_client: Callable[[V], bool] = YES,
    shown: Callable[[V], Shown] = RESPONSE,
) -> ItemKind[V]:
    pairing = OutputPairing(to, call_id, is_from_client)
    return ItemKind(struct, _tag(struct), prefix, pairing, NO, shown, None)


# --- the table ------------------------------------------------------------------------------------


def _shown_message(value: items.Message) -> Shown:
    shown: dict[str, Shown] = {"assistant": "talk", "user": "user"}
    return shown.get(value.role, "system")


def _is_assistant(value: items.Message) -> bool:
    return value.role == "assistant"


def _qualified(value: items.FunctionCall | items.CustomToolCall) -> str:
    return f"{value.namespace}.{value.name}" if value.namespace else value.name


def _search_id(value: items.ToolSearchCall | items.ToolSearchOutput) -> str | None:
    """Our own searches have no call_id: call and output have the same letters after their prefix."""
    if value.call_id or value.execution != "server" or not value.id:
        return value.call_id or None
    return f"search_{value.id.rpartition('_')[2]}"


def _searched_by(value: items.ToolSearchCall) -> AnsweredBy:
    return "server" if value.execution == "server" else "client"


def _search_required(value: items.ToolSearchCall) -> Required | None:
    if value.execution == "server" or not value.call_id:
        return None
    return Required(type="tool_search_output", call_id=value.call_id, execution="client")


def _mcp_call_id(value: items.McpCall) -> str | None:
    # The model made an approved call when it asked for the approval.
    return None if value.approval_request_id else value.id or None


def _remote_name(value: items.McpCall | items.McpApprovalRequest) -> str:
    return f"{value.server_label}.{value.name}"


def _approval_required(value: items.McpApprovalRequest) -> Required | None:
    if not value.id:
        return None
    return Required(type="mcp_approval_response", approval_request_id=value.id)


def _python(value: items.CodeInterpreterCall) -> str:
    return PYTHON


def _web_function(value: items.WebSearchCall) -> str:
    return web_function(value.action) if isinstance(value.action, Raw) else ""


# The type checker sees that each row fits its struct; from then on the look-up by struct sees to it.
_rows = (
    ItemKind(items.Message, "message", "msg", None, _is_assistant, _shown_message, drafts.MESSAGE),
    ItemKind(items.Reasoning, "reasoning", "rs", None, YES, THINK, drafts.REASONING["text"]),
    _client_call(items.FunctionCall, "function", "fc", drafts.FUNCTION_CALL, _qualified),
    _output(items.FunctionCallOutput, "function", lambda value: value.call_id or None),
    _client_call(items.CustomToolCall, "custom", "ctc", drafts.CUSTOM_CALL, _qualified),
    _output(items.CustomToolCallOutput, "custom", lambda value: value.call_id or None),
    _client_call(items.ComputerCall, "computer", None, None),
    _output(items.ComputerCallOutput, "computer", lambda value: value.call_id),
    _client_call(items.ShellCall, "shell", "sh", drafts.SHELL_CALL),
    _output(items.ShellCallOutput, "shell", lambda value: value.call_id, prefix="sho"),
    _client_call(items.LocalShellCall, "local_shell", "lsh", drafts.LOCAL_SHELL_CALL),
    # The older type has no call_id of its own: its id names the call.
    _output(
        items.LocalShellCallOutput, "local_shell", lambda value: value.call_id or value.id or None
    ),
    _client_call(items.ApplyPatchCall, "apply_patch", "apc", drafts.APPLY_PATCH_CALL),
    _output(items.ApplyPatchCallOutput, "apply_patch", lambda value: value.call_id),
    ItemKind(
        items.ToolSearchCall,
        "tool_search",
        "tsc",
        CallPairing(_search_id, _searched_by, _search_required, NAMELESS),
        YES,
        CALL,
        drafts.TOOL_SEARCH_CALL,
    ),
    _output(
        items.ToolSearchOutput,
        "tool_search",
        _search_id,
        prefix="tso",
        is_from_client=lambda value: value.execution != "server",
    ),
    ItemKind(
        items.McpCall,
        "mcp",
        "mcp",
        CallPairing(_mcp_call_id, SERVER, None, _remote_name),
        lambda value: not value.approval_request_id,
        lambda value: "nothing" if isinstance(value.approval_request_id, str) else "call",
        drafts.MCP_CALL,
    ),
    ItemKind(
        items.McpApprovalRequest,
        "mcp_approval",
        "mcpr",
        CallPairing(lambda value: value.id or None, BOTH, _approval_required, _remote_name),
        YES,
        CALL,
        drafts.MCP_APPROVAL_REQUEST,
    ),
    _output(
        items.McpApprovalResponse,
        "mcp_approval",
        lambda value: value.approval_request_id,
        # What an approved call returns follows it.
        shown=lambda value: "nothing" if value.approve else "response",
    ),
    # What a server has listed is among the tools.
    _given(items.McpListTools, "mcpl", _always("nothing")),
    ItemKind(
        items.WebSearchCall,
        "web_search",
        "ws",
        CallPairing(lambda value: value.id or None, SERVER, None, _web_function),
        YES,
        lambda value: "call" if isinstance(value.action, Raw) else "nothing",
        drafts.WEB_SEARCH_CALL,
    ),
    ItemKind(
        items.CodeInterpreterCall,
        "code_interpreter",
        "ci",
        CallPairing(lambda value: value.id or None, SERVER, None, _python),
        YES,
        CALL,
        drafts.CODE_CALL,
    ),
    _output(items.HostedOutput, None, lambda value: value.call_id, is_from_client=NO),
    _foreign_call(items.FileSearchCall),
    _foreign_call(items.ImageGenerationCall),
    _foreign_call(items.Program, lambda value: value.call_id or None),
    _output(items.ProgramOutput, "program", lambda value: value.call_id or None, is_from_client=NO),
    _given(items.AdditionalTools, None, _always("tools")),
    _given(items.ConfigurationUpdate, None, SYSTEM),
    _given(items.Compaction, "cmp", SYSTEM),
    _given(items.CompactionSummary, None, SYSTEM),
    _given(items.CompactionTrigger, None, SYSTEM),
    _given(items.ItemReference, None, SYSTEM),
)
ROWS = cast("tuple[AnyItemKind, ...]", _rows)


def table(rows: Iterable[AnyItemKind], structs: Iterable[type[Struct]]) -> dict[type, AnyItemKind]:
    """The rows by their structs, if there is exactly one for each and they agree with one another."""
    kinds = {kind.struct: kind for kind in rows}
    names = [kind.name for kind in kinds.values()]
    prefixes = [kind.prefix for kind in kinds.values() if kind.prefix]
    pairings = [kind.pairing for kind in kinds.values()]
    answered = {pairing.to for pairing in pairings if isinstance(pairing, OutputPairing)}
    owed = {kind.name for kind in kinds.values() if _is_owed(kind)}
    for what, wrong in (
        ("item types without a row, or rows without a type", kinds.keys() ^ set(structs)),
        ("names of several rows", {name for name in names if names.count(name) > 1}),
        ("prefixes of several rows", {prefix for prefix in prefixes if prefixes.count(prefix) > 1}),
        ("outputs without their call", answered - {None} - set(names)),
        ("calls that the client owes an output that does not exist", owed - answered),
    ):
        if wrong:
            raise TypeError(f"wire/kinds.py has {what}: {wrong}")
    return {**kinds}


def _is_owed(kind: AnyItemKind) -> bool:
    return isinstance(kind.pairing, CallPairing) and kind.pairing.required is not None


KINDS = table(ROWS, get_args(ItemValue))
NAMED = {kind.name: kind for kind in ROWS}
_typed = {kind.type: kind for kind in ROWS}


def _words(kind: AnyItemKind) -> str:
    return kind.type.replace("_", " ").replace("mcp", "MCP")


# The words of the two pairing errors (docs/protocol.md 9 row 18), by kind of call.
CALL_WORDS = {
    call.name: (_words(call), _words(output))
    for output in ROWS
    if isinstance(output.pairing, OutputPairing) and output.pairing.to is not None
    if _is_owed(call := NAMED[output.pairing.to])
}


# --- look-ups -------------------------------------------------------------------------------------


def prefix_of(struct: type[ItemValue]) -> str:
    """What the ids of items that we make begin with."""
    prefix = KINDS[struct].prefix
    assert prefix is not None, f"{struct.__name__} is made by clients only"
    return prefix


def call_of(value: ItemValue) -> items.Call | None:
    """The call that the client may answer, if this item is one."""
    kind = KINDS[type(value)]
    pairing = kind.pairing
    if not isinstance(pairing, CallPairing) or pairing.answered_by(value) not in ("client", "both"):
        return None
    call_id = pairing.call_id(value)
    if call_id is None:
        return None
    return items.Call(call_id, kind.name, _is_optional(value))


def _is_optional(value: ItemValue) -> bool:
    """Whether a call need not be answered: it is asynchronous, or was cut off, so that no client runs it."""
    return (
        getattr(value, "is_async", None) is True or getattr(value, "status", None) == "incomplete"
    )


def answer_of(value: ItemValue) -> items.CallOutput | None:
    """The call that this item of a client answers, if it answers one."""
    pairing = KINDS[type(value)].pairing
    if not isinstance(pairing, OutputPairing) or not pairing.is_from_client(value):
        return None
    assert pairing.to is not None, "what a client answers has a kind"
    return items.CallOutput(pairing.call_id(value), pairing.to)


def required_by(value: ItemValue) -> Required | None:
    """The outline of the output that the client owes now; none for a call that need not be answered yet."""
    pairing = KINDS[type(value)].pairing
    if not isinstance(pairing, CallPairing) or pairing.required is None:
        return None
    return pairing.required(value)


def hosted_call_of(value: ItemValue) -> str | None:
    """The id of a call that our own tools answer, as `HostedOutput` names it."""
    pairing = KINDS[type(value)].pairing
    if not isinstance(pairing, CallPairing):
        return None
    return pairing.call_id(value) if pairing.answered_by(value) in ("server", "both") else None


def call_id_of(value: ItemValue) -> str:
    """The id that joins a call and its output, from a client or not; empty where there is none."""
    pairing = KINDS[type(value)].pairing
    return (pairing.call_id(value) or "") if pairing is not None else ""


def called(value: ItemValue) -> str:
    """Which function a call calls, by the one name that the model sees; empty where the item has none."""
    pairing = KINDS[type(value)].pairing
    return pairing.called(value) if isinstance(pairing, CallPairing) else ""


def is_call(value: ItemValue) -> bool:
    """Whether this item is a call, to be answered by a client or not."""
    return isinstance(KINDS[type(value)].pairing, CallPairing)


def is_output(value: ItemValue) -> bool:
    """Whether this item answers a call, sent by a client or not."""
    return isinstance(KINDS[type(value)].pairing, OutputPairing)


def is_model_written(value: ItemValue) -> bool:
    """Whether the model wrote this item: neighbours of this sort belong to one model turn."""
    return KINDS[type(value)].is_model_written(value)


def shown_as(value: ItemValue) -> Shown:
    """What this item is to a model."""
    return KINDS[type(value)].shown(value)


def approved_by(value: ItemValue) -> str | None:
    """The request for approval in which the model made this call, where a person has approved it."""
    request_id = getattr(value, "approval_request_id", None)
    return request_id if isinstance(request_id, str) and is_call(value) else None


class _Outline(Struct, frozen=True):
    """Just enough of an output item to know whether one of our own tools answered it."""

    type: str | None = None
    status: str | None = None
    execution: str | None = None


_outline = msgspec.json.Decoder(_Outline)


def is_hosted_result(output: Raw) -> bool:
    """Whether this output item is a call that one of our own tools has answered, or its answer: usage counts these."""
    outline = _outline.decode(output)
    kind = _typed.get(outline.type or "")
    match kind.pairing if kind is not None else None:
        case OutputPairing():
            return outline.execution != "client"
        case CallPairing(required=None):
            return outline.status in ("completed", "failed")
        case _:
            return False
