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

from segue.seams.history import UsageEntry
from segue.stores.layered import LayeredStore
from segue.stores.memory import MemoryStore
from segue.stores.postgres import PostgresStore
from segue.stores.postgres_database import PostgresDatabase
from segue.stores.sqlite import SqliteStore
from segue.stores.sqlite_database import SqliteDatabase
from segue.stores.store import Store
from tests.pgbouncer import POOLED
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
    """One store as one process has it, and what a test does to it from outside."""

    store: Store
    entries: Callable[[], Awaitable[list[UsageEntry]]]
    age: Callable[[int], Awaitable[None]]
    # Ends as a crash does: nothing is said to anybody.
    crash: Callable[[], Awaitable[None]]
    # Damages the row of a turn.
    spoil: Callable[[str], Awaitable[object]]
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.turns = self.store.turns
        self.listing = self.store.listing
        self.ledger = self.store.ledger
        self.log = self.store.events
        self.idempotency_keys = self.store.idempotency_keys
        self.conversations = self.store.conversations
        self.keys = self.store.keys
        self.files = self.store.files
        self.shared_limits = self.store.shared_limits
        self.maintenance = self.store.maintenance


KINDS = ["memory", "sqlite", "postgres", "layered", *POOLED]
SHARED = ["sqlite", "postgres", *POOLED]


@asynccontextmanager
async def open_stores(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[Callable[[], Awaitable[Stores]]]:
    """A way to open the same store, as often as processes would; all are closed at the end."""
    opened: list[Stores] = []
    server: PostgresServer | None = None
    url, where = "", {}
    if kind in ("postgres", "pooled"):
        server = request.getfixturevalue("postgres")
        url = await server.make_database()
        pooler = request.getfixturevalue("pooler") if kind == "pooled" else None
        where = {"url": pooler.url(url), "direct": url} if pooler else {"url": url}

    async def open_one() -> Stores:
        if kind == "memory":
            stores = in_memory()
        elif server is not None:
            stores = in_postgres(await PostgresDatabase.open(**where), server, url)
        else:
            path = tmp_path / "turns.sqlite"
            database = await SqliteDatabase.open(path)
            stores = in_sqlite(database, path, is_layered=kind == "layered")
        opened.append(stores)
        return stores

    try:
        yield open_one
    finally:
        for stores in opened:
            await stores.store.close()
        if server is not None:
            await server.drop_database(url)


def in_memory() -> Stores:
    clock = Clock()
    store = MemoryStore(PLENTY, clock)

    async def entries() -> list[UsageEntry]:
        return store.ledger.entries

    async def age(seconds: int) -> None:
        clock.now += seconds

    async def crash() -> None:
        raise AssertionError("memory dies with its process")

    async def spoil(_: str) -> None:
        raise AssertionError("memory has no rows")

    return Stores(store, entries, age, crash, spoil, clock)


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

    store = SqliteStore(database)
    return Stores(LayeredStore(store, PLENTY) if is_layered else store, entries, age, crash, spoil)


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

    return Stores(PostgresStore(database), entries, age, crash, spoil)
