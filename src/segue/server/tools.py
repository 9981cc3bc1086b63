"""Which tools does this process run for the model, and what may it fetch?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from segue.documents.pdf import PdfTexts
from segue.errors import need_package
from segue.interpreter.tool import code_interpreter
from segue.mcp.hosts import McpHosts, policy_for
from segue.mcp.sessions import McpServer, McpServers
from segue.mcp.tool import mcp
from segue.seams.tools import HostedTool
from segue.settings.values import Settings
from segue.tools.hosted import ServerTools
from segue.tools.inputs import OpenFile
from segue.tools.tool_search import tool_search
from segue.web.fetch import DataReader, Fetcher, Policy
from segue.web.index import IndexWeb, build
from segue.web.search import JsonEngine, JsonSearch
from segue.web.tool import web_search
from segue.web.web import LiveWeb, WebTool

if TYPE_CHECKING:
    from segue.sandbox.client import KeeperClient
    from segue.server.files import LateFiles

# For `segue index`.
index_folder = build


# Builds a tool with the one fetcher of the process; what it opens is closed with the stack.
ToolBuilder = Callable[[Settings, AsyncExitStack, Fetcher], HostedTool]


class ToolSet(NamedTuple):
    """The tools of a server, and its cache of PDF texts."""

    tools: ServerTools
    papers: PdfTexts


def build_tools(
    settings: Settings,
    stack: AsyncExitStack,
    builders: Sequence[ToolBuilder],
    open_file: OpenFile | None = None,
) -> ToolSet:
    """The tools as the operator has configured them; the stack closes them."""
    papers = PdfTexts(settings.file_s_max)
    fetcher = build_fetcher(settings)
    stack.callback(fetcher.close)
    tools = ServerTools(
        [build_tool(settings, stack, fetcher) for build_tool in builders],
        read_pdf=papers.read,
        read_url=DataReader(fetcher) if fetcher.is_on else None,
        open_file=open_file,
        call_s_max=settings.tool_s_max,
        output_bytes_max=settings.tool_output_bytes_max,
    )
    return ToolSet(tools, papers)


def build_web_search(settings: Settings, stack: AsyncExitStack, fetcher: Fetcher) -> HostedTool:
    return web_search(build_web(settings, fetcher, stack))


def build_mcp(settings: Settings, stack: AsyncExitStack, fetcher: Fetcher) -> HostedTool:
    is_set_up = bool(settings.mcp or settings.mcp_hosts)
    return mcp(_build_servers(settings, stack) if is_set_up else None)


def build_tool_search(settings: Settings, stack: AsyncExitStack, fetcher: Fetcher) -> HostedTool:
    return tool_search()


def build_shell(
    settings: Settings, environment: KeeperClient, files: LateFiles | None
) -> HostedTool:
    # Imported here: only a server that has sandboxes needs it.
    from segue.sandbox.tool import shell

    return shell(environment, settings.environment_s_max, files)


def build_code_interpreter(
    settings: Settings, environment: KeeperClient | None, files: LateFiles | None
) -> HostedTool:
    if environment is None:
        return code_interpreter(None)
    from segue.interpreter.runner import CodeRunner
    from segue.sandbox.tool import Preparation

    preparation = Preparation(environment, files)
    return CodeRunner(environment, preparation, settings.environment_s_max).as_tool()


def build_fetcher(settings: Settings) -> Fetcher:
    """The only code that follows URLs from outside; off unless the operator has switched it on."""
    if settings.fetch != "off":
        need_package("fetch", "aiohttp", "web")
    return Fetcher(
        Policy(
            settings.fetch,
            allow=settings.fetch_allow,
            deny=settings.fetch_deny,
            ports=settings.fetch_port,
            bytes_max=settings.fetch_bytes_max,
            s_max=settings.fetch_s_max,
        )
    )


def build_web(settings: Settings, fetcher: Fetcher, stack: AsyncExitStack) -> WebTool | None:
    """The web search tool; None without an index, a search API and pages that may be opened."""
    index = IndexWeb(Path(settings.search_index)) if settings.search_index else None
    engine = JsonSearch(_search_engine(settings)) if settings.search_url else None
    if engine is not None:
        stack.callback(engine.close)
    live = LiveWeb(engine, fetcher) if engine is not None or fetcher.is_on else None
    return WebTool(index, live) if index is not None or live is not None else None


def _search_engine(settings: Settings) -> JsonEngine:
    need_package("search_url", "aiohttp", "web")
    url, title, text = settings.search_fields.split()
    name, _, value = settings.search_header.partition(":")
    headers = ((name, value.strip()),) if name else ()
    return JsonEngine(settings.search_url, settings.search_results, (url, title, text), headers)


def _build_servers(settings: Settings, stack: AsyncExitStack) -> McpServers:
    """The MCP servers that the operator has named, and those of the hosts that requests may name."""
    need_package("mcp", "mcp", "mcp")
    # A fetcher of its own: it has other hosts and ports, and works where pages are not fetched.
    fetcher = Fetcher(policy_for(settings.mcp_hosts, settings.fetch_deny))
    stack.callback(fetcher.close)
    known = [McpServer(**structs.asdict(server)) for server in settings.mcp]
    hosts = McpHosts(settings.mcp_hosts, fetcher)
    servers = McpServers(known, hosts, list_s=settings.mcp_list_s)
    stack.push_async_callback(servers.aclose)
    return servers
