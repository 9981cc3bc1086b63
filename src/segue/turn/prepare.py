"""May this request become a turn? All that may be refused before anything is sent: validate, find, resolve, admit.

A request in, a `Plan` out, or an error for the transport to answer. Short: nothing is rendered and no model is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import perf_counter

from msgspec import Raw

from segue.aio import off_loop
from segue.errors import InvalidRequest, parent_not_found
from segue.seams.access import Room
from segue.seams.history import Resent, Turn
from segue.turn.admit import admit
from segue.turn.checks import check_sizes
from segue.turn.plan import MANY_ITEMS, Arrival, Caller, Given, Model, Plan, Span, Tally
from segue.turn.references import replace_indirect
from segue.turn.resolve import resolve
from segue.turn.resources import Resources
from segue.wire.codec import (
    ITEMS_MAX,
    LARGE_BYTES,
    WITHOUT_RAW,
    check_item_ids,
    check_numbers,
    decode_item,
    user_message,
)
from segue.wire.items import Item, Message, contains_media
from segue.wire.requests import Create

# How much JSON is decoded before the event loop may do other work: a fraction of a millisecond.
SLICE_BYTES = 64 * 1024
# Decoding so much of one item takes some milliseconds.
LONG_ITEM_BYTES = 1024 * 1024
# Nothing in these is read as any JSON, but for what a text cites, where there may be few slow numbers.
PLAIN = WITHOUT_RAW | Message


async def prepare(arrival: Arrival, resources: Resources, turn_id: str, room: Room) -> Plan:
    """A plan for this request. What it reads by name is set aside in `room`. It holds a slot of the caller's quota:
    release it if the plan is not started."""
    quota = arrival.caller.quota
    if quota is not None:
        await quota.hold()
    try:
        return await _plan(arrival, resources, turn_id, room)
    except BaseException:
        if quota is not None:
            quota.release()
        raise


async def _plan(arrival: Arrival, resources: Resources, turn_id: str, room: Room) -> Plan:
    create = arrival.create
    caller = arrival.caller
    tally = Tally(bytes_received=arrival.receipt.bytes_received)
    began = perf_counter()
    check_sizes(create)
    given = await _read_input(arrival, resources, tally, room)
    validated = perf_counter()
    parent = await _find_parent(create, caller, tally)
    is_stored = create.store is not False
    given = await replace_indirect(given, parent, caller, resources, is_stored=is_stored)
    is_long = len(given.items) > MANY_ITEMS or arrival.receipt.bytes_read > LARGE_BYTES
    resolved = await off_loop(is_long, resolve, create, given, parent, resources.hosted, caller.may)
    if resolved.has_media:
        await _ask_whether_it_sees(resources.models.get(resolved.model))
    plan = admit(resolved, arrival, resources, turn_id, tally)
    tally.tool_decodes += resolved.tool_decodes
    tally.unserved_tools = resolved.head.tools.unserved
    tally.spans += (Span("validate", began, validated), Span("resolve", validated, perf_counter()))
    return plan


async def _read_input(arrival: Arrival, resources: Resources, tally: Tally, room: Room) -> Given:
    """The items of the request, decoded, with the contents of their URLs, after the new items of its conversation."""
    create = arrival.create
    caller = arrival.caller
    size = arrival.receipt.bytes_received
    resent: Resent | None = None
    items: tuple[Item, ...] = ()
    if isinstance(create.input, str):
        is_long = len(create.input) > LONG_ITEM_BYTES
        items = (await off_loop(is_long, user_message, create.input),)
        tally.items_validated += 1
    elif create.input is not None:
        cache = resources.prompt_cache
        known = await cache.known_items(caller.owner, create, size)
        tally.items_validated += len(create.input) if known is None else known.count(None)
        items = await decode_items(create.input, known=known)
        if known is not None:
            resent = await cache.recognise(caller.owner, create, items, known)
    looked_at = items if resent is None else resent.without_plain(items)
    has_media = await off_loop(len(looked_at) > MANY_ITEMS, contains_media, looked_at)
    if has_media and resources.hosted is not None:
        items = await resources.hosted.load().fetch(caller.owner, items, room)
    if caller.joined is not None:
        check_item_ids(items)
        items = (*caller.joined.new_items, *items)
        # The items of the conversation were not looked at: there may be files among them.
        has_media = True
    return Given(items, resent=resent, has_media=has_media)


async def decode_items(
    raws: Sequence[Raw], path: str = "input", known: Sequence[Item | None] | None = None
) -> tuple[Item, ...]:
    """These items, decoded in slices so that a large input does not hold the event loop for long. Some may be
    `known`."""
    if len(raws) > ITEMS_MAX:
        raise InvalidRequest(f"Too many input items: {len(raws)}, at most {ITEMS_MAX}.", param=path)
    items: list[Item | None] = [None] * len(raws) if known is None else [*known]
    held = slow = 0
    for index in [index for index, item in enumerate(items) if item is None]:
        raw = raws[index]
        size = memoryview(raw).nbytes
        place = f"{path}[{index}]"
        items[index] = item = await off_loop(size > LONG_ITEM_BYTES, decode_item, raw, place)
        if not isinstance(item.value, PLAIN):
            slow = await off_loop(size > LONG_ITEM_BYTES, check_numbers, item.raw, place, slow)
        held += size
        if held > SLICE_BYTES:
            held = 0
            await asyncio.sleep(0)
    return tuple([item for item in items if item is not None])


async def _find_parent(create: Create, caller: Caller, tally: Tally) -> Turn | None:
    """The parent that the request names, or a refusal."""
    if caller.known is not None:
        tally.found_in = "connection"
        return caller.known
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


async def _ask_whether_it_sees(model: Model | None) -> None:
    """An engine that started later than this process has not said yet whether its model sees images: ask it now."""
    if model is not None and model.sees is None and model.engine.facts.sees_images is None:
        await model.engine.is_ready()
