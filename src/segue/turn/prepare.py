"""May this request become a turn? All that may be refused before anything is sent: validate, find, resolve, admit.

A request in, a `Plan` out, or an error for the transport to answer. Short: no engine is asked and nothing is rendered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from time import perf_counter

from msgspec import Raw, Struct, structs

from segue.background import off_loop
from segue.errors import ID_CHARS_MAX, InvalidRequest, NotFound, parent_not_found
from segue.ids import given_id, turn_of
from segue.turn.admit import admit
from segue.turn.compact import Compacted, CompactionKind, from_bytes, stand_in, summary_message
from segue.turn.plan import Caller, Model, Plan, Resources, Span, Tally
from segue.turn.resolve import resolve
from segue.turn.seams import Seals
from segue.turn.values import Owner, Round, Turn
from segue.wire.codec import ITEMS_MAX, LARGE_BYTES, check_item_ids, decode_item, user_message
from segue.wire.items import (
    Compaction,
    CompactionSummary,
    CustomToolCallOutput,
    FunctionCallOutput,
    InputAudio,
    InputFile,
    InputImage,
    Item,
    ItemReference,
    McpCall,
    Message,
    Reasoning,
    ReasoningText,
    WebSearchCall,
)
from segue.wire.mcp import with_outputs
from segue.wire.requests import Create

# How much JSON is decoded before the event loop may do other work: a fraction of a millisecond.
SLICE_BYTES = 64 * 1024
# Items that stand for something else: references, what we have sealed, calls that our own tools have answered.
INDIRECT = (ItemReference, Reasoning, Compaction, CompactionSummary, McpCall, WebSearchCall)
# Clients name some of the items of a conversation, at most all of a long one.
REFERENCES_MAX = 4_096
# Looking at so many items, or at so much of one, takes some milliseconds.
MANY_ITEMS = 2_000
LONG_ITEM_BYTES = 1024 * 1024


async def prepare(
    create: Create,
    caller: Caller,
    tally: Tally,
    resources: Resources,
    turn_id: str,
    compacts: CompactionKind | None = None,
) -> Plan:
    """A plan for this request. It holds a slot of the caller's quota: release it if the plan is not started."""
    if caller.quota is not None:
        await caller.quota.hold()
    began = perf_counter()
    try:
        given: tuple[Item, ...] = ()
        resent = await resources.prompt_cache.recognise(caller.owner, create, tally.bytes_received)
        if isinstance(create.input, str):
            given = (user_message(create.input),)
            tally.items_validated += 1
        elif create.input is not None:
            given = await decode_items(create.input, tally, known=resent.sent if resent else ())
            resent = resent and structs.replace(resent, sent=given)
        is_long = len(given) > MANY_ITEMS
        has_media = await off_loop(is_long, _has_media, given)
        if has_media and resources.reads_urls and resources.hosted is not None:
            given = await resources.hosted.fetch(given)
        if caller.joined is not None:
            check_item_ids(given)
            given = (*caller.joined.new_items, *given)
            # The items of the conversation were not looked at: there may be files among them.
            has_media = True
        validated = perf_counter()
        parent = caller.known
        if parent is None:
            parent = await _find_parent(create, caller, tally)
        else:
            tally.found_in = "connection"
        earlier: tuple[Round, ...] = ()
        kinds = {type(item.value) for item in given}
        if not kinds.isdisjoint(INDIRECT):
            unsealed = unseal(
                await resolve_references(
                    given, parent, caller, is_stored=create.store is not False
                ),
                caller.owner,
                resources.seals,
            )
            given, earlier = with_outputs(unsealed.given), unsealed.earlier
            # A reference may stand for an item with files.
            has_media = has_media or await off_loop(is_long, _has_media, given)
        has_web = resources.has_web and "web_search" in caller.may
        is_long = len(given) > MANY_ITEMS or tally.bytes_received > LARGE_BYTES
        bind = partial(resolve, has_web=has_web, has_media=has_media)
        resolved = await off_loop(is_long, bind, create, given, parent, earlier, resent)
        if resolved.is_hosted and resources.hosted is not None:
            resources.hosted.check(resolved.head.tools, caller.may)
        if has_media:
            await _ask_whether_it_sees(resources.models.get(resolved.model))
        plan = admit(
            resolved, resources, caller, turn_id, tally, compacts=compacts, has_media=has_media
        )
    except BaseException:
        if caller.quota is not None:
            caller.quota.release()
        raise
    tally.tool_decodes += resolved.tool_decodes
    tally.spans += (Span("validate", began, validated), Span("resolve", validated, perf_counter()))
    return plan


async def _ask_whether_it_sees(model: Model | None) -> None:
    """An engine that could not be asked yet, because it started later than we, is asked before an image is lost."""
    if model is not None and model.sees is None and model.engine.facts.sees_images is None:
        await model.engine.is_ready()


def _has_media(items: Sequence[Item]) -> bool:
    """Whether there are files, images or audio among the contents of these items."""
    for item in items:
        match item.value:
            case Message(content=list() as parts) | FunctionCallOutput(output=list() as parts):
                pass
            case CustomToolCallOutput(output=list() as parts):
                pass
            case _:
                continue
        if any(isinstance(part, InputFile | InputImage | InputAudio) for part in parts):
            return True
    return False


async def resolve_references(
    given: tuple[Item, ...], parent: Turn | None, caller: Caller, *, is_stored: bool
) -> tuple[Item, ...]:
    """The items with every reference replaced by what it names: in the history, or in a turn that is kept.

    A turn that is stored may not name items of an unstored turn: they would reach the disk with it.
    """
    count = sum(isinstance(item.value, ItemReference) for item in given)
    if not count:
        return given
    if count > REFERENCES_MAX:
        raise InvalidRequest(
            f"Too many item references: {count}, at most {REFERENCES_MAX}.", param="input"
        )
    known: dict[str, Item] = {}
    for turn in parent.lineage() if parent else ():
        if turn.is_stored or not is_stored:
            items = (item for one in turn.rounds for item in (*one.given, *one.wrote))
            known |= {item.value.id: item for item in items if item.value.id}
            await asyncio.sleep(0)
    searched: set[str] = set()
    resolved: list[Item] = []
    for index, item in enumerate(given):
        if isinstance(item.value, ItemReference):
            name = item.value.id or ""
            turn_id = turn_of(name)
            if name not in known and turn_id and turn_id not in searched:
                searched.add(turn_id)
                found = await caller.turns.read(caller.owner, turn_id)
                if found is not None and (found.is_stored or not is_stored):
                    for id, kept in _items_of(found).items():
                        known.setdefault(id, kept)
                await asyncio.sleep(0)
            item = known.get(name) or _lost(name, index)
        resolved.append(item)
    return tuple(resolved)


def _items_of(turn: Turn) -> dict[str, Item]:
    """The items of a turn by their ids; those that came without an id have one by their place."""
    items = [item for one in turn.rounds for item in (*one.given, *one.wrote)]
    named = {item.value.id: item for item in items if item.value.id}
    return named | {given_id(turn.id, index): item for index, item in enumerate(turn.given)}


def _lost(item_id: str, index: int) -> Item:
    raise NotFound(
        f"Item with id '{item_id[:ID_CHARS_MAX]}' not found.",
        code="item_not_found",
        param=f"input[{index}].id",
    )


class Unsealed(Struct, frozen=True):
    """What was given, with what we had sealed in it opened; `earlier` is what a compaction has taken the place of, and
    then what stands for it."""

    given: tuple[Item, ...]
    earlier: tuple[Round, ...] = ()


def unseal(given: tuple[Item, ...], owner: Owner, seals: Seals) -> Unsealed:
    """Open what only we can read. A thought that we cannot open stays closed, and the model does without; a compaction
    that we cannot open would be a lost history, and is refused."""
    earlier: tuple[Round, ...] = ()
    shadowed: list[Item] = []
    items: list[Item] = []
    for index, item in enumerate(given):
        match item.value:
            case Reasoning(encrypted_content=str() as sealed, content=content) if not content:
                items.append(_with_thought(item, seals.open(owner, sealed)))
            case Compaction(encrypted_content=sealed) | CompactionSummary(encrypted_content=sealed):
                body = seals.open(owner, sealed)
                compacted = _compacted(body, index)
                meant = structs.replace(summary_message(compacted), id=item.value.id)
                items.append(Item(item.raw, meant))
                if compacted.kind == "chain":
                    shadowed += items
                    items = []
                    stand = Round(stand_in(compacted), is_fresh=True)
                    earlier = (Round(tuple(shadowed)), stand)
            case _:
                items.append(item)
    return Unsealed(tuple(items), earlier)


def _with_thought(item: Item, body: bytes | None) -> Item:
    if body is None:
        return item
    thought = structs.replace(item.value, content=[ReasoningText(text=body.decode())])
    return Item(item.raw, thought)


def _compacted(body: bytes | None, index: int) -> Compacted:
    compacted = None if body is None else from_bytes(body)
    if compacted is None:
        raise InvalidRequest(
            "The encrypted content of this compaction could not be verified.",
            code="invalid_encrypted_content",
            param=f"input[{index}].encrypted_content",
        )
    return compacted


async def decode_items(
    raws: Sequence[Raw], tally: Tally, path: str = "input", known: tuple[Item, ...] = ()
) -> tuple[Item, ...]:
    """These items, decoded in slices so that a large input does not hold the event loop for long. The first ones may
    be `known`."""
    if len(raws) > ITEMS_MAX:
        raise InvalidRequest(f"Too many input items: {len(raws)}, at most {ITEMS_MAX}.", param=path)
    tally.items_validated += len(raws) - len(known)
    items = [*known]
    held = 0
    for index, raw in enumerate(raws[len(known) :], len(known)):
        size = memoryview(raw).nbytes
        items.append(await off_loop(size > LONG_ITEM_BYTES, decode_item, raw, f"{path}[{index}]"))
        held += size
        if held > SLICE_BYTES:
            held = 0
            await asyncio.sleep(0)
    return tuple(items)


async def _find_parent(create: Create, caller: Caller, tally: Tally) -> Turn | None:
    """The parent that the request names, or a refusal."""
    if caller.joined is not None:
        return caller.joined.tip
    parent_id = create.previous_response_id
    if parent_id is None:
        return None
    parent = await caller.turns.find(caller.owner, parent_id)
    tally.found_in = "missing" if parent is None else "store"
    if parent is None:
        raise parent_not_found(parent_id)
    return parent
