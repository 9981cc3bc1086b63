"""The response object: every field that the SDKs and Open Responses need (docs/protocol.md 2.1), and small answers.

Numbers are never null. What is echoed from the request and can be long (tools, instructions) is held as bytes
that were encoded once.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from segue.wire.requests import CacheMode, CacheOptions, CacheRetention, CacheTtl

ResponseStatus = Literal["queued", "in_progress", "completed", "failed", "incomplete", "cancelled"]
# A response with one of these never changes again.
ENDED = frozenset({"completed", "failed", "incomplete", "cancelled"})


class InputDetails(Struct, frozen=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


NO_USAGE = Usage(0, InputDetails(), 0, OutputDetails(), 0)


class Fault(Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str
    param: str | UnsetType | None = UNSET
    type: str | UnsetType = UNSET


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens", "max_messages", "content_filter", "steered"]


class ReasoningEcho(Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class Named(Struct, frozen=True):
    id: str


class TextEcho(Struct, frozen=True):
    """`text` as the response repeats it, never without a format."""

    format: Raw
    verbosity: str = "medium"


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


class Response(Struct, frozen=True, kw_only=True):
    """One response as the client sees it; a snapshot, replaced as the turn goes on."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool = False
    error: Fault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: Raw
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[Raw] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: Raw
    tool_choice: Raw
    tools: Raw
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: str
    usage: Usage | None = None
    user: str | None
    metadata: dict[str, str]
    conversation: Named | UnsetType = UNSET
    # Where the request has them.
    prompt_cache_options: CacheEcho | UnsetType = UNSET
    prompt_cache_retention: CacheRetention | UnsetType = UNSET
    prompt_cache_diagnostics: MaybeDiagnostics = UNSET


# Why tokens that could have been reused were not. The prompt changed, or the engine had lost them.
PromptReason = CacheMissReason | Literal["reasoning_dropped", "history_truncated"]
EngineReason = Literal["engine_evicted", "engine_restarted", "engine_other_replica"]
LossReason = PromptReason | EngineReason


class Place(Struct, frozen=True):
    """Where two prompts part."""

    # `model`, `tools`, `instructions`, `input`, or the name of a setting.
    part: str
    # The number of the item in the earlier input, from 0, and its type; of a tool its name.
    item: int | None = None
    name: str | None = None
    # The first character that differs in the text of that part or item, from 0, and its line, from 1.
    character: int = 0
    line: int = 1
    # Of tools: added, removed, reordered or changed.
    change: str | None = None


class Side(Struct, frozen=True):
    """A text around the place where it parts from another; `at` is that place in it."""

    text: str
    at: int


class CacheReport(Struct, frozen=True, kw_only=True):
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
    repairs: tuple[str, ...] = ()


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
    # The newest turn with it, and where its prompt parted.
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


class ItemList(Struct, frozen=True, kw_only=True):
    """A page of items."""

    object: Literal["list"] = "list"
    data: list[Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model that we serve."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "segue"
    # What it takes in, in tokens: ours. Left out where nobody says.
    context_window: int | UnsetType = UNSET
    # What it takes in, besides what is described to it in words: ours, by OpenRouter's and Codex's name.
    input_modalities: list[Literal["text", "image"]]


class ModelList(Struct, frozen=True, kw_only=True):
    """All models that we serve."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Deleted(Struct, frozen=True, kw_only=True):
    """A response is gone."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class CompactionWindow(Struct, frozen=True, kw_only=True):
    """What a compacted conversation goes on from: the user's messages that are kept, and one compaction item."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[Raw]
    usage: Usage | None


class InputTokens(Struct, frozen=True, kw_only=True):
    """How long a prompt would be."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ConversationObject(Struct, frozen=True, kw_only=True):
    """A conversation as the client sees it, without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(Struct, frozen=True, kw_only=True):
    """A conversation is gone."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
