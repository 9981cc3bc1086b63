"""How is one SQLite file written and read beside the loop?

In: functions that use a connection. Out: their results once they are committed, and only our own errors. The event loop
never waits for a disk: one thread writes, a few threads read.

**Grouped commits.** Writes wait in a queue. The writer takes all that wait, puts them into one
transaction, commits it (with `synchronous=FULL` that is one fsync), and only then answers each
caller. While a commit runs the next group gathers, so the group grows with the load and a single
write does not wait. If a group fails it is rolled back and each of its writes is tried alone, so
that a bad row harms only itself.

**Cancelled callers.** A caller that is cancelled stops waiting; its write goes on and other callers
do not notice. Readers finish their query in their own thread and connection, so nothing is left
over for the next one (docs/inside/hazards.md F35).

**Erasing.** Freed space is overwritten (`secure_delete`), and a deletion is followed by a
checkpoint that empties the write-ahead log. If a reader is in the way the writer tries again soon.

**Dead processes.** Several processes may share the file; each holds a lease, so that the others can
see which turns a dead one has left.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeVar

import msgspec

from segue.errors import ApiError, StoreFailed, Unavailable
from segue.ids import new_id
from segue.stores.records import is_text
from segue.stores.sql_files import (
    ROWS_WRITTEN,
    SQL,
    Abilities,
    load_migrations,
    load_queries,
    log_failure,
    newer_database,
    older_processes,
    store_failed,
)
from segue.stores.sqlite_lease import Lease

T = TypeVar("T")
SqliteWork = Callable[[sqlite3.Connection], T]

# More would only wait for one another at the interpreter's lock.
READERS = 2
# Far above the turns that one process runs at once; beyond it the disk has stopped, and callers get
# an error.
WAITING_MAX = 4_096
# Bounds the log and the damage of a group that fails and is tried one by one.
GROUP_MAX = 512
# How soon a log that could not be emptied is tried again.
SCRUB_AGAIN_S = 1.0
# Longer than a commit takes, shorter than a readiness probe waits.
READY_S = 1.0
# Not our doing, and likely to pass; all other failures are for us to look at.
TRANSIENT = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
}

QUERIES = load_queries("sqlite")
DURABILITY = {"full": QUERIES["durability_full"], "relaxed": QUERIES["durability_relaxed"]}


@contextmanager
def border(*, is_logged: bool = True) -> Iterator[None]:
    """What goes wrong inside leaves as an error of ours: nothing of `sqlite3` crosses the seam."""
    try:
        yield
    except ApiError:
        raise
    except sqlite3.Error as error:
        # Errors of Python's module carry no code: they are about how we called it.
        code = getattr(error, "sqlite_errorcode", None)
        if code is not None and code & 0xFF in TRANSIENT:
            raise Unavailable("The store cannot be reached at the moment.") from error
        raise store_failed(error, is_logged=is_logged) from error
    except (
        OSError, OverflowError, ValueError, KeyError, zlib.error, msgspec.MsgspecError,
    ) as error:  # fmt: skip
        raise store_failed(error, is_logged=is_logged) from error


@dataclass(frozen=True, slots=True)
class _Write:
    """Work that waits for the writer, and the caller that waits for its result."""

    work: SqliteWork[object]
    is_erasing: bool
    caller: asyncio.Future[object]


_Outcome = tuple[_Write, object, Exception | None]


class SqliteDatabase:
    """One file, one writing thread, a few reading ones. Made by `open`."""

    def __init__(
        self,
        path: Path,
        writer: sqlite3.Connection,
        lease: Lease,
        on_commit: Callable[[int], None] | None,
        group_max: int,
    ) -> None:
        self._path = path
        self.lease = lease
        self._writer = writer
        self._on_commit = on_commit
        self._group_max = group_max
        # Of all queues of Python the one that wakes a thread fastest; it has no limit of its own.
        self._waiting: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._is_closed = False
        self._must_scrub = False
        self._mine = threading.local()
        self._readers: list[sqlite3.Connection] = []
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="segue-sqlite-read")
        self._thread = threading.Thread(target=self._run, name="segue-sqlite-write", daemon=True)
        self._thread.start()

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        durability: Literal["full", "relaxed"] = "full",
        on_commit: Callable[[int], None] | None = None,
        group_max: int = GROUP_MAX,
    ) -> Self:
        """Open or make the file, and bring its tables up to date.

        `on_commit` is called in the writing thread just before each commit, with the number of
        writes in it.
        """
        writer, lease = await asyncio.to_thread(_open_writer, path, DURABILITY[durability])
        return cls(path, writer, lease, on_commit, group_max)

    async def write(self, work: SqliteWork[T], *, is_erasing: bool = False) -> T:
        """Run this in the writing thread; return when it is committed. It may be run twice, the
        first time without effect."""
        if self._is_closed:
            raise Unavailable("The store is closed.")
        if self._waiting.qsize() >= WAITING_MAX:
            raise Unavailable("Too many writes are waiting for the store.")
        caller: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting.put(_Write(work, is_erasing, caller))
        try:
            return await caller  # type: ignore[return-value]  # the future holds what work returned
        except StoreFailed as error:
            # Here and not in the writing thread, which knows no requests.
            log_failure(error.__cause__)
            raise

    async def read(self, work: SqliteWork[T]) -> T:
        """Run this in a reading thread, on one consistent state of the file."""
        if self._is_closed:
            raise Unavailable("The store is closed.")
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, copy_context().run, self._read, work
        )

    async def fetch(
        self, name: str, make: Callable[..., T], values: Mapping[str, object]
    ) -> list[T]:
        """What `make` makes of the columns of each row that the statement of this name finds. Under a name that no text
        can be it finds none."""
        if not is_text(*(value for value in values.values() if isinstance(value, str))):
            return []
        query = QUERIES[name]
        return await self.read(lambda reader: [make(*row) for row in reader.execute(query, values)])

    async def execute(
        self, name: str, values: Mapping[str, object], *, is_erasing: bool = False
    ) -> int:
        """Run the statement of this name; how many rows it touched."""
        return await self.write(
            lambda writer: writer.execute(QUERIES[name], values).rowcount, is_erasing=is_erasing
        )

    async def is_ready(self) -> bool:
        """Whether a write would be taken now."""
        try:
            async with asyncio.timeout(READY_S):
                await self.write(lambda _: None)
        except (ApiError, TimeoutError):
            return False
        return True

    async def close(self) -> None:
        """Finish the writes that wait, then close the file."""
        if not self._is_closed:
            self._is_closed = True
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._waiting.put(None)
        self._thread.join()
        self._pool.shutdown()
        for reader in self._readers:
            reader.close()
        # The last to close empties and removes the log.
        self._writer.close()
        self.lease.release()

    def _read(self, work: SqliteWork[T]) -> T:
        with border():
            connection = getattr(self._mine, "connection", None)
            if connection is None:
                connection = self._mine.connection = _connect(self._path, QUERIES["read_only"])
                self._readers.append(connection)
            connection.execute("BEGIN")
            try:
                return _result(work, connection)
            finally:
                _roll_back(connection)

    def _run(self) -> None:
        while (group := self._gather()) is not None:
            self._finish(group)
            # While this thread waits it holds nothing of what it wrote.
            del group

    def _finish(self, group: list[_Write]) -> None:
        """Commit these writes, empty the log where something was erased, and answer the callers."""
        outcomes = self._commit(group) if group else []
        if any(write.is_erasing and result for write, result, _ in outcomes):
            self._must_scrub = True
        if self._must_scrub:
            self._must_scrub = not _scrub(self._writer)
        _deliver(outcomes)

    def _gather(self) -> list[_Write] | None:
        """All writes that wait; an empty list if there is only a scrub to repeat; None at the end."""
        try:
            first = self._waiting.get(timeout=SCRUB_AGAIN_S if self._must_scrub else None)
        except queue.Empty:
            return []
        if first is None:
            return None
        group = [first]
        while len(group) < self._group_max:
            try:
                write = self._waiting.get_nowait()
            except queue.Empty:
                break
            if write is None:
                # The end: this group first, then the end again.
                self._waiting.put(None)
                break
            group.append(write)
        return group

    def _commit(self, group: list[_Write]) -> list[_Outcome]:
        """One transaction for all of them; if it fails, one for each."""
        try:
            with border(is_logged=False):
                self._writer.execute("BEGIN IMMEDIATE")
                done: list[_Outcome] = [
                    (write, _result(write.work, self._writer), None) for write in group
                ]
                if self._on_commit is not None:
                    self._on_commit(len(group))
                self._writer.execute("COMMIT")
                return done
        except Exception as error:
            _roll_back(self._writer)
            # A transient error is not caused by one of the rows, and one by one each write would wait for it again.
            if len(group) == 1 or isinstance(error, Unavailable):
                return [(write, None, error) for write in group]
            return [outcome for write in group for outcome in self._commit([write])]


def _result(work: SqliteWork[T], connection: sqlite3.Connection) -> T:
    """What the work returns. Never a cursor: it would be freed in the caller's thread, and its statement be reset while
    this thread uses it for another write, which would fail."""
    result = work(connection)
    assert not isinstance(result, sqlite3.Cursor), "a cursor must not leave its thread"
    return result


def _deliver(outcomes: list[_Outcome]) -> None:
    """Wake the callers, with one call for each event loop; callers that were cancelled are skipped."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].caller.get_loop(), []).append(outcome)
    for loop, theirs in by_loop.items():
        # A loop that is closed has no callers left.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_wake, theirs)


def _wake(outcomes: list[_Outcome]) -> None:
    for write, result, error in outcomes:
        if write.caller.done():
            continue
        if error is None:
            write.caller.set_result(result)
        else:
            write.caller.set_exception(error)


def _connect(path: Path, *settings: str) -> sqlite3.Connection:
    """A connection in autocommit mode, so that we begin and end the transactions."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        for setting in (*statements((SQL / "sqlite_settings.sql").read_text("utf-8")), *settings):
            connection.execute(setting)
    except BaseException:
        connection.close()
        raise
    return connection


def _open_writer(path: Path, durability: str) -> tuple[sqlite3.Connection, Lease]:
    """The only writing connection, on a file whose tables are up to date. The lease comes first, so that of two
    processes that do not get on with each other at least one sees the other."""
    abilities = Abilities.of_this_version("sqlite")
    with border():
        _make_private(path)
        lease = Lease.acquire(path, new_id("worker"), abilities)
        try:
            connection = _connect(path, durability)
            try:
                _migrate(connection, lease, abilities)
            except BaseException:
                connection.close()
                raise
        except BaseException:
            lease.release()
            raise
        return connection, lease


def _make_private(path: Path) -> None:
    """Create a file that only its owner may read; its log gets the same mode. A file that exists is
    not even opened: closing it here would drop the locks that other connections of this process
    hold."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        return
    except OSError as error:
        raise Unavailable("The database file cannot be opened.") from error


def _migrate(connection: sqlite3.Connection, lease: Lease, abilities: Abilities) -> None:
    """Run the scripts that this file has not seen, under the write lock: of several processes that
    start together one does it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not abilities.are_enough(needed := needed_by(connection)):
            raise newer_database(needed, abilities)
        for number, script in load_migrations("sqlite"):
            if number > _version(connection):
                for statement in statements(script):
                    connection.execute(statement)
                assert _version(connection) == number, f"migration {number} sets another version"
        connection.execute(QUERIES["need_rows"], {"rows": ROWS_WRITTEN})
        if older := lease.older(needed_by(connection)):
            raise older_processes(older)
        connection.execute("COMMIT")
    except BaseException:
        _roll_back(connection)
        raise


def needed_by(connection: sqlite3.Connection) -> Abilities:
    """What a process must know to use this file; a file from before 0.3.0 needs nothing that this version lacks."""
    if not connection.execute(QUERIES["says_needs"]).fetchone():
        return Abilities(0, 0)
    return Abilities(*connection.execute(QUERIES["needs"]).fetchone())


def _version(connection: sqlite3.Connection) -> int:
    """The number of the last migration that this file has seen."""
    row: tuple[int] = connection.execute(QUERIES["version"]).fetchone()
    return row[0]


def statements(script: str) -> Iterator[str]:
    """The statements of a script one by one: `executescript` would end our transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _roll_back(connection: sqlite3.Connection) -> None:
    """End the transaction, if a full or failing disk has not ended it already."""
    if connection.in_transaction:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


def _scrub(connection: sqlite3.Connection) -> bool:
    """Move the write-ahead log into the file and empty it; False if another connection is in the way."""
    try:
        connection.execute(QUERIES["wait_little"])
        is_busy, _, _ = connection.execute(QUERIES["empty_log"]).fetchone()
        connection.execute(QUERIES["wait_long"])
    except sqlite3.Error:
        return False
    return not is_busy
