"""How is a PostgreSQL database reached?

In: pieces of work for a connection. Out: their results once they are committed, and errors of ours only.

**A pool.** Connections are made when they are needed and kept; statements are prepared on first use. A piece of
work is one statement as a rule, and so one transaction and one round trip; the server groups the commits of all
connections itself.

**Leaving early.** Work runs in a task of the pool, to its end. A caller that is cancelled only stops listening, so no
connection goes back half-read and the next one to use it never meets somebody else's rows (docs/hazards.md F35). A
connection that did not answer in time is thrown away.

**Losing the server.** Work that lost its connection is tried again on another one, with growing pauses, for as long as
SQLite would wait for a lock; then it is `Unavailable`. Everything that is asked here may be asked twice.
"""

from __future__ import annotations

import asyncio
import random
import re
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Literal, Protocol, Self, TypeVar

import asyncpg  # type: ignore[import-untyped]
import msgspec

from segue.errors import ApiError, StoreFailed, Unavailable
from segue.ids import new_id
from segue.stores.database import SQL, load_queries

T = TypeVar("T")

# A commit is one round trip; a few that wait for the disk together are grouped there. Servers allow about a hundred.
CONNECTIONS_MAX = 8
# Far above the turns that one process runs at once; beyond it the server has stopped, and callers should hear so.
WAITING_MAX = 4_096
CONNECT_S = 3.0
# Longer than any statement takes, checkpoints of a busy server included.
STATEMENT_S = 30.0
# How long lost connections are tried again, and the pauses between.
PATIENCE_S = 5.0
PAUSE_MIN_S = 0.05
PAUSE_MAX_S = 1.0
# Longer than a statement takes, shorter than a prober waits.
READY_S = 1.0
CLOSE_S = 5.0
# A process that has not been heard of this long is dead: several beats.
LEASE_S = 15

QUERIES = load_queries((SQL / "postgres_queries.sql").read_text("utf-8"))
COMMIT = {"full": "on", "relaxed": "off"}

# The world's doing, and likely to pass: connections, resources, an operator's hand, a server that has become a replica.
PASSING = (
    asyncpg.PostgresConnectionError,
    # A connection that the server ended while nobody used it.
    asyncpg.InternalClientError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.ReadOnlySQLTransactionError,
    OSError,
    TimeoutError,
)
# Two transactions got into each other's way; the loser tries again.
COLLIDING = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.ForeignKeyViolationError,
)


# The columns of a row, in order; whoever reads one says what they are.
Columns = tuple[object, ...]


class Connection(Protocol):
    """What we ask of a connection."""

    async def fetch(self, query: str, *values: object) -> Sequence[Columns]:
        """All rows."""

    async def fetchrow(self, query: str, *values: object) -> Columns | None:
        """The first row."""

    async def execute(self, query: str, *values: object) -> str:
        """Run it; returns the verb and how many rows it touched."""

    async def executemany(self, query: str, values: Sequence[Sequence[object]]) -> None:
        """Run it for each of these, all or nothing."""

    def transaction(self) -> AbstractAsyncContextManager[object]:
        """What is run inside is committed at its end, or not at all."""


Work = Callable[[Connection], Awaitable[T]]


class Collision(Unavailable):
    """Another transaction came between; trying again at once is likely to work."""


@contextmanager
def border() -> Iterator[None]:
    """Nothing foreign crosses: what goes wrong inside leaves as an error of ours."""
    try:
        yield
    except ApiError:
        raise
    except COLLIDING as error:
        raise Collision("The store cannot be reached at the moment.") from error
    except PASSING as error:
        raise Unavailable("The store cannot be reached at the moment.") from error
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise StoreFailed("The store could not do what it should.") from error
    except (OverflowError, ValueError, KeyError, zlib.error, msgspec.MsgspecError) as error:
        raise StoreFailed("The store could not do what it should.") from error


class PostgresDatabase:
    """A pool of connections to one database. Made by `open`."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self.worker = new_id("worker")
        self._pool = pool
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_closed = False
        # Shared by all who wait for the server to come back.
        self._pause_s = 0.0

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        durability: Literal["full", "relaxed"] = "full",
        connections_max: int = CONNECTIONS_MAX,
    ) -> Self:
        """Reach the database, and bring its tables up to date."""
        with border():
            pool = asyncpg.create_pool(
                url,
                min_size=0,
                max_size=connections_max,
                timeout=CONNECT_S,
                command_timeout=STATEMENT_S,
                # Nothing we do changes a session, so there is nothing to reset and no round trip for it.
                reset=_leave,
                server_settings={
                    "synchronous_commit": COMMIT[durability],
                    "application_name": "segue",
                },
            )
            await pool
        database = cls(pool)
        try:
            async with asyncio.timeout(STATEMENT_S):
                await database.run(migrate)
            await database.run(database.beat)
        except TimeoutError as error:
            pool.terminate()
            raise Unavailable("The store cannot be reached at the moment.") from error
        except BaseException:
            pool.terminate()
            raise
        return database

    async def run(self, work: Work[T]) -> T:
        """Do this on a connection of the pool; return when it is committed. It may be run more than once."""
        if self._is_closed:
            raise Unavailable("The store is closed.")
        if len(self._tasks) >= WAITING_MAX:
            raise Unavailable("Too many statements are waiting for the store.")
        task = asyncio.create_task(self._patiently(work))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    async def is_ready(self) -> bool:
        """Whether a statement would be taken now."""
        try:
            async with asyncio.timeout(READY_S):
                await self.run(lambda connection: connection.execute(QUERIES["ready"]))
        except (ApiError, TimeoutError):
            return False
        return True

    async def beat(self, connection: Connection) -> None:
        """Say that this process lives."""
        await connection.execute(QUERIES["beat"], self.worker)

    async def close(self) -> None:
        """Finish what waits, say that this process has left, and let go of the connections."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._tasks:
            await asyncio.wait(self._tasks)
        with suppress(ApiError), border():
            async with asyncio.timeout(CLOSE_S):
                await self._once(
                    lambda connection: connection.execute(QUERIES["leave"], self.worker)
                )
                await self._pool.close()
        self._pool.terminate()

    def _forget(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Its caller may have left; then nobody else asks.
            task.exception()

    async def _patiently(self, work: Work[T]) -> T:
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_S
        while True:
            try:
                result = await self._once(work)
            except Collision:
                if loop.time() > until:
                    raise
                await asyncio.sleep(random.uniform(0, PAUSE_MIN_S))
            except Unavailable:
                self._pause_s = min(PAUSE_MAX_S, max(PAUSE_MIN_S, 2 * self._pause_s))
                # Spread, so that those who wait do not all come back at once.
                pause_s = self._pause_s * random.uniform(0.5, 1)
                if self._is_closed or loop.time() + pause_s > until:
                    raise
                await asyncio.sleep(pause_s)
            else:
                self._pause_s = 0.0
                return result

    async def _once(self, work: Work[T]) -> T:
        with border():
            connection = await self._pool.acquire(timeout=PATIENCE_S)
            try:
                return await work(connection)
            except asyncpg.InterfaceError as error:
                # Said both of a connection that has gone and of a call that makes no sense.
                if connection.is_closed():
                    raise ConnectionResetError("the connection has gone") from error
                raise
            except (TimeoutError, asyncio.CancelledError, asyncpg.InternalClientError):
                # It is in the middle of something: whatever it still has to say, nobody may read it.
                connection.terminate()
                raise
            finally:
                await self._pool.release(connection)


async def _leave(_: Connection) -> None:
    """A session is as it was."""


def load_migrations() -> list[tuple[int, str]]:
    """Numbered scripts in order."""
    found: list[tuple[int, str]] = []
    for file in SQL.iterdir():
        if match := re.fullmatch(r"postgres_(\d{4})_\w+\.sql", file.name):
            found.append((int(match[1]), file.read_text("utf-8")))
    return sorted(found)


async def migrate(connection: Connection) -> None:
    """Run the scripts that this database has not seen, under a lock: of several processes that start together one does
    it."""
    migrations = load_migrations()
    await connection.execute("BEGIN")
    try:
        await connection.execute(QUERIES["lock_migrations"])
        await connection.execute(QUERIES["make_migrations"])
        row = await connection.fetchrow(QUERIES["version"])
        version = row[0] if row is not None else 0
        assert isinstance(version, int)
        if version > migrations[-1][0]:
            raise StoreFailed("The database was written by a newer version of Segue.")
        for number, script in migrations:
            if number > version:
                await connection.execute(script)
                await connection.execute(QUERIES["note_migration"], number)
        await connection.execute("COMMIT")
    except BaseException:
        with suppress(Exception):
            await connection.execute("ROLLBACK")
        raise


def touched(status: str) -> int:
    """How many rows a statement touched, from what `execute` returns."""
    return int(status.rpartition(" ")[2])
