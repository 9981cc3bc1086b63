"""What may the server do for the model? `HostedTool`: a tool that this server runs, as one value.

A room exports one (`web/`, `mcp/`, `tools/tool_search.py`), `server/hosted.py` has a row for it, and nothing else names
it. The value says by which definitions a request asks for the tool, what the model can call then, and for each type of
item that it works on (`HostedKind`) how it is called and which events the client sees meanwhile.

A call becomes an answer in one of two ways. Either the call's own item stays open until the tool is done, as an
`mcp_call` does: the client reads the outcome there, and the model reads the `text` of the result. Or the tool answers
with an item of its own, as a `tool_search_output` does (`HostedKind.answer`): client and model read that item. Either
way the tool may send events inside the item while it works (`HostedCall.emit`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from msgspec import Raw, Struct

from segue.seams.history import Owner, Turn
from segue.seams.model import Scene
from segue.wire.drafts import Streamed
from segue.wire.effects import Effects
from segue.wire.events import Inside
from segue.wire.items import Body, Item, ItemValue
from segue.wire.requests import Create
from segue.wire.tools import Definition, Offer, ToolDefinition, Tools

C = TypeVar("C", bound=Body)
V = TypeVar("V", bound=Body)
Leave = Callable[[], Coroutine[None, None, None]]


# --- a call and its result --------------------------------------------------------------------------


class Emit(Protocol):
    """Sends an event inside the item of a call while the tool works; waits while the client reads too slowly."""

    def __call__(self, event: type[Inside], /, **fields: object) -> Awaitable[None]: ...


# Takes what there is of a result while its tool works, so that the engine can read it: all of the text so far, and a
# maker of the result by such a text.
ShowProgress = Callable[[str, Callable[[str], "ToolResult"]], None]


def unseen(text: str, make: Callable[[str], ToolResult]) -> None:
    """Nobody reads ahead."""


async def unheard(event: type[Inside], /, **fields: object) -> None:
    """Nobody follows the call."""


class HostedCall(Struct, frozen=True):
    """A call that a hosted tool is to answer."""

    owner: Owner
    # The id of the item that the client sees.
    item_id: str
    # The tool as the request gave it, secrets included: never stored, logged or shown.
    definition: ToolDefinition
    # Which function of it.
    name: str
    # JSON, as the model wrote it.
    arguments: str
    # How many sources earlier calls of this response have found: those of this call are numbered after them.
    sources_before: int = 0
    # What the model saw when it made the call; None for a call that is made before the model speaks.
    scene: Scene | None = None
    emit: Emit = unheard
    # Text that was shown is never taken back: a result that is not continued as shown is only read in vain.
    show: ShowProgress = unseen


class Source(Struct, frozen=True):
    """A place that an answer may cite."""

    url: str
    title: str


class ToolResult(Struct, frozen=True):
    """What a hosted tool has done: the words for the model, and the item that the client sees."""

    # Data for the model; never a special token. Not read where the tool answers with an item of its own.
    text: str
    # The finished item, such as an `mcp_call`.
    item: Item
    # What the answer may cite.
    sources: tuple[Source, ...] = ()


class Tool(Protocol):
    """What the server may do for the model."""

    async def call(self, call: HostedCall) -> ToolResult:
        """Run the call. What goes wrong outside is returned as a failed item; being cancelled stops the work."""


# --- a tool -----------------------------------------------------------------------------------------


class ToolRequest(Struct, frozen=True):
    """What a tool is asked: by which definition of the request, which function of it, with which arguments."""

    key: str
    function: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedKind(Generic[C, V]):
    """A type of item that a hosted tool works on: `C` is the call, `V` the item, which is the call itself as a rule."""

    struct: type[V]
    # Does the work; None where the operator has not set it up.
    tool: Tool | None
    request: Callable[[C], ToolRequest]
    # The events inside the item: when the work begins, while it goes on, and when it has ended.
    begun: tuple[type[Inside], ...]
    emitted: tuple[type[Inside], ...] = ()
    ended: Callable[[V], type[Inside] | None] = lambda value: None
    # The item when the tool cannot be run, by the message and a number of MCP's; and when the response ends before.
    failed: Callable[[V, str, int], V]
    stopped: Callable[[V], V]
    # The item of its own with which the tool answers a call, as it begins, by an item that the model wrote and a
    # maker of ids; None if that is no call of ours. Where there is no such function, the item is the call itself.
    answer: Callable[[ItemValue, Callable[[type[ItemValue]], str]], V | None] | None = None
    # The item without its arguments, and these: where no model writes the item, they follow in events all the same.
    apart: Callable[[V], tuple[V, str]] | None = None
    # Whether the model has asked for it: then it counts, and the model gets an answer.
    is_call: bool = True


AnyHostedKind = HostedKind[ItemValue, ItemValue]


class TurnAhead(Struct, frozen=True):
    """A turn that may start, and of which nothing was sent yet."""

    owner: Owner
    tools: Tools
    # The tools as its response shows them, and as that of its parent did.
    shown: Raw
    shown_before: Raw | None
    given: tuple[Item, ...]
    # The items of the turns before it, the newest first.
    earlier: Callable[[], Iterator[Item]]
    is_stored: bool
    # What of hosted calls the client wants to see.
    include: tuple[str, ...] = ()
    # The scopes of the caller's key.
    may: Container[str] = frozenset()
    parent: Turn | None = None


class Prepared(Struct, frozen=True):
    """What a tool has made ready for a turn."""

    # The tools as the response shows them.
    shown: Raw
    # How the model writes the calls of this turn, where that depends on what was made ready.
    streamed: Mapping[type[ItemValue], Streamed] = {}
    # Items that its model is given after those of the request.
    notes: tuple[Item, ...] = ()
    # Lets go of what no call has used, when the turn is over or does not begin; it raises nothing.
    leave: Leave | None = None


class TurnStart(Struct, frozen=True):
    """A turn before its model speaks, or a waiting one to which items were appended."""

    given: tuple[Item, ...]
    # What was said before, as far as the items may refer to it.
    earlier: tuple[Item, ...]
    tools: Tools
    effects: Effects
    # The tools of the turn before this one.
    tools_before: Tools | None
    new_id: Callable[[type[ItemValue]], str]
    is_appended: bool = False


class Task(Struct, frozen=True):
    """Work before the model speaks: an item that a tool works on."""

    item: ItemValue
    # The given item that allows the work, which then follows it and waits for the guards; None: it follows all items.
    after: Item | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedTool:
    """A tool that this server runs."""

    # The name of its row, for messages and the log.
    name: str
    # The types of the contract by which a request asks for it; older names of the same tool are subclasses.
    definitions: tuple[type[Definition], ...]
    # By what its calls find their definition.
    key: Callable[[ToolDefinition], str]
    kinds: tuple[AnyHostedKind, ...]
    # How a model writes its calls, where `wire/kinds.py` does not say so, or says it of the client's calls.
    # By the tools as the response shows them.
    streamed: Callable[[Raw], Mapping[type[ItemValue], Streamed]] = lambda shown: {}
    # What the model can call, by the tools of the request, the effects of its history and the tools of the turn before;
    # nothing where it is not set up.
    offers: Callable[[Tools, Effects, Tools | None], Sequence[Offer]] = (
        lambda tools, effects, tools_before: ()
    )
    # The output of a call that a client has sent back, as the model reads it; None where the item itself says it.
    words: Callable[[ItemValue], str | None] = lambda value: None
    # The finished item as this request may see it, by the result and the item as it began.
    public: Callable[[ToolResult, ItemValue, Create], ItemValue] = lambda result, begun, create: (
        result.item.value
    )
    # The definition with its secrets, by its bytes; None where a definition has none.
    with_secrets: Callable[[Raw], ToolDefinition] | None = None
    # Refuses a request that asks for it wrongly, or may not ask; called with the scopes of the caller's key.
    check: Callable[[Tools, Container[str]], None] = lambda tools, may: None
    # Makes ready what a turn needs of it, or refuses the request.
    prepare: Callable[[TurnAhead], Awaitable[Prepared]] | None = None
    # What it does before the model speaks: what it offers is known only then. `acts_on`: the items that ask for it.
    begin: Callable[[TurnStart], Sequence[Task]] | None = None
    acts_on: tuple[type[ItemValue], ...] = ()
    # The annotations of a text that cites what it has found.
    cite: Callable[[str, Sequence[Source]], Sequence[Struct]] | None = None
    # The scope of API keys without which the model is not offered it; None: any key will do, or `check` refuses.
    scope: str | None = None
    # How long a call may take; None: as long as all calls.
    call_s_max: float | None = None
    # Whether its calls run one after the other.
    is_serial: bool = False
    # How many of its calls one response may have; beyond, the response ends. None: only the limit of all tools holds.
    calls_max: int | None = None
    # Whether it answers with nothing but what stands in the request: guards have seen it, and no call is counted.
    is_inside: bool = False

    @property
    def is_set_up(self) -> bool:
        """Whether the operator has set it up."""
        return any(kind.tool is not None for kind in self.kinds)


class Offers(Protocol):
    """The tools that this server runs, as far as a request has to be understood."""

    def offer(
        self, tools: Tools, effects: Effects, tools_before: Tools | None, may: Container[str]
    ) -> Tools:
        """The tools with what hosted tools offer; refuses a request that asks for one wrongly, or may not ask."""

    def with_outputs(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        """The items that a client sent, with the output of each hosted call after the call."""


class LateOffers(Protocol):
    """Which requests need the tools that this server runs; the tools themselves are loaded with the first that does."""

    @property
    def definitions(self) -> tuple[type[Definition], ...]:
        """The definitions that ask for a hosted tool."""

    @property
    def refuses_unserved(self) -> bool:
        """Whether a request is refused that lists a tool which is not set up, also beside other tools."""

    @property
    def acts_on(self) -> frozenset[type[ItemValue]]:
        """The items that ask for work before the model speaks."""

    @property
    def has_words(self) -> frozenset[type[ItemValue]]:
        """The calls whose output the model reads in words, where a client sends them back."""

    def load(self) -> Offers:
        """The tools."""
