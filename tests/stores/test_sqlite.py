"""SQLite keeps what it acknowledged, erases what it deleted, and fails in our words."""

import asyncio
import multiprocessing
import os
import sqlite3
import stat
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from msgspec.structs import replace

from segue import __version__
from segue.errors import StoreFailed, Unavailable
from segue.seams.history import ancestors
from segue.seams.store import Claim, Retention
from segue.stores import sql_files, sqlite_database
from segue.stores.layered import LayeredIdempotencyKeys
from segue.stores.memory import MemoryIdempotencyKeys
from segue.stores.memory_turns import LayeredTurns, MemoryTurns
from segue.stores.sql_files import load_migrations
from segue.stores.sqlite import SqliteStore
from segue.stores.sqlite_database import SqliteDatabase, statements
from segue.wire.events import Event as WireEvent
from tests.contracts.turns import OWNER, make_chain, make_turn, meaning, said

CANARY = "canary-7f3a"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns.sqlite"


@pytest.fixture
async def database(path: Path) -> AsyncIterator[SqliteDatabase]:
    async with opened(path) as database:
        yield database


@asynccontextmanager
async def opened(
    path: Path, on_commit: Callable[[int], None] | None = None
) -> AsyncIterator[SqliteDatabase]:
    database = await SqliteDatabase.open(path, on_commit=on_commit)
    try:
        yield database
    finally:
        await database.close()


def on_disk(path: Path) -> bytes:
    """Everything that lies in the folder, the log included."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.iterdir()))


def count(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        number: int = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        return number


class Barrier:
    """Holds up the first commit until it is let through, and counts the writes in each."""

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.is_held = threading.Event()
        self.go = threading.Event()

    def __call__(self, writes: int) -> None:
        self.groups.append(writes)
        self.is_held.set()
        assert self.go.wait(30)

    async def until_held(self) -> None:
        assert await asyncio.to_thread(self.is_held.wait, 30)


async def test_unstored_turn_leaves_no_trace_on_disk(path: Path, database: SqliteDatabase) -> None:
    turns = LayeredTurns(MemoryTurns(1 << 30), SqliteStore(database).turns)
    secret = make_turn("secret", is_stored=False, given=[said(CANARY)])
    await turns.save(secret)
    await turns.save(make_turn("child", secret))
    assert b"ask child" in on_disk(path)
    assert CANARY.encode() not in on_disk(path)
    with pytest.raises(AssertionError):
        await SqliteStore(database).turns.save(secret)
    assert CANARY.encode() not in on_disk(path)


async def test_everything_is_there_after_reopening(path: Path) -> None:
    chain = make_chain(5, tools=b"[" + b" " * 500 + b"]")
    async with opened(path) as database:
        for turn in chain:
            await SqliteStore(database).turns.save(turn)
    assert [file.name for file in path.parent.iterdir()] == ["turns.sqlite"]
    async with opened(path) as database:
        found = await SqliteStore(database).turns.find(OWNER, "t4")
    assert found is not None
    assert [meaning(turn) for turn in ancestors(found)] == [meaning(turn) for turn in chain]


async def test_acknowledged_turn_survives_a_crash(path: Path) -> None:
    """What lies on disk when a save returns is enough, without a clean close."""
    async with opened(path) as database:
        await SqliteStore(database).turns.save(make_turn("t"))
        crashed = path.parent / "crashed"
        crashed.mkdir()
        for name in ("turns.sqlite", "turns.sqlite-wal"):
            (crashed / name).write_bytes((path.parent / name).read_bytes())
    async with opened(crashed / "turns.sqlite") as database:
        assert await SqliteStore(database).turns.find(OWNER, "t") is not None


async def test_saves_that_wait_share_one_commit(path: Path) -> None:
    barrier = Barrier()
    async with opened(path, barrier) as database:
        turns = SqliteStore(database).turns
        first = asyncio.create_task(turns.save(make_turn("first")))
        await barrier.until_held()
        others = [asyncio.create_task(turns.save(turn)) for turn in make_chain(50)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in (first, *others)), "acknowledged before the commit"
        barrier.go.set()
        await asyncio.gather(first, *others)
    assert barrier.groups == [1, 50]
    assert count(path, "turns") == 51


async def test_loop_and_readers_go_on_while_a_commit_takes_its_time(path: Path) -> None:
    barrier = Barrier()
    async with opened(path, barrier) as database:
        turns = SqliteStore(database).turns
        barrier.go.set()
        await turns.save(make_turn("a"))
        barrier.go.clear()
        barrier.is_held.clear()
        saving = asyncio.create_task(turns.save(make_turn("b")))
        await barrier.until_held()
        assert await turns.find(OWNER, "a") is not None
        assert await turns.find(OWNER, "b") is None, "seen before it was durable"
        barrier.go.set()
        await saving
        assert await turns.find(OWNER, "b") is not None


async def test_cancelled_save_harms_nobody(path: Path) -> None:
    barrier = Barrier()
    async with opened(path, barrier) as database:
        turns = SqliteStore(database).turns
        tasks = [asyncio.create_task(turns.save(make_turn("t0")))]
        await barrier.until_held()
        tasks += [asyncio.create_task(turns.save(make_turn(f"t{n}"))) for n in range(1, 30)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        barrier.go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for number, result in enumerate(results):
            assert isinstance(result, asyncio.CancelledError) == (number % 3 == 0)
            if number % 3:
                assert await turns.find(OWNER, f"t{number}") is not None
        await turns.save(make_turn("after"))
        assert await turns.find(OWNER, "after") is not None


async def test_bad_row_does_not_take_its_group_down(path: Path) -> None:
    barrier = Barrier()
    async with opened(path, barrier) as database:
        turns = SqliteStore(database).turns
        first = asyncio.create_task(turns.save(make_turn("first")))
        await barrier.until_held()
        bad = replace(make_turn("bad"), parent_id="\ud800")
        tasks = [asyncio.create_task(turns.save(turn)) for turn in (*make_chain(5), bad)]
        await asyncio.sleep(0)
        barrier.go.set()
        await first
        *good, failed = await asyncio.gather(*tasks, return_exceptions=True)
        assert good == [None] * 5
        assert isinstance(failed, StoreFailed)
        assert await turns.find(OWNER, "bad") is None
        assert await turns.find(OWNER, "t4") is not None
    assert count(path, "usage") == 6


async def test_cursor_does_not_leave_the_thread_of_its_connection(database: SqliteDatabase) -> None:
    """Freed by its caller it would reset the statement that the writing thread is using."""
    with pytest.raises(AssertionError, match="cursor"):
        await database.write(lambda writer: writer.execute("SELECT 1"))
    with pytest.raises(AssertionError, match="cursor"):
        await database.read(lambda reader: reader.execute("SELECT 1"))
    assert await database.write(lambda writer: writer.execute("SELECT 1").fetchone()[0]) == 1


async def test_full_disk_fails_the_save_that_does_not_fit(
    path: Path, database: SqliteDatabase
) -> None:
    turns = SqliteStore(database).turns
    await turns.save(make_turn("before"))
    await database.write(lambda writer: writer.execute("PRAGMA max_page_count = 60").fetchall())
    large = make_turn("large", given=[said("x" * 1_000_000)])
    results = await asyncio.gather(
        turns.save(make_turn("a")), turns.save(large), turns.save(make_turn("b")),
        return_exceptions=True,
    )  # fmt: skip
    assert results[0] is None
    assert isinstance(results[1], StoreFailed)
    assert results[2] is None
    for name, is_there in (("before", True), ("a", True), ("large", False), ("b", True)):
        assert (await turns.find(OWNER, name) is not None) == is_there
    assert await database.is_ready()


async def test_file_that_cannot_be_written_fails_the_save(database: SqliteDatabase) -> None:
    turns = SqliteStore(database).turns
    await database.write(lambda writer: writer.execute("PRAGMA query_only = ON").fetchall())
    with pytest.raises(StoreFailed):
        await turns.save(make_turn("a"))
    assert await turns.find(OWNER, "a") is None
    await database.read(lambda _: database._writer.execute("PRAGMA query_only = OFF").fetchall())
    await turns.save(make_turn("a"))
    assert await turns.find(OWNER, "a") is not None


async def test_file_locked_by_another_is_unavailable(path: Path, database: SqliteDatabase) -> None:
    turns = SqliteStore(database).turns
    await turns.save(make_turn("before"))
    await database.write(lambda writer: writer.execute("PRAGMA busy_timeout = 20").fetchall())
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        results = await asyncio.gather(
            *[turns.save(turn) for turn in make_chain(3)], return_exceptions=True
        )
        assert all(isinstance(result, Unavailable) for result in results)
        assert not await database.is_ready()
        assert await turns.find(OWNER, "before") is not None
        other.execute("ROLLBACK")
    await turns.save(make_turn("after"))
    assert await database.is_ready()


async def test_path_that_cannot_be_opened_is_unavailable(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none" / "turns.sqlite"):
        with pytest.raises(Unavailable):
            await SqliteDatabase.open(place)


def spoil(path: Path) -> None:
    path.write_bytes(b"not a database" * 1_000)


async def test_file_that_is_no_database_is_refused(path: Path) -> None:
    spoil(path)
    with pytest.raises(StoreFailed):
        await SqliteDatabase.open(path)


@pytest.mark.parametrize("needed", ["schema = 9999", "row_format = 9999"])
async def test_file_that_needs_a_newer_version_is_refused(path: Path, needed: str) -> None:
    async with opened(path):
        pass
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE needs SET {needed}")
    with pytest.raises(StoreFailed, match=r"newer Segue \(it needs .*9999"):
        await SqliteDatabase.open(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name], "no lease is left"


async def test_file_that_a_newer_version_has_changed_is_used_all_the_same(path: Path) -> None:
    async with opened(path):
        pass
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("ALTER TABLE turns ADD COLUMN colour TEXT")
        connection.execute("PRAGMA user_version = 9999")
    async with opened(path) as database:
        await SqliteStore(database).turns.save(make_turn("t"))
        assert await SqliteStore(database).turns.read(OWNER, "t") is not None
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (9999,)


async def test_version_that_writes_other_rows_does_not_start_beside_an_older_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(path):
        monkeypatch.setattr(sql_files, "ROWS_READ", 2)
        monkeypatch.setattr(sqlite_database, "ROWS_WRITTEN", 2)
        with pytest.raises(StoreFailed, match=f"a process of Segue {__version__} uses it"):
            await SqliteDatabase.open(path)
    async with opened(path):
        monkeypatch.setattr(sql_files, "ROWS_READ", 1)
        with pytest.raises(StoreFailed, match="newer Segue"):
            await SqliteDatabase.open(path)


async def test_damaged_row_is_our_fault_and_harms_only_itself(
    path: Path, database: SqliteDatabase
) -> None:
    turns = SqliteStore(database).turns
    await turns.save(make_turn("bad"))
    await turns.save(make_turn("good"))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE turns SET history = x'00ff' WHERE id = 'bad'")
    with pytest.raises(StoreFailed):
        await turns.find(OWNER, "bad")
    assert await turns.find(OWNER, "good") is not None


async def test_circle_of_parents_ends(path: Path, database: SqliteDatabase) -> None:
    turns = SqliteStore(database).turns
    a, b = make_chain(2)
    await turns.save(replace(a, parent_id="t1"))
    await turns.save(b)
    found = await turns.find(OWNER, "t1")
    assert found is not None
    assert not found.is_whole


async def test_deleted_bytes_are_in_no_file(path: Path, database: SqliteDatabase) -> None:
    turns = SqliteStore(database).turns
    tools = b'["' + f"tools {CANARY} ".encode() * 500 + b'"]'
    chain = make_chain(3, tools=tools, given=[said(f"{CANARY} " * 2_000)])
    for turn in chain:
        await turns.save(turn)
        await turns.save(make_turn(f"beside {turn.id}"))
    for turn in chain[:2]:
        await turns.delete(OWNER, turn.id)
    assert f"tools {CANARY}".encode() in on_disk(path), "the last turn still uses them"
    await turns.delete(OWNER, "t2")
    assert CANARY.encode() not in on_disk(path)
    assert count(path, "parts") == 0
    assert await turns.find(OWNER, "beside t1") is not None


async def test_replaced_bytes_are_erased_with_their_parts(
    path: Path, database: SqliteDatabase
) -> None:
    turns = SqliteStore(database).turns
    await turns.save(make_turn("t", tools=b"[" + b" " * 500 + b"]", status="in_progress"))
    await turns.save(make_turn("t"))
    assert count(path, "parts") == 0


async def test_reader_in_the_way_delays_erasing_and_nothing_else(
    path: Path, database: SqliteDatabase
) -> None:
    turns = SqliteStore(database).turns
    await turns.save(make_turn("t", given=[said(CANARY)]))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM turns").fetchone()
        assert await turns.delete(OWNER, "t") is True
        assert CANARY.encode() in on_disk(path)
    await turns.save(make_turn("next"))
    assert CANARY.encode() not in on_disk(path)


async def test_agents_tools_are_stored_once(path: Path, database: SqliteDatabase) -> None:
    turns = SqliteStore(database).turns
    tools = b"[" + b" " * 19_000 + b"]"
    for turn in make_chain(100, tools=tools):
        await turns.save(turn)
    await turns.save(make_turn("theirs", owner="eve", tools=tools))
    assert count(path, "parts") == 2, "once for each owner"
    found = await turns.find(OWNER, "t99")
    assert found is not None
    assert bytes(found.response.tools) == tools


async def test_long_chain_costs_what_is_new_in_it(path: Path) -> None:
    """Rows and bytes grow with the number of turns, not with its square."""
    chain = make_chain(5_000, tools=b"[" + b" " * 19_000 + b"]")
    database = await SqliteDatabase.open(path, durability="relaxed")
    turns = SqliteStore(database).turns
    sizes = []
    for half in (chain[:2_500], chain[2_500:]):
        await asyncio.gather(*[turns.save(turn) for turn in half])
        sizes.append(await database.read(pages))
    found = await turns.find(OWNER, "t4999")
    assert found is not None
    assert len(ancestors(found)) == 5_000
    await database.close()
    assert count(path, "turns") == 5_000
    assert sizes[1] < 2.1 * sizes[0]
    assert len(on_disk(path)) < 5_000 * 2_500


def pages(connection: sqlite3.Connection) -> int:
    number: int = connection.execute("PRAGMA page_count").fetchone()[0]
    return number


async def test_close_finishes_what_waits_and_then_refuses(path: Path) -> None:
    barrier = Barrier()
    database = await SqliteDatabase.open(path, on_commit=barrier)
    turns = SqliteStore(database).turns
    saves = [asyncio.create_task(turns.save(turn)) for turn in make_chain(20)]
    await barrier.until_held()
    closing_ = asyncio.create_task(database.close())
    await asyncio.sleep(0)
    barrier.go.set()
    await asyncio.gather(closing_, *saves)
    assert count(path, "turns") == 20
    for attempt in (turns.save(make_turn("late")), turns.find(OWNER, "t0")):
        with pytest.raises(Unavailable):
            await attempt
    assert not await database.is_ready()
    await database.close()


async def test_file_is_private_and_durable(path: Path, database: SqliteDatabase) -> None:
    await SqliteStore(database).turns.save(make_turn("t"))
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    settings = await database.write(
        lambda writer: [
            writer.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "secure_delete", "foreign_keys")
        ]
    )
    assert settings == ["wal", 2, 1, 1]


async def test_relaxed_durability_is_asked_for(path: Path) -> None:
    database = await SqliteDatabase.open(path, durability="relaxed")
    read = lambda writer: writer.execute("PRAGMA synchronous").fetchone()[0]  # noqa: E731
    assert await database.write(read) == 1
    await database.close()


def start_and_save(path: Path, name: str) -> None:
    async def work() -> None:
        async with opened(path) as database:
            await SqliteStore(database).turns.save(make_turn(name))

    asyncio.run(work())


async def test_processes_that_start_together_agree(path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(target=start_and_save, args=(path, f"t{number}")) for number in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        await asyncio.to_thread(worker.join, 60)
        assert worker.exitcode == 0
    assert count(path, "turns") == 4


def write_and_read(path: Path, mine: str, theirs: str, turns_count: int) -> None:
    """One of two processes: save turns, and find each of the other's soon after."""

    async def work() -> None:
        async with opened(path) as database:
            turns = SqliteStore(database).turns
            parent = None
            for number in range(turns_count):
                parent = make_turn(f"{mine}{number}", parent)
                await turns.save(parent)
                if number % 10 == 5:
                    await turns.delete(OWNER, f"{mine}{number - 5}")
            async with asyncio.timeout(30):
                while await turns.read(OWNER, f"{theirs}{turns_count - 1}") is None:
                    pass
            found = await turns.find(OWNER, f"{theirs}{turns_count - 1}")
            assert found is not None
            assert found.given == make_turn(found.id).given
            assert await turns.find(OWNER, f"{theirs}0") is None

    asyncio.run(work())


async def test_two_processes_write_beside_each_other_and_find_each_others_turns(path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(target=write_and_read, args=(path, mine, theirs, 100))
        for mine, theirs in (("a", "b"), ("b", "a"))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        await asyncio.to_thread(worker.join, 60)
        assert worker.exitcode == 0
    assert count(path, "turns") == 180
    assert count(path, "usage") == 200
    assert [file.name for file in path.parent.iterdir()] == ["turns.sqlite"]


def run_until_killed(path: Path, saved: Event) -> None:
    """A process that saves a running turn, says so, and goes on for ever."""

    async def work() -> None:
        async with opened(path) as database:
            await SqliteStore(database).turns.save(make_turn("lost", status="in_progress"))
            saved.set()
            await asyncio.Event().wait()

    asyncio.run(work())


async def test_turn_of_a_killed_process_ends_as_failed_at_the_next_start(path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    saved = spawn.Event()
    worker = spawn.Process(target=run_until_killed, args=(path, saved))
    worker.start()
    try:
        assert await asyncio.to_thread(saved.wait, 30)
        async with opened(path) as database:
            assert await SqliteStore(database).maintenance.recover() == 0, "it lives"
            worker.kill()
            await asyncio.to_thread(worker.join, 30)
        async with opened(path) as database:
            assert await SqliteStore(database).maintenance.recover() == 1
            found = await SqliteStore(database).turns.read(OWNER, "lost")
            assert found is not None
            assert found.response.status == "failed"
    finally:
        worker.kill()
    assert [file.name for file in path.parent.iterdir()] == ["turns.sqlite"]


async def test_file_of_the_first_version_is_brought_up_to_date(path: Path) -> None:
    first = load_migrations("sqlite")[0][1]
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements(first):
            connection.execute(statement)
        connection.execute(
            "INSERT INTO turns (owner, id, history, response) VALUES ('ada', 'old', x'00', x'00')"
        )
    async with opened(path) as database:
        await SqliteStore(database).turns.save(make_turn("new"))
        while await SqliteStore(database).maintenance.sweep(Retention(turns_s=3_600)):
            pass
    assert count(path, "turns") == 2, "what was there ages from today"


async def test_swept_bytes_are_in_no_file(path: Path, database: SqliteDatabase) -> None:
    turns, log, maintenance = (
        SqliteStore(database).turns,
        SqliteStore(database).events,
        SqliteStore(database).maintenance,
    )
    event = WireEvent("response.created", 0, os.urandom(2_000).hex().encode() + CANARY.encode())
    await turns.save(make_turn("t", given=[said(f"{CANARY} " * 100)]))
    await log.append(OWNER, "t", [event])
    packed = await database.read(
        lambda reader: reader.execute("SELECT body FROM events").fetchone()[0]
    )
    assert packed[100:200] in on_disk(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE turns SET saved_at = saved_at - 100")
    while await maintenance.sweep(Retention(turns_s=50)):
        pass
    assert CANARY.encode() not in on_disk(path)
    assert packed[100:200] not in on_disk(path)
    assert count(path, "events") == 0


async def test_key_of_an_unstored_turn_is_refused(path: Path, database: SqliteDatabase) -> None:
    secret = Claim(OWNER, CANARY, "secret", CANARY.encode(), is_stored=False)
    with pytest.raises(AssertionError):
        await SqliteStore(database).idempotency_keys.claim(secret)
    await LayeredIdempotencyKeys(
        MemoryIdempotencyKeys(), SqliteStore(database).idempotency_keys
    ).claim(secret)
    assert CANARY.encode() not in on_disk(path)


def test_migrations_are_numbered_without_gaps() -> None:
    assert [number for number, _ in load_migrations("sqlite")] == list(
        range(1, len(load_migrations("sqlite")) + 1)
    )


def test_script_is_cut_into_whole_statements() -> None:
    trigger = "-- d;\nCREATE TRIGGER t AFTER DELETE ON a BEGIN\n SELECT 1;\nEND;\n"
    assert list(statements("CREATE TABLE a (b);\n" + trigger)) == [
        "CREATE TABLE a (b);\n",
        trigger,
    ]
