"""Which rows of items are remembered by name? In memory and in a SQLite file; how a row looks is the same everywhere.

In: conversations and the items that are added to them. Out: the same, and errors of ours only. An item keeps its place
for ever, so that a turn that has seen the first so many needs only the rest.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from msgspec import structs

from segue.stores.database import QUERIES as SQLITE
from segue.stores.database import SqliteDatabase, border
from segue.stores.records import KeptItem, pack_item, unpack_item
from segue.stores.sqlite import turn_writer
from segue.turn.values import Conversation, ConversationItem, Owner, Turn

# What a conversation in memory costs beside its items.
CONVERSATION_BYTES = 1_000
ITEM_BYTES = 600

Row = tuple[int, bytes, str | None, int, int, int, str | None]
_kept: msgspec.msgpack.Decoder[KeptItem] = msgspec.msgpack.Decoder(KeptItem)


def pack_shelved(shelved: ConversationItem) -> bytes:
    """An item as one row keeps it."""
    return msgspec.msgpack.encode(pack_item(shelved.item))


def unpack_shelved(item_id: str, body: bytes) -> ConversationItem:
    """An item from its row."""
    return ConversationItem(item_id, unpack_item(_kept.decode(body)))


def from_row(owner: Owner, conversation_id: str, row: Row) -> Conversation:
    """A conversation from its row."""
    created_at, metadata, tip_id, tip_items, count, version, speaker = row
    words = msgspec.json.decode(metadata, type=dict[str, str])
    return Conversation(
        conversation_id, owner, created_at, words, tip_id, tip_items, count, version, speaker
    )


class MemoryConversations:
    """Conversations while the process lives, within a budget of bytes; the one longest out of use goes first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._rows: OrderedDict[
            tuple[Owner, str], tuple[Conversation, list[ConversationItem | None]]
        ] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """What is held."""
        return self._bytes

    async def find(self, owner: Owner, conversation_id: str) -> Conversation | None:
        """The conversation without its items."""
        row = self._rows.get((owner, conversation_id))
        if row is None:
            return None
        self._rows.move_to_end((owner, conversation_id))
        return row[0]

    async def read(
        self, owner: Owner, conversation_id: str, since: int = 0
    ) -> Sequence[ConversationItem]:
        """Its items from this place on."""
        row = self._rows.get((owner, conversation_id))
        return [] if row is None else [one for one in row[1][since:] if one is not None]

    async def save(
        self,
        conversation: Conversation,
        added: Sequence[ConversationItem] = (),
        turn: Turn | None = None,
    ) -> bool:
        """Write it down with these items at its end, if nobody else has written it meanwhile. The turn is for `Turns`:
        no crash leaves a memory half written."""
        key = (conversation.owner, conversation.id)
        row = self._rows.get(key)
        if (row[0].version if row else 0) != conversation.version:
            return False
        items = row[1] if row else []
        items += added
        self._bytes += sum(map(_size, added)) + (0 if row else CONVERSATION_BYTES)
        moved = structs.replace(conversation, count=len(items), version=conversation.version + 1)
        self._rows[key] = (moved, items)
        self._rows.move_to_end(key)
        while self._bytes > self._bytes_max and len(self._rows) > 1:
            self._drop(next(iter(self._rows)))
        return True

    async def delete(self, owner: Owner, conversation_id: str, item_id: str | None = None) -> bool:
        """Erase it, or one of its items."""
        key = (owner, conversation_id)
        row = self._rows.get(key)
        if row is None:
            return False
        if item_id is None:
            self._drop(key)
            return True
        conversation, items = row
        places = [place for place, one in enumerate(items) if one and one.id == item_id]
        for place in places:
            gone = items[place]
            assert gone is not None
            self._bytes -= _size(gone)
            items[place] = None
        if places:
            version = conversation.version + 1
            unlinked = structs.replace(conversation, tip_id=None, tip_items=0, version=version)
            self._rows[key] = (unlinked, items)
        return bool(places)

    def _drop(self, key: tuple[Owner, str]) -> None:
        _, items = self._rows.pop(key)
        self._bytes -= CONVERSATION_BYTES + sum(_size(one) for one in items if one is not None)


def _size(shelved: ConversationItem) -> int:
    return ITEM_BYTES + 3 * len(shelved.item.raw)


class SqliteConversations:
    """Conversations in a SQLite file."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    async def find(self, owner: Owner, conversation_id: str) -> Conversation | None:
        """The conversation without its items."""
        key = {"owner": owner, "id": conversation_id}
        row = await self._database.read(
            lambda reader: reader.execute(SQLITE["find_conversation"], key).fetchone()
        )
        return None if row is None else from_row(owner, conversation_id, row)

    async def read(
        self, owner: Owner, conversation_id: str, since: int = 0
    ) -> Sequence[ConversationItem]:
        """Its items from this place on."""
        key = {"owner": owner, "id": conversation_id, "since": since}
        rows = await self._database.read(
            lambda reader: reader.execute(SQLITE["read_shelved"], key).fetchall()
        )
        with border():
            return [unpack_shelved(item_id, body) for item_id, body in rows]

    async def save(
        self,
        conversation: Conversation,
        added: Sequence[ConversationItem] = (),
        turn: Turn | None = None,
    ) -> bool:
        """Write it down with these items at its end, and with the turn, in one transaction."""
        with border():
            bodies = [(one.id, pack_shelved(one)) for one in added]
            write_its_turn = None if turn is None else turn_writer(turn, self._database)
        worker = self._database.lease.worker

        def write(writer: sqlite3.Connection) -> bool:
            is_written = _write(writer, conversation, bodies, worker)
            if is_written and write_its_turn is not None:
                write_its_turn(writer)
            return is_written

        return await self._database.write(write)

    async def delete(self, owner: Owner, conversation_id: str, item_id: str | None = None) -> bool:
        """Erase it with all its items, or one of them."""
        key = {"owner": owner, "id": conversation_id, "item_id": item_id}

        def erase(writer: sqlite3.Connection) -> bool:
            if item_id is None:
                writer.execute(SQLITE["unshelve_all"], key)
                return writer.execute(SQLITE["delete_conversation"], key).rowcount > 0
            if writer.execute(SQLITE["unshelve"], key).rowcount == 0:
                return False
            writer.execute(SQLITE["unlink_tip"], key)
            return True

        return await self._database.write(erase, is_erasing=True)


def _write(
    writer: sqlite3.Connection,
    conversation: Conversation,
    bodies: Sequence[tuple[str, bytes]],
    worker: str,
) -> bool:
    fields = structs.asdict(conversation) | {
        "metadata": msgspec.json.encode(conversation.metadata),
        "added": len(bodies),
        "worker": worker,
    }
    query = "update_conversation" if conversation.version else "create_conversation"
    if writer.execute(SQLITE[query], fields).rowcount == 0:
        return False
    key = {"owner": conversation.owner, "id": conversation.id}
    rows = [
        {**key, "position": conversation.count + place, "item_id": item_id, "body": body}
        for place, (item_id, body) in enumerate(bodies)
    ]
    writer.executemany(SQLITE["shelve"], rows)
    return True
