"""What do the tools of a remote server mean to the model? Pure.

In: how a request names an MCP server, and what the server has listed. Out: offers, as for any other tool: the model
calls `label.name`. The request sets which of the tools may be called, and which only after a person has
approved (docs/protocol.md 4.1); by default every call needs an approval.

A server has listed its tools in an item of the history. That holds as long as requests name the server alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct

from segue.errors import InvalidRequest
from segue.wire.codec import encode
from segue.wire.effects import Effects
from segue.wire.items import McpListTools, RemoteTool
from segue.wire.tools import FunctionTool, McpTool, Offer, ToolDefinition, Tools

# Of a server: more than any has that a model can still choose from.
TOOLS_MAX = 512

ErrorKind = Literal["mcp_protocol_error", "mcp_tool_execution_error", "http_error"]


class ToolFilter(Struct, frozen=True):
    """Some of a server's tools: by name, by being read-only, or both."""

    tool_names: frozenset[str] | None = None
    read_only: bool | None = None

    def has(self, tool: RemoteTool) -> bool:
        """Whether this tool is among them."""
        is_named = self.tool_names is None or tool.name in self.tool_names
        is_read_only = bool(tool.annotations and tool.annotations.read_only)
        return is_named and self.read_only in (None, is_read_only)


class ApprovalRule(Struct, frozen=True):
    """When a person is asked."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None


class McpToolWithSecrets(McpTool, tag="mcp", frozen=True, kw_only=True):
    """A definition as the request gave it, with what is not echoed."""

    headers: dict[str, str] | None = None
    authorization: str | None = None


_with_secrets = msgspec.json.Decoder(McpToolWithSecrets)
_tool = msgspec.json.Decoder(RemoteTool)
_allowed: msgspec.json.Decoder[frozenset[str] | ToolFilter | None] = msgspec.json.Decoder(
    frozenset[str] | ToolFilter | None
)
_asking: msgspec.json.Decoder[Literal["always", "never"] | ApprovalRule | None] = (
    msgspec.json.Decoder(Literal["always", "never"] | ApprovalRule | None)
)


def with_secrets(definition: Raw) -> McpToolWithSecrets:
    """A definition that was accepted, with its secrets."""
    return _with_secrets.decode(definition)


def servers_of(tools: Tools) -> dict[str, McpTool]:
    """The remote servers of a request and of its history, by their labels."""
    found = {one.server_label: one for one in tools.definitions if isinstance(one, McpTool)}
    for one in tools.carried:
        if isinstance(one, McpTool):
            found.setdefault(one.server_label, one)
    return found


def check_servers(tools: Tools) -> None:
    """Refuse a definition of a remote server that has a field of a wrong shape."""
    places = [(f"tools[{index}]", tool) for index, tool in enumerate(tools.definitions)]
    for place, tool in (*places, *(("input", tool) for tool in tools.carried)):
        if isinstance(tool, McpTool) and (field := _wrong_field(tool)) is not None:
            param = f"{place}.{field}"
            raise InvalidRequest(f"Invalid value for '{param}'.", code="invalid_value", param=param)


def _wrong_field(tool: McpTool) -> str | None:
    for name, decoder in (("allowed_tools", _allowed), ("require_approval", _asking)):
        raw = getattr(tool, name)
        if isinstance(raw, Raw):
            try:
                decoder.decode(raw)
            except msgspec.DecodeError:
                return name
    return None


class ToolRules:
    """What a request says of the tools of a server, read once for all of them."""

    def __init__(self, definition: McpTool) -> None:
        allowed, asking = definition.allowed_tools, definition.require_approval
        self._allowed = _allowed.decode(allowed) if isinstance(allowed, Raw) else None
        self._asking = _asking.decode(asking) if isinstance(asking, Raw) else None

    def allow(self, tool: RemoteTool) -> bool:
        """Whether the request lets the model know this tool."""
        if isinstance(self._allowed, ToolFilter):
            return self._allowed.has(tool)
        return self._allowed is None or tool.name in self._allowed

    def ask(self, tool: RemoteTool) -> bool:
        """Whether a person must approve the call, which is so unless the request says otherwise."""
        match self._asking:
            case "never":
                return False
            case ApprovalRule(always=always, never=never):
                is_asked = always is not None and always.has(tool)
                return is_asked or never is None or not never.has(tool)
            case _:
                return True


def still_listed(tools: Tools, effects: Effects, tools_before: Tools | None) -> list[McpListTools]:
    """What the servers of this request have listed before in this history, under the same name and filter."""
    servers = servers_of(tools)
    before = servers_of(tools_before) if servers and tools_before is not None else {}
    return [
        listed
        for listed in effects.listed
        if (server := servers.get(listed.server_label)) is not None
        and is_same_server(before.get(listed.server_label, server), server)
    ]


def listed_offers(tools: Tools, effects: Effects, tools_before: Tools | None) -> list[Offer]:
    """What the model can call of what the servers have listed."""
    lists = {one.server_label: one for one in still_listed(tools, effects, tools_before)}
    return [
        offer
        for label, definition in servers_of(tools).items()
        if label in lists
        for offer in _offers(definition, lists[label])
    ]


def _offers(definition: McpTool, listed: McpListTools) -> list[Offer]:
    remote = {one.name: one for one in map(_tool.decode, listed.tools)}
    rules = ToolRules(definition)
    return [
        Offer(
            FunctionTool(
                name=one.name,
                description=one.description if one.description is not None else UNSET,
                parameters=one.input_schema,
                defer_loading=True if definition.defer_loading else UNSET,
            ),
            namespace=definition.server_label,
            about=definition.server_description or "",
            builtin="mcp",
            execution="server",
            needs_approval=rules.ask(one),
        )
        for one in remote.values()
        if rules.allow(one)
    ]


def listing(item_id: str, definition: McpTool, tools: Sequence[RemoteTool]) -> McpListTools:
    """What a server has listed, as far as the request lets the model know it."""
    rules = ToolRules(definition)
    shown = [Raw(encode(one)) for one in tools if rules.allow(one)]
    return McpListTools(id=item_id, server_label=definition.server_label, tools=shown)


def is_same_server(one: ToolDefinition | None, other: McpTool) -> bool:
    """Whether two requests name the same server, and the same of its tools."""
    if not isinstance(one, McpTool):
        return False
    fields = ("server_label", "server_url", "connector_id", "tunnel_id", "allowed_tools")
    return all(getattr(one, name) == getattr(other, name) for name in fields)


def error_of(kind: ErrorKind, message: str, code: int = 0) -> Raw:
    """Why a call failed, in the three shapes of the contract."""
    if kind == "mcp_tool_execution_error":
        content = [{"type": "text", "text": message}]
        return Raw(encode({"type": kind, "content": content}))
    return Raw(encode({"type": kind, "code": code, "message": message}))
