"""The response object: every field that the SDKs and Open Responses need (docs/protocol.md 2.1), and small answers.

Numbers are never null. What is echoed from the request and can be long (tools, instructions) is held as bytes
that were encoded once.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from segue.wire.cache import CacheEcho, MaybeDiagnostics
from segue.wire.requests import CacheRetention

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


# What is made of a byte of a choice of tools, and the byte itself: the shortest name of a tool takes some thirty.
CHOICE_COST = 5


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

    @property
    def echo_bytes(self) -> int:
        """What the words of the request that it repeats hold in memory, and what was made of them; but for the
        instructions and the tools, which a chain of responses shares."""
        texts = (self.user, self.prompt_cache_key, *self.metadata, *self.metadata.values())
        size = sum(map(len, filter(None, texts)))
        # Of each tool that a choice names there is an object.
        choice = memoryview(self.tool_choice).nbytes
        return 2 * size + 2 * memoryview(self.text).nbytes + CHOICE_COST * choice


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
    # What it takes in, in tokens: ours. Left out where it is not known.
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
