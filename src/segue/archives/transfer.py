"""How does everything that a SQLite file holds come into a PostgreSQL database, and the other way round?

In: a file with the tables of this version, which nobody else uses, and the address of a database. Out: how many rows of
each table were moved. All of it is one transaction: a transfer that is cut off has changed nothing, and can be begun
again. A database that a server uses, or that holds something already, is refused; while rows come in no server can
start on it, because each of them waits to join. Rows are the same in both; parts are known by their digests in one and
by numbers in the other.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg  # type: ignore[import-untyped]

from segue.errors import Misconfigured
from segue.seams.access import RingKey
from segue.stores.postgres_database import LEASE_S, QUERIES, PostgresDatabase

# Rows that are in memory at once; a turn may have megabytes.
ROWS = 200
# A table of ten million rows is counted in less.
COMMAND_S = 3_600.0

Note = Callable[[str, int, int], None]


class Table(NamedTuple):
    """A table of both, with the columns that are the same, in an order in which rows may come in."""

    name: str
    columns: tuple[str, ...]
    # In which order rows come in: turns in that of their age.
    order: str


# Not moved: leases, levels of limits, sums of usage (a trigger makes them), names of what was erased.
TABLES = (
    Table("parts", ("owner", "digest", "body"), "owner, digest"),
    Table(
        "turns",
        (
            *("owner", "id", "parent_id", "history", "response"),
            *("instructions", "tools", "worker", "saved_at"),
        ),
        "seq",
    ),
    Table(
        "events",
        ("owner", "turn_id", "first", "last", "body", "logged_at"),
        "owner, turn_id, first",
    ),
    Table("claims", ("owner", "key", "turn_id", "digest", "worker", "claimed_at"), "owner, key"),
    Table(
        "usage",
        (
            *("turn_id", "owner", "model", "status", "input_tokens", "cached_tokens"),
            *("output_tokens", "ended_at", "tool_calls"),
            *("container_s", "cpu_s", "egress_bytes", "key_id"),
        ),
        "turn_id",
    ),
    Table(
        "conversations",
        (
            *("owner", "id", "created_at", "metadata", "tip_id", "tip_items", "count"),
            *("version", "speaker", "worker"),
        ),
        "owner, id",
    ),
    Table(
        "shelved",
        ("owner", "conversation_id", "position", "item_id", "body"),
        "owner, conversation_id, position",
    ),
    Table(
        "keys",
        (
            *("id", "digest", "name", "owner", "scopes", "limits", "ring", "created_at"),
            *("revoked_at", "secret_start", "expires_at", "used_at"),
        ),
        "id",
    ),
    Table(
        "files",
        ("id", "owner", "filename", "purpose", "bytes", "created_at", "expires_at"),
        "id",
    ),
    Table(
        "skill_versions",
        (
            *("id", "owner", "skill_id", "name", "description", "bytes", "created_at"),
            *("version", "skill_created_at", "rank"),
        ),
        "skill_id, version",
    ),
)
PARTS = ("instructions", "tools")
# What is emptied first.
EVERY = (*(table.name for table in TABLES), "erased", "spending", "meters", "places")


async def into_postgres(
    file: Path, url: str, ring: Sequence[RingKey], note: Note, *, is_forced: bool
) -> dict[str, int]:
    """Move everything from this file into the database, with these seal keys, the newest first."""
    async with _alone(url) as connection:
        async with connection.transaction():
            await _take(connection, url)
            await _make_room(connection, is_forced=is_forced)
            if ring:
                await connection.execute("DELETE FROM ring")
                rows = [
                    (place, key.name, key.secret) for place, key in enumerate(reversed(ring), 1)
                ]
                columns = ["place", "name", "secret"]
                await connection.copy_records_to_table("ring", records=rows, columns=columns)
            with closing(sqlite3.connect(file)) as source:
                moved = {}
                for table in TABLES:
                    moved[table.name] = await _copy_in(connection, source, table, note)
        return moved


async def out_of_postgres(url: str, file: Path, note: Note) -> tuple[dict[str, int], list[RingKey]]:
    """Copy everything that the database held at one moment into this file, which has the tables of this version and no
    rows; and its seal keys, the newest first. Servers go on."""
    connection = await asyncpg.connect(url, command_timeout=COMMAND_S)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            ring = [RingKey(*row) for row in await connection.fetch(QUERIES["ring"])]
            with closing(sqlite3.connect(file)) as target, target:
                moved = {}
                for table in TABLES:
                    moved[table.name] = await _copy_out(connection, target, table, note)
        return moved, ring
    finally:
        await connection.close()


@asynccontextmanager
async def _alone(url: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to a database whose tables are those of this version, and that no server uses."""
    # Brings the tables up to date; its lease is given up again.
    database = await PostgresDatabase.open(url)
    await database.close()
    connection = await asyncpg.connect(url, command_timeout=COMMAND_S)
    try:
        yield connection
    except (asyncpg.PostgresError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise Misconfigured(
            f"restore: the database failed: {why}. Nothing in it is changed; run it again."
        ) from error
    finally:
        await connection.close()


async def _take(connection: asyncpg.Connection, url: str) -> None:
    """Keep servers out until the end of the transaction; whoever is in already is named."""
    await connection.execute("SELECT 1 FROM needs FOR UPDATE")
    alive = await connection.fetchval(
        "SELECT count(*) FROM workers WHERE claimed_by IS NULL AND seen_at >= seconds_now() - $1::bigint",
        LEASE_S,
    )
    if alive:
        raise Misconfigured(
            f"store: {alive} processes of a server use this database. Stop them first: segue stop. One that was killed "
            f"counts for {LEASE_S} s more."
        )


async def _make_room(connection: asyncpg.Connection, *, is_forced: bool) -> None:
    held = [
        table.name
        for table in TABLES
        if await connection.fetchval(f"SELECT EXISTS (SELECT 1 FROM {table.name})")
    ]
    if held and not is_forced:
        raise Misconfigured(
            f"restore: the database holds {', '.join(held)} already, which would be replaced. Name another --store, or "
            "replace: --force."
        )
    await connection.execute(f"TRUNCATE {', '.join(EVERY)}")


async def _copy_in(
    connection: asyncpg.Connection, source: sqlite3.Connection, table: Table, note: Note
) -> int:
    (total,) = source.execute(f"SELECT count(*) FROM {table.name}").fetchone()
    chosen = ", ".join(
        f"(SELECT digest FROM parts WHERE id = {table.name}.{name})" if name in PARTS else name
        for name in table.columns
    )
    rows = source.execute(f"SELECT {chosen} FROM {table.name} ORDER BY {table.order}")
    done = 0
    columns = list(table.columns)
    while some := [*islice(rows, ROWS)]:
        await connection.copy_records_to_table(table.name, records=some, columns=columns)
        done += len(some)
        note(f"Moving {table.name}", done, total)
    found = await connection.fetchval(f"SELECT count(*) FROM {table.name}")
    _check(table.name, total, found)
    return int(found)


async def _copy_out(
    connection: asyncpg.Connection, target: sqlite3.Connection, table: Table, note: Note
) -> int:
    total = await connection.fetchval(f"SELECT count(*) FROM {table.name}")
    values = ", ".join(
        f"(SELECT id FROM parts WHERE owner = ?1 AND digest = ?{number})"
        if name in PARTS
        else f"?{number}"
        for number, name in enumerate(table.columns, 1)
    )
    insert = f"INSERT INTO {table.name} ({', '.join(table.columns)}) VALUES ({values})"
    query = f"SELECT {', '.join(table.columns)} FROM {table.name} ORDER BY {table.order}"
    done = 0
    async for some in _read(connection, query):
        target.executemany(insert, some)
        done += len(some)
        note(f"Copying {table.name}", done, total)
    (found,) = target.execute(f"SELECT count(*) FROM {table.name}").fetchone()
    _check(table.name, total, found)
    return int(found)


async def _read(connection: asyncpg.Connection, query: str) -> AsyncIterator[list[tuple[Any, ...]]]:
    cursor = await connection.cursor(query)
    while rows := await cursor.fetch(ROWS):
        yield [tuple(row) for row in rows]


def _check(name: str, total: int, found: int) -> None:
    if total != found:
        raise Misconfigured(
            f"store: {found} of {total} rows of {name} have arrived. Nothing is changed."
        )
