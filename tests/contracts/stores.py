"""Every store, made the same way for all contract suites: its parts, its rows, its age."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from segue.stores.shared_limits import MemorySharedLimits, SqliteSharedLimits

from segue.stores.conversations import MemoryConversations, SqliteConversations
from segue.stores.database import SqliteDatabase
from segue.stores.layered import LayeredIdempotencyKeys, LayeredMaintenance, LayeredTurns
from segue.stores.memory import (
    MemoryEventLog,
    MemoryIdempotencyKeys,
    MemoryKeys,
    MemoryLedger,
    MemoryMaintenance,
    MemoryTurns,
)
from segue.stores.pool import PostgresDatabase
from segue.stores.postgres import (
    PostgresConversations,
    PostgresEventLog,
    PostgresIdempotencyKeys,
    PostgresKeys,
    PostgresLedger,
    PostgresMaintenance,
    PostgresSharedLimits,
    PostgresTurns,
)
from segue.stores.sqlite import (
    SqliteEventLog,
    SqliteIdempotencyKeys,
    SqliteKeys,
    SqliteLedger,
    SqliteMaintenance,
    SqliteTurns,
)
from segue.turn.seams import (
    Conversations,
    EventLog,
    IdempotencyKeys,
    Keys,
    Ledger,
    Maintenance,
    SharedLimits,
    Turns,
)
from segue.turn.values import UsageEntry
from tests.postgres import PostgresServer

PLENTY = 1 << 30
# Where a store remembers when something happened.
TIMES = {
    "turns": "saved_at",
    "events": "logged_at",
    "claims": "claimed_at",
    "erased": "erased_at",
}


class Clock:
    """A clock that a test may put forward. Memory compares it with when turns began."""

    def __init__(self) -> None:
        self.now = 1_700_000_100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Stores:
    """One store as one process has it."""

    turns: Turns
    ledger: Ledger
    log: EventLog
    idempotency_keys: IdempotencyKeys
    conversations: Conversations
    maintenance: Maintenance
    entries: Callable[[], Awaitable[list[UsageEntry]]]
    age: Callable[[int], Awaitable[None]]
    # Ends as a crash does: nothing is said to anybody.
    crash: Callable[[], Awaitable[None]]
    # Damages the row of a turn.
    spoil: Callable[[str], Awaitable[object]]
    keys: Keys
    shared_limits: SharedLimits
    now: Callable[[], float] = time.time


KINDS = ["memory", "sqlite", "postgres", "layered"]
SHARED = ["sqlite", "postgres"]


@asynccontextmanager
async def open_stores(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[Callable[[], Awaitable[Stores]]]:
    """A way to open the same store, as often as processes would; all are closed at the end."""
    opened: list[SqliteDatabase | PostgresDatabase] = []
    server: PostgresServer | None = None
    url = ""
    if kind == "postgres":
        server = request.getfixturevalue("postgres")
        url = await server.make_database()

    async def open_one() -> Stores:
        if kind == "memory":
            return in_memory()
        if server is not None:
            postgres = await PostgresDatabase.open(url)
            opened.append(postgres)
            return in_postgres(postgres, server, url)
        path = tmp_path / "turns.sqlite"
        sqlite = await SqliteDatabase.open(path)
        opened.append(sqlite)
        return in_sqlite(sqlite, path, is_layered=kind == "layered")

    try:
        yield open_one
    finally:
        for database in opened:
            await database.close()
        if server is not None:
            await server.drop_database(url)


def in_memory() -> Stores:
    clock = Clock()
    ledger = MemoryLedger()
    log, idempotency_keys = MemoryEventLog(PLENTY, clock), MemoryIdempotencyKeys(clock=clock)
    turns = MemoryTurns(
        PLENTY, stored_only=True, ledger=ledger, on_erase=[log.erase, idempotency_keys.erase]
    )

    async def entries() -> list[UsageEntry]:
        return ledger.entries

    async def age(seconds: int) -> None:
        clock.now += seconds

    async def crash() -> None:
        raise AssertionError("memory dies with its process")

    async def spoil(_: str) -> None:
        raise AssertionError("memory has no rows")

    maintenance = MemoryMaintenance(turns, log, idempotency_keys, clock)
    conversations, keys = MemoryConversations(PLENTY), MemoryKeys(clock)
    return Stores(
        turns,
        ledger,
        log,
        idempotency_keys,
        conversations,
        maintenance,
        entries,
        age,
        crash,
        spoil,
        keys,
        MemorySharedLimits(clock),
        clock,
    )


def in_sqlite(database: SqliteDatabase, path: Path, *, is_layered: bool) -> Stores:
    def ask(query: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(path)) as connection, connection:
            return connection.execute(query).fetchall()

    async def entries() -> list[UsageEntry]:
        columns = ", ".join(UsageEntry.__struct_fields__)
        rows = await asyncio.to_thread(ask, f"SELECT {columns} FROM usage")
        return [UsageEntry(*row) for row in rows]  # type: ignore[arg-type]

    async def age(seconds: int) -> None:
        for table, column in TIMES.items():
            await asyncio.to_thread(ask, f"UPDATE {table} SET {column} = {column} - {seconds}")

    async def crash() -> None:
        # The kernel lets go of a dead process's lock; the file stays.
        import fcntl

        fcntl.flock(database.lease.descriptor, fcntl.LOCK_UN)

    async def spoil(turn_id: str) -> None:
        await asyncio.to_thread(ask, f"UPDATE turns SET history = x'00ff' WHERE id = '{turn_id}'")

    turns: Turns = SqliteTurns(database)
    idempotency_keys: IdempotencyKeys = SqliteIdempotencyKeys(database)
    maintenance: Maintenance = SqliteMaintenance(database)
    if is_layered:
        near = MemoryTurns(PLENTY, stored_only=True)
        turns = LayeredTurns(near, turns)
        idempotency_keys = LayeredIdempotencyKeys(MemoryIdempotencyKeys(), idempotency_keys)
        maintenance = LayeredMaintenance(near, maintenance)
    return Stores(
        turns,
        SqliteLedger(database),
        SqliteEventLog(database),
        idempotency_keys,
        SqliteConversations(database),
        maintenance,
        entries,
        age,
        crash,
        spoil,
        SqliteKeys(database),
        SqliteSharedLimits(database),
    )


def in_postgres(database: PostgresDatabase, server: PostgresServer, url: str) -> Stores:
    async def entries() -> list[UsageEntry]:
        columns = ", ".join(UsageEntry.__struct_fields__)
        return [UsageEntry(*row) for row in await server.ask(f"SELECT {columns} FROM usage", url)]

    async def age(seconds: int) -> None:
        for table, column in TIMES.items():
            await server.ask(f"UPDATE {table} SET {column} = {column} - {seconds}", url)

    async def crash() -> None:
        # It is not heard of for a minute.
        late = f"UPDATE workers SET seen_at = seen_at - 60 WHERE id = '{database.worker}'"
        await server.ask(late, url)

    async def spoil(turn_id: str) -> None:
        await server.ask(rf"UPDATE turns SET history = '\x00ff' WHERE id = '{turn_id}'", url)

    return Stores(
        PostgresTurns(database),
        PostgresLedger(database),
        PostgresEventLog(database),
        PostgresIdempotencyKeys(database),
        PostgresConversations(database),
        PostgresMaintenance(database),
        entries,
        age,
        crash,
        spoil,
        PostgresKeys(database),
        PostgresSharedLimits(database),
    )
