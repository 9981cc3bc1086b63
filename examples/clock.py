"""A small MCP server with one tool. Segue starts it, as examples/segue.toml says: pip install mcp."""

from __future__ import annotations

from datetime import UTC, datetime

from mcp.server import MCPServer

server = MCPServer("clock")


@server.tool()
def now() -> str:
    """The time in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    server.run()
