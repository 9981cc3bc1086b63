"""What does one message of a client mean? The JSON of a message in, items of the Responses API out. Pure.

What a message means depends on its bytes alone, so that it can be kept (`TranslatedMessage`), and a history that comes
again need not be read again. What depends on the rest of the request is left open: a tool that is named here is defined
in `tools` (`Loaded`), and whether a call has its result is checked over all messages (`check_pairs`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.errors import NAME_CHARS_MAX, NAMES_MAX, InvalidRequest, cut_name
from segue.messages.words import without_results
from segue.wire import long_texts
from segue.wire.codec import encode_read
from segue.wire.requests import Effort

T = TypeVar("T")

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
SERVER_CALL = "srvtoolu_"
MCP_CALL = "mcptoolu_"
TOOL_SEARCH = "tool_search_tool"
# What the model has read of a page, in the action of a search: ours (web/tool.py).
TEXT_KEY = "segue:text"
# A result that says by itself that something went wrong says so at its beginning.
SAYS_ERROR_CHARS = 200

Ttl = Literal["", "5m", "1h"]


# --- what clients send ------------------------------------------------------------------------------


class CacheControl(Struct, frozen=True):
    ttl: str | None = None


class _Block(Struct, frozen=True, kw_only=True, gc=False):
    """One block of a message's content."""

    cache_control: CacheControl | None = None


class Text(_Block, frozen=True, kw_only=True):
    text: str


class _Source(Struct, frozen=True, kw_only=True):
    """Where a picture or a document is; which fields count depends on its type."""

    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""
    file_id: str = ""
    content: str | list[Raw] = ""


class Image(_Block, frozen=True, kw_only=True):
    source: _Source


class Document(_Block, frozen=True, kw_only=True):
    source: _Source
    title: str | None = None
    context: str | None = None


class SearchResult(_Block, frozen=True, kw_only=True):
    source: str
    title: str
    content: list[Text]


class Thinking(_Block, frozen=True, kw_only=True):
    thinking: str = ""
    signature: str | None = ""


class RedactedThinking(_Block, frozen=True, kw_only=True):
    data: str


class ToolUse(_Block, frozen=True, kw_only=True):
    id: str
    name: str
    input: Raw | UnsetType = UNSET


class McpToolUse(ToolUse, frozen=True, kw_only=True):
    server_name: str


class _ToolResult(_Block, frozen=True, kw_only=True):
    tool_use_id: str
    content: str | list[Raw] | None = None
    is_error: bool | None = None


class ServerResult(_Block, frozen=True, kw_only=True):
    """What a tool of the server has returned; of the results we read the addresses of pages and the names of tools."""

    tool_use_id: str
    content: Raw | UnsetType = UNSET


class ToolReference(_Block, frozen=True, kw_only=True):
    tool_name: str


class ChangedTool(Struct, frozen=True, kw_only=True):
    type: str
    name: str = ""
    definition: Raw | UnsetType = UNSET


class ToolChange(_Block, frozen=True, kw_only=True):
    tool: ChangedTool


class CompactionBlock(_Block, frozen=True, kw_only=True):
    content: str | None = None


class _Typed(Struct, frozen=True):
    type: str


class _OutputConfig(Struct, frozen=True):
    effort: str | None = None


class _Message(Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[Raw]
    output_config: _OutputConfig | None = None


class _Page(Struct, frozen=True):
    url: str = ""
    title: str = ""
    encrypted_content: str = ""


class _Found(Struct, frozen=True):
    tool_references: list[ToolReference] = []


class _Fetched(Struct, frozen=True):
    content: Document


BLOCKS: dict[str, type[_Block]] = {
    "text": Text,
    "image": Image,
    "document": Document,
    "search_result": SearchResult,
    "thinking": Thinking,
    "redacted_thinking": RedactedThinking,
    "tool_use": ToolUse,
    "tool_result": _ToolResult,
    "server_tool_use": ToolUse,
    "web_search_tool_result": ServerResult,
    "web_fetch_tool_result": ServerResult,
    "tool_search_tool_result": ServerResult,
    "mcp_tool_use": McpToolUse,
    "mcp_tool_result": _ToolResult,
    "tool_reference": ToolReference,
    "tool_addition": ToolChange,
    "tool_removal": ToolChange,
    "compaction": CompactionBlock,
}
_blocks = {name: msgspec.json.Decoder(struct) for name, struct in BLOCKS.items()}
_typed = msgspec.json.Decoder(_Typed)
_reference = msgspec.json.Decoder(ToolReference)
_message = msgspec.json.Decoder(_Message)
_pages = msgspec.json.Decoder(list[_Page])
_found = msgspec.json.Decoder(_Found)
_fetched = msgspec.json.Decoder(_Fetched)
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


# --- what becomes of them ---------------------------------------------------------------------------


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
# Opens what we have sealed for the client; None where it is not ours.
Unseal = Callable[[str], str | None]


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
    message = decode(_message, raw, place)
    if message.role not in ("user", "assistant", "system"):
        problem = "Input should be 'user', 'assistant' or 'system'"
        raise InvalidRequest(f"{place}.role: {problem}", param=f"{place}.role")
    return _Translation(message, len(raw), place, unseal).run()


class _Translation:
    """One message on its way to items."""

    def __init__(self, message: _Message, size: int, place: str, unseal: Unseal) -> None:
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
            self._add(_server_item(kind, use, None, self._unseal))
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

    def _note_mark(self, block: _Block) -> None:
        if block.cache_control is not None:
            self._ttl = longer(self._ttl, block.cache_control)

    def _note_unknown(self, number: int, kind: str) -> None:
        self._unknown = self._unknown or (number, kind)
        self._write(f"[content of type {cut_name(kind)}]")

    # --- blocks ---

    def _block(self, raw: Raw, number: int) -> None:
        place = f"{self._place}.content.{number}"
        kind = decode(_typed, raw, place).type
        decoder = _blocks.get(kind)
        if decoder is None:
            self._note_unknown(number, kind)
            return
        block = decode(decoder, raw, place)
        self._note_mark(block)
        match block:
            case _ToolResult() if kind == "tool_result":
                self._result(block, number, place)
            case ServerResult() | _ToolResult():
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

    def _result(self, result: _ToolResult, number: int, place: str) -> None:
        self._results.append(result.tool_use_id)
        parts: list[dict[str, str]] = []
        names: list[str] = []
        content = result.content or ""
        if isinstance(content, str):
            parts = [{"type": "input_text", "text": content}] if content else []
        else:
            for inner, raw in enumerate(content):
                at = f"{place}.content.{inner}"
                kind = decode(_typed, raw, at).type
                if kind == "tool_reference":
                    names.append(decode(_reference, raw, at).tool_name)
                elif kind in ("text", "image", "document", "search_result"):
                    block = decode(_blocks[kind], raw, at)
                    self._note_mark(block)
                    parts += parts_of(block, at, "user")
                else:
                    self._unknown = self._unknown or (number, kind)
                    parts.append(_text(f"[content of type {cut_name(kind)}]"))
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

    def _server_result(self, result: ServerResult | _ToolResult) -> None:
        kind, use = self._served.pop(result.tool_use_id, ("", None))
        if use is not None:
            self._add(_server_item(kind, use, result, self._unseal))
            if kind.startswith(TOOL_SEARCH) and isinstance(result, ServerResult):
                self._pieces.append(FoundTools(_letters(use.id), _found_tools(result)))

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


def parts_of(block: _Block, place: str, role: str) -> list[dict[str, str]]:
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


def _image(source: _Source, place: str) -> dict[str, str]:
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
        kind = decode(_typed, raw, at).type
        if kind not in ("text", "image"):
            raise InvalidRequest(f"{at}.type: Input should be 'text' or 'image'", param=at)
        parts += parts_of(decode(_blocks[kind], raw, at), at, "user")
    return parts


def _filename(block: Document) -> str:
    name = block.title or "document"
    return name if name.lower().endswith(".pdf") else f"{name}.pdf"


def _unread(source: _Source, place: str) -> InvalidRequest:
    problem = f"a source of type '{cut_name(source.type)}' is not supported"
    return InvalidRequest(f"{place}.type: {problem}", code="unsupported_value", param=place)


# --- tools of the server ----------------------------------------------------------------------------


def _server_item(
    kind: str, use: ToolUse, result: ServerResult | _ToolResult | None, unseal: Unseal
) -> dict[str, object]:
    """A call of a tool of the server with its result, as one item where there is a type for it."""
    given = _fields(use.input)
    if isinstance(use, McpToolUse):
        return _mcp_item(use, result)
    if kind == "web_search":
        pages = _pages_in(result)
        action: dict[str, object] = {"type": "search", "query": _string(given.get("query"))}
        action["sources"] = [{"type": "url", "url": page.url} for page in pages if page.url]
        sealed = next((page.encrypted_content for page in pages if page.encrypted_content), "")
        if sealed and (opened := unseal(sealed)) is not None:
            action[TEXT_KEY] = opened
        return _hosted(use.id, "web_search_call", action=action)
    if kind == "web_fetch":
        action = {"type": "open_page", "url": _string(given.get("url"))}
        if "pattern" in given:
            action |= {"type": "find_in_page", "pattern": _string(given["pattern"])}
        if read := _page_text(result):
            action[TEXT_KEY] = read
        return _hosted(use.id, "web_search_call", action=action)
    if kind.startswith(TOOL_SEARCH):
        call = {"type": "tool_search_call", "id": f"tsc_{_letters(use.id)}", "execution": "server"}
        return {**call, "status": "completed", "arguments": use.input or Raw(b"{}")}
    text = f"[{cut_name(kind)} was called with {_shown(use.input)}]"
    return {"type": "message", "role": "assistant", "content": text}


def _hosted(tool_use_id: str, kind: str, **fields: object) -> dict[str, object]:
    item_id = tool_use_id.removeprefix(SERVER_CALL).removeprefix(MCP_CALL)
    return {"type": kind, "id": item_id, "status": "completed", **fields}


def _mcp_item(use: McpToolUse, result: ServerResult | _ToolResult | None) -> dict[str, object]:
    fields: dict[str, object] = {
        "server_label": use.server_name,
        "name": use.name,
        "arguments": _shown(use.input),
    }
    if isinstance(result, _ToolResult):
        output = _texts(result.content)
        fields |= {"error": output} if result.is_error else {"output": output}
    return _hosted(use.id, "mcp_call", **fields)


def _texts(content: str | list[Raw] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = (_string(_fields(raw).get("text")) for raw in content)
    return "\n".join(text for text in texts if text)


def _fields(raw: Raw | UnsetType) -> dict[str, Raw]:
    try:
        return {} if raw is UNSET else _object.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return {}


def _string(raw: Raw | None) -> str:
    try:
        return "" if raw is None else msgspec.json.decode(raw, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _shown(raw: Raw | UnsetType) -> str:
    return "{}" if raw is UNSET else bytes(raw).decode()


def _pages_in(result: ServerResult | _ToolResult | None) -> list[_Page]:
    if not isinstance(result, ServerResult) or result.content is UNSET:
        return []
    try:
        return _pages.decode(result.content)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        # An error in place of results.
        return []


def _page_text(result: ServerResult | _ToolResult | None) -> str:
    """The text of a page that was fetched."""
    if not isinstance(result, ServerResult) or result.content is UNSET:
        return ""
    try:
        return _fetched.decode(result.content).content.source.data
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return ""


def _letters(tool_use_id: str) -> str:
    """By these the call and the output of a search for tools belong together."""
    return tool_use_id.rpartition("_")[2]


def _found_tools(result: ServerResult) -> tuple[str, ...]:
    try:
        found = _found.decode(result.content) if result.content is not UNSET else _Found()
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return ()
    return tuple(reference.tool_name for reference in found.tool_references)


def _name_in(tool: ChangedTool, place: str) -> str:
    name = _string(_fields(tool.definition).get("name"))
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


# --- all messages -----------------------------------------------------------------------------------


def check_pairs(messages: Sequence[TranslatedMessage], *, is_continued: bool = False) -> None:
    """Every call has its result in the next message, and every result its call; clients repair their history by these
    words. `is_continued`: the first results may answer calls that came before."""
    seen: set[str] = set()
    open_calls: dict[str, None] = {}
    answered: set[str] = set()
    called_at = 0
    was_model = False
    for index, message in enumerate(messages):
        is_model = message.role == "assistant"
        if is_model and not was_model:
            _check_answered(open_calls, called_at)
            answered.clear()
            is_continued = False
        was_model = is_model
        for call in message.calls:
            if call in seen:
                raise _unpaired(f"messages.{index}: `tool_use` ids must be unique", call)
            seen.add(call)
            open_calls[call] = None
            called_at = index
        for result in message.results:
            if result in answered:
                place = f"messages.{index}: each tool_use must have a single result. Found multiple"
                raise _unpaired(f"{place} `tool_result` blocks with id", result)
            if result not in open_calls and not is_continued:
                raise _unpaired(
                    f"messages.{index}: unexpected `tool_use_id` found in `tool_result` blocks",
                    f"{cut_name(result)}. Each `tool_result` block must have a corresponding "
                    "`tool_use` block in the previous message.",
                )
            open_calls.pop(result, None)
            answered.add(result)
    _check_answered(open_calls, called_at)


def _check_answered(open_calls: dict[str, None], called_at: int) -> None:
    if open_calls:
        names = [name[:NAME_CHARS_MAX] for name in [*open_calls][:NAMES_MAX]]
        message = without_results(f"messages.{called_at}", names)
        raise InvalidRequest(
            message, code="missing_function_call_output", param=f"messages.{called_at}"
        )


def _unpaired(what: str, about: str) -> InvalidRequest:
    return InvalidRequest(
        f"{what}: {about[:512]}", code="invalid_function_call_output", param="messages"
    )
