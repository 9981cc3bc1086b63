"""How is a PostgreSQL database reached?

In: functions that use a connection. Out: their results once they are committed, and only our own errors.

**A pool.** Connections are made when they are needed and kept; statements are prepared on first use. Such a function
runs one statement as a rule, and so one transaction and one round trip; the server groups the commits of all
connections itself.

**Cancelled callers.** Work runs in a task of the pool, to its end. A caller that is cancelled only stops waiting, so no
connection goes back half-read and its next user never gets another caller's rows (docs/inside/hazards.md F35). A
connection that did not answer in time is closed.

**A lease.** A row of `workers` says that this process lives, and names it in all that it writes. It is renewed on a
connection of its own, so that nothing else can hold it up. A process that could not renew it in time may have lost it:
then others have ended what it ran, and it goes on under a new name.

**A pooler.** One that shares sessions between transactions (PgBouncer) keeps neither prepared statements nor settings
of a session. Through it all work is a transaction that brings its settings along, nothing is prepared by name, and the
lease is renewed on a connection to the server itself.

**A lost server.** Work that lost its connection is tried again on another one, with growing pauses, for as long as
SQLite would wait for a lock; then it is `Unavailable`. So everything that is run here may run twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from typing import Literal, Protocol, Self, TypeVar

import asyncpg  # type: ignore[import-untyped]
import msgspec

from segue.errors import ApiError, Unavailable
from segue.ids import new_id
from segue.stores.records import is_text
from segue.stores.sql_files import (
    ROWS_WRITTEN,
    Abilities,
    load_migrations,
    load_queries,
    newer_database,
    older_processes,
    store_failed,
)

T = TypeVar("T")

log = logging.getLogger(__name__)

# A commit is one round trip; a few that wait for the disk together are grouped there. Servers allow about a hundred.
CONNECTIONS_MAX = 8
# Connections of a process beside the pool: the lease, and LISTEN.
BESIDE = 2
# How much of the pool may read turns at once: a turn may have many megabytes, and commits do not wait for it.
READERS_SHARE = 5 / 8
# Far above the turns that one process runs at once; beyond it the server has stopped, and callers get an error.
WAITING_MAX = 4_096
CONNECT_S = 3.0
# Longer than any statement takes, checkpoints of a busy server included.
STATEMENT_S = 30.0
# How long lost connections are tried again, and the pauses between.
PATIENCE_S = 5.0
PAUSE_MIN_S = 0.05
PAUSE_MAX_S = 1.0
# Longer than a statement takes, shorter than a readiness probe waits.
READY_S = 1.0
CLOSE_S = 5.0
# A process that has not written a heartbeat for this long is dead: several heartbeats.
LEASE_S = 15
# Several heartbeats may fail and be tried again within a lease.
BEAT_S_MAX = 4.0

QUERIES = load_queries("postgres")
COMMIT = {"full": {"synchronous_commit": "on"}, "relaxed": {"synchronous_commit": "off"}}
# What a machine that vanishes, or a process that stands still, keeps locked at most.
LOCKS = {"idle_in_transaction_session_timeout": "10s", "lock_timeout": "10s"}
NAME = {"application_name": "segue"}
SESSION = {
    **NAME,
    **LOCKS,
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "20s",
}

# Not our doing, and likely to pass: connections, resources, an operator, a server that has become a replica.
TRANSIENT = (
    asyncpg.PostgresConnectionError,
    # A connection that the server closed while it was not in use.
    asyncpg.InternalClientError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.ReadOnlySQLTransactionError,
    OSError,
    TimeoutError,
)
# Two transactions got into each other's way; the loser is tried again.
CONFLICTS = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.ForeignKeyViolationError,
    asyncpg.LockNotAvailableError,
)


class PostgresConnection(Protocol):
    """The part of asyncpg's connection that is used here."""

    async def fetch(self, query: str, *values: object) -> Sequence[Sequence[object]]: ...

    async def execute(self, query: str, *values: object) -> str:
        """Returns the verb and how many rows it touched."""

    async def executemany(self, query: str, values: Sequence[Sequence[object]]) -> None:
        """Run it for each of these, all or nothing."""

    def transaction(self) -> AbstractAsyncContextManager[object]: ...


PostgresWork = Callable[[PostgresConnection], Awaitable[T]]
Connect = Callable[[], Awaitable[asyncpg.Connection]]


class WriteConflict(Unavailable):
    """Another transaction came between; trying again at once is likely to work."""


@contextmanager
def border() -> Iterator[None]:
    """What goes wrong inside leaves as an error of ours: nothing of `asyncpg` crosses the seam."""
    try:
        yield
    except ApiError:
        raise
    except CONFLICTS as error:
        raise WriteConflict("The store cannot be reached at the moment.") from error
    except TRANSIENT as error:
        raise Unavailable("The store cannot be reached at the moment.") from error
    except (
        asyncpg.PostgresError, asyncpg.InterfaceError,
        OverflowError, ValueError, KeyError, zlib.error, msgspec.MsgspecError,
    ) as error:  # fmt: skip
        raise store_failed(error) from error


class PostgresDatabase:
    """A pool of connections to one database. Made by `open`."""

    def __init__(
        self, pool: asyncpg.Pool, connect: Connect, connections_max: int, setup: str
    ) -> None:
        # The name of this process in what it writes; a new one whenever its lease was taken away.
        self.worker = new_id("worker")
        self._pool = pool
        self._connect = connect
        self._beating: asyncpg.Connection | None = None
        self._readers = asyncio.Semaphore(max(1, int(connections_max * READERS_SHARE)))
        # What begins every transaction where there is a pooler.
        self._setup = setup
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_closed = False
        # Shared by all callers that wait for the server to come back.
        self._pause_s = 0.0

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        durability: Literal["full", "relaxed"] = "full",
        connections_max: int = CONNECTIONS_MAX,
        direct: str = "",
    ) -> Self:
        """Connect to the database, and bring its tables up to date. `direct`: the address of the server itself, if the
        other one is that of a pooler."""
        settings = COMMIT[durability] | LOCKS
        session = {"timeout": CONNECT_S, "server_settings": COMMIT[durability] | SESSION}
        pooled = {"timeout": CONNECT_S, "server_settings": NAME, "statement_cache_size": 0}
        setup = "; ".join(f"SET LOCAL {name} = '{value}'" for name, value in settings.items())
        with border():
            pool = asyncpg.create_pool(
                url,
                min_size=0,
                max_size=connections_max,
                command_timeout=STATEMENT_S,
                # Nothing we do changes a session, so there is nothing to reset and no round trip for it.
                reset=_no_reset,
                **(pooled if direct else session),
            )
            await pool
        connect = partial(asyncpg.connect, direct or url, command_timeout=BEAT_S_MAX, **session)
        database = cls(pool, connect, connections_max, setup if direct else "")
        try:
            with border():
                async with asyncio.timeout(STATEMENT_S):
                    await database.run(partial(_migrate, worker=database.worker))
                await database._check_room(BESIDE if direct else BESIDE + connections_max)
        except BaseException:
            pool.terminate()
            raise
        return database

    async def _check_room(self, each: int) -> None:
        """Warn if the workers that live may open more connections than the server takes."""
        ((room, workers),) = await self.fetch("room", as_row, LEASE_S)
        if workers * each > room:
            log.warning(
                "PostgreSQL takes %d connections, and the %d workers that use it may open %d (%d each): set "
                "store_connections to at most %d, raise max_connections, or use a pooler",
                room,
                workers,
                workers * each,
                each,
                room // workers,
            )

    async def run(self, work: PostgresWork[T], *, reads_much: bool = False) -> T:
        """Do this on a connection of the pool; return when it is committed. It may be run more than once. What reads
        much leaves some connections to the rest."""
        if self._is_closed:
            raise Unavailable("The store is closed.")
        if len(self._tasks) >= WAITING_MAX:
            raise Unavailable("Too many statements are waiting for the store.")
        task = asyncio.create_task(self._read(work) if reads_much else self._retried(work))
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return await asyncio.shield(task)

    async def fetch(self, name: str, make: Callable[..., T], *values: object) -> list[T]:
        """What `make` makes of the columns of each row that the statement of this name finds. Under a name that no text
        can be it finds none."""
        if not is_text(*(value for value in values if isinstance(value, str))):
            return []
        return await self.run(lambda connection: fetch(connection, name, make, *values))

    async def execute(self, name: str, *values: object) -> int:
        """Run the statement of this name; how many rows it touched."""
        status = await self.run(lambda connection: connection.execute(QUERIES[name], *values))
        return touched(status)

    async def is_ready(self) -> bool:
        """Whether a statement would be accepted now."""
        try:
            async with asyncio.timeout(READY_S):
                await self.execute("ready")
        except (ApiError, TimeoutError):
            return False
        return True

    async def beat(self) -> bool:
        """Renew the lease; False if it was taken away. Then this process has a new lease, under a new name."""
        with border():
            if self._beating is None or self._beating.is_closed():
                self._beating = await self._connect()
            connection = self._beating
            try:
                if touched(await connection.execute(QUERIES["beat"], self.worker)):
                    return True
                worker = new_id("worker")
                await _join(connection, worker)
            except BaseException:
                # The next heartbeat must not wait for this connection.
                connection.terminate()
                raise
        self.worker = worker
        return False

    async def close(self) -> None:
        """Finish the work that waits, give up the lease of this process, and close the connections."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._tasks:
            await asyncio.wait(self._tasks)
        with suppress(ApiError), border():
            async with asyncio.timeout(CLOSE_S):
                expire = QUERIES["expire"]
                await self._once(lambda connection: connection.execute(expire, self.worker))
                await self._pool.close()
        self._pool.terminate()
        if self._beating is not None:
            self._beating.terminate()

    def _on_done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Its caller may be cancelled; an exception that is never read would be logged.
            task.exception()

    async def _read(self, work: PostgresWork[T]) -> T:
        async with self._readers:
            return await self._retried(work)

    async def _retried(self, work: PostgresWork[T]) -> T:
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_S
        while True:
            try:
                result = await self._once(work)
            except WriteConflict:
                if loop.time() > until:
                    raise
                await asyncio.sleep(random.uniform(0, PAUSE_MIN_S))
            except Unavailable:
                self._pause_s = min(PAUSE_MAX_S, max(PAUSE_MIN_S, 2 * self._pause_s))
                # Spread, so that the callers that wait do not all come back at once.
                pause_s = self._pause_s * random.uniform(0.5, 1)
                if self._is_closed or loop.time() + pause_s > until:
                    raise
                await asyncio.sleep(pause_s)
            else:
                self._pause_s = 0.0
                return result

    async def _once(self, work: PostgresWork[T]) -> T:
        with border():
            connection = await self._pool.acquire(timeout=PATIENCE_S)
            try:
                return await self._apply(work, connection)
            except asyncpg.InterfaceError as error:
                # Raised both for a connection that is lost and for a call that makes no sense.
                if connection.is_closed():
                    raise ConnectionResetError("the connection is lost") from error
                raise
            except (TimeoutError, asyncio.CancelledError, asyncpg.InternalClientError):
                # It is in the middle of a statement: what still arrives must not reach the next user.
                connection.terminate()
                raise
            finally:
                await self._pool.release(connection)

    async def _apply(self, work: PostgresWork[T], connection: PostgresConnection) -> T:
        if not self._setup:
            return await work(connection)
        async with connection.transaction():
            await connection.execute(self._setup)
            return await work(connection)


async def _no_reset(_: PostgresConnection) -> None:
    pass


async def _migrate(connection: PostgresConnection, *, worker: str) -> None:
    """Run the scripts that this database has not seen, and take a lease, under a lock: of several processes that start
    together one does it. `StoreFailed` if a process that lives could not read what this one writes, or the other way
    round."""
    async with connection.transaction():
        await connection.execute(QUERIES["lock_migrations"])
        await connection.execute(QUERIES["make_migrations"])
        (version,) = await fetch(connection, "version", int)
        (says_needs,) = await fetch(connection, "says_needs", bool)
        if says_needs:
            await _check_needs(connection)
        for number, script in load_migrations("postgres"):
            if number > version:
                await connection.execute(script)
                await connection.execute(QUERIES["note_migration"], number)
        await connection.execute(QUERIES["need_rows"], ROWS_WRITTEN)
        if older := await fetch(connection, "older", str, LEASE_S):
            raise older_processes(older, f" (one that was killed counts for {LEASE_S} s more)")
        await _join(connection, worker)


async def _check_needs(connection: PostgresConnection) -> None:
    """Refuse a database that needs more than this version knows."""
    abilities = Abilities.of_this_version("postgres")
    (needed,) = await fetch(connection, "needs", Abilities)
    if not abilities.are_enough(needed):
        raise newer_database(needed, abilities)


async def _join(connection: PostgresConnection, worker: str) -> None:
    """Take a lease, unless the database needs more than this version knows."""
    abilities = Abilities.of_this_version("postgres")
    columns = (worker, abilities.schema, abilities.rows, abilities.version)
    if not touched(await connection.execute(QUERIES["join"], *columns)):
        await _check_needs(connection)


async def fetch(
    connection: PostgresConnection, name: str, make: Callable[..., T], *values: object
) -> list[T]:
    """What `make` makes of the columns of each row that the statement of this name finds."""
    return [make(*row) for row in await connection.fetch(QUERIES[name], *values)]


def as_row(*columns: T) -> tuple[T, ...]:
    """A row as it is, for `fetch`."""
    return columns


def touched(status: str) -> int:
    """How many rows a statement touched, from what `execute` returns."""
    return int(status.rpartition(" ")[2])
