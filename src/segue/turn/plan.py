"""A turn that may start: the model that will speak, the request bound to its history, and what is counted of it.

Nouns only: a transport makes the `Arrival`, `resolve` the `Resolved`, `admit` the `Plan`, the loop reads them. `Tally`
belongs to one running turn and is read after its end; everything else is never changed in place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from segue.seams.access import Quota
from segue.seams.guard import Guard
from segue.seams.history import Owner, Resent, Round, Turn
from segue.seams.model import Dialect, Engine, JobStarted, Rendered, Sampling, Scene
from segue.seams.prompt import Head, Prompt
from segue.seams.store import Conversation, Turns
from segue.seams.tools import Leave
from segue.turn.compact import CompactionKind
from segue.wire.drafts import Streamed
from segue.wire.effects import Effects
from segue.wire.items import Call, Item, ItemValue
from segue.wire.requests import Create
from segue.wire.response import Response

USUAL = Sampling()
VALUE = attrgetter("value")
# Looking at so many items takes some milliseconds.
MANY_ITEMS = 2_000
ReasoningView = Literal["text", "summary", "hidden"]


class Guards(Struct, frozen=True):
    """The guards of a model or an owner: for what the model is given, and for what it answers."""

    inputs: tuple[Guard, ...] = ()
    outputs: tuple[Guard, ...] = ()
    # How many characters of an answer are held back and watched together.
    window_chars: int = 400

    @property
    def names(self) -> tuple[str, ...]:
        """The guards of the input: those whose verdict is kept."""
        return tuple(guard.name for guard in self.inputs)


NO_GUARDS = Guards()


@dataclass(frozen=True, slots=True)
class Model:
    """A model that we serve: who produces its tokens, and how it writes and reads."""

    name: str
    engine: Engine
    dialect: Dialect
    # As the operator says; None: as the engine says.
    context_tokens_set: int | None = None
    # What holds where a request does not say.
    sampling: Sampling = USUAL
    output_tokens_max: int | None = None
    reasoning: ReasoningView = "text"
    created_at: int = 0
    # What becomes of images and audio that the model cannot take: described in words, or refused.
    unseen: Literal["tell", "refuse"] = "tell"
    # Whether the model sees images, by the operator's word; None: as the engine says.
    sees: bool | None = None
    # Whether every prompt is rendered cold as well and compared.
    checks_rendering: bool = False
    guards: Guards = NO_GUARDS
    # Asks the endpoint how many tokens messages are; None where it does not say.
    count_tokens: Callable[[Scene], Awaitable[int | None]] | None = None

    @property
    def context_tokens(self) -> int | None:
        """How long prompt and answer may be together; None: unknown."""
        return self.context_tokens_set or self.engine.facts.context_tokens

    @property
    def sees_images(self) -> bool:
        """Whether the model is shown images: the dialect can write them, and the operator or the engine says so."""
        sees = self.engine.facts.sees_images if self.sees is None else self.sees
        return self.dialect.takes_images and bool(sees)


Models = Mapping[str, Model]


class Given(Struct, frozen=True):
    """The items of a request, as they are understood."""

    items: tuple[Item, ...] = ()
    # Rounds that come before them: what a compaction among them has replaced, and what stands for it.
    earlier: tuple[Round, ...] = ()
    # Where the history came as a whole: what was sent of it before.
    resent: Resent | None = None
    # Whether there may be files, images or audio among them.
    has_media: bool = True

    @property
    def kinds(self) -> frozenset[type]:
        return frozenset(map(type, map(VALUE, self.items)))


class Resolved(Struct, frozen=True):
    """A request bound to its parent."""

    create: Create
    parent: Turn | None
    given: tuple[Item, ...]
    # What the given items hold in memory.
    given_bytes: int
    head: Head
    open_calls: dict[str, Call]
    # How often the model has spoken before this turn.
    model_turns: int
    model: str
    # How many lists of tools had to be decoded: that of the request, and those of its items.
    tool_decodes: int
    # The effects of all items, the new ones included.
    effects: Effects
    # Rounds of this very request that come before `given`: what a compaction replaced, and what stands for it.
    earlier: tuple[Round, ...] = ()
    # Where the history came as a whole: what was sent of it before.
    resent: Resent | None = None
    # Whether there may be files, images or audio among the given items.
    has_media: bool = True
    # Whether hosted tools may be called, or files are to be read before the model speaks.
    is_hosted: bool = False


class Joined(Struct, frozen=True):
    """A conversation as a turn meets it: the turn to continue, and the items that it has not seen."""

    conversation: Conversation
    tip: Turn | None
    new_items: tuple[Item, ...]


class Caller(Struct, frozen=True):
    """Who asks for a turn, and what is there for it."""

    owner: Owner
    turns: Turns
    # The parent, where it is known already.
    known: Turn | None = None
    # The lane and connection that wait; nothing for an HTTP request.
    lane: str = ""
    # The conversation that the turn joins, if any.
    joined: Joined | None = None
    # The scopes of the caller's key.
    may: frozenset[str] = frozenset()
    # None for a caller without limits.
    quota: Quota | None = None
    # The digest of the caller's API key, and its id; nothing for a caller without one.
    key: str = ""
    key_id: str = ""
    # The models that the key may use; none: all.
    models: tuple[str, ...] = ()
    # What the API keeps with the turn, for turns that continue it.
    head_sent: tuple[bytes, ...] = ()


class Receipt(Struct, frozen=True):
    """How a request was received: by which transport, from which client, and when. It outlives the turn, and so holds
    nothing of the request."""

    # The name of the transport in metrics, traces and logs: "http", "sse" or "websocket".
    transport: str = "http"
    # Whether the client reads events as they come: it may lose the last ones with its connection, and ask for them.
    is_streamed: bool = False
    # The `x-request-id` of an HTTP request; on a WebSocket, that of the upgrade and a number.
    request_id: str = ""
    # The name that the client gives itself, without its version.
    client: str = ""
    # The trace that the client has begun, as it was sent (W3C Trace Context).
    traceparent: str = ""
    # The size of the request; 0 where this process did not receive it.
    bytes_received: int = 0
    # What it takes over from an earlier request, which is read anew with it.
    bytes_inherited: int = 0
    received_at: float = msgspec.field(default_factory=perf_counter)

    @property
    def bytes_read(self) -> int:
        """How much is read of it in all."""
        return self.bytes_received + self.bytes_inherited


class Arrival(Struct, frozen=True):
    """A request as a transport hands it over: what it asks for, who asks, and how it was received."""

    create: Create
    caller: Caller
    receipt: Receipt
    # What it asks for instead of an answer, if anything.
    compacts: CompactionKind | None = None


class Span(NamedTuple):
    """A stage of a turn, from when to when, in seconds of `perf_counter`."""

    stage: str
    began: float
    ended: float


class Tally(Struct):
    """What one turn cost, counted while it runs and read after its end."""

    # Of the request, and of what a rollout was given later.
    bytes_received: int = 0
    items_validated: int = 0
    tool_decodes: int = 0
    tokens_tokenized: int = 0
    tokens_reused: int = 0
    prompts_differing: int = 0
    # Characters that guards have looked at: of what is new in the input, and of the answer.
    guard_chars_checked: int = 0
    guard_chars_watched: int = 0
    # Calls that our own tools have answered.
    tool_calls: int = 0
    # Tokens that the engine has read before a tool had ended; those whose text the tool then took back.
    tokens_ahead: int = 0
    tokens_ahead_lost: int = 0
    # Whether the store has written the usage row together with the turn.
    is_recorded: bool = False
    # Images and audio that were described in words.
    media_told: int = 0
    # The types of tools that the request lists and that are not set up.
    unserved_tools: tuple[str, ...] = ()
    found_in: Literal["connection", "store", "missing"] | None = None
    # What the engine said of its last job.
    started: JobStarted = JobStarted()
    # Which of the client's stop strings has ended the answer.
    stop_string: str | None = None
    # Where the client compares the prompt with an earlier one: the part in which they differ, and the tokens of the
    # earlier one that were not reused.
    parted: tuple[str, int] | None = None
    # Why tokens of the prompt that could have been reused were not, and how many (docs/cache.md).
    lost: tuple[str, int] | None = None
    # The timeline, the one record of when what happened; metrics, traces and the dashboard read it.
    spans: list[Span] = []


class Plan(Struct, frozen=True):
    """A turn that may start."""

    id: str
    arrival: Arrival
    resolved: Resolved
    model: Model
    sampling: Sampling
    is_stored: bool
    # The response as the client first sees it.
    response: Response
    root_at: int
    tally: Tally
    # Whether the model is to speak.
    generates: bool = True
    # Whether it waits for its client's tools instead of ending (docs/protocol.md 11).
    is_rollout: bool = False
    # Whether a steer may be accepted (docs/protocol.md 6.10).
    can_be_steered: bool = False
    # What the turn makes instead of an answer, if anything.
    compacts: CompactionKind | None = None
    # A prompt of more tokens than this is compacted first; 0: never.
    threshold: int = 0
    guards: Guards = NO_GUARDS
    # How the model writes the calls of hosted tools that were made ready for this turn.
    streamed: Mapping[type[ItemValue], Streamed] = {}
    # What these tools do when the turn is over.
    leaves: tuple[Leave, ...] = ()

    @property
    def owner(self) -> Owner:
        return self.arrival.caller.owner

    @property
    def key(self) -> str:
        """The idempotency key, or nothing."""
        return self.arrival.create.idempotency_key or ""


class Composed(Struct, frozen=True):
    """A prompt, and the scene that it shows: without its oldest items if it was truncated."""

    rendered: Rendered
    scene: Scene
    # What the engine is to continue, and how many tokens that is; of messages, about how many.
    prompt: Prompt
    length: int
    is_truncated: bool = False


class FirstPrompt(Struct, frozen=True):
    """The first prompt of a turn's answer, as the engine read it: on which replica, and how much of it was cached."""

    plan: Plan
    composed: Composed
    read: JobStarted
