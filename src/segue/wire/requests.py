"""What a client may ask: the body of `POST /v1/responses` and of `response.create`, field by field.

Known fields are type-checked, unknown ones are ignored (docs/protocol.md 2). `input` items and `tools` stay raw
here: they are decoded where it is known what is new in them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

# Fields that may be null or absent, and fields that are kept as bytes.
MaybeText = str | None | UnsetType
MaybeFlag = bool | None | UnsetType
RawField = Raw | UnsetType
Number = Annotated[float, Meta(ge=-2, le=2)]
# What clients and stores can hold; JSON itself has no end of digits.
COUNT_MAX = 2**63 - 1
Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
# Below 0 is what models and older clients have written; what it means is decided where it is used.
Whole = Annotated[int, Meta(ge=-COUNT_MAX - 1, le=COUNT_MAX)]


class ToolName(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tool of a choice; which fields count depends on its type."""

    type: str
    name: str | None = None
    namespace: str | None = None
    server_label: str | None = None


class ToolChoiceName(ToolName, frozen=True, kw_only=True, omit_defaults=True):
    """A tool choice given as an object: a tool, or several that are allowed."""

    mode: Literal["auto", "required"] | None = None
    tools: list[ToolName] | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningConfig(Struct, frozen=True):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: str | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Literal["standard", "pro"] | None = None


class TextFormat(Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | UnsetType = UNSET
    schema: RawField = UNSET
    strict: bool | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET


class TextConfig(Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


CacheMode = Literal["implicit", "explicit"]
CacheTtl = Literal["30m", "12h"]
CacheRetention = Literal["in_memory", "24h"]


class CacheOptions(Struct, frozen=True):
    mode: CacheMode | None = None
    ttl: CacheTtl | None = None
    prewarm: bool | None = None
    # Asks for `prompt_cache_diagnostics` on the response.
    comparison_response_id: str | None = None


class CacheBreakpoint(Struct, frozen=True):
    """The end of a prefix that is worth caching. Engines cache every prefix, so it is checked and changes nothing."""

    mode: Literal["explicit"]
    ttl: CacheTtl | None = None


class StreamOptions(Struct, frozen=True):
    include_obfuscation: bool | None = None


class ConversationRef(Struct, frozen=True):
    id: str


class PromptRef(Struct, frozen=True):
    id: str
    version: str | None = None
    variables: RawField = UNSET


class Compact(Struct, frozen=True):
    type: str
    compact_threshold: Whole | None = None


MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)]


StopString = Annotated[str, Meta(min_length=1, max_length=256)]


class Create(Struct, frozen=True, kw_only=True):
    """A request for one turn."""

    type: str | UnsetType = UNSET
    model: str | None = None
    input: str | list[Raw] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    store: bool | None = None
    generate: bool | None = None
    # Checked by hand, because a bad one has its own error and must not be echoed.
    stream_id: RawField = UNSET
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    tools: RawField = UNSET
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceName | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=COUNT_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    # No fields of the contract's, but of every engine's.
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] | None = None
    seed: Whole | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: list[Compact] | None = None
    prompt: PromptRef | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: CacheRetention | None = None
    service_tier: str | None = None
    metadata: Metadata | None = None
    safety_identifier: Annotated[str, Meta(max_length=128)] | None = None
    user: str | None = None
    # Codex's own; a trace that it has begun is all that is read of it.
    client_metadata: RawField = UNSET
    moderation: RawField = UNSET
    idempotency_key: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    # Ours, experimental, on the socket only: one long response for a whole rollout (docs/protocol.md 11).
    rollout: bool | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings at which the answer ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def is_warm_up(self) -> bool:
        """Whether the model is not to speak: the request only prepares (docs/protocol.md 6.7)."""
        options = self.prompt_cache_options
        return self.generate is False or bool(options is not None and options.prewarm)

    @property
    def conversation_id(self) -> str | None:
        """The conversation that this request joins, if any."""
        named = self.conversation
        return named.id if isinstance(named, ConversationRef) else named


class NewConversation(Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/conversations`, and of an update, which has no items."""

    items: list[Raw] | None = None
    metadata: Metadata | None = None


class AddedItems(Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/conversations/{id}/items`."""

    items: list[Raw]


class SteerFrame(Struct, frozen=True, kw_only=True):
    """`response.steer`: exactly these keys; a `stream_id` is noticed so that it can be refused."""

    type: str
    previous_response_id: str
    input: RawField = UNSET
    stream_id: RawField = UNSET


class AppendFrame(Struct, frozen=True, kw_only=True):
    """`response.append`: what a waiting rollout asked for."""

    type: str
    response_id: str
    input: list[Raw]
