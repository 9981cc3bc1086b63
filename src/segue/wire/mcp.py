"""What do the tools of a remote server mean to the model? Pure.

In: how a request names an MCP server, and what the server has listed. Out: offers, as for any other tool: the model
calls `label.name`. The request sets which of the tools may be called, and which only after a person has
approved (docs/protocol.md 4.1); by default every call needs an approval.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct, structs

from segue.errors import InvalidRequest
from segue.wire.codec import as_item, encode
from segue.wire.items import (
    HostedOutput,
    Item,
    McpCall,
    McpListTools,
    RemoteTool,
    WebSearchCall,
)
from segue.wire.tools import (
    FunctionTool,
    McpTool,
    Offer,
    ToolDefinition,
    Tools,
    ToolSearchTool,
    check_names,
)
from segue.wire.web import words_of_action

ErrorKind = Literal["mcp_protocol_error", "mcp_tool_execution_error", "http_error"]


class ToolFilter(Struct, frozen=True):
    """Some of a server's tools: by name, by being read-only, or both."""

    tool_names: tuple[str, ...] | None = None
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


_tool = msgspec.json.Decoder(RemoteTool)
_allowed: msgspec.json.Decoder[tuple[str, ...] | ToolFilter | None] = msgspec.json.Decoder(
    tuple[str, ...] | ToolFilter | None
)
_asking: msgspec.json.Decoder[Literal["always", "never"] | ApprovalRule | None] = (
    msgspec.json.Decoder(Literal["always", "never"] | ApprovalRule | None)
)


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


def is_allowed(definition: McpTool, tool: RemoteTool) -> bool:
    """Whether the request lets the model know this tool."""
    if not isinstance(definition.allowed_tools, Raw):
        return True
    allowed = _allowed.decode(definition.allowed_tools)
    if isinstance(allowed, ToolFilter):
        return allowed.has(tool)
    return allowed is None or tool.name in allowed


def needs_approval(definition: McpTool, tool: RemoteTool) -> bool:
    """Whether a person must approve the call, which is so unless the request says otherwise."""
    if not isinstance(definition.require_approval, Raw):
        return True
    match _asking.decode(definition.require_approval):
        case "never":
            return False
        case ApprovalRule(always=always, never=never):
            is_asked = always is not None and always.has(tool)
            return is_asked or never is None or not never.has(tool)
        case _:
            return True


def with_listed(tools: Tools, listed: Sequence[McpListTools]) -> Tools:
    """The same tools, with what their servers have listed; the very same if that is in them already."""
    lists = {one.server_label: one for one in listed}
    found = [
        (definition, lists[label])
        for label, definition in servers_of(tools).items()
        if label in lists
    ]
    offers = [offer for definition, one in found for offer in _offers(definition, one)]
    key = blake2b(digest_size=16)
    for offer in offers:
        key.update(encode((offer.qualified_name, offer.tool)))
    mark = key.digest() if offers else b""
    if mark == tools.listed:
        return tools
    has_search = any(isinstance(one, ToolSearchTool) for one in tools.known)
    later = [one for one in offers if has_search and one.tool.defer_loading is True]
    check_names((*_own(tools.offers), *_own(tools.deferred), *offers))
    return structs.replace(
        tools,
        offers=(*_own(tools.offers), *(one for one in offers if one not in later)),
        deferred=(*_own(tools.deferred), *later),
        listed=mark,
    )


def _own(offers: Sequence[Offer]) -> list[Offer]:
    return [one for one in offers if one.builtin != "mcp"]


def _offers(definition: McpTool, listed: McpListTools) -> list[Offer]:
    remote = {one.name: one for one in map(_tool.decode, listed.tools)}
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
            needs_approval=needs_approval(definition, one),
        )
        for one in remote.values()
        if is_allowed(definition, one)
    ]


def listing(item_id: str, definition: McpTool, tools: Sequence[RemoteTool]) -> McpListTools:
    """What a server has listed, as far as the request lets the model know it."""
    shown = [Raw(encode(one)) for one in tools if is_allowed(definition, one)]
    return McpListTools(id=item_id, server_label=definition.server_label, tools=shown)


def is_same_server(one: ToolDefinition | None, other: McpTool) -> bool:
    """Whether two requests name the same server, and the same of its tools."""
    if not isinstance(one, McpTool):
        return False
    fields = ("server_label", "server_url", "connector_id", "tunnel_id", "allowed_tools")
    return all(getattr(one, name) == getattr(other, name) for name in fields)


# --- outcomes -------------------------------------------------------------------------------------


def error_of(kind: ErrorKind, message: str, code: int = 0) -> Raw:
    """Why a call failed, in the three shapes of the contract."""
    if kind == "mcp_tool_execution_error":
        content = [{"type": "text", "text": message}]
        return Raw(encode({"type": kind, "content": content}))
    return Raw(encode({"type": kind, "code": code, "message": message}))


def words_of(value: McpCall) -> str:
    """The output of a call that a client has sent, as the model reads it."""
    if isinstance(value.output, str):
        return value.output
    if not isinstance(value.error, Raw) or bytes(value.error) == b"null":
        # Chat endpoints refuse a call without an output.
        return "[The output of this call is not available.]"
    match msgspec.json.decode(value.error):
        case {"message": str() as message}:
            return f"Error: {message}"
        case {"content": list() as content}:
            texts = [str(one.get("text", "")) for one in content if isinstance(one, dict)]
            return "Error: " + "\n".join(texts)
        case str() as message:
            return f"Error: {message}"
        case _:
            return "Error: the call failed."


def with_outputs(given: Sequence[Item]) -> tuple[Item, ...]:
    """The items that a client sent, with the output of each hosted call after the call.

    In our own history the two are apart, because the model wrote the one and was given the other.
    """
    items: list[Item] = []
    for item in given:
        items.append(item)
        value = item.value
        if isinstance(value, WebSearchCall) and isinstance(value.action, Raw):
            items.append(output_item(str(value.id or ""), words_of_action(value.action)))
        if isinstance(value, McpCall) and (words := words_of(value)) is not None:
            made_in = value.approval_request_id or value.id
            items.append(output_item(made_in if isinstance(made_in, str) else "", words))
    return tuple(items)


def output_item(call_id: str, text: str) -> Item:
    """The output of one of our own tools, for the model."""
    return as_item(HostedOutput(call_id=call_id, output=text))
