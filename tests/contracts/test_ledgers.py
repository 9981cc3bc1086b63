"""What every `Ledger` promises: each turn is recorded once, however often it is told."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from segue.stores.database import SqliteDatabase
from segue.stores.memory import MemoryLedger, MemoryTurns
from segue.stores.sqlite import SqliteLedger, SqliteTurns
from segue.turn.seams import Ledger, Turns
from segue.turn.values import Entry
from tests.contracts.turns import OWNER, make_turn

ENTRY = Entry("t", OWNER, "tiny", "completed", 7, 3, 5, 1_700_000_001)


@dataclass
class Books:
    """A ledger, the turns beside it, and a look at its rows."""

    ledger: Ledger
    turns: Turns
    rows: Callable[[], list[Entry]]


def rows_of(path: Path) -> list[Entry]:
    connection = sqlite3.connect(path)
    try:
        columns = ", ".join(Entry.__struct_fields__)
        return [Entry(*row) for row in connection.execute(f"SELECT {columns} FROM usage")]
    finally:
        connection.close()


@pytest.fixture(params=["memory", "sqlite"])
async def books(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Books]:
    if request.param == "memory":
        ledger = MemoryLedger()
        turns = MemoryTurns(1 << 20, stored_only=True, ledger=ledger)
        yield Books(ledger, turns, lambda: ledger.entries)
        return
    path = tmp_path / "turns.sqlite"
    database = await SqliteDatabase.open(path)
    yield Books(SqliteLedger(database), SqliteTurns(database), lambda: rows_of(path))
    await database.close()


async def test_entry_told_often_is_recorded_once(books: Books) -> None:
    other = msgspec.structs.replace(ENTRY, turn_id="u")
    await books.ledger.settle([ENTRY, ENTRY])
    await asyncio.gather(*[books.ledger.settle([ENTRY, other]) for _ in range(10)])
    assert sorted(books.rows(), key=lambda entry: entry.turn_id) == [ENTRY, other]


async def test_first_word_counts(books: Books) -> None:
    await books.ledger.settle([ENTRY])
    await books.ledger.settle([msgspec.structs.replace(ENTRY, output_tokens=999)])
    assert books.rows() == [ENTRY]


async def test_nothing_to_settle_is_nothing_done(books: Books) -> None:
    await books.ledger.settle([])
    assert books.rows() == []


async def test_stored_turn_is_recorded_by_its_save_and_only_once(books: Books) -> None:
    turn = make_turn("t")
    await books.turns.save(turn)
    await books.turns.save(turn)
    await books.ledger.settle([ENTRY])
    assert books.rows() == [ENTRY]


async def test_turn_is_recorded_when_it_has_ended(books: Books) -> None:
    await books.turns.save(make_turn("t", status="in_progress"))
    assert books.rows() == []
    await books.turns.save(make_turn("t"))
    assert books.rows() == [ENTRY]


async def test_usage_outlives_a_deleted_turn(books: Books) -> None:
    await books.turns.save(make_turn("t"))
    await books.turns.delete(OWNER, "t")
    assert books.rows() == [ENTRY]
