"""What every `EventLog` promises: all events after a number, to the byte, or the word that some are missing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from segue.seams.store import Retention
from segue.wire.events import Event
from tests.contracts.stores import KINDS, Stores, open_stores
from tests.contracts.turns import NASTY, OWNER, make_turn


@pytest.fixture(params=KINDS)
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async with open_stores(request.param, request, tmp_path) as open_one:
        yield await open_one()


def events(first: int, last: int, text: str = "x") -> list[Event]:
    """Events with these numbers, as they would leave."""
    kinds = ("response.created", "response.output_text.delta", "response.completed")
    return [
        Event(kinds[number % 3], number, f'{{"n": {number},  "delta":"{text}"}}'.encode())
        for number in range(first, last + 1)
    ]


async def test_events_come_back_to_the_byte_from_any_number_on(stores: Stores) -> None:
    told = events(0, 99)
    for start in range(0, 100, 20):
        await stores.log.append(OWNER, "t", told[start : start + 20])
    for number in (-1, 0, 18, 19, 20, 57, 98):
        assert await stores.log.read_after(OWNER, "t", number) == told[number + 1 :]


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
async def test_nasty_events_come_back_to_the_byte(stores: Stores, text: str) -> None:
    told = events(0, 3, text)
    await stores.log.append(OWNER, "t", told)
    assert await stores.log.read_after(OWNER, "t", -1) == told


async def test_log_without_news_is_empty_and_an_absent_one_is_missing(stores: Stores) -> None:
    await stores.log.append(OWNER, "t", events(0, 4))
    assert await stores.log.read_after(OWNER, "t", 4) == []
    assert await stores.log.read_after(OWNER, "t", 1_000) == []
    assert await stores.log.read_after(OWNER, "none", -1) is None
    assert await stores.log.read_after("eve", "t", -1) is None


@pytest.mark.parametrize("odd", ["\ud800", "\0", "t\0", "' OR 1=1 --", "%"])
async def test_odd_names_are_absent_and_harmless(stores: Stores, odd: str) -> None:
    await stores.log.append(OWNER, "t", events(0, 1))
    assert await stores.log.read_after(OWNER, odd, -1) is None
    assert await stores.log.read_after(odd, "t", -1) is None
    await stores.log.delete(OWNER, odd)
    assert await stores.log.read_after(OWNER, "t", -1) == events(0, 1)


async def test_gap_is_never_passed_over(stores: Stores) -> None:
    await stores.log.append(OWNER, "t", events(0, 4))
    await stores.log.append(OWNER, "t", events(6, 9))
    assert await stores.log.read_after(OWNER, "t", -1) is None
    assert await stores.log.read_after(OWNER, "t", 4) is None
    assert await stores.log.read_after(OWNER, "t", 5) == events(6, 9)


async def test_batch_told_again_counts_once(stores: Stores) -> None:
    """A write whose answer was lost is told again, perhaps with more in it."""
    await stores.log.append(OWNER, "t", events(0, 4))
    await stores.log.append(OWNER, "t", events(0, 4))
    await stores.log.append(OWNER, "t", events(3, 6))
    await stores.log.append(OWNER, "t", events(3, 9))
    assert await stores.log.read_after(OWNER, "t", -1) == events(0, 9)


async def test_logs_of_two_owners_never_meet(stores: Stores) -> None:
    mine, theirs = events(0, 9, "mine"), events(0, 9, "theirs")
    await asyncio.gather(stores.log.append(OWNER, "t", mine), stores.log.append("eve", "t", theirs))
    assert await stores.log.read_after(OWNER, "t", -1) == mine
    assert await stores.log.read_after("eve", "t", -1) == theirs
    await stores.log.delete(OWNER, "t")
    assert await stores.log.read_after(OWNER, "t", -1) is None
    assert await stores.log.read_after("eve", "t", -1) == theirs


async def test_nothing_to_append_is_nothing_done(stores: Stores) -> None:
    await stores.log.append(OWNER, "t", [])
    assert await stores.log.read_after(OWNER, "t", -1) is None


async def test_log_goes_with_its_turn_and_does_not_come_back(stores: Stores) -> None:
    await stores.turns.save(make_turn("t", status="in_progress"))
    await stores.log.append(OWNER, "t", events(0, 4))
    await stores.turns.delete(OWNER, "t")
    await stores.log.append(OWNER, "t", events(5, 9))
    assert await stores.log.read_after(OWNER, "t", -1) is None
    assert await stores.log.read_after(OWNER, "t", 4) is None


async def test_old_logs_go_and_young_ones_stay(stores: Stores) -> None:
    await stores.log.append(OWNER, "old", events(0, 4))
    await stores.age(100)
    await stores.log.append(OWNER, "young", events(0, 4))
    while await stores.maintenance.sweep(Retention(events_s=50)):
        pass
    assert await stores.log.read_after(OWNER, "old", -1) is None
    assert await stores.log.read_after(OWNER, "young", -1) == events(0, 4)
