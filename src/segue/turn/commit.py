"""How does a turn become a commit? `commit` makes the `Turn` that others may name as their parent, with its usage."""

from __future__ import annotations

from collections.abc import Sequence

from segue.seams.history import Owner, Round, Turn, UsageEntry, Warm
from segue.seams.lineage import NO_LINEAGE, Lineage
from segue.seams.model import Rendered
from segue.seams.prompt import Head, Tokens
from segue.turn.plan import Plan, Resolved
from segue.wire.effects import apply_effects
from segue.wire.items import Call, Item, weigh
from segue.wire.kinds import call_of, is_hosted_result
from segue.wire.response import ENDED, NO_USAGE, Response

# What a node costs beside its items: the objects themselves.
NODE_BYTES = 2_000


def commit(
    plan: Plan,
    response: Response,
    rounds: tuple[Round, ...],
    open_calls: dict[str, Call],
    warm: Warm | None = None,
    passed: tuple[str, ...] = (),
    lineage: Lineage = NO_LINEAGE,
    route: str | None = None,
) -> Turn:
    """The turn as it will be stored."""
    resolved, head_sent = plan.resolved, plan.arrival.caller.head_sent
    is_shared = resolved.parent is not None and resolved.parent.head_sent is head_sent
    return Turn(
        id=plan.id,
        owner=plan.owner,
        parent_id=resolved.parent.id if resolved.parent else None,
        parent=resolved.parent,
        rounds=rounds,
        response=response,
        is_stored=plan.is_stored,
        open_calls=open_calls,
        model_turns=resolved.model_turns + sum(round.did_sample for round in rounds),
        tools=resolved.head.tools,
        # Applying again what was given before changes nothing.
        effects=apply_effects(
            resolved.effects, (item for round in rounds[1:] for item in round.given)
        )
        if len(rounds) > 1 or resolved.is_hosted
        else resolved.effects,
        warm=warm,
        root_at=plan.root_at,
        chain=lineage.chain,
        fork=lineage.fork,
        route=route,
        passed=passed,
        holds_key=bool(plan.key) and not response.background,
        head_sent=head_sent,
        bytes=weigh_turn(rounds, resolved, response, plan.tally.tokens_tokenized)
        + (0 if is_shared else sum(map(len, head_sent))),
        usage=entry_of(
            plan.owner,
            response,
            plan.model.name,
            is_hosted=resolved.is_hosted,
            key_id=plan.arrival.caller.key_id,
        ),
    )


def calls_in(wrote: Sequence[Item]) -> dict[str, Call]:
    """The calls among these items that wait for an output."""
    return {call.call_id: call for item in wrote if (call := call_of(item.value))}


def warm_after(
    fingerprint: str, head: Head, rendered: Rendered, last: Round, route: str | None = None
) -> Warm:
    """What to keep after a turn whose last round got this prompt. A round that did not sample leaves no cue."""
    prompt = rendered.context
    if last.did_sample and isinstance(prompt, Tokens):
        sampled = rendered.cue[:]
        for ids in (*last.ids, last.tail):
            sampled.extend(ids)
        prompt = prompt.plus(sampled)
    return Warm(fingerprint, head, prompt, route)


def weigh_turn(
    rounds: Sequence[Round], resolved: Resolved, response: Response, tokens_tokenized: int = 0
) -> int:
    """What this turn adds: its items, what its response repeats, and four bytes for every id, kept and joined.

    Tools and instructions count where they are not the parent's very own.
    """
    given = resolved.given
    text = sum(weigh(round.wrote) for round in rounds)
    text += sum(resolved.given_bytes if one.given is given else weigh(one.given) for one in rounds)
    head = resolved.head
    parent = resolved.parent
    if parent is None or parent.warm is None or parent.warm.head is not head:
        text += head.tools.held_bytes + 2 * len(head.instructions or "")
    sampled = sum(len(ids) for round in rounds for ids in (*round.ids, round.tail))
    ids = 2 * sampled + tokens_tokenized
    return NODE_BYTES + response.echo_bytes + text + 4 * ids


def entry_of(
    owner: Owner,
    response: Response,
    model: str = "",
    *,
    is_hosted: bool = True,
    key_id: str = "",
) -> UsageEntry | None:
    """The usage row of a turn; None while it runs. `model`: as it is served, whatever alias the response has. Without
    hosted tools no output item has to be looked at."""
    if response.status not in ENDED:
        return None
    usage = response.usage or NO_USAGE
    return UsageEntry(
        turn_id=response.id,
        owner=owner,
        model=model or response.model,
        status=response.status,
        input_tokens=usage.input_tokens,
        cached_tokens=usage.input_tokens_details.cached_tokens,
        output_tokens=usage.output_tokens,
        ended_at=response.completed_at or response.created_at,
        tool_calls=sum(map(is_hosted_result, response.output)) if is_hosted else 0,
        key_id=key_id,
    )
