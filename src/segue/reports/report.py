"""How is it said in words what of a prompt was lost, and when has the engine lost it? Pure."""

from __future__ import annotations

from typing import NamedTuple

from segue.reports.compare import Parting
from segue.seams.model import JobStarted, Moved
from segue.wire.cache import EngineReason, LossReason, Place

# Engines cache in blocks, and always compute the last tokens again: less than this is no loss.
SLACK_TOKENS = 256

WORDS: dict[LossReason, str] = {
    "model_changed": "another model was named",
    "prompt_cache_key_changed": "prompt_cache_key changed",
    "tools_changed": "the tools changed",
    "text_format_changed": "text.format changed",
    "reasoning_effort_changed": "reasoning.effort changed",
    "verbosity_changed": "text.verbosity changed",
    "context_compacted": "the history was compacted",
    "input_changed": "earlier input changed",
    "service_tier_changed": "service_tier changed",
    "reasoning_dropped": "earlier reasoning is gone from the prompt",
    "history_truncated": "the oldest items were dropped to fit the context (truncation: auto)",
    "engine_evicted": "the engine has evicted the prefix, or a part of it",
    "engine_restarted": "the engine failed since the earlier turn, as in a restart, and has lost the prefix",
    "engine_drained": "the replica with the prefix is drained; another one served this turn",
    "engine_removed": "the replica with the prefix was removed; another one served this turn",
    "engine_down": "the replica with the prefix does not answer; another one served this turn",
    "engine_busy": "the replica with the prefix has a long queue; another one served this turn",
    "engine_other_replica": "another replica of the engine served this turn",
}
MOVES: dict[Moved, EngineReason] = {
    "drained": "engine_drained",
    "removed": "engine_removed",
    "down": "engine_down",
    "busy": "engine_busy",
}


class Earlier(NamedTuple):
    """The turn that a prompt goes on from: its replica, and when it began."""

    id: str
    route: str | None
    at: float


def is_lost(expected: int, cached: int | None) -> bool:
    """Whether the engine computed again what it was expected to have; not known where it does not say."""
    return cached is not None and expected - cached > SLACK_TOKENS


def engine_reason(earlier: Earlier, read: JobStarted) -> EngineReason:
    """Why the engine does not have the prompt of the earlier turn any more."""
    if earlier.route is not None and read.route is not None and earlier.route != read.route:
        return MOVES.get(read.moved, "engine_other_replica")
    return "engine_restarted" if read.recovered_at > earlier.at else "engine_evicted"


def summary(reason: LossReason, lost: int, parting: Parting | None) -> str:
    """The loss in one sentence."""
    words = WORDS[reason]
    if parting is not None:
        words += _where(parting.place)
    return f"{words}: {lost:,} tokens were computed again"


def _where(place: Place) -> str:
    at = f"line {place.line}, character {place.character}"
    if place.part == "instructions":
        return f" in the instructions, {at}"
    if place.part == "input":
        return f" in input[{place.item}] ({place.name}), {at}"
    if place.part == "tools":
        is_reordered = place.change == "reordered"
        change = "the same tools in another order, from" if is_reordered else place.change or "at"
        return f" ({change} '{place.name}')"
    return ""
