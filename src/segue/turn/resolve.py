"""What does this request stand on? Pure: a request, its items and its parent in, a `Resolved` out.

Here the wire's `previous_response_id` has already become a parent. Settings are not inherited from it, except the
model (docs/protocol.md 9 rows 15 and 16). What contradicts the history is refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from msgspec import UNSET, Raw, Struct
from msgspec.structs import replace

from segue.errors import InvalidRequest, cut_name, parent_not_found
from segue.seams.history import Turn, Warm, ancestors
from segue.seams.prompt import Head
from segue.seams.tools import LateOffers
from segue.turn.checks import (
    check_format,
    check_items,
    check_request,
    check_served,
    check_tool_choice,
)
from segue.turn.plan import Given, Resolved
from segue.wire.codec import decode_tools
from segue.wire.effects import BRINGING, EFFECTIVE, NO_EFFECTS, Effects, apply_effects
from segue.wire.items import (
    Call,
    CompactionTrigger,
    ConfigurationUpdate,
    FunctionCallOutput,
    Item,
    LocalShellCallOutput,
    weigh,
)
from segue.wire.kinds import CALL_WORDS, KINDS, CallPairing, OutputPairing, answer_of, call_of
from segue.wire.requests import Create, ReasoningConfig, TextConfig
from segue.wire.tools import NO_TOOLS, Tools

# Items with more to check than their fields.
CHECKED = (ConfigurationUpdate, CompactionTrigger)


class _Before(Struct, frozen=True):
    """What is known of the history before this request: of its parent, or, where the client has sent the whole history,
    of the beginning that it has sent before."""

    warm: Warm | None = None
    tools: Tools | None = None
    open_calls: dict[str, Call] = {}
    model_turns: int = 0
    # How many of the given items belong to it; those are paired and counted already.
    items: int = 0
    # Whether its tools mean the same as those of the request.
    has_same_tools: bool = False


def resolve(
    create: Create,
    given: Given,
    parent: Turn | None,
    hosted: LateOffers | None = None,
    may: Container[str] = (),
) -> Resolved:
    """Bind a request to its parent, or say what contradicts. `may`: the scopes of the caller's key."""
    if parent is not None and not is_continuable(parent):
        raise parent_not_found(parent.id)
    check_request(create)
    kinds = given.kinds
    if given.has_media or not kinds.isdisjoint(CHECKED):
        check_items(given.items)
    model = create.model or (parent.response.model if parent else None)
    if model is None:
        raise InvalidRequest("You must provide a model parameter.", param="model")
    _check_beginning(create, given, parent)
    before = _before(given, parent)
    tools = NO_TOOLS
    did_decode = False
    if create.tools is not UNSET:
        is_same = before.has_same_tools
        tools, did_decode = decode_tools(create.tools, before.tools, is_same=is_same)
    effects = _effects(given, kinds, parent)
    if tools.carried != effects.carried:
        tools = replace(tools, carried=effects.carried)
    is_hosted = hosted is not None and _is_hosted(tools, kinds, hosted)
    if hosted is not None and (is_hosted or tools.hosted or tools.late):
        tools = hosted.load().offer(tools, effects, tools_of(parent) if parent else None, may)
    if create.tool_choice not in (None, "auto"):
        check_tool_choice(create.tool_choice, tools, effects)
    if unserved := tools.unserved:
        refuses = hosted is not None and hosted.refuses_unserved
        check_served(unserved, create.tool_choice, tools, effects, refuses=refuses)
    new = given.items[before.items :]
    may_bring = not kinds.isdisjoint(BRINGING)
    brought = may_bring and sum(isinstance(item.value, BRINGING) for item in given.items)
    return Resolved(
        create=create,
        parent=parent,
        given=given.items,
        given_bytes=_weigh(given),
        head=_head(create, tools, before.warm),
        open_calls=pair_calls(before.open_calls, new),
        model_turns=before.model_turns + count_model_turns(new),
        model=model,
        tool_decodes=did_decode + brought,
        effects=effects,
        earlier=given.earlier,
        resent=None if parent or given.earlier else given.resent,
        has_media=given.has_media,
        is_hosted=is_hosted or given.has_media,
    )


def _check_beginning(create: Create, given: Given, parent: Turn | None) -> None:
    """A history begins with something, and begins once."""
    if parent is None:
        if not given.items and not given.earlier and not create.is_warm_up:
            raise InvalidRequest("Missing required parameter: 'input'.", param="input")
    elif given.earlier:
        raise InvalidRequest(
            "A compaction item replaces the whole history before it: it cannot be sent with "
            "'previous_response_id' or 'conversation'.",
            code="unsupported_value",
            param="input",
        )


def _before(given: Given, parent: Turn | None) -> _Before:
    if parent is not None:
        return _Before(parent.warm, parent.tools, parent.open_calls, parent.model_turns)
    if given.resent is None or given.resent.beginning is None:
        return _Before()
    known = given.resent.beginning
    warm = known.past.warm
    tools = warm.head.tools if warm else None
    count = given.resent.known_count(given.items)
    if not count:
        return _Before(warm, tools, has_same_tools=True)
    return _Before(warm, tools, known.open_calls, known.model_turns, count, has_same_tools=True)


def _weigh(given: Given) -> int:
    """What the items hold in memory; of those that were sent before, to the byte, that is known."""
    known = None if given.resent is None else given.resent.beginning
    if known is None or given.items[: len(known.given)] != known.given:
        return weigh(given.items)
    return known.given_bytes + weigh(given.items[len(known.given) :])


def _effects(given: Given, kinds: frozenset[type], parent: Turn | None) -> Effects:
    """The effects of all items, the new ones included."""
    effects = NO_EFFECTS if parent is None else effects_of(parent)
    if not given.earlier and kinds.isdisjoint(EFFECTIVE):
        return effects
    replaced = [item for round in given.earlier if not round.is_fresh for item in round.given]
    return apply_effects(effects, (*replaced, *given.items))


def _is_hosted(tools: Tools, kinds: frozenset[type], hosted: LateOffers) -> bool:
    """Whether a tool of this server may be called."""
    is_asked = any(issubclass(kind, hosted.definitions) for kind in tools.kinds)
    return is_asked or not kinds.isdisjoint(hosted.acts_on)


def effects_of(turn: Turn) -> Effects:
    """The effects of this history, counted again for a turn that comes from a store."""
    if turn.effects is not None:
        return turn.effects
    rounds = [round for link in ancestors(turn) for round in link.rounds]
    items = (item for round in rounds for item in (*round.given, *round.wrote))
    return apply_effects(NO_EFFECTS, items)


def tools_of(turn: Turn) -> Tools:
    """The tools of this turn; for a turn that comes from a store, as its response tells what the request named."""
    if turn.tools is not None:
        return turn.tools
    listed = decode_tools(turn.response.tools, None, is_stored=True)[0]
    return replace(listed, carried=effects_of(turn).carried)


def is_continuable(turn: Turn) -> bool:
    """Whether a turn may be a parent: whole, and ended by the model rather than by a fault."""
    return turn.is_whole and turn.response.status in ("completed", "incomplete")


def pair_calls(open_calls: dict[str, Call], given: Sequence[Item]) -> dict[str, Call]:
    """The calls that are open after these items; an answer without its call, or a call left open, is refused."""
    pending = dict(open_calls)
    # By kind, once an output does not say whose it is: to look through all for each of them would take long.
    by_kind: dict[str, dict[str, None]] = {}
    for item in given:
        pairing = KINDS[type(item.value)].pairing
        if isinstance(pairing, CallPairing) and (call := call_of(item.value)):
            if by_kind:
                _note(by_kind, pending.get(call.call_id), call)
            pending[call.call_id] = call
        elif isinstance(pairing, OutputPairing) and (answer := answer_of(item.value)):
            call_id = answer.call_id
            if call_id is None or (call_id not in pending and _may_name_item(item)):
                if not by_kind:
                    for call in pending.values():
                        _note(by_kind, None, call)
                call_id = _only_open_call(by_kind.get(answer.kind, {}), item)
            if call_id is None or call_id not in pending or pending[call_id].kind != answer.kind:
                raise InvalidRequest(
                    f"No tool call found for {CALL_WORDS[answer.kind][1]} "
                    f"with call_id {cut_name(answer.call_id)}.",
                    code="invalid_function_call_output",
                    param="input",
                )
            del pending[call_id]
            if by_kind:
                del by_kind[answer.kind][call_id]
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


def _note(by_kind: dict[str, dict[str, None]], before: Call | None, call: Call) -> None:
    """A call is open; another one may have had its name."""
    if before is not None:
        del by_kind[before.kind][before.call_id]
    by_kind.setdefault(call.kind, {})[call.call_id] = None


def _only_open_call(candidates: dict[str, None], item: Item) -> str | None:
    """The newest types let an output leave its call_id out; then it must be clear which call is meant."""
    is_clear = len(candidates) == 1 and isinstance(
        item.value, FunctionCallOutput | LocalShellCallOutput
    )
    return next(iter(candidates)) if is_clear else None


def _head(create: Create, tools: Tools, warm: Warm | None) -> Head:
    """The head of the prompt; the last one's own if it is equal, so that a chain keeps long instructions once."""
    if create.text is not None:
        check_format(create.text)
    head = Head(
        instructions=create.instructions,
        tools=tools,
        tool_choice=create.tool_choice or "auto",
        parallel_tool_calls=create.parallel_tool_calls is not False,
        text=_detached(create.text or TextConfig()),
        reasoning=create.reasoning or ReasoningConfig(),
    )
    return warm.head if warm is not None and warm.head == head else head


def _detached(text: TextConfig) -> TextConfig:
    """The same, without the body of the request that its schema is a view of: a head may be kept for long."""
    if text.format is None or not isinstance(text.format.schema, Raw):
        return text
    return replace(text, format=replace(text.format, schema=text.format.schema.copy()))
