"""What is said of the reuse of a prompt: what a response echoes, its diagnostics, and our own reports and advice."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from segue.wire.requests import CacheMode, CacheOptions, CacheTtl


class CacheEcho(Struct, frozen=True):
    """`prompt_cache_options` as the response repeats them."""

    mode: CacheMode = "implicit"
    ttl: CacheTtl = "30m"
    comparison_response_id: str | UnsetType = UNSET


def cache_echo(asked: CacheOptions | None) -> CacheEcho | UnsetType:
    """What the response says of these options, if there are any."""
    if asked is None:
        return UNSET
    compared = asked.comparison_response_id or UNSET
    return CacheEcho(asked.mode or "implicit", asked.ttl or "30m", compared)


CacheMissReason = Literal[
    "model_changed",
    "prompt_cache_key_changed",
    "tools_changed",
    "text_format_changed",
    "reasoning_effort_changed",
    "verbosity_changed",
    "context_compacted",
    "input_changed",
    "service_tier_changed",
]


class CacheDiagnostics(Struct, frozen=True):
    """How a prompt compares with that of the response named by `comparison_response_id`."""

    type: Literal["cache_miss", "cache_hit", "comparison_response_not_found", "unavailable"]
    # Of a miss: the first difference, and tokens of the compared prompt: all, and those that were not reused.
    reason: CacheMissReason | UnsetType = UNSET
    comparison_reusable_tokens: int | UnsetType = UNSET
    cache_missed_tokens: int | UnsetType = UNSET


MaybeDiagnostics = CacheDiagnostics | UnsetType


# Why tokens that could have been reused were not. The prompt changed, or the engine had lost them.
PromptReason = CacheMissReason | Literal["reasoning_dropped", "history_truncated"]
EngineReason = Literal[
    "engine_evicted",
    "engine_restarted",
    "engine_drained",
    "engine_removed",
    "engine_down",
    "engine_busy",
    "engine_other_replica",
]
LossReason = PromptReason | EngineReason


# Thousands of these are kept, and none refers back: the garbage collector need not look.
class Place(Struct, frozen=True, gc=False):
    """Where two prompts part."""

    # `model`, `tools`, `instructions`, `input`, or the name of a setting.
    part: str
    # The number of the item in the earlier input, from 0, and its type; of a tool its name.
    item: int | None = None
    name: str | None = None
    # The first character that differs: its line in the text of that part or item, from 1, and its place there, from 0.
    line: int = 1
    character: int = 0
    # Of tools: added, removed, reordered or changed.
    change: str | None = None


class Side(Struct, frozen=True, gc=False):
    """A text around the place where it parts from another; `at` is that place in it."""

    text: str
    at: int


class CacheReport(Struct, frozen=True, kw_only=True, gc=False):
    """What of the prompt of one turn was reused, and what was not (docs/cache.md)."""

    object: Literal["response.cache"] = "response.cache"
    response_id: str
    model: str
    verdict: Literal["first", "hit", "prompt_changed", "engine_lost"]
    reason: LossReason | None = None
    # The same in words.
    summary: str = ""
    # The turn whose prompt this one was compared with: its parent, or the nearest earlier one of the same owner.
    compared_with: str | None = None
    comparison: Literal["parent", "nearest"] | None = None
    input_tokens: int
    # What both prompts begin with; what the engine says it did not compute, if it says so; what could have been reused
    # and was not, and about how long that took.
    reusable_tokens: int = 0
    cached_tokens: int | None = None
    lost_tokens: int = 0
    lost_ms: float | None = None
    place: Place | None = None
    before: Side | None = None
    now: Side | None = None


class CacheCost(Struct, frozen=True, kw_only=True):
    """What one kind of loss has cost one client."""

    client: str
    model: str
    reason: LossReason
    # Turns with this loss, of so many turns of this client.
    turns: int
    of_turns: int
    lost_tokens: int
    lost_ms: float
    # The newest turn with it, and where its prompt parted; of other owners without the turn's id and a tool's name.
    response_id: str
    place: Place | None
    words: str
    advice: str


class CacheAdvice(Struct, frozen=True, kw_only=True):
    """What costs most in the last hour, and what helps."""

    object: Literal["cache.advice"] = "cache.advice"
    turns: int
    input_tokens: int
    lost_tokens: int
    costs: list[CacheCost]
