"""How are the tools of MCP servers listed and called? The official `mcp` package does the talking.

Servers come from the operator's `[[mcp]]` tables, by label, and where the operator allows their hosts, from the
`server_url` of a request. A session with a server is kept for a while, for one owner and one set of keys; whoever
waits for an answer and is cancelled takes the call back. What a server lists is kept for some minutes. A call is never
made twice: only a session that has died while nobody used it is opened again.

`headers` and `authorization` go into the requests to their own server and nowhere else: here they are held by the
session alone, and its key has a digest of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Container, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TextIO

import msgspec
from msgspec import Raw, Struct

from segue.errors import Forbidden, InvalidRequest
from segue.tools.hosts import McpHosts
from segue.tools.url import parse
from segue.turn.values import HostedCall, Owner, ToolResult
from segue.wire.codec import as_item, encode
from segue.wire.items import Hints, McpCall, McpListTools, RemoteTool
from segue.wire.mcp import ErrorKind, error_of, listing, servers_of
from segue.wire.tools import McpTool, Tools

if TYPE_CHECKING:
    import httpx2
    from mcp import Client
    from mcp.client import Transport
    from mcp_types import CallToolResult, ContentBlock

    from segue.tools.pinned import PinnedTransport

log = logging.getLogger(__name__)

# One for each owner and server; beyond, the one that rested longest is closed.
SESSIONS_MAX = 64
# A session that nobody used for so long is closed.
REST_S = 300.0
# A session that rested longer than this is asked whether it lives before it is used.
DOUBT_S = 1.0
PING_S_MAX = 3.0
# What a server has to say hello.
CONNECT_S_MAX = 20.0
# More than any server has that a model can still choose from.
TOOLS_MAX = 512
LIST_PAGES_MAX = 16
LISTS_MAX = 256
# How long a server may be silent in the middle of an answer; the loop's own limit comes first.
READ_S_MAX = 600.0
# What a server's process has to stop.
STOP_S_MAX = 5.0
# As MCP numbers them.
CONNECTION_CLOSED, TIMED_OUT, INVALID_PARAMS = -32000, -32001, -32602


class McpServer(Struct, frozen=True):
    """A server that the operator has configured, or that a request names by its address."""

    label: str
    url: str = ""
    sse_url: str = ""
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    headers: Mapping[str, str] = {}
    # The tools that may be listed and called; none named: all.
    tools: tuple[str, ...] = ()
    # Whether a request has named it: then it is connected to as the fetcher would.
    is_outside: bool = False


class Secrets(Struct, frozen=True):
    """What a request brings for one server, beside what is echoed."""

    headers: dict[str, str] | None = None
    authorization: str | None = None

    def as_headers(self) -> dict[str, str]:
        """As they go to the server."""
        found = dict(self.headers or {})
        if self.authorization:
            found["Authorization"] = f"Bearer {self.authorization}"
        return found


class Failed(Exception):
    """Why a server could not be reached or did not do as asked, in words that tell no secret."""

    def __init__(self, kind: ErrorKind, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.message = message
        self.code = code


class McpServers:
    """The servers, the sessions with them, and what they have listed.

    It is two tools: `call` makes a call, and `lister` is the one that lists.
    """

    def __init__(
        self, servers: Sequence[McpServer], hosts: McpHosts, *, list_s: float = 300.0
    ) -> None:
        self._servers = {one.label: one for one in servers}
        self._hosts = hosts
        self._list_s = list_s
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._lists: OrderedDict[bytes, tuple[float, tuple[RemoteTool, ...]]] = OrderedDict()
        self.lister = McpLister(self)

    def check(self, tools: Tools, may: Container[str]) -> None:
        """Refuse a request that names a server which is not known, or may not be called, or not by whoever asks."""
        labels: set[str] = set()
        carried = [one for one in servers_of(tools).values() if one in tools.carried]
        places = [(f"tools[{index}]", one) for index, one in enumerate(tools.definitions)]
        for path, tool in (*places, *(("input", one) for one in carried)):
            if not isinstance(tool, McpTool):
                continue
            if tool.server_label in labels:
                raise InvalidRequest(
                    f"Two tools have the server_label '{tool.server_label[:128]}'.",
                    code="invalid_value",
                    param=f"{path}.server_label",
                )
            labels.add(tool.server_label)
            known = self._find(tool, path)
            scope = "mcp" if known is self._servers.get(tool.server_label) else "mcp_url"
            if scope not in may:
                raise Forbidden(f"This key lacks the scope '{scope}'.", param=path)

    def _find(self, tool: McpTool, path: str = "tools") -> McpServer:
        known = self._servers.get(tool.server_label)
        if not tool.server_url:
            if known is not None and not tool.connector_id and not tool.tunnel_id:
                return known
            raise InvalidRequest(
                f"No MCP server '{tool.server_label[:128]}' is configured here."
                if not (tool.connector_id or tool.tunnel_id)
                else "Connectors and tunnels are not supported: name a 'server_label' or a 'server_url'.",
                code="unknown_mcp_server",
                param=f"{path}.server_label",
            )
        if known is not None and tool.server_url in (known.url, known.sse_url):
            return known
        target = self._hosts.check(tool.server_url)
        # The operator's own keys are for the operator's own servers.
        if target.path.endswith("/sse"):
            return McpServer(tool.server_label, sse_url=target.url, is_outside=True)
        return McpServer(tool.server_label, url=target.url, is_outside=True)

    async def call(self, call: HostedCall) -> ToolResult:
        """Make one call. Whatever goes wrong is an error of the item, and the turn goes on."""
        definition = msgspec.json.decode(call.definition, type=McpTool)
        done = McpCall(
            id=call.item_id,
            server_label=definition.server_label,
            name=call.name,
            arguments=call.arguments,
            status="completed",
        )
        try:
            text = await self._call(definition, call)
        except Failed as failed:
            error = error_of(failed.kind, failed.message, failed.code)
            done = msgspec.structs.replace(done, status="failed", error=error)
            return ToolResult(f"Error: {failed.message}", as_item(done))
        return ToolResult(text, as_item(msgspec.structs.replace(done, output=text)))

    async def _call(self, definition: McpTool, call: HostedCall) -> str:
        server, session = self._session(definition, call)
        if server.tools and call.name not in server.tools:
            raise Failed("mcp_protocol_error", f"Unknown tool: {call.name[:128]}", INVALID_PARAMS)
        arguments = _arguments(call.arguments)
        async with session.speaking() as client:
            # Asking for progress makes a long call say that it lives: a line that is silent may be cut on its way.
            result = await client.session.call_tool(
                call.name, arguments, progress_callback=_hear_progress
            )
        text = _text(result)
        if result.is_error:
            raise Failed("mcp_tool_execution_error", text or "The tool failed and said nothing.")
        return text

    async def list(self, call: HostedCall) -> tuple[RemoteTool, ...]:
        """The tools of a server; those that were listed a short while ago are not asked for again."""
        definition = msgspec.json.decode(call.definition, type=McpTool)
        server, session = self._session(definition, call)
        kept = self._lists.get(session.key)
        if kept is not None and kept[0] > monotonic():
            return kept[1]
        async with session.speaking() as client:
            found = await _list_all(client)
        tools = tuple(one for one in found if not server.tools or one.name in server.tools)
        self._lists[session.key] = (monotonic() + self._list_s, tools)
        while len(self._lists) > LISTS_MAX:
            self._lists.popitem(last=False)
        return tools

    def _session(self, definition: McpTool, call: HostedCall) -> tuple[McpServer, Session]:
        try:
            server = self._find(definition)
        except InvalidRequest as refused:
            # It was there when the request was checked.
            raise Failed("mcp_protocol_error", refused.message, INVALID_PARAMS) from None
        secrets = msgspec.json.decode(call.definition, type=Secrets).as_headers()
        headers = {**server.headers, **secrets}
        key = _key(call.owner, server, headers)
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(key, server, headers, self._hosts)
        self._sessions.move_to_end(key)
        self._let_rest()
        return server, session

    def _let_rest(self) -> None:
        """Close what nobody needs; a session in use is never closed under its user."""
        idle = [one for one in self._sessions.values() if not one.is_used]
        spare = len(self._sessions) - SESSIONS_MAX
        for n, session in enumerate(idle[:-1]):
            if n < spare or session.rested_s > REST_S:
                del self._sessions[session.key]
                session.leave()

    async def aclose(self) -> None:
        """End every session, and every process that was started for one."""
        sessions = [*self._sessions.values()]
        self._sessions.clear()
        await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True)


class McpLister:
    """A `Tool` whose only function is to list."""

    def __init__(self, servers: McpServers) -> None:
        self._servers = servers

    async def call(self, call: HostedCall) -> ToolResult:
        """The `mcp_list_tools` item; the model is told nothing, because its tools stand elsewhere."""
        definition = msgspec.json.decode(call.definition, type=McpTool)
        try:
            tools = await self._servers.list(call)
        except Failed as failed:
            item = McpListTools(
                id=call.item_id,
                server_label=definition.server_label,
                tools=[],
                error=Raw(encode(failed.message)),
            )
            return ToolResult("", as_item(item))
        return ToolResult("", as_item(listing(call.item_id, definition, tools)))


# --- sessions -------------------------------------------------------------------------------------


class Connection:
    """An open session with a server, held by a task of its own: the library wants to be closed by the task that opened
    it, and callers come and go."""

    def __init__(self, server: McpServer, headers: Mapping[str, str], hosts: McpHosts) -> None:
        self._server = server
        self._headers = headers
        self._hosts = hosts
        # Where it is, if that was to be looked up.
        self._addresses: tuple[str, ...] = ()
        self._leaving = asyncio.Event()
        # What the server has answered to HTTP requests since the last call began.
        self.statuses: list[int] = []
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._hold())

    def leave(self) -> None:
        """End it; its task does so in its own time."""
        self._leaving.set()
        if not self.client.done():
            self.task.cancel()

    async def _hold(self) -> None:
        from mcp import Client

        try:
            async with AsyncExitStack() as stack:
                transport = await self._transport(stack)
                client = await stack.enter_async_context(Client(transport, cache=None))
                if not self.client.done():
                    self.client.set_result(client)
                await self._leaving.wait()
        except asyncio.CancelledError:
            self.client.cancel()
            raise
        except Exception as error:
            if not self.client.done():
                self.client.set_exception(self.told(error))
                # Whoever waited may have been cancelled.
                self.client.exception()
            log.info("a session with the MCP server %s has ended", self._server.label)

    async def _transport(self, stack: AsyncExitStack) -> Transport:
        """How the server is spoken to."""
        from mcp import StdioServerParameters
        from mcp.client.sse import sse_client
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        server = self._server
        if server.command:
            # What it prints beside its answers is its own affair, and may hold what it was asked.
            nowhere = stack.enter_context(_nowhere())
            program, *arguments = server.command
            parameters = StdioServerParameters(
                command=program, args=arguments, env=dict(server.environment)
            )
            return stdio_client(parameters, errlog=nowhere)
        if server.is_outside:
            self._addresses = await self._look_up()
        if server.sse_url:
            return sse_client(
                server.sse_url,
                headers=dict(self._headers),
                httpx_client_factory=lambda headers=None, timeout=None, auth=None: self._http(
                    headers, timeout
                ),
            )
        client = await stack.enter_async_context(self._http(dict(self._headers), None))
        return streamable_http_client(server.url, http_client=client)

    async def _look_up(self) -> tuple[str, ...]:
        """Where a server that a request has named may be connected to; once, for the whole session."""
        try:
            return await self._hosts.addresses(self._server.url or self._server.sse_url)
        except InvalidRequest as refused:
            raise Failed("mcp_protocol_error", refused.message, CONNECTION_CLOSED) from None

    def _http(
        self, headers: dict[str, str] | None, timeout: httpx2.Timeout | None
    ) -> httpx2.AsyncClient:
        """A client that takes nothing from the environment, follows nobody, and notes what it was answered."""
        import httpx2

        async def note(response: httpx2.Response) -> None:
            self.statuses.append(response.status_code)

        return httpx2.AsyncClient(
            headers=headers,
            timeout=timeout or httpx2.Timeout(CONNECT_S_MAX, read=READ_S_MAX),
            event_hooks={"response": [note]},
            transport=self._pinned(),
            trust_env=False,
            follow_redirects=False,
        )

    def _pinned(self) -> PinnedTransport | None:
        if not self._server.is_outside:
            return None
        from segue.tools.pinned import PinnedTransport

        return PinnedTransport(parse(self._server.url or self._server.sse_url), self._addresses)

    def told(self, error: BaseException) -> Failed:
        """What went wrong, in words that tell no secret; the server's own error, unless its HTTP status says more."""
        from mcp import MCPError

        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        label = self._server.label
        status = next((one for one in reversed(self.statuses) if one >= 400), None)
        match error:
            case Failed():
                return error
            case _ if status is not None:
                return Failed("http_error", f"The MCP server '{label}' answered {status}.", status)
            case MCPError(code=-32000):
                message = f"The MCP server '{label}' closed the connection."
                return Failed("mcp_protocol_error", message, CONNECTION_CLOSED)
            case MCPError(code=code, message=message):
                return Failed("mcp_protocol_error", message, code)
            case OSError() if self._server.command:
                message = f"The MCP server '{label}' could not be started."
                return Failed("mcp_protocol_error", message, CONNECTION_CLOSED)
            case _:
                kind = type(error).__name__
                message = f"The MCP server '{label}' could not be spoken to ({kind})."
                return Failed("mcp_protocol_error", message, CONNECTION_CLOSED)


class Session:
    """One session with one server, for one owner: opened when it is needed, and again when it has died."""

    def __init__(
        self, key: bytes, server: McpServer, headers: Mapping[str, str], hosts: McpHosts
    ) -> None:
        self.key = key
        self._hosts = hosts
        self._server = server
        self._headers = headers
        self._opening = asyncio.Lock()
        self._connection: Connection | None = None
        # Connections that are still to end.
        self._tasks: set[asyncio.Task[None]] = set()
        self._users = 0
        self._used_at = monotonic()

    @property
    def is_used(self) -> bool:
        """Whether somebody waits for an answer."""
        return self._users > 0

    @property
    def rested_s(self) -> float:
        """How long nobody has used it."""
        return monotonic() - self._used_at

    @asynccontextmanager
    async def speaking(self) -> AsyncIterator[Client]:
        """The open session; what goes wrong inside is told as `Failed`."""
        self._users += 1
        connection: Connection | None = None
        try:
            async with self._opening:
                connection = await self._open()
            connection.statuses.clear()
            yield connection.client.result()
        except Exception as error:
            if connection is None:
                raise
            failed = connection.told(error)
            if failed.code == CONNECTION_CLOSED or failed.kind == "http_error":
                self.leave(connection)
            raise failed from None
        finally:
            self._users -= 1
            self._used_at = monotonic()

    async def _open(self) -> Connection:
        connection = self._connection
        if connection is not None and self.rested_s > DOUBT_S and not await _lives(connection):
            self.leave(connection)
        connection = self._connection
        if connection is not None and not connection.task.done():
            return connection
        connection = Connection(self._server, self._headers, self._hosts)
        self._tasks.add(connection.task)
        connection.task.add_done_callback(self._tasks.discard)
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                await asyncio.shield(connection.client)
        except TimeoutError:
            connection.leave()
            message = (
                f"The MCP server '{self._server.label}' did not answer within {CONNECT_S_MAX:g} s."
            )
            raise Failed("mcp_protocol_error", message, TIMED_OUT) from None
        except BaseException:
            connection.leave()
            raise
        self._connection = connection
        return connection

    def leave(self, connection: Connection | None = None) -> None:
        """End this connection, or the one that there is; the next call opens another."""
        connection = connection or self._connection
        if connection is not None:
            connection.leave()
        if self._connection is connection:
            self._connection = None

    async def close(self) -> None:
        """End it, and wait until whatever was started for it has stopped."""
        self.leave()
        if self._tasks:
            _, late = await asyncio.wait([*self._tasks], timeout=STOP_S_MAX)
            for task in late:
                task.cancel()


@contextmanager
def _nowhere() -> Iterator[TextIO]:
    with Path(os.devnull).open("w") as file:
        yield file


async def _lives(connection: Connection) -> bool:
    """Whether the other side is still there: any answer is a sign of life, but not one to a session that is over."""
    from mcp import MCPError

    if connection.task.done():
        return False
    connection.statuses.clear()
    try:
        async with asyncio.timeout(PING_S_MAX):
            await connection.client.result().session.send_ping()
    except MCPError as error:
        return error.code != CONNECTION_CLOSED and not connection.statuses[-1:] > [399]
    except Exception:
        return False
    return True


# --- what is said ---------------------------------------------------------------------------------


def _key(owner: Owner, server: McpServer, headers: Mapping[str, str]) -> bytes:
    """Who speaks to whom, with which keys: nobody uses the session of another."""
    said = msgspec.json.encode([owner, msgspec.to_builtins(server), sorted(headers.items())])
    return blake2b(said, digest_size=16).digest()


def _arguments(written: str) -> dict[str, object]:
    """The arguments as an object; a call without any has none."""
    try:
        found = msgspec.json.decode(written or "{}")
    except (msgspec.DecodeError, RecursionError):
        raise Failed(
            "mcp_protocol_error", "The arguments are not valid JSON.", INVALID_PARAMS
        ) from None
    if not isinstance(found, dict):
        raise Failed("mcp_protocol_error", "The arguments are no JSON object.", INVALID_PARAMS)
    return found


async def _hear_progress(progress: float, total: float | None, message: str | None) -> None:
    """The contract has no event for it; that it came is enough."""


def _text(result: CallToolResult) -> str:
    """What the model can read of an answer: its texts; what is none of these is named. What has a structure is written
    as text too, by most servers; else it is read as it is."""
    if not result.content and result.structured_content is not None:
        return encode(result.structured_content).decode()
    return "\n".join(_words(block) for block in result.content)


def _words(block: ContentBlock) -> str:
    match block.type:
        case "text":
            return block.text
        case "resource":
            inner = block.resource
            text = getattr(inner, "text", None)
            return text if isinstance(text, str) else f"[resource: {inner.uri}, which is no text]"
        case "resource_link":
            return f"[resource: {block.uri}]"
        case kind:
            return f"[{kind}: {block.mime_type}, which cannot be told in words]"


async def _list_all(client: Client) -> list[RemoteTool]:
    from mcp_types import PaginatedRequestParams

    found: list[RemoteTool] = []
    cursor: str | None = None
    for _ in range(LIST_PAGES_MAX):
        page = await client.session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        for tool in page.tools:
            is_read_only = tool.annotations.read_only_hint if tool.annotations else None
            found.append(
                RemoteTool(
                    name=tool.name,
                    input_schema=Raw(encode(tool.input_schema)),
                    description=tool.description,
                    annotations=None if is_read_only is None else Hints(is_read_only),
                )
            )
        cursor = page.next_cursor
        if cursor is None or len(found) >= TOOLS_MAX:
            break
    return found[:TOOLS_MAX]
