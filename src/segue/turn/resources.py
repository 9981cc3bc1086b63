"""What do all turns of a process share, and which halves of the loop live in other rooms?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from segue.seams.access import Room, Seals
from segue.seams.history import Owner, Past, Resent, Round, Warm
from segue.seams.lineage import NO_LINEAGE, Lineage
from segue.seams.model import Finish, Job, Parsed, Scene
from segue.seams.store import Turns
from segue.seams.tools import LateOffers, Offers
from segue.turn.plan import Composed, FirstPrompt, Guards, Models, Plan
from segue.turn.running import Running
from segue.wire.cache import MaybeDiagnostics
from segue.wire.items import Item
from segue.wire.requests import Create


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

    async def known_items(
        self, owner: Owner, create: Create, size: int
    ) -> Sequence[Item | None] | None:
        """The items of a history that comes as a whole, where the same bytes were sent before; None if it is not to be
        known. `size` is that of the request in bytes."""

    async def recognise(
        self, owner: Owner, create: Create, items: tuple[Item, ...], known: Sequence[Item | None]
    ) -> Resent:
        """What a history that comes as a whole is known by, and its longest beginning that was sent before."""

    def resume(self, plan: Plan) -> tuple[Past | None, int]:
        """The past that the items of this plan begin with, its prompt warm, and how many of them that is."""

    def remember(
        self, plan: Plan, first: Composed, wrote: Sequence[Round], warm: Warm | None
    ) -> None:
        """Remember the history of this plan with its first prompt, and the answer if the model wrote it in one round,
        with what is warm after it. `wrote`: the rounds of a turn that is complete."""


class NextRound(NamedTuple):
    """What follows the calls of a round, so that it can be read ahead."""

    # What the dialect will see, by the answers to the calls.
    scene: Callable[[tuple[Item, ...]], Scene]
    # The job of the round that made the calls, and how it ended.
    job: Job
    finish: Finish


class HostedCalls(Protocol):
    """The calls of one turn that tools of this server answer."""

    @property
    def is_spent(self) -> bool:
        """Whether the model asks for more calls than it may have, again and again."""

    async def begin(self, may_act: Callable[[Plan], Awaitable[bool]]) -> Plan:
        """What happens before the model speaks: files are read, and tools do what they have to do. `may_act`: whether
        calls may be made that an item allows."""

    async def answer(
        self,
        wrote: Sequence[Item],
        scene: Scene,
        *,
        may_run: bool,
        following: NextRound | None = None,
    ) -> tuple[Item, ...]:
        """The outputs of the calls among these items. `may_run`: the model has stopped by itself."""

    async def append(
        self,
        items: tuple[Item, ...],
        rounds: Sequence[Round],
        may_act: Callable[[tuple[Item, ...]], Awaitable[bool]],
    ) -> tuple[Item, ...]:
        """Appended items with their files read and the calls made that they approve."""


class Hosted(Offers, Protocol):
    """The tools that this server runs."""

    async def fetch(self, owner: Owner, items: tuple[Item, ...], room: Room) -> tuple[Item, ...]:
        """The items with the contents of this owner's files, and of their URLs, where the operator allows that."""

    async def read_files(self, plan: Plan) -> Plan:
        """The plan with the text of its PDF files."""

    async def prepare(self, plan: Plan) -> Plan:
        """The plan, with what its tools need made ready; or a refusal."""

    def open(self, plan: Plan, running: Running, gate: Gate | None) -> HostedCalls:
        """The calls of this turn. What they find passes the gate before anybody gets it."""


class LateHosted(LateOffers, Protocol):
    """The tools that this server runs, loaded with the first request that needs them."""

    def load(self) -> Hosted:
        """The tools."""


Diagnose = Callable[[FirstPrompt, str, Turns], Awaitable[MaybeDiagnostics]]


@dataclass(frozen=True, slots=True)
class Resources:
    """What all turns of a process share."""

    models: Models
    seals: Seals
    prompt_cache: PromptCache
    hosted: LateHosted | None = None
    # The guards of a turn that has any.
    open_gate: Callable[[Plan, Running], Gate] | None = None
    # Owners with guards of their own, instead of those of the model.
    guards: Mapping[Owner, Guards] = field(default_factory=dict)
    # How long a rollout waits for the outputs of its calls.
    append_s_max: float = 600.0
    # What keeps an owner's prompts apart in an engine's prefix cache; None: nothing.
    cache_salt: Callable[[Owner], str | None] = lambda owner: None
    # Where the jobs of a turn stand among others; and a turn that ends without an answer stands nowhere.
    trace_lineage: Callable[[Plan], Lineage] = lambda plan: NO_LINEAGE
    drop_lineage: Callable[[Plan], None] = lambda plan: None
    # How the prompt of a turn compares with that of another response, where its client asks for that.
    diagnose: Diagnose | None = None
    # After the answer, with what it holds in memory: what of this prompt could have been reused?
    report_prompt: Callable[[FirstPrompt, int], Awaitable[None]] | None = None
