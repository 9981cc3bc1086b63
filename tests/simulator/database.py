"""What does PostgreSQL do with statements? Tables in memory, transactions, row locks, sessions that time out.

`READ COMMITTED` as the server has it: a statement sees what was committed when it began, and its own transaction's
writes; a row that it locks is read anew, in its newest version. A statement that meets a lock waits, and goes on with
the snapshot that it had. Locks are held until the transaction ends: at its commit, when its client's connection is
closed, or when a timeout of the session ends it. What each statement does is in `statements`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import asyncpg

from tests.simulator.clock import World
from tests.simulator.statements import STATEMENTS

Row = dict[str, Any]
Key = tuple[Any, ...]
Table = dict[Key, Row]
Mode = Literal["key share", "share", "no key update", "update"]

# Which locks exclude each other (PostgreSQL's manual, 13.3.2).
CONFLICTS = {
    (one, other)
    for one, others in {
        "key share": ("update",),
        "share": ("no key update", "update"),
        "no key update": ("share", "no key update", "update"),
        "update": ("key share", "share", "no key update", "update"),
    }.items()
    for other in others
}
STRENGTH = ("key share", "share", "no key update", "update")
TABLES = (
    "parts", "turns", "usage", "events", "claims", "workers", "erased", "conversations", "shelved",
    "keys", "ring", "meters", "places",
)  # fmt: skip


class Blocked(Exception):
    """The row is locked by another transaction."""

    def __init__(self, lock: tuple[str, Key]) -> None:
        self.lock = lock


class Transaction:
    """What one transaction has written and locked; and, while a statement runs, what that statement sees."""

    def __init__(self, database: Database, session: Session) -> None:
        self.database = database
        self.session = session
        self.writes: dict[str, dict[Key, Row | None]] = {}
        self.notices: list[tuple[str, str]] = []
        self.locks: dict[tuple[str, Key], Mode] = {}
        # The tables as they were when the statement began, if it has waited since.
        self.snapshot: dict[str, Table] | None = None

    @property
    def now(self) -> int:
        """`seconds_now()`."""
        return round(self.database.world.wall())

    @property
    def clock(self) -> float:
        """`clock_timestamp()`."""
        return self.database.world.wall()

    def get(self, table: str, *key: Any) -> Row | None:
        """A row as this statement sees it."""
        written = self.writes.get(table)
        if written and key in written:
            return written[key]
        tables = self.database.tables if self.snapshot is None else self.snapshot
        return tables[table].get(key)

    def rows(self, table: str) -> list[Row]:
        """All rows of a table as this statement sees them."""
        tables = self.database.tables if self.snapshot is None else self.snapshot
        written = self.writes.get(table)
        if not written:
            return list(tables[table].values())
        seen = {**tables[table], **written}
        return [row for row in seen.values() if row is not None]

    def lock(self, table: str, *key: Any, mode: Mode = "no key update") -> Row | None:
        """Lock a row and read its newest version; `Blocked` if another transaction has locked it."""
        if not self.can_lock(table, *key, mode=mode):
            raise Blocked((table, key))
        name = (table, key)
        before = self.locks.get(name, mode)
        self.locks[name] = mode = max(before, mode, key=STRENGTH.index)
        self.database.locks.setdefault(name, {})[self] = mode
        written = self.writes.get(table)
        if written and key in written:
            return written[key]
        return self.database.tables[table].get(key)

    def can_lock(self, table: str, *key: Any, mode: Mode) -> bool:
        """Whether no other transaction has locked this row."""
        held = self.database.locks.get((table, key), {})
        return not any(
            one is not self and (mode, other) in CONFLICTS for one, other in held.items()
        )

    def put(self, table: str, key: Key, row: Row) -> None:
        """Insert or replace a row, which must be locked."""
        self.writes.setdefault(table, {})[key] = row

    def drop(self, table: str, *key: Any) -> None:
        """Delete a row, which must be locked."""
        self.writes.setdefault(table, {})[key] = None

    def notify(self, channel: str, payload: str) -> None:
        self.notices.append((channel, payload))


@dataclass(eq=False)
class Call:
    """A statement on its way through the server."""

    name: str
    values: tuple[Any, ...]
    answer: Callable[[object], None]
    # Of a statement that waits for a lock: its snapshot, and until when.
    snapshot: dict[str, Table] | None = None
    waits_for: tuple[str, Key] | None = None
    began_at: float = 0.0


@dataclass(eq=False)
class Session:
    """One connection as the server has it."""

    number: int
    client: str
    settings: dict[str, str]
    # Sends to the client what it did not ask for: a notification, or None when the session is ended.
    push: Callable[[tuple[str, str] | None], None]
    transaction: Transaction | None = None
    # Whether the client has begun a transaction, and whether a statement in it has failed.
    is_explicit: bool = False
    is_aborted: bool = False
    channels: set[str] = field(default_factory=set)
    waiting: deque[Call] = field(default_factory=deque)
    is_open: bool = True
    active_at: float = 0.0

    def seconds(self, setting: str) -> float:
        """A timeout of this session; 0: none."""
        return _seconds(self.settings.get(setting, "0"))


def _seconds(text: str) -> float:
    for unit, factor in (("ms", 0.001), ("min", 60.0), ("s", 1.0)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text) / 1_000


class Database:
    """The server."""

    # Whether statements look at who owns what; without it nobody is fenced off.
    fences = True

    def __init__(self, world: World, faults: Faults) -> None:
        self.world = world
        self.faults = faults
        self.tables: dict[str, Table] = {name: {} for name in TABLES}
        self.locks: dict[tuple[str, Key], dict[Transaction, Mode]] = {}
        self.sessions: list[Session] = []
        self.statements = 0
        self._blocked: list[tuple[Session, Call]] = []
        # By worker: the process that has written it.
        self.homes: dict[str, str] = {}
        # The order in which turns were first saved.
        self.sequence = 0

    # --- sessions ---

    def open(
        self,
        client: str,
        settings: dict[str, str],
        push: Callable[[tuple[str, str] | None], None],
    ) -> Session:
        session = Session(len(self.sessions), client, settings, push, active_at=self.world.now)
        self.sessions.append(session)
        return session

    def close(self, session: Session) -> None:
        """The client's connection is closed, or is known to be gone."""
        if session.is_open:
            session.is_open = False
            self._blocked = [one for one in self._blocked if one[0] is not session]
            self._end(session)

    def take(self, session: Session, call: Call) -> None:
        """A statement has arrived. A session runs one after the other."""
        if not session.is_open:
            return
        session.waiting.append(call)
        if len(session.waiting) == 1:
            self._begin(session)

    def _begin(self, session: Session) -> None:
        call = session.waiting[0]
        call.began_at = session.active_at = self.world.now
        slow_s = self.faults.slow_statement_s()
        if slow_s and call.name in STATEMENTS:
            call.snapshot = self._snapshot()
            self.world.after(slow_s, self._run, session, call)
        else:
            self._run(session, call)

    def _snapshot(self) -> dict[str, Table]:
        return {name: dict(table) for name, table in self.tables.items()}

    def _run(self, session: Session, call: Call) -> None:
        if not session.is_open and session.is_explicit:
            return
        # A statement that runs is finished and committed, though nobody waits for its answer any more.
        self.statements += 1
        try:
            result = self._execute(session, call)
        except Blocked as blocked:
            if session.is_open:
                self._block(session, call, blocked)
            else:
                self._end(session)
            return
        except asyncpg.PostgresError as error:
            result = error
            session.is_aborted = session.is_explicit
            if not session.is_explicit:
                self._end(session)
        self._finish(session, call, result)

    def _finish(self, session: Session, call: Call, result: object) -> None:
        session.active_at = self.world.now
        if not session.is_open:
            return
        session.waiting.popleft()
        call.answer(result)
        self._watch_idle(session)
        if session.waiting and session.is_open:
            self._begin(session)

    def _execute(self, session: Session, call: Call) -> object:
        match call.name:
            case "BEGIN":
                session.is_explicit = True
                session.transaction = Transaction(self, session)
                return "BEGIN"
            case "COMMIT" | "ROLLBACK":
                if call.name == "COMMIT" and not session.is_aborted:
                    self._commit(session)
                self._end(session)
                session.is_explicit = session.is_aborted = False
                return call.name
            case "LISTEN":
                session.channels.add(call.values[0])
                return "LISTEN"
            case "UNLISTEN":
                session.channels.discard(call.values[0])
                return "UNLISTEN"
        if session.is_aborted:
            raise asyncpg.InFailedSQLTransactionError("current transaction is aborted")
        transaction = session.transaction = session.transaction or Transaction(self, session)
        # A statement that fails or waits has written nothing.
        before = {name: dict(written) for name, written in transaction.writes.items()}
        transaction.snapshot = call.snapshot
        try:
            result = STATEMENTS[call.name](transaction, *call.values)
        except BaseException:
            transaction.writes = before
            raise
        finally:
            transaction.snapshot = None
        if not session.is_explicit:
            self._commit(session)
            self._end(session)
        return result

    # --- locks ---

    def _block(self, session: Session, call: Call, blocked: Blocked) -> None:
        """Wait for the lock, with the snapshot of the beginning."""
        if call.snapshot is None:
            call.snapshot = self._snapshot()
        call.waits_for = blocked.lock
        if self._is_deadlock(session, blocked.lock):
            session.is_aborted = session.is_explicit
            if not session.is_explicit:
                self._end(session)
            self._finish(session, call, asyncpg.DeadlockDetectedError("deadlock detected"))
            return
        self._blocked.append((session, call))
        if timeout_s := session.seconds("lock_timeout"):
            self.world.at(call.began_at + timeout_s, self._time_out_lock, session, call)

    def _is_deadlock(self, session: Session, lock: tuple[str, Key]) -> bool:
        """Whether whoever holds this lock waits, in the end, for this session."""
        waits = {id(one): call.waits_for for one, call in self._blocked}
        asked, seen = [lock], set()
        while asked:
            for holder in self.locks.get(asked.pop(), ()):
                if holder.session is session:
                    if seen:
                        return True
                    continue
                wanted = waits.get(id(holder.session))
                if wanted is not None and wanted not in seen:
                    seen.add(wanted)
                    asked.append(wanted)
        return False

    def _time_out_lock(self, session: Session, call: Call) -> None:
        if (session, call) in self._blocked:
            self._blocked.remove((session, call))
            session.is_aborted = session.is_explicit
            if not session.is_explicit:
                self._end(session)
            error = asyncpg.LockNotAvailableError("canceling statement due to lock timeout")
            self._finish(session, call, error)

    def cancel(self, session: Session, call: Call) -> None:
        """The client has asked, on a line of its own, that this statement be cancelled."""
        if (session, call) in self._blocked and session.is_open:
            self._blocked.remove((session, call))
            session.is_aborted = session.is_explicit
            if not session.is_explicit:
                self._end(session)
            error = asyncpg.QueryCanceledError("canceling statement due to user request")
            self._finish(session, call, error)

    def _commit(self, session: Session) -> None:
        transaction = session.transaction
        assert transaction is not None
        for table, written in transaction.writes.items():
            rows = self.tables[table]
            for key, row in written.items():
                if row is None:
                    rows.pop(key, None)
                else:
                    rows[key] = row
        for channel, payload in transaction.notices:
            for other in self.sessions:
                if other.is_open and channel in other.channels:
                    other.push((channel, payload))

    def _end(self, session: Session) -> None:
        """The transaction is over: its locks are free, and whoever waited for them goes on."""
        transaction, session.transaction = session.transaction, None
        if transaction is None or not transaction.locks:
            return
        for name in transaction.locks:
            held = self.locks[name]
            del held[transaction]
            if not held:
                del self.locks[name]
        freed = [one for one in self._blocked if one[1].waits_for in transaction.locks]
        self._blocked = [one for one in self._blocked if one[1].waits_for not in transaction.locks]
        for one, call in freed:
            call.waits_for = None
            self.world.at(self.world.now, self._run, one, call)

    def _watch_idle(self, session: Session) -> None:
        """A transaction whose client says nothing is ended after a while, where the session asked for that."""
        timeout_s = session.seconds("idle_in_transaction_session_timeout")
        if session.is_explicit and timeout_s:
            self.world.after(timeout_s, self._time_out_idle, session, session.active_at)

    def _time_out_idle(self, session: Session, active_at: float) -> None:
        is_idle = session.is_explicit and not session.waiting and session.active_at == active_at
        if session.is_open and is_idle:
            self.world.note(
                f"database ends session {session.number} of {session.client}: idle in transaction"
            )
            session.push(None)
            self.close(session)

    # --- for those who look on ---

    def all(self, table: str) -> Iterable[Row]:
        return self.tables[table].values()


class Faults:
    """How often a statement of the server is slow; replaced by a seed's own."""

    def slow_statement_s(self) -> float:
        return 0.0
