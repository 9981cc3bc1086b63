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
