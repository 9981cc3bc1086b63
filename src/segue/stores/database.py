"""How is one SQLite file written and read beside the loop?

In: pieces of work for a connection. Out: their results once they are committed, and errors of ours only. The event loop
never waits for a disk: one thread writes, a few threads read.

**Grouped commits.** Writes wait in a queue. The writer takes all that wait, puts them into one
transaction, commits it (with `synchronous=FULL` that is one fsync), and only then tells each
caller. While a commit runs the next group gathers, so the group grows with the load and a lone turn
waits for nobody. If a group fails it is rolled back and each of its writes is tried alone, so that
a bad row harms only itself.

**Leaving early.** A caller that is cancelled stops listening; its write goes on and nobody else
notices. Readers finish their query in their own thread and connection, so nothing is left over for
the next one (docs/hazards.md F35).

**Erasing.** Freed space is overwritten (`secure_delete`), and a deletion is followed by a
checkpoint that empties the write-ahead log. Where a reader is in the way the writer tries again
soon.

**Living.** Several processes may share the file; each holds a lease, so that others can tell what a
dead one has left behind.
"""

from __future__ import annotations

import asyncio
import os
import queue
import re
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal, Self, TypeVar

import msgspec

from segue.errors import ApiError, StoreFailed, Unavailable
from segue.ids import new_id
from segue.stores.lease import Lease

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

# More would only wait on one another for the interpreter's lock.
READERS = 2
# Far above the turns that one process runs at once; beyond it the disk has stopped, and callers
# should hear so.
WAITING_MAX = 4_096
# Bounds the log and the damage of a group that fails and is tried one by one.
GROUP_MAX = 512
# How soon a log that could not be emptied is tried again.
SCRUB_AGAIN_S = 1.0
# Longer than a commit takes, shorter than a prober waits.
READY_S = 1.0
# The world's doing, and likely to pass; all other failures are for us to look at.
PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
}

SQL = files("segue.stores") / "sql"


def load_queries(text: str) -> dict[str, str]:
    """Statements by name, from a file in which each begins with `-- name: …`."""
    pieces = re.split(r"^-- name: (\w+)$", text, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], (piece.strip() for piece in pieces[2::2]), strict=True))


def load_migrations() -> list[tuple[int, str]]:
    """Numbered scripts in order; each sets `user_version` to its own number."""
    found: list[tuple[int, str]] = []
    for file in SQL.iterdir():
        if match := re.fullmatch(r"sqlite_(\d{4})_\w+\.sql", file.name):
            found.append((int(match[1]), file.read_text("utf-8")))
    return sorted(found)


QUERIES = load_queries((SQL / "sqlite_queries.sql").read_text("utf-8"))
DURABILITY = {"full": QUERIES["durability_full"], "relaxed": QUERIES["durability_relaxed"]}


@contextmanager
def border() -> Iterator[None]:
    """Nothing foreign crosses: what goes wrong inside leaves as an error of ours."""
    try:
        yield
    except ApiError:
        raise
    except sqlite3.Error as error:
        # Python's own complaints carry no code: they are about how we called.
        code = getattr(error, "sqlite_errorcode", None)
        if code is not None and code & 0xFF in PASSING:
            raise Unavailable("The store cannot be reached at the moment.") from error
        raise StoreFailed("The store could not do what it should.") from error
    except (
        OSError, OverflowError, ValueError, KeyError, zlib.error, msgspec.MsgspecError,
    ) as error:  # fmt: skip
        raise StoreFailed("The store could not do what it should.") from error


@dataclass(frozen=True, slots=True)
class Write:
    """Work that waits for the writer, and who waits for it."""

    work: Work[object]
    is_erasing: bool
    caller: asyncio.Future[object]


Outcome = tuple[Write, object, Exception | None]


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
        self._waiting: queue.Queue[Write | None] = queue.Queue(WAITING_MAX)
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
        writer = await asyncio.to_thread(open_writer, path, DURABILITY[durability])
        try:
            with border():
                lease = Lease.take(path, new_id("worker"))
        except BaseException:
            writer.close()
            raise
        return cls(path, writer, lease, on_commit, group_max)

    async def write(self, work: Work[T], *, is_erasing: bool = False) -> T:
        """Run this in the writing thread; return when it is committed. It may be run twice, the
        first time without effect."""
        if self._is_closed:
            raise Unavailable("The store is closed.")
        caller: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        try:
            self._waiting.put_nowait(Write(work, is_erasing, caller))
        except queue.Full:
            raise Unavailable("Too many writes are waiting for the store.") from None
        return await caller  # type: ignore[return-value]  # the future holds what work returned

    async def read(self, work: Work[T]) -> T:
        """Run this in a reading thread, on one consistent state of the file."""
        if self._is_closed:
            raise Unavailable("The store is closed.")
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._read, work)

    async def is_ready(self) -> bool:
        """Whether a write would be taken now."""
        try:
            async with asyncio.timeout(READY_S):
                await self.write(lambda _: None)
        except (ApiError, TimeoutError):
            return False
        return True

    async def close(self) -> None:
        """Finish what waits, then let go of the file."""
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
        self.lease.end()

    def _read(self, work: Work[T]) -> T:
        with border():
            connection = getattr(self._mine, "connection", None)
            if connection is None:
                connection = self._mine.connection = open_reader(self._path)
                self._readers.append(connection)
            connection.execute("BEGIN")
            try:
                return work(connection)
            finally:
                roll_back(connection)

    def _run(self) -> None:
        while (group := self._gather()) is not None:
            outcomes = self._commit(group)
            if any(write.is_erasing for write in group):
                self._must_scrub = True
            if self._must_scrub:
                self._must_scrub = not scrub(self._writer)
            deliver(outcomes)

    def _gather(self) -> list[Write] | None:
        """All writes that wait, at least one; none if there is only a scrub to repeat; None at the
        end."""
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

    def _commit(self, group: list[Write]) -> list[Outcome]:
        try:
            return self._transact(group)
        except Exception as error:
            # What passes is nobody's row, and one by one each would wait for it again.
            if len(group) == 1 or isinstance(error, Unavailable):
                return [(write, None, error) for write in group]
            return [outcome for write in group for outcome in self._commit([write])]

    def _transact(self, group: list[Write]) -> list[Outcome]:
        """One transaction for all of them, or nothing."""
        if not group:
            return []
        with border():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                outcomes: list[Outcome] = [
                    (write, write.work(self._writer), None) for write in group
                ]
                if self._on_commit is not None:
                    self._on_commit(len(group))
                self._writer.execute("COMMIT")
            except BaseException:
                roll_back(self._writer)
                raise
            return outcomes


def deliver(outcomes: list[Outcome]) -> None:
    """Wake the callers, with one call for each event loop. Those that have left are passed over."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].caller.get_loop(), []).append(outcome)
    for loop, theirs in by_loop.items():
        # A loop that is closed has nobody left to tell.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(wake, theirs)


def wake(outcomes: list[Outcome]) -> None:
    """Give each caller its result."""
    for write, result, error in outcomes:
        if write.caller.done():
            continue
        if error is None:
            write.caller.set_result(result)
        else:
            write.caller.set_exception(error)


def connect(path: Path) -> sqlite3.Connection:
    """A connection in autocommit mode, so that transactions are ours to begin and end."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        for setting in statements((SQL / "sqlite_settings.sql").read_text("utf-8")):
            connection.execute(setting)
    except BaseException:
        connection.close()
        raise
    return connection


def open_writer(path: Path, durability: str) -> sqlite3.Connection:
    """The one writing connection, on a file whose tables are up to date."""
    with border():
        make_private(path)
        connection = connect(path)
        try:
            connection.execute(durability)
            migrate(connection)
        except BaseException:
            connection.close()
            raise
        return connection


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write."""
    connection = connect(path)
    connection.execute(QUERIES["read_only"])
    return connection


def make_private(path: Path) -> None:
    """Make a new file that only we may read; its log takes over its rights. A file that exists is
    not even opened: closing it here would drop the locks that other connections of this process
    hold."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        return
    except OSError as error:
        raise Unavailable("The database file cannot be opened.") from error


def migrate(connection: sqlite3.Connection) -> None:
    """Run the scripts that this file has not seen, under the write lock: of several processes that
    start together one does it."""
    migrations = load_migrations()
    connection.execute("BEGIN IMMEDIATE")
    try:
        if version(connection) > migrations[-1][0]:
            raise StoreFailed("The database was written by a newer version of Segue.")
        for number, script in migrations:
            if number > version(connection):
                for statement in statements(script):
                    connection.execute(statement)
                assert version(connection) == number, f"migration {number} sets another version"
        connection.execute("COMMIT")
    except BaseException:
        roll_back(connection)
        raise


def version(connection: sqlite3.Connection) -> int:
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


def roll_back(connection: sqlite3.Connection) -> None:
    """End the transaction, if a full or failing disk has not ended it already."""
    if connection.in_transaction:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


def scrub(connection: sqlite3.Connection) -> bool:
    """Move the log into the file and empty it; False if somebody is in the way."""
    try:
        connection.execute(QUERIES["wait_little"])
        is_busy, _, _ = connection.execute(QUERIES["empty_log"]).fetchone()
        connection.execute(QUERIES["wait_long"])
    except sqlite3.Error:
        return False
    return not is_busy
