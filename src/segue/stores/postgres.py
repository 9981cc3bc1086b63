"""What is remembered in a PostgreSQL database? `PostgresStore`: turns with their usage, events, conversations, keys,
limits, and the seal keys.

In: turns to save, owners and ids to find. Out: turns, and only our own errors. How the database is reached is the
question of `postgres_database`; here are the rows, packed as in SQLite. A class for each seam, in the order of
`turn/seams.py`, then what runs on a connection.
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

from segue.errors import StoreFailed
from segue.limits import Draw, Grant, HeldPlaces, Level, share_out
from segue.stores import records
from segue.stores.maintenance import BATCH, BEAT_S, CLAIM_S, ERASED_S, OVERLAP_S
from segue.stores.postgres_database import (
    CONFLICTS,
    LEASE_S,
    QUERIES,
    PostgresConnection,
    PostgresDatabase,
    PostgresWork,
    as_row,
    border,
    fetch,
    touched,
)
from segue.stores.records import LongField, TurnColumns, is_text
from segue.stores.seals import RingKey, new_key
from segue.turn import values
from segue.turn.values import Claim, Conversation, ConversationItem, Key, Owner, Retention, Turn
from segue.wire.events import Event

# Long fields that this process has sent before, about 100 bytes each: agents repeat 19 KB of tools in every turn.
KNOWN_MAX = 10_000
# How often a chain is read again because a long field was deleted between two statements.
READS_MAX = 3
# Above the time and number of every turn: where a sweep begins.
HIGHEST = (2**62, 2**62)
NO_USAGE = (None,) * 7

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
        self.shared_limits = _SharedLimits(database)
        self.maintenance = _Maintenance(database)
        self.ring = _Ring(database)
        self.is_ready = database.is_ready
        self.close = database.close

    @classmethod
    async def open(cls, url: str, *, durability: Literal["full", "relaxed"] = "full") -> Self:
        """Connect to the database, and bring its tables up to date."""
        return cls(await PostgresDatabase.open(url, durability=durability))


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
        """The turn and its usage, in one transaction. A second save replaces the first; a turn that
        was deleted meanwhile leaves its usage only."""
        with border():
            work = self.writer(turn)
        await self._database.run(work)

    def writer(self, turn: Turn) -> PostgresWork[None]:
        """What a connection does to save this turn."""
        assert turn.is_stored, "an unstored turn has reached the database"
        record, entry = records.pack(turn), records.usage_of(turn)
        names = [field and field.digest for field in (record.instructions, record.tools)]
        worker = self._database.worker if entry is None else None
        # The turn and its owner are in the row already.
        usage = NO_USAGE if entry is None else astuple(entry)[2:]
        columns = (turn.owner, *record[:4], *names, worker, *usage)
        return lambda connection: self._save(connection, turn.owner, record, columns)

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
    ) -> None:
        """Long fields that are known are only named. If one was deleted meanwhile the statement fails, and all are
        sent."""
        named = [field for field in (record.instructions, record.tools) if field is not None]
        new = [field for field in named if (owner, field.digest) not in self._known]
        digests, bodies = [field.digest for field in new], [field.body for field in new]
        try:
            await connection.execute(QUERIES["save"], *columns, digests, bodies)
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
        for _ in range(READS_MAX):
            read = partial(_fetch_chain, name=name, owner=owner, turn_id=turn_id)
            rows, fields = await self._database.run(read)
            if _named(rows) <= fields.keys():
                with border():
                    build = partial(records.link, owner, turn_id, rows, fields.__getitem__)
                    # A long chain takes a while to decode; the event loop goes on meanwhile.
                    return await asyncio.to_thread(build) if len(rows) > 1 else build()
        raise StoreFailed("The store failed; the log of the server has the reason.")


@dataclass(frozen=True, slots=True)
class _Ledger:
    database: PostgresDatabase

    async def settle(self, entries: Sequence[values.UsageEntry]) -> None:
        # In the same order everywhere, so that two processes with the same rows cannot deadlock.
        rows = sorted(astuple(entry) for entry in entries)
        if rows:
            query = QUERIES["settle"]
            await self.database.run(lambda connection: connection.executemany(query, rows))

    async def report(self, owner: Owner | None, since: int) -> Sequence[values.UsageTotal]:
        if owner is not None and not is_text(owner):
            return []
        return await self.database.fetch("report", values.UsageTotal, owner, since)


@dataclass(frozen=True, slots=True)
class _EventLog:
    database: PostgresDatabase

    async def append(self, owner: Owner, turn_id: str, events: Sequence[Event]) -> None:
        """One row for all of them; none if their turn was deleted meanwhile."""
        if events:
            body = await asyncio.to_thread(records.pack_events, events)
            first, last = events[0].number, events[-1].number
            await self.database.execute("append", owner, turn_id, first, last, body)

    async def read_after(self, owner: Owner, turn_id: str, number: int) -> Sequence[Event] | None:
        if not is_text(owner, turn_id):
            return None
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
        key, worker = records.digest_key(claim.key), self.database.worker
        columns = (claim.owner, key, claim.turn_id, claim.digest, worker, CLAIM_S)
        ((turn_id, digest),) = await self.database.fetch("claim", as_row, *columns)
        return replace(claim, turn_id=turn_id, digest=digest)

    async def release(self, claim: Claim) -> None:
        key = (claim.owner, records.digest_key(claim.key), claim.turn_id)
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
        self, owner: Owner, conversation_id: str, since: int = 0
    ) -> Sequence[ConversationItem]:
        key = (owner, conversation_id, since)
        return await self.database.fetch("read_shelved", records.unpack_added, *key)

    async def save(
        self,
        conversation: Conversation,
        added: Sequence[ConversationItem] = (),
        turn: Turn | None = None,
    ) -> bool:
        with border():
            ids, bodies = [item.id for item in added], [records.pack_added(item) for item in added]
            write_turn = None if turn is None else self.turns.writer(turn)
        tries, worker = count(), self.database.worker

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
        if item_id is None:
            return await self.database.execute("delete_conversation", owner, conversation_id) > 0
        return await self.database.execute("unshelve", owner, conversation_id, item_id) > 0


@dataclass(frozen=True, slots=True)
class _Keys:
    database: PostgresDatabase

    async def add(self, key: Key, digest: str) -> None:
        await self.database.execute("add_key", *records.pack_key(key, digest).values())

    async def find(self, digests: Sequence[str]) -> Mapping[str, Key]:
        return dict(await self.database.fetch("find_keys", records.unpack_key, list(digests)))

    async def given_out(self) -> Sequence[Key]:
        return [key for _, key in await self.database.fetch("list_keys", records.unpack_key)]

    async def revoke(self, key_id: str) -> bool:
        return is_text(key_id) and await self.database.execute("revoke_key", key_id) > 0


@dataclass(frozen=True, slots=True)
class _SharedLimits:
    database: PostgresDatabase

    async def draw(self, draw: Draw) -> Grant:
        return await self.database.run(partial(_draw, draw=draw, worker=self.database.worker))


class _Maintenance:
    """A process is alive while its row in `workers` is recent, by the server's clock; a lost connection proves
    nothing."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        # How far down, from the newest to the oldest, this pass of the sweep has come.
        self._below = HIGHEST

    async def recover(self) -> int:
        await self._database.run(self._database.heartbeat)
        count = 0
        for worker in await self._database.fetch("dead", str, self._database.worker, LEASE_S):
            while ended := await self._database.run(partial(_end_some, worker=worker)):
                count += ended
        return count

    async def take_over(self, count_max: int) -> Sequence[tuple[Owner, str]]:
        return []

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
    """The rows that the statement of this name finds, and the long fields that they name."""
    rows: list[TurnColumns[bytes]] = await fetch(connection, name, TurnColumns, owner, turn_id)
    return rows, await _fetch_fields(connection, owner, rows)


async def _fetch_fields(
    connection: PostgresConnection, owner: Owner, rows: Sequence[TurnColumns[bytes]]
) -> dict[bytes, LongField]:
    """The long fields that these turns name, as far as they are there."""
    digests = list(_named(rows))
    fields = await fetch(connection, "parts", LongField, owner, digests) if digests else []
    return {field.digest: field for field in fields}


def _named(rows: Sequence[TurnColumns[bytes]]) -> set[bytes]:
    """The digests of all long fields that these turns name."""
    return {digest for row in rows for digest in (row.instructions, row.tools) if digest}


# --- rows of conversations and limits ----------------------------------------------------------------


async def _has_added(
    connection: PostgresConnection, conversation: Conversation, ids: Sequence[str]
) -> bool:
    """Whether these items are what came next in the conversation."""
    key = (conversation.owner, conversation.id, conversation.count)
    rows = await connection.fetch(QUERIES["read_shelved"], *key)
    return bool(ids) and [row[0] for row in rows[: len(ids)]] == list(ids)


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
    """Lock the key's row, read what others hold, write what is left."""
    async with connection.transaction():
        await connection.execute(QUERIES["relax_draw"])
        limits = (draw.limits.requests_per_min, draw.limits.tokens_per_min)
        ((*level, now),) = await fetch(connection, "begin_draw", as_row, draw.key_id, *limits)
        (others,) = await fetch(connection, "held_by_others", HeldPlaces, draw.key_id, worker)
        left, grant = share_out(draw, Level(*level), others, now)
        row = (draw.key_id, *astuple(left), worker, *astuple(grant.held))
        await connection.execute(QUERIES["end_draw"], *row)
        if grant.held == HeldPlaces():
            await connection.execute(QUERIES["drop_held"], draw.key_id, worker)
    return grant


# --- maintenance -------------------------------------------------------------------------------------


async def _end_some(connection: PostgresConnection, *, worker: str) -> int:
    """End as failed some of the turns that this dead process left; how many. When none is left its idempotency keys,
    conversations and slots are free again."""
    left = await fetch(connection, "abandoned", as_row, worker, BATCH)
    for owner, last, *row in left:
        await _end_turn(connection, worker, owner, TurnColumns(*row), last)
    if not left:
        for name in ("release_claims", "release_speakers", "release_places", "leave"):
            await connection.execute(QUERIES[name], worker)
    return len(left)


async def _end_turn(
    connection: PostgresConnection,
    worker: str,
    owner: Owner,
    row: TurnColumns[bytes],
    last: int | None,
) -> None:
    """End one turn as failed. A turn that cannot be read must not block the others, or a server that starts."""
    try:
        fields = await _fetch_fields(connection, owner, [row])
        turn = records.link(owner, row.id, [row], fields.__getitem__)
        assert turn is not None
        failed, entry, events = records.abandon(turn, last)
        response = records.pack(failed).response
    except (ValueError, KeyError, msgspec.MsgspecError):
        log.exception("turn %s was left running by a dead process and cannot be decoded", row.id)
        await connection.execute(QUERIES["give_up"], owner, row.id)
        return
    # The event first: once the turn has ended no later pass would write it.
    if events:
        first, body = events[0].number, records.pack_events(events)
        await connection.execute(QUERIES["append"], owner, row.id, first, first, body)
    columns = (owner, row.id, worker, response, *astuple(entry)[2:])
    await connection.execute(QUERIES["end"], *columns)


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
    ):
        if age_s:
            gone = max(gone, touched(await connection.execute(QUERIES[name], age_s, BATCH)))
    seen = await _sweep_turns(connection, retention.turns_s, below) if retention.turns_s else []
    is_more = BATCH in (gone, len(seen))
    return (seen[-1] if len(seen) == BATCH else HIGHEST), is_more


async def _sweep_turns(
    connection: PostgresConnection, age_s: int, below: tuple[int, int]
) -> list[tuple[int, int]]:
    """Erase a few old turns, except those with descendants; all that were looked at."""
    old = await fetch(connection, "old_turns", as_row, age_s, *below, BATCH)
    for _, seq, owner, turn_id in old:
        if touched(await connection.execute(QUERIES["delete_tip"], seq)):
            await connection.execute(QUERIES["forget_erased"], owner, turn_id)
    return [(saved_at, seq) for saved_at, seq, _, _ in old]
