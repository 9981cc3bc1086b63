"""An MCP server of our own for tests: it answers, waits, fails and dies on request.

As a module it speaks over its pipes; `remote` runs it over HTTP on a free loopback port, in this event loop, and shows
what it was asked.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WAIT_S = 30


@dataclass
class Remote:
    """A server, and what has happened to it."""

    url: str = ""
    # The headers of every request.
    headers: list[dict[str, str]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    was_stopped: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    # What every request is answered, instead of by the server.
    status: int = 0
    body: bytes = b""


def build(remote: Remote) -> Any:
    """The server itself."""
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import ToolAnnotations

    server = MCPServer("test")

    @server.tool(description="Says it again.", annotations=ToolAnnotations(readOnlyHint=True))
    async def echo(text: str) -> str:
        remote.calls.append(text)
        return text

    @server.tool(description="Waits until it may end.")
    async def wait(text: str) -> str:
        remote.calls.append(text)
        remote.has_begun.set()
        try:
            await remote.may_end.wait()
        except BaseException:
            remote.stopped.append(text)
            remote.was_stopped.set()
            raise
        return text

    @server.tool(description="Takes its time.")
    async def sleep(seconds: float) -> str:
        remote.has_begun.set()
        try:
            await asyncio.sleep(seconds)
        except BaseException:
            remote.stopped.append("sleep")
            remote.was_stopped.set()
            raise
        return f"slept {seconds:g} s"

    @server.tool(description="Never works.")
    async def fail(text: str) -> str:
        raise ToolError(text)

    @server.tool(description="Ends the server.")
    async def die(text: str) -> str:
        os._exit(1)

    return server


@asynccontextmanager
async def remote(path: str = "/mcp", hosts: Sequence[str] = ()) -> AsyncIterator[Remote]:
    """The server over HTTP; `hosts` are other names that it is asked under."""
    import uvicorn
    from mcp.server.transport_security import TransportSecuritySettings

    # Here, because the program that speaks over its pipes has nothing of ours.
    from segue.server.serve import UvicornServer

    found = Remote()
    server = build(found)
    asked = TransportSecuritySettings(allowed_hosts=["127.0.0.1:*", *hosts])
    app = (
        server.sse_app(transport_security=asked)
        if path == "/sse"
        else server.streamable_http_app(transport_security=asked)
    )

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            found.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
            if found.status:
                headers = [(b"content-type", b"application/json")] if found.body else []
                await send(
                    {"type": "http.response.start", "status": found.status, "headers": headers}
                )
                await send({"type": "http.response.body", "body": found.body})
                return
        await app(scope, receive, send)

    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = uvicorn.Config(
        noting,
        host="127.0.0.1",
        port=0,
        log_config=None,
        lifespan="on",
        timeout_graceful_shutdown=1,
    )
    listening = UvicornServer(config, address.set_result)
    task = asyncio.create_task(listening.serve())
    async with asyncio.timeout(WAIT_S):
        found.url = await address + path
    try:
        yield found
    finally:
        found.may_end.set()
        listening.should_exit = True
        await task


if __name__ == "__main__":
    if place := os.environ.get("SEGUE_TEST_PID"):
        Path(place).write_text(str(os.getpid()))
    build(Remote()).run("stdio")
