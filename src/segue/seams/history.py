"""What is kept of a conversation? Turns and their rounds, linked to their parents.

A response is a commit: a `Turn` names its parent, a chain of parents is a history, a second child is a fork.
Everything here is a value that is never changed in place, so that turns share their past for free. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec import Struct

from segue.seams.prompt import NO_IDS, Head, IdArray, Prompt
from segue.wire.effects import Effects
from segue.wire.items import Call, HostedOutput, Item
from segue.wire.response import Response
from segue.wire.tools import Tools

Owner = str


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
    fresh = [index for index, round in enumerate(rounds) if round.is_fresh]
    return rounds[fresh[-1] :] if fresh else rounds


class Warm(Struct, frozen=True):
    """What makes the next turn fast and changes nothing: the prompt so far, and the head it was made with."""

    fingerprint: str
    head: Head
    prompt: Prompt
    # Which replica of the engine served this turn, and so holds its prefix.
    route: str | None = None


class Unfinished(Struct, frozen=True):
    """The rounds of a turn that still runs, as its next round sees them: a link of the history like a `Turn`."""

    parent: Past | None
    rounds: tuple[Round, ...]
    warm: Warm | None = None
    # No guard has passed it as a whole yet.
    passed: tuple[str, ...] = ()


class Turn(Struct, frozen=True, weakref=True):
    """A finished turn: a commit that others may name as their parent."""

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
    # Whether its first save is refused (`Fenced`) if its idempotency key belongs to another turn by now. Not in the
    # background: such a turn is saved before it runs.
    holds_key: bool = False
    # What its API keeps of the request for turns that continue it: the head of the prompt as the client wrote it.
    head_sent: tuple[bytes, ...] = ()
    # Our own measure of what this node alone holds in memory.
    bytes: int = 0
    # The row of the usage ledger; None while the turn runs and after a reload.
    usage: UsageEntry | None = None

    @property
    def given(self) -> tuple[Item, ...]:
        """What the client sent for this turn, all of it: a rollout is given more as it goes on. What our own tools have
        answered is output."""
        answered = _answered(self)
        sent = (item for round in self.rounds if not round.is_fresh for item in round.given)
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
            for round in self.rounds
            for item in (*(given for given in round.given if given.raw in answered), *round.wrote)
        )


Past = Turn | Unfinished


Link = TypeVar("Link", Turn, Past)


def ancestors(link: Link) -> list[Link]:
    """This link of a history and all before it, oldest first."""
    found = [link]
    while (parent := found[-1].parent) is not None:
        found.append(parent)
    found.reverse()
    return found


def above(link: Past) -> Past | None:
    """The link before this one, unless the model no longer sees anything before it."""
    return None if any(round.is_fresh for round in link.rounds) else link.parent


def _answered(turn: Turn) -> set[bytes]:
    """What may stand among the given items and is ours."""
    # What our own tools have put before the first words of the model has an id.
    may_be_ours = len(turn.rounds) > 1 or any(
        item.value.id for round in turn.rounds for item in round.given
    )
    return {bytes(raw) for raw in turn.response.output} if may_be_ours else set()


@dataclass(frozen=True, slots=True)
class KnownHistory:
    """A history that a client has sent as a whole, known again where it is the beginning of a longer one."""

    # The turn that it was sent for.
    turn_id: str
    # Its items as links of a history, with the prompt that they became; the last one with the answer, if it ended
    # as the model wrote it.
    past: Unfinished
    open_calls: dict[str, Call]
    model_turns: int
    # The items as they were understood, with references resolved and seals opened; and what they hold in memory.
    given: tuple[Item, ...]
    given_bytes: int


class Resent(Struct, frozen=True):
    """A history that came as a whole, and its beginning, where that was sent before."""

    beginning: KnownHistory | None = None

    def known_count(self, given: tuple[Item, ...]) -> int:
        """How many of these items, which are the same as they are understood now, the beginning stands for; 0 if they
        are understood otherwise now: what a reference names may have changed."""
        return 0

    def without_plain(self, sent: tuple[Item, ...]) -> tuple[Item, ...]:
        """Those of the items that were sent which may contain files, images or audio."""
        return sent


# The status of a row that is no turn's: what the containers of an owner have used. It has no model.
CONTAINERS = "containers"


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
    # Of containers.
    container_s: float = 0.0
    cpu_s: float = 0.0
    egress_bytes: int = 0
    # The API key that it was asked with; nothing without one, and in rows of older versions.
    key_id: str = ""
