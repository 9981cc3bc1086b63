"""What a tool definition means: every type of the contract, decoded once and kept as bytes.

Agents resend all their tools, some 19 KB, on every turn. A `Tools` value keeps the bytes beside the decoded
form, so that the next turn compares bytes and decodes only what differs (protocol.md 4, product.md 2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.wire.requests import ToolChoiceName

# What chat endpoints allow in the name of a function.
PLAIN_NAME_MAX = 64
_NOT_PLAIN = re.compile(r"[^a-zA-Z0-9_-]")

Text = str | None | UnsetType
Flag = bool | None | UnsetType
Json = Raw | UnsetType


class Definition(Struct, frozen=True, tag_field="type", kw_only=True):
    """What every tool may carry."""


class FunctionTool(Definition, tag="function", frozen=True, kw_only=True):
    name: str
    description: Text = UNSET
    parameters: Json = UNSET
    strict: Flag = UNSET
    is_async: Flag = msgspec.field(name="async", default=UNSET)
    defer_loading: Flag = UNSET
    output_schema: Json = UNSET
    allowed_callers: list[str] | UnsetType | None = UNSET


class CustomTool(Definition, tag="custom", frozen=True, kw_only=True):
    name: str
    description: Text = UNSET
    format: Json = UNSET
    is_async: Flag = msgspec.field(name="async", default=UNSET)
    defer_loading: Flag = UNSET


class NamespaceTool(Definition, tag="namespace", frozen=True, kw_only=True):
    name: str
    description: Text = UNSET
    tools: list[FunctionTool | CustomTool] = []


class ToolSearchTool(Definition, tag="tool_search", frozen=True, kw_only=True):
    execution: Literal["server", "client"] | UnsetType = UNSET
    description: Text = UNSET
    parameters: Json = UNSET


class WebSearchTool(Definition, tag="web_search", frozen=True, kw_only=True):
    search_context_size: Text = UNSET
    external_web_access: Flag = UNSET
    filters: Json = UNSET
    user_location: Json = UNSET


class McpTool(Definition, tag="mcp", frozen=True, kw_only=True):
    """`headers` and `authorization` are left out on purpose: they are never echoed or stored."""

    server_label: str
    server_url: Text = UNSET
    connector_id: Text = UNSET
    tunnel_id: Text = UNSET
    server_description: Text = UNSET
    allowed_tools: Json = UNSET
    require_approval: Json = UNSET
    defer_loading: Flag = UNSET


class ShellTool(Definition, tag="shell", frozen=True, kw_only=True):
    environment: Json = UNSET


class ApplyPatchTool(Definition, tag="apply_patch", frozen=True, kw_only=True):
    pass


class LocalShellTool(Definition, tag="local_shell", frozen=True, kw_only=True):
    pass


class ComputerTool(Definition, tag="computer", frozen=True, kw_only=True):
    pass


class ProgrammaticTool(Definition, tag="programmatic_tool_calling", frozen=True, kw_only=True):
    pass


class FileSearchTool(Definition, tag="file_search", frozen=True, kw_only=True):
    vector_store_ids: list[str] | UnsetType = UNSET
    max_num_results: int | UnsetType | None = UNSET
    filters: Json = UNSET
    ranking_options: Json = UNSET


class CodeInterpreterTool(Definition, tag="code_interpreter", frozen=True, kw_only=True):
    container: Json = UNSET


class ImageGenerationTool(Definition, tag="image_generation", frozen=True, kw_only=True):
    pass


Tool = (
    FunctionTool
    | CustomTool
    | NamespaceTool
    | ToolSearchTool
    | WebSearchTool
    | McpTool
    | ShellTool
    | ApplyPatchTool
    | LocalShellTool
    | ComputerTool
    | ProgrammaticTool
    | FileSearchTool
    | CodeInterpreterTool
    | ImageGenerationTool
)

# Older names of the same tools.
ALIASES = {
    "web_search_2025_08_26": "web_search",
    "web_search_preview": "web_search",
    "web_search_preview_2025_03_11": "web_search",
    "computer_use": "computer",
    "computer_use_preview": "computer",
}


class Offer(Struct, frozen=True):
    """A tool that the model can call by name, with the namespace that it stands in."""

    tool: FunctionTool | CustomTool
    namespace: str | None = None

    @property
    def qualified_name(self) -> str:
        """The one name that the model sees and writes."""
        return f"{self.namespace}.{self.tool.name}" if self.namespace else self.tool.name


class Tools(Struct, frozen=True):
    """All tools of a request: as they came, as they mean, and as the response echoes them."""

    raw: bytes = b"[]"
    definitions: tuple[Tool, ...] = ()
    echo: bytes = b"[]"
    offers: tuple[Offer, ...] = ()


NO_TOOLS = Tools()


def offers_of(definitions: tuple[Tool, ...]) -> tuple[Offer, ...]:
    """What the model is told it can call: functions and custom tools, namespaces opened."""
    offers: list[Offer] = []
    for tool in definitions:
        match tool:
            case FunctionTool() | CustomTool():
                offers.append(Offer(tool))
            case NamespaceTool():
                offers.extend(Offer(inner, tool.name) for inner in tool.tools)
            case _:
                pass
    return tuple(offers)


def plain_name(qualified_name: str) -> str:
    """A name for chat endpoints, which know no dots: `fs.read` is `fs__read` to them."""
    return _NOT_PLAIN.sub("_", qualified_name.replace(".", "__"))[:PLAIN_NAME_MAX]


def offer_named(offers: tuple[Offer, ...], qualified_name: str) -> Offer | None:
    """The offer that the model means by this name."""
    for offer in offers:
        if offer.qualified_name == qualified_name:
            return offer
    return None


def forced_offers(choice: str | ToolChoiceName, offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    """The tools of which one must be called by this choice; none if the model may do without."""
    if choice == "required":
        return offers
    if not isinstance(choice, ToolChoiceName):
        return ()
    if choice.type != "allowed_tools":
        return _named([choice], offers)
    return _named(choice.tools or [], offers) if choice.mode == "required" else ()


def allowed_offers(choice: str | ToolChoiceName, offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    """The tools that may be called by this choice."""
    if not isinstance(choice, ToolChoiceName):
        return () if choice == "none" else offers
    if choice.type == "allowed_tools":
        return _named(choice.tools or [], offers)
    return _named([choice], offers) if choice.type in ("function", "custom") else offers


def _named(choices: Iterable[ToolChoiceName], offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """The tools that these choices name; one that says no namespace means any."""
    wanted = [(one.name, one.namespace) for one in choices]
    return tuple(
        offer
        for offer in offers
        if any(
            offer.tool.name == name and space in (None, offer.namespace) for name, space in wanted
        )
    )


def has_grammar(offer: Offer) -> bool:
    """Whether what the model gives this tool must follow a grammar."""
    shape = _shape(offer)
    return isinstance(shape, dict) and shape.get("type") == "grammar"


def grammar_of(offer: Offer) -> tuple[str, str] | None:
    """The syntax of the grammar that this tool has, and its definition."""
    shape = _shape(offer)
    if not isinstance(shape, dict) or shape.get("type") != "grammar":
        return None
    return str(shape.get("syntax")), str(shape.get("definition") or "")


def _shape(offer: Offer) -> object:
    """The format of a custom tool, as it came."""
    if not isinstance(offer.tool, CustomTool) or not isinstance(offer.tool.format, Raw):
        return None
    return msgspec.json.decode(offer.tool.format)
