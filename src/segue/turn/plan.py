"""A turn that may start: the model that will speak, the request bound to its history, and what is counted of it.

Nouns only: `resolve` makes the `Resolved`, `admit` the `Plan`, the loop reads them. `Tally` belongs to one running turn
and is read after its end; everything else is never changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from msgspec import Struct

from segue.turn.compact import Kind
from segue.turn.seams import Dialect, Engine, Guard, Quota
from segue.turn.values import Effects, Head, Owner, Round, Sampling, Turn
from segue.wire.items import Call, InputFile, Item
from segue.wire.requests import Create
from segue.wire.response import Response

USUAL = Sampling()
ReasoningView = Literal["text", "summary", "hidden"]


@dataclass(frozen=True, slots=True)
class Guards:
    """Who is asked whether something may pass: what the model is given, and what it answers."""

    inputs: tuple[Guard, ...] = ()
    outputs: tuple[Guard, ...] = ()
    # How many characters of an answer are held back and watched together.
    window_chars: int = 400
    # What a file says, as the model will read it.
    read_file: Callable[[InputFile], str | None] = lambda file: None

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
    context_tokens: int
    # What holds where a request does not say.
    sampling: Sampling = USUAL
    output_tokens_max: int | None = None
    reasoning: ReasoningView = "text"
    created_at: int = 0
    # What becomes of pictures and sound that the model cannot take in: told in words, or refused.
    unseen: Literal["tell", "refuse", "seen"] = "tell"
    # Whether every prompt is rendered cold as well and compared.
    checks_rendering: bool = False
    guards: Guards = NO_GUARDS


Models = Mapping[str, Model]


class Resolved(Struct, frozen=True):
    """A request bound to its parent."""

    create: Create
    parent: Turn | None
    given: tuple[Item, ...]
    head: Head
    open_calls: dict[str, Call]
    # How often the model has spoken before this turn.
    model_turns: int
    model: str
    # How many lists of tools had to be decoded: that of the request, and those that items have brought now.
    tool_decodes: int
    # What the items have brought, the new ones included.
    effects: Effects
    # Rounds of this very request that come before `given`: what a compaction replaced, and what stands for it.
    earlier: tuple[Round, ...] = ()


@dataclass(slots=True)
class Tally:
    """What one turn cost, counted while it runs and read after its end."""

    bytes_received: int = 0
    items_validated: int = 0
    tool_decodes: int = 0
    tokens_tokenized: int = 0
    tokens_reused: int = 0
    tokens_sampled: int = 0
    # Characters that guards have looked at: of what is new in the input, and of the answer.
    guard_chars_checked: int = 0
    guard_chars_watched: int = 0
    # Calls that our own tools have answered, and when sampling paused for them, in seconds of `perf_counter`.
    tool_calls: int = 0
    pauses: list[tuple[float, float]] = field(default_factory=list)
    # Whether the store has written the usage down, together with the turn.
    is_recorded: bool = False
    # Pictures and sounds that were told in words.
    media_told: int = 0
    found_in: Literal["connection", "store", "missing"] | None = None
    # The trace that the client has begun, as it was sent (W3C Trace Context).
    traceparent: str = ""
    stage_s: dict[str, float] = field(default_factory=dict)
    # The turn's timeline, in seconds of `perf_counter`: received, validated, resolved, rendered, first_token,
    # last_token, saved, sent, settled. Of a turn with several rounds the first of each but the last `last_token`.
    marks: dict[str, float] = field(default_factory=lambda: {"received": perf_counter()})

    def mark(self, name: str) -> None:
        """Note when this happened first."""
        self.marks.setdefault(name, perf_counter())


@dataclass(frozen=True, slots=True)
class Plan:
    """A turn that may start."""

    id: str
    owner: Owner
    resolved: Resolved
    model: Model
    sampling: Sampling
    is_stored: bool
    # The response as the client first sees it.
    response: Response
    root_at: int
    tally: Tally
    quota: Quota
    # The lane and connection that wait for it; nothing for a request of its own.
    lane: str = ""
    # What the turn makes instead of an answer, if anything.
    compacts: Kind | None = None
    # A prompt of more tokens than this is compacted first; 0: never.
    threshold: int = 0
    # How long a rollout waits for the outputs of its calls.
    append_s_max: float = 600.0
    # Those of the model, unless the owner has some of its own.
    guards: Guards = NO_GUARDS

    @property
    def generates(self) -> bool:
        """Whether the model is to speak."""
        return self.resolved.create.generates

    @property
    def key(self) -> str:
        """The idempotency key, or nothing."""
        return self.resolved.create.idempotency_key or ""

    @property
    def is_keyed(self) -> bool:
        """Whether the same request may come again and mean this turn."""
        return bool(self.key)

    @property
    def is_rollout(self) -> bool:
        """Whether it waits for its client's tools instead of ending (docs/protocol.md 11)."""
        return bool(self.resolved.create.rollout) and self.generates

    @property
    def can_be_steered(self) -> bool:
        """Whether a steer may be taken on (docs/protocol.md 6.10)."""
        create = self.resolved.create
        is_plain = not (create.conversation or create.context_management or self.compacts)
        return self.generates and is_plain and not self.is_rollout
