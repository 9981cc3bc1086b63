"""Where is everything kept? Opens the store that the settings name, with its seal keys."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from segue.accounts.hashes import KeyHashes
from segue.errors import ApiError, Misconfigured, need_package
from segue.seals.cipher import new_key
from segue.seals.ring import open_ring
from segue.seams.access import Keys, RingKey
from segue.settings.checks import is_loopback
from segue.settings.values import Settings, StoreKind
from segue.stores.layered import LayeredStore
from segue.stores.memory import MemoryStore
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
    need_package("store", "asyncpg", "postgres")
    # Imported here: a server without PostgreSQL needs neither its client nor the time to load it.
    from segue.stores.postgres import PostgresStore

    store = await PostgresStore.open(
        settings.store,
        durability=settings.durability,
        connections_max=settings.store_connections,
        direct=settings.store_direct,
    )
    return LayeredStore(store, settings.process_state_bytes_max)


# How errors about addresses begin that quote nothing of one; others may quote its password.
SHOWN = ("root certificate file ", "`sslmode` ")
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
        path, cause = settings.store_path, error.__cause__ or error
        why = str(cause).partition("\n")[0]
        if path is not None and not (folder := path.absolute().parent).is_dir():
            why = f"there is no folder {folder}. Create it: `mkdir -p {folder}`"
        elif isinstance(cause, ConnectionRefusedError):
            why = "the connection was refused: no PostgreSQL listens there"
        elif path is None and isinstance(cause, FileNotFoundError):
            why = "a file that it names is not there: the certificate (sslrootcert), or the socket of the database"
        elif words := getattr(cause, "verify_message", ""):
            why = f"its certificate is not accepted: {words.rstrip('.')}"
        elif path is None and isinstance(cause, ValueError) and not why.startswith(SHOWN):
            why = "it is no address. In a password write %2F %3F %23 %40 for / ? # @, or set PGPASSWORD"
        raise Misconfigured(f"store: {settings.shown_store} cannot be opened: {why}.") from error
    try:
        await store.maintenance.recover()
        yield store
    finally:
        await store.close()


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
