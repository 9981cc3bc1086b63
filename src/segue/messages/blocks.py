"""What may a client of this API write in a message? JSON in, one struct for each type of block out. Pure."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.errors import InvalidRequest
from segue.wire import long_texts

T = TypeVar("T")


class CacheControl(Struct, frozen=True):
    ttl: str | None = None


class ContentBlock(Struct, frozen=True, kw_only=True, gc=False):
    """One block of a message's content."""

    cache_control: CacheControl | None = None


class Text(ContentBlock, frozen=True, kw_only=True):
    text: str


class BlockSource(Struct, frozen=True, kw_only=True):
    """Where a picture or a document is; which fields count depends on its type."""

    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""
    file_id: str = ""
    content: str | list[Raw] = ""


class Image(ContentBlock, frozen=True, kw_only=True):
    source: BlockSource


class Document(ContentBlock, frozen=True, kw_only=True):
    source: BlockSource
    title: str | None = None
    context: str | None = None


class SearchResult(ContentBlock, frozen=True, kw_only=True):
    source: str
    title: str
    content: list[Text]


class Thinking(ContentBlock, frozen=True, kw_only=True):
    thinking: str = ""
    signature: str | None = ""


class RedactedThinking(ContentBlock, frozen=True, kw_only=True):
    data: str


class ToolUse(ContentBlock, frozen=True, kw_only=True):
    id: str
    name: str
    input: Raw | UnsetType = UNSET


class McpToolUse(ToolUse, frozen=True, kw_only=True):
    server_name: str


class ToolResultBlock(ContentBlock, frozen=True, kw_only=True):
    tool_use_id: str
    content: str | list[Raw] | None = None
    is_error: bool | None = None


class ServerResult(ContentBlock, frozen=True, kw_only=True):
    """What a tool of the server has returned; of the results we read the addresses of pages and the names of tools."""

    tool_use_id: str
    content: Raw | UnsetType = UNSET


class ToolReference(ContentBlock, frozen=True, kw_only=True):
    tool_name: str


class ChangedTool(Struct, frozen=True, kw_only=True):
    type: str
    name: str = ""
    definition: Raw | UnsetType = UNSET


class ToolChange(ContentBlock, frozen=True, kw_only=True):
    tool: ChangedTool


class CompactionBlock(ContentBlock, frozen=True, kw_only=True):
    content: str | None = None


class _Typed(Struct, frozen=True):
    type: str


class _OutputConfig(Struct, frozen=True):
    effort: str | None = None


class SentMessage(Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[Raw]
    output_config: _OutputConfig | None = None


_TYPES: dict[str, type[ContentBlock]] = {
    "text": Text,
    "image": Image,
    "document": Document,
    "search_result": SearchResult,
    "thinking": Thinking,
    "redacted_thinking": RedactedThinking,
    "tool_use": ToolUse,
    "tool_result": ToolResultBlock,
    "server_tool_use": ToolUse,
    "web_search_tool_result": ServerResult,
    "web_fetch_tool_result": ServerResult,
    "tool_search_tool_result": ServerResult,
    "mcp_tool_use": McpToolUse,
    "mcp_tool_result": ToolResultBlock,
    "tool_reference": ToolReference,
    "tool_addition": ToolChange,
    "tool_removal": ToolChange,
    "compaction": CompactionBlock,
}
# How a block of each type is read.
BLOCKS = {name: msgspec.json.Decoder(struct) for name, struct in _TYPES.items()}
_typed = msgspec.json.Decoder(_Typed)
_message = msgspec.json.Decoder(SentMessage)
_object = msgspec.json.Decoder(dict[str, Raw])
_PATH = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`\Z")


def decode(decoder: msgspec.json.Decoder[T], data: Raw | bytes | bytearray, place: str = "") -> T:
    """Decode, or refuse with the place and the reason, as clients of this API read it: `messages.0.role: …`."""
    try:
        return long_texts.decode(decoder.decode, data)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        inner = re.sub(r"\[(\d+)\]", r".\1", found["path"]) if found else ""
        where = f"{place}{inner}".lstrip(".")
        why = text[: found.start()] if found else text
        raise InvalidRequest(f"{where}: {why}" if where else why, param=where or None) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        is_json = isinstance(error, msgspec.DecodeError)
        why = str(error) if is_json else "it is nested too deeply or not valid UTF-8"
        message = f"The request body is not valid JSON: {why}"
        raise InvalidRequest(message, code="invalid_json", param=place or None) from None


def decode_message(raw: Raw | bytes, place: str) -> SentMessage:
    """A message with its blocks still raw."""
    return decode(_message, raw, place)


def kind_of(raw: Raw, place: str) -> str:
    """The type of a block."""
    return decode(_typed, raw, place).type


def fields_of(raw: Raw | UnsetType) -> dict[str, Raw]:
    try:
        return {} if raw is UNSET else _object.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {}


def string_of(raw: Raw | None) -> str:
    try:
        return "" if raw is None else msgspec.json.decode(raw, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
