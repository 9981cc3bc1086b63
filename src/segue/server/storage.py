"""Where is everything kept? Opens the store that the settings name, with its seal keys. Commands without a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from segue.accounts.scopes import API_SCOPES, SCOPES
from segue.errors import ApiError, Misconfigured
from segue.ids import new_id
from segue.limits import Key, KeyLimits, UsageTotal
from segue.seams.access import Keys
from segue.seams.history import Owner
from segue.settings.checks import is_loopback
from segue.settings.values import Settings, StoreKind
from segue.stores.hashes import SHOWN_CHARS, KeyHashes, new_secret
from segue.stores.layered import LayeredStore
from segue.stores.memory import MemoryStore
from segue.stores.seals import RingKey, new_key, open_ring, rotate_ring
from segue.stores.sqlite import SqliteStore
from segue.stores.store import Store

# The bus topic for "API keys were created or revoked".
KEYS_TOPIC = "keys"

# A store as a server has it: `state` is what of its turns this process holds in memory, `beside` what else it holds.
ServerStore = MemoryStore | LayeredStore


async def _open_memory(settings: Settings) -> ServerStore:
    return MemoryStore(settings.process_state_bytes_max)


async def _open_sqlite(settings: Settings) -> ServerStore:
    assert settings.store_path is not None
    store = await SqliteStore.open(settings.store_path, durability=settings.durability)
    return LayeredStore(store, settings.process_state_bytes_max)


async def _open_postgresql(settings: Settings) -> ServerStore:
    # Imported here: a server without PostgreSQL needs neither its client nor the time to load it.
    from segue.stores.postgres import PostgresStore

    store = await PostgresStore.open(
        settings.store,
        durability=settings.durability,
        connections_max=settings.store_connections,
        direct=settings.store_direct,
    )
    return LayeredStore(store, settings.process_state_bytes_max)


OPENERS: dict[StoreKind, Callable[[Settings], Awaitable[ServerStore]]] = {
    "memory": _open_memory,
    "sqlite": _open_sqlite,
    "postgresql": _open_postgresql,
}


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[ServerStore]:
    """The store, with the process's cache in front. What dead processes left running has ended."""
    try:
        store = await OPENERS[settings.store_kind](settings)
    except ApiError as error:
        path, why = settings.store_path, str(error.__cause__ or error)
        if path is not None and not path.absolute().parent.is_dir():
            folder = path.absolute().parent
            why = f"there is no folder {folder}. Create it: `mkdir -p {folder}`"
        raise Misconfigured(f"store: {settings.shown_store} cannot be opened: {why}.") from error
    try:
        await store.maintenance.recover()
        yield store
    finally:
        await store.close()


async def read_usage(settings: Settings, owner: Owner | None, days: int) -> Sequence[UsageTotal]:
    """What was used on the last days, today included, by day, owner and model."""
    today = int(time.time()) // 86_400
    async with _open_durable(settings, "usage") as store:
        return await store.ledger.report(owner, (today - days + 1) * 86_400)


@asynccontextmanager
async def _open_durable(settings: Settings, what: str) -> AsyncIterator[ServerStore]:
    if settings.store_kind == "memory":
        raise Misconfigured(
            f"store: memory keeps {what} only while the server runs. Name the server's store with --store."
        )
    async with open_store(settings) as store:
        yield store


async def create_key(
    settings: Settings,
    name: str,
    owner: Owner,
    scopes: Sequence[str],
    limits: KeyLimits,
    *,
    expires_at: int | None = None,
) -> tuple[Key, str]:
    """A new API key and its secret, which is not kept anywhere."""
    unknown = set(scopes) - set(SCOPES)
    if unknown or not scopes:
        raise Misconfigured(
            f"scopes: {', '.join(sorted(unknown)) or 'none given'}; choose from {', '.join(SCOPES)}."
        )
    async with _open_durable(settings, "API keys") as store:
        hashes = KeyHashes(await load_ring(settings, store))
        await check_ring(store.keys, hashes, settings)
        created = await give_out(
            store.keys, hashes, name, owner, scopes, limits, expires_at=expires_at
        )
    await _notify_servers(settings)
    return created


async def give_out(
    keys: Keys,
    hashes: KeyHashes,
    name: str,
    owner: Owner,
    scopes: Sequence[str] = API_SCOPES,
    limits: KeyLimits | None = None,
    *,
    expires_at: int | None = None,
) -> tuple[Key, str]:
    """A new API key in this store, and its secret."""
    secret, limits, now = new_secret(), limits or KeyLimits(), int(time.time())
    key = Key(
        new_id("key"),
        name,
        owner,
        tuple(scopes),
        limits,
        hashes.newest,
        created_at=now,
        secret_start=secret[:SHOWN_CHARS],
        expires_at=expires_at,
    )
    await keys.add(key, hashes.digests(secret)[0])
    return key, secret


async def list_keys(settings: Settings) -> Sequence[Key]:
    """Every API key of the store, revoked ones included."""
    async with _open_durable(settings, "API keys") as store:
        return await store.keys.given_out()


async def revoke_key(settings: Settings, key_id: str) -> bool:
    """Revoke an API key; False if there is no such key or it was revoked before."""
    async with _open_durable(settings, "API keys") as store:
        is_revoked = await store.keys.revoke(key_id)
    if is_revoked:
        await _notify_servers(settings)
    return is_revoked


async def _notify_servers(settings: Settings) -> None:
    """Tell running servers at once that API keys have changed, where the database can; other servers poll."""
    if settings.store_kind != "postgresql":
        return
    # Imported here, as the store is.
    from segue.cluster.notify import open_notify_bus

    with suppress(ApiError):
        async with open_notify_bus(settings.direct_store) as bus:
            await bus.publish(KEYS_TOPIC, b"")


async def check_ring(keys: Keys, hashes: KeyHashes, settings: Settings) -> None:
    """API keys that were hashed with other seal keys would all be refused: better not to start."""
    now = time.time()
    valid = [key for key in await keys.given_out() if key.state(now) == "valid"]
    unknown = sum(not hashes.knows(key.ring) for key in valid)
    if unknown:
        path = None if settings.is_ring_stored else settings.seal_path
        ring = "those in the database" if path is None else str(path)
        ring += "" if path is None or path.exists() else " (missing)"
        raise Misconfigured(
            f"seal_keys: {unknown} of the {len(valid)} API keys in {settings.shown_store} were created with other seal "
            f"keys than {ring} and would be refused. Name the file that they were created with (--seal-keys FILE), or "
            "revoke these API keys and create new ones."
        )


async def check_public(keys: Keys, settings: Settings) -> None:
    """A public address only where API keys are required, or exist."""
    if is_loopback(settings.host) or settings.auth == "keys":
        return
    if not await keys.given_out():
        raise Misconfigured(
            f"host: {settings.host} is not a loopback address, and there is no API key yet. "
            f"Create one first: segue keys create --name NAME --store {settings.shown_store}"
        )


def rotate_seals(settings: Settings) -> int:
    """Add a new seal key, which is used from now on; returns how many there are."""
    if settings.is_ring_stored:
        return asyncio.run(_rotate_stored(settings))
    path = settings.seal_path
    if path is None:
        raise Misconfigured(
            "seal_keys: the memory store has no file of seal keys. Name one with --seal-keys, or another store."
        )
    return rotate_ring(path)


async def _rotate_stored(settings: Settings) -> int:
    async with open_store(settings) as store:
        assert store.ring is not None
        return await store.ring.rotate()


async def load_ring(settings: Settings, store: Store) -> Sequence[RingKey]:
    """The keys that seal and hash: from the database, from their file, or for this process alone."""
    if settings.is_ring_stored:
        assert store.ring is not None
        return await store.ring.load()
    path = settings.seal_path
    if path is not None and not path.exists():
        # Before a new file is created, which would look like the right one.
        await check_ring(store.keys, KeyHashes([new_key()]), settings)
    return [new_key()] if path is None else open_ring(path)
