"""What may be refused before anything is sent, by values: the whole way from a request to its plan."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from segue.dialects.messages import MessagesDialect
from segue.errors import InvalidRequest, NotFound
from segue.memory.budget import Memory
from segue.resent.render_cache import RenderCache
from segue.stores.memory_turns import MemoryTurns
from segue.turn.checks import NAME_BYTES_MAX, WRITTEN_BYTES_MAX
from segue.turn.plan import Arrival, Caller, Model, Plan, Receipt
from segue.turn.prepare import prepare
from segue.turn.references import REFERENCED_BYTES_MAX, REFERENCES_MAX
from segue.turn.resources import Resources
from segue.wire.codec import TOOLS_MAX, decode_create, decode_item
from tests.contracts.turns import OWNER, make_turn
from tests.turn.test_loop import ListEngine, OpenSeals

PICTURE = {
    "type": "message",
    "id": "msg_seen",
    "role": "user",
    "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}],
}


async def planned(caller: Caller, compacts: Any = None, **fields: Any) -> Plan:
    """The plan of a request for a model that sees no images, and refuses them."""
    engine, dialect = cast(Any, ListEngine([])), MessagesDialect()
    model = Model("m", engine, dialect, context_tokens_set=1_000, unseen="refuse")
    resources = Resources({"m": model}, cast(Any, OpenSeals()), RenderCache(0))
    create = decode_create(json.dumps({"model": "m", "store": False, **fields}).encode())
    return await prepare(
        Arrival(create, caller, Receipt(), compacts), resources, "resp_new", Memory().preparing(0)
    )


async def test_reference_to_a_picture_is_refused_like_the_picture() -> None:
    turns = MemoryTurns(10_000_000)
    parent = make_turn("resp_old", given=[decode_item(json.dumps(PICTURE).encode(), "input[0]")])
    caller = Caller(OWNER, turns, known=parent)

    for given in (PICTURE, {"type": "item_reference", "id": "msg_seen"}):
        with pytest.raises(InvalidRequest, match="does not support image or audio input"):
            await planned(caller, previous_response_id="resp_old", input=[given])


@pytest.mark.parametrize("compacts", [None, "window"])
async def test_trigger_alone_has_nothing_to_compact(compacts: str | None) -> None:
    caller = Caller(OWNER, MemoryTurns(10_000_000))

    with pytest.raises(InvalidRequest, match="nothing to compact"):
        await planned(caller, compacts, input=[{"type": "compaction_trigger"}])


async def test_stored_turn_cannot_name_items_of_an_unstored_one() -> None:
    said = {"type": "message", "id": "msg_said", "role": "user", "content": "Only in memory."}
    parent = make_turn(
        "resp_old", given=[decode_item(json.dumps(said).encode(), "input[0]")], is_stored=False
    )
    caller = Caller(OWNER, MemoryTurns(10_000_000), known=parent)
    fields = {
        "previous_response_id": "resp_old",
        "input": [{"type": "item_reference", "id": "msg_said"}],
    }

    plan = await planned(caller, **fields)
    assert plan.resolved.given[0].value.id == "msg_said"
    with pytest.raises(NotFound, match="Item with id 'msg_said' not found"):
        await planned(caller, **fields, store=True)


async def test_too_many_references_are_refused() -> None:
    given = [{"type": "item_reference", "id": "msg_said"}] * (REFERENCES_MAX + 1)
    with pytest.raises(InvalidRequest, match="Too many item references"):
        await planned(Caller(OWNER, MemoryTurns(10_000_000)), input=given)


@pytest.mark.parametrize("times", [1, 4])
async def test_references_that_stand_for_more_than_a_body_may_bring_are_refused(times: int) -> None:
    said = {"type": "message", "id": "msg_long", "role": "user", "content": "a" * 10_000_000}
    parent = make_turn("resp_old", given=[decode_item(json.dumps(said).encode(), "input[0]")])
    given = [{"type": "item_reference", "id": "msg_long"}] * times
    asked = planned(
        Caller(OWNER, MemoryTurns(10_000_000), known=parent),
        previous_response_id="resp_old",
        input=given,
    )
    if times * len(said["content"]) <= REFERENCED_BYTES_MAX:
        assert len((await asked).resolved.given) == times
        return
    with pytest.raises(InvalidRequest, match="referred to have more than"):
        await asked


@pytest.mark.parametrize("name", ["input", "instructions", "tools"])
async def test_what_is_written_as_one_piece_is_not_too_long(name: str) -> None:
    text = "a" * WRITTEN_BYTES_MAX
    function = {"type": "function", "name": "f", "description": text}
    for size in (WRITTEN_BYTES_MAX // 2, WRITTEN_BYTES_MAX + 1):
        given = [function | {"description": text[:size]}] if name == "tools" else "a" * size
        asked = planned(Caller(OWNER, MemoryTurns(10_000_000)), **({"input": "x"} | {name: given}))
        if size < WRITTEN_BYTES_MAX:
            await asked
            continue
        with pytest.raises(InvalidRequest, match=f"Invalid '{name}': .* at most") as refused:
            await asked
        assert refused.value.param == name


CHOICE = {"type": "allowed_tools", "mode": "auto"}
NAMED = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    "param, most, more",
    [
        ("user", "u" * NAME_BYTES_MAX, "u" * (NAME_BYTES_MAX + 1)),
        ("prompt_cache_key", "k" * NAME_BYTES_MAX, "k" * (NAME_BYTES_MAX + 1)),
        (
            "tool_choice.tools",
            CHOICE | {"tools": [NAMED] * TOOLS_MAX},
            CHOICE | {"tools": [NAMED] * (TOOLS_MAX + 1)},
        ),
    ],
)
async def test_what_each_snapshot_repeats_is_not_too_long(
    param: str, most: object, more: object
) -> None:
    field = param.partition(".")[0]
    caller = Caller(OWNER, MemoryTurns(10_000_000))
    await planned(caller, input="x", **{field: most})
    with pytest.raises(InvalidRequest, match="at most") as refused:
        await planned(caller, input="x", **{field: more})
    assert refused.value.param == param
