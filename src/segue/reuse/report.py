"""How is it said in words what of a prompt was lost, and when has the engine lost it? Pure."""

from __future__ import annotations

from segue.reuse.compare import Parting
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
    "engine_evicted": "the engine has evicted a part of the prefix",
    "engine_restarted": "the engine has nothing of the prefix: it was restarted, or has evicted all of it",
    "engine_other_replica": "another replica of the engine served this turn",
}


def engine_reason(
    expected: int, cached: int | None, routes: tuple[str | None, str | None]
) -> EngineReason | None:
    """Why the engine computed again what it was expected to have; None: it did not, or does not say."""
    if cached is None or expected - cached <= SLACK_TOKENS:
        return None
    before, now = routes
    if before is not None and now is not None and before != now:
        return "engine_other_replica"
    return "engine_evicted" if cached else "engine_restarted"


def summary(reason: LossReason, lost: int, parting: Parting | None) -> str:
    """The loss in one sentence."""
    words = WORDS[reason]
    if parting is not None:
        words += _where(parting.place)
    return f"{words}: {lost:,} tokens were read again"


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
