"""Which text is shown of an item, and of the place where two texts part? Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from segue.wire.cache import Side
from segue.wire.items import InputText, Item, Message, OutputText

# How much is shown of a text before the place where it parts from the other, and after it.
BEFORE_CHARS, AFTER_CHARS = 1_000, 1_500
# What a client may change in an item that the model does not see.
UNSEEN = {"id", "status", "prompt_cache_breakpoint", "annotations", "logprobs", "phase"}
# What is longer is read as it came: to decode it, and encode it again, would hold the interpreter.
SAID_BYTES_MAX = 1024 * 1024
# Texts are compared piece by piece: comparing long ones at once would hold the interpreter as well.
PIECE = 64 * 1024


def said(item: Item) -> str:
    """An item as a person reads it, without what the model does not see; as it came where fields that nobody reads hold
    numbers or depths that we do not take."""
    if len(item.raw) > SAID_BYTES_MAX:
        return item.raw.decode()
    try:
        return _said(msgspec.json.decode(item.raw))
    except (msgspec.MsgspecError, RecursionError):
        return item.raw.decode()


def _said(body: object) -> str:
    match body:
        case {"content": str() as text}:
            return text
        case {"content": [*parts]} if parts and all(map(_is_text, parts)):
            return "".join(part.get("text") or part.get("refusal") or "" for part in parts)
        case {"name": str() as name, "arguments": str() as arguments}:
            return f"{name}({arguments})"
        case {"name": str() as name, "input": str() as given}:
            return f"{name}({given})"
        case {"call_id": str(), "output": str() as output}:
            return output
        case _:
            return msgspec.json.encode(_seen(body)).decode()


class _Typed(Struct, frozen=True):
    type: str | None = None


_typed = msgspec.json.Decoder(_Typed).decode


def type_of(item: Item) -> str:
    """The type that the client sent: what we had sealed is opened, and then means something else."""
    return _typed(item.raw).type or "message"


def digest(item: Item) -> int:
    """The same for two items that say the same, as far as that is seen at a glance: ids and the form of the content do
    not count in a message of text."""
    value = item.value
    if not isinstance(value, Message):
        return hash(item.raw)
    if isinstance(value.content, str):
        return hash((value.role, value.content))
    if all(isinstance(part, InputText | OutputText) for part in value.content):
        return hash((value.role, "".join(getattr(part, "text", "") for part in value.content)))
    return hash(item.raw)


def _is_text(part: object) -> bool:
    match part:
        case {"type": "input_text" | "output_text" | "refusal" | "reasoning_text"}:
            return True
        case _:
            return False


def _seen(value: object) -> object:
    """The same JSON without what the model does not see, its keys in order."""
    match value:
        case Mapping():
            return {name: _seen(value[name]) for name in sorted(value) if name not in UNSEEN}
        case [*values]:
            return [_seen(one) for one in values]
        case _:
            return value


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """Where two texts part: the length of what they begin with alike."""
    end = min(len(one), len(other))
    for low in range(0, end, PIECE):
        high = min(low + PIECE, end)
        if one[low:high] == other[low:high]:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if one[low:middle] == other[low:middle]:
                low = middle
            else:
                high = middle
        return low
    return end


def same_end(one: str, other: str) -> float:
    """The share of a text, after the place where two part, that both end with; 0 where most of them differs: these are
    two texts, and not one that was changed."""
    at = first_difference(one, other)
    end = _last_difference(one[at:], other[at:])
    return end / len(one) if 2 * (at + end) > max(len(one), len(other)) else 0.0


def _last_difference(one: str, other: str) -> int:
    """The length of what two texts end with alike."""
    end = min(len(one), len(other))
    for low in range(0, end, PIECE):
        high = min(low + PIECE, end)
        ends = [text[len(text) - high : len(text) - low] for text in (one, other)]
        if ends[0] != ends[1]:
            return low + first_difference(ends[0][::-1], ends[1][::-1])
    return end


def around(text: str, at: int) -> Side:
    """The text around this place."""
    start = max(0, at - BEFORE_CHARS)
    return Side(text[start : at + AFTER_CHARS], at - start)


def line_of(text: str, at: int) -> int:
    """The line of this place, the first being 1."""
    return text.count("\n", 0, at) + 1
