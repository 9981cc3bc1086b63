"""What is remembered in one SQLite file: turns, and usage in the same transactions.

In: turns to save, owners and ids to find. Out: turns, and errors of ours only. How a file is written and read beside
the loop is `database`'s question; here are the rows.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache, partial

import msgspec

from segue.stores.database import QUERIES, SqliteDatabase, border
from segue.stores.records import Part, Record, pack, unpack
from segue.turn.settle import entry_of
from segue.turn.values import Entry, Owner, Turn

# A turn's id, its parent's id, history, response, and the numbers of its instructions and tools.
Row = tuple[str, str | None, bytes, bytes, int | None, int | None]


class SqliteTurns:
    """Stored turns in a database."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn with its chain, as far as the chain was stored and not deleted."""
        return await self._load(QUERIES["find"], owner, turn_id)

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn alone."""
        return await self._load(QUERIES["read"], owner, turn_id)

    async def save(self, turn: Turn) -> None:
        """Make the turn and its usage durable, in one transaction. A second save replaces the
        first."""
        assert turn.is_stored, "a turn that is not to be stored has reached the database"
        with border():
            record = pack(turn)
        entry = entry_of(turn.owner, turn.response)
        await self._database.write(lambda writer: write_turn(writer, turn, record, entry))

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        """Erase the turn's row, and the parts that nobody else uses."""
        if not is_text(owner, turn_id):
            return False
        key = {"owner": owner, "id": turn_id}

        def erase(writer: sqlite3.Connection) -> bool:
            return writer.execute(QUERIES["delete"], key).rowcount > 0

        return await self._database.write(erase, is_erasing=True)

    async def _load(self, query: str, owner: Owner, turn_id: str) -> Turn | None:
        if not is_text(owner, turn_id):
            return None
        return await self._database.read(lambda reader: load_chain(reader, query, owner, turn_id))


class SqliteLedger:
    """Usage in a database."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    async def settle(self, entries: Sequence[Entry]) -> None:
        """Record these turns, each at most once."""
        if entries:
            rows = [msgspec.structs.asdict(entry) for entry in entries]
            await self._database.write(lambda writer: write_usage(writer, rows))


def is_text(*words: str) -> bool:
    """Whether these can be in the file at all: half of a surrogate pair is no text, so nothing has
    that name."""
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        return False
    return True


def write_turn(writer: sqlite3.Connection, turn: Turn, record: Record, entry: Entry | None) -> None:
    """The rows of one turn: its parts, itself, its usage."""
    for part in (record.instructions, record.tools):
        if part is not None:
            writer.execute(QUERIES["save_part"], {"owner": turn.owner, **part._asdict()})
    row = {
        "owner": turn.owner,
        "id": turn.id,
        "parent_id": turn.parent_id,
        "history": record.history,
        "response": record.response,
        "instructions": record.instructions and record.instructions.digest,
        "tools": record.tools and record.tools.digest,
    }
    writer.execute(QUERIES["save"], row)
    if entry is not None:
        write_usage(writer, [msgspec.structs.asdict(entry)])


def write_usage(writer: sqlite3.Connection, rows: list[dict[str, object]]) -> None:
    """Rows of usage; those that are there already stay as they are."""
    writer.executemany(QUERIES["settle"], rows)


def load_chain(reader: sqlite3.Connection, query: str, owner: Owner, turn_id: str) -> Turn | None:
    """The turns that the query finds, linked from the oldest on."""
    found = reader.execute(query, {"owner": owner, "id": turn_id})
    rows: dict[str | None, Row] = {row[0]: row for row in found}
    chain: list[Row] = []
    above: str | None = turn_id
    while (row := rows.pop(above, None)) is not None:
        chain.append(row)
        above = row[1]
    part = cache(partial(load_part, reader, owner))
    turn: Turn | None = None
    for found_id, parent_id, history, response, instructions, tools in reversed(chain):
        record = Record(history, response, part(instructions), part(tools))
        turn = unpack((owner, found_id, parent_id, record), turn, is_whole=above is None)
    return turn


def load_part(reader: sqlite3.Connection, owner: Owner, part_id: int | None) -> Part | None:
    """A part by the number that a turn has for it."""
    if part_id is None:
        return None
    row = reader.execute(QUERIES["part"], {"owner": owner, "id": part_id}).fetchone()
    return Part(row[0], row[1])
