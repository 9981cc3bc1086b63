"""What is remembered in one SQLite file? `SqliteStore`: turns with their usage, events, conversations, keys, limits.

In: turns to save, owners and ids to find. Out: turns, and only our own errors. How the file is written and read beside
the event loop is the question of `sqlite_database`; here are the rows. A class for each seam, in the order of
`seams/`, then what the writing thread does.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal, Self, TypeVar

import msgspec
from msgspec import structs

from segue.aio import off_loop
from segue.limits import Draw, Grant, HeldPlaces, Key, KeyLimits, Level, Spent, share_out
from segue.seams.history import Owner, Turn, UsageEntry
from segue.seams.store import (
    POSITION_MAX,
    SECONDS_MAX,
    Claim,
    Conversation,
    ConversationItem,
    Retention,
    UsageTotal,
)
from segue.stores import records
from segue.stores.maintenance import BATCH, CLAIM_S, ERASED_S, OVERLAP_S, SPENDING_S
from segue.stores.records import LongField, TurnColumns, is_text
from segue.stores.shelves import FileTable, SkillTable, TurnList, numbered
from segue.stores.sqlite_database import QUERIES, SqliteDatabase, SqliteWork, border
from segue.wire.events import Event

T = TypeVar("T")

log = logging.getLogger(__name__)

# The worker of turns that a dead process has left queued.
NOBODY = ""
# Above the time and number of every turn: where a sweep begins.
HIGHEST = (2**62, 2**62)


class SqliteStore:
    """A whole store in one file."""

    # The seal keys are in a file beside it.
    ring: None = None

    def __init__(self, database: SqliteDatabase) -> None:
        self.turns = _Turns(database)
        self.listing = TurnList(_Numbered(database))
        self.ledger = _Ledger(database)
        self.events = _EventLog(database)
        self.idempotency_keys = _IdempotencyKeys(database)
        self.conversations = _Conversations(database)
        self.keys = _Keys(database)
        self.files = FileTable(_Numbered(database))
        self.skills = SkillTable(_Numbered(database))
        self.shared_limits = _SharedLimits(database)
        self.maintenance = _Maintenance(database)
        self.is_ready = database.is_ready
        self.close = database.close

    @classmethod
    async def open(cls, path: Path, *, durability: Literal["full", "relaxed"] = "full") -> Self:
        """Open or create the file, and bring its tables up to date."""
        return cls(await SqliteDatabase.open(path, durability=durability))


@dataclass(frozen=True, slots=True)
class _Turns:
    database: SqliteDatabase

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        return await self._load(QUERIES["find"], owner, turn_id)

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        return await self._load(QUERIES["read"], owner, turn_id)

    async def save(self, turn: Turn) -> None:
        """The turn and its usage, in one transaction. A second save replaces the first; a turn that
        was deleted meanwhile leaves its usage only."""
        with border():
            worker = self.database.lease.worker
            is_long = turn.bytes > records.LONG_TURN_BYTES
            work = await off_loop(is_long, _turn_writer, turn, worker)
        await self.database.write(work)

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        """Its row, its events, its idempotency keys, and the long fields that no other turn names."""
        key = {"owner": owner, "id": turn_id}
        is_name = is_text(owner, turn_id)
        return is_name and await self.database.execute("delete", key, is_erasing=True) > 0

    async def _load(self, query: str, owner: Owner, turn_id: str) -> Turn | None:
        if not is_text(owner, turn_id):
            return None
        return await self.database.read(lambda reader: _load_chain(reader, query, owner, turn_id))


@dataclass(frozen=True, slots=True)
class _Ledger:
    database: SqliteDatabase

    async def settle(self, entries: Sequence[UsageEntry]) -> None:
        if entries:
            rows = [structs.asdict(entry) for entry in entries]
            # Rows that are there already stay as they are.
            query = QUERIES["settle"]
            await self.database.write(lambda writer: writer.executemany(query, rows).rowcount)

    async def report(
        self, owner: Owner | None, since: int, until: int = SECONDS_MAX
    ) -> Sequence[UsageTotal]:
        key = {"owner": owner, "since": since, "until": until}
        return await self.database.fetch("report", UsageTotal, key)

    async def spent(self, owner: Owner, key_id: str, day: int, month: int) -> Spent:
        values = numbered((owner, key_id, day, month))
        (spent,) = await self.database.fetch("spent", Spent, values)
        return spent


@dataclass(frozen=True, slots=True)
class _EventLog:
    database: SqliteDatabase

    async def append(self, owner: Owner, turn_id: str, events: Sequence[Event]) -> None:
        """One row for all of them; none if their turn was deleted meanwhile."""
        if events:
            # Not packed in the writing thread: other writes would wait for it.
            write = await asyncio.to_thread(_events_writer, owner, turn_id, events)
            await self.database.write(write)

    async def read_after(self, owner: Owner, turn_id: str, number: int) -> Sequence[Event] | None:
        if not is_text(owner, turn_id):
            return None
        key = {"owner": owner, "turn_id": turn_id, "number": number}

        def load(reader: sqlite3.Connection) -> list[Event] | None:
            if reader.execute(QUERIES["has_events"], key).fetchone() is None:
                return None
            batches = reader.execute(QUERIES["events_after"], key)
            return records.unpack_events((row[0] for row in batches), number)

        return await self.database.read(load)

    async def delete(self, owner: Owner, turn_id: str) -> None:
        if is_text(owner, turn_id):
            key = {"owner": owner, "turn_id": turn_id}
            await self.database.execute("delete_events", key, is_erasing=True)


@dataclass(frozen=True, slots=True)
class _IdempotencyKeys:
    database: SqliteDatabase

    async def claim(self, claim: Claim) -> Claim:
        assert claim.is_stored, "the idempotency key of an unstored turn has reached the database"
        worker = self.database.lease.worker
        return await self.database.write(lambda writer: _write_claim(writer, claim, worker))

    async def release(self, claim: Claim) -> None:
        key = {"owner": claim.owner, "key": records.digest_key(claim.key), "turn_id": claim.turn_id}
        await self.database.execute("release", key)


@dataclass(frozen=True, slots=True)
class _Conversations:
    database: SqliteDatabase

    async def find(self, owner: Owner, conversation_id: str) -> Conversation | None:
        key = {"owner": owner, "id": conversation_id}
        rows = await self.database.fetch(
            "find_conversation",
            lambda *row: records.unpack_conversation(owner, conversation_id, row),
            key,
        )
        return rows[0] if rows else None

    async def read(
        self, owner: Owner, conversation_id: str, since: int = 0, until: int = POSITION_MAX
    ) -> Sequence[ConversationItem]:
        key = {"owner": owner, "id": conversation_id, "since": since, "until": until}
        return await self.database.fetch("read_shelved", records.unpack_added, key)

    async def names(self, owner: Owner, conversation_id: str) -> Sequence[tuple[int, str, int]]:
        key = {"owner": owner, "id": conversation_id}
        return await self.database.fetch("name_shelved", lambda *row: row, key)

    async def save(
        self,
        conversation: Conversation,
        added: Sequence[ConversationItem] = (),
        turn: Turn | None = None,
    ) -> bool:
        worker = self.database.lease.worker
        with border():
            bodies = [(item.id, records.pack_added(item)) for item in added]
            write_turn = None if turn is None else _turn_writer(turn, worker)

        def write(writer: sqlite3.Connection) -> bool:
            is_written = _write_conversation(writer, conversation, bodies, worker)
            if is_written and write_turn is not None:
                write_turn(writer)
            return is_written

        return await self.database.write(write)

    async def delete(self, owner: Owner, conversation_id: str, item_id: str | None = None) -> bool:
        key = {"owner": owner, "id": conversation_id, "item_id": item_id}
        if not is_text(owner, conversation_id, item_id or ""):
            return False

        def erase(writer: sqlite3.Connection) -> bool:
            if item_id is None:
                writer.execute(QUERIES["unshelve_all"], key)
                return writer.execute(QUERIES["delete_conversation"], key).rowcount > 0
            is_erased = writer.execute(QUERIES["unshelve"], key).rowcount > 0
            if is_erased:
                writer.execute(QUERIES["unlink_tip"], key)
            return is_erased

        return await self.database.write(erase, is_erasing=True)


@dataclass(frozen=True, slots=True)
class _Keys:
    database: SqliteDatabase

    async def add(self, key: Key, digest: str) -> None:
        await self.database.execute("add_key", records.pack_key(key, digest))

    async def find(self, digests: Sequence[str]) -> Mapping[str, Key]:
        wanted = {"digests": msgspec.json.encode(digests).decode(), "now": int(time.time())}
        return dict(await self.database.fetch("find_keys", records.unpack_key, wanted))

    async def expired(self, digests: Sequence[str]) -> int | None:
        wanted = {"digests": msgspec.json.encode(digests).decode(), "now": int(time.time())}
        return next(iter(await self.database.fetch("expired_key", int, wanted)), None)

    async def given_out(self) -> Sequence[Key]:
        return [key for _, key in await self.database.fetch("list_keys", records.unpack_key, {})]

    async def limit(self, key_id: str, limits: KeyLimits) -> bool:
        key = {"id": key_id, "limits": msgspec.json.encode(limits).decode()}
        return is_text(key_id) and await self.database.execute("limit_key", key) > 0

    async def revoke(self, key_id: str) -> bool:
        key = {"id": key_id, "now": int(time.time())}
        return is_text(key_id) and await self.database.execute("revoke_key", key) > 0

    async def note_use(self, key_ids: Sequence[str]) -> None:
        used = {"ids": msgspec.json.encode(key_ids).decode(), "now": int(time.time())}
        await self.database.execute("note_key_use", used)


@dataclass(frozen=True, slots=True)
class _Numbered:
    """The database for statements with numbered values."""

    database: SqliteDatabase

    async def fetch(self, name: str, make: Callable[..., T], *values: object) -> list[T]:
        return await self.database.fetch(name, make, numbered(values))

    async def execute(self, name: str, *values: object) -> int:
        is_erasing = name.startswith("delete")
        return await self.database.execute(name, numbered(values), is_erasing=is_erasing)


@dataclass(frozen=True, slots=True)
class _SharedLimits:
    database: SqliteDatabase

    async def draw(self, draw: Draw) -> Grant:
        worker = self.database.lease.worker
        return await self.database.write(lambda writer: _draw(writer, draw, worker))


class _Maintenance:
    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self._seen_at = int(time.time())
        # How far down, from the newest to the oldest, this pass of the sweep has come.
        self._below = HIGHEST

    async def beat(self) -> bool:
        # The kernel holds the lease.
        return True

    async def recover(self) -> int:
        count = 0
        for worker in await self._database.read(self._dead):
            is_more = True
            while is_more:
                ended, is_more = await self._database.write(partial(_end_some, worker=worker))
                count += ended
            with border():
                self._database.lease.remove(worker)
        return count

    async def take_over(self, count_max: int) -> Sequence[tuple[Owner, str]]:
        # Read first: mostly there are none, and reading needs no lock.
        if count_max <= 0 or not await self._database.fetch(
            "left", lambda *row: row, {"count_max": 1}
        ):
            return []
        worker = self._database.lease.worker
        return await self._database.write(
            partial(_take_over_some, worker=worker, count_max=count_max)
        )

    async def erasures(self) -> Sequence[tuple[Owner, str]]:
        now = int(time.time())
        since = {"since": self._seen_at - OVERLAP_S}
        erased = await self._database.fetch("erasures", lambda *key: key, since)
        self._seen_at = now
        return erased

    async def sweep(self, retention: Retention) -> bool:
        work = partial(_sweep_some, retention=retention, below=self._below)
        self._below, is_more = await self._database.write(work, is_erasing=True)
        return is_more

    def _dead(self, reader: sqlite3.Connection) -> list[str]:
        lease = self._database.lease
        running = {row[0] for row in reader.execute(QUERIES["workers"])}
        return [worker for worker in running | lease.others() if not lease.is_alive(worker)]


# --- rows of turns -----------------------------------------------------------------------------------


def _turn_writer(turn: Turn, worker: str) -> SqliteWork[None]:
    """What the writing thread does to save this turn, which runs in this process or has ended."""
    assert turn.is_stored, "an unstored turn has reached the database"
    record = records.pack(turn)
    entry = records.usage_of(turn)
    owner = turn.owner
    row = record._asdict() | {
        "owner": owner,
        "instructions": record.instructions and record.instructions.digest,
        "tools": record.tools and record.tools.digest,
        "worker": worker if entry is None else None,
    }

    def write(writer: sqlite3.Connection) -> None:
        if not _is_erased(writer, owner, turn.id):
            for field in filter(None, (record.instructions, record.tools)):
                writer.execute(QUERIES["save_part"], {"owner": owner, **field._asdict()})
            writer.execute(QUERIES["save"], row | {"now": int(time.time())})
        if entry is not None:
            writer.execute(QUERIES["settle"], structs.asdict(entry))

    return write


def _is_erased(connection: sqlite3.Connection, owner: Owner, turn_id: str) -> bool:
    key = {"owner": owner, "id": turn_id}
    return connection.execute(QUERIES["is_erased"], key).fetchone() is not None


def _load_chain(reader: sqlite3.Connection, query: str, owner: Owner, turn_id: str) -> Turn | None:
    """The turns that the query finds, linked from the oldest on."""
    cursor = reader.execute(query, {"owner": owner, "id": turn_id})
    rows: list[TurnColumns[int]] = [TurnColumns(*row) for row in cursor]
    return records.link(owner, turn_id, rows, cache(partial(load_field, reader, owner)))


def load_field(reader: sqlite3.Connection, owner: Owner, field_id: int) -> LongField:
    """A long field that a turn names."""
    row = reader.execute(QUERIES["part"], {"owner": owner, "id": field_id}).fetchone()
    return LongField(*row)


# --- rows of events, idempotency keys, conversations and limits --------------------------------------


def _events_writer(owner: Owner, turn_id: str, events: Sequence[Event]) -> SqliteWork[None]:
    """What the writing thread does to log these events."""
    row = {"owner": owner, "turn_id": turn_id, "now": int(time.time())}
    row |= {"first": events[0].number, "last": events[-1].number}
    row |= {"body": records.pack_events(events)}

    def write(writer: sqlite3.Connection) -> None:
        if not _is_erased(writer, owner, turn_id):
            writer.execute(QUERIES["append"], row)

    return write


def _write_claim(writer: sqlite3.Connection, claim: Claim, worker: str) -> Claim:
    """Take the key or read which claim holds it: one process writes at a time, so both are one step."""
    now = int(time.time())
    row = structs.asdict(claim) | {"key": records.digest_key(claim.key)}
    row |= {"worker": worker, "now": now, "expired": now - CLAIM_S}
    writer.execute(QUERIES["claim"], row)
    turn_id, digest = writer.execute(QUERIES["holder"], row).fetchone()
    return structs.replace(claim, turn_id=turn_id, digest=digest)


def _write_conversation(
    writer: sqlite3.Connection,
    conversation: Conversation,
    bodies: Sequence[tuple[str, bytes]],
    worker: str,
) -> bool:
    """False if it is gone or was written by another meanwhile."""
    fields = structs.asdict(conversation) | {
        "metadata": msgspec.json.encode(conversation.metadata),
        "added": len(bodies),
        "worker": worker,
    }
    query = "update_conversation" if conversation.version else "create_conversation"
    if writer.execute(QUERIES[query], fields).rowcount == 0:
        return False
    key = {"owner": conversation.owner, "id": conversation.id}
    rows = [
        {**key, "position": conversation.count + at, "item_id": item_id, "body": body}
        for at, (item_id, body) in enumerate(bodies)
    ]
    writer.executemany(QUERIES["shelve"], rows)
    return True


def _draw(writer: sqlite3.Connection, draw: Draw, worker: str) -> Grant:
    """Read and write in one step: one process writes at a time."""
    key = {"key_id": draw.key_id, "worker": worker}
    row = writer.execute(QUERIES["level"], key).fetchone()
    others = HeldPlaces(*writer.execute(QUERIES["held_by_others"], key).fetchone())
    level, grant = share_out(draw, None if row is None else Level(*row), others, time.time())
    if row is None or draw.requests or draw.tokens:
        writer.execute(QUERIES["save_level"], key | structs.asdict(level))
    query = "save_held" if grant.held != HeldPlaces() else "drop_held"
    writer.execute(QUERIES[query], key | structs.asdict(grant.held))
    return grant


# --- maintenance -------------------------------------------------------------------------------------


def _end_some(writer: sqlite3.Connection, worker: str) -> tuple[int, bool]:
    """End as failed some of the turns that this dead process left; how many, and whether there are more. In the end its
    idempotency keys, conversations and slots are free again."""
    key = {"worker": worker, "count_max": BATCH}
    left = writer.execute(QUERIES["abandoned"], key).fetchall()
    ended = [_end_turn(writer, owner, TurnColumns(*row), last) for owner, last, *row in left]
    if len(left) < BATCH:
        for query in ("release_claims", "release_speakers", "release_places"):
            writer.execute(QUERIES[query], key)
    return sum(ended), len(left) == BATCH


def _end_turn(
    writer: sqlite3.Connection, owner: Owner, row: TurnColumns[int], last: int | None
) -> bool:
    """End one turn as failed; False if it is left to another process instead. A turn that cannot be read must not block
    the others, or a server that starts."""
    try:
        turn = records.link(owner, row.id, [row], partial(load_field, writer, owner))
        assert turn is not None
        if records.is_left(turn):
            _hand_over(writer, owner, row.id, NOBODY)
            return False
        failed, _, events = records.abandon(turn, last)
        write_turn = _turn_writer(failed, "")
    except (ValueError, KeyError, msgspec.MsgspecError):
        log.exception("turn %s was left running by a dead process and cannot be decoded", row.id)
        writer.execute(QUERIES["give_up"], {"owner": owner, "id": row.id})
        return True
    write_turn(writer)
    if events:
        _events_writer(owner, row.id, events)(writer)
    return True


def _take_over_some(
    writer: sqlite3.Connection, worker: str, count_max: int
) -> Sequence[tuple[Owner, str]]:
    """Take over some queued turns that no process owns: one process writes at a time, so each is taken once."""
    taken = writer.execute(QUERIES["left"], {"count_max": count_max}).fetchall()
    for owner, turn_id in taken:
        _hand_over(writer, owner, turn_id, worker)
    return taken


def _hand_over(writer: sqlite3.Connection, owner: Owner, turn_id: str, worker: str) -> None:
    """A queued turn, with the conversation that it has locked, is now of this worker."""
    key = {"owner": owner, "id": turn_id, "worker": worker}
    writer.execute(QUERIES["hand_over_speaker"], key)
    writer.execute(QUERIES["hand_over"], key)


def _sweep_some(
    writer: sqlite3.Connection, retention: Retention, below: tuple[int, int]
) -> tuple[tuple[int, int], bool]:
    """Erase a few old rows of each kind; how far down it came, and whether there is more to look at."""
    now = int(time.time())
    gone = 0
    for query, age_s in (
        ("delete_old_events", retention.events_s),
        ("delete_old_claims", CLAIM_S),
        ("delete_old_erased", ERASED_S),
        ("delete_old_spending", SPENDING_S),
    ):
        if age_s:
            key = {"before": now - age_s, "count_max": BATCH}
            gone = max(gone, writer.execute(QUERIES[query], key).rowcount)
    seen = _sweep_turns(writer, now - retention.turns_s, below) if retention.turns_s else []
    is_more = BATCH in (gone, len(seen))
    return (seen[-1] if len(seen) == BATCH else HIGHEST), is_more


def _sweep_turns(
    writer: sqlite3.Connection, before: int, below: tuple[int, int]
) -> list[tuple[int, int]]:
    """Erase a few old turns, except those with descendants; all that were looked at."""
    # One bound: of two the index would begin at the newest turn.
    below = min(below, (before, 0))
    key = {"below_at": below[0], "below_seq": below[1], "count_max": BATCH}
    old: list[tuple[int, int, str, str]] = writer.execute(QUERIES["old_turns"], key).fetchall()
    for _, seq, owner, turn_id in old:
        if writer.execute(QUERIES["delete_tip"], {"seq": seq}).rowcount:
            writer.execute(QUERIES["forget_erased"], {"owner": owner, "id": turn_id})
    return [(saved_at, seq) for saved_at, seq, _, _ in old]
