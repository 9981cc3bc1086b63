"""What does an item mean, however it is spelt?

Clients spell what they send again in their own way: a list of one text becomes a string, arguments get other spaces and
another order of keys, `1.0` becomes `1`, ids, states and cache markers come and go. Here all spellings of one meaning
become one form, and its digest. What a model would read differently, apart from the spelling of JSON, has another
digest. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec
from msgspec import Raw

from segue.wire.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    Message,
    MessagePart,
    OutputPart,
    OutputText,
    Reasoning,
)
from segue.wire.kinds import called
from segue.wire.slow_numbers import SLOW_NUMBERS_MAX, is_slow_text, slow_numbers

# So long that no two meanings have the same by accident.
DIGEST_BYTES = 16
# What a digest begins with: a thought may be missing when a history is sent again.
THOUGHT, OTHER = b"t", b"i"
# Of a part: where a prompt cache begins, and what a text cites, says nothing to a model.
UNSAID = {"prompt_cache_breakpoint", "annotations", "logprobs"}

# Longer arguments are read by nobody for their spelling: that would hold up other requests.
SPELT_CHARS_MAX = 256 * 1024
# Of these, larger numbers are not all there.
WHOLE_FLOAT_MAX = 2.0**53
# Items that nothing refers to.
NAMELESS = {"additional_tools", "configuration_update"}

_encode = msgspec.json.Encoder(order="sorted").encode


def digest_of(item: Item) -> bytes:
    """The same for two items that mean the same."""
    mark = THOUGHT if isinstance(item.value, Reasoning) else OTHER
    return mark + _digest(canonical(item), item.raw)


def digest_of_json(raw: bytes) -> bytes:
    """The same for all spellings of a JSON value; what takes long to read is no request that goes on."""
    if slow_numbers(raw) > SLOW_NUMBERS_MAX:
        return blake2b(raw, digest_size=DIGEST_BYTES).digest()
    return _digest(_as_json(raw), raw)


def _digest(form: object, raw: bytes) -> bytes:
    try:
        data = _encode(form)
    except (RecursionError, ValueError):
        data = raw
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def canonical(item: Item) -> object:
    """What an item means, as a JSON value."""
    match item.value:
        case Message() as value:
            parts = _parts(value.content)
            if value.role == "assistant":
                parts = _joined(parts)
            return ["message", value.role, value.phase or None, parts]
        case FunctionCall() as value:
            return ["call", *_call(value), arguments_of(value.arguments)]
        case CustomToolCall() as value:
            return ["custom", *_call(value), value.input]
        case FunctionCallOutput() | CustomToolCallOutput() as value:
            kind = type(value).__name__
            return [kind, value.call_id or None, value.name or None, _parts(value.output)]
        case Reasoning(content=list() as content) if content:
            return [part.text for part in content]
        case Reasoning() as value:
            return [[part.text for part in value.summary], value.encrypted_content or None]
        case _:
            return _fields(item.raw)


def arguments_of(text: str) -> object:
    """What the arguments of a call mean; those of a call without any are an empty object. What takes long to read means
    itself: it is known again where it is spelt alike."""
    if len(text) > SPELT_CHARS_MAX or is_slow_text(text):
        return ["text", text]
    return _as_json(text if text.strip() else "{}")


def _as_json(text: str | bytes) -> object:
    """What JSON means; what is no JSON means itself."""
    try:
        return ["json", _normal(msgspec.json.decode(text))]
    except (msgspec.DecodeError, RecursionError):
        return ["text", text]


def _normal(value: object) -> object:
    """Numbers of one value have one form."""
    match value:
        case float():
            is_whole = value.is_integer() and abs(value) <= WHOLE_FLOAT_MAX
            return int(value) if is_whole else value
        case dict():
            return {key: _normal(inner) for key, inner in value.items()}
        case list():
            return [_normal(inner) for inner in value]
        case _:
            return value


def _call(value: FunctionCall | CustomToolCall) -> tuple[str, str, bool, bool]:
    is_cut = value.status == "incomplete"
    return value.call_id, called(value), value.is_async is True, is_cut


def _parts(content: str | Sequence[MessagePart | OutputPart]) -> list[object]:
    if isinstance(content, str):
        return [content]
    return [
        part.text if isinstance(part, InputText | OutputText) else _part(part) for part in content
    ]


def _part(part: MessagePart | OutputPart) -> object:
    values = {name: getattr(part, name) for name in part.__struct_fields__ if name not in UNSAID}
    said = {name: value for name, value in values.items() if value}
    return {
        "type": type(part).__name__,
        **{
            name: _as_json(value) if isinstance(value, Raw) else value
            for name, value in said.items()
        },
    }


def _joined(parts: list[object]) -> list[object]:
    """What the model says is one text, whatever its parts."""
    texts = [part for part in parts if isinstance(part, str)]
    return ["".join(texts)] if len(texts) == len(parts) else parts


def _fields(raw: bytes) -> object:
    """All that an item says; its state is its own, and its id is no more than a name where there is another."""
    fields = _as_json(raw)
    match fields:
        case ["json", dict() as said]:
            is_nameless = bool(said.get("call_id")) or said.get("type") in NAMELESS
            unsaid = {"status", "id"} if is_nameless else {"status"}
            return {
                key: value for key, value in said.items() if key not in unsaid and value is not None
            }
        case _:
            return fields
