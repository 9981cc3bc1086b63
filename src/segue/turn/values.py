"""The nouns of a turn: what is asked, what is kept, what is sampled.

A response is a commit: a `Turn` names its parent, a chain of parents is a history, a second child is a fork.
Everything here is a value that is never changed in place, so that turns share their past for free. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeVar

from msgspec import Raw, Struct, structs

from segue.errors import ApiError
from segue.lineage import NO_LINEAGE, Lineage
from segue.wire.effects import NO_EFFECTS, Effects
from segue.wire.items import Call, HostedOutput, Item, Logprob, McpCall, McpListTools
from segue.wire.requests import Effort, ReasoningConfig, TextConfig, TextFormat, ToolChoiceName
from segue.wire.response import Response
from segue.wire.tools import NO_TOOLS, CallKind, Execution, Offer, Tools

Owner = str
IdArray = array  # of typecode "I": four bytes a token


def id_array(ids: Sequence[int] = ()) -> IdArray[int]:
    """Token ids, compactly."""
    return array("I", ids)


NO_IDS = id_array()


class ImageAt(NamedTuple):
    """An image, and the ids that stand for it. `url` is a data URL, the very string of the item."""

    begin: int
    end: int
    url: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt as a chain of chunks: appending is O(new), and a fork shares everything before it.

    A dataclass, not a Struct, because a long chain of them must be freed without recursion.
    """

    before: Tokens | None
    ids: IdArray[int]
    length: int
    # Where in `ids`.
    images: tuple[ImageAt, ...] = field(default=(), kw_only=True)

    def plus(self, ids: IdArray[int]) -> Tokens:
        """These tokens and then some more."""
        return Tokens(self, ids, self.length + len(ids)) if ids else self

    def chunks(self) -> list[IdArray[int]]:
        """The chunks from first to last."""
        found: list[IdArray[int]] = []
        node: Tokens | None = self
        while node is not None:
            found.append(node.ids)
            node = node.before
        found.reverse()
        return found

    def flat(self) -> IdArray[int]:
        """All ids in one array: O(history), for engines that want them all, and for tests."""
        joined = id_array()
        for chunk in self.chunks():
            joined.extend(chunk)
        return joined

    def all_images(self) -> list[ImageAt]:
        """The images from first to last, and where they stand in the whole prompt."""
        found: list[ImageAt] = []
        node: Tokens | None = self
        while node is not None:
            if node.images:
                before = node.length - len(node.ids)
                found[:0] = [ImageAt(before + a, before + b, url) for a, b, url in node.images]
            node = node.before
        return found


NO_TOKENS = Tokens(None, NO_IDS, 0)


@dataclass(frozen=True, slots=True)
class Messages:
    """A prompt for engines that take chat messages: each serialized once, chained as `Tokens` are."""

    before: Messages | None
    data: bytes
    # In bytes.
    length: int
    # How they were written; others can follow only if they are written alike. None: none can.
    form: object = None
    # About how many tokens these are: what the endpoint has counted, and an estimate of what came since.
    tokens: int = 0

    def plus(self, data: bytes, form: object = None, tokens: int = 0) -> Messages:
        """These messages and then some more, already joined by commas."""
        tokens += self.tokens
        return Messages(self, data, self.length + len(data), form, tokens) if data else self

    def chunks(self) -> list[bytes]:
        """The chunks from first to last."""
        found: list[bytes] = []
        node: Messages | None = self
        while node is not None:
            if node.data:
                found.append(node.data)
            node = node.before
        return found[::-1]


NO_MESSAGES = Messages(None, b"", 0)


Prompt = Tokens | Messages


class Head(Struct, frozen=True):
    """What stands before and around the history in a prompt. Not inherited: each request brings its own."""

    instructions: str | None = None
    tools: Tools = NO_TOOLS
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceName = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()


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


class Round(Struct, frozen=True):
    """One call of the model: what it was given, the items that it wrote, and the ids that it sampled.

    `ids` has one array for each item, `tail` what closed the model's turn: joined they are what the engine
    sampled, to the id. They hold only for the dialect and vocabulary with this `fingerprint`; without it, or
    with another one, the items are written canonically.
    """

    given: tuple[Item, ...]
    wrote: tuple[Item, ...] = ()
    ids: tuple[IdArray[int], ...] = ()
    tail: IdArray[int] = NO_IDS
    fingerprint: str | None = None
    did_sample: bool = False
    # Whether history begins anew here: what is given stands for everything before it (compaction).
    is_fresh: bool = False


def since_fresh(rounds: Sequence[Round]) -> Sequence[Round]:
    """The rounds that the model still sees: from the last fresh one on."""
    for index in range(len(rounds) - 1, -1, -1):
        if rounds[index].is_fresh:
            return rounds[index:]
    return rounds


@dataclass(frozen=True, slots=True)
class Warm:
    """What makes the next turn fast and changes nothing: the prompt so far, and the head it was made with."""

    fingerprint: str
    head: Head
    prompt: Prompt
    # Which replica of the engine served this turn, and so holds its prefix.
    route: str | None = None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The rounds of a turn that still runs, as its next round sees them: a link of the history like a `Turn`."""

    parent: Past | None
    rounds: tuple[Round, ...]
    warm: Warm | None = None
    # No guard has passed it as a whole yet.
    passed: tuple[str, ...] = ()

    @property
    def above(self) -> Past | None:
        return above(self)

    def lineage(self) -> list[Past]:
        """The links up to this one, oldest first."""
        return _lineage(self)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Turn:
    """A finished turn: a commit that others may name as their parent.

    A dataclass, not a Struct, because a long chain of them must be freed without recursion.
    """

    id: str
    owner: Owner
    parent_id: str | None
    parent: Turn | None
    rounds: tuple[Round, ...]
    response: Response
    # Whether a durable store holds this turn. Its ancestors may still be missing there.
    is_stored: bool
    # Calls that wait for an output, by call_id.
    open_calls: dict[str, Call]
    # How many times the model has spoken in this history, this turn included.
    model_turns: int
    # The tools as decoded for this turn, so that the next one may skip that; None after a reload.
    tools: Tools | None = None
    # The effects of the items up to here; None after a reload.
    effects: Effects | None = None
    warm: Warm | None = None
    # When the chain began: a template that prints a date takes it from here, so that midnight changes nothing.
    root_at: int = 0
    # The names of its chain and of the fork in it, and the replica of the engine that served it.
    chain: str = ""
    fork: str = ""
    route: str | None = None
    # Whether every ancestor was found; only then may the turn be continued.
    is_whole: bool = True
    # The guards that have let everything up to here pass, by name; their verdict holds for turns that continue it.
    passed: tuple[str, ...] = ()
    # The request of a turn that is queued, so that another process can run it.
    request: bytes = b""
    # Whether it is saved for the first time and ends the use of an idempotency key, which must still be its own.
    holds_key: bool = False
    # Our own measure of what this node alone holds in memory.
    bytes: int = 0
    # The row of the usage ledger; None while the turn runs and after a reload.
    usage: UsageEntry | None = None

    @property
    def given(self) -> tuple[Item, ...]:
        """What the client sent for this turn, all of it: a rollout is given more as it goes on. What our own tools have
        answered is output."""
        answered = _answered(self)
        sent = (item for one in self.rounds if not one.is_fresh for item in one.given)
        return tuple(
            item
            for item in sent
            if item.raw not in answered and not isinstance(item.value, HostedOutput)
        )

    @property
    def output(self) -> tuple[Item, ...]:
        """The output as the client saw it, in order: what the model wrote, and what hosted tools answered."""
        answered = _answered(self)
        return tuple(
            item
            for one in self.rounds
            for item in (*(given for given in one.given if given.raw in answered), *one.wrote)
        )

    @property
    def above(self) -> Past | None:
        return above(self)

    def lineage(self) -> list[Turn]:
        """This turn and its ancestors, oldest first."""
        return _lineage(self)


Past = Turn | Unfinished
Link = TypeVar("Link", Turn, Past)


def _lineage(link: Link) -> list[Link]:
    found = [link]
    while (parent := found[-1].parent) is not None:
        found.append(parent)
    found.reverse()
    return found


def above(link: Past) -> Past | None:
    """The link before this one, unless the model no longer sees anything before it."""
    return None if any(one.is_fresh for one in link.rounds) else link.parent


def _answered(turn: Turn) -> set[bytes]:
    """What may stand among the given items and is ours."""
    may_be_ours = len(turn.rounds) > 1 or any(
        isinstance(item.value, OURS) for one in turn.rounds for item in one.given
    )
    return {bytes(raw) for raw in turn.response.output} if may_be_ours else set()


# Items that our own tools may put before the first words of the model.
OURS = (McpListTools, McpCall)


@dataclass(frozen=True, slots=True)
class SentHistory:
    """A history that a client has sent as a whole and may send again as the beginning of a longer one."""

    # The turn that it was sent for.
    turn_id: str
    # What it is found by.
    key: int
    # The items as they were sent, and as they were understood: with references resolved and seals opened.
    sent: tuple[Item, ...]
    given: tuple[Item, ...]
    # The same items as links of a history, with the prompt that they became; the last one with the answer, if it ended
    # as the model wrote it.
    past: Unfinished
    # The prompt without the answer.
    prompt: Prompt
    open_calls: dict[str, Call]
    model_turns: int
    # Our own measure of what it holds in memory.
    bytes: int


class Resent(Struct, frozen=True):
    """A history that came as a whole: what it will be found by, its items as they were sent, and its beginning, where
    that was sent before."""

    key: int
    sent: tuple[Item, ...] = ()
    beginning: SentHistory | None = None

    def known_beginning(self, given: tuple[Item, ...]) -> SentHistory | None:
        """The beginning, if these items, which are the same as they are understood now, still begin with it: what a
        reference names may have changed."""
        known = self.beginning
        return known if known is not None and given[: len(known.given)] == known.given else None


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
        past = self.past.lineage() if self.past is not None else []
        yield from since_fresh([*(one for link in past for one in link.rounds), *self.rounds])


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
        return structs.replace(self, context=replace(self.context, tokens=tokens))

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


# What a model wrote.
Written = Ids | Deltas
Piece = JobStarted | Written | Finish


class ItemOpened(Struct, frozen=True):
    """The model begins an item."""

    kind: Literal["message", "reasoning"] | CallKind
    name: str = ""
    namespace: str | None = None
    is_async: bool = False
    # Who runs a search for tools.
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


class HostedCall(Struct, frozen=True):
    """A call that one of our own tools is to answer."""

    owner: Owner
    # The id of the item that the client sees.
    item_id: str
    # The tool as the request gave it, secrets included: never stored, logged or shown.
    definition: Raw
    # Which function of it.
    name: str
    # JSON, as the model wrote it.
    arguments: str
    # How many sources earlier calls of this response have found: those of this call are numbered after them.
    sources_before: int = 0


class Source(Struct, frozen=True):
    """A place that an answer may cite."""

    url: str
    title: str


class ToolResult(Struct, frozen=True):
    """What a hosted tool has done: the words for the model, and the item that the client sees."""

    # Data for the model; never a special token.
    text: str
    # The finished item, such as an `mcp_call`.
    item: Item
    # What the answer may cite.
    sources: tuple[Source, ...] = ()


class UsageEntry(Struct, frozen=True):
    """One row of usage: who, which model, how much, and how it ended. Never content."""

    turn_id: str
    owner: Owner
    model: str
    status: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    ended_at: int
    # Calls that our own tools answered.
    tool_calls: int = 0


class Retention(Struct, frozen=True):
    """How long things are kept, in seconds; 0: until they are deleted."""

    turns_s: int = 0
    events_s: int = 0


class Claim(Struct, frozen=True):
    """An idempotency key as a turn holds it: the digest tells a repeat from another request with the same key."""

    owner: Owner
    key: str
    turn_id: str
    digest: bytes
    is_stored: bool


class Conversation(Struct, frozen=True):
    """A row of items that responses read and add to, by name (docs/protocol.md 1)."""

    id: str
    owner: Owner
    created_at: int
    metadata: dict[str, str]
    # The turn that has seen the first so many of its items, and can be continued instead of reading them again.
    tip_id: str | None = None
    tip_items: int = 0
    # How many items were ever added; and how often it was written, so that two who write at once notice.
    count: int = 0
    version: int = 0
    # The turn that speaks in it now, wherever that runs.
    speaker: str | None = None


class ConversationItem(Struct, frozen=True):
    """An item of a conversation, under its name there."""

    id: str
    item: Item


class Cancel(Struct, frozen=True):
    """The client has left or has asked us to stop."""


class Drain(Struct, frozen=True):
    """The process is going away and its grace is over."""


class Steer(Struct, frozen=True):
    """The client wants the answer to go another way; it waits for a safe boundary (docs/protocol.md 6.10)."""

    id: str
    input: Raw
    items: tuple[Item, ...]


class Append(Struct, frozen=True):
    """What a waiting rollout was asked for, already paired with its calls, and what that holds in memory."""

    items: tuple[Item, ...]
    bytes: int = 0


class Blocked(Struct, frozen=True):
    """The turn may not go on: a guard blocks its input, no guard could be asked, or it ran for too long. What was held
    never leaves."""

    error: ApiError


class Filtered(Struct, frozen=True):
    """A guard does not let the rest of the answer pass."""


Notice = Cancel | Drain | Steer | Append | Blocked | Filtered


class Verdict(Struct, frozen=True):
    """What a guard says. `reason` is why it blocks, in a word or two and never in those of the text; None: it does
    not."""

    reason: str | None = None


PASSED = Verdict()
