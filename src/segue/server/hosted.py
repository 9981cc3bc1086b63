"""Which tools does this server run for the model, and when are they loaded?

One row for each tool of the contract that Segue can run; an operator's own are named in `hosted_tools`, as
`package.module:NAME`. A row says which requests need its tool: by a definition, by an item that asks for work, by a
call that a client sends back. The rooms are loaded at the start if the operator has configured some, else with the
first request that needs them: most servers never do. A tool of the operator that is not whole refuses the start.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from segue.accounts.scopes import SCOPES
from segue.errors import Misconfigured
from segue.seams.tools import HostedTool
from segue.settings.values import Settings
from segue.wire.codec import TOOL_STRUCTS
from segue.wire.items import ItemValue, McpApprovalResponse, McpCall, WebSearchCall
from segue.wire.kinds import KINDS
from segue.wire.tools import Definition, McpTool, ToolSearchTool, WebSearchTool

if TYPE_CHECKING:
    from segue.server.tools import ToolSet
    from segue.tools.hosted import ServerTools


# Builds a tool; what it opens is closed with the stack.
ToolBuilder = Callable[[Settings, AsyncExitStack], HostedTool]


class Row(NamedTuple):
    """Which requests need a tool."""

    definitions: tuple[type[Definition], ...]
    # Items that ask for work before the model speaks, and calls that get words where a client sends them back.
    acts_on: tuple[type[ItemValue], ...] = ()
    has_words: tuple[type[ItemValue], ...] = ()


# In the order in which a model is offered them; how each is built says `server/tools.py`.
ROWS: Mapping[str, Row] = {
    "web_search": Row((WebSearchTool,), has_words=(WebSearchCall,)),
    "mcp": Row((McpTool,), acts_on=(McpApprovalResponse,), has_words=(McpCall,)),
    "tool_search": Row((ToolSearchTool,)),
}


class HostedTools(AsyncExitStack):
    """The tools that this server runs, loaded late; closes them on the way out."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._loaded: ToolSet | None = None
        self._own = [self._build(place) for place in settings.hosted_tools]
        check_tools(dict(zip(settings.hosted_tools, self._own, strict=True)))
        rows = [*ROWS.values(), *map(row_of, self._own)]
        self.definitions = tuple(one for row in rows for one in row.definitions)
        self.acts_on = frozenset(one for row in rows for one in row.acts_on)
        self.has_words = frozenset(one for row in rows for one in row.has_words)
        has_web = settings.fetch != "off" or settings.search_index or settings.search_url
        if has_web or settings.mcp or settings.mcp_hosts or self._own:
            self.load()

    def load(self) -> ServerTools:
        """The tools."""
        if self._loaded is None:
            from segue.server.tools import build_tools

            self._loaded = build_tools(self._settings, self, self._own)
        return self._loaded.tools

    @property
    def bytes(self) -> int:
        """The bytes of the PDF texts in memory."""
        return 0 if self._loaded is None else self._loaded.papers.bytes

    def _build(self, place: str) -> HostedTool:
        """A tool of the operator's own; called with the settings and a stack, its builder returns a `HostedTool`."""
        module, _, name = place.partition(":")
        if not name:
            raise Misconfigured(f"hosted_tools: '{place}' is not MODULE:NAME.")
        try:
            build: ToolBuilder = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise Misconfigured(f"hosted_tools: '{place}' cannot be imported: {error}.") from None
        tool = build(self._settings, self)
        if not isinstance(tool, HostedTool):
            raise Misconfigured(f"hosted_tools: '{place}' returned no HostedTool, but {tool!r}.")
        return tool


def row_of(tool: HostedTool) -> Row:
    """The row of a tool that is loaded."""
    structs = tuple(kind.struct for kind in tool.kinds)
    return Row(tool.definitions, tool.acts_on, structs)


def check_tools(own: Mapping[str, HostedTool]) -> None:
    """Refuse tools of the operator's own that are not whole, or that take what another tool has."""
    taken: dict[type, str] = {}
    for name, row in ROWS.items():
        taken |= dict.fromkeys((*row.definitions, *row.has_words), name)
    names = set(ROWS)
    for place, tool in own.items():
        problems = [*_missing(tool)]
        if tool.name in names:
            problems.append(f"another tool has the name '{tool.name}'")
        for struct in (*tool.definitions, *(kind.struct for kind in tool.kinds)):
            if struct in taken:
                problems.append(f"{_tag(struct)} belongs to the tool '{taken[struct]}'")
        if problems:
            raise Misconfigured(f"hosted_tools: '{place}': {'; '.join(problems)}.")
        names.add(tool.name)
        taken |= dict.fromkeys(
            (*tool.definitions, *(kind.struct for kind in tool.kinds)), tool.name
        )


def _missing(tool: HostedTool) -> Iterator[str]:
    """What is wrong with a tool by itself."""
    if not tool.definitions:
        yield "it has no definition by which a request could ask for it"
    for definition in tool.definitions:
        if definition not in TOOL_STRUCTS.values():
            yield f"{definition.__name__} is no tool type of the contract (wire/tools.py)"
    if not tool.kinds:
        yield "it has no kind of item to work on"
    for kind in tool.kinds:
        row = KINDS.get(kind.struct)
        if row is None:
            yield f"{kind.struct.__name__} is no item type of the contract (wire/items.py)"
            continue
        if row.prefix is None:
            yield f"{row.type} has no prefix for its ids (wire/kinds.py)"
        if kind.answer is None and not kind.begun:
            yield f"{row.type} has no events that say that the work has begun"
        if (
            kind.answer is None
            and kind.is_call
            and not (row.streamed or kind.struct in tool.streamed)
        ):
            yield f"{row.type} cannot be written by a model: it has no draft (streamed)"
    if tool.scope is not None and tool.scope not in SCOPES:
        yield f"'{tool.scope}' is no scope of API keys: {', '.join(SCOPES)}"


def _tag(struct: type) -> str:
    assert issubclass(struct, Struct)
    return str(struct.__struct_config__.tag)
