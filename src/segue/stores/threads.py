"""Which unstored turns may still be continued by name, for whom, and how long?

Turns of Messages threads are in memory only: in one cache for each API key, which counts in the budget of the
connections and in the key's own limit. All keys of an owner find the owner's turns. A turn goes an hour after the last
use of it or of a turn that continues it, when its key is revoked, and when memory is short. Then it is not found, and
the client sends its whole history again.

Other workers are asked for a turn that is not here. What travels is a chain as bytes, sealed for its owner: the way may
lead through a database, and what is not to be stored must not be readable there.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable
from hashlib import blake2b

import msgspec
from msgspec import structs

from segue.seals.cipher import RingSeals
from segue.seams.history import Owner, Turn, ancestors
from segue.seams.store import Turns
from segue.stores.memory_turns import Budget, MemoryTurns
from segue.stores.records import LongField, TurnColumns, pack, unpack

UNUSED_S_MAX = 3_600.0
# How often turns that are too old are looked for; until then they are held, and not found.
LOOK_S = 60.0
# A longer chain stays where it is: as bytes compressed, and before that as our own measure of it in memory.
SENT_BYTES_MAX = 8 * 1024 * 1024
HELD_BYTES_MAX = 8 * SENT_BYTES_MAX
# Text and ids of a conversation: the fastest level finds most of it.
LEVEL = 1

# Finds a turn in another worker.
FetchTurn = Callable[[Owner, str], Awaitable[Turn | None]]
# What the key of a cache may hold now; 0: it has no limit of its own.
KeyLimit = Callable[[], int]


class _SentTurn(msgspec.Struct, array_like=True):
    """One turn of a chain. Long texts are named by their digests, because most turns of a chain share them."""

    id: str
    parent_id: str | None
    history: bytes
    response: bytes
    instructions: bytes | None
    tools: bytes | None
    head_sent: list[bytes]


class _SentChain(msgspec.Struct, array_like=True):
    turns: list[_SentTurn]
    texts: dict[bytes, bytes]


_decode = msgspec.msgpack.Decoder(_SentChain).decode


class Threads:
    """The turns of threads that this process holds."""

    def __init__(
        self, budget: Budget, bytes_max: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`bytes_max` is for each key; the budget bounds all of them together."""
        self._budget = budget
        self._bytes_max = bytes_max
        self.clock = clock
        self._caches: dict[Owner, dict[str, MemoryTurns]] = {}
        # By key: a limit may change, and its account may be another object later.
        self._limits: dict[str, KeyLimit] = {}
        # None where there are no other workers.
        self.fetch: FetchTurn | None = None

    @property
    def bytes(self) -> int:
        """What they hold."""
        return sum(cache.bytes for caches in self._caches.values() for cache in caches.values())

    def open(self, owner: Owner, key_id: str, limit: KeyLimit) -> Turns:
        """The threads of this owner, as this key uses them."""
        self._limits[key_id] = limit
        caches = self._caches.setdefault(owner, {})
        if key_id not in caches:
            # The clock may be exchanged while this runs.
            caches[key_id] = MemoryTurns(self._bytes_max, clock=lambda: self.clock())
            self._budget.add(caches[key_id], key_id, lambda: self._limits[key_id]())
        return ThreadTurns(self, caches[key_id])

    def held(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn, if this process holds it and it is not too old."""
        for cache in self._caches.get(owner, {}).values():
            cache.drop_unused(self.clock() - UNUSED_S_MAX)
            if (turn := cache.held(owner, turn_id)) is not None:
                return turn
        return None

    def holds(self, owner: Owner, key_id: str) -> bool:
        """Whether this key has turns here."""
        cache = self._caches.get(owner, {}).get(key_id)
        return cache is not None and bool(cache.bytes)

    def drop(self, owner: Owner, key_id: str) -> None:
        """The key was revoked: what it holds goes."""
        cache = self._caches.get(owner, {}).pop(key_id, None)
        if cache is not None:
            cache.close()
            del self._limits[key_id]
        if not self._caches.get(owner):
            self._caches.pop(owner, None)

    def drop_owner(self, owner: Owner) -> None:
        """Everything of the owner was erased."""
        for key_id in tuple(self._caches.get(owner, ())):
            self.drop(owner, key_id)

    async def expire_forever(self) -> None:
        """Drop what is too old, again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.expire()

    def expire(self) -> None:
        """Drop what is too old."""
        since = self.clock() - UNUSED_S_MAX
        for caches in self._caches.values():
            for cache in caches.values():
                cache.drop_unused(since)


class ThreadTurns:
    """The threads of an owner as one of its keys uses them: found everywhere, kept in the cache of the key."""

    def __init__(self, threads: Threads, cache: MemoryTurns) -> None:
        self._threads = threads
        self._cache = cache
        self.save = cache.save
        self.delete = cache.delete

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        turn = self._threads.held(owner, turn_id)
        if turn is None and self._threads.fetch is not None:
            turn = await self._threads.fetch(owner, turn_id)
            if turn is not None:
                await self._cache.save(turn)
        return turn

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        return self._threads.held(owner, turn_id)


def seal_chain(seals: RingSeals, turn: Turn) -> bytes | None:
    """The turn with all its ancestors as bytes that only its owner's requests can open; None if that is too much."""
    chain = ancestors(turn)
    if sum(link.bytes for link in chain) > HELD_BYTES_MAX:
        return None
    turns: list[_SentTurn] = []
    texts: dict[bytes, bytes] = {}
    for link in chain:
        record = pack(link)
        fields = record.instructions, record.tools
        texts |= {field.digest: field.body for field in fields if field is not None}
        head_sent = [LongField(blake2b(text).digest(), text) for text in link.head_sent]
        texts |= head_sent
        instructions, tools = (None if field is None else field.digest for field in fields)
        names = [digest for digest, _ in head_sent]
        turns.append(_SentTurn(*record[:4], instructions, tools, names))
    body = zlib.compress(msgspec.msgpack.encode(_SentChain(turns, texts)), LEVEL)
    return seals.seal_bytes(turn.owner, body) if len(body) <= SENT_BYTES_MAX else None


def open_chain(seals: RingSeals, owner: Owner, sealed: bytes) -> Turn | None:
    """The newest turn of a chain that was sealed for this owner, with its ancestors; None if it cannot be opened or
    read: another version may write it in another way."""
    body = seals.open_bytes(owner, sealed)
    try:
        return None if body is None else _link(owner, _decode(zlib.decompress(body)))
    except (msgspec.MsgspecError, zlib.error, LookupError):
        return None


def _link(owner: Owner, chain: _SentChain) -> Turn | None:
    turn: Turn | None = None
    for sent in chain.turns:
        instructions, tools = (
            None if digest is None else LongField(digest, chain.texts[digest])
            for digest in (sent.instructions, sent.tools)
        )
        record = TurnColumns(
            sent.id, sent.parent_id, sent.history, sent.response, instructions, tools
        )
        head_sent = tuple(chain.texts[digest] for digest in sent.head_sent)
        size = 0 if turn is not None and turn.head_sent == head_sent else sum(map(len, head_sent))
        turn = unpack(owner, record, turn, is_whole=True)
        turn = structs.replace(turn, is_stored=False, head_sent=head_sent, bytes=turn.bytes + size)
    return turn
