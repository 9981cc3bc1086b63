"""Behind PgBouncer: which pool modes work, and how many connections reach PostgreSQL (`make test-pgbouncer`)?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from segue.errors import ApiError
from segue.seams.history import ancestors
from segue.stores.postgres import PostgresStore
from segue.stores.postgres_database import SESSION, PostgresConnection, PostgresDatabase
from tests.contracts.turns import OWNER, make_chain, make_turn
from tests.pgbouncer import POOL_SIZE, Pooler, running_pgbouncer
from tests.postgres import PostgresServer

pytestmark = pytest.mark.pgbouncer


@pytest.fixture
async def direct(postgres: PostgresServer) -> AsyncIterator[str]:
    url = await postgres.make_database()
    yield url
    await postgres.drop_database(url)


async def test_pooler_shares_few_connections_between_many_processes(
    postgres: PostgresServer, pooler: Pooler, direct: str
) -> None:
    processes = [await PostgresDatabase.open(pooler.url(direct), direct=direct) for _ in range(4)]
    stores = [PostgresStore(one) for one in processes]
    chain = make_chain(30, tools=b"[" + b" " * 500 + b"]")
    for turn in chain:
        await stores[0].turns.save(turn)
    work = [one.maintenance.beat() for one in stores]
    work += [
        one.turns.save(make_turn(f"s{n}{m}")) for n, one in enumerate(stores) for m in range(50)
    ]
    work += [one.turns.find(OWNER, chain[-1].id) for one in stores for _ in range(50)]
    counts: list[int] = []
    counting = asyncio.create_task(count_connections(postgres, direct, counts))
    results = await asyncio.gather(*work)
    counting.cancel()
    assert sum(len(ancestors(turn)) for turn in results[-200:]) == 200 * 30
    # Those of the pooler, and a lease of each process; the one that counts is in another database.
    assert POOL_SIZE < max(counts) <= POOL_SIZE + len(stores)
    for one in processes:
        await one.close()


async def count_connections(postgres: PostgresServer, url: str, counts: list[int]) -> None:
    """How many connections this database has, again and again."""
    while True:
        query = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name_of(url)}'"
        counts.append((await postgres.ask(query))[0][0])


def name_of(url: str) -> str:
    return url.removeprefix("postgresql://segue@/").partition("?")[0]


async def test_pooler_knows_our_settings_in_our_transactions_only(
    pooler: Pooler, direct: str
) -> None:
    database = await PostgresDatabase.open(
        pooler.url(direct), durability="relaxed", direct=direct, connections_max=1
    )

    async def shown(connection: PostgresConnection) -> list[object]:
        names = ("synchronous_commit", "lock_timeout", "idle_in_transaction_session_timeout")
        return [(await connection.fetch(f"SHOW {name}"))[0][0] for name in names]

    assert await database.run(shown) == ["off", "10s", "10s"]
    async with database._pool.acquire() as connection, connection.transaction():
        assert await shown(connection) == ["on", "0", "0"]
    await database.close()


async def test_pooler_of_transactions_is_refused_without_a_direct_address(
    pooler: Pooler, direct: str
) -> None:
    with pytest.raises(ApiError) as refused:
        await PostgresDatabase.open(pooler.url(direct))
    assert "unsupported startup parameter" in str(refused.value.__cause__)


async def test_pooler_of_sessions_needs_no_direct_address(
    postgres: PostgresServer, direct: str
) -> None:
    ignored = ", ".join(["synchronous_commit", *SESSION])
    with running_pgbouncer(
        postgres, "pool_mode = session", f"ignore_startup_parameters = {ignored}"
    ) as pooler:
        store = await PostgresStore.open(pooler.url(direct), connections_max=POOL_SIZE + 1)
        await store.maintenance.beat()
        for turn in make_chain(3):
            await store.turns.save(turn)
        found = await store.turns.find(OWNER, "t2")
        await store.close()
    assert found is not None
    assert len(ancestors(found)) == 3
