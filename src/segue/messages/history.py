"""What does one message of a client mean? The JSON of a message in, items of the Responses API out. Pure.

What a message means depends on its bytes alone, so that it can be kept (`TranslatedMessage`), and a history that comes
again need not be read again. What depends on the rest of the request is left open: a tool that is named here is defined
in `tools` (`Loaded`), and whether a call has its result is checked over all messages (`pairs`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct

from segue.errors import InvalidRequest, cut_name
from segue.messages.blocks import (
    BLOCKS,
    BlockSource,
    CacheControl,
    ChangedTool,
    CompactionBlock,
    ContentBlock,
    Document,
    Image,
    McpToolUse,
    RedactedThinking,
    SearchResult,
    SentMessage,
    ServerResult,
    Text,
    Thinking,
    ToolChange,
    ToolReference,
    ToolResultBlock,
    ToolUse,
    decode,
    decode_message,
    fields_of,
    kind_of,
    string_of,
)
from segue.messages.served import TOOL_SEARCH, Unseal, found_tools, letters_of, server_item
from segue.wire.codec import encode_read
from segue.wire.requests import Effort

# Claude Code puts this in front of its system prompt; it differs for each conversation, and says nothing to a model.
BILLING = "x-anthropic-billing-header:"
EFFORTS: dict[str, Effort] = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "xhigh",
    "max": "max",
}
# Our own calls: `call_…` to the turn, `toolu_…` to clients of this API.
_OUR_CALL = re.compile(r"toolu_([0-9a-f]{36})\Z")
# A result that says by itself that something went wrong says so at its beginning.
SAYS_ERROR_CHARS = 200
# What the content of a result may consist of.
IN_RESULTS = frozenset({"text", "image", "document", "search_result", "tool_reference"})

Ttl = Literal["", "5m", "1h"]


class Loaded(Struct, frozen=True):
    """Tools that hold from here on, by their names."""

    names: tuple[str, ...]


class Defined(Struct, frozen=True):
    """A tool that is defined here, and holds from here on."""

    definition: Raw


class Removed(Struct, frozen=True):
    """A tool that may not be called from here on."""

    name: str


class FoundTools(Struct, frozen=True):
    """Tools that a search of ours has found, by their names."""

    letters: str
    names: tuple[str, ...]


MessagePiece = Raw | Loaded | Defined | Removed | FoundTools


class TranslatedMessage(Struct, frozen=True):
    """What a message means: items as JSON, and what the rest of the request must say."""

    role: str
    pieces: tuple[MessagePiece, ...] = ()
    # The ids of its calls and of its results, in the client's words.
    calls: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    # The place of a block that could not be read, and its type.
    unknown: tuple[int, str] | None = None
    # How long the client wants what it has marked to be cached; nothing is marked where this is empty.
    ttl: Ttl = ""


def translate(raw: Raw | bytes, index: int, unseal: Unseal) -> TranslatedMessage:
    """What the message with this number means."""
    place = f"messages.{index}"
    message = decode_message(raw, place)
    if message.role not in ("user", "assistant", "system"):
        problem = "Input should be 'user', 'assistant' or 'system'"
        raise InvalidRequest(f"{place}.role: {problem}", param=f"{place}.role")
    return _Translation(message, len(raw), place, unseal).run()


class _Translation:
    """One message on its way to items."""

    def __init__(self, message: SentMessage, size: int, place: str, unseal: Unseal) -> None:
        self._unseal = unseal
        self._message = message
        self._size = size
        self._role = message.role
        self._place = place
        self._pieces: list[MessagePiece] = []
        # Text and pictures that become one item.
        self._parts: list[dict[str, str]] = []
        # Tools that results have named; they follow all results of the message.
        self._loaded: list[str] = []
        self._calls: list[str] = []
        self._results: list[str] = []
        # Calls of tools of the server, which become one item with their result.
        self._served: dict[str, tuple[str, ToolUse]] = {}
        self._unknown: tuple[int, str] | None = None
        self._ttl: Ttl = ""

    def run(self) -> TranslatedMessage:
        message = self._message
        effort = EFFORTS.get((message.output_config and message.output_config.effort) or "")
        if effort is not None:
            self._add({"type": "configuration_update", "reasoning": {"effort": effort}})
        if isinstance(message.content, str):
            self._write(message.content)
        else:
            for number, raw in enumerate(message.content):
                self._block(raw, number)
        self._end_parts()
        for kind, use in self._served.values():
            self._add(server_item(kind, use, None, self._unseal))
        self._end_loaded()
        return TranslatedMessage(
            self._role,
            tuple(self._pieces),
            tuple(self._calls),
            tuple(self._results),
            self._unknown,
            self._ttl,
        )

    # --- collecting ---

    def _add(self, item: object) -> None:
        self._end_parts()
        self._pieces.append(Raw(encode_read(item, self._size)))

    def _write(self, text: str) -> None:
        """Some text; what is empty is left out: clients make such blocks, and models need none."""
        if text.strip():
            kind = "output_text" if self._role == "assistant" else "input_text"
            self._parts.append({"type": kind, "text": text})

    def _end_parts(self) -> None:
        if not self._parts:
            return
        role = "developer" if self._role == "system" else self._role
        parts, self._parts = self._parts, []
        is_text = len(parts) == 1 and "text" in parts[0]
        content: object = parts[0]["text"] if is_text else parts
        item = {"type": "message", "role": role, "content": content}
        self._pieces.append(Raw(encode_read(item, self._size)))

    def _end_loaded(self) -> None:
        if self._loaded:
            self._pieces.append(Loaded(tuple(dict.fromkeys(self._loaded))))
            self._loaded = []

    def _note_mark(self, block: ContentBlock) -> None:
        if block.cache_control is not None:
            self._ttl = longer(self._ttl, block.cache_control)

    def _note_unknown(self, number: int, kind: str) -> None:
        self._unknown = self._unknown or (number, kind)
        self._write(f"[content of type {cut_name(kind)}]")

    # --- blocks ---

    def _block(self, raw: Raw, number: int) -> None:
        place = f"{self._place}.content.{number}"
        kind = kind_of(raw, place)
        decoder = BLOCKS.get(kind)
        if decoder is None:
            self._note_unknown(number, kind)
            return
        block = decode(decoder, raw, place)
        self._note_mark(block)
        match block:
            case ToolResultBlock() if kind == "tool_result":
                self._result(block, number, place)
            case ServerResult() | ToolResultBlock():
                self._server_result(block)
            case McpToolUse():
                self._served[block.id] = ("mcp", block)
            case ToolUse() if kind == "server_tool_use":
                self._served[block.id] = (block.name, block)
            case ToolUse():
                self._call(block, place)
            case Thinking() | RedactedThinking():
                self._thought(block)
            case ToolReference():
                self._loaded.append(block.tool_name)
            case ToolChange():
                self._change(block.tool, kind, place)
            case CompactionBlock():
                self._write(block.content or "")
            case _:
                self._end_loaded()
                self._parts += parts_of(block, place, self._role)

    def _call(self, use: ToolUse, place: str) -> None:
        self._calls.append(use.id)
        self._add(
            {
                "type": "function_call",
                "call_id": call_id_of(use.id),
                "name": use.name,
                "arguments": _arguments(use, place),
            }
        )

    def _thought(self, block: Thinking | RedactedThinking) -> None:
        """What we have sealed is opened by the turn; of what another server has sealed there is the text, if any."""
        item: dict[str, object] = {"type": "reasoning", "summary": []}
        if isinstance(block, RedactedThinking):
            item["encrypted_content"] = block.data
        else:
            if block.thinking:
                item["content"] = [{"type": "reasoning_text", "text": block.thinking}]
            if block.signature:
                item["encrypted_content"] = block.signature
        if len(item) > 2:
            self._add(item)

    def _result(self, result: ToolResultBlock, number: int, place: str) -> None:
        self._results.append(result.tool_use_id)
        parts: list[dict[str, str]] = []
        names: list[str] = []
        content = result.content or ""
        if isinstance(content, str):
            parts = [{"type": "input_text", "text": content}] if content else []
        else:
            for inner, raw in enumerate(content):
                at = f"{place}.content.{inner}"
                kind = kind_of(raw, at)
                if kind not in IN_RESULTS:
                    self._unknown = self._unknown or (number, kind)
                    parts.append(_text(f"[content of type {cut_name(kind)}]"))
                    continue
                block = decode(BLOCKS[kind], raw, at)
                if isinstance(block, ToolReference):
                    names.append(block.tool_name)
                else:
                    self._note_mark(block)
                    parts += parts_of(block, at, "user")
        if names:
            parts.append(_text(f"Tools that can be called now: {', '.join(names)}."))
            self._loaded += names
        output = _as_error(parts) if result.is_error else parts
        is_text = all("text" in part for part in output) and len(output) < 2
        self._add(
            {
                "type": "function_call_output",
                "call_id": call_id_of(result.tool_use_id),
                "output": "".join(part["text"] for part in output) if is_text else output,
            }
        )

    def _server_result(self, result: ServerResult | ToolResultBlock) -> None:
        kind, use = self._served.pop(result.tool_use_id, ("", None))
        if use is not None:
            self._add(server_item(kind, use, result, self._unseal))
            if kind.startswith(TOOL_SEARCH) and isinstance(result, ServerResult):
                self._pieces.append(FoundTools(letters_of(use.id), found_tools(result)))

    def _change(self, tool: ChangedTool, kind: str, place: str) -> None:
        self._end_parts()
        if kind == "tool_removal":
            self._pieces.append(Removed(tool.name or _name_in(tool, place)))
        elif isinstance(tool.definition, Raw):
            # A copy: what is kept of a message must not hold the body that it came with.
            self._pieces.append(Defined(tool.definition.copy()))
        else:
            self._loaded.append(tool.name)
            self._end_loaded()


def longer(known: Ttl, marker: CacheControl) -> Ttl:
    """The longer of two times for which something is to be cached."""
    return "1h" if "1h" in (known, marker.ttl) else "5m"


def message_id_of(turn_id: str) -> str:
    """The id of a turn as clients of this API know it: the same number."""
    return f"msg_{turn_id.removeprefix('resp_')}"


def turn_id_of(message_id: str) -> str:
    """The id of a turn, by the name that clients of this API have for it."""
    return f"resp_{message_id.removeprefix('msg_')}"


def call_id_of(tool_use_id: str) -> str:
    """The id of a call as the turn knows it."""
    found = _OUR_CALL.match(tool_use_id)
    return f"call_{found[1]}" if found else tool_use_id


def tool_use_id_of(call_id: str) -> str:
    """The id of a call as clients of this API know it."""
    return f"toolu_{call_id.removeprefix('call_')}"


def _text(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


def _arguments(use: ToolUse, place: str) -> str:
    if use.input is UNSET:
        return "{}"
    # Only whether it is an object is looked at: what is inside is the model's and the client's.
    text = bytes(use.input).decode()
    if not text.startswith("{"):
        where = f"{place}.input"
        raise InvalidRequest(f"{where}: Input should be an object", param=where)
    return text


def _as_error(parts: list[dict[str, str]]) -> list[dict[str, str]]:
    """A result that is an error says so; most say it by themselves."""
    first = parts[0].get("text", "") if parts else ""
    if "error" in first[:SAYS_ERROR_CHARS].lower():
        return parts
    if parts and "text" in parts[0]:
        return [{**parts[0], "text": f"Error: {first}"}, *parts[1:]]
    return [_text("Error:"), *parts]


# --- pictures and documents -------------------------------------------------------------------------


def parts_of(block: ContentBlock, place: str, role: str) -> list[dict[str, str]]:
    """Text, a picture, a document or a search result as parts of an item."""
    match block:
        case Text():
            kind = "output_text" if role == "assistant" else "input_text"
            return [{"type": kind, "text": block.text}] if block.text.strip() else []
        case Image():
            return [_image(block.source, f"{place}.source")]
        case Document():
            about = [f"Document: {block.title}"] if block.title else []
            about += [block.context] if block.context else []
            named = [_text("\n".join(about))] if about else []
            return [*named, *_document(block, f"{place}.source")]
        case SearchResult():
            found = "\n".join(text.text for text in block.content)
            return [_text(f"{block.title}\n{block.source}\n\n{found}")]
        case _:
            raise AssertionError(f"{type(block).__name__} has no parts")


def _image(source: BlockSource, place: str) -> dict[str, str]:
    match source.type:
        case "base64":
            url = f"data:{source.media_type or 'image/png'};base64,{source.data}"
            return {"type": "input_image", "image_url": url}
        case "url":
            return {"type": "input_image", "image_url": source.url}
        case "file":
            return {"type": "input_image", "file_id": source.file_id}
        case _:
            raise _unread(source, place)


def _document(block: Document, place: str) -> list[dict[str, str]]:
    source = block.source
    match source.type:
        case "base64":
            data = f"data:{source.media_type or 'application/pdf'};base64,{source.data}"
            return [{"type": "input_file", "filename": _filename(block), "file_data": data}]
        case "url":
            return [{"type": "input_file", "filename": _filename(block), "file_url": source.url}]
        case "file":
            return [{"type": "input_file", "file_id": source.file_id}]
        case "text":
            return [_text(source.data)]
        case "content":
            return _contents(source.content, f"{place}.content")
        case _:
            raise _unread(source, place)


def _contents(content: str | list[Raw], place: str) -> list[dict[str, str]]:
    """The parts of a document that consists of text and pictures."""
    if isinstance(content, str):
        return [_text(content)]
    parts: list[dict[str, str]] = []
    for number, raw in enumerate(content):
        at = f"{place}.{number}"
        kind = kind_of(raw, at)
        if kind not in ("text", "image"):
            raise InvalidRequest(f"{at}.type: Input should be 'text' or 'image'", param=at)
        parts += parts_of(decode(BLOCKS[kind], raw, at), at, "user")
    return parts


def _filename(block: Document) -> str:
    name = block.title or "document"
    return name if name.lower().endswith(".pdf") else f"{name}.pdf"


def _unread(source: BlockSource, place: str) -> InvalidRequest:
    problem = f"a source of type '{cut_name(source.type)}' is not supported"
    return InvalidRequest(f"{place}.type: {problem}", code="unsupported_value", param=place)


def _name_in(tool: ChangedTool, place: str) -> str:
    name = string_of(fields_of(tool.definition).get("name"))
    if not name:
        raise InvalidRequest(f"{place}.tool.name: Field required", param=f"{place}.tool.name")
    return name


# --- system -----------------------------------------------------------------------------------------


class System(Struct, frozen=True):
    """The instructions of a request."""

    instructions: str | None = None
    # Whether a billing header was left out.
    is_cut: bool = False
    ttl: Ttl = ""


_system: msgspec.json.Decoder[str | list[Text] | None] = msgspec.json.Decoder(
    str | list[Text] | None
)


def translate_system(raw: Raw) -> System:
    """The instructions: all blocks as one text, but for what is meant for a bill."""
    given = decode(_system, raw, "system")
    blocks = [Text(text=given)] if isinstance(given, str) else given or []
    texts = [block.text for block in blocks if block.text and not block.text.startswith(BILLING)]
    ttl: Ttl = ""
    for block in blocks:
        if block.cache_control is not None:
            ttl = longer(ttl, block.cache_control)
    is_cut = any(block.text.startswith(BILLING) for block in blocks)
    return System(_joined(texts) or None, is_cut, ttl)


def _joined(texts: Iterable[str]) -> str:
    """An empty line between two texts, where neither of them has a line break there."""
    whole = ""
    for text in texts:
        needs_seam = whole and not whole.endswith("\n") and not text.startswith("\n")
        whole += ("\n\n" if needs_seam else "") + text
    return whole
