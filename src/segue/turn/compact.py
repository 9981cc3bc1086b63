"""What stands in for a history that has become too long? Pure.

A compaction is a summary that the served model wrote, and what is kept word for word beside it. It travels as one
sealed item. There are two kinds: a *window* (`POST /v1/responses/compact`) keeps the user's messages outside, before
the item; a *chain* (a trigger, or a threshold that was passed) keeps them inside and takes the place of everything
before it, which the model no longer sees (docs/protocol.md 1.2, 6.12).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from segue.turn.values import Round, Turn, since_fresh
from segue.wire.codec import decode_item, listed_item, user_message
from segue.wire.items import (
    AdditionalTools,
    ConfigurationUpdate,
    InputText,
    Item,
    ItemValue,
    Message,
)

Kind = Literal["window", "chain"]

REQUEST = (
    "Summarise our conversation so far, for yourself: you will go on from your summary alone. Write down what was "
    "asked, what was decided and why, what was done and with what result, what is known (names, paths, numbers, "
    "errors, to the letter) and what is still to do. Answer with the summary and nothing else; call no tool."
)
PREAMBLE = "Here is a summary of the conversation so far; what it covers is no longer shown.\n\n"


STANDING = "What the developer said still holds:\n\n"


class Compacted(Struct, frozen=True):
    """What a sealed compaction holds."""

    kind: Kind
    summary: str
    # Messages that go on word for word, as they came.
    kept: list[Raw] = []


_decoder = msgspec.json.Decoder(Compacted)


def to_bytes(compacted: Compacted) -> bytes:
    """What is to be sealed."""
    return msgspec.json.encode(compacted)


def from_bytes(body: bytes) -> Compacted | None:
    """What was sealed; None if another program sealed it."""
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError:
        return None


def asking() -> Item:
    """The message that asks the model for a summary."""
    return user_message(REQUEST)


def summary_message(compacted: Compacted) -> Message:
    """What a compaction means to the model; what the developer said and stands nowhere else is repeated in it."""
    texts = [_text_of(decode_item(raw, "kept").value) for raw in compacted.kept]
    told = f"{STANDING}{chr(10).join(texts)}\n\n" if compacted.kind == "window" and texts else ""
    return Message(role="user", content=PREAMBLE + told + compacted.summary)


def _text_of(value: ItemValue) -> str:
    match value:
        case Message(content=str() as text):
            return text
        case Message(content=parts):
            return "\n".join(part.text for part in parts if isinstance(part, InputText))
        case _:
            return ""


def stand_in(compacted: Compacted) -> tuple[Item, ...]:
    """The items that take the place of everything before a chain's compaction."""
    kept = [decode_item(raw, "kept") for raw in compacted.kept]
    return (*kept, user_message(PREAMBLE + compacted.summary))


def in_bytes(item: Item) -> int:
    """The size of an item where nobody counts tokens: a token has a byte at least."""
    return len(item.raw)


def worth_keeping(
    rounds: Iterable[Round],
    given: Sequence[Item],
    room: int,
    measure: Callable[[Item], int] = in_bytes,
) -> list[Item]:
    """What goes on word for word: what the developer said, tools and settings that items have brought, and of the
    user's messages the newest that there is room for.

    The very last message of the user is always among them, because it may be still to be answered.
    """
    messages = [
        item
        for item in (*(item for one in rounds for item in one.given), *given)
        if isinstance(item.value, AdditionalTools | ConfigurationUpdate)
        or (isinstance(item.value, Message) and _is_others(item.value))
    ]
    room -= sum(measure(item) for item in messages if not _is_users(item))
    kept: list[Item] = []
    is_newest = True
    for item in reversed(messages):
        if _is_users(item):
            room -= measure(item) if room >= 0 else 0
            if room < 0 and not is_newest:
                continue
            is_newest = False
        kept.append(item)
    kept.reverse()
    return kept


def sealed_with(kept: Sequence[Item], kind: Kind) -> list[Raw]:
    """What goes into the seal word for word: beside a window the user's messages stand outside."""
    return [Raw(item.raw) for item in kept if kind == "chain" or not _is_users(item)]


def window(
    past: Turn | None, given: Sequence[Item], bytes_max: int, new_id: Callable[[str], str]
) -> list[Raw]:
    """The user's messages that stand beside a window's compaction, each with an id and a status."""
    rounds = [one for turn in (past.lineage() if past else ()) for one in turn.rounds]
    kept = worth_keeping(since_fresh(rounds), given, bytes_max)
    return [
        Raw(listed_item(item, item.value.id or new_id("msg"), status="completed"))
        for item in kept
        if _is_users(item)
    ]


def _is_others(message: Message) -> bool:
    """Whether somebody else than the model said this: neither its answers nor its summaries."""
    return message.role != "assistant" and not _is_summary(message)


def _is_summary(message: Message) -> bool:
    match message.content:
        case str() as text:
            return text.startswith(PREAMBLE)
        case [InputText(text=text)]:
            return text.startswith(PREAMBLE)
        case _:
            return False


def _is_users(item: Item) -> bool:
    return isinstance(item.value, Message) and item.value.role == "user"
