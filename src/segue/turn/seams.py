"""Every way the product may vary, on one page.

A seam is a protocol with a few domain verbs. Each has one contract suite in `tests/contracts/` that every
implementation passes. Only the builders (`app.py`, `builders/`, `models.py`, `storage.py`) name an implementation.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Container,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from segue.limits import Draw, Grant, Key, KeyLimits, UsageTotal
from segue.turn.values import (
    Claim,
    Conversation,
    ConversationItem,
    EngineFacts,
    HostedCall,
    IdArray,
    Job,
    Owner,
    Parsed,
    Past,
    Piece,
    Rendered,
    Resent,
    Retention,
    Round,
    Scene,
    ToolResult,
    Turn,
    UsageEntry,
    Verdict,
    Warm,
)
from segue.wire.events import Event
from segue.wire.items import Item
from segue.wire.requests import Create
from segue.wire.tools import Tools

if TYPE_CHECKING:
    from segue.turn.compose import Composed
    from segue.turn.plan import Plan
    from segue.turn.running import Running


class Turns(Protocol):
    """What is remembered. The cache of a connection, a database and their layers are all `Turns`."""

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn with as much of its chain as can be found; None if it is absent or another owner's."""

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn alone, without its parents."""

    async def save(self, turn: Turn) -> None:
        """Remember it. Where the turn is to be stored, return only when it is durable."""

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        """Erase its bytes; False if there was nothing to erase."""


class Ledger(Protocol):
    """Who used how much. A stored turn's row is written by `Turns.save`, in the turn's own transaction."""

    async def settle(self, entries: Sequence[UsageEntry]) -> None:
        """Record these turns, each at most once however often it is given."""

    async def report(self, owner: Owner | None, since: int) -> Sequence[UsageTotal]:
        """What was used since then, by day, owner and model; of everybody if no owner is named."""


class EventLog(Protocol):
    """The events of turns that may be followed later: in the background, or after a lost connection."""

    async def append(self, owner: Owner, turn_id: str, events: Sequence[Event]) -> None:
        """Write the next events down; called at item and time boundaries, never for each token."""

    async def read_after(self, owner: Owner, turn_id: str, number: int) -> Sequence[Event] | None:
        """Every logged event with a higher number, in order; None if some of them are not there."""

    async def delete(self, owner: Owner, turn_id: str) -> None:
        """Erase them."""


class IdempotencyKeys(Protocol):
    """Which turn an idempotency key stands for, so that a repeat never makes the model run again."""

    async def claim(self, claim: Claim) -> Claim:
        """Take the key if it is free, atomically; returns the claim that holds it now."""

    async def release(self, claim: Claim) -> None:
        """Let go of a key whose turn was refused before it began."""


# Behind the last item of every conversation.
POSITION_MAX = 2**53


class Conversations(Protocol):
    """Rows of items by name. Their items are never read where a turn already knows them."""

    async def find(self, owner: Owner, conversation_id: str) -> Conversation | None:
        """The conversation without its items."""

    async def read(
        self, owner: Owner, conversation_id: str, since: int = 0, until: int = POSITION_MAX
    ) -> Sequence[ConversationItem]:
        """Its items in order, from this position to before that one. Positions of erased items stay empty."""

    async def names(self, owner: Owner, conversation_id: str) -> Sequence[tuple[int, str]]:
        """The position and the name of each item, in order."""

    async def save(
        self,
        conversation: Conversation,
        added: Sequence[ConversationItem] = (),
        turn: Turn | None = None,
    ) -> bool:
        """Write it with these items at its end, and a stored turn in the same transaction; False if it is gone or was
        written by another meanwhile."""

    async def delete(self, owner: Owner, conversation_id: str, item_id: str | None = None) -> bool:
        """Erase it, or one of its items; False if there was nothing to erase."""


class Keys(Protocol):
    """Who may come in. Secrets never get here: keys are known by digests of them."""

    async def add(self, key: Key, digest: str) -> None:
        """Give out a key."""

    async def find(self, digests: Sequence[str]) -> Mapping[str, Key]:
        """The keys among these digests that are neither revoked nor expired, in one query."""

    async def given_out(self) -> Sequence[Key]:
        """Every key that was ever given out, the oldest first."""

    async def limit(self, key_id: str, limits: KeyLimits) -> bool:
        """Give it these limits; False if there is no such key, or it was taken back."""

    async def revoke(self, key_id: str) -> bool:
        """Take it back for good; False if there is no such key, or it was taken back before."""

    async def note_use(self, key_ids: Sequence[str]) -> None:
        """These keys were used just now."""


class SharedLimits(Protocol):
    """What all processes together use of the limits of keys, and of the slots of engine servers. Not durable; nothing
    counts twice."""

    async def draw(self, draw: Draw) -> Grant:
        """Take note of what this process has used and would hold; what it is given of these limits."""


class Quota(Protocol):
    """What a caller may still use."""

    async def hold(self) -> None:
        """Take a slot for a turn, or refuse it."""

    def release(self, tokens: int = 0) -> None:
        """Give the slot back: the turn is over and has used this many tokens."""


class Seals(Protocol):
    """Encryption of data that clients keep for us: only this server can read or change it."""

    def seal(self, owner: Owner, body: bytes) -> str:
        """An opaque text that holds these bytes for this owner."""

    def open(self, owner: Owner, sealed: str) -> bytes | None:
        """The bytes; None if this is not ours, not this owner's, or under a key that is gone."""


class Maintenance(Protocol):
    """What a store does beside its turns, so that nothing runs, lies or is served there for ever."""

    async def beat(self) -> bool:
        """Say that this process lives; False if others took it for dead, and ended what it ran."""

    async def recover(self) -> int:
        """End as failed what dead processes left running; how many. What they left queued, with its request, stays so
        and no process owns it."""

    async def take_over(self, count_max: int) -> Sequence[tuple[Owner, str]]:
        """Some of the queued turns that no process owns: from now on this one does, and is to run them."""

    async def erasures(self) -> Sequence[tuple[Owner, str]]:
        """Turns that any process has erased since the last call; some may be returned twice."""

    async def sweep(self, retention: Retention) -> bool:
        """Erase a few of those that are too old; False when this pass has seen them all."""


# Called with the body of a message. Must not wait.
Hear = Callable[[bytes], None]


class Bus(Protocol):
    """Messages between workers. Nothing is kept: a worker that is not connected misses them."""

    async def publish(self, topic: str, body: bytes) -> None:
        """Send to all subscribers of this topic, this process included; `Unavailable` if the bus is away."""

    def subscribe(self, topic: str, hear: Hear) -> AbstractAsyncContextManager[None]:
        """While inside, every message of this topic is delivered; those of one worker in their order."""


class OtherProcesses(Protocol):
    """The other processes that share the store, and questions to them, by subject."""

    @property
    def others(self) -> Sequence[str]:
        """Their names."""

    def answer(self, subject: str, call: Callable[[str, bytes], Awaitable[bytes | None]]) -> None:
        """From now on `call` handles questions and messages about this subject."""

    def when_gone(self, call: Callable[[str], None]) -> None:
        """From now on `call` is called with each process that is gone."""

    async def send(self, subject: str, body: bytes) -> None:
        """Send a message that needs no answer to all of them."""

    async def ask(self, subject: str, body: bytes, of: Collection[str]) -> Mapping[str, bytes]:
        """The answers of these processes, by name."""

    async def find(
        self, subject: str, body: bytes, of: Collection[str]
    ) -> tuple[str, bytes] | None:
        """The first of these processes that has an answer, and the answer."""


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


class Tool(Protocol):
    """What the server may do for the model."""

    async def call(self, call: HostedCall) -> ToolResult:
        """Run the call. What goes wrong outside is returned as a failed item; being cancelled stops the work."""


class Reader(Protocol):
    """Reads one model turn as it is sampled. Cutting the pieces elsewhere never changes what was said."""

    def feed(self, piece: Piece) -> list[Parsed]:
        """What has become certain with this piece."""

    def close(self, *, is_cut: bool) -> list[Parsed]:
        """End the turn: close what is open and seal it. `is_cut`: the model was stopped in mid-sentence."""

    @property
    def is_over(self) -> bool:
        """Whether the model may say no more, though it has not stopped: what follows is not read."""


class Filter(Protocol):
    """Stands between what the model wrote and the client: stop strings, guards, a summary that is not shown."""

    @property
    def is_shut(self) -> bool:
        """Whether nothing more may pass; what is kept is then not what was sampled."""

    async def feed(self, parsed: list[Parsed]) -> list[Parsed]:
        """What may pass now, of this and of what was held back before."""

    async def close(self, parsed: list[Parsed]) -> list[Parsed]:
        """The round is over: what may pass of the rest."""


class Gate(Filter, Protocol):
    """The guards of one turn: a filter that is also asked about what the model is given."""

    @property
    def names(self) -> tuple[str, ...]:
        """The guards whose verdict the turn keeps."""

    def ask(self, scene: Scene, *, is_first: bool) -> None:
        """Show the guards what is new for the model in this round; their verdict is awaited beside it."""

    async def clear(self, scene: Scene, *, is_first: bool) -> bool:
        """Whether approved calls may be made, before the model sees this scene."""

    async def admit(self, items: Sequence[Item]) -> bool:
        """Whether model and client may get what one of our own tools has found."""

    async def vet(self, text: str) -> bool:
        """Whether a text that the client does not see may be kept."""

    def drop(self) -> list[Parsed]:
        """Nothing more may pass; what ends an item that has begun to pass."""

    async def leave(self) -> None:
        """The turn is over: stop what still runs."""


class PromptCache(Protocol):
    """Histories of earlier requests with their prompts, for clients that resend their whole history."""

    async def recognise(self, owner: Owner, create: Create, size: int) -> Resent | None:
        """What a history that comes as a whole is known by, and its longest beginning that was sent before; None if it
        is not to be known. `size` is that of the request in bytes."""

    def resume(self, plan: Plan) -> tuple[Past | None, int]:
        """The past that the items of this plan begin with, its prompt warm, and how many of them that is."""

    def keep(self, plan: Plan, first: Composed, wrote: Sequence[Round], warm: Warm | None) -> None:
        """Remember the history of this plan with its first prompt, and the answer if the model wrote it in one round,
        with what is warm after it. `wrote`: the rounds of a turn that is complete."""


class HostedCalls(Protocol):
    """The calls of one turn that tools of this server answer."""

    @property
    def is_spent(self) -> bool:
        """Whether the model asks for more calls than it may have, again and again."""

    async def begin(self, may_act: Callable[[Plan], Awaitable[bool]]) -> Plan:
        """What happens before the model speaks: files are read, approved calls made, remote tools listed. `may_act`:
        whether approved calls may be made."""

    async def answer(
        self, wrote: Sequence[Item], scene: Scene, *, may_run: bool
    ) -> tuple[Item, ...]:
        """The outputs of the calls among these items. `may_run`: the model has stopped by itself."""

    async def append(
        self,
        items: tuple[Item, ...],
        rounds: Sequence[Round],
        may_act: Callable[[tuple[Item, ...]], Awaitable[bool]],
    ) -> tuple[Item, ...]:
        """Appended items with their files read and the calls made that they approve."""


class Hosted(Protocol):
    """The tools that this server runs."""

    def check(self, tools: Tools, may: Container[str]) -> None:
        """Refuse a request that names a tool that cannot be run, or not by this caller."""

    async def fetch(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        """The items with the contents of their URLs, where the operator allows that."""

    async def read_files(self, plan: Plan) -> Plan:
        """The plan with the text of its PDF files."""

    def open(self, plan: Plan, running: Running, gate: Gate | None) -> HostedCalls:
        """The calls of this turn. What they find passes the gate before anybody gets it."""


class Dialect(Protocol):
    """How a model family writes and reads: renderer and parser in one, because they must agree."""

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


class Guard(Protocol):
    """Whether something may pass. A guard keeps nothing of what it is shown; if it cannot say, it raises."""

    @property
    def name(self) -> str:
        """Names the guard and its rules; a verdict that is kept holds only under the same one."""

    async def check(self, texts: Sequence[str]) -> Verdict:
        """Whether the model may be given these; asked beside rendering and sampling."""

    async def watch(self, text: str) -> Verdict:
        """Whether this may be sent to the client: a window of an answer, and a little of what came before it."""
