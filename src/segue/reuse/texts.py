"""Which text is shown of an item, and of the place where two texts part? Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from segue.wire.cache import Side
from segue.wire.items import InputText, Item, Message, OutputText

# How much is shown of a text before the place where it parts from the other, and after it.
BEFORE_CHARS, AFTER_CHARS = 1_000, 1_500
# What a client may change in an item that the model does not see.
UNSEEN = {"id", "status", "prompt_cache_breakpoint", "annotations", "logprobs", "phase"}


def said(item: Item) -> str:
    """An item as a person reads it, without what the model does not see."""
    body = msgspec.json.decode(item.raw)
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


def told(item: Item) -> object:
    """What is the same for two items that say the same, as far as that is seen at a glance: ids and the form of the
    content do not count in a message of text."""
    value = item.value
    if not isinstance(value, Message):
        return item.raw
    if isinstance(value.content, str):
        return value.role, value.content
    if all(isinstance(part, InputText | OutputText) for part in value.content):
        return value.role, "".join(getattr(part, "text", "") for part in value.content)
    return item.raw


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


def first_difference(one: memoryview | str, other: memoryview | str) -> int:
    """Where two texts part: the length of what they begin with alike."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def same_end(one: str, other: str) -> float:
    """The share of a text, after the place where two part, that both end with; 0 where most of them differs: these are
    two texts, and not one that was changed."""
    at = first_difference(one, other)
    end = first_difference(one[at:][::-1], other[at:][::-1])
    return end / len(one) if 2 * (at + end) > max(len(one), len(other)) else 0.0


def around(text: str, at: int) -> Side:
    """The text around this place."""
    start = max(0, at - BEFORE_CHARS)
    return Side(text[start : at + AFTER_CHARS], at - start)


def line_of(text: str, at: int) -> int:
    """The line of this place, the first being 1."""
    return text.count("\n", 0, at) + 1
