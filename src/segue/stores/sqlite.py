"""What is remembered in one SQLite file: turns, usage in the same transactions, events, the keys of repeats, API keys.

In: turns to save, owners and ids to find. Out: turns, and errors of ours only. How a file is written and read beside
the loop is `database`'s question; here are the rows.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial

import msgspec

from segue.stores.database import QUERIES, SqliteDatabase, Work, border
from segue.stores.maintenance import BATCH, CLAIM_S, ERASED_S, OVERLAP_S
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
from segue.turn.commit import entry_of
from segue.turn.values import Claim, Key, Owner, Retention, Turn, UsageEntry, UsageTotal
from segue.wire.events import Event

log = logging.getLogger(__name__)

EventsRow = dict[str, str | int | bytes]

# Below this every turn is.
HIGHEST = (2**62, 2**62)


class SqliteTurns:
    """Stored turns in a database."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

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
            work = turn_writer(turn, self._database)
        await self._database.write(work)

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        """Erase the turn's row, its events, its keys, and the parts that nobody else uses."""
        if not is_text(owner, turn_id):
            return False
        key = {"owner": owner, "id": turn_id}

        def erase(writer: sqlite3.Connection) -> bool:
            return writer.execute(QUERIES["delete"], key).rowcount > 0

        return await self._database.write(erase, is_erasing=True)

    async def _load(self, query: str, owner: Owner, turn_id: str) -> Turn | None:
        if not is_text(owner, turn_id):
            return None
        return await self._database.read(lambda reader: load_chain(reader, query, owner, turn_id))


class SqliteLedger:
    """Usage in a database."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    async def settle(self, entries: Sequence[UsageEntry]) -> None:
        """Record these turns, each at most once."""
        if entries:
            rows = [msgspec.structs.asdict(entry) for entry in entries]
            await self._database.write(lambda writer: write_usage(writer, rows))

    async def report(self, owner: Owner | None, since: int) -> Sequence[UsageTotal]:
        """What was used since then, by day, owner and model."""
        if owner is not None and not is_text(owner):
            return []
        key = {"owner": owner, "since": since}
        return await self._database.read(
            lambda reader: [UsageTotal(*row) for row in reader.execute(QUERIES["report"], key)]
        )


class SqliteEventLog:
    """The events of stored turns in a database."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    async def append(self, owner: Owner, turn_id: str, events: Sequence[Event]) -> None:
        """Write the next events down, as one row; not if their turn was deleted meanwhile."""
        if events:
            # Not by the writer: others would wait for it.
            row = await asyncio.to_thread(events_row, owner, turn_id, events)
            await self._database.write(lambda writer: write_events(writer, row))

    async def read_after(self, owner: Owner, turn_id: str, number: int) -> Sequence[Event] | None:
        """Every logged event with a higher number, in order; None if some of them are not there."""
        if not is_text(owner, turn_id):
            return None
        key = {"owner": owner, "turn_id": turn_id, "number": number}

        def load(reader: sqlite3.Connection) -> list[Event] | None:
            if reader.execute(QUERIES["has_events"], key).fetchone() is None:
                return None
            batches = reader.execute(QUERIES["events_after"], key)
            return unpack_events((row[0] for row in batches), number)

        return await self._database.read(load)

    async def delete(self, owner: Owner, turn_id: str) -> None:
        """Erase them."""
        if not is_text(owner, turn_id):
            return
        key = {"owner": owner, "turn_id": turn_id}

        def erase(writer: sqlite3.Connection) -> None:
            writer.execute(QUERIES["delete_events"], key)

        await self._database.write(erase, is_erasing=True)


class SqliteIdempotencyKeys:
    """The idempotency keys of stored turns in a database."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    async def claim(self, claim: Claim) -> Claim:
        """Take the key if it is free or its time is over; returns whoever holds it now."""
        assert claim.is_stored, (
            "the key of a turn that is not to be stored has reached the database"
        )
        worker = self._database.lease.worker
        return await self._database.write(lambda writer: write_claim(writer, claim, worker))

    async def release(self, claim: Claim) -> None:
        """Let go of a key whose turn was refused before it began."""
        key = {"owner": claim.owner, "key": digest_key(claim.key), "turn_id": claim.turn_id}

        def erase(writer: sqlite3.Connection) -> None:
            writer.execute(QUERIES["release"], key)

        await self._database.write(erase)


class SqliteKeys:
    """API keys in a database."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    async def add(self, key: Key, digest: str) -> None:
        """Give out a key."""
        row = pack_key(key, digest)._asdict()
        await self._database.write(lambda writer: writer.execute(QUERIES["add_key"], row))

    async def find(self, digests: Sequence[str]) -> Mapping[str, Key]:
        """Those of these that are somebody's and not revoked."""
        asked = {"digests": msgspec.json.encode(digests).decode()}
        rows = await self._database.read(
            lambda reader: reader.execute(QUERIES["find_keys"], asked).fetchall()
        )
        with border():
            return {row[0]: unpack_key(KeyRow(*row)) for row in rows}

    async def given_out(self) -> Sequence[Key]:
        """Every key that was ever given out, the oldest first."""
        rows = await self._database.read(
            lambda reader: reader.execute(QUERIES["list_keys"]).fetchall()
        )
        with border():
            return [unpack_key(KeyRow(*row)) for row in rows]

    async def revoke(self, key_id: str) -> bool:
        """Take it back for good."""
        if not is_text(key_id):
            return False
        key = {"id": key_id, "now": int(time.time())}
        return await self._database.write(
            lambda writer: writer.execute(QUERIES["revoke_key"], key).rowcount > 0
        )


class SqliteMaintenance:
    """What is done beside the turns of a database."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self._seen_at = int(time.time())
        # How far down, from the newest to the oldest, this pass of the sweep has come.
        self._below = HIGHEST

    async def recover(self) -> int:
        """End as failed what dead processes left running; how many turns."""
        dead = await self._database.read(self._dead)
        count = 0
        for worker in dead:
            while ended := await self._database.write(partial(end_some, worker=worker)):
                count += ended
            with border():
                self._database.lease.bury(worker)
        return count

    async def erasures(self) -> Sequence[tuple[Owner, str]]:
        """Turns that anybody has erased since the last call."""
        now = int(time.time())
        since = {"since": self._seen_at - OVERLAP_S}
        rows = await self._database.read(
            lambda reader: reader.execute(QUERIES["erasures"], since).fetchall()
        )
        self._seen_at = now
        return rows

    async def sweep(self, retention: Retention) -> bool:
        """Erase a few of those that are too old; False when this pass has seen them all."""
        self._below, is_more = await self._database.write(
            lambda writer: sweep_some(writer, retention, self._below), is_erasing=True
        )
        return is_more

    def _dead(self, reader: sqlite3.Connection) -> list[str]:
        lease = self._database.lease
        running = {row[0] for row in reader.execute(QUERIES["workers"])}
        return [worker for worker in running | lease.others() if not lease.is_alive(worker)]


def is_text(*words: str) -> bool:
    """Whether these can be in the file at all: half of a surrogate pair is no text, so nothing has
    that name."""
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        return False
    return True


def turn_writer(turn: Turn, database: SqliteDatabase) -> Work[None]:
    """What the writing thread does to save this turn."""
    assert turn.is_stored, "a turn that is not to be stored has reached the database"
    record, entry = pack(turn), entry_of(turn.owner, turn.response)
    worker = database.lease.worker if entry is None else None
    return lambda writer: write_turn(writer, turn, record, entry, worker)


def write_turn(
    writer: sqlite3.Connection,
    turn: Turn,
    record: Record,
    entry: UsageEntry | None,
    worker: str | None,
) -> None:
    """The rows of one turn: its parts, itself, its usage."""
    if not is_erased(writer, turn.owner, turn.id):
        for part in (record.instructions, record.tools):
            if part is not None:
                writer.execute(QUERIES["save_part"], {"owner": turn.owner, **part._asdict()})
        row = {
            "owner": turn.owner,
            "id": turn.id,
            "parent_id": turn.parent_id,
            "history": record.history,
            "response": record.response,
            "instructions": record.instructions and record.instructions.digest,
            "tools": record.tools and record.tools.digest,
            "worker": worker,
            "now": int(time.time()),
        }
        writer.execute(QUERIES["save"], row)
    if entry is not None:
        write_usage(writer, [msgspec.structs.asdict(entry)])


def is_erased(connection: sqlite3.Connection, owner: Owner, turn_id: str) -> bool:
    """Whether a turn of this name was deleted."""
    key = {"owner": owner, "id": turn_id}
    return connection.execute(QUERIES["is_erased"], key).fetchone() is not None


def write_usage(writer: sqlite3.Connection, rows: list[dict[str, object]]) -> None:
    """Rows of usage; those that are there already stay as they are."""
    writer.executemany(QUERIES["settle"], rows)


def load_chain(reader: sqlite3.Connection, query: str, owner: Owner, turn_id: str) -> Turn | None:
    """The turns that the query finds, linked from the oldest on."""
    found = reader.execute(query, {"owner": owner, "id": turn_id})
    rows: list[Row[int]] = [Row(*row) for row in found]
    return link(owner, turn_id, rows, cache(partial(load_part, reader, owner)))


def load_part(reader: sqlite3.Connection, owner: Owner, part_id: int) -> Part:
    """A part by the number that a turn has for it."""
    row = reader.execute(QUERIES["part"], {"owner": owner, "id": part_id}).fetchone()
    return Part(row[0], row[1])


def events_row(owner: Owner, turn_id: str, events: Sequence[Event]) -> EventsRow:
    """One batch of events."""
    return {
        "owner": owner,
        "turn_id": turn_id,
        "first": events[0].number,
        "last": events[-1].number,
        "body": pack_events(events),
        "now": int(time.time()),
    }


def write_events(writer: sqlite3.Connection, row: EventsRow) -> None:
    """One batch."""
    if not is_erased(writer, str(row["owner"]), str(row["turn_id"])):
        writer.execute(QUERIES["append"], row)


def write_claim(writer: sqlite3.Connection, claim: Claim, worker: str) -> Claim:
    """Take the key or find out who has it. One process writes at a time, so nobody comes between."""
    now = int(time.time())
    row = {
        "owner": claim.owner,
        "key": digest_key(claim.key),
        "turn_id": claim.turn_id,
        "digest": claim.digest,
        "worker": worker,
        "now": now,
        "expired": now - CLAIM_S,
    }
    writer.execute(QUERIES["claim"], row)
    turn_id, digest = writer.execute(QUERIES["holder"], row).fetchone()
    return msgspec.structs.replace(claim, turn_id=turn_id, digest=digest)


def end_some(writer: sqlite3.Connection, worker: str) -> int:
    """End as failed some of the turns that this dead process left; how many. Its keys for turns that
    never were are free again."""
    key = {"worker": worker, "count_max": BATCH}
    left = writer.execute(QUERIES["abandoned"], key).fetchall()
    for owner, last, *row in left:
        end_one(writer, owner, Row(*row), last)
    writer.execute(QUERIES["release_claims"], key)
    writer.execute(QUERIES["release_speakers"], key)
    writer.execute(QUERIES["release_places"], key)
    return len(left)


def end_one(writer: sqlite3.Connection, owner: Owner, row: Row[int], last: int | None) -> None:
    """End one turn as failed. One that cannot be read must not keep the others, or a server that starts, waiting."""
    try:
        turn = link(owner, row.id, [row], partial(load_part, writer, owner))
        assert turn is not None
        failed, entry, events = abandon(turn, last)
        record = pack(failed)
    except (ValueError, KeyError, msgspec.MsgspecError):
        log.exception("turn %s was left running and cannot be read", row.id)
        writer.execute(QUERIES["give_up"], {"owner": owner, "id": row.id})
        return
    write_turn(writer, failed, record, entry, worker=None)
    if events:
        write_events(writer, events_row(owner, row.id, events))


def sweep_some(
    writer: sqlite3.Connection, retention: Retention, below: tuple[int, int]
) -> tuple[tuple[int, int], bool]:
    """Erase a few old rows of each kind; how far down it came, and whether there is more to see."""
    now = int(time.time())
    gone = 0
    for query, age_s in (
        ("delete_old_events", retention.events_s),
        ("delete_old_claims", CLAIM_S),
        ("delete_old_erased", ERASED_S),
    ):
        if age_s:
            key = {"before": now - age_s, "count_max": BATCH}
            gone = max(gone, writer.execute(QUERIES[query], key).rowcount)
    seen = sweep_turns(writer, now - retention.turns_s, below) if retention.turns_s else []
    is_more = BATCH in (gone, len(seen))
    return (seen[-1] if len(seen) == BATCH else HIGHEST), is_more


def sweep_turns(
    writer: sqlite3.Connection, before: int, below: tuple[int, int]
) -> list[tuple[int, int]]:
    """Erase those of a few old turns that nobody goes on from; all that were looked at."""
    key = {"before": before, "below_at": below[0], "below_seq": below[1], "count_max": BATCH}
    old: list[tuple[int, int, str, str]] = writer.execute(QUERIES["old_turns"], key).fetchall()
    for _, seq, owner, turn_id in old:
        if writer.execute(QUERIES["delete_tip"], {"seq": seq}).rowcount:
            writer.execute(QUERIES["forget_erased"], {"owner": owner, "id": turn_id})
    return [(saved_at, seq) for saved_at, seq, _, _ in old]
