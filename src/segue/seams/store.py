"""What is remembered? `Turns` and the other stores, with the values that only they speak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from segue.limits import Spent
from segue.seams.history import Owner, Turn, UsageEntry
from segue.wire.events import Event
from segue.wire.items import Item

# Later than every usage row.
SECONDS_MAX = 2**53


class Retention(Struct, frozen=True):
    """How long things are kept, in seconds; 0: until they are deleted."""

    turns_s: int = 0
    events_s: int = 0


class UsageTotal(Struct, frozen=True):
    """What one key used of one model on one day (of UTC): how many turns, how many tokens. Containers belong to no
    model: they are in a row of their own, whose model is empty."""

    day: str
    owner: str
    model: str
    turns: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    tool_calls: int = 0
    container_s: float = 0.0
    cpu_s: float = 0.0
    egress_bytes: int = 0
    # Nothing where no key was needed.
    key_id: str = ""


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


class Listing(Protocol):
    """Which turns of an owner are stored, in the order in which they were saved first? And how large are they?"""

    async def newest(
        self, owner: Owner, before: str | None, count: int, *, is_tips: bool
    ) -> Sequence[str]:
        """So many ids, the latest first, of those before this one or of all; none if it is not there any more.
        `is_tips`: without turns that a stored turn continues."""

    async def stored_bytes(self, owner: Owner, turn_id: str, *, with_chain: bool) -> int:
        """How many bytes are stored of a turn, alone or with its chain; 0 where there is none."""


class Ledger(Protocol):
    """Who used how much. A stored turn's row is written by `Turns.save`, in the turn's own transaction."""

    async def settle(self, entries: Sequence[UsageEntry]) -> None:
        """Record these turns, each at most once however often it is given. A row of containers replaces the one that
        has its id."""

    async def report(
        self, owner: Owner | None, since: int, until: int = SECONDS_MAX
    ) -> Sequence[UsageTotal]:
        """What was used from then to before then, by day, owner, model and key; of everybody if no owner is named."""

    async def spent(self, owner: Owner, key_id: str, day: int, month: int) -> Spent:
        """The tokens of an owner and of one of its keys: of this day, and of all days from the first of the month on;
        days are counted from 1970 (of UTC)."""


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

    async def names(self, owner: Owner, conversation_id: str) -> Sequence[tuple[int, str, int]]:
        """The position and the name of each item, and about how many bytes it has, in order."""

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
