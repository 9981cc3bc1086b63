"""What does a message of Chat Completions mean? The bytes of a message in, the items that it stands for out. Pure.

Clients resend all messages each turn, and no two spell them alike: a text is a string or a list of parts, arguments
have other spaces, thoughts come under four names. Whatever means the same becomes the same bytes, so that a history is
known again. The items of a message depend on nothing but its own bytes, so that they can be remembered.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
from typing import Literal, NamedTuple, TypeVar, cast

import msgspec
from msgspec import UNSET, Raw, Struct

from segue.errors import InvalidRequest, cut_name
from segue.wire import long_texts
from segue.wire.codec import decode_body, encode, encode_read
from segue.wire.inner_json import inner_object
from segue.wire.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputAudio,
    InputFile,
    InputImage,
    InputText,
    ItemValue,
    Message,
    MessagePart,
    OutputPart,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
)
from segue.wire.requests import RawField

T = TypeVar("T")
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]

# What an answer says that had sound instead of words; the sound itself is not here.
AUDIO_TEXT = "[audio that was sent earlier]"
# What a field says that says nothing; and what stands there instead of a sound.
NO_FIELDS: dict[str, Raw] = {}
NO_RAWS: list[Raw] = []
NOTHING = (b"null", b"false", b'""', b"{}", b"[]", b"0")
# Longer arguments are not spelt anew: nobody else would be served meanwhile.
CANONICAL_CHARS_MAX = 1024 * 1024


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str | None = None


class CalledCustom(Struct, frozen=True):
    name: str
    input: str = ""


class ChatCall(Struct, frozen=True):
    """A call as it comes back. Its type is the field that it has; some clients leave `type` out."""

    id: str | None = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class ChatMessage(Struct, frozen=True, kw_only=True):
    """A message of any role. The names of a thought are in no contract, and read leniently; so they are kept raw."""

    role: Role
    content: str | list[Raw] | None = None
    refusal: str | None = None
    audio: RawField = UNSET
    tool_calls: list[ChatCall] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: RawField = UNSET
    reasoning: RawField = UNSET
    reasoning_details: RawField = UNSET
    thinking_blocks: RawField = UNSET


class ImageUrl(Struct, frozen=True):
    url: str
    detail: str | None = None


class AudioUrl(Struct, frozen=True):
    url: str


class SentAudio(Struct, frozen=True):
    data: str
    format: str | None = None


class SentFile(Struct, frozen=True):
    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class ChatPart(Struct, frozen=True, kw_only=True):
    """A part of a content, of any type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    input_audio: SentAudio | None = None
    audio_url: AudioUrl | None = None
    file: SentFile | None = None


_message = msgspec.json.Decoder(ChatMessage)
_part = msgspec.json.Decoder(ChatPart)
_text = msgspec.json.Decoder(str).decode
_raws = msgspec.json.Decoder(list[Raw]).decode
_fields = msgspec.json.Decoder(dict[str, Raw]).decode


class Translated(NamedTuple):
    """The items of a message, and whether they are the same wherever it stands."""

    items: tuple[Raw, ...]
    is_lasting: bool


def translate(raw: Raw | bytes, path: str, *, is_newest: bool, is_custom: bool) -> Translated:
    """The items of a message. `is_custom`: it answers a custom call.

    A part that is not known is refused in the newest message; in an older one, which its client cannot change any more,
    it becomes a line of text.
    """
    message = decode_body(_message, raw, path)
    content, is_known = _read_content(message.content, f"{path}.content", is_newest=is_newest)
    match message.role:
        case "assistant":
            values = _answer(message, content)
        case "tool" | "function":
            values = [_output(message, content, is_custom=is_custom)]
        case role:
            values = [Message(role=role, content=_plain(content))]
    # As bytes, whose hash is computed once: what is remembered of a history is found by it each turn.
    return Translated(
        tuple(cast("Raw", encode_read(value, len(raw))) for value in values), is_known
    )


def _read_content(
    content: str | list[Raw] | None, path: str, *, is_newest: bool
) -> tuple[str | list[MessagePart], bool]:
    """The content of a message, and whether all its parts are known."""
    if not isinstance(content, list):
        return content or "", True
    parts: list[MessagePart] = []
    is_known = True
    for index, raw in enumerate(content):
        sent = decode_body(_part, raw, f"{path}[{index}]")
        part = _read_part(sent)
        if part is None and is_newest:
            raise InvalidRequest(
                f"Invalid value: '{cut_name(sent.type)}'. A part of a message is one of: text, image_url, "
                "input_audio, file, refusal; with the field of the same name.",
                code="invalid_value",
                param=f"{path}[{index}].type",
            )
        is_known = is_known and part is not None
        parts.append(part or InputText(text=f"[content of type {cut_name(sent.type)}]"))
    return parts, is_known


def _read_part(part: ChatPart) -> MessagePart | None:
    """What a part means; None if that is not known. Clients that also speak Responses mix up the names of its types."""
    match part:
        case ChatPart(type="text" | "input_text" | "output_text", text=str() as text):
            return InputText(text=text)
        case ChatPart(type="refusal", refusal=str() as text):
            return Refusal(refusal=text)
        case ChatPart(type="image_url" | "input_image", image_url=str() as url):
            return InputImage(image_url=url)
        case ChatPart(type="image_url" | "input_image", image_url=ImageUrl(url, detail)):
            return InputImage(image_url=url, detail=detail or UNSET)
        case ChatPart(type="input_audio", input_audio=SentAudio() as sound):
            return InputAudio(input_audio=Raw(encode(sound)))
        case ChatPart(type="audio_url", audio_url=AudioUrl(url)):
            return InputAudio(audio_url=url)
        case ChatPart(type="file", file=SentFile(data, file_id, name)):
            return InputFile(
                file_data=data or UNSET, file_id=file_id or UNSET, filename=name or UNSET
            )
        case _:
            return None


def _plain(content: str | list[MessagePart]) -> str | list[MessagePart]:
    """A content of one text is a string."""
    match content:
        case [InputText(text=text)]:
            return text
        case []:
            return ""
        case _:
            return content


# --- what the model wrote -------------------------------------------------------------------------


def _answer(message: ChatMessage, content: str | list[MessagePart]) -> list[ItemValue]:
    """An answer of the model: its thought, its words, its calls."""
    values: list[ItemValue] = []
    if thought := _thought(message):
        values.append(Reasoning(content=[ReasoningText(text=thought)]))
    words = _words(message, content)
    calls = [*map(_call, message.tool_calls or ())]
    if message.function_call is not None:
        calls.append(_call(ChatCall(function=message.function_call)))
    # An answer that says nothing at all still stands between what others say.
    if words or not (values or calls):
        values.append(Message(role="assistant", content=words))
    return [*values, *calls]


def _words(message: ChatMessage, content: str | list[MessagePart]) -> str | list[MessagePart]:
    """What the model said. A refusal beside the content is a part of it."""
    content = _plain(content)
    if message.refusal:
        words = [InputText(text=content)] if isinstance(content, str) else content
        content = [*(words if content else ()), Refusal(refusal=message.refusal)]
    if message.audio is not UNSET and bytes(message.audio) not in NOTHING and not content:
        return AUDIO_TEXT
    return content if isinstance(content, str) else [*map(_written, content)]


def _written(part: MessagePart) -> MessagePart:
    return OutputText(text=part.text) if isinstance(part, InputText) else part


def _call(call: ChatCall) -> ItemValue:
    if call.custom is not None:
        name, text = call.custom.name, call.custom.input
        return CustomToolCall(call_id=call.id or _made_up_id(name, text), name=name, input=text)
    if call.function is None:
        raise InvalidRequest(
            "Invalid value: a tool call of an assistant message has 'function' or 'custom'.",
            code="invalid_value",
            param="messages",
        )
    name, text = call.function.name, canonical_arguments(call.function.arguments)
    return FunctionCall(call_id=call.id or _made_up_id(name, text), name=name, arguments=text)


def _made_up_id(name: str, text: str) -> str:
    """For a call without an id, as the old `function_call` is: always the same for the same call. Its output names no
    id either, and then answers the only call that is open."""
    digest = blake2b(f"{name} {text}".encode(), digest_size=12)
    return f"call_{digest.hexdigest()}"


def canonical_arguments(text: str | None) -> str:
    """Arguments in the spelling that chat templates give them, which is that of most models: clients that parse them
    write them with other spaces. What is no JSON object stays as it is, and what is very long."""
    if not text:
        return "{}"
    value = inner_object(text.strip()) if len(text) <= CANONICAL_CHARS_MAX else None
    return text if value is None else json.dumps(value, ensure_ascii=False)


def _thought(message: ChatMessage) -> str:
    """What the model thought, under the first of its names that has a text."""
    for raw in (message.reasoning_content, message.reasoning):
        if text := _lenient(_text, raw, ""):
            return text
    return _joined(message.reasoning_details) or _joined(message.thinking_blocks)


def _joined(raw: RawField) -> str:
    """The texts of reasoning details and thinking blocks."""
    blocks = (_lenient(_fields, block, NO_FIELDS) for block in _lenient(_raws, raw, NO_RAWS))
    texts = (
        _lenient(_text, block.get(name, UNSET), "")
        for block in blocks
        for name in ("text", "summary", "thinking")
    )
    return "".join(texts)


def _lenient(decode: Callable[[bytes | bytearray], T], raw: RawField, usual: T) -> T:
    """What a field says that may be anything; what is of another type says nothing."""
    if raw is UNSET:
        return usual
    try:
        return long_texts.decode(decode, raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return usual


# --- what a tool answered -------------------------------------------------------------------------


def _output(
    message: ChatMessage, content: str | list[MessagePart], *, is_custom: bool
) -> ItemValue:
    """What a client's tool has answered. Without an id it is the output of the only call that is open."""
    call_id = message.tool_call_id or UNSET
    plain = _plain(content)
    output = plain if isinstance(plain, str) else [*map(_shown, plain)]
    if is_custom:
        return CustomToolCallOutput(call_id=call_id, output=output)
    name = message.name if message.role == "function" and message.name else UNSET
    return FunctionCallOutput(call_id=call_id, output=output, name=name)


def _shown(part: MessagePart) -> OutputPart:
    return InputText(text=part.refusal) if isinstance(part, Refusal) else part
