"""Who writes, and how is it read? `Engine`, `Dialect` and `Reader`, with their values: scene, job, pieces."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from msgspec import Struct, structs

from segue.seams.history import Owner, Past, Round, Unfinished, Warm, ancestors, since_fresh
from segue.seams.lineage import NO_LINEAGE, Lineage
from segue.seams.prompt import NO_IDS, Head, IdArray, Messages, Prompt
from segue.wire.effects import NO_EFFECTS, Effects
from segue.wire.items import Item, Logprob
from segue.wire.requests import Effort, TextFormat
from segue.wire.tools import Execution, Offer


class Sampling(Struct, frozen=True):
    """How the engine is to choose."""

    # None: as the engine does it by itself.
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: int = 0
    # Whether to say how likely each token of the text was, and the `top_logprobs` likeliest in its place.
    wants_logprobs: bool = False
    # The same one makes the same choices, as far as the engine promises that.
    seed: int | None = None
    # Where the answer ends; for engines that give text. Of those that give ids it is read here.
    stop_strings: tuple[str, ...] = ()


class EngineFacts(Struct, frozen=True):
    """What an engine says of itself; None where it does not say."""

    # How long prompt and answer may be together, and how much of that a job must leave free.
    context_tokens: int | None = None
    reserved_tokens: int = 0
    # How many jobs it works on at a time.
    slots: int | None = None
    models: tuple[str, ...] = ()
    sees_images: bool | None = None
    # How it chooses where a job does not say.
    sampling: Sampling = Sampling()
    # Whether it takes and gives ids without any text, where some servers of its kind do.
    ids_alone: bool | None = None


class Grammar(Struct, frozen=True):
    """What the input of a custom tool must follow, in the words of its owner; or, as a structural tag, what the whole
    answer must look like."""

    syntax: Literal["lark", "regex", "structural_tag"]
    definition: str


class Scene(Struct, frozen=True):
    """Everything that a dialect may look at to write a prompt: the history, then this turn's rounds so far,
    then what is given now."""

    head: Head
    past: Past | None
    given: tuple[Item, ...]
    rounds: tuple[Round, ...] = ()
    root_at: int = 0
    # Whether the engine can be held to a JSON schema; only then may a dialect begin a forced call itself.
    can_constrain: bool = False
    # Whether the model is shown images; otherwise they are described in words.
    sees_images: bool = False
    # Whether the engine can be held to a structural tag.
    can_follow_tags: bool = False
    # The effects of the items, those that are given now included.
    effects: Effects = NO_EFFECTS

    @property
    def offers(self) -> tuple[Offer, ...]:
        """The tools that the model knows: of the request, then of the items."""
        return self.head.tools.offers + self.effects.offers

    @property
    def deferred(self) -> tuple[Offer, ...]:
        """The tools that a search can find."""
        return self.head.tools.deferred + self.effects.deferred

    @property
    def effort(self) -> Effort | None:
        """How much the model is to think, by the last word on it."""
        return self.effects.effort or self.head.reasoning.effort

    @property
    def format(self) -> TextFormat | None:
        """What the text must be, by the last word on it; None: plain text."""
        wanted = self.effects.format or self.head.text.format
        return None if wanted is None or wanted.type == "text" else wanted

    def after(
        self, last: Round, warm: Warm | None, head: Head, given: tuple[Item, ...], effects: Effects
    ) -> Scene:
        """The scene of the next round: the last one is its past, and still warm."""
        rounds = (*self.rounds, structs.replace(last, given=self.given))
        past = Unfinished(self.past, rounds, warm)
        return structs.replace(self, head=head, past=past, rounds=(), given=given, effects=effects)

    def history(self) -> Iterator[Round]:
        """Every finished round before `given` that the model still sees, oldest first."""
        past = ancestors(self.past) if self.past is not None else []
        rounds = [round for link in past for round in link.rounds]
        return iter(since_fresh([*rounds, *self.rounds]))


class Rendered(Struct, frozen=True):
    """A prompt: the context, then the cue that makes the model speak, then the words that we put into its mouth.

    The cue is not part of a warm-up's past. `lead` begins an answer that is forced (a tool call); the reader reads it
    as if the model had said it. What follows must then be JSON of this `schema`, or text of this grammar.
    """

    context: Prompt
    cue: IdArray[int]
    tokens_tokenized: int
    tokens_reused: int
    lead: IdArray[int] = NO_IDS
    schema: bytes | Grammar | None = None

    def counted(self, tokens: int | None) -> Rendered:
        """The same with the endpoint's own count of its tokens, where messages have one."""
        if not tokens or not isinstance(self.context, Messages):
            return self
        return structs.replace(self, context=structs.replace(self.context, tokens=tokens))

    @property
    def prompt(self) -> Prompt:
        """What the engine is to continue."""
        if isinstance(self.context, Messages):
            return self.context
        return self.context.plus(self.cue + self.lead)


class Job(Struct, frozen=True):
    """One request to an engine. Token engines look at the prompt; `scene` is there for those that do not."""

    prompt: Prompt
    scene: Scene
    sampling: Sampling
    stops: frozenset[int]
    # None: as much as the engine has room for.
    output_tokens_max: int | None
    # The answer must be JSON of this schema, or text of this grammar.
    schema: bytes | Grammar | None = None
    # For whom, and on which lane of which connection; engines that are shared are shared fairly.
    owner: Owner = ""
    lane: str = ""
    # The replica that served the parent, as long as it is healthy.
    route: str | None = None
    lineage: Lineage = NO_LINEAGE
    # How often the model has spoken before in this history.
    model_turns: int = 0
    # Prompts with another one share nothing in the engine's prefix cache.
    cache_salt: str | None = None
    # Nobody waits for it: an engine without room leaves it out.
    is_ahead: bool = False
    # Takes a piece where it arrives, so that no task wakes for it. An engine yields the pieces that it does not take.
    take: Callable[[Written], bool] | None = None


class TokenLogprob(Struct, frozen=True):
    """How likely a sampled token was, and the likeliest tokens in its place, by id."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Ids(Struct, frozen=True):
    """Tokens that an engine sampled together. `logprobs` are there only where they were asked for, one for each id;
    None where the engine does not report it."""

    ids: Sequence[int]
    logprobs: Sequence[TokenLogprob | None] = ()


class Delta(Struct, frozen=True):
    """What a chat endpoint streamed, already parsed by that endpoint."""

    text: str = ""
    reasoning: str = ""
    call_index: int | None = None
    call_name: str = ""
    call_arguments: str = ""
    # Of the text, where they were asked for.
    logprobs: tuple[Logprob, ...] = ()


class Deltas(Struct, frozen=True):
    """Those that came together, in order."""

    deltas: tuple[Delta, ...]


# The parent's replica is drained or removed by the operator, does not answer, or has a long queue.
Moved = Literal["", "drained", "removed", "down", "busy"]


class JobStarted(Struct, frozen=True):
    """What is known before the first token, and so also of a turn that is broken off: which replica has the job, and
    how much of the prompt it does not have to compute. Of several the last one counts."""

    # None where the engine does not say.
    cached_tokens: int | None = None
    route: str | None = None
    # Where this is not the replica of the parent: why.
    moved: Moved = ""
    # When the replica was last noticed to answer again after a failure, by the wall clock; 0: never.
    recovered_at: float = 0.0
    # Of the replica, where that is a router with workers of its own.
    worker: str | None = None


class Finish(Struct, frozen=True):
    """The engine's last word: why it stopped, and how much of the prompt it did not have to compute."""

    reason: Literal["stop", "length", "content_filter"]
    # None where the engine does not say.
    cached_tokens: int | None = None
    # What the engine itself counted; None where we know better, because the ids are ours.
    input_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    # At which of the client's stop strings it stopped, where the engine looks for them and says it.
    stop_string: str | None = None


# What a model wrote.
Written = Ids | Deltas


Piece = JobStarted | Written | Finish


class ItemOpened(Struct, frozen=True):
    """The model begins an item."""

    # The name of a row of `wire/kinds.py`.
    kind: str
    name: str = ""
    namespace: str | None = None
    is_async: bool = False
    # Who runs it, where the server may.
    execution: Execution | None = None

    @property
    def is_call(self) -> bool:
        """Whether this is a call, of whatever kind."""
        return self.kind not in ("message", "reasoning")


class ItemText(Struct, frozen=True):
    """The model adds to the open item: text, reasoning, arguments or input.

    Where they were asked for, `logprobs` are those of the tokens that begin in this text.
    """

    text: str
    logprobs: tuple[Logprob, ...] = ()


class ItemClosed(Struct, frozen=True):
    """The open item is finished; these ids are its part of what was sampled."""

    ids: IdArray[int]
    is_cut: bool = False


class TurnClosed(Struct, frozen=True):
    """The model's turn is over; these ids close it, so that history can go on after them."""

    ids: IdArray[int]


Parsed = ItemOpened | ItemText | ItemClosed | TurnClosed


class Engine(Protocol):
    """Who produces tokens."""

    @property
    def can_constrain(self) -> bool:
        """Whether it can be held to a JSON schema."""

    @property
    def grammars(self) -> frozenset[str]:
        """The syntaxes of grammars that it can be held to: `lark`, `regex`, `structural_tag`."""

    def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Stream what the model says, then one `Finish`; before it a `JobStarted`, if anything is known by then.
        Closing the iterator frees the engine's slot. A piece that `job.take` takes may be left out."""

    async def is_ready(self) -> bool:
        """Whether a job would be taken now; where it would, `facts` is what the engine says of itself."""

    @property
    def facts(self) -> EngineFacts:
        """What is known of it by now. Asked when the server starts, and again when the engine comes back."""


class Reader(Protocol):
    """Reads one model turn as it is sampled. Cutting the pieces elsewhere never changes what was said."""

    def feed(self, piece: Piece) -> list[Parsed]:
        """What has become certain with this piece."""

    def close(self, *, is_cut: bool) -> list[Parsed]:
        """End the turn: close what is open and seal it. `is_cut`: the model was stopped in mid-sentence."""

    @property
    def is_over(self) -> bool:
        """Whether the model may say no more, though it has not stopped: what follows is not read."""


class Dialect(Protocol):
    """How a model family writes and reads: renderer and parser in one, because they must agree."""

    @property
    def name(self) -> str:
        """What `--dialect` calls it; `messages` where the engine renders and parses."""

    @property
    def fingerprint(self) -> str:
        """Names dialect and vocabulary; kept ids hold only under the same one."""

    @property
    def stops(self) -> frozenset[int]:
        """Ids that end the model's turn."""

    @property
    def takes_images(self) -> bool:
        """Whether images can be written for a model that sees them."""

    def render(self, scene: Scene) -> Rendered:
        """The prompt. What is warm in `scene.past` saves work and never changes a token."""

    def write(self, items: Sequence[Item]) -> IdArray[int]:
        """The ids with which the model itself would have said these items, its end mark included."""

    def reader(self, scene: Scene) -> Reader:
        """A reader for the answer to this scene."""


@runtime_checkable
class ComparedDialect(Protocol):
    """A dialect that can hold its prompts against the model's own chat template."""

    def differs(self, scene: Scene, rendered: Rendered) -> bool:
        """Whether this prompt says anything else than the template run over all items, white space aside."""


def template_values(operator: Mapping[str, object], effort: Effort | None) -> dict[str, object]:
    """What a chat template gets besides the conversation: the operator's values, over which a client's effort wins.

    Models have three names for it; a template ignores the names that it does not know.
    """
    if effort is None:
        return dict(operator)
    is_thinking = effort != "none"
    thinking = {"enable_thinking": is_thinking, "thinking": is_thinking, "reasoning_effort": effort}
    return {**operator, **thinking}
