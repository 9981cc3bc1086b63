"""PostgreSQL keeps what it acknowledged, survives its server, and never mixes up who asked what."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from segue import __version__
from segue.errors import StoreFailed, Unavailable
from segue.seals.cipher import RingSeals
from segue.seams.history import ancestors
from segue.seams.store import Conversation, ConversationItem
from segue.stores import postgres_database, sql_files
from segue.stores.postgres import PostgresStore
from segue.stores.postgres_database import (
    QUERIES,
    PostgresConnection,
    PostgresDatabase,
    PostgresWork,
)
from segue.stores.sql_files import load_migrations
from tests.contracts.turns import OWNER, make_chain, make_turn, meaning, said
from tests.postgres import PostgresServer, running_postgres

TOOLS = b"[" + b" " * 19_000 + b"]"


@pytest.fixture
async def url(postgres: PostgresServer) -> AsyncIterator[str]:
    url = await postgres.make_database()
    yield url
    await postgres.drop_database(url)


@asynccontextmanager
async def opened(url: str, connections_max: int = 4) -> AsyncIterator[PostgresDatabase]:
    database = await PostgresDatabase.open(url, connections_max=connections_max)
    try:
        yield database
    finally:
        await database.close()


@pytest.fixture
async def database(url: str) -> AsyncIterator[PostgresDatabase]:
    async with opened(url) as database:
        yield database


@pytest.fixture(scope="module")
def mortal() -> Iterator[PostgresServer]:
    """A server of our own, to be stopped."""
    with running_postgres() as server:
        yield server


async def shown(database: PostgresDatabase, name: str) -> object:
    row = await database.run(lambda connection: connection.fetchrow(f"SHOW {name}"))
    assert row is not None
    return row[0]


async def count(database: PostgresDatabase, table: str) -> object:
    row = await database.run(
        lambda connection: connection.fetchrow(f"SELECT count(*) FROM {table}")
    )
    assert row is not None
    return row[0]


# --- what is kept -----------------------------------------------------------------------------------


async def test_unstored_turn_is_refused(database: PostgresDatabase) -> None:
    with pytest.raises(AssertionError):
        await PostgresStore(database).turns.save(make_turn("t", is_stored=False))
    assert await count(database, "turns") == 0


async def test_everything_is_there_after_reopening(url: str) -> None:
    chain = make_chain(5, tools=TOOLS)
    async with opened(url) as database:
        for turn in chain:
            await PostgresStore(database).turns.save(turn)
    async with opened(url) as database:
        store = PostgresStore(database)
        found = await store.turns.find(OWNER, "t4")
        await store.maintenance.recover()
        assert await count(database, "workers") == 1, "who has left is not listed"
    assert found is not None
    assert [meaning(turn) for turn in ancestors(found)] == [meaning(turn) for turn in chain]


async def test_commits_wait_for_the_disk_unless_asked_otherwise(url: str) -> None:
    async with opened(url) as database:
        assert await shown(database, "synchronous_commit") == "on"
    relaxed = await PostgresDatabase.open(url, durability="relaxed")
    assert await shown(relaxed, "synchronous_commit") == "off"
    await relaxed.close()


async def test_bad_row_is_our_fault_and_harms_nobody(database: PostgresDatabase) -> None:
    turns = PostgresStore(database).turns
    bad = [
        replace(make_turn(f"bad{n}"), parent_id=odd)
        for n, odd in enumerate(("\ud800", "\0", "a\0"))
    ]
    results = await asyncio.gather(
        *[turns.save(turn) for turn in (*bad, *make_chain(5))], return_exceptions=True
    )
    assert [type(result) for result in results[:3]] == [StoreFailed] * 3
    assert results[3:] == [None] * 5
    assert await count(database, "turns") == await count(database, "usage") == 5


async def test_damaged_row_is_our_fault_and_harms_only_itself(
    postgres: PostgresServer, url: str, database: PostgresDatabase
) -> None:
    turns = PostgresStore(database).turns
    await turns.save(make_turn("bad"))
    await turns.save(make_turn("good"))
    await postgres.ask(r"UPDATE turns SET history = '\x00ff' WHERE id = 'bad'", url)
    with pytest.raises(StoreFailed):
        await turns.find(OWNER, "bad")
    assert await turns.find(OWNER, "good") is not None


# --- parts ------------------------------------------------------------------------------------------


async def test_agents_tools_are_stored_once_and_go_with_the_last_turn(
    database: PostgresDatabase,
) -> None:
    turns = PostgresStore(database).turns
    chain = make_chain(10, tools=TOOLS)
    for turn in chain:
        await turns.save(turn)
    await turns.save(make_turn("theirs", owner="eve", tools=TOOLS))
    assert await count(database, "parts") == 2, "once for each owner"
    for turn in chain:
        await turns.delete(OWNER, turn.id)
    assert await count(database, "parts") == 1


async def test_replaced_turn_lets_go_of_its_parts(database: PostgresDatabase) -> None:
    turns = PostgresStore(database).turns
    await turns.save(make_turn("t", tools=TOOLS, status="in_progress"))
    await turns.save(make_turn("t"))
    assert await count(database, "parts") == 0


async def test_part_that_went_meanwhile_is_sent_again(url: str) -> None:
    """The first process has sent it before and only names it; the second one has erased it."""
    async with opened(url) as here, opened(url) as there:
        await PostgresStore(here).turns.save(first := make_turn("a", tools=TOOLS))
        turns = PostgresStore(here).turns
        await turns.save(first)
        await PostgresStore(there).turns.delete(OWNER, "a")
        await turns.save(second := make_turn("b", tools=TOOLS))
        assert meaning(await turns.find(OWNER, "b")) == meaning(second)


async def test_erasing_does_not_hold_up_who_saves_with_the_same_tools(
    database: PostgresDatabase,
) -> None:
    """An agent's tools are one row for all of its turns, and a sweep erases hundreds of turns at a time."""
    turns = PostgresStore(database).turns
    for name in "ab":
        await turns.save(make_turn(name, tools=TOOLS))

    async def erase_beside_a_save(connection: PostgresConnection) -> None:
        async with connection.transaction():
            await connection.execute("DELETE FROM turns WHERE id = 'a'")
            async with asyncio.timeout(5):
                await turns.save(make_turn("c", tools=TOOLS))

    await database.run(erase_beside_a_save)
    assert await count(database, "turns") == 2
    assert await count(database, "parts") == 1


async def test_chain_is_read_by_index_alone(database: PostgresDatabase) -> None:
    """Whatever the planner thinks of the size of the tables."""
    await PostgresStore(database).turns.save(make_turn("t", tools=TOOLS))

    async def explain(connection: PostgresConnection) -> str:
        async with connection.transaction():
            await connection.execute("SET LOCAL enable_seqscan = off")
            plans = [
                await connection.fetch(
                    f"EXPLAIN {QUERIES[name].replace('$1', one).replace('$2', two)}"
                )
                for name, one, two in (("find", "'ada'", "'t'"), ("read", "'ada'", "'t'"))
            ]
        return "\n".join(str(row[0]) for plan in plans for row in plan)

    plan = await database.run(explain)
    assert "Seq Scan" not in plan
    assert "turns_owner_id_key" in plan
    assert "parts_pkey" in plan


async def test_saving_and_erasing_beside_each_other_never_loses_a_part(url: str) -> None:
    async with opened(url) as here, opened(url) as there:
        for round_ in range(10):
            chain = make_chain(8, prefix=f"r{round_}-", tools=TOOLS)
            mine, theirs = PostgresStore(here).turns, PostgresStore(there).turns

            async def save_and_delete(number: int) -> None:
                turn = chain[number]  # noqa: B023
                await (mine if number % 2 else theirs).save(turn)  # noqa: B023
                if number % 4 < 2:
                    await (theirs if number % 2 else mine).delete(OWNER, turn.id)  # noqa: B023

            await asyncio.gather(*map(save_and_delete, range(8)))
            for number, turn in enumerate(chain):
                found = await mine.read(OWNER, turn.id)
                assert (found is None) == (number % 4 < 2)
                if found is not None:
                    assert meaning(found) == meaning(turn)
                    await mine.delete(OWNER, turn.id)
        assert await count(here, "parts") == 0


# --- who asked what ----------------------------------------------------------------------------------


async def test_cancelled_request_leaves_no_connection_half_read(url: str) -> None:
    """One connection for all: rows of a cancelled request never reach the next (docs/inside/hazards.md F35)."""
    async with opened(url, connections_max=1) as database:
        turns = PostgresStore(database).turns
        for owner in ("ada", "eve"):
            canary = said(f"canary {owner} " * 20_000)
            await turns.save(make_turn("t", owner=owner, given=[canary]))
        for step in range(40):
            leaving = asyncio.create_task(turns.find("eve", "t"))
            for _ in range(step % 8):
                await asyncio.sleep(0)
            leaving.cancel()
            found = await turns.find("ada", "t")
            assert found is not None
            assert found.owner == "ada"
            assert found.given[0].raw.count(b"canary ada") == 20_000
            assert b"canary eve" not in found.given[0].raw
        assert await database.is_ready()


async def test_cancelled_save_is_still_written(url: str) -> None:
    async with opened(url, connections_max=1) as database:
        turns = PostgresStore(database).turns
        saving = asyncio.create_task(turns.save(make_turn("t")))
        await asyncio.sleep(0)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        # One connection: this waits behind it.
        assert await turns.find(OWNER, "t") is not None


async def test_connection_that_does_not_answer_in_time_is_thrown_away(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url, connections_max=1) as database:

        async def ask(connection: PostgresConnection, query: str, **limits: float) -> object:
            row = await connection.fetchrow(query, **limits)  # type: ignore[arg-type]
            return row and row[0]

        before = await database.run(lambda connection: ask(connection, "SELECT pg_backend_pid()"))
        with monkeypatch.context() as patched:
            patched.setattr(postgres_database, "PATIENCE_S", 0.3)
            with pytest.raises(Unavailable):
                await database.run(
                    lambda connection: ask(connection, "SELECT pg_sleep(60)", timeout=0.2)
                )
        after = await database.run(lambda connection: ask(connection, "SELECT pg_backend_pid()"))
        assert before != after


async def test_more_connections_than_the_server_takes_are_warned_of(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server of the tests takes 57: two processes with up to 27 connections each fit, three do not."""
    async with opened(url, 25), opened(url, 25):
        assert not caplog.messages
        async with opened(url, 25):
            (warning,) = caplog.messages
    assert "takes 57 connections, and the 3 workers that use it may open 81 (27 each)" in warning
    assert "store_connections to at most 19" in warning


async def test_too_many_at_once_are_told_to_come_later(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_database, "WAITING_MAX", 5)
    async with opened(url, connections_max=1) as database:
        results = await asyncio.gather(
            *[PostgresStore(database).turns.find(OWNER, "t") for _ in range(8)],
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [type(None)] * 5 + [Unavailable] * 3


# --- the server -------------------------------------------------------------------------------------


async def test_connections_cut_by_an_operator_are_replaced(
    postgres: PostgresServer, url: str, database: PostgresDatabase
) -> None:
    turns = PostgresStore(database).turns
    await turns.save(make_turn("before"))
    cut = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
    )
    for number in range(5):
        await postgres.ask(f"{cut} AND pid <> pg_backend_pid()", url)
        await asyncio.gather(*[turns.save(make_turn(f"t{number}-{n}")) for n in range(8)])
        assert await turns.find(OWNER, "before") is not None
    assert await count(database, "turns") == 41


async def test_server_that_comes_back_soon_is_waited_for(
    mortal: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As long as a busy machine may take to start it.
    monkeypatch.setattr(postgres_database, "PATIENCE_S", 60)
    url = await mortal.make_database()
    async with opened(url) as database:
        turns = PostgresStore(database).turns
        await turns.save(make_turn("before"))
        mortal.stop()
        saves = [asyncio.create_task(turns.save(turn)) for turn in make_chain(20)]
        assert not await database.is_ready()
        await asyncio.to_thread(mortal.start)
        await asyncio.gather(*saves)
        for name in ("before", "t19"):
            assert await turns.find(OWNER, name) is not None
        assert await database.is_ready()


async def test_server_that_stays_away_is_unavailable_and_never_not_found(
    mortal: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = await mortal.make_database()
    async with opened(url) as database:
        turns = PostgresStore(database).turns
        await turns.save(make_turn("t"))
        mortal.stop()
        monkeypatch.setattr(postgres_database, "PATIENCE_S", 0.5)
        try:
            for attempt in (
                turns.find(OWNER, "t"), turns.read(OWNER, "t"), turns.delete(OWNER, "t"),
                turns.save(make_turn("u")),
            ):  # fmt: skip
                with pytest.raises(Unavailable):
                    await attempt
            with pytest.raises(Unavailable):
                await PostgresDatabase.open(url)
        finally:
            await asyncio.to_thread(mortal.start)
        monkeypatch.undo()
        assert await turns.find(OWNER, "t") is not None


async def test_close_finishes_what_waits_and_then_refuses(url: str) -> None:
    database = await PostgresDatabase.open(url, connections_max=2)
    turns = PostgresStore(database).turns
    saves = [asyncio.create_task(turns.save(turn)) for turn in make_chain(20)]
    await asyncio.sleep(0)
    await database.close()
    await asyncio.gather(*saves)
    with pytest.raises(Unavailable):
        await turns.find(OWNER, "t0")
    assert not await database.is_ready()
    await database.close()
    async with opened(url) as again:
        assert await count(again, "turns") == 20


# --- migrations -------------------------------------------------------------------------------------


async def test_processes_that_start_together_agree(url: str) -> None:
    async with asyncio.TaskGroup() as group:
        opening = [group.create_task(PostgresDatabase.open(url)) for _ in range(8)]
    for task in opening:
        await task.result().close()
    async with opened(url) as database:
        assert await count(database, "migrations") == len(load_migrations("postgres"))


@pytest.mark.parametrize("needed", ["schema = 9999", "row_format = 9999"])
async def test_database_that_needs_a_newer_version_is_refused(
    postgres: PostgresServer, url: str, needed: str
) -> None:
    async with opened(url):
        pass
    await postgres.ask(f"UPDATE needs SET {needed}", url)
    with pytest.raises(StoreFailed, match=r"newer Segue \(it needs .*9999"):
        await PostgresDatabase.open(url)


async def test_database_that_a_newer_version_has_changed_is_used_all_the_same(
    postgres: PostgresServer, url: str
) -> None:
    async with opened(url):
        pass
    await postgres.ask("INSERT INTO migrations VALUES (9999)", url)
    await postgres.ask("ALTER TABLE turns ADD COLUMN colour text", url)
    async with opened(url) as database:
        await PostgresStore(database).turns.save(make_turn("t"))
        assert await PostgresStore(database).turns.read(OWNER, "t") is not None


async def test_version_that_writes_other_rows_does_not_start_beside_an_older_process(
    postgres: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url):
        with monkeypatch.context() as newer:
            newer.setattr(sql_files, "ROWS_READ", 2)
            newer.setattr(postgres_database, "ROWS_WRITTEN", 2)
            with pytest.raises(StoreFailed, match=f"a process of Segue {__version__} uses it"):
                await PostgresDatabase.open(url)
    monkeypatch.setattr(sql_files, "ROWS_READ", 2)
    monkeypatch.setattr(postgres_database, "ROWS_WRITTEN", 2)
    async with opened(url):
        assert [tuple(row) for row in await postgres.ask("SELECT row_format FROM needs", url)] == [
            (2,)
        ]


async def test_process_from_before_leases_said_a_version_must_stop_first(
    postgres: PostgresServer, url: str
) -> None:
    async with opened(url):
        pass
    await postgres.ask("INSERT INTO workers (id, seen_at) VALUES ('old', seconds_now())", url)
    with pytest.raises(StoreFailed, match=r"a process of Segue 0.2.0 or older uses it"):
        await PostgresDatabase.open(url)
    await postgres.ask("UPDATE workers SET seen_at = seconds_now() - 16 WHERE id = 'old'", url)
    async with opened(url):
        pass


async def test_process_that_was_taken_for_dead_does_not_come_back_to_a_database_that_needs_more(
    postgres: PostgresServer, url: str
) -> None:
    async with opened(url) as database:
        assert await database.beat()
        await postgres.ask("UPDATE workers SET claimed_by = 'another'", url)
        await postgres.ask("UPDATE needs SET row_format = 2", url)
        with pytest.raises(StoreFailed, match="newer Segue"):
            await database.beat()
        await postgres.ask("UPDATE needs SET row_format = 1", url)
        assert not await database.beat(), "under a new name"
        assert await database.beat()


def test_migrations_are_numbered_without_gaps() -> None:
    assert [number for number, _ in load_migrations("postgres")] == list(
        range(1, len(load_migrations("postgres")) + 1)
    )


@pytest.mark.parametrize("url", ["postgresql://nobody@127.0.0.1:1/x", "postgresql://127.0.0.1:1/"])
async def test_address_without_a_server_is_unavailable(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_database, "PATIENCE_S", 0.1)
    with pytest.raises(Unavailable):
        await PostgresDatabase.open(url)


async def test_machines_that_start_together_share_one_ring(url: str) -> None:
    async with opened(url) as here, opened(url) as there:
        mine, yours = await asyncio.gather(
            PostgresStore(here).ring.load(), PostgresStore(there).ring.load()
        )
        assert mine == yours
        assert len(mine) == 1
        old = RingSeals(mine).seal("ada", b"x")
        assert await PostgresStore(there).ring.rotate() == 2
        ring = await PostgresStore(here).ring.load()
        assert ring[1:] == mine
        assert RingSeals(ring).open("ada", old) == b"x"
        assert RingSeals(mine).open("ada", RingSeals(ring).seal("ada", b"x")) is None


async def test_items_whose_commit_was_not_heard_of_are_there_once(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server died between its commit and its answer, and the same is asked again."""
    conversations = PostgresStore(database).conversations
    await conversations.save(Conversation("conv_1", OWNER, 0, {}))
    found = await conversations.find(OWNER, "conv_1")
    assert found is not None
    once, is_lost = database._once, iter([True])

    async def lose_the_first_answer(work: PostgresWork[object]) -> object:
        result = await once(work)
        if next(is_lost, False):
            raise Unavailable("the connection has gone")
        return result

    monkeypatch.setattr(database, "_once", lose_the_first_answer)
    added = [ConversationItem(name, said(name)) for name in ("a", "b")]
    assert await conversations.save(found, added, make_turn("resp_1"))
    assert list(await conversations.read(OWNER, "conv_1")) == added
    assert not await conversations.save(found, [ConversationItem("c", said("c"))]), (
        "somebody was faster"
    )
