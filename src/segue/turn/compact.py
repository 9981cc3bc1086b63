"""What becomes of a history that is too long? It is compacted, or its oldest items go. Pure.

A compaction is a summary that the served model wrote, and what is kept word for word beside it. It travels as one
sealed item. There are two kinds: a *window* (`POST /v1/responses/compact`) keeps the user's messages outside, before
the item; a *chain* (a trigger, or a threshold that was passed) keeps them inside and takes the place of everything
before it, which the model no longer sees (docs/protocol.md 1.2, 6.12).

Truncation drops whole items from the start, only where the client asked for it (`truncation: "auto"`); otherwise too
long is an error. What belongs together is a *unit*, and stays or goes as one: a call with its outputs, and with
everything else that the model wrote in that round, because its kept ids belong together. What the model is to answer
stays whatever its size: the last message of the user, the last item, and of outputs that end the history all. So do
tools and settings from items, because later items still need them. If that is too long, it is an error after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Literal, NamedTuple

import msgspec
from msgspec import Raw, Struct, structs

from segue.seams.history import Round, Turn, ancestors, since_fresh
from segue.seams.model import Scene
from segue.wire.codec import decode_item, listed_item, user_message
from segue.wire.items import (
    AdditionalTools,
    ConfigurationUpdate,
    InputText,
    Item,
    ItemValue,
    Message,
)
from segue.wire.kinds import approved_by, call_id_of, is_call, is_output

CompactionKind = Literal["window", "chain"]

REQUEST = (
    "Summarise our conversation so far, for yourself: you will go on from your summary alone. Write down what was "
    "asked, what was decided and why, what was done and with what result, what is known (names, paths, numbers, "
    "errors, to the letter) and what is still to do. Answer with the summary and nothing else; call no tool."
)
PREAMBLE = "Here is a summary of the conversation so far; what it covers is no longer shown.\n\n"
# How long a history may be after a compaction, where the context is unknown.
ASSUMED_CONTEXT_TOKENS = 32_768

STANDING = "What the developer said still holds:\n\n"


class Compacted(Struct, frozen=True):
    """What a sealed compaction holds."""

    kind: CompactionKind
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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def asking() -> Item:
    """The message that asks the model for a summary."""
    return user_message(REQUEST)


def summary_message(compacted: Compacted) -> Message:
    """What a compaction means to the model; what the developer said and stands nowhere else is repeated in it."""
    texts = [_text_of(decode_item(raw, "kept").value) for raw in compacted.kept]
    standing = (
        f"{STANDING}{chr(10).join(texts)}\n\n" if compacted.kind == "window" and texts else ""
    )
    return Message(role="user", content=PREAMBLE + standing + compacted.summary)


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
    """The size of an item where tokens are not counted: a token has a byte at least."""
    return len(item.raw)


def worth_keeping(
    rounds: Iterable[Round],
    given: Sequence[Item],
    room: int,
    measure: Callable[[Item], int] = in_bytes,
) -> list[Item]:
    """What goes on word for word: what the developer said, tools and settings from items, and of the
    user's messages the newest that there is room for.

    The very last message of the user is always among them, because it may be still to be answered.
    """
    messages = [
        item
        for item in (*(item for round in rounds for item in round.given), *given)
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


def sealed_with(kept: Sequence[Item], kind: CompactionKind) -> list[Raw]:
    """What goes into the seal word for word: beside a window the user's messages stand outside."""
    return [Raw(item.raw) for item in kept if kind == "chain" or not _is_users(item)]


def window(
    past: Turn | None, given: Sequence[Item], bytes_max: int, new_id: Callable[[str], str]
) -> list[Raw]:
    """The user's messages that stand beside a window's compaction, each with an id and a status."""
    rounds = [round for turn in (ancestors(past) if past else ()) for round in turn.rounds]
    kept = worth_keeping(since_fresh(rounds), given, bytes_max)
    return [
        Raw(listed_item(item, item.value.id or new_id("msg"), status="completed"))
        for item in kept
        if _is_users(item)
    ]


def _is_others(message: Message) -> bool:
    """Whether this is not from the model: neither an answer nor a summary."""
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


# --- truncation ---------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """An item, and what it belongs to."""

    item: Item
    unit: int


def truncate(scene: Scene, share: float) -> Scene:
    """The same scene without its oldest items: about this share of all bytes goes. The scene itself if none can go."""
    rounds = [*scene.history(), Round(scene.given)]
    placed = _place(rounds)
    places = [place for inside in placed for place in inside]
    going = _going(places, share)
    if not going:
        return scene
    kept = [_kept(round, inside, going) for round, inside in zip(rounds, placed, strict=True)]
    *before, last = kept
    return structs.replace(scene, past=None, rounds=tuple(before), given=last.given)


def _place(rounds: Sequence[Round]) -> list[list[_Place]]:
    """The items of each round, given and then written, with their units, which are numbered by age."""
    numbers = count()
    # By the calls that they hold; and the newest of them, for answers that do not say whose.
    units: dict[str, int] = {}
    newest: int | None = None
    placed: list[list[_Place]] = []
    for round in rounds:
        places: list[_Place] = []
        for item in round.given:
            answered = _answered_call(item)
            unit = None if answered is None else units.get(answered, newest)
            places.append(_Place(item, next(numbers) if unit is None else unit))
            newest = _note(places[-1], units, newest)
        written = next(numbers)
        for item in round.wrote:
            places.append(_Place(item, written))
            newest = _note(places[-1], units, newest)
        placed.append(places)
    return placed


def _note(place: _Place, units: dict[str, int], newest: int | None) -> int | None:
    """Where the answers to this item belong, if it is a call; the newest unit that holds one."""
    call_id = call_id_of(place.item.value)
    if not call_id or not is_call(place.item.value):
        return newest
    units[call_id] = place.unit
    return place.unit


def _going(places: Sequence[_Place], share: float) -> set[int]:
    """The units that go: the oldest, but for those that are needed."""
    sizes: dict[int, int] = {}
    for item, unit in places:
        sizes[unit] = sizes.get(unit, 0) + len(item.raw)
    budget = share * sum(sizes.values())
    needed = _needed(places)
    going: set[int] = set()
    for unit in sorted(sizes):
        if budget <= 0:
            break
        if unit not in needed:
            going.add(unit)
            budget -= sizes[unit]
    return going


def _needed(places: Sequence[_Place]) -> set[int]:
    is_setting = [
        isinstance(item.value, AdditionalTools | ConfigurationUpdate) for item, _ in places
    ]
    needed = {unit for (_, unit), setting in zip(places, is_setting, strict=True) if setting}
    parsed = [place for place, setting in zip(places, is_setting, strict=True) if not setting]
    questions = [unit for item, unit in parsed if _is_users(item)]
    needed.update(questions[-1:])
    needed.update(unit for _, unit in parsed[-1:])
    for item, unit in reversed(parsed):
        if _answered_call(item) is None:
            break
        needed.add(unit)
    return needed


def _kept(round: Round, places: Sequence[_Place], going: set[int]) -> Round:
    given = tuple(item for item, unit in places[: len(round.given)] if unit not in going)
    if any(unit in going for _, unit in places[len(round.given) :]):
        return Round(given, is_fresh=round.is_fresh)
    return structs.replace(round, given=given)


def _answered_call(item: Item) -> str | None:
    """The id of the call that this item answers; empty where it answers one and does not say which."""
    value = item.value
    return approved_by(value) or (call_id_of(value) if is_output(value) else None)
