"""What is remembered in a PostgreSQL database? `PostgresStore`: turns with their usage, events, conversations, keys,
limits, and the seal keys.

In: turns to save, owners and ids to find. Out: turns, and only our own errors. How the database is reached is the
question of `postgres_database`; here are the rows, packed as in SQLite. A class for each seam, in the order of
`seams/`, then what runs on a connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Literal, Self

import msgspec
from msgspec.structs import astuple, replace

from segue.aio import off_loop
from segue.errors import Fenced, Unavailable
from segue.limits import Draw, Grant, HeldPlaces, Key, KeyLimits, Level, Spent, share_out
from segue.seals.cipher import new_key
from segue.seams.access import RingKey
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
from segue.stores.maintenance import BATCH, BEAT_S, CLAIM_S, ERASED_S, OVERLAP_S, SPENDING_S
from segue.stores.postgres_database import (
    BESIDE,
    CONFLICTS,
    CONNECTIONS_MAX,
    LEASE_S,
    QUERIES,
    PostgresConnection,
    PostgresDatabase,
    PostgresWork,
    WriteConflict,
    as_row,
    border,
    fetch,
    touched,
)
from segue.stores.records import LongField, TurnColumns, is_text
from segue.stores.shelves import FileTable, SkillTable, TurnList
from segue.wire.events import Event

# Long fields that this process has sent before, about 100 bytes each: agents repeat 19 KB of tools in every turn.
KNOWN_MAX = 10_000
# Decoded in a thread above this: a millisecond of the event loop.
LONG_BYTES = 256 * 1024
# Above the time and number of every turn: where a sweep begins.
HIGHEST = (2**62, 2**62)
NO_USAGE = (None,) * 7
# The worker of turns that a dead process has left queued.
NOBODY = ""

log = logging.getLogger(__name__)

_FieldKey = tuple[Owner, bytes]


class PostgresStore:
    """A whole store in one database, which several machines may share."""

    def __init__(self, database: PostgresDatabase) -> None:
        self.turns = _Turns(database)
        self.ledger = _Ledger(database)
        self.events = _EventLog(database)
        self.idempotency_keys = _IdempotencyKeys(database)
        self.conversations = _Conversations(database, self.turns)
        self.keys = _Keys(database)
        self.listing = TurnList(database)
        self.files = FileTable(database)
        self.skills = SkillTable(database)
        self.shared_limits = _SharedLimits(database)
        self.maintenance = _Maintenance(database)
        self.ring = _Ring(database)
        self.is_ready = database.is_ready
        self.close = database.close

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        durability: Literal["full", "relaxed"] = "full",
        connections_max: int = CONNECTIONS_MAX + BESIDE,
        direct: str = "",
    ) -> Self:
        """Connect to the database, and bring its tables up to date. `connections_max` counts those of the bus and of
        the lease; `direct`: another address of it, if this one is that of a pooler."""
        pooled = connections_max - BESIDE
        database = await PostgresDatabase.open(
            url, durability=durability, connections_max=pooled, direct=direct
        )
        return cls(database)


class _Turns:
    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        # Long fields that were in the database when they were last named.
        self._known: OrderedDict[_FieldKey, None] = OrderedDict()

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        return await self._load("find", owner, turn_id)

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        return await self._load("read", owner, turn_id)

    async def save(self, turn: Turn) -> None:
        """The turn and its usage, in one transaction. A second save replaces the first; a turn that was deleted
        meanwhile leaves its usage only. `Fenced` if another worker has written the turn, or given its key away."""
        with border():
            work = await off_loop(turn.bytes > records.LONG_TURN_BYTES, self.writer, turn)
        await self._database.run(work)

    def writer(self, turn: Turn) -> PostgresWork[None]:
        """What a connection does to save this turn."""
        assert turn.is_stored, "an unstored turn has reached the database"
        record = records.pack(turn)
        entry = records.usage_of(turn)
        names = [field and field.digest for field in (record.instructions, record.tools)]
        worker = self._database.worker
        # The turn and its owner are in the row already.
        usage = NO_USAGE if entry is None else astuple(entry)[2:9]
        key_id = "" if entry is None else entry.key_id
        columns = (turn.owner, *record[:4], *names, worker if entry is None else None, *usage)
        fence = (worker, turn.holds_key, key_id)
        return lambda connection: self._save(connection, turn.owner, record, columns, fence)

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        """Its row, its events, its idempotency keys, and the long fields that no other turn names."""
        is_name = is_text(owner, turn_id)
        return is_name and await self._database.execute("delete", owner, turn_id) > 0

    async def _save(
        self,
        connection: PostgresConnection,
        owner: Owner,
        record: TurnColumns[LongField],
        columns: Sequence[object],
        fence: tuple[str, bool, str],
    ) -> None:
        """Long fields that are known are only named. If one was deleted meanwhile the statement fails, and all are
        sent."""
        named = [field for field in (record.instructions, record.tools) if field is not None]
        new = [field for field in named if (owner, field.digest) not in self._known]
        digests = [field.digest for field in new]
        bodies = [field.body for field in new]
        try:
            if not await connection.fetch(QUERIES["save"], *columns, digests, bodies, *fence):
                raise Fenced
        except CONFLICTS:
            for field in named:
                self._known.pop((owner, field.digest), None)
            raise
        for field in named:
            self._known[(owner, field.digest)] = None
            self._known.move_to_end((owner, field.digest))
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    async def _load(self, name: str, owner: Owner, turn_id: str) -> Turn | None:
        if not is_text(owner, turn_id):
            return None
        work = partial(_fetch_chain, name=name, owner=owner, turn_id=turn_id)
        rows, fields = await self._database.run(work, reads_much=True)
        with border():
            build = partial(records.link, owner, turn_id, rows, fields.__getitem__)
            # A long chain or turn takes a while to decode; the event loop goes on meanwhile.
            is_long = len(rows) > 1 or any(len(row.history) > LONG_BYTES for row in rows)
            return await asyncio.to_thread(build) if is_long else build()


@dataclass(frozen=True, slots=True)
class _Ledger:
    database: PostgresDatabase

    async def settle(self, entries: Sequence[UsageEntry]) -> None:
        # In the same order everywhere, so that two processes with the same rows cannot deadlock.
        rows = sorted(astuple(entry) for entry in entries)
        if rows:
            query = QUERIES["settle"]
            await self.database.run(lambda connection: connection.executemany(query, rows))

    async def report(
        self, owner: Owner | None, since: int, until: int = SECONDS_MAX
    ) -> Sequence[UsageTotal]:
        return await self.database.fetch("report", UsageTotal, owner, since, until)

    async def spent(self, owner: Owner, key_id: str, day: int, month: int) -> Spent:
        (spent,) = await self.database.fetch("spent", Spent, owner, key_id, day, month)
        return spent


@dataclass(frozen=True, slots=True)
class _EventLog:
    database: PostgresDatabase

    async def append(self, owner: Owner, turn_id: str, events: Sequence[Event]) -> None:
        """One row for all of them; none if their turn was deleted, or ended by another worker."""
        if events:
            body = await asyncio.to_thread(records.pack_events, events)
            first = events[0].number
            last = events[-1].number
            columns = (owner, turn_id, first, last, body, self.database.worker)
            await self.database.execute("append", *columns)

    async def read_after(self, owner: Owner, turn_id: str, number: int) -> Sequence[Event] | None:
        batches = await self.database.fetch("events_after", bytes, owner, turn_id, number)
        if not batches:
            return None
        with border():
            return await asyncio.to_thread(records.unpack_events, batches, number)

    async def delete(self, owner: Owner, turn_id: str) -> None:
        if is_text(owner, turn_id):
            await self.database.execute("delete_events", owner, turn_id)


@dataclass(frozen=True, slots=True)
class _IdempotencyKeys:
    database: PostgresDatabase

    async def claim(self, claim: Claim) -> Claim:
        assert claim.is_stored, "the idempotency key of an unstored turn has reached the database"
        key = records.digest_key(claim.key)
        worker = self.database.worker
        columns = (claim.owner, key, claim.turn_id, claim.digest, worker, CLAIM_S)
        rows = await self.database.fetch("claim", as_row, *columns)
        if not rows:
            # This process was taken for dead; it learns that with its next heartbeat, and has a new name then.
            raise Unavailable("The store cannot be reached at the moment.", wait_s=BEAT_S)
        ((turn_id, digest),) = rows
        return replace(claim, turn_id=turn_id, digest=digest)

    async def release(self, claim: Claim) -> None:
        key = (claim.owner, records.digest_key(claim.key), claim.turn_id, self.database.worker)
        await self.database.execute("release", *key)


@dataclass(frozen=True, slots=True)
class _Conversations:
    database: PostgresDatabase
    turns: _Turns

    async def find(self, owner: Owner, conversation_id: str) -> Conversation | None:
        key = (owner, conversation_id)
        rows = await self.database.fetch(
            "find_conversation", lambda *row: records.unpack_conversation(*key, row), *key
        )
        return rows[0] if rows else None

    async def read(
        self, owner: Owner, conversation_id: str, since: int = 0, until: int = POSITION_MAX
    ) -> Sequence[ConversationItem]:
        key = (owner, conversation_id, since, until)
        return await self.database.fetch("read_shelved", records.unpack_added, *key)

    async def names(self, owner: Owner, conversation_id: str) -> Sequence[tuple[int, str, int]]:
        return await self.database.fetch("name_shelved", as_row, owner, conversation_id)

    async def save(
        self,
        conversation: Conversation,
        added: Sequence[ConversationItem] = (),
        turn: Turn | None = None,
    ) -> bool:
        with border():
            ids = [item.id for item in added]
            bodies = [records.pack_added(item) for item in added]
            write_turn = None if turn is None else self.turns.writer(turn)
        tries = count()
        worker = self.database.worker

        async def write(connection: PostgresConnection) -> bool:
            if next(tries) and await _has_added(connection, conversation, ids):
                # The first try was committed, and its answer was lost.
                return True
            rows = (conversation, ids, bodies, worker)
            if write_turn is None:
                return await _write_conversation(connection, *rows)
            async with connection.transaction():
                is_written = await _write_conversation(connection, *rows)
                if is_written:
                    await write_turn(connection)
            return is_written

        return await self.database.run(write)

    async def delete(self, owner: Owner, conversation_id: str, item_id: str | None = None) -> bool:
        name = "delete_conversation" if item_id is None else "unshelve"
        key = (owner, conversation_id) if item_id is None else (owner, conversation_id, item_id)
        return is_text(*key) and await self.database.execute(name, *key) > 0


@dataclass(frozen=True, slots=True)
class _Keys:
    database: PostgresDatabase

    async def add(self, key: Key, digest: str) -> None:
        await self.database.execute("add_key", *records.pack_key(key, digest).values())

    async def find(self, digests: Sequence[str]) -> Mapping[str, Key]:
        return dict(await self.database.fetch("find_keys", records.unpack_key, list(digests)))

    async def expired(self, digests: Sequence[str]) -> int | None:
        found = await self.database.fetch("expired_key", int, list(digests))
        return next(iter(found), None)

    async def given_out(self) -> Sequence[Key]:
        return [key for _, key in await self.database.fetch("list_keys", records.unpack_key)]

    async def limit(self, key_id: str, limits: KeyLimits) -> bool:
        encoded = msgspec.json.encode(limits).decode()
        return is_text(key_id) and await self.database.execute("limit_key", key_id, encoded) > 0

    async def revoke(self, key_id: str) -> bool:
        return is_text(key_id) and await self.database.execute("revoke_key", key_id) > 0

    async def note_use(self, key_ids: Sequence[str]) -> None:
        await self.database.execute("note_key_use", list(key_ids))


@dataclass(frozen=True, slots=True)
class _SharedLimits:
    database: PostgresDatabase

    async def draw(self, draw: Draw) -> Grant:
        return await self.database.run(partial(_draw, draw=draw, worker=self.database.worker))


class _Maintenance:
    """A process is alive while its row in `workers` is recent, by the server's clock; a lost connection proves
    nothing. Of several that find one dead, one claims it and ends what it left."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self.beat = database.beat
        # How far down, from the newest to the oldest, this pass of the sweep has come.
        self._below = HIGHEST
        # What was being taken over when the server did not answer: it may be this process's.
        self._taking: set[_TurnKey] = set()

    async def recover(self) -> int:
        count = 0
        me = self._database.worker
        for worker in await self._database.fetch("dead", str, me, LEASE_S):
            if await self._database.execute("claim_worker", worker, me, LEASE_S):
                is_more = True
                while is_more:
                    work = partial(_end_some, worker=worker, me=me)
                    ended, is_more = await self._database.run(work)
                    count += ended
                await self._database.run(partial(_release_all, worker=worker))
        return count

    async def take_over(self, count_max: int) -> Sequence[tuple[Owner, str]]:
        if count_max <= 0:
            return []
        me = self._database.worker
        taking = self._taking
        work = partial(_take_over_some, me=me, count_max=count_max, taking=taking)
        taken = await self._database.run(work)
        taking.clear()
        return taken

    async def erasures(self) -> Sequence[tuple[Owner, str]]:
        """Recent ones; each is returned a few times."""
        return await self._database.fetch("erasures", as_row, OVERLAP_S + int(BEAT_S))

    async def sweep(self, retention: Retention) -> bool:
        work = partial(_sweep_some, retention=retention, below=self._below)
        self._below, is_more = await self._database.run(work)
        return is_more


@dataclass(frozen=True, slots=True)
class _Ring:
    """The seal keys in the database: every machine that uses the database has the same."""

    database: PostgresDatabase

    async def load(self) -> list[RingKey]:
        fresh = new_key()
        await self.database.execute("begin_ring", fresh.name, fresh.secret)
        return await self.database.fetch("ring", RingKey)

    async def rotate(self) -> int:
        await self.load()
        fresh = new_key()
        await self.database.execute("add_to_ring", fresh.name, fresh.secret)
        return len(await self.load())


# --- rows of turns -----------------------------------------------------------------------------------


async def _fetch_chain(
    connection: PostgresConnection, name: str, owner: Owner, turn_id: str
) -> tuple[list[TurnColumns[bytes]], dict[bytes, LongField]]:
    """The rows that the statement of this name finds, and the long fields that they name, which have no id."""
    rows: list[TurnColumns[bytes]] = await fetch(connection, name, TurnColumns, owner, turn_id)
    fields = {row[2]: LongField(row[2], row[3]) for row in rows if row.id is None}
    return [row for row in rows if row.id is not None], fields


def _named(rows: Sequence[TurnColumns[bytes]]) -> set[bytes]:
    """The digests of all long fields that these turns name."""
    return {digest for row in rows for digest in (row.instructions, row.tools) if digest}


# --- rows of conversations and limits ----------------------------------------------------------------


async def _has_added(
    connection: PostgresConnection, conversation: Conversation, ids: Sequence[str]
) -> bool:
    """Whether these items are what came next in the conversation."""
    first = conversation.count
    key = (conversation.owner, conversation.id, first, first + len(ids))
    rows = await connection.fetch(QUERIES["read_shelved"], *key)
    return bool(ids) and [row[0] for row in rows] == list(ids)


async def _write_conversation(
    connection: PostgresConnection,
    conversation: Conversation,
    ids: Sequence[str],
    bodies: Sequence[bytes],
    worker: str,
) -> bool:
    """The rows of a conversation, in one statement; False if another has written it meanwhile."""
    key = (conversation.owner, conversation.id)
    metadata = msgspec.json.encode(conversation.metadata)
    tip = (metadata, conversation.tip_id, conversation.tip_items)
    if conversation.version:
        speaker = (conversation.speaker, worker)
        columns = (*key, *tip, conversation.version, ids, bodies, *speaker)
        return bool(await connection.fetch(QUERIES["update_conversation"], *columns))
    made = (*key, conversation.created_at, *tip, ids, bodies)
    await connection.execute(QUERIES["create_conversation"], *made)
    return True


async def _draw(connection: PostgresConnection, *, draw: Draw, worker: str) -> Grant:
    """Read what is left and what others hold, write what is left then; nothing is locked between the two, and a
    process that finds that another was faster tries again."""
    ((level, others, now, version),) = await fetch(
        connection, "level", _read_level, draw.key_id, worker
    )
    left, grant = share_out(draw, level, others, now)
    row = (draw.key_id, *astuple(left), version, worker, *astuple(grant.held))
    if not await connection.fetch(QUERIES["save_level"], *row):
        raise WriteConflict("The store cannot be reached at the moment.")
    return grant


def _read_level(
    now: float, version: int, connections: int, lanes: int, *level: float | None
) -> tuple[Level | None, HeldPlaces, float, int]:
    columns = [column for column in level if column is not None]
    return Level(*columns) if columns else None, HeldPlaces(connections, lanes), now, version


# --- maintenance -------------------------------------------------------------------------------------


async def _end_some(connection: PostgresConnection, *, worker: str, me: str) -> tuple[int, bool]:
    """End as failed some of the turns that this dead process left, in one transaction; how many, and whether there are
    more. Those that it has not begun are left to the process that takes them over."""
    async with connection.transaction():
        left = await fetch(connection, "abandoned", _left_turn, worker, BATCH)
        named = [(owner, digest) for owner, _, row in left for digest in _named([row])]
        fields = dict(await fetch(connection, "parts_of", _owned_field, *_columns(named, 2)))
        ends, queued, unreadable = await asyncio.to_thread(_abandon, left, fields)
        if queued:
            await connection.execute(QUERIES["hand_over"], *_columns(queued, 2), worker, NOBODY)
        if unreadable:
            await connection.execute(QUERIES["give_up"], *_columns(unreadable, 2), me)
        if ends:
            rows = [(*key, response, *_usage(entry)) for key, response, entry, _ in ends]
            await connection.execute(QUERIES["end_turns"], me, *_columns(rows, 9))
        last = [
            (*key, event.number, records.pack_events([event]))
            for key, *_, events in ends
            for event in events
        ]
        if last:
            await connection.execute(QUERIES["append_last"], *_columns(last, 4))
    return len(ends) + len(unreadable), bool(left)


async def _take_over_some(
    connection: PostgresConnection, *, me: str, count_max: int, taking: set[_TurnKey]
) -> Sequence[_TurnKey]:
    """Take over some queued turns that no process owns; those that another process takes now are skipped."""
    before = sorted(taking)
    taken_before = (
        await fetch(connection, "taken", _turn_key, *_columns(before, 2), me) if before else []
    )
    if not await connection.fetch(QUERIES["left"], 1):
        # Mostly there are none, and a transaction is three round trips.
        return taken_before
    async with connection.transaction():
        taken = await fetch(connection, "left", _turn_key, count_max)
        if taken:
            taking.update(taken)
            await connection.execute(QUERIES["hand_over"], *_columns(taken, 2), NOBODY, me)
    return [*taken_before, *taken]


_TurnKey = tuple[Owner, str]
_LeftTurn = tuple[Owner, int | None, TurnColumns[bytes]]
_EndedTurn = tuple[_TurnKey, bytes, UsageEntry, list[Event]]


def _turn_key(owner: Owner, turn_id: str) -> _TurnKey:
    return owner, turn_id


def _left_turn(owner: Owner, last: int | None, *row: bytes) -> _LeftTurn:
    columns: TurnColumns[bytes] = TurnColumns._make(row)
    return owner, last, columns


def _owned_field(owner: Owner, digest: bytes, body: bytes) -> tuple[_FieldKey, LongField]:
    return (owner, digest), LongField(digest, body)


def _abandon(
    left: Sequence[_LeftTurn], fields: Mapping[_FieldKey, LongField]
) -> tuple[list[_EndedTurn], list[_TurnKey], list[_TurnKey]]:
    """How these turns end, those that have not begun, and those that cannot be read: they must not block the others, or
    a server that starts."""
    ends: list[_EndedTurn] = []
    queued: list[_TurnKey] = []
    unreadable: list[_TurnKey] = []
    for owner, last, row in left:
        try:
            turn = records.link(owner, row.id, [row], lambda name: fields[owner, name])  # noqa: B023
            assert turn is not None
            if records.is_left(turn):
                queued.append((owner, row.id))
                continue
            failed, entry, events = records.abandon(turn, last)
            ends.append(((owner, row.id), records.pack(failed).response, entry, events))
        except (ValueError, KeyError, msgspec.MsgspecError):
            message = "turn %s was left running by a dead process and cannot be decoded"
            log.exception(message, row.id)
            unreadable.append((owner, row.id))
    return ends, queued, unreadable


def _usage(entry: UsageEntry) -> tuple[object, ...]:
    """The columns of an abandoned turn's usage; all have the same status."""
    tokens = (entry.input_tokens, entry.cached_tokens, entry.output_tokens)
    return (entry.model, *tokens, entry.ended_at, entry.tool_calls)


def _columns(rows: Sequence[Sequence[object]], width: int) -> list[list[object]]:
    """Rows as columns, side by side: one argument of a statement for each."""
    return [[row[at] for row in rows] for at in range(width)]


async def _release_all(connection: PostgresConnection, *, worker: str) -> None:
    """A dead process holds nothing any more: its idempotency keys, conversations and slots are free again."""
    async with connection.transaction():
        for name in (
            "lock_lease", "lock_claims", "release_claims", "release_speakers", "release_places", "leave",
        ):  # fmt: skip
            await connection.execute(QUERIES[name], worker)


async def _sweep_some(
    connection: PostgresConnection, *, retention: Retention, below: tuple[int, int]
) -> tuple[tuple[int, int], bool]:
    """Erase a few old rows of each kind; how far down it came, and whether there is more to look at."""
    gone = 0
    for name, age_s in (
        ("delete_erased_events", 1),
        ("delete_old_events", retention.events_s),
        ("delete_old_claims", CLAIM_S),
        ("delete_old_erased", ERASED_S),
        ("delete_old_spending", SPENDING_S),
    ):
        if age_s:
            gone = max(gone, touched(await connection.execute(QUERIES[name], age_s, BATCH)))
    swept = await _sweep_turns(connection, retention.turns_s, below) if retention.turns_s else None
    return swept or HIGHEST, swept is not None or gone == BATCH


async def _sweep_turns(
    connection: PostgresConnection, age_s: int, below: tuple[int, int]
) -> tuple[int, int] | None:
    """Erase a batch of old turns, except those with descendants; the last that was looked at."""
    rows = await fetch(connection, "sweep_turns", as_row, age_s, *below)
    for saved_at, seq, seen, erased, _ in rows:
        log.info("%d of %d responses older than %d s were deleted", erased, seen, age_s)
        return int(saved_at), int(seq)
    return None
