"""May this turn start, and with what? A `Resolved` in, a `Plan` out, or a refusal.

The plan holds everything that the loop needs: the model with its engine and dialect, the limits, and the response
object as the client will first see it. Nothing has been sent to the client yet.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from msgspec import UNSET, Raw, structs

from segue.errors import InvalidRequest, cut_name, model_not_found
from segue.limits import permitted
from segue.seams.history import ancestors
from segue.seams.model import Engine, Sampling
from segue.turn.compact import CompactionKind
from segue.turn.plan import Arrival, Model, Plan, Resolved, Tally
from segue.turn.resources import Resources
from segue.wire.cache import cache_echo
from segue.wire.codec import encode, encode_kept
from segue.wire.items import CompactionTrigger, Item, count_media
from segue.wire.requests import Create
from segue.wire.response import Named, ReasoningEcho, Response, TextEcho
from segue.wire.tools import forced_offers, grammar_of

NULL = Raw(b"null")
# Where a client wants compaction and does not say when: this share of the context.
THRESHOLD_SHARE = 0.8
LOGPROBS = "message.output_text.logprobs"
# Fields of a request that are fields of `Sampling` as they are.
SAMPLING_FIELDS = set(Sampling.__struct_fields__) - {"wants_logprobs", "stop_strings"}
# What clients call the tier that goes first.
FIRST_TIERS = frozenset({"priority", "fast", "ultrafast"})
PLAIN_TEXT = Raw(b'{"type":"text"}')


def admit(
    resolved: Resolved, arrival: Arrival, resources: Resources, turn_id: str, tally: Tally
) -> Plan:
    """Find the model and write the first snapshot of the response."""
    create = arrival.create
    caller = arrival.caller
    parent = resolved.parent
    models = permitted(resources.models, caller.models)
    model = models.get(resolved.model)
    if model is None:
        raise model_not_found(resolved.model, models)
    if resolved.head.tool_choice not in ("auto", "none"):
        _refuse_grammar(resolved, model.engine)
    if resolved.has_media:
        tally.media_told += check_unseen(resolved.given, model)
    now = int(time.time())
    is_stored = create.store is not False
    sampling = _sampling(create, model.sampling)
    compacts = arrival.compacts
    if resolved.given and isinstance(resolved.given[-1].value, CompactionTrigger):
        triggered = _triggered(resolved, is_stored=is_stored)
        compacts = compacts or triggered
    generates = not create.is_warm_up
    is_rollout = bool(create.rollout) and generates
    tier = _served_tier(create.service_tier, caller.may)
    is_plain = not (create.conversation or create.context_management or compacts or is_rollout)
    return Plan(
        id=turn_id,
        arrival=arrival,
        resolved=resolved,
        model=model,
        sampling=sampling,
        is_stored=is_stored,
        response=_first_snapshot(resolved, model, sampling, turn_id, now, tier),
        root_at=parent.root_at if parent else now,
        tally=tally,
        generates=generates,
        is_rollout=is_rollout,
        can_be_steered=generates and is_plain,
        compacts=compacts,
        threshold=_threshold(resolved, model, is_stored=is_stored),
        guards=resources.guards.get(caller.owner, model.guards),
    )


def _may_compact(resolved: Resolved, *, is_stored: bool) -> bool:
    """A stored compaction would keep the words of everything it stands for: nothing of that may be unstored."""
    past = ancestors(resolved.parent) if resolved.parent and is_stored else []
    return all(turn.is_stored for turn in past)


def _triggered(resolved: Resolved, *, is_stored: bool) -> CompactionKind:
    if len(resolved.given) == 1 and resolved.parent is None and not resolved.earlier:
        raise InvalidRequest("There is nothing to compact.", param="input")
    if not _may_compact(resolved, is_stored=is_stored):
        raise InvalidRequest(
            "A stored response cannot compact a history that is not stored. Say 'store': false.",
            code="unsupported_value",
            param="store",
        )
    return "chain"


def _threshold(resolved: Resolved, model: Model, *, is_stored: bool) -> int:
    """How long a prompt may become before it is compacted, at most a share of the model's context; 0: never."""
    rules = resolved.create.context_management
    if not rules or not _may_compact(resolved, is_stored=is_stored):
        return 0
    usual = int((model.context_tokens or 0) * THRESHOLD_SHARE)
    return min(filter(None, (rules[0].compact_threshold, usual)), default=0)


def _refuse_grammar(resolved: Resolved, engine: Engine) -> None:
    """The input of a tool that must be called is held to its grammar; what the engine cannot keep is refused.

    A tool that is merely offered does without, and so does one of several: an answer is held to one thing, and that
    is then the JSON of any of their calls.
    """
    head = resolved.head
    forced = forced_offers(head.tool_choice, head.tools.offers + resolved.effects.offers)
    if not engine.can_constrain or not forced or not all(map(grammar_of, forced)):
        return
    if len(forced) > 1:
        problem = (
            "one of several tools that all have a grammar, and only one grammar can be enforced; "
            "name one tool instead"
        )
    else:
        syntax, definition = grammar_of(forced[0]) or ("", "")
        if syntax in ("lark", "regex") and not definition:
            problem = "a tool whose grammar has no 'definition'"
        elif syntax not in ("lark", "regex"):
            problem = f"a tool whose grammar has the syntax '{syntax[:64]}', which is neither lark nor regex"
        elif syntax not in engine.grammars:
            problem = f"a tool with a {syntax} grammar, which the engine does not support"
        else:
            return
    raise InvalidRequest(
        f"'tool_choice' forces {problem}.", code="unsupported_value", param="tool_choice"
    )


def check_unseen(given: Sequence[Item], model: Model) -> int:
    """How many images and sounds the model is not shown; they are refused if the operator says so."""
    unseen = 0
    sees_images = model.sees_images
    for index, item in enumerate(given):
        if (count := count_media(item.value, sees_images)) and model.unseen == "refuse":
            problem = (
                "supports image input only as data URLs, and no audio input"
                if sees_images
                else "does not support image or audio input"
            )
            raise InvalidRequest(
                f"The model '{cut_name(model.name)}' {problem}.",
                code="unsupported_value",
                param=f"input[{index}]",
            )
        unseen += count
    return unseen


def _served_tier(requested: str | None, scopes: Collection[str]) -> str:
    """The tier that a request gets: only a key with the scope `priority` goes before others."""
    if requested in FIRST_TIERS:
        return "priority" if "priority" in scopes else "default"
    return "flex" if requested == "flex" else "default"


def _sampling(create: Create, usual: Sampling) -> Sampling:
    """What the request says, and where it says nothing what is usual for the model."""
    given = {name: getattr(create, name) for name in SAMPLING_FIELDS}
    # As the contract has it: `include` asks for them, `top_logprobs` only says how many alternatives.
    given["wants_logprobs"] = LOGPROBS in (create.include or ())
    given["stop_strings"] = create.stop_strings if create.stop else None
    said = {name: value for name, value in given.items() if value is not None}
    return structs.replace(usual, **said)


def _shown(chosen: float | None, own: float | None, usual: float) -> float:
    """What the response says of a sampling value: what was not chosen is the engine's own, or else what is usual."""
    own = usual if own is None else own
    return own if chosen is None else chosen


def _first_snapshot(
    resolved: Resolved, model: Model, sampling: Sampling, turn_id: str, now: int, tier: str
) -> Response:
    create = resolved.create
    head = resolved.head
    parent = resolved.parent
    own = model.engine.facts.sampling
    # The echo of the instructions is encoded once for a chain that repeats them.
    if parent is not None and parent.warm is not None and parent.warm.head is head:
        instructions = parent.response.instructions
    else:
        instructions = NULL if head.instructions is None else Raw(encode_kept(head.instructions))
    # What holds, whether the request says it or an item of its history.
    effects = resolved.effects
    text_format = effects.format or head.text.format
    text = TextEcho(
        PLAIN_TEXT if text_format is None else Raw(encode(text_format)),
        head.text.verbosity or "medium",
    )
    return Response(
        id=turn_id,
        created_at=now,
        status="queued" if create.background else "in_progress",
        background=bool(create.background),
        instructions=instructions,
        max_output_tokens=create.max_output_tokens,
        max_tool_calls=create.max_tool_calls,
        model=resolved.model,
        parallel_tool_calls=head.parallel_tool_calls,
        previous_response_id=create.previous_response_id,
        conversation=UNSET if create.conversation is None else Named(create.conversation_id or ""),
        prompt_cache_key=create.prompt_cache_key,
        prompt_cache_options=cache_echo(create.prompt_cache_options),
        prompt_cache_retention=create.prompt_cache_retention or UNSET,
        reasoning=ReasoningEcho(effects.effort or head.reasoning.effort, head.reasoning.summary),
        safety_identifier=create.safety_identifier,
        service_tier=tier,
        store=create.store is not False,
        temperature=_shown(sampling.temperature, own.temperature, 1.0),
        text=Raw(encode(text)),
        tool_choice=Raw(encode(head.tool_choice)),
        tools=Raw(head.tools.echo),
        top_logprobs=sampling.top_logprobs,
        top_p=_shown(sampling.top_p, own.top_p, 1.0),
        presence_penalty=_shown(sampling.presence_penalty, own.presence_penalty, 0.0),
        frequency_penalty=_shown(sampling.frequency_penalty, own.frequency_penalty, 0.0),
        truncation=create.truncation or "disabled",
        user=create.user,
        metadata=create.metadata or {},
    )
