"""What do items stand for that a client sends in place of others? References name items of other turns, what we have
sealed only we can open, and calls that our own tools have answered need their outputs.

The items of a request in, the same items as the model will see them out. Nothing of an unstored turn may reach the disk
with a stored one.
"""

from __future__ import annotations

import asyncio

from msgspec import structs

from segue.aio import off_loop
from segue.errors import ID_CHARS_MAX, InvalidRequest, NotFound
from segue.ids import given_id, turn_of
from segue.seams.access import Seals, open_text
from segue.seams.history import Owner, Round, Turn, ancestors
from segue.turn.compact import Compacted, from_bytes, stand_in, summary_message
from segue.turn.plan import MANY_ITEMS, Caller, Given
from segue.turn.resources import Resources
from segue.wire.items import (
    Compaction,
    CompactionSummary,
    Item,
    ItemReference,
    Reasoning,
    ReasoningText,
    contains_media,
)

# Items that stand for something else: references, and what we have sealed.
INDIRECT = (ItemReference, Reasoning, Compaction, CompactionSummary)
# Clients name some of the items of a conversation, at most all of a long one.
REFERENCES_MAX = 4_096
# What they name, as often as they name it: as much as a body may bring.
REFERENCED_BYTES_MAX = 32 * 1024 * 1024


async def replace_indirect(
    given: Given, parent: Turn | None, caller: Caller, resources: Resources, *, is_stored: bool
) -> Given:
    """The items, with what they stand for in place of those that stand for something else, and what hosted tools have
    answered after their calls."""
    hosted = resources.hosted
    has_words = frozenset() if hosted is None else hosted.has_words
    kinds = given.kinds
    if kinds.isdisjoint(INDIRECT) and kinds.isdisjoint(has_words):
        return given
    items = await resolve_references(given.items, parent, caller, is_stored=is_stored)
    opened = unseal(structs.replace(given, items=items), caller.owner, resources.seals)
    items = opened.items
    if hosted is not None and not opened.kinds.isdisjoint(has_words):
        items = hosted.load().with_outputs(items)
    # A reference may stand for an item with files.
    has_media = given.has_media or await off_loop(len(items) > MANY_ITEMS, contains_media, items)
    return structs.replace(opened, items=items, has_media=has_media)


# --- references ---


async def resolve_references(
    items: tuple[Item, ...], parent: Turn | None, caller: Caller, *, is_stored: bool
) -> tuple[Item, ...]:
    """The items with every reference replaced by what it names: in the history, or in a turn that is kept."""
    names = [item.value.id or "" for item in items if isinstance(item.value, ItemReference)]
    if not names:
        return items
    if len(names) > REFERENCES_MAX:
        raise InvalidRequest(
            f"Too many item references: {len(names)}, at most {REFERENCES_MAX}.", param="input"
        )
    known = await _items_in_history(parent, is_stored=is_stored)
    await _add_items_of_turns(known, names, caller, is_stored=is_stored)
    _check_size(sum(len(known[name].raw) for name in names if name in known))
    return tuple(
        _named(item.value, known, index) if isinstance(item.value, ItemReference) else item
        for index, item in enumerate(items)
    )


def _check_size(size: int) -> None:
    if size > REFERENCED_BYTES_MAX:
        message = f"The items referred to have more than {REFERENCED_BYTES_MAX} bytes together."
        raise InvalidRequest(message, code="invalid_value", param="input")


async def _items_in_history(parent: Turn | None, *, is_stored: bool) -> dict[str, Item]:
    """The items of this history by their ids."""
    known: dict[str, Item] = {}
    for turn in ancestors(parent) if parent else ():
        if turn.is_stored or not is_stored:
            known |= _items_with_ids(turn)
            await asyncio.sleep(0)
    return known


async def _add_items_of_turns(
    known: dict[str, Item], names: list[str], caller: Caller, *, is_stored: bool
) -> None:
    """Read the turns whose items are named and not known yet; what has no id of its own has one by its place. Nothing
    else of them is kept: they may be many, and long."""
    searched, wanted, size = set[str](), frozenset(names), 0
    for name in names:
        turn_id = turn_of(name)
        if name in known or not turn_id or turn_id in searched:
            continue
        searched.add(turn_id)
        turn = await caller.turns.read(caller.owner, turn_id)
        if turn is not None and (turn.is_stored or not is_stored):
            by_place = {given_id(turn.id, index): item for index, item in enumerate(turn.given)}
            for item_id, item in (_items_with_ids(turn) | by_place).items():
                if item_id in wanted:
                    size += len(known.setdefault(item_id, item).raw)
            _check_size(size)
        await asyncio.sleep(0)


def _items_with_ids(turn: Turn) -> dict[str, Item]:
    items = (item for round in turn.rounds for item in (*round.given, *round.wrote))
    return {item.value.id: item for item in items if item.value.id}


def _named(reference: ItemReference, known: dict[str, Item], index: int) -> Item:
    name = reference.id or ""
    if name not in known:
        raise NotFound(
            f"Item with id '{name[:ID_CHARS_MAX]}' not found.",
            code="item_not_found",
            param=f"input[{index}].id",
        )
    return known[name]


# --- seals ---


def unseal(given: Given, owner: Owner, seals: Seals) -> Given:
    """Open what only we can read. A thought that we cannot open stays closed, and the model does without; a compaction
    that we cannot open would be a lost history, and is refused."""
    earlier: tuple[Round, ...] = ()
    replaced: list[Item] = []
    items: list[Item] = []
    for index, item in enumerate(given.items):
        match item.value:
            case Reasoning(encrypted_content=str() as sealed, content=content) if not content:
                path = f"input[{index}].encrypted_content"
                items.append(_with_thought(item, open_text(seals, owner, sealed, path)))
            case Compaction(encrypted_content=sealed) | CompactionSummary(encrypted_content=sealed):
                compacted = _compacted(seals.open(owner, sealed), index)
                meant = structs.replace(summary_message(compacted), id=item.value.id)
                items.append(Item(item.raw, meant))
                if compacted.kind == "chain":
                    replaced += items
                    items = []
                    stand = Round(stand_in(compacted), is_fresh=True)
                    earlier = (Round(tuple(replaced)), stand)
            case _:
                items.append(item)
    return structs.replace(given, items=tuple(items), earlier=earlier)


def _with_thought(item: Item, text: str | None) -> Item:
    if text is None:
        return item
    return Item(item.raw, structs.replace(item.value, content=[ReasoningText(text=text)]))


def _compacted(body: bytes | None, index: int) -> Compacted:
    compacted = None if body is None else from_bytes(body)
    if compacted is None:
        raise InvalidRequest(
            "The encrypted content of this compaction could not be verified.",
            code="invalid_encrypted_content",
            param=f"input[{index}].encrypted_content",
        )
    return compacted
