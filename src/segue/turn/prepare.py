"""Everything that may be refused, before a word is said: validate -> find -> resolve -> admit.

A request in, a `Plan` out, or an error for the transport to answer. Short: no engine is asked and nothing is rendered.
"""

from __future__ import annotations

import asyncio
import time

from segue.errors import InvalidRequest, parent_not_found
from segue.ids import new_id
from segue.turn.admit import Models, Plan, admit
from segue.turn.resolve import resolve
from segue.turn.seams import Turns
from segue.turn.values import Owner, Tally, Turn
from segue.wire.codec import decode_item, user_message
from segue.wire.items import Item
from segue.wire.requests import Create

# How much JSON is decoded before the loop may serve somebody else: a fraction of a millisecond.
SLICE_BYTES = 64 * 1024
# An input of a million items is refused before its items are looked at.
ITEMS_MAX = 100_000


async def prepare(
    create: Create,
    models: Models,
    *,
    owner: Owner,
    turns: Turns,
    tally: Tally,
    known: Turn | None = None,
    lane: str = "",
) -> Plan:
    """A plan for this request. `known` is the parent where the caller has it at hand."""
    began = time.perf_counter()
    given = await _decode_given(create, tally)
    validated = time.perf_counter()
    parent = await _find_parent(create, owner, turns, tally, known)
    resolved = resolve(create, given, parent)
    tally.tool_decodes += resolved.did_decode_tools
    plan = admit(
        resolved,
        models,
        owner=owner,
        turn_id=new_id("resp"),
        now=int(time.time()),
        tally=tally,
        lane=lane,
    )
    tally.stage_s["validate"] = validated - began
    tally.stage_s["resolve"] = time.perf_counter() - validated
    return plan


async def _decode_given(create: Create, tally: Tally) -> tuple[Item, ...]:
    """The new items, decoded in slices so that a large input holds nobody up for long."""
    match create.input:
        case None:
            return ()
        case str() as text:
            tally.items_validated += 1
            return (user_message(text),)
        case raws:
            pass
    if len(raws) > ITEMS_MAX:
        raise InvalidRequest(
            f"Too many input items: {len(raws)}, at most {ITEMS_MAX}.", param="input"
        )
    tally.items_validated += len(raws)
    items: list[Item] = []
    held = 0
    for index, raw in enumerate(raws):
        held += memoryview(raw).nbytes
        items.append(decode_item(raw, f"input[{index}]"))
        if held > SLICE_BYTES:
            held = 0
            await asyncio.sleep(0)
    return tuple(items)


async def _find_parent(
    create: Create, owner: Owner, turns: Turns, tally: Tally, known: Turn | None
) -> Turn | None:
    """The parent that the request names, unless the caller knows it already; or a refusal."""
    parent_id = create.previous_response_id
    if parent_id is None:
        return None
    if known is not None:
        tally.found_in = "connection"
        return known
    parent = await turns.find(owner, parent_id)
    tally.found_in = "missing" if parent is None else "store"
    if parent is None:
        raise parent_not_found(parent_id)
    return parent
