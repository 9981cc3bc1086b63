"""What every `Turns` promises, whichever way it remembers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from segue.seams.history import ancestors
from segue.seams.prompt import id_array
from segue.seams.store import Turns
from tests.contracts.stores import KINDS, open_stores
from tests.contracts.turns import (
    NASTY,
    OWNER,
    SAMPLES,
    item,
    kinds,
    make_chain,
    make_turn,
    meaning,
    rich_turn,
    said,
)


@pytest.fixture(params=KINDS)
async def turns(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Turns]:
    async with open_stores(request.param, request, tmp_path) as open_one:
        yield (await open_one()).turns


def test_samples_cover_every_type_of_item() -> None:
    assert kinds() <= set(SAMPLES)


@pytest.mark.parametrize("kind", SAMPLES)
async def test_item_of_each_type_comes_back_to_the_byte(turns: Turns, kind: str) -> None:
    turn = make_turn("t", given=[item(SAMPLES[kind])], wrote=[item(SAMPLES[kind])])
    await turns.save(turn)
    assert meaning(await turns.find(OWNER, "t")) == meaning(turn)
    assert meaning(await turns.read(OWNER, "t")) == meaning(turn)


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
async def test_nasty_text_comes_back_to_the_byte(turns: Turns, text: str) -> None:
    turn = make_turn("t", given=[said(text)], wrote=[said(text, "assistant")])
    await turns.save(turn)
    assert meaning(await turns.find(OWNER, "t")) == meaning(turn)


async def test_rounds_calls_and_numbers_come_back(turns: Turns) -> None:
    turn = rich_turn()
    await turns.save(turn)
    assert meaning(await turns.find(OWNER, "rich")) == meaning(turn)


async def test_sampled_ids_come_back_to_the_id(turns: Turns) -> None:
    ids = id_array([0, 1, 151_643, 2**31, 2**32 - 1, *range(3_000)])
    await turns.save(make_turn("t", ids=[ids]))
    found = await turns.find(OWNER, "t")
    assert found is not None
    assert found.rounds[0].ids == (ids,)
    assert found.rounds[0].ids[0].typecode == "I"


async def test_long_echoes_come_back(turns: Turns) -> None:
    tools = b'[{"type":"function","name":"' + b"n" * 19_000 + b'"}]'
    first = make_turn("a", tools=tools, instructions=b'"' + b"be brief " * 100 + b'"')
    second = make_turn("b", first, tools=tools)
    for turn in (first, second):
        await turns.save(turn)
        assert meaning(await turns.find(OWNER, turn.id)) == meaning(turn)


async def test_stranger_and_nobody_get_the_same_answer(turns: Turns) -> None:
    await turns.save(make_turn("t"))
    for owner, turn_id in [("eve", "t"), (OWNER, "none"), ("", "t"), (OWNER, ""), (OWNER, "T")]:
        assert await turns.find(owner, turn_id) is None
        assert await turns.read(owner, turn_id) is None
        assert await turns.delete(owner, turn_id) is False
    assert await turns.find(OWNER, "t") is not None


@pytest.mark.parametrize("odd", ["\ud800", "\0", "t\0", "' OR 1=1 --", "x" * 100_000, "%", "_"])
async def test_odd_names_are_absent_and_harmless(turns: Turns, odd: str) -> None:
    await turns.save(make_turn("t"))
    assert await turns.find(OWNER, odd) is None
    assert await turns.find(odd, "t") is None
    assert await turns.delete(OWNER, odd) is False


async def test_two_owners_may_use_the_same_id(turns: Turns) -> None:
    mine, theirs = make_turn("t", given=[said("mine")]), make_turn("t", owner="eve")
    await turns.save(mine)
    await turns.save(theirs)
    assert meaning(await turns.find(OWNER, "t")) == meaning(mine)
    assert await turns.delete(OWNER, "t") is True
    assert meaning(await turns.find("eve", "t")) == meaning(theirs)


async def test_parent_of_another_owner_is_no_ancestor(turns: Turns) -> None:
    await turns.save(make_turn("p", owner="eve"))
    await turns.save(replace(make_turn("c"), parent_id="p", is_whole=False))
    found = await turns.find(OWNER, "c")
    assert found is not None
    assert found.parent is None
    assert not found.is_whole


async def test_chain_of_500_is_found_whole_and_in_order(turns: Turns) -> None:
    chain = make_chain(500)
    await asyncio.gather(*[turns.save(turn) for turn in chain])
    found = await turns.find(OWNER, "t499")
    assert found is not None
    assert [meaning(turn) for turn in ancestors(found)] == [meaning(turn) for turn in chain]
    assert all(turn.is_whole for turn in ancestors(found))


async def test_forks_share_their_parent(turns: Turns) -> None:
    root = make_turn("root")
    left, right = make_turn("left", root), make_turn("right", root)
    for turn in (root, left, right):
        await turns.save(turn)
    for turn in (left, right):
        found = await turns.find(OWNER, turn.id)
        assert found is not None
        assert meaning(found.parent) == meaning(root)


async def test_reading_is_enough_for_one_turn(turns: Turns) -> None:
    root = make_turn("root")
    child = make_turn("child", root)
    await turns.save(root)
    await turns.save(child)
    assert meaning(await turns.read(OWNER, "child")) == meaning(child)


async def test_deleted_turn_is_gone_and_its_descendants_are_not_whole(turns: Turns) -> None:
    chain = make_chain(4)
    for turn in chain:
        await turns.save(turn)
    assert await turns.delete(OWNER, "t1") is True
    assert await turns.delete(OWNER, "t1") is False
    assert await turns.find(OWNER, "t1") is None
    assert await turns.read(OWNER, "t1") is None
    found = await turns.find(OWNER, "t3")
    assert found is not None
    assert [turn.id for turn in ancestors(found)] == ["t2", "t3"]
    assert not any(turn.is_whole for turn in ancestors(found))
    assert meaning(found) == meaning(chain[3])
    root = await turns.find(OWNER, "t0")
    assert root is not None
    assert root.is_whole


async def test_second_save_replaces_the_first(turns: Turns) -> None:
    root = make_turn("root")
    await turns.save(root)
    long = b"[" + b" " * 99 + b"]"
    await turns.save(make_turn("t", root, wrote=[], status="in_progress", tools=long))
    done = make_turn("t", root, instructions=long)
    await turns.save(done)
    found = await turns.find(OWNER, "t")
    assert meaning(found) == meaning(done)
    assert found is not None
    assert meaning(found.parent) == meaning(root)


async def test_stored_child_of_unstored_parent_is_kept_alone(turns: Turns) -> None:
    root = make_turn("root")
    secret = make_turn("secret", root, is_stored=False)
    child = make_turn("child", secret)
    grandchild = make_turn("grandchild", child)
    for turn in (root, child, grandchild):
        await turns.save(turn)
    assert await turns.find(OWNER, "secret") is None
    found = await turns.find(OWNER, "grandchild")
    assert found is not None
    assert meaning(found) == meaning(grandchild)
    assert [turn.id for turn in ancestors(found)] == ["child", "grandchild"]
    assert not found.is_whole


async def test_many_owners_at_once_never_see_one_another(turns: Turns) -> None:
    """Lookups that are cancelled in mid-air leave nothing behind for the next one (docs/inside/hazards.md F35)."""
    owners = [f"owner{number}" for number in range(20)]
    for owner in owners:
        await turns.save(make_turn("t", owner=owner, given=[said(f"canary {owner}")]))

    async def look(owner: str) -> None:
        found = await turns.find(owner, "t")
        assert found is not None
        assert f"canary {owner}".encode() in found.given[0].raw
        assert found.owner == owner

    for round_ in range(10):
        tasks = [asyncio.create_task(look(owner)) for owner in owners]
        await asyncio.sleep(0)
        for task in tasks[round_ % 3 :: 3]:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError)
