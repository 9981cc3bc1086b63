"""Which tools does this process run for the model, and what may it fetch?"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from msgspec import structs

from segue.errors import Misconfigured
from segue.settings import Settings
from segue.tools.fetch import Fetcher, Policy, read_as_data
from segue.tools.hosted import ServerTools
from segue.tools.hosts import McpHosts, policy_for
from segue.tools.index import IndexWeb, Report, build
from segue.tools.mcp import McpServer, McpServers
from segue.tools.pdf import PdfTexts
from segue.tools.search import JsonEngine, JsonSearch
from segue.tools.web import LiveWeb, WebTool
from segue.turn.seams import Tool


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What the server does for the model."""

    hosted: ServerTools
    papers: PdfTexts


@asynccontextmanager
async def open_tools(settings: Settings) -> AsyncIterator[Toolbox]:
    """The tools that the operator has configured; sessions with MCP servers end on the way out."""
    papers = PdfTexts(settings.file_s_max)
    with closing(build_fetcher(settings)) as fetcher:
        read_url = partial(read_as_data, fetcher) if fetcher.is_on else None
        async with open_web(settings, fetcher) as web, _open_servers(settings) as servers:
            tools: dict[str, Tool] = {} if web is None else {"web_search": web}
            if servers is not None:
                tools |= {"mcp": servers, "mcp_list": servers.lister}
            hosted = ServerTools(
                tools=tools,
                refuse=None if servers is None else servers.check,
                read_pdf=papers.read,
                read_url=read_url,
                call_s_max=settings.tool_s_max,
                output_bytes_max=settings.tool_output_bytes_max,
            )
            yield Toolbox(hosted, papers)


def build_fetcher(settings: Settings) -> Fetcher:
    """The only code that follows URLs from outside; off unless the operator has switched it on."""
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


@asynccontextmanager
async def open_web(settings: Settings, fetcher: Fetcher) -> AsyncIterator[WebTool | None]:
    """The web search tool; None without an index, a search API and pages that may be opened."""
    index = IndexWeb(Path(settings.search_index)) if settings.search_index else None
    engine = JsonSearch(_search_engine(settings)) if settings.search_url else None
    is_live = engine is not None or fetcher.is_on
    live = LiveWeb(engine, fetcher) if is_live else None
    try:
        yield WebTool(index, live) if index is not None or is_live else None
    finally:
        if engine is not None:
            engine.close()


def _search_engine(settings: Settings) -> JsonEngine:
    url, title, text = settings.search_fields.split()
    name, _, value = settings.search_header.partition(":")
    headers = ((name, value.strip()),) if name else ()
    return JsonEngine(settings.search_url, settings.search_results, (url, title, text), headers)


@asynccontextmanager
async def _open_servers(settings: Settings) -> AsyncIterator[McpServers | None]:
    """The MCP servers; None where the operator has named neither a server nor a host."""
    if not settings.mcp and not settings.mcp_hosts:
        yield None
        return
    if find_spec("mcp") is None:
        raise Misconfigured("mcp: the package 'mcp' is not installed: pip install 'segue[mcp]'.")
    # A fetcher of its own: it has other hosts and ports, and works where pages are not fetched.
    with closing(Fetcher(policy_for(settings.mcp_hosts, settings.fetch_deny))) as fetcher:
        known = [McpServer(**structs.asdict(server)) for server in settings.mcp]
        hosts = McpHosts(settings.mcp_hosts, fetcher)
        async with aclosing(McpServers(known, hosts, list_s=settings.mcp_list_s)) as servers:
            yield servers


def index_folder(folder: Path, into: Path, prefix: str, note: Callable[[int, int], None]) -> Report:
    """Bring an index of documents up to date with a folder."""
    return build(folder, into, prefix, note)
