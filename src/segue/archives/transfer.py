"""How does everything that a SQLite file holds come into a PostgreSQL database, and the other way round?

In: a file with the tables of this version, which nobody else uses, and the address of a database. All of it is
one transaction: a transfer that is cut off has changed nothing, and can be begun again. A database that a server uses,
or that holds something already, is refused; while rows come in no server can start on it, because each of them waits
to join. Rows are the same in both; parts are known by their digests in one and by numbers in the other.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]

from segue.errors import Misconfigured
from segue.seams.access import RingKey
from segue.stores.postgres_database import LEASE_S, QUERIES, PostgresDatabase
from segue.stores.sqlite_database import QUERIES as SQLITE

# Rows that are in memory at once; a turn may have megabytes.
ROWS = 200
# A table of ten million rows is counted in less.
COMMAND_S = 3_600.0

NoteMoved = Callable[[str, int, int], None]

# Each with the columns that are the same in both, in the order of the statements `move_out_…` and `move_in_…`. Not
# moved: leases, levels of limits, sums of usage (they are made again), names of what was erased.
TABLES = {
    "parts": "owner digest body",
    "turns": "owner id parent_id history response instructions tools worker saved_at",
    "events": "owner turn_id first last body logged_at",
    "claims": "owner key turn_id digest worker claimed_at",
    "usage": (
        "turn_id owner model status input_tokens cached_tokens output_tokens "
        "ended_at tool_calls container_s cpu_s egress_bytes key_id"
    ),
    "conversations": "owner id created_at metadata tip_id tip_items count version speaker worker",
    "shelved": "owner conversation_id position item_id body",
    "keys": "id digest name owner scopes limits ring created_at revoked_at secret_start expires_at used_at",
    "files": "id owner filename purpose bytes created_at expires_at",
    "skill_versions": "id owner skill_id name description bytes created_at version skill_created_at rank",
}


async def into_postgres(
    file: Path, url: str, ring: Sequence[RingKey], note: NoteMoved, *, is_forced: bool
) -> None:
    """Move everything from this file into the database, with these seal keys, the newest first."""
    async with _alone(url) as connection, connection.transaction():
        await connection.execute(QUERIES["keep_servers_out"])
        await _check_alone(connection)
        await _make_room(connection, is_forced=is_forced)
        if ring:
            await connection.execute(QUERIES["empty_ring"])
            rows = [(place, key.name, key.secret) for place, key in enumerate(reversed(ring), 1)]
            await _add(connection, "ring", "place name secret", rows)
        await connection.execute(QUERIES["stop_counting"])
        with closing(sqlite3.connect(file)) as source:
            expected = source.execute(SQLITE["count_rows"]).fetchone()
            for (name, columns), total in zip(TABLES.items(), expected, strict=True):
                cursor, done = source.execute(SQLITE[f"move_out_{name}"]), 0
                while rows := cursor.fetchmany(ROWS):
                    await _add(connection, name, columns, rows)
                    done += len(rows)
                    note(f"Moving {name}", done, total)
        await connection.execute(QUERIES["count_moved"])
        await connection.execute(QUERIES["go_on_counting"])
        _check(expected, await connection.fetchrow(QUERIES["count_rows"]))


async def out_of_postgres(url: str, file: Path, note: NoteMoved) -> list[RingKey]:
    """Copy everything that the database held at one moment into this file, which has the tables of this version and no
    rows; returns its seal keys, the newest first. Servers go on."""
    connection = await asyncpg.connect(url, command_timeout=COMMAND_S)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            expected = tuple(await connection.fetchrow(QUERIES["count_rows"]))
            with closing(sqlite3.connect(file)) as target, target:
                for name, total in zip(TABLES, expected, strict=True):
                    cursor, done = await connection.cursor(QUERIES[f"move_out_{name}"]), 0
                    while rows := await cursor.fetch(ROWS):
                        target.executemany(SQLITE[f"move_in_{name}"], [tuple(row) for row in rows])
                        done += len(rows)
                        note(f"Copying {name}", done, total)
                _check(expected, target.execute(SQLITE["count_rows"]).fetchone())
            return [RingKey(*row) for row in await connection.fetch(QUERIES["ring"])]
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


async def _check_alone(connection: asyncpg.Connection) -> None:
    alive = await connection.fetchval(QUERIES["live_workers"], LEASE_S)
    if alive:
        raise Misconfigured(
            f"store: {alive} processes of a server use this database. Stop them first: segue stop. One that was killed "
            f"counts for {LEASE_S} s more."
        )


async def _make_room(connection: asyncpg.Connection, *, is_forced: bool) -> None:
    counts = await connection.fetchrow(QUERIES["count_rows"])
    held = [name for name, count in zip(TABLES, counts, strict=True) if count]
    if held and not is_forced:
        raise Misconfigured(
            f"restore: the database holds {', '.join(held)} already, which would be replaced. Name another --store, or "
            "replace: --force."
        )
    await connection.execute(QUERIES["empty_all"])


async def _add(
    connection: asyncpg.Connection, name: str, columns: str, rows: Sequence[Sequence[object]]
) -> None:
    await connection.copy_records_to_table(name, records=rows, columns=columns.split())


def _check(expected: Sequence[int], found: Sequence[int]) -> None:
    """Refuse a table in which not every row has arrived: then nothing is changed."""
    for name, wanted, count in zip(TABLES, expected, found, strict=True):
        if wanted != count:
            raise Misconfigured(f"store: {count} of {wanted} rows of {name} have arrived.")
