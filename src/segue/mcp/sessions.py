"""How are the tools of MCP servers listed and called? The official `mcp` package implements the protocol.

Servers come from the operator's `[[mcp]]` tables, by label, and where the operator allows their hosts, from the
`server_url` of a request. A session with a server is kept for a while, for one owner and one set of secrets. Cancelling
a call that waits for an answer cancels it at the server too. What a server lists is cached for some minutes. A call is
never made twice: only a session that has died while it was idle is opened again.

`headers` and `authorization` go into the requests to their own server and nowhere else: here only the session holds
them, and its key has a digest of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context
from hashlib import blake2b
from time import monotonic
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw, Struct

from segue.errors import Forbidden, InvalidRequest
from segue.mcp.definitions import (
    TOOLS_MAX,
    ErrorKind,
    McpToolWithSecrets,
    error_of,
    listing,
    servers_of,
)
from segue.mcp.hosts import McpHosts
from segue.seams.history import Owner
from segue.seams.tools import HostedCall, ToolResult
from segue.web.url import Target, parse
from segue.wire.codec import as_item, encode
from segue.wire.items import Hints, McpCall, McpListTools, RemoteTool
from segue.wire.tools import McpTool, Tools

if TYPE_CHECKING:
    import httpx2
    from mcp import Client
    from mcp.client import Transport
    from mcp_types import CallToolResult, ContentBlock
    from mcp_types import Tool as ListedTool

log = logging.getLogger(__name__)

# One for each owner and server; beyond, the session that was idle longest is closed.
SESSIONS_MAX = 64
# A session that was idle for so long is closed.
REST_S = 300.0
# A session that was idle for longer than this is pinged before it is used.
DOUBT_S = 1.0
PING_S_MAX = 3.0
# How long a server may take to open a session.
CONNECT_S_MAX = 20.0
LIST_PAGES_MAX = 16
# Listings that are known, of all owners: clients name servers with secrets of their own, each of which is another.
LISTS_MAX, LISTS_BYTES_MAX = 256, 16 * 1024 * 1024
# Of what a server says instead of its list.
LIST_ERROR_CHARS_MAX = 1_000
# What the library calls an answer that it cannot read, with words of that answer.
UNREAD = ("Failed to parse JSON response", "Failed to parse SSE message")
# How long a server may be silent in the middle of an answer; the loop's own limit comes first.
READ_S_MAX = 600.0
# How long a server's process may take to stop.
STOP_S_MAX = 5.0
# As MCP numbers them.
CONNECTION_CLOSED, TIMED_OUT, INVALID_PARAMS = -32000, -32001, -32602


class McpServer(Struct, frozen=True):
    """A server that the operator has configured, or that a request names by its URL."""

    label: str
    url: str = ""
    sse_url: str = ""
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    headers: Mapping[str, str] = {}
    # The tools that may be listed and called; empty: all.
    tools: tuple[str, ...] = ()
    # Whether a request has named it: then the fetcher's rules hold for the connection.
    is_outside: bool = False


class McpFailed(Exception):
    """Why a server could not be reached or did not do as requested; the message contains no secret."""

    def __init__(self, message: str, code: int = 0, kind: ErrorKind = "mcp_protocol_error") -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.kind: ErrorKind = kind


class KnownLists:
    """What servers have listed a short while ago, by their sessions; bounded in number and in bytes."""

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        # Until when they hold, and how large they are; the oldest first.
        self._lists: OrderedDict[bytes, tuple[float, int, tuple[RemoteTool, ...]]] = OrderedDict()
        self.bytes = 0

    def find(self, key: bytes) -> tuple[RemoteTool, ...] | None:
        known = self._lists.get(key)
        return known[2] if known is not None and known[0] > monotonic() else None

    def keep(self, key: bytes, tools: tuple[RemoteTool, ...]) -> None:
        size = sum(len(encode(tool)) for tool in tools)
        self.bytes += size - self._lists.pop(key, (0.0, 0, ()))[1]
        self._lists[key] = monotonic() + self._kept_s, size, tools
        while len(self._lists) > LISTS_MAX or self.bytes > LISTS_BYTES_MAX:
            self.bytes -= self._lists.popitem(last=False)[1][1]


class McpServers:
    """The servers, the sessions with them, and what they have listed.

    It is two tools: `call` makes a call, and `lister` lists the tools of a server.
    """

    def __init__(
        self, servers: Sequence[McpServer], hosts: McpHosts, *, list_s: float = 300.0
    ) -> None:
        self._servers = {server.label: server for server in servers}
        self._hosts = hosts
        self._sessions: OrderedDict[bytes, McpSession] = OrderedDict()
        self._lists = KnownLists(list_s)
        self.lister = McpLister(self)

    def check(self, tools: Tools, may: Container[str]) -> None:
        """Refuse a request that names a server which is not known, or may not be called, or not by this caller."""
        labels: set[str] = set()
        carried = [one for one in servers_of(tools).values() if one in tools.carried]
        places = [(f"tools[{index}]", one) for index, one in enumerate(tools.definitions)]
        for path, tool in (*places, *(("input", one) for one in carried)):
            if not isinstance(tool, McpTool):
                continue
            if tool.server_label in labels:
                message = f"Two tools have the server_label '{tool.server_label[:128]}'."
                param = f"{path}.server_label"
                raise InvalidRequest(message, code="invalid_value", param=param)
            labels.add(tool.server_label)
            known = self._find(tool, path)
            scope = "mcp" if known is self._servers.get(tool.server_label) else "mcp_url"
            if scope not in may:
                raise Forbidden(f"This key lacks the scope '{scope}'.", param=path)

    def _find(self, tool: McpTool, path: str = "tools") -> McpServer:
        known = self._servers.get(tool.server_label)
        if not tool.server_url:
            message = f"No MCP server '{tool.server_label[:128]}' is configured here."
            if tool.connector_id or tool.tunnel_id:
                message = (
                    "Connectors and tunnels are not supported: use 'server_label' or 'server_url'."
                )
            elif known is not None:
                return known
            param = f"{path}.server_label"
            raise InvalidRequest(message, code="unknown_mcp_server", param=param)
        if known is not None and tool.server_url in (known.url, known.sse_url):
            return known
        target = self._hosts.check(tool.server_url)
        # Without the headers of the operator's table: they are for the operator's server.
        if target.path.endswith("/sse"):
            return McpServer(tool.server_label, sse_url=target.url, is_outside=True)
        return McpServer(tool.server_label, url=target.url, is_outside=True)

    async def call(self, call: HostedCall) -> ToolResult:
        """Make one call. Whatever goes wrong is an error of the item, and the turn goes on."""
        definition = call.definition
        assert isinstance(definition, McpToolWithSecrets)
        done = McpCall(
            id=call.item_id,
            server_label=definition.server_label,
            name=call.name,
            arguments=call.arguments,
            status="completed",
        )
        try:
            text = await self._call(definition, call)
        except McpFailed as failed:
            error = error_of(failed.kind, failed.message, failed.code)
            done = msgspec.structs.replace(done, status="failed", error=error)
            return ToolResult(f"Error: {failed.message}", as_item(done))
        return ToolResult(text, as_item(msgspec.structs.replace(done, output=text)))

    async def _call(self, definition: McpToolWithSecrets, call: HostedCall) -> str:
        server, session = self._session(definition, call.owner)
        if server.tools and call.name not in server.tools:
            raise McpFailed(f"Unknown tool: {call.name[:128]}", INVALID_PARAMS)
        arguments = _arguments(call.arguments)
        async with session.open() as client:
            # With progress a long call sends something: a silent connection may be cut on its way.
            result = await client.session.call_tool(
                call.name, arguments, progress_callback=_ignore_progress
            )
        text = _text(result)
        if result.is_error:
            message = text or "The tool failed without a message."
            raise McpFailed(message, kind="mcp_tool_execution_error")
        return text

    async def list(self, definition: McpToolWithSecrets, owner: Owner) -> tuple[RemoteTool, ...]:
        """The tools of a server, from the cache where it was listed a short while ago."""
        server, session = self._session(definition, owner)
        if (known := self._lists.find(session.key)) is not None:
            return known
        async with session.open() as client:
            listed = await _list_all(client)
        tools = tuple(tool for tool in listed if not server.tools or tool.name in server.tools)
        self._lists.keep(session.key, tools)
        return tools

    def _session(
        self, definition: McpToolWithSecrets, owner: Owner
    ) -> tuple[McpServer, McpSession]:
        try:
            server = self._find(definition)
        except InvalidRequest as refused:
            # It was there when the request was checked.
            raise McpFailed(refused.message, INVALID_PARAMS) from None
        headers = {**server.headers, **(definition.headers or {})}
        if definition.authorization:
            headers["Authorization"] = f"Bearer {definition.authorization}"
        # Owner, server and secrets: a session is never used with others.
        identity = [owner, msgspec.to_builtins(server), sorted(headers.items())]
        key = blake2b(msgspec.json.encode(identity), digest_size=16).digest()
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = McpSession(key, server, headers, self._hosts)
        self._sessions.move_to_end(key)
        self._close_idle()
        return server, session

    def _close_idle(self) -> None:
        """A session in use is never closed."""
        idle = [session for session in self._sessions.values() if not session.users]
        spare = len(self._sessions) - SESSIONS_MAX
        for number, session in enumerate(idle[:-1]):
            if number < spare or session.idle_s > REST_S:
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
        """The `mcp_list_tools` item; there is no text for the model, because its tools stand elsewhere."""
        definition = call.definition
        assert isinstance(definition, McpToolWithSecrets)
        try:
            item = listing(
                call.item_id, definition, await self._servers.list(definition, call.owner)
            )
        except McpFailed as failed:
            words = failed.message[:LIST_ERROR_CHARS_MAX]
            label, error = definition.server_label, Raw(encode(words))
            item = McpListTools(id=call.item_id, server_label=label, tools=[], error=error)
        return ToolResult("", as_item(item))


# --- sessions -------------------------------------------------------------------------------------


def _load_library() -> None:
    """Import what speaks the protocol."""
    import mcp.client.sse
    import mcp.client.stdio
    import mcp.client.streamable_http  # noqa: F401


class _McpConnection:
    """An open session with a server, held by a task of its own: the library must be closed by the task that opened it,
    while callers come and go."""

    def __init__(self, server: McpServer, headers: Mapping[str, str], hosts: McpHosts) -> None:
        self._server = server
        self._headers = dict(headers)
        self._hosts = hosts
        # The server and its checked addresses, where a request has named it.
        self._route: tuple[Target, tuple[str, ...]] | None = None
        self._leaving = asyncio.Event()
        # The statuses of the server's HTTP responses since the last call began, and what was wrong with one of them.
        self.statuses: list[int] = []
        self.faults: list[str] = []
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        # In a context of its own: it outlives the request that opened it, and its log lines are not that request's.
        self.task = asyncio.create_task(self._hold(), context=Context())

    def leave(self) -> None:
        """End it, without waiting for that."""
        self._leaving.set()
        if not self.client.done():
            self.task.cancel()

    async def _hold(self) -> None:
        try:
            # Most of a second for the first session of a process: a busy machine would take its loop for blocked.
            await asyncio.to_thread(_load_library)
            from mcp import Client

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
                self.client.set_exception(self.failure(error))
                # The caller that waited may have been cancelled: then no other code reads the exception.
                self.client.exception()
            log.info("session with the MCP server %s ended", self._server.label)

    async def _transport(self, stack: AsyncExitStack) -> Transport:
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import streamable_http_client

        server = self._server
        if server.command:
            from segue.mcp.command import piped

            return piped(server.command, dict(server.environment), self.faults.append)
        if server.is_outside:
            url = server.url or server.sse_url
            try:
                self._route = parse(url), await self._hosts.addresses(url)
            except InvalidRequest as refused:
                raise McpFailed(refused.message, CONNECTION_CLOSED) from None
        if server.sse_url:
            return sse_client(
                server.sse_url, headers=self._headers, httpx_client_factory=self._http
            )
        client = await stack.enter_async_context(self._http(self._headers))
        return streamable_http_client(server.url, http_client=client)

    def _http(
        self,
        headers: dict[str, str] | None = None,
        timeout: httpx2.Timeout | None = None,
        auth: httpx2.Auth | None = None,
    ) -> httpx2.AsyncClient:
        """A client that takes nothing from the environment, follows no redirect, and notes each status."""
        import httpx2

        from segue.mcp.bounded import BoundedTransport
        from segue.web.pinned import PinnedTransport

        inner = (
            httpx2.AsyncHTTPTransport(trust_env=False)
            if self._route is None
            else PinnedTransport(*self._route)
        )

        async def note(response: httpx2.Response) -> None:
            self.statuses.append(response.status_code)

        return httpx2.AsyncClient(
            headers=headers,
            timeout=timeout or httpx2.Timeout(CONNECT_S_MAX, read=READ_S_MAX),
            event_hooks={"response": [note]},
            transport=BoundedTransport(inner, self.faults.append),
            trust_env=False,
            follow_redirects=False,
        )

    def failure(self, error: BaseException) -> McpFailed:
        """What went wrong, without secrets: the server's own error, unless its HTTP status says more."""
        from mcp import MCPError

        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        server = f"The MCP server '{self._server.label}'"
        status = next((status for status in reversed(self.statuses) if status >= 400), None)
        match error:
            case McpFailed():
                return error
            case _ if self.faults:
                return McpFailed(
                    f"{server} could not be read: {self.faults[-1]}.", CONNECTION_CLOSED
                )
            case _ if status is not None:
                return McpFailed(f"{server} answered {status}.", status, "http_error")
            case MCPError(message=message) if message.startswith(UNREAD):
                message = f"{server} did not answer with a message of the protocol."
            case MCPError(code=code, message=message) if code != CONNECTION_CLOSED:
                return McpFailed(message, code)
            case MCPError():
                message = f"{server} closed the connection."
            case OSError() if self._server.command:
                message = f"{server} could not be started."
            case _:
                message = f"{server} could not be reached ({type(error).__name__})."
        return McpFailed(message, CONNECTION_CLOSED)


class McpSession:
    """One session with one server, for one owner: opened when it is needed, and again when it has died."""

    def __init__(
        self, key: bytes, server: McpServer, headers: Mapping[str, str], hosts: McpHosts
    ) -> None:
        self.key = key
        # How many calls and listings use it now.
        self.users = 0
        self._hosts = hosts
        self._server = server
        self._headers = headers
        self._opening = asyncio.Lock()
        self._connection: _McpConnection | None = None
        # Connections that are still to end.
        self._tasks: set[asyncio.Task[None]] = set()
        self._used_at = monotonic()

    @property
    def idle_s(self) -> float:
        return monotonic() - self._used_at

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Client]:
        """The open session; what goes wrong inside is raised as `McpFailed`."""
        self.users += 1
        connection: _McpConnection | None = None
        try:
            async with self._opening:
                connection = await self._connect()
            connection.statuses.clear()
            connection.faults.clear()
            yield connection.client.result()
        except Exception as error:
            if connection is None:
                raise
            failed = connection.failure(error)
            if failed.code == CONNECTION_CLOSED or failed.kind == "http_error":
                self.leave(connection)
            raise failed from None
        finally:
            self.users -= 1
            self._used_at = monotonic()

    async def _connect(self) -> _McpConnection:
        connection = self._connection
        if connection is not None and self.idle_s > DOUBT_S and not await _is_alive(connection):
            self.leave(connection)
        connection = self._connection
        if connection is not None and not connection.task.done():
            return connection
        connection = _McpConnection(self._server, self._headers, self._hosts)
        self._tasks.add(connection.task)
        connection.task.add_done_callback(self._tasks.discard)
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                await asyncio.shield(connection.client)
        except BaseException as error:
            connection.leave()
            if not isinstance(error, TimeoutError):
                raise
            label = self._server.label
            message = f"The MCP server '{label}' did not answer within {CONNECT_S_MAX:g} s."
            raise McpFailed(message, TIMED_OUT) from None
        self._connection = connection
        return connection

    def leave(self, connection: _McpConnection | None = None) -> None:
        """End this connection, or the current one; the next call opens another."""
        connection = connection or self._connection
        if connection is not None:
            connection.leave()
        if self._connection is connection:
            self._connection = None

    async def close(self) -> None:
        """End it, and wait until the processes that were started for it have stopped."""
        self.leave()
        if self._tasks:
            _, late = await asyncio.wait([*self._tasks], timeout=STOP_S_MAX)
            for task in late:
                task.cancel()


async def _is_alive(connection: _McpConnection) -> bool:
    """Whether the server still knows this session: any answer to a ping shows that, but for an HTTP error."""
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


# --- arguments, outputs and lists -----------------------------------------------------------------


def _arguments(text: str) -> dict[str, object]:
    """The arguments as an object; empty where the model wrote nothing."""
    try:
        arguments = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        raise McpFailed("The arguments are not valid JSON.", INVALID_PARAMS) from None
    if not isinstance(arguments, dict):
        raise McpFailed("The arguments are not a JSON object.", INVALID_PARAMS)
    return arguments


async def _ignore_progress(progress: float, total: float | None, message: str | None) -> None:
    """The contract has no event for it; that it was sent is enough."""


def _text(result: CallToolResult) -> str:
    """What the model reads of a result: its texts, and a note for everything else. Most servers send structured content
    as text too; where a server does not, the model reads it as JSON."""
    if not result.content and result.structured_content is not None:
        return encode(result.structured_content).decode()
    return "\n".join(_block_text(block) for block in result.content)


def _block_text(block: ContentBlock) -> str:
    match block.type:
        case "text":
            return block.text
        case "resource":
            text = getattr(block.resource, "text", None)
            return (
                text if isinstance(text, str) else f"[resource: {block.resource.uri}, not a text]"
            )
        case "resource_link":
            return f"[resource: {block.uri}]"
        case kind:
            return f"[{kind}: {block.mime_type}, not shown: it is not a text]"


async def _list_all(client: Client) -> list[RemoteTool]:
    from mcp_types import PaginatedRequestParams

    listed: list[RemoteTool] = []
    cursor: str | None = None
    for _ in range(LIST_PAGES_MAX):
        page = await client.session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        listed += map(_remote_tool, page.tools)
        cursor = page.next_cursor
        if cursor is None or len(listed) >= TOOLS_MAX:
            break
    return listed[:TOOLS_MAX]


def _remote_tool(tool: ListedTool) -> RemoteTool:
    is_read_only = tool.annotations.read_only_hint if tool.annotations else None
    return RemoteTool(
        name=tool.name,
        input_schema=Raw(encode(tool.input_schema)),
        description=tool.description,
        annotations=None if is_read_only is None else Hints(is_read_only),
    )
