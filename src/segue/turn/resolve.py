"""What does this request stand on? Pure: a request, its new items and its parent in, a `Resolved` out.

Here the wire's `previous_response_id` has already become a parent. Settings are not inherited from it, except the
model (docs/protocol.md 9 rows 15 and 16). What contradicts the history is refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET
from msgspec.structs import replace

from segue.errors import InvalidRequest, cut_name, parent_not_found
from segue.turn.plan import Resolved
from segue.turn.values import Head, Resent, Round, SentHistory, Turn, Warm
from segue.wire.codec import check_schema, decode_tools
from segue.wire.effects import EFFECTIVE, NO_EFFECTS, Effects, apply_effects
from segue.wire.items import (
    AdditionalTools,
    Call,
    CompactionTrigger,
    ConfigurationUpdate,
    CustomToolCallOutput,
    FunctionCallOutput,
    InputFile,
    InputImage,
    Item,
    LocalShellCallOutput,
    McpApprovalResponse,
    McpListTools,
    Message,
    TextUpdate,
    ToolSearchOutput,
)
from segue.wire.kinds import CALL_WORDS, KINDS, CallPairing, OutputPairing, answer_of, call_of
from segue.wire.mcp import check_servers, is_same_server, servers_of, with_listed
from segue.wire.requests import Create, ReasoningConfig, TextConfig, ToolChoiceName
from segue.wire.tools import (
    BUILTINS,
    NO_TOOLS,
    McpTool,
    Offer,
    Tools,
    ToolSearchTool,
    WebSearchTool,
    chosen_offers,
)
from segue.wire.web import with_web

# Each of these asks for something that is not built; a clear word is better than half of it.
UNSUPPORTED = ("prompt",)
# The least that a history may be compacted at (docs/protocol.md 2).
THRESHOLD_MIN = 1_000
# Items that bring tools; items with more to check than their fields.
BRINGING = (AdditionalTools, ToolSearchOutput)
CHECKED = (ConfigurationUpdate, CompactionTrigger)
# Definitions of tools that this server runs itself.
HOSTED_TOOLS = (McpTool, WebSearchTool, ToolSearchTool)


def resolve(
    create: Create,
    given: tuple[Item, ...],
    parent: Turn | None,
    earlier: tuple[Round, ...] = (),
    resent: Resent | None = None,
    *,
    has_web: bool = False,
    has_media: bool = True,
) -> Resolved:
    """Bind a request to its parent, or say what contradicts. `has_web`: the web may be searched. `has_media`: there
    are files, images or audio among the items."""
    if parent is not None and not is_continuable(parent):
        raise parent_not_found(parent.id)
    kinds = {type(item.value) for item in given}
    if create.background or create.context_management or create.prompt:
        check_request(create)
    if has_media or not kinds.isdisjoint(CHECKED):
        check_items(given)
    model = create.model or (parent.response.model if parent else None)
    if model is None:
        raise InvalidRequest("You must provide a model parameter.", param="model")
    # A warm-up only prepares (docs/protocol.md 6.7).
    is_prewarm = create.prompt_cache_options is not None and create.prompt_cache_options.prewarm
    generates = create.generate is not False and not is_prewarm
    if not given and not earlier and parent is None and generates:
        raise InvalidRequest("Missing required parameter: 'input'.", param="input")
    if earlier and parent is not None:
        raise InvalidRequest(
            "A compaction stands for all that came before it: begin a new chain with it, without a parent.",
            code="unsupported_value",
            param="input",
        )
    beginning = resent.beginning if resent is not None and parent is None else None
    warm = beginning.past.warm if beginning else parent.warm if parent else None
    known = parent.tools if parent else warm.head.tools if warm else None
    tools, did_decode = (
        (NO_TOOLS, False) if create.tools is UNSET else decode_tools(create.tools, known)
    )
    effects = NO_EFFECTS if parent is None else parent.effects or effects_of(parent)
    if earlier or not kinds.isdisjoint(EFFECTIVE):
        shadowed = [item for one in earlier if not one.is_fresh for item in one.given]
        effects = apply_effects(effects, (*shadowed, *given))
    is_hosted = (
        bool(effects.carried or effects.deferred or tools.deferred)
        or any(isinstance(tool, HOSTED_TOOLS) for tool in tools.definitions)
        or McpApprovalResponse in kinds
    )
    if is_hosted or tools.carried:
        tools = _with_hosted(tools, effects, parent, did_decode=did_decode, has_web=has_web)
    choice = create.tool_choice or "auto"
    if choice != "auto":
        _check_tool_choice(choice, tools, effects)
    # What was sent before is paired already.
    before: Turn | SentHistory | None = parent
    new = given
    if beginning is not None and given[: len(beginning.given)] == beginning.given:
        before, new = beginning, given[len(beginning.given) :]
    return Resolved(
        create=create,
        parent=parent,
        given=given,
        head=_head(create, tools, warm),
        open_calls=pair_calls(before.open_calls if before else {}, new),
        model_turns=(before.model_turns if before else 0) + count_model_turns(new),
        model=model,
        tool_decodes=did_decode + sum(isinstance(item.value, BRINGING) for item in given),
        effects=effects,
        earlier=earlier,
        resent=None if parent or earlier else resent,
        generates=generates,
        is_hosted=is_hosted or has_media,
    )


def _with_hosted(
    tools: Tools, effects: Effects, parent: Turn | None, *, did_decode: bool, has_web: bool
) -> Tools:
    """The tools with what the history and remote servers add to them."""
    carries_more = tools.carried != effects.carried
    if carries_more:
        tools = replace(tools, carried=effects.carried)
    if did_decode or carries_more:
        check_servers(tools)
    tools = with_listed(tools, still_listed(tools, effects, parent))
    return with_web(tools, is_on=has_web)


def effects_of(turn: Turn) -> Effects:
    """The effects of this history, counted again for a turn that comes from a store."""
    if turn.effects is not None:
        return turn.effects
    rounds = [one for node in turn.lineage() for one in node.rounds]
    return apply_effects(NO_EFFECTS, (item for one in rounds for item in (*one.given, *one.wrote)))


def still_listed(tools: Tools, effects: Effects, parent: Turn | None) -> list[McpListTools]:
    """What the servers of this request have listed before in this history, under the same name and filter."""
    servers = servers_of(tools)
    before = _servers_before(parent) if servers and parent else {}
    return [
        one
        for one in effects.listed
        if (server := servers.get(one.server_label)) is not None
        and is_same_server(before.get(one.server_label, server), server)
    ]


def _servers_before(parent: Turn) -> dict[str, McpTool]:
    if parent.tools is not None:
        return servers_of(parent.tools)
    # Come from a store: the response tells what the request named.
    listed = decode_tools(parent.response.tools, None, is_stored=True)[0]
    return servers_of(replace(listed, carried=effects_of(parent).carried))


def is_continuable(turn: Turn) -> bool:
    """Whether a turn may be a parent: whole, and ended by the model rather than by a fault."""
    return turn.is_whole and turn.response.status in ("completed", "incomplete")


def pair_calls(open_calls: dict[str, Call], given: Sequence[Item]) -> dict[str, Call]:
    """The calls that are open after these items; an answer without its call, or a call left open, is refused."""
    pending = dict(open_calls)
    for item in given:
        pairing = KINDS[type(item.value)].pairing
        if isinstance(pairing, CallPairing) and (call := call_of(item.value)):
            pending[call.call_id] = call
        elif isinstance(pairing, OutputPairing) and (answer := answer_of(item.value)):
            call_id = answer.call_id
            if call_id is None or (call_id not in pending and _may_name_item(item)):
                call_id = _only_open_call(pending, answer.kind, item)
            if call_id is None or call_id not in pending or pending[call_id].kind != answer.kind:
                raise InvalidRequest(
                    f"No tool call found for {CALL_WORDS[answer.kind][1]} "
                    f"with call_id {cut_name(answer.call_id)}.",
                    code="invalid_function_call_output",
                    param="input",
                )
            del pending[call_id]
    for call in pending.values():
        if not call.is_optional:
            raise InvalidRequest(
                f"No tool output found for {CALL_WORDS[call.kind][0]} {cut_name(call.call_id)}.",
                code="missing_function_call_output",
                param="input",
            )
    return pending


def count_model_turns(items: Sequence[Item]) -> int:
    """How often the model speaks in these items: neighbours that it wrote are one turn."""
    turns = 0
    was_model = False
    for item in items:
        is_model = KINDS[type(item.value)].is_model_written(item.value)
        turns += is_model and not was_model
        was_model = is_model
    return turns


def _may_name_item(item: Item) -> bool:
    """The older shell's output has no call_id; some clients put the id of the call's item into its id."""
    return isinstance(item.value, LocalShellCallOutput) and not item.value.call_id


def _only_open_call(pending: dict[str, Call], kind: str, item: Item) -> str | None:
    """The newest types let an output leave its call_id out; then it must be clear which call is meant."""
    candidates = [call.call_id for call in pending.values() if call.kind == kind]
    is_clear = len(candidates) == 1 and isinstance(
        item.value, FunctionCallOutput | LocalShellCallOutput
    )
    return candidates[0] if is_clear else None


def check_request(create: Create) -> None:
    """What no request may ask for."""
    if create.background and create.store is False:
        raise InvalidRequest(
            "A background response must be stored: otherwise it could not be fetched.",
            code="unsupported_value",
            param="store",
        )
    for index, one in enumerate(create.context_management or []):
        path = f"context_management[{index}]"
        if one.type != "compaction":
            raise InvalidRequest(
                f"'{path}.type' must be 'compaction'.", code="invalid_value", param=f"{path}.type"
            )
        if one.compact_threshold is not None and one.compact_threshold < THRESHOLD_MIN:
            raise InvalidRequest(
                f"'{path}.compact_threshold' must be at least {THRESHOLD_MIN}.",
                code="invalid_value",
                param=f"{path}.compact_threshold",
            )
    for name in UNSUPPORTED:
        if getattr(create, name):
            raise InvalidRequest(
                f"'{name}' is not supported by this server.",
                code="unsupported_parameter",
                param=name,
            )


def check_items(given: Sequence[Item]) -> None:
    """What no item may ask for, whichever way it comes."""
    for index, item in enumerate(given):
        match item.value:
            case ConfigurationUpdate(text=TextUpdate() as text):
                _check_format(text, f"input[{index}].")
            case CompactionTrigger() if index != len(given) - 1:
                raise InvalidRequest(
                    "'compaction_trigger' must be the last item of the input.",
                    code="invalid_value",
                    param=f"input[{index}].type",
                )
            case (
                Message(content=list() as parts)
                | FunctionCallOutput(output=list() as parts)
                | CustomToolCallOutput(output=list() as parts)
            ):
                for part in parts:
                    if isinstance(part, InputFile | InputImage) and part.file_id:
                        raise InvalidRequest(
                            "'file_id' is not supported: this server has no Files API. "
                            "Send the contents inline instead.",
                            code="unsupported_value",
                            param=f"input[{index}]",
                        )
            case _:
                pass


def _head(create: Create, tools: Tools, warm: Warm | None) -> Head:
    """The head of the prompt; the last one's own if it is equal, so that a chain keeps long instructions once."""
    if create.text is not None:
        _check_format(create.text)
    head = Head(
        instructions=create.instructions,
        tools=tools,
        tool_choice=create.tool_choice or "auto",
        parallel_tool_calls=create.parallel_tool_calls is not False,
        text=create.text or TextConfig(),
        reasoning=create.reasoning or ReasoningConfig(),
    )
    return warm.head if warm is not None and warm.head == head else head


def _check_tool_choice(choice: str | ToolChoiceName, tools: Tools, effects: Effects) -> None:
    """A choice that cannot be met is refused now rather than quietly missed. Tools from items count."""
    offers = tools.offers + effects.offers
    # One that is deferred can be called by name, though the model has not seen all of it.
    known: tuple[Offer, ...] = (*offers, *tools.deferred, *effects.deferred)
    servers = servers_of(tools)
    match choice:
        case "required" | ToolChoiceName(type="allowed_tools") if servers:
            # Which tools there are is known when the servers have been asked.
            return
        case ToolChoiceName(type="mcp", server_label=str() as label) if label in servers:
            return
        case "required" if not offers:
            problem = "'tool_choice' is 'required', but no tool was given that can be called."
        case ToolChoiceName(type="allowed_tools", mode="required", tools=allowed):
            if chosen_offers(allowed or [], known):
                return
            problem = "'tool_choice' requires one of several tools, none of which is in 'tools'."
        case ToolChoiceName(type="allowed_tools"):
            return
        case ToolChoiceName(type=kind, name=name):
            if chosen_offers([choice], known):
                return
            problem = (
                f"'tool_choice' names the tool '{cut_name(name)}', which is not in 'tools'."
                if kind in ("function", "custom")
                else f"'tool_choice' names the server '{choice.server_label}', which is not in 'tools'."
                if kind == "mcp"
                else f"'tool_choice' forces '{kind}', which is not in 'tools' as something that the client runs."
                if kind in BUILTINS
                else f"'tool_choice' forces '{cut_name(kind)}', which this server cannot run."
            )
        case _:
            return
    raise InvalidRequest(problem, code="unsupported_value", param="tool_choice")


def _check_format(text: TextConfig | TextUpdate | None, of: str = "") -> None:
    """A format by schema needs its schema; a schema that is not needed is echoed all the same."""
    if text is None or text.format is None:
        return
    path, schema = f"{of}text.format.schema", text.format.schema
    is_absent = schema is UNSET or bytes(schema) == b"null"
    if is_absent and text.format.type == "json_schema":
        raise InvalidRequest(f"Missing required parameter: '{path}'.", param=path)
    if schema is not UNSET:
        check_schema(schema, path)
