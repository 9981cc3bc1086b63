"""Which tools does this server run for the model, and when are they loaded?

`HOSTED_TOOLS` has a row for each tool of the contract that Segue can run; those of an operator are named in the setting
`hosted_tools`. Either is `package.module:NAME`, a function that builds a `HostedTool`. A row also says which requests
need its tool: by a definition, by an item that asks for work, by a call that a client sends back. The rooms are loaded
at the start if the operator has configured some, else with the first request that needs them: most servers never do. A
tool that is not whole, or that takes what another tool has, refuses the start.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AsyncExitStack
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, cast

from msgspec import Raw, Struct

from segue.accounts.scopes import SCOPES
from segue.errors import Misconfigured
from segue.seams.tools import AnyHostedKind, HostedTool
from segue.server.files import LateFiles
from segue.server.plugins import imported
from segue.settings.values import Settings
from segue.wire.codec import TOOL_STRUCTS
from segue.wire.items import (
    CodeInterpreterCall,
    ItemValue,
    McpApprovalResponse,
    McpCall,
    WebSearchCall,
)
from segue.wire.kinds import KINDS
from segue.wire.tools import (
    CodeInterpreterTool,
    Definition,
    McpTool,
    ShellTool,
    ToolSearchTool,
    WebSearchTool,
)

if TYPE_CHECKING:
    from segue.sandbox.client import KeeperClient
    from segue.server.tools import ToolBuilder, ToolSet
    from segue.tools.hosted import ServerTools
    from segue.web.fetch import Fetcher


class Asking(NamedTuple):
    """Which requests need a tool."""

    definitions: tuple[type[Definition], ...]
    # Items that ask for work before the model speaks, and calls that get words where a client sends them back.
    acts_on: tuple[type[ItemValue], ...] = ()
    has_words: tuple[type[ItemValue], ...] = ()


CODE = "segue.server.tools:build_code_interpreter"
# In the order in which a model is offered them.
HOSTED_TOOLS: Mapping[str, Asking] = {
    "segue.server.tools:build_web_search": Asking((WebSearchTool,), has_words=(WebSearchCall,)),
    "segue.server.tools:build_mcp": Asking(
        (McpTool,), acts_on=(McpApprovalResponse,), has_words=(McpCall,)
    ),
    "segue.server.tools:build_tool_search": Asking((ToolSearchTool,)),
    # After the shell, whose container it shares, where there are sandboxes.
    CODE: Asking((CodeInterpreterTool,), has_words=(CodeInterpreterCall,)),
}


# Where the operator has switched sandboxes on.
ENVIRONMENT_TOOLS: Mapping[str, Asking] = {"segue.server.tools:build_shell": Asking((ShellTool,))}


class HostedTools(AsyncExitStack):
    """The tools that this server runs, loaded late; closes them on the way out."""

    def __init__(
        self,
        settings: Settings,
        files: LateFiles | None = None,
        environment: KeeperClient | None = None,
    ) -> None:
        super().__init__()
        self._settings = settings
        self.environment = environment
        self._rows = HOSTED_TOOLS if environment is None else {**ENVIRONMENT_TOOLS, **HOSTED_TOOLS}
        self.refuses_unserved = settings.unknown_tools == "refuse"
        self._files = files
        self._loaded: ToolSet | None = None
        # A long request is resolved in a thread, and may be the first that needs the tools.
        self._loading = Lock()
        has_web = settings.fetch != "off" or settings.search_index or settings.search_url
        if has_web or settings.mcp or settings.mcp_hosts or settings.hosted_tools or environment:
            self.load()
        own = self.load().tools[len(self._rows) :] if settings.hosted_tools else ()
        asking = [*self._rows.values(), *map(asking_of, own)]
        self.definitions = tuple(struct for tool in asking for struct in tool.definitions)
        self.acts_on = frozenset(struct for tool in asking for struct in tool.acts_on)
        self.has_words = frozenset(struct for tool in asking for struct in tool.has_words)

    def load(self) -> ServerTools:
        """The tools."""
        with self._loading:
            if self._loaded is None:
                from segue.server.tools import build_tools

                places = (*self._rows, *self._settings.hosted_tools)
                open_file = None if self._files is None else self._files.open_file
                builders = [_builder(place, self.environment, self._files) for place in places]
                built = build_tools(self._settings, self, builders, open_file)
                check_tools(dict(zip(places, built.tools.tools, strict=True)))
                self._loaded = built
            return self._loaded.tools

    def set_up(self, scopes: Container[str]) -> frozenset[str]:
        """The names of the tools that are set up and that a key with these scopes may use."""
        tools = (tool for tool in self.load().tools if tool.is_set_up)
        return frozenset(tool.name for tool in tools if tool.scope is None or tool.scope in scopes)

    @property
    def bytes(self) -> int:
        """The bytes of the PDF texts in memory, and of uploads that wait for the rest of them."""
        papers = 0 if self._loaded is None else self._loaded.papers.bytes
        return papers + (0 if self._files is None else self._files.waiting_bytes)


def asking_of(tool: HostedTool) -> Asking:
    """Which requests need a tool that is loaded."""
    return Asking(tool.definitions, tool.acts_on, tuple(kind.struct for kind in tool.kinds))


def _builder(place: str, environment: KeeperClient | None, files: LateFiles | None) -> ToolBuilder:
    builder = cast("Callable[..., HostedTool]", imported("hosted_tools", place))
    is_sandboxed = place in ENVIRONMENT_TOOLS or place == CODE

    def build(settings: Settings, stack: AsyncExitStack, fetcher: Fetcher) -> HostedTool:
        given = (environment, files) if is_sandboxed else (stack, fetcher)
        tool = builder(settings, *given)
        if not isinstance(tool, HostedTool):
            raise Misconfigured(f"hosted_tools: '{place}' built no HostedTool, but {tool!r}.")
        return tool

    return build


# --- what complains ---------------------------------------------------------------------------------


def check_tools(tools: Mapping[str, HostedTool]) -> None:
    """Refuse a tool that is not whole, or that takes what another tool has. By their places."""
    taken: dict[type[Struct] | str, str] = {}
    for place, tool in tools.items():
        own: set[type[Struct] | str] = {tool.name, *tool.definitions}
        own |= {kind.struct for kind in tool.kinds}
        problems = [*_missing(tool), *_taken(own, taken)]
        if problems:
            raise Misconfigured(f"hosted_tools: '{place}': {'; '.join(problems)}.")
        taken |= dict.fromkeys(own, tool.name)


def _taken(own: set[type[Struct] | str], taken: Mapping[type[Struct] | str, str]) -> Iterator[str]:
    for part in own & taken.keys():
        if isinstance(part, str):
            yield f"another tool has the name '{part}'"
        else:
            yield f"'{part.__struct_config__.tag}' belongs to the tool '{taken[part]}'"


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
        yield from _missing_of(kind, tool)
    if tool.scope is not None and tool.scope not in SCOPES:
        yield f"'{tool.scope}' is no scope of API keys: {', '.join(SCOPES)}"


def _missing_of(kind: AnyHostedKind, tool: HostedTool) -> Iterator[str]:
    row = KINDS.get(kind.struct)
    if row is None:
        yield f"{kind.struct.__name__} is no item type of the contract (wire/items.py)"
        return
    if row.prefix is None:
        yield f"'{row.type}' has no prefix for its ids (wire/kinds.py)"
    if kind.answer is None and not kind.begun:
        yield f"'{row.type}' has no event that says that the work has begun"
    is_written = row.streamed is not None or kind.struct in tool.streamed(Raw(b"[]"))
    if kind.answer is None and kind.is_call and not is_written:
        yield f"'{row.type}' cannot be written by a model: 'streamed' does not have it"
