"""Where is everything kept? Opens the store that the settings name, with its key ring; verbs that need no server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from segue.accounts.account import SCOPES
from segue.errors import ApiError, Misconfigured
from segue.ids import new_id
from segue.limits import KeyLimits
from segue.settings import Settings, is_loopback, is_ring_stored, seal_path
from segue.stores.conversations import MemoryConversations, SqliteConversations
from segue.stores.database import SqliteDatabase
from segue.stores.hashes import KeyHashes, new_secret
from segue.stores.layered import LayeredIdempotencyKeys, LayeredMaintenance, LayeredTurns
from segue.stores.memory import (
    MemoryEventLog,
    MemoryIdempotencyKeys,
    MemoryKeys,
    MemoryLedger,
    MemoryMaintenance,
    MemoryTurns,
)
from segue.stores.seals import RingKey, new_key, open_ring, read_ring, rotate_ring
from segue.stores.shared_limits import MemorySharedLimits, SqliteSharedLimits
from segue.stores.sqlite import (
    SqliteEventLog,
    SqliteIdempotencyKeys,
    SqliteKeys,
    SqliteLedger,
    SqliteMaintenance,
    SqliteTurns,
)
from segue.turn.seams import (
    Conversations,
    EventLog,
    IdempotencyKeys,
    Keys,
    Ledger,
    Maintenance,
    SharedLimits,
    Turns,
)
from segue.turn.values import Key, Owner, UsageTotal

if TYPE_CHECKING:
    from segue.stores.postgres import PostgresRing

# What is said on the bus when keys were given out or taken back.
KEYS_TOPIC = "keys"


class Held(Protocol):
    """Something in the memory of this process that knows its size."""

    @property
    def bytes(self) -> int:
        """What it holds; it has a limit."""


@dataclass(frozen=True, slots=True)
class Store:
    """What a durable store is made of."""

    turns: Turns
    ledger: Ledger
    events: EventLog
    idempotency_keys: IdempotencyKeys
    conversations: Conversations
    maintenance: Maintenance
    keys: Keys
    shared_limits: SharedLimits
    is_ready: Callable[[], Awaitable[bool]]
    # The turns that this process holds in memory, and all that it holds beside them.
    state: MemoryTurns
    beside: Sequence[Held]
    # The keys of what clients keep for us, where all who use the store share them.
    ring: PostgresRing | None = None


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    """The durable store, with the process's cache in front, and the ledger beside it. What dead processes left
    running has ended."""
    kinds = {"memory": _open_memory, "sqlite": _open_sqlite}
    async with kinds.get(settings.store.partition(":")[0], _open_postgres)(settings) as store:
        await store.maintenance.recover()
        yield store


@asynccontextmanager
async def _open_memory(settings: Settings) -> AsyncIterator[Store]:
    # Events and turns have a budget each; keys are small and have their own.
    budget = settings.process_state_bytes_max
    ledger, log, idempotency_keys = (
        MemoryLedger(),
        MemoryEventLog(budget // 4),
        MemoryIdempotencyKeys(),
    )
    on_erase = [log.erase, idempotency_keys.erase]
    near = MemoryTurns(budget, stored_only=True, ledger=ledger, on_erase=on_erase)
    maintenance = MemoryMaintenance(near, log, idempotency_keys)
    conversations = MemoryConversations(budget // 4)
    yield Store(
        turns=near,
        ledger=ledger,
        events=log,
        idempotency_keys=idempotency_keys,
        conversations=conversations,
        maintenance=maintenance,
        keys=MemoryKeys(),
        shared_limits=MemorySharedLimits(),
        is_ready=_always,
        state=near,
        beside=(log, idempotency_keys, conversations),
    )


@asynccontextmanager
async def _open_sqlite(settings: Settings) -> AsyncIterator[Store]:
    path = Path(settings.store.removeprefix("sqlite:///"))
    try:
        database = await SqliteDatabase.open(path, durability=settings.durability)
    except ApiError as error:
        raise Misconfigured(f"store: {path} cannot be opened: {error.__cause__}.") from error
    try:
        near = MemoryTurns(settings.process_state_bytes_max, stored_only=True)
        idempotency_keys = MemoryIdempotencyKeys()
        yield Store(
            turns=LayeredTurns(near, SqliteTurns(database)),
            ledger=SqliteLedger(database),
            events=SqliteEventLog(database),
            idempotency_keys=LayeredIdempotencyKeys(
                idempotency_keys, SqliteIdempotencyKeys(database)
            ),
            conversations=SqliteConversations(database),
            maintenance=LayeredMaintenance(near, SqliteMaintenance(database)),
            keys=SqliteKeys(database),
            shared_limits=SqliteSharedLimits(database),
            is_ready=database.is_ready,
            state=near,
            beside=(idempotency_keys,),
        )
    finally:
        await database.close()


@asynccontextmanager
async def _open_postgres(settings: Settings) -> AsyncIterator[Store]:
    # Imported here: a server without PostgreSQL needs neither its client nor the time to load it.
    from segue.stores.pool import PostgresDatabase
    from segue.stores.postgres import (
        PostgresConversations,
        PostgresEventLog,
        PostgresIdempotencyKeys,
        PostgresKeys,
        PostgresLedger,
        PostgresMaintenance,
        PostgresRing,
        PostgresSharedLimits,
        PostgresTurns,
    )

    try:
        database = await PostgresDatabase.open(settings.store, durability=settings.durability)
    except ApiError as error:
        raise Misconfigured(
            f"store: {settings.shown_store} cannot be opened: {error.__cause__ or error}."
        ) from error
    try:
        near = MemoryTurns(settings.process_state_bytes_max, stored_only=True)
        idempotency_keys = MemoryIdempotencyKeys()
        yield Store(
            turns=LayeredTurns(near, PostgresTurns(database)),
            ledger=PostgresLedger(database),
            events=PostgresEventLog(database),
            idempotency_keys=LayeredIdempotencyKeys(
                idempotency_keys, PostgresIdempotencyKeys(database)
            ),
            conversations=PostgresConversations(database),
            maintenance=LayeredMaintenance(near, PostgresMaintenance(database)),
            keys=PostgresKeys(database),
            shared_limits=PostgresSharedLimits(database),
            is_ready=database.is_ready,
            state=near,
            beside=(idempotency_keys,),
            ring=PostgresRing(database),
        )
    finally:
        await database.close()


async def read_usage(settings: Settings, owner: Owner | None, days: int) -> Sequence[UsageTotal]:
    """What was used on the last days, today included, by day, owner and model."""
    if settings.store == "memory":
        raise Misconfigured("store: memory keeps usage only while the server runs.")
    today = int(time.time()) // 86_400
    async with open_store(settings) as store:
        return await store.ledger.report(owner, (today - days + 1) * 86_400)


def _durable(settings: Settings) -> Settings:
    if settings.store == "memory":
        raise Misconfigured("store: memory has keys only while the server runs; name another one.")
    return settings


async def create_key(
    settings: Settings, name: str, owner: Owner, scopes: Sequence[str], limits: KeyLimits
) -> tuple[Key, str]:
    """A fresh key and its secret, which nobody can be told again."""
    unknown = set(scopes) - set(SCOPES)
    if unknown or not scopes:
        raise Misconfigured(f"scopes: there are {', '.join(SCOPES)}.")
    async with open_store(_durable(settings)) as store:
        hashes = KeyHashes(await load_ring(settings, store))
        await check_ring(store.keys, hashes, settings)
        made = await give_out(store.keys, hashes, name, owner, scopes, limits)
    await _tell_servers(settings)
    return made


async def give_out(
    keys: Keys,
    hashes: KeyHashes,
    name: str,
    owner: Owner,
    scopes: Sequence[str] = SCOPES[:2],
    limits: KeyLimits | None = None,
) -> tuple[Key, str]:
    """A fresh key in this store, and its secret."""
    secret = new_secret()
    key = Key(
        id=new_id("key"),
        name=name,
        owner=owner,
        scopes=tuple(scopes),
        limits=limits or KeyLimits(),
        ring=hashes.newest,
        created_at=int(time.time()),
    )
    await keys.add(key, hashes.digests(secret)[0])
    return key, secret


async def list_keys(settings: Settings) -> Sequence[Key]:
    """Every key of the store."""
    async with open_store(_durable(settings)) as store:
        return await store.keys.given_out()


async def revoke_key(settings: Settings, key_id: str) -> bool:
    """Take a key back; False if there is nothing to take back."""
    async with open_store(_durable(settings)) as store:
        is_revoked = await store.keys.revoke(key_id)
    if is_revoked:
        await _tell_servers(settings)
    return is_revoked


async def _tell_servers(settings: Settings) -> None:
    """Say to all servers that keys have changed, where they can be reached from here; others look for themselves."""
    if not settings.store.startswith(("postgresql://", "postgres://")):
        return
    # Imported here, as the store is.
    from segue.cluster.notify import open_notify_bus

    with suppress(ApiError):
        async with open_notify_bus(settings.store) as bus:
            await bus.publish(KEYS_TOPIC, b"")


async def check_ring(keys: Keys, hashes: KeyHashes, settings: Settings) -> None:
    """Keys that were hashed under another ring are nobody's here: say so before anybody wonders."""
    valid = [key for key in await keys.given_out() if key.revoked_at is None]
    strange = sum(not hashes.knows(key.ring) for key in valid)
    if strange:
        raise Misconfigured(
            f"seal_keys: {strange} of the {len(valid)} keys in this store were made with another ring "
            f"than {_ring_name(settings)}. Name the file that they were made with, or revoke them."
        )


async def check_public(keys: Keys, settings: Settings) -> None:
    """A public address only where keys are asked for, and there are some."""
    if is_loopback(settings.host) or settings.auth == "keys":
        return
    if not await keys.given_out():
        raise Misconfigured(
            f"host: {settings.host} is not a loopback address, and nobody needs a key yet. "
            f"Make one first: segue keys create --name NAME --store {settings.shown_store}"
        )


async def _always() -> bool:
    return True


def rotate_seals(settings: Settings) -> int:
    """Put a fresh key in front of the ring; how many it has then."""
    if is_ring_stored(settings):
        return asyncio.run(_rotate_stored(settings))
    path = seal_path(settings)
    if path is None:
        raise Misconfigured("seal_keys: a server with the memory store keeps no keys.")
    return rotate_ring(path)


async def _rotate_stored(settings: Settings) -> int:
    async with open_store(settings) as store:
        assert store.ring is not None
        return await store.ring.rotate()


async def load_ring(settings: Settings, store: Store) -> Sequence[RingKey]:
    """The keys that seal and hash: from the database, from their file, or for this process alone."""
    if is_ring_stored(settings):
        assert store.ring is not None
        return await store.ring.load()
    path = seal_path(settings)
    if path is None:
        return [new_key()]
    open_ring(path)
    return read_ring(path)


def _ring_name(settings: Settings) -> str:
    return "the database's" if is_ring_stored(settings) else str(seal_path(settings))
