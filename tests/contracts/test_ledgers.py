"""What every `Ledger` promises: each turn is recorded once, however often it is told."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from segue.limits import Spent
from segue.seams.history import CONTAINERS, UsageEntry
from segue.seams.store import UsageTotal
from tests.contracts.stores import Stores, open_stores
from tests.contracts.turns import OWNER, make_turn

ENTRY = UsageEntry("t", OWNER, "tiny", "completed", 7, 3, 5, 1_700_000_001)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def books(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async with open_stores(request.param, request, tmp_path) as open_one:
        yield await open_one()


async def test_entry_told_often_is_recorded_once(books: Stores) -> None:
    other = msgspec.structs.replace(ENTRY, turn_id="u")
    await books.ledger.settle([ENTRY, ENTRY])
    await asyncio.gather(*[books.ledger.settle([ENTRY, other]) for _ in range(10)])
    assert sorted(await books.entries(), key=lambda entry: entry.turn_id) == [ENTRY, other]


async def test_first_word_counts(books: Stores) -> None:
    await books.ledger.settle([ENTRY])
    await books.ledger.settle([msgspec.structs.replace(ENTRY, output_tokens=999)])
    assert await books.entries() == [ENTRY]


async def test_nothing_to_settle_is_nothing_done(books: Stores) -> None:
    await books.ledger.settle([])
    assert await books.entries() == []


async def test_stored_turn_is_recorded_by_its_save_and_only_once(books: Stores) -> None:
    turn = make_turn("t")
    await books.turns.save(turn)
    await books.turns.save(turn)
    await books.ledger.settle([ENTRY])
    assert await books.entries() == [ENTRY]


async def test_turn_is_recorded_when_it_has_ended(books: Stores) -> None:
    await books.turns.save(make_turn("t", status="in_progress"))
    assert await books.entries() == []
    await books.turns.save(make_turn("t"))
    assert await books.entries() == [ENTRY]


async def test_usage_outlives_a_deleted_turn(books: Stores) -> None:
    await books.turns.save(make_turn("t"))
    await books.turns.delete(OWNER, "t")
    assert await books.entries() == [ENTRY]


async def test_report_adds_up_by_day_owner_and_model(books: Stores) -> None:
    day = 86_400
    noon = 19_675 * day + day // 2
    await books.ledger.settle(
        [
            UsageEntry("a", OWNER, "tiny", "completed", 10, 4, 2, noon),
            UsageEntry("b", OWNER, "tiny", "cancelled", 1, 0, 1, noon + day // 2 - 1, 3),
            UsageEntry("c", OWNER, "tiny", "failed", 5, 5, 0, noon + day // 2),
            UsageEntry("d", OWNER, "large", "completed", 7, 0, 3, noon),
            UsageEntry("e", "eve", "tiny", "completed", 2**33, 0, 3, noon),
            UsageEntry("f", OWNER, "tiny", "completed", 9, 9, 9, noon - day),
        ]
    )
    mine = [
        UsageTotal("2023-11-14", OWNER, "large", 1, 7, 0, 3),
        UsageTotal("2023-11-14", OWNER, "tiny", 2, 11, 4, 3, 3),
        UsageTotal("2023-11-15", OWNER, "tiny", 1, 5, 5, 0),
    ]
    theirs = UsageTotal("2023-11-14", "eve", "tiny", 1, 2**33, 0, 3)
    assert await books.ledger.report(OWNER, noon - 1) == mine
    assert await books.ledger.report(None, noon) == [mine[0], mine[1], theirs, mine[2]]
    assert await books.ledger.report("\ud800", 0) == []
    assert await books.ledger.report("nobody", 0) == []
    assert await books.ledger.report(None, noon + 2 * day) == []


async def test_use_of_containers_is_a_row_that_its_successor_replaces(books: Stores) -> None:
    first = UsageEntry("u 1", OWNER, "", CONTAINERS, 0, 0, 0, ENTRY.ended_at, 0, 60.5, 0.25, 7)
    second = msgspec.structs.replace(first, container_s=121.0, cpu_s=0.5, egress_bytes=1 << 40)
    other = msgspec.structs.replace(first, turn_id="u 2")
    await books.ledger.settle([ENTRY, first])
    await books.ledger.settle([second])
    await asyncio.gather(*[books.ledger.settle([second, other]) for _ in range(4)])
    mine, turns = await books.ledger.report(OWNER, ENTRY.ended_at)
    assert mine == UsageTotal("2023-11-14", OWNER, "", 0, 0, 0, 0, 0, 181.5, 0.75, (1 << 40) + 7)
    assert (turns.model, turns.turns, turns.container_s) == (ENTRY.model, 1, 0)
    # A turn is still told once.
    await books.ledger.settle([msgspec.structs.replace(ENTRY, container_s=9.0)])
    assert (await books.ledger.report(OWNER, ENTRY.ended_at))[1] == turns


async def test_tokens_of_keys_and_owners_add_up_by_day_and_month(books: Stores) -> None:
    day = 19_675
    first = day - 10

    def entry(name: str, owner: str, key_id: str, at_day: int, tokens: int) -> UsageEntry:
        return UsageEntry(
            name, owner, "tiny", "completed", tokens, 9, 1, at_day * 86_400 + 5, key_id=key_id
        )

    entries = [
        entry("a", OWNER, "key_a", day, 10),
        entry("b", OWNER, "key_a", first, 100),
        entry("c", OWNER, "key_b", day, 1_000),
        entry("d", OWNER, "", day - 1, 10_000),
        entry("e", OWNER, "key_a", first - 1, 2**40),
        entry("f", "eve", "key_e", day, 2**33),
    ]
    await asyncio.gather(*[books.ledger.settle([one]) for one in entries])
    await books.ledger.settle(entries)
    assert await books.ledger.spent(OWNER, "key_a", day, first) == Spent(11, 112, 1_012, 11_114)
    assert await books.ledger.spent(OWNER, "key_b", day, first) == Spent(
        1_001, 1_001, 1_012, 11_114
    )
    assert await books.ledger.spent("eve", "key_e", day, first) == Spent(*[2**33 + 1] * 4)
    assert await books.ledger.spent("nobody", "key", day, first) == Spent()


async def test_saved_turn_is_spent_once(books: Stores) -> None:
    turn = msgspec.structs.replace(
        make_turn("t"), usage=msgspec.structs.replace(ENTRY, key_id="key_a")
    )
    await books.turns.save(turn)
    await books.turns.save(turn)
    day = ENTRY.ended_at // 86_400
    assert await books.ledger.spent(OWNER, "key_a", day, day) == Spent(12, 12, 12, 12)


async def test_report_tells_keys_apart_and_ends_where_it_is_asked_to(books: Stores) -> None:
    day = 19_675 * 86_400
    rows = [
        UsageEntry(name, OWNER, "tiny", "completed", 1, 0, 2, day + at, key_id=key)
        for name, key, at in (("a", "key_a", 0), ("b", "key_b", 0), ("c", "key_b", 86_400))
    ]
    await books.ledger.settle(rows)
    first = [
        UsageTotal("2023-11-14", OWNER, "tiny", 1, 1, 0, 2, key_id=key)
        for key in ("key_a", "key_b")
    ]
    assert await books.ledger.report(OWNER, day, day + 86_400) == first
