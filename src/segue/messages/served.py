"""How does a call of a tool of the server, with its result, become one item? Pure.

Clients send both back as they have read them. Of the results that we know are read the addresses of pages, their text
where we have sealed it, and the names of tools; what cannot be read says nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.errors import cut_name
from segue.messages.blocks import (
    Document,
    McpToolUse,
    ServerResult,
    ToolReference,
    ToolResultBlock,
    ToolUse,
    fields_of,
    string_of,
)

SERVER_CALL = "srvtoolu_"
MCP_CALL = "mcptoolu_"
TOOL_SEARCH = "tool_search_tool"
# What the model has read of a page, in the action of a search: ours (web/tool.py).
TEXT_KEY = "segue:text"
# Opens what we have sealed for the client; None where it is not ours.
Unseal = Callable[[str], str | None]


class _Page(Struct, frozen=True):
    url: str = ""
    title: str = ""
    encrypted_content: str = ""


class _Found(Struct, frozen=True):
    tool_references: list[ToolReference] = []


class _Fetched(Struct, frozen=True):
    content: Document


_pages = msgspec.json.Decoder(list[_Page])
_found = msgspec.json.Decoder(_Found)
_fetched = msgspec.json.Decoder(_Fetched)


def server_item(
    kind: str, use: ToolUse, result: ServerResult | ToolResultBlock | None, unseal: Unseal
) -> dict[str, object]:
    """A call of a tool of the server with its result, as one item where there is a type for it."""
    given = fields_of(use.input)
    if isinstance(use, McpToolUse):
        return _mcp_item(use, result)
    if kind == "web_search":
        pages = _pages_in(result)
        action: dict[str, object] = {"type": "search", "query": string_of(given.get("query"))}
        action["sources"] = [{"type": "url", "url": page.url} for page in pages if page.url]
        sealed = next((page.encrypted_content for page in pages if page.encrypted_content), "")
        if sealed and (opened := unseal(sealed)) is not None:
            action[TEXT_KEY] = opened
        return _hosted(use.id, "web_search_call", action=action)
    if kind == "web_fetch":
        action = {"type": "open_page", "url": string_of(given.get("url"))}
        if "pattern" in given:
            action |= {"type": "find_in_page", "pattern": string_of(given["pattern"])}
        if read := _page_text(result):
            action[TEXT_KEY] = read
        return _hosted(use.id, "web_search_call", action=action)
    if kind.startswith(TOOL_SEARCH):
        call = {
            "type": "tool_search_call",
            "id": f"tsc_{letters_of(use.id)}",
            "execution": "server",
        }
        return {**call, "status": "completed", "arguments": use.input or Raw(b"{}")}
    text = f"[{cut_name(kind)} was called with {_shown(use.input)}]"
    return {"type": "message", "role": "assistant", "content": text}


def _hosted(tool_use_id: str, kind: str, **fields: object) -> dict[str, object]:
    item_id = tool_use_id.removeprefix(SERVER_CALL).removeprefix(MCP_CALL)
    return {"type": kind, "id": item_id, "status": "completed", **fields}


def _mcp_item(use: McpToolUse, result: ServerResult | ToolResultBlock | None) -> dict[str, object]:
    fields: dict[str, object] = {
        "server_label": use.server_name,
        "name": use.name,
        "arguments": _shown(use.input),
    }
    if isinstance(result, ToolResultBlock):
        output = _texts(result.content)
        fields |= {"error": output} if result.is_error else {"output": output}
    return _hosted(use.id, "mcp_call", **fields)


def _texts(content: str | list[Raw] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = (string_of(fields_of(raw).get("text")) for raw in content)
    return "\n".join(text for text in texts if text)


def _shown(raw: Raw | UnsetType) -> str:
    return "{}" if raw is UNSET else bytes(raw).decode()


def _pages_in(result: ServerResult | ToolResultBlock | None) -> list[_Page]:
    if not isinstance(result, ServerResult) or result.content is UNSET:
        return []
    try:
        return _pages.decode(result.content)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        # An error in place of results.
        return []


def _page_text(result: ServerResult | ToolResultBlock | None) -> str:
    """The text of a page that was fetched."""
    if not isinstance(result, ServerResult) or result.content is UNSET:
        return ""
    try:
        return _fetched.decode(result.content).content.source.data
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return ""


def letters_of(tool_use_id: str) -> str:
    """By these the call and the output of a search for tools belong together."""
    return tool_use_id.rpartition("_")[2]


def found_tools(result: ServerResult) -> tuple[str, ...]:
    try:
        found = _found.decode(result.content) if result.content is not UNSET else _Found()
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return ()
    return tuple(reference.tool_name for reference in found.tool_references)
