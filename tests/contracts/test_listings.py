"""What every `Listing` promises: the stored turns of one owner, the latest first."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contracts.stores import KINDS, Stores, open_stores
from tests.contracts.turns import OWNER, make_turn


@pytest.fixture(params=KINDS)
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async with open_stores(request.param, request, tmp_path) as open_one:
        yield await open_one()


async def test_newest_turns_of_an_owner_come_first_in_pages(stores: Stores) -> None:
    """By when they were saved first: ids begin with the tag of their worker, where there are several."""
    first = make_turn("resp_1")
    for turn in (first, make_turn("resp_3", first), make_turn("resp_2"), make_turn("resp_4")):
        await stores.turns.save(turn)
    await stores.turns.save(make_turn("resp_5", owner="another"))
    newest = stores.listing.newest
    assert list(await newest(OWNER, None, 9, is_tips=False)) == [
        "resp_4",
        "resp_2",
        "resp_3",
        "resp_1",
    ]
    # The first turn is continued by the third.
    assert list(await newest(OWNER, None, 9, is_tips=True)) == ["resp_4", "resp_2", "resp_3"]
    assert list(await newest(OWNER, None, 2, is_tips=True)) == ["resp_4", "resp_2"]
    assert list(await newest(OWNER, "resp_2", 2, is_tips=True)) == ["resp_3"]
    assert list(await newest(OWNER, "resp_5", 2, is_tips=True)) == []
    assert list(await newest("another", None, 9, is_tips=True)) == ["resp_5"]
    assert list(await newest("nobody\0", "\ud800", 9, is_tips=True)) == []


async def test_deleted_turns_are_not_listed(stores: Stores) -> None:
    parent = make_turn("resp_1")
    await stores.turns.save(parent)
    await stores.turns.save(make_turn("resp_2", parent))
    await stores.turns.delete(OWNER, "resp_2")
    assert list(await stores.listing.newest(OWNER, None, 9, is_tips=True)) == ["resp_1"]


async def test_stored_turn_is_weighed_alone_and_with_its_chain(stores: Stores) -> None:
    parent = make_turn("resp_1")
    await stores.turns.save(parent)
    await stores.turns.save(make_turn("resp_2", parent))
    weigh = stores.listing.stored_bytes
    alone = await weigh(OWNER, "resp_2", with_chain=False)
    assert 0 < alone < await weigh(OWNER, "resp_2", with_chain=True)
    assert await weigh(OWNER, "resp_1", with_chain=True) > 0
    for owner, turn_id in ((OWNER, "resp_3"), ("another", "resp_1"), ("nobody\0", "\ud800")):
        assert await weigh(owner, turn_id, with_chain=True) == 0
