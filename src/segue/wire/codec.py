"""JSON, and nothing else: bytes to requests, items and tools; events and responses to bytes.

In: bytes from a client, already whole and valid UTF-8. Out: values, or an `InvalidRequest` that names the path
at fault in `param`. Requests are decoded and events encoded only here; a field that is kept raw is decoded by the file
that reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.errors import NAME_CHARS_MAX, ApiError, InvalidRequest, cut_name
from segue.rests import Rests, rested
from segue.wire import items, long_texts, requests, tools
from segue.wire.events import (
    Completed,
    ErrorBody,
    ErrorDetail,
    ErrorEvent,
    Event,
    Failed,
    Incomplete,
    Numbered,
)
from segue.wire.items import InputText, Item, ItemValue, Message
from segue.wire.requests import Create
from segue.wire.response import ENDED, ItemList, Response
from segue.wire.slow_numbers import SLOW_IN_TEXT_MAX, SLOW_NUMBERS_MAX, slow_numbers
from segue.wire.tools import Definition, McpTool, ToolDefinition, Tools

T = TypeVar("T")
_Fields: TypeAlias = dict[str, Raw]
AskedFrame: TypeAlias = Create | requests.SteerFrame | requests.AppendFrame | str

# What a part has in a list even if the client left it out.
PART_DEFAULTS: dict[str, _Fields] = {
    "output_text": {"annotations": Raw(b"[]"), "logprobs": Raw(b"[]")},
    "input_image": {"detail": Raw(b'"auto"')},
}

# The most of every history, and nothing in them is kept raw.
_OUTPUTS = items.FunctionCallOutput | items.CustomToolCallOutput
WITHOUT_RAW = items.FunctionCall | items.CustomToolCall | _OUTPUTS | items.Reasoning

# Far above any real request, far below what would hold the loop or fill memory (docs/inside/hazards.md T7).
TOOLS_MAX = 4_096
# How many values a request may have; fields; elements of its input, and of another field; values in one element, which
# is an item or a tool. To decode more would hold the loop for too long, or fill memory.
VALUES_MAX = 500_000
FIELDS_MAX = 1_000
ITEMS_MAX = 100_000
ELEMENTS_MAX = 65_536
# The fields whose elements become items.
ITEM_LISTS = (b'"input"', b'"items"', b'"messages"')
ELEMENT_VALUES_MAX = 65_536
# A larger body is decoded in a thread. With so few values it need not be looked at first.
LARGE_BYTES = 256 * 1024
FEW_VALUES = 150_000
VALUES_A_SLICE = 1_024
COMMA, QUOTE = b',"'
# The most that is searched at once.
WINDOW_BYTES = 128 * 1024
# How deep an item or a tool may be. Schemas that people write have a dozen levels; walking down recursively, as
# renderers and encoders do, ends at some hundreds.
DEPTH_MAX = 256
# Items of a conversation are found by an index, whose rows have room for 2,700 bytes in PostgreSQL.
ITEM_ID_CHARS_MAX = 512

STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}\Z")
_PATH = re.compile(r" - at (?:`key` in )?`\$(?P<path>[^`]*)`\Z")
# The library repeats a wrong value whole; so much of it is enough.
_LONG_VALUE = re.compile(rf"'([^']{{{NAME_CHARS_MAX}}})[^']+'")
# How far a frame that is too deep to decode is skimmed for its lane: some milliseconds of work.
SKIM_BYTES_MAX = 64 * 1024
SKIM_TOKENS_MAX = 8_192
# Short strings and all that is between them, but no structure; and many escapes of a string at once.
_BETWEEN = re.compile(rb'(?:"[^"\\]{0,256}+"|[^"{}\[\],]{1,4096}+){0,256}+')
# A string that is still open at the end matches too: otherwise each quote in it would be tried as a beginning.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[{\[]+|[}\]]+|[:,]', re.DOTALL)


class Peek(Struct, frozen=True):
    """Just enough of an object to know which type it is."""

    type: str | None = None
    role: Raw | UnsetType = UNSET
    id: Raw | UnsetType = UNSET


class Envelope(Struct, frozen=True):
    """Just enough of a frame to answer it when the rest cannot be read."""

    type: Raw | UnsetType = UNSET
    stream_id: Raw | UnsetType = UNSET


_encoder = msgspec.json.Encoder()
_create = msgspec.json.Decoder(Create)
OTHER_FRAMES: dict[str, msgspec.json.Decoder[requests.SteerFrame | requests.AppendFrame]] = {
    "response.steer": msgspec.json.Decoder(requests.SteerFrame),
    "response.append": msgspec.json.Decoder(requests.AppendFrame),
}
_conversation = msgspec.json.Decoder(requests.NewConversation)
_added = msgspec.json.Decoder(requests.AddedItems)
_peek = msgspec.json.Decoder(Peek)
_envelope = msgspec.json.Decoder(Envelope)
_string = msgspec.json.Decoder(str)
_raws = msgspec.json.Decoder(list[Raw])
_message = msgspec.json.Decoder(Message)
_reference = msgspec.json.Decoder(items.ItemReference)
_item: msgspec.json.Decoder[ItemValue] = msgspec.json.Decoder(ItemValue)
_tool: msgspec.json.Decoder[ToolDefinition] = msgspec.json.Decoder(ToolDefinition)
_object = msgspec.json.Decoder(_Fields)
_objects = msgspec.json.Decoder(list[_Fields])
_schema = msgspec.json.Decoder(dict[str, object] | None)
_any_object = msgspec.json.Decoder(dict[str, object])
_remote = msgspec.json.Decoder(items.RemoteTool)

encode = _encoder.encode

# Below this, what the encoder leaves free does not matter.
SLACK_FROM_BYTES = 16 * 1024


def without_slack(encoded: bytes) -> bytes:
    """The encoder leaves up to half as much again free after what it has written: not for what is kept."""
    return encoded if len(encoded) < SLACK_FROM_BYTES else bytes(memoryview(encoded))


def encode_kept(value: object) -> bytes:
    """Encode what stays in memory."""
    return without_slack(encode(value))


def encode_read(value: object, size: int) -> bytes:
    """Encode what was read of so many bytes of a client."""
    return encode_kept(value) if size <= LARGE_BYTES else long_texts.encode(value)


# What clients may send: not what we write down for ourselves.
ITEM_TYPES = frozenset(
    str(kind.__struct_config__.tag) for kind in ItemValue.__args__ if kind is not items.HostedOutput
)
TOOL_STRUCTS = {str(kind.__struct_config__.tag): kind for kind in ToolDefinition.__args__}
TOOL_TYPES = frozenset(TOOL_STRUCTS)


def _decode(decoder: msgspec.json.Decoder[T], data: Raw | bytes | bytearray, path: str = "") -> T:
    """Decode, or refuse with the reason and the path."""
    try:
        return long_texts.decode(decoder.decode, data)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error), path)
        raise InvalidRequest(message, code="invalid_value", param=param) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        is_json = isinstance(error, msgspec.DecodeError)
        why = error if is_json else "it is nested too deeply or not valid UTF-8"
        message = f"We could not parse the JSON of your request: {why}."
        raise InvalidRequest(message, code="invalid_json", param=path or None) from None


def decode_create(body: bytes | bytearray) -> Create:
    """A request for one turn, its items and tools still raw. Slow work if the body is large."""
    return decode_body(_create, body)


def decode_body(
    decoder: msgspec.json.Decoder[T], body: Raw | bytes | bytearray, path: str = ""
) -> T:
    """A body, or the part at this path of a body that was decoded, as what an API expects there."""
    if len(body) > LARGE_BYTES and not path:
        check_shape(body)
    return _decode(decoder, body, path)


def check_shape(body: bytes | bytearray) -> None:
    """Refuse a large body with more values than may be decoded, before it is decoded. Slow work, for a thread."""
    count, rests = 0, Rests()
    for at in rested(range(0, len(body), WINDOW_BYTES)):
        count += sum(body.count(mark, at, at + WINDOW_BYTES) for mark in (b",", b"[", b"{"))
    if count <= FEW_VALUES:
        return
    depth = values = fields = elements = inner = 0
    elements_max = ELEMENTS_MAX
    for mark, at in marks_of(body):
        if mark == COMMA:
            if depth > 2:
                inner += 1
            elif depth == 2:
                elements += 1
                inner = 0
            else:
                fields += 1
        elif mark in b"]}":
            depth -= 1
            continue
        else:
            depth += 1
            inner += 1
            if depth == 2:
                elements = inner = 0
                key = body[max(at - 64, 0) : at].rstrip(b" \t\r\n:")
                elements_max = ITEMS_MAX if key.endswith(ITEM_LISTS) else ELEMENTS_MAX
        values += 1
        if not values % VALUES_A_SLICE:
            rests.take()
        if inner > ELEMENT_VALUES_MAX:
            raise _too_many("values in one item or tool", ELEMENT_VALUES_MAX)
        if elements >= elements_max:
            raise _too_many("items in one list", elements_max)
        if values > VALUES_MAX:
            raise _too_many("values", VALUES_MAX)
        if fields > FIELDS_MAX:
            raise _too_many("fields", FIELDS_MAX)


def _too_many(what: str, count_max: int) -> InvalidRequest:
    message = f"The request has too many {what}: at most {count_max}."
    return InvalidRequest(message, code="invalid_value")


def marks_of(body: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """The brackets and commas of some JSON with their positions, but for those in strings."""
    at, size = 0, len(body)
    while (found := _BETWEEN.match(body, at)) and (at := found.end()) < size:
        mark = body[at]
        at += 1
        if mark == QUOTE:
            at = long_texts.string_end(body, at)
        elif mark in b",[]{}":
            yield mark, at - 1


def decode_frame(frame: bytes) -> AskedFrame:
    """What a frame asks for, or the type of a frame that asks for nothing. Slow work if the frame is large."""
    if len(frame) > LARGE_BYTES:
        check_shape(frame)
    try:
        create = _decode(_create, frame)
        if create.type == "response.create":
            return create
        kind = create.type or "nothing"
    except InvalidRequest:
        # The fields of a create are not those of other frames.
        kind = decode_envelope(frame)[0] or ""
        if kind not in OTHER_FRAMES:
            raise
    other = OTHER_FRAMES.get(kind)
    return kind if other is None else _decode(other, frame)


def decode_conversation(body: bytes | bytearray) -> requests.NewConversation:
    """What a conversation begins with, or is changed to."""
    return decode_body(_conversation, body or b"{}")


def decode_added(body: bytes | bytearray) -> requests.AddedItems:
    """Items for a conversation, still raw."""
    return decode_body(_added, body)


def with_input_before(create: Create, before: Sequence[Item]) -> Create:
    """The same request with these items before its own input."""
    own = create.input or []
    raws = [Raw(user_message(own).raw)] if isinstance(own, str) else own
    return msgspec.structs.replace(create, input=[*(Raw(item.raw) for item in before), *raws])


def decode_envelope(frame: bytes) -> tuple[str | None, str | None]:
    """The type and the lane of a frame that cannot be read as a whole; None where they are no use."""
    try:
        envelope = _envelope.decode(frame) if len(frame) <= LARGE_BYTES else _skim(frame)
    except RecursionError:
        envelope = _skim(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None, None
    kind = _string_or_none(envelope.type)
    lane = _string_or_none(envelope.stream_id)
    return kind, lane if lane is not None and STREAM_ID.match(lane) else None


def _skim(frame: bytes) -> Envelope:
    """The two fields of a frame that is nested too deeply to decode, if they are near its beginning."""
    fields: dict[bytes, Raw] = {}
    depth = 0
    key = last = b""
    for found in islice(_TOKEN.finditer(frame, 0, SKIM_BYTES_MAX), SKIM_TOKENS_MAX):
        token = found[0]
        if depth == 1:
            if token == b":":
                key = last
            elif token == b",":
                key = b""
            elif key and token.startswith(b'"'):
                fields[key] = Raw(token)
        if token[0] in b"[{":
            depth += len(token)
        elif token[0] in b"]}":
            depth -= len(token)
        last = token
    return Envelope(fields.get(b'"type"', UNSET), fields.get(b'"stream_id"', UNSET))


class TracedMetadata(Struct):
    """The one thing that is read of a client's metadata."""

    ws_request_header_traceparent: str = ""


_metadata_decoder = msgspec.json.Decoder(TracedMetadata)


def decode_traceparent(create: Create) -> str:
    """The trace that a client names in its metadata, because a frame has no headers; nothing if it names none."""
    if create.client_metadata is UNSET:
        return ""
    try:
        return _metadata_decoder.decode(create.client_metadata).ws_request_header_traceparent
    except msgspec.MsgspecError:
        return ""


def decode_lane(stream_id: Raw) -> str:
    """The lane that a create names."""
    lane = _string_or_none(stream_id)
    if lane is None or not STREAM_ID.match(lane):
        raise InvalidRequest(
            "The 'stream_id' field must be a non-empty string with at most 256 characters and may "
            "only contain letters, numbers, underscores, hyphens, and periods.",
            code="invalid_stream_id",
            param="stream_id",
        )
    return lane


def decode_item(raw: Raw | bytes, path: str) -> Item:
    """One item. Without a type it is a message if it has a role, a reference if it has an id."""
    data = bytes(raw)  # A copy of its own: a slice would keep the whole request in memory.
    peek = _decode(_peek, data, path)
    value: ItemValue
    if peek.type is None:
        if peek.role is not UNSET:
            value = _decode(_message, _without_null_type(data), path)
            _check_parts(data, value, path)
        elif peek.id is not UNSET:
            value = _decode(_reference, _without_null_type(data), path)
        else:
            raise InvalidRequest(f"Missing required field: '{path}.type'.", param=f"{path}.type")
    elif peek.type in ITEM_TYPES:
        value = _decode(_item, data, path)
        if not isinstance(value, WITHOUT_RAW):
            data = _checked(data, value, path)
    else:
        raise _unknown("an item", peek.type, path)
    return Item(data, value)


def _unknown(what: str, kind: str, path: str) -> InvalidRequest:
    message = f"Invalid value: '{kind[:64]}'. It is not {what} type that this server knows."
    return InvalidRequest(message, code="invalid_value", param=f"{path}.type")


def _checked(data: bytes, value: ItemValue, path: str) -> bytes:
    """The bytes of an item, after the fields that are kept raw were checked."""
    match value:
        case Message():
            _check_parts(data, value, path)
        case items.AdditionalTools() | items.ToolSearchOutput():
            _check_readable(data, path)
            return _checked_tools(data, value, path)
        case items.ConfigurationUpdate(
            text=items.TextUpdate(format=requests.TextFormat(schema=Raw() as schema))
        ):
            check_schema(schema, f"{path}.text.format.schema")
        case items.McpListTools(tools=tools):
            check_numbers(data, path)
            for index, raw in enumerate(tools):
                remote = _decode(_remote, raw, f"{path}.tools[{index}]")
                check_schema(remote.input_schema, f"{path}.tools[{index}].input_schema")
        case _:
            _check_readable(data, path)
    return data


def _check_parts(data: bytes, message: Message, path: str) -> None:
    """Annotations and logprobs of a text are kept raw; they must be objects that can be parsed."""
    is_checked = isinstance(message.content, str)
    for number, part in enumerate(() if is_checked else message.content):
        if not isinstance(part, items.OutputText) or not (part.annotations or part.logprobs):
            continue
        if not is_checked and slow_numbers(data) > SLOW_IN_TEXT_MAX:
            raise _too_slow(SLOW_IN_TEXT_MAX, path)
        is_checked = True
        for name, raws in (("annotations", part.annotations), ("logprobs", part.logprobs)):
            for index, raw in enumerate(raws or ()):
                _decode(_any_object, raw, f"{path}.content[{number}].{name}[{index}]")


def _check_readable(data: Raw | bytes, path: str) -> None:
    """Fields that are kept raw are parsed later, for models and guards."""
    check_numbers(bytes(data), path)
    _check_values(data, path)


def _check_values(data: Raw | bytes, path: str) -> None:
    """Every number must be in range, and nothing nested deeper than a recursive renderer can go."""
    value = _decode(_any_object, data, path)
    # Without so many brackets it cannot be so deep; real ones stop here.
    brackets = bytes(data)
    if brackets.count(b"[") + brackets.count(b"{") > DEPTH_MAX and is_deep(value):
        message = f"Invalid value for '{path}': it is nested deeper than {DEPTH_MAX} levels."
        raise InvalidRequest(message, code="invalid_value", param=path)


def check_numbers(data: bytes, path: str, before: int = 0) -> int:
    """How many numbers of a request take long to read; refused where they are too many. `before`: known of the rest."""
    count = before + slow_numbers(data)
    if count > SLOW_NUMBERS_MAX:
        raise _too_slow(SLOW_NUMBERS_MAX, path)
    return count


def _too_slow(count_max: int, path: str) -> InvalidRequest:
    message = (
        f"Too many numbers with hundreds of digits or an exponent of three: at most {count_max}."
    )
    return InvalidRequest(message, code="invalid_value", param=path)


def is_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


def _checked_tools(
    data: bytes, value: items.AdditionalTools | items.ToolSearchOutput, path: str
) -> bytes:
    """The bytes of an item that brings tools, without secrets: items are kept and listed, secrets never."""
    _check_count(value.tools, f"{path}.tools")
    for index, tool in enumerate(value.tools):
        _check_parameters(tool, f"{path}.tools[{index}]")
        # What a search has found may be tools of MCP servers, whose names are their own.
        if isinstance(value, items.AdditionalTools):
            _check_name(tool, f"{path}.tools[{index}]")
    if isinstance(value, items.AdditionalTools):
        tools.check_names(tools.offers_of(value.tools), f"{path}.tools")
    if not any(isinstance(tool, McpTool) for tool in value.tools):
        return data
    fields = _object.decode(data)
    raws = _raws.decode(fields["tools"])
    shown = [
        Raw(encode(tool)) if isinstance(tool, McpTool) else raw
        for raw, tool in zip(raws, value.tools, strict=True)
    ]
    return encode({**fields, "tools": shown})


def user_message(text: str) -> Item:
    """The message that a plain string as input stands for."""
    value = Message(role="user", content=[InputText(text=text)])
    return Item(encode_read(value, len(text)), value)


def as_item(value: ItemValue) -> Item:
    """An item of our own making."""
    return Item(encode_kept(value), value)


def decode_tools(
    raw: Raw | bytes, known: Tools | None, *, is_stored: bool = False, is_same: bool = False
) -> tuple[Tools, bool]:
    """The tools of a request, and whether they had to be decoded: not if the bytes equal the known ones.

    `is_stored`: they were accepted before, perhaps by a version that allowed other names. `is_same`: they mean the same
    as the known ones, spelt otherwise.
    """
    data = bytes(raw)
    if known is not None and (known.raw == data or known.raw == _digest(data)):
        return known, False
    if data == b"null" or data == b"[]":
        return tools.NO_TOOLS, False
    if known is not None and is_same:
        return msgspec.structs.replace(known, raw=_kept_bytes(data, known.definitions)), False
    check_numbers(data, "tools")
    raws = _decode(_raws, data, "tools")
    _check_count(raws, "tools")
    definitions = tuple(_decode_tool(raw, f"tools[{n}]") for n, raw in enumerate(rested(raws)))
    echo = b"[" + b",".join(map(_echo_tool, rested(raws), definitions)) + b"]"
    offers, deferred = tools.split_offers(definitions)
    if not is_stored:
        for index, tool in enumerate(definitions):
            _check_name(tool, f"tools[{index}]")
        tools.check_names((*offers, *deferred))
    return Tools(_kept_bytes(data, definitions), definitions, echo, offers, deferred), True


def _kept_bytes(data: bytes, definitions: Sequence[ToolDefinition]) -> bytes:
    """Keys of remote servers are not kept, not even to compare the next list of tools with this one."""
    return _digest(data) if any(isinstance(tool, McpTool) for tool in definitions) else data


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()


def _check_count(given: Sequence[object], path: str) -> None:
    if len(given) > TOOLS_MAX:
        raise InvalidRequest(f"Too many tools: {len(given)}, at most {TOOLS_MAX}.", param=path)


def raw_tools(create: Create, types: tuple[type[Definition], ...]) -> list[Raw]:
    """The tools of these types in an accepted request as they came, secrets included: first the tools that its items
    bring, then the listed ones."""
    tags = {tag for tag, struct in TOOL_STRUCTS.items() if issubclass(struct, types)}
    raws = create.input if isinstance(create.input, list) else []
    bringing = [raw for raw in raws if _peek.decode(raw).type == "additional_tools"]
    lists = [_object.decode(raw)["tools"] for raw in bringing]
    if isinstance(create.tools, Raw) and bytes(create.tools) != b"null":
        lists.append(create.tools)
    raw_definitions = (definition for raw in lists for definition in _raws.decode(raw))
    return [definition for definition in raw_definitions if _peek.decode(definition).type in tags]


def check_item_ids(items: Sequence[Item], path: str = "input") -> None:
    """A conversation keeps its items by their ids."""
    for index, item in enumerate(items):
        name = item.value.id or ""
        if len(name) > ITEM_ID_CHARS_MAX or "\0" in name:
            raise InvalidRequest(
                f"The id of an item in a conversation has at most {ITEM_ID_CHARS_MAX} characters, and no NUL.",
                code="invalid_value",
                param=f"{path}[{index}].id",
            )


def check_schema(raw: Raw, path: str) -> None:
    """A JSON Schema is kept raw, but it must be an object or null, and readable to its end."""
    check_numbers(bytes(raw), path)
    if _decode(_schema, raw, path) is not None:
        _check_values(raw, path)


def _decode_tool(raw: Raw, path: str) -> ToolDefinition:
    peek = _decode(_peek, raw, path)
    if peek.type in TOOL_TYPES:
        tool = _decode(_tool, raw, path)
        _check_parameters(tool, path)
        _check_values(raw, path)
        return tool
    if peek.type is None:
        raise InvalidRequest(f"Missing required field: '{path}.type'.", param=f"{path}.type")
    raise _unknown("a tool", peek.type, path)


def _check_name(tool: ToolDefinition, path: str) -> None:
    """Names that a client gives are plain; with dots one could read like a tool in a namespace."""
    if isinstance(tool, McpTool) and not tools.SERVER_LABEL.fullmatch(tool.server_label):
        message = f"It must be 1 to {tools.TOOL_NAME_CHARS_MAX} letters, digits, '_', '-' and '.'."
        raise InvalidRequest(
            f"Invalid '{path}.server_label': '{cut_name(tool.server_label)}'. {message}",
            code="invalid_value",
            param=f"{path}.server_label",
        )
    if not isinstance(tool, tools.NAMED):
        return
    if not tools.FUNCTION_NAME.fullmatch(tool.name):
        message = f"It must have 1 to {tools.TOOL_NAME_CHARS_MAX} letters, digits, '_' and '-'."
        raise InvalidRequest(
            f"Invalid '{path}.name': '{cut_name(tool.name)}'. {message}",
            code="invalid_value",
            param=f"{path}.name",
        )
    for index, inner in enumerate(tool.tools if isinstance(tool, tools.NamespaceTool) else ()):
        _check_name(inner, f"{path}.tools[{index}]")


def _check_parameters(tool: ToolDefinition, path: str) -> None:
    if isinstance(tool, tools.FunctionTool) and isinstance(tool.output_schema, Raw):
        _decode(_schema, tool.output_schema, f"{path}.output_schema")
    match tool:
        case (
            tools.FunctionTool(parameters=Raw() as parameters)
            | tools.ToolSearchTool(parameters=Raw() as parameters)
        ):
            _decode(_schema, parameters, f"{path}.parameters")
        case tools.NamespaceTool():
            for index, inner in enumerate(tool.tools):
                _check_parameters(inner, f"{path}.tools[{index}]")
        case _:
            pass


def _echo_tool(raw: Raw, tool: ToolDefinition) -> bytes:
    """A tool as the response repeats it: functions complete with their nullable keys, no secrets."""
    match tool:
        case tools.FunctionTool():
            missing = [
                b',"%s":null' % name.encode()
                for name in ("description", "parameters", "strict")
                if getattr(tool, name) is UNSET
            ]
            return bytes(raw).rstrip()[:-1] + b"".join(missing) + b"}"
        case McpTool():
            return encode(tool)
        case _:
            return bytes(raw)


def encode_event(event: Numbered) -> Event:
    """An event, ready to leave."""
    return Event(str(event.__struct_config__.tag), event.sequence_number, encode_kept(event))


def snapshot_event(kind: type[Numbered], number: int, snapshot: bytes) -> Event:
    """An event with this encoded response. With tools and instructions that is long, so it is copied once."""
    tag = str(kind.__struct_config__.tag)
    head = b'{"type":"%b","sequence_number":%d,"response":' % (tag.encode(), number)
    return Event(tag, number, b"".join((head, snapshot, b"}")))


class DeltaTemplate:
    """All delta events of one part differ in two values: the rest is encoded once.

    `kind` is the event type; `fields` are the keys that stay, as an encoded object.
    """

    __slots__ = ("_head", "kind")

    def __init__(self, kind: str, fields: dict[str, str | int | list[Raw]]) -> None:
        self.kind = kind
        self._head = encode({"type": kind, **fields})[:-1] + b',"delta":'

    def event(self, number: int, delta: str) -> Event:
        """The event with this number and text."""
        data = b'%b%b,"sequence_number":%d}' % (self._head, encode(delta), number)
        return Event(self.kind, number, data)


def lane_suffix(lane: str | None) -> bytes:
    """What stands in place of the last byte of every event of this lane."""
    return b"}" if lane is None else b',"stream_id":' + encode(lane) + b"}"


def _error_detail(error: ApiError) -> ErrorDetail:
    return ErrorDetail(error.message, error.type, error.param, error.code)


def encode_error_body(error: ApiError) -> bytes:
    """The body of an HTTP refusal."""
    return encode(ErrorBody(_error_detail(error)))


def encode_error_event(error: ApiError, lane: str | None = None) -> bytes:
    """The event of a refusal on a stream."""
    wait_s = UNSET if error.wait_s is None else error.wait_s
    event = encode(ErrorEvent(0, error.status, _error_detail(error), wait_s))
    return event[:-1] + lane_suffix(lane)


def list_object(rows: Sequence[tuple[str, Item]], *, has_more: bool) -> bytes:
    """The list object of the contract around these items, each with the id that it has in the list."""
    first_id, last_id = (rows[0][0], rows[-1][0]) if rows else (None, None)
    raws = [Raw(listed_item(item, item_id)) for item_id, item in rows]
    return encode(ItemList(data=raws, first_id=first_id, last_id=last_id, has_more=has_more))


def listed_item(item: Item, item_id: str, status: str | None = None) -> bytes:
    """An input item as lists show it: as it came but for its id, completed with what clients expect in a list."""
    given = _object.decode(item.raw)
    fields: dict[str, Raw | str | list[_Fields]] = {**given}
    kind = str(item.value.__struct_config__.tag)
    if _is_null(given.get("type")):
        fields["type"] = kind
    if item.value.id != item_id:
        fields["id"] = item_id
    # A compaction means a message to the model, but it is shown as what it is.
    is_itself = _string_or_none(given.get("type", UNSET)) in (None, kind)
    if status is not None:
        fields["status"] = status
    elif is_itself and "status" in item.value.__struct_fields__ and _is_null(given.get("status")):
        fields["status"] = "completed"
    if is_itself and isinstance(item.value, Message):
        fields["content"] = _listed_content(item.value, given["content"])
    return encode(fields)


def _listed_content(message: Message, content: Raw) -> list[_Fields]:
    """The parts of a message, of one part if it was a plain string, with the keys that parts must have."""
    kind = "output_text" if message.role == "assistant" else "input_text"
    if isinstance(message.content, str):
        parts: list[_Fields] = [{"type": Raw(encode(kind)), "text": content}]
    else:
        parts = _objects.decode(content)
    return [_completed_part(part) for part in parts]


def _completed_part(part: _Fields) -> _Fields:
    usual = PART_DEFAULTS.get(_string.decode(part["type"]), {})
    return {**part, **{name: raw for name, raw in usual.items() if _is_null(part.get(name))}}


def _is_null(raw: Raw | None) -> bool:
    return raw is None or bytes(raw) == b"null"


def _explain(message: str, path: str) -> tuple[str, str | None]:
    """Turn the library's `… - at `$.a[0]`` into a message and a parameter path."""
    found = _PATH.search(message)
    inner = found["path"] if found else ""
    param = f"{path}{inner}".lstrip(".") or None
    text = _LONG_VALUE.sub(r"'\1'", message[: found.start()] if found else message)
    return (f"Invalid value for '{param}': {text}." if param else f"{text}."), param


def _string_or_none(raw: Raw | UnsetType) -> str | None:
    if raw is UNSET:
        return None
    try:
        return _string.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _without_null_type(raw: bytes) -> bytes:
    """`"type": null` means the same as no type, which the tagged decoder wants left out."""
    fields = _object.decode(raw)
    if "type" not in fields:
        return raw
    del fields["type"]
    return encode(fields)


def terminal_event(response: Response, number: int) -> Event:
    """A terminal event for a response whose own one is lost."""
    if response.status not in ENDED:
        response = msgspec.structs.replace(response, status="failed")
    kind = {"completed": Completed, "failed": Failed}.get(response.status, Incomplete)
    return snapshot_event(kind, number, encode(response))
