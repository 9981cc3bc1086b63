"""What costs most, and what helps? Reports of many turns in, advice in plain words out. Pure.

Losses are added up by client, model, reason and part of the prompt; of each the newest turn is named. There is no text
of a prompt in it but the name of a tool. An operator may read it for all owners: turns of others are `unnamed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct, structs

from segue.reports.report import WORDS
from segue.wire.cache import CacheAdvice, CacheCost, CacheReport, LossReason, Place

COSTS_MAX = 10
UNNAMED = "a client without a name"

HELP: dict[LossReason, str] = {
    "model_changed": "Use one model for one conversation.",
    "prompt_cache_key_changed": "Keep prompt_cache_key along a conversation.",
    "tools_changed": "Send all tools from the beginning, and forbid them with tool_choice.",
    "text_format_changed": "Keep text.format along a conversation.",
    "reasoning_effort_changed": "Keep reasoning.effort along a conversation.",
    "verbosity_changed": "Keep text.verbosity along a conversation.",
    "context_compacted": "Nothing to do: the prompts are shorter from there on.",
    "input_changed": "Put what changes (a date, a counter, an id) at the end of the prompt, into the last message.",
    "service_tier_changed": "Keep service_tier along a conversation.",
    "reasoning_dropped": "Send reasoning items again, unless the model's template drops them anyway.",
    "history_truncated": "Compact the history, or give the model a longer context.",
    "engine_evicted": "Give the engine more memory for its prefix cache, or run fewer conversations at a time.",
    "engine_restarted": "See in the engine's log why it restarts, or what cuts the connection to it.",
    "engine_drained": "Nothing to do: each conversation is computed once at its new replica.",
    "engine_removed": "Nothing to do: each conversation is computed once at its new replica.",
    "engine_down": "See why the replica does not answer: `segue engines`, and the engine's log.",
    "engine_busy": "Add replicas, or let the engine run more requests at once (engine_parallel).",
    "engine_other_replica": "Chain turns, or send a prompt_cache_key: both keep their replica.",
}
SORTED = "The same tools come in another order: sort them by name."


class Loss(NamedTuple):
    """One kind of loss."""

    client: str
    model: str
    reason: LossReason
    part: str
    change: str


class LossSum(Struct):
    """What it added up to; the newest turn with it, and where that one parted."""

    turns: int = 0
    tokens: int = 0
    ms: float = 0.0
    response_id: str = ""
    place: Place | None = None


class Traffic(Struct):
    """What turns added up to; those of several workers can be added up again."""

    # By client.
    turns: dict[str, int]
    input_tokens: int
    losses: list[tuple[Loss, LossSum]]


def unnamed(report: CacheReport) -> CacheReport:
    """A report as an operator may see it who is not its owner: without the id of the turn and the name of a tool."""
    if report.reason is None:
        return report
    place = report.place
    if place is not None and place.part == "tools":
        place = structs.replace(place, name=None)
    return structs.replace(report, response_id="", place=place)


def add_up(rows: Iterable[tuple[str, CacheReport]]) -> Traffic:
    """Each row is the client's name and a report, the newest first."""
    turns: Counter[str] = Counter()
    losses: dict[Loss, LossSum] = {}
    tokens = 0
    for client, report in rows:
        turns[client] += 1
        tokens += report.input_tokens
        if report.reason is None:
            continue
        place = report.place or Place("")
        key = Loss(client, report.model, report.reason, place.part, place.change or "")
        lost = losses.setdefault(key, LossSum(place=report.place))
        if report.response_id and not lost.response_id:
            lost.response_id, lost.place = report.response_id, report.place
        lost.turns += 1
        lost.tokens += report.lost_tokens
        lost.ms += report.lost_ms or 0.0
    return Traffic(turns, tokens, list(losses.items()))


def advise(parts: Iterable[Traffic]) -> CacheAdvice:
    """What the turns of all workers cost, the dearest first."""
    turns: Counter[str] = Counter()
    losses: dict[Loss, LossSum] = {}
    tokens = 0
    for traffic in parts:
        turns.update(traffic.turns)
        tokens += traffic.input_tokens
        for key, one in traffic.losses:
            lost = losses.setdefault(key, LossSum(place=one.place))
            if one.response_id and not lost.response_id:
                lost.response_id, lost.place = one.response_id, one.place
            lost.turns += one.turns
            lost.tokens += one.tokens
            lost.ms += one.ms
    dearest = sorted(losses.items(), key=lambda row: -row[1].tokens)
    return CacheAdvice(
        turns=turns.total(),
        input_tokens=tokens,
        lost_tokens=sum(lost.tokens for lost in losses.values()),
        costs=[_cost(key, lost, turns[key.client]) for key, lost in dearest[:COSTS_MAX]],
    )


def _cost(key: Loss, lost: LossSum, turns: int) -> CacheCost:
    client = key.client or UNNAMED
    each = lost.tokens // lost.turns
    words = (
        f"{client}, model {key.model}: {WORDS[key.reason]} in {lost.turns:,} of {turns:,} turns: "
        f"{each:,} tokens each, {lost.tokens:,} in all"
    )
    help = SORTED if key.change == "reordered" else HELP[key.reason]
    return CacheCost(
        client=client,
        model=key.model,
        reason=key.reason,
        turns=lost.turns,
        of_turns=turns,
        lost_tokens=lost.tokens,
        lost_ms=round(lost.ms, 1),
        response_id=lost.response_id,
        place=lost.place,
        words=words,
        advice=_where(lost.place) + help,
    )


def _where(place: Place | None) -> str:
    match place:
        case Place(part="tools", name=None, change=change):
            return "" if change == "reordered" else f"A tool was {change}. "
        case Place(part="tools", name=name, change=change) if change != "reordered":
            return f"The tool '{name}' was {change}. "
        case Place(part="tools", name=name):
            return f"From '{name}' on: "
        case Place(part="instructions", line=line, character=character):
            return f"The instructions change at line {line}, character {character}. "
        case Place(part="input", item=item, name=name, line=line):
            return f"The input changes at input[{item}] ({name}), line {line}. "
        case _:
            return ""
