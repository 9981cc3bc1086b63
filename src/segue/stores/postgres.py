"""What is remembered in a PostgreSQL database: turns, usage in the same transactions, events, the keys of repeats, and
API keys.

In: turns to save, owners and ids to find. Out: turns, and errors of ours only. How a database is reached is `pool`'s
question; here are the rows. Records are the same as in SQLite.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import cast

import msgspec

from segue.errors import StoreFailed
from segue.limits import Draw, Grant, HeldPlaces, Level, share_out
from segue.stores.conversations import Row as ConversationRow
from segue.stores.conversations import from_row, pack_shelved, unpack_shelved
from segue.stores.maintenance import BATCH, BEAT_S, CLAIM_S, ERASED_S, OVERLAP_S
from segue.stores.pool import (
    COLLIDING,
    LEASE_S,
    QUERIES,
    Columns,
    Connection,
    PostgresDatabase,
    Work,
    border,
    touched,
)
from segue.stores.records import (
    KeyRow,
    Part,
    Record,
    Row,
    abandon,
    digest_key,
    link,
    pack,
    pack_events,
    pack_key,
    unpack_events,
    unpack_key,
)
from segue.stores.seals import RingKey, new_key
from segue.turn.commit import entry_of
from segue.turn.values import (
    Claim,
    Conversation,
    ConversationItem,
    Key,
    Owner,
    Retention,
    Turn,
    UsageEntry,
    UsageTotal,
)
from segue.wire.events import Event

# Parts that this process has sent before, about 100 bytes each: agents repeat 19 KB of tools in every turn.
KNOWN_MAX = 10_000
# How often a chain is read again because a part went between two statements.
READS_MAX = 3
# Below this every turn is.
HIGHEST = (2**62, 2**62)
NO_USAGE = (None,) * 7

log = logging.getLogger(__name__)

PartKey = tuple[Owner, bytes]
UsedRow = tuple[str, Owner, str, int, int, int, int, int]
TurnRow = tuple[str, str | None, bytes, bytes, bytes | None, bytes | None]


class PostgresTurns:
    """Stored turns in a database."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        # Parts that were there when they were last named.
        self._known: OrderedDict[PartKey, None] = OrderedDict()

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn with its chain, as far as the chain was stored and not deleted."""
        return await self._load(QUERIES["find"], owner, turn_id)

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn alone."""
        return await self._load(QUERIES["read"], owner, turn_id)

    async def save(self, turn: Turn) -> None:
        """Make the turn and its usage durable, in one transaction. A second save replaces the
        first; a turn that was deleted meanwhile leaves its usage only."""
        with border():
            work = self.writer(turn)
        await self._database.run(work)

    def writer(self, turn: Turn) -> Work[None]:
        """What a connection does to save this turn."""
        assert turn.is_stored, "a turn that is not to be stored has reached the database"
        record, entry = pack(turn), entry_of(turn.owner, turn.response)
        values = (
            turn.owner,
            turn.id,
            turn.parent_id,
            record.history,
            record.response,
            record.instructions and record.instructions.digest,
            record.tools and record.tools.digest,
            self._database.worker if entry is None else None,
            *(NO_USAGE if entry is None else usage_values(entry)),
        )
        return lambda connection: self._save(connection, turn.owner, record, values)

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        """Erase the turn's row, its events, its keys, and the parts that nobody else uses."""
        if not is_text(owner, turn_id):
            return False
        return (
            await self._database.run(
                lambda connection: execute(connection, "delete", owner, turn_id)
            )
            > 0
        )

    async def _save(
        self, connection: Connection, owner: Owner, record: Record, values: Sequence[object]
    ) -> None:
        """Parts that are known are only named. If one has gone meanwhile the statement fails, and all are sent."""
        parts = [part for part in (record.instructions, record.tools) if part is not None]
        new = [part for part in parts if (owner, part.digest) not in self._known]
        digests, bodies = [part.digest for part in new], [part.body for part in new]
        try:
            await connection.execute(QUERIES["save"], *values, digests, bodies)
        except COLLIDING:
            for part in parts:
                self._known.pop((owner, part.digest), None)
            raise
        for part in parts:
            self._known[(owner, part.digest)] = None
            self._known.move_to_end((owner, part.digest))
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    async def _load(self, query: str, owner: Owner, turn_id: str) -> Turn | None:
        if not is_text(owner, turn_id):
            return None
        for _ in range(READS_MAX):
            rows, parts = await self._database.run(
                lambda connection: fetch_chain(connection, query, owner, turn_id)
            )
            if named(rows) <= parts.keys():
                with border():
                    build = partial(link, owner, turn_id, rows, parts.__getitem__)
                    # A long chain takes a while to decode; the loop goes on meanwhile.
                    return await asyncio.to_thread(build) if len(rows) > 1 else build()
        raise StoreFailed("The store could not do what it should.")


class PostgresLedger:
    """Usage in a database."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    async def settle(self, entries: Sequence[UsageEntry]) -> None:
        """Record these turns, each at most once."""
        rows = [(entry.turn_id, entry.owner, *usage_values(entry)) for entry in entries]
        # In one order everywhere, so that two who tell the same do not wait for each other in a circle.
        rows.sort()
        if rows:
            await self._database.run(
                lambda connection: connection.executemany(QUERIES["settle"], rows)
            )

    async def report(self, owner: Owner | None, since: int) -> Sequence[UsageTotal]:
        """What was used since then, by day, owner and model."""
        if owner is not None and not is_text(owner):
            return []
        rows = await self._database.run(
            lambda connection: connection.fetch(QUERIES["report"], owner, since)
        )
        return [UsageTotal(*row) for row in cast("Sequence[UsedRow]", rows)]


class PostgresEventLog:
    """The events of stored turns in a database."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    async def append(self, owner: Owner, turn_id: str, events: Sequence[Event]) -> None:
        """Write the next events down, as one row; not if their turn was deleted meanwhile."""
        if events:
            body = await asyncio.to_thread(pack_events, events)
            first, last = events[0].number, events[-1].number
            await self._database.run(
                lambda connection: execute(connection, "append", owner, turn_id, first, last, body)
            )

    async def read_after(self, owner: Owner, turn_id: str, number: int) -> Sequence[Event] | None:
        """Every logged event with a higher number, in order; None if some of them are not there."""
        if not is_text(owner, turn_id):
            return None
        rows = await self._database.run(
            lambda connection: connection.fetch(QUERIES["events_after"], owner, turn_id, number)
        )
        if not rows:
            return None
        batches = [cast(bytes, row[0]) for row in rows]
        with border():
            return await asyncio.to_thread(unpack_events, batches, number)

    async def delete(self, owner: Owner, turn_id: str) -> None:
        """Erase them."""
        if is_text(owner, turn_id):
            await self._database.run(
                lambda connection: execute(connection, "delete_events", owner, turn_id)
            )


class PostgresIdempotencyKeys:
    """The idempotency keys of stored turns in a database."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    async def claim(self, claim: Claim) -> Claim:
        """Take the key if it is free or its time is over; returns whoever holds it now."""
        assert claim.is_stored, (
            "the key of a turn that is not to be stored has reached the database"
        )
        key, worker = digest_key(claim.key), self._database.worker
        values = (claim.owner, key, claim.turn_id, claim.digest, worker, CLAIM_S)
        row = await self._database.run(
            lambda connection: connection.fetchrow(QUERIES["claim"], *values)
        )
        turn_id, digest = cast("tuple[str, bytes]", row)
        return msgspec.structs.replace(claim, turn_id=turn_id, digest=digest)

    async def release(self, claim: Claim) -> None:
        """Let go of a key whose turn was refused before it began."""
        values = (claim.owner, digest_key(claim.key), claim.turn_id)
        await self._database.run(lambda connection: execute(connection, "release", *values))


class PostgresConversations:
    """Conversations in a PostgreSQL database."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._turns = PostgresTurns(database)

    async def find(self, owner: Owner, conversation_id: str) -> Conversation | None:
        """The conversation without its items."""
        row = await self._database.run(
            lambda connection: connection.fetchrow(
                QUERIES["find_conversation"], owner, conversation_id
            )
        )
        return (
            None if row is None else from_row(owner, conversation_id, cast("ConversationRow", row))
        )

    async def read(
        self, owner: Owner, conversation_id: str, since: int = 0
    ) -> Sequence[ConversationItem]:
        """Its items from this place on."""
        rows = await self._database.run(
            lambda connection: connection.fetch(
                QUERIES["read_shelved"], owner, conversation_id, since
            )
        )
        with border():
            return [unpack_shelved(*row) for row in cast("Sequence[tuple[str, bytes]]", rows)]

    async def save(
        self,
        conversation: Conversation,
        added: Sequence[ConversationItem] = (),
        turn: Turn | None = None,
    ) -> bool:
        """Write it down with these items at its end, and with the turn, in one transaction."""
        with border():
            ids, bodies = [one.id for one in added], [pack_shelved(one) for one in added]
            write_its_turn = None if turn is None else self._turns.writer(turn)
        tries, worker = count(), self._database.worker

        async def write(connection: Connection) -> bool:
            if next(tries) and await has_shelved(connection, conversation, ids):
                # The first time it was written, and not heard of.
                return True
            if write_its_turn is None:
                return await write_conversation(connection, conversation, ids, bodies, worker)
            async with connection.transaction():
                is_written = await write_conversation(connection, conversation, ids, bodies, worker)
                if is_written:
                    await write_its_turn(connection)
            return is_written

        return await self._database.run(write)

    async def delete(self, owner: Owner, conversation_id: str, item_id: str | None = None) -> bool:
        """Erase it with all its items, or one of them."""
        query = "delete_conversation" if item_id is None else "unshelve"
        values = (owner, conversation_id) if item_id is None else (owner, conversation_id, item_id)
        status = await self._database.run(
            lambda connection: connection.execute(QUERIES[query], *values)
        )
        return touched(status) > 0


async def has_shelved(
    connection: Connection, conversation: Conversation, ids: Sequence[str]
) -> bool:
    """Whether these items are what came next in the conversation."""
    rows = await connection.fetch(
        QUERIES["read_shelved"], conversation.owner, conversation.id, conversation.count
    )
    return bool(ids) and [row[0] for row in rows[: len(ids)]] == list(ids)


async def write_conversation(
    connection: Connection,
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
        values = (*key, *tip, conversation.version, ids, bodies, *speaker)
        return await connection.fetchrow(QUERIES["update_conversation"], *values) is not None
    made = (*key, conversation.created_at, *tip, ids, bodies)
    await connection.execute(QUERIES["create_conversation"], *made)
    return True


class PostgresKeys:
    """API keys in a database."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    async def add(self, key: Key, digest: str) -> None:
        """Give out a key."""
        row = pack_key(key, digest)
        await self._database.run(lambda connection: execute(connection, "add_key", *row))

    async def find(self, digests: Sequence[str]) -> Mapping[str, Key]:
        """Those of these that are somebody's and not revoked."""
        return {row.digest: unpack_key(row) for row in await self._rows("find_keys", list(digests))}

    async def given_out(self) -> Sequence[Key]:
        """Every key that was ever given out, the oldest first."""
        return [unpack_key(row) for row in await self._rows("list_keys")]

    async def revoke(self, key_id: str) -> bool:
        """Take it back for good."""
        if not is_text(key_id):
            return False
        return (
            await self._database.run(lambda connection: execute(connection, "revoke_key", key_id))
            > 0
        )

    async def _rows(self, name: str, *values: object) -> list[KeyRow]:
        rows = await self._database.run(lambda connection: connection.fetch(QUERIES[name], *values))
        return [KeyRow(*row) for row in cast("Sequence[KeyRow]", rows)]


class PostgresSharedLimits:
    """The meters of all processes that share a database."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    async def draw(self, draws: Sequence[Draw]) -> Sequence[Grant]:
        """What this process is given, each key in a transaction of its own: none waits while it has locked another."""
        return [
            await self._database.run(partial(draw_one, draw=draw, worker=self._database.worker))
            for draw in draws
        ]


class PostgresMaintenance:
    """What is done beside the turns of a database.

    A process is alive while its row in `workers` is young, by the server's clock: a dead connection proves nothing.
    """

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        # How far down, from the newest to the oldest, this pass of the sweep has come.
        self._below = HIGHEST

    async def recover(self) -> int:
        """Say that this process lives, and end as failed what dead ones left running; how many turns."""
        await self._database.run(self._database.beat)
        rows = await self._database.run(
            lambda connection: connection.fetch(QUERIES["dead"], self._database.worker, LEASE_S)
        )
        count = 0
        for (worker,) in cast("Sequence[tuple[str]]", rows):
            while ended := await self._database.run(partial(end_some, worker=worker)):
                count += ended
        return count

    async def erasures(self) -> Sequence[tuple[Owner, str]]:
        """Turns that anybody has erased lately; each is told a few times."""
        window_s = OVERLAP_S + int(BEAT_S)
        rows = await self._database.run(
            lambda connection: connection.fetch(QUERIES["erasures"], window_s)
        )
        return [(owner, turn_id) for owner, turn_id in cast("Sequence[tuple[str, str]]", rows)]

    async def sweep(self, retention: Retention) -> bool:
        """Erase a few of those that are too old; False when this pass has seen them all."""
        self._below, is_more = await self._database.run(
            partial(sweep_some, retention=retention, below=self._below)
        )
        return is_more


class PostgresRing:
    """The ring of keys in a database: every machine that uses the database has the same."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    async def load(self) -> list[RingKey]:
        """The keys, the newest first; there is always one."""
        fresh = new_key()

        async def ask(connection: Connection) -> Sequence[Columns]:
            await connection.execute(QUERIES["begin_ring"], fresh.name, fresh.secret)
            return await connection.fetch(QUERIES["ring"])

        rows = cast("Sequence[tuple[bytes, bytes]]", await self._database.run(ask))
        return [RingKey(name, secret) for name, secret in rows]

    async def rotate(self) -> int:
        """Put a fresh key in front; how many there are."""
        await self.load()
        fresh = new_key()
        await self._database.run(
            lambda connection: execute(connection, "add_to_ring", fresh.name, fresh.secret)
        )
        return len(await self.load())


def is_text(*words: str) -> bool:
    """Whether these can be in a column of text at all: halves of surrogate pairs and NUL cannot, so nothing has
    that name."""
    try:
        return b"\0" not in "".join(words).encode()
    except UnicodeEncodeError:
        return False


def usage_values(entry: UsageEntry) -> tuple[str, str, int, int, int, int, int]:
    """The columns of a row of usage behind whose it is."""
    return (
        entry.model,
        entry.status,
        entry.input_tokens,
        entry.cached_tokens,
        entry.output_tokens,
        entry.ended_at,
        entry.tool_calls,
    )


async def execute(connection: Connection, name: str, *values: object) -> int:
    """Run the statement of this name; how many rows it touched."""
    return touched(await connection.execute(QUERIES[name], *values))


async def fetch_chain(
    connection: Connection, query: str, owner: Owner, turn_id: str
) -> tuple[list[Row[bytes]], dict[bytes, Part]]:
    """The rows that the query finds, and the parts that they name."""
    found = cast("Sequence[TurnRow]", await connection.fetch(query, owner, turn_id))
    rows = [Row(*row) for row in found]
    return rows, await fetch_parts(connection, owner, rows)


async def fetch_parts(
    connection: Connection, owner: Owner, rows: Sequence[Row[bytes]]
) -> dict[bytes, Part]:
    """The parts that these turns name, as far as they are there."""
    digests = named(rows)
    if not digests:
        return {}
    found = await connection.fetch(QUERIES["parts"], owner, list(digests))
    parts = cast("Sequence[tuple[bytes, bytes]]", found)
    return {digest: Part(digest, body) for digest, body in parts}


def named(rows: Sequence[Row[bytes]]) -> set[bytes]:
    """The digests of all parts that these turns name."""
    return {digest for row in rows for digest in (row.instructions, row.tools) if digest}


async def draw_one(connection: Connection, *, draw: Draw, worker: str) -> Grant:
    """Lock the key's row, see what others hold, write down what is left."""
    async with connection.transaction():
        await connection.execute(QUERIES["relax_draw"])
        limits = (draw.limits.requests_per_min, draw.limits.tokens_per_min)
        row = await connection.fetchrow(QUERIES["begin_draw"], draw.key_id, *limits)
        *level, now = cast("tuple[float, float, float, float]", tuple(cast("Columns", row)))
        taken = await connection.fetchrow(QUERIES["held_by_others"], draw.key_id, worker)
        others = HeldPlaces(*cast("tuple[int, int]", tuple(cast("Columns", taken))))
        left, grant = share_out(draw, Level(*level), others, now)
        held = (grant.held.connections, grant.held.lanes)
        await execute(
            connection, "end_draw", draw.key_id, left.requests, left.tokens, left.at, worker, *held
        )
        if grant.held == HeldPlaces():
            await execute(connection, "drop_held", draw.key_id, worker)
    return grant


async def end_some(connection: Connection, *, worker: str) -> int:
    """End as failed some of the turns that this dead process left; how many. When none is left its keys for turns that
    never were are free again, and so is its place."""
    left = await connection.fetch(QUERIES["abandoned"], worker, BATCH)
    for found in left:
        owner, last = cast("tuple[Owner, int | None]", tuple(found)[:2])
        row = Row(*cast("TurnRow", tuple(found)[2:]))
        await end_one(connection, worker, owner, row, last)
    if not left:
        await execute(connection, "release_claims", worker)
        await execute(connection, "release_speakers", worker)
        await execute(connection, "release_places", worker)
        await execute(connection, "leave", worker)
    return len(left)


async def end_one(
    connection: Connection, worker: str, owner: Owner, row: Row[bytes], last: int | None
) -> None:
    """End one turn as failed. One that cannot be read must not keep the others, or a server that starts, waiting."""
    try:
        parts = await fetch_parts(connection, owner, [row])
        turn = link(owner, row.id, [row], parts.__getitem__)
        assert turn is not None
        failed, entry, events = abandon(turn, last)
        response = pack(failed).response
    except (ValueError, KeyError, msgspec.MsgspecError):
        log.exception("turn %s was left running and cannot be read", row.id)
        await execute(connection, "give_up", owner, row.id)
        return
    # The event first: once the turn has ended nobody comes back to write it.
    if events:
        first, body = events[0].number, pack_events(events)
        await execute(connection, "append", owner, row.id, first, first, body)
    await execute(connection, "end", owner, row.id, worker, response, *usage_values(entry))


async def sweep_some(
    connection: Connection, *, retention: Retention, below: tuple[int, int]
) -> tuple[tuple[int, int], bool]:
    """Erase a few old rows of each kind; how far down it came, and whether there is more to see."""
    gone = 0
    for name, age_s in (
        ("delete_erased_events", 1),
        ("delete_old_events", retention.events_s),
        ("delete_old_claims", CLAIM_S),
        ("delete_old_erased", ERASED_S),
    ):
        if age_s:
            gone = max(gone, await execute(connection, name, age_s, BATCH))
    seen = await sweep_turns(connection, retention.turns_s, below) if retention.turns_s else []
    is_more = BATCH in (gone, len(seen))
    return (seen[-1] if len(seen) == BATCH else HIGHEST), is_more


async def sweep_turns(
    connection: Connection, age_s: int, below: tuple[int, int]
) -> list[tuple[int, int]]:
    """Erase those of a few old turns that nobody goes on from; all that were looked at."""
    rows = await connection.fetch(QUERIES["old_turns"], age_s, *below, BATCH)
    old = cast("Sequence[tuple[int, int, str, str]]", rows)
    for _, seq, owner, turn_id in old:
        if await execute(connection, "delete_tip", seq):
            await execute(connection, "forget_erased", owner, turn_id)
    return [(saved_at, seq) for saved_at, seq, _, _ in old]
