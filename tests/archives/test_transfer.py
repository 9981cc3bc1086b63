"""A SQLite backup becomes a PostgreSQL database, and the other way round."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from segue.archives import transfer
from segue.stores.postgres_database import PostgresDatabase
from segue.stores.sqlite import SqliteStore
from segue_cli import cli
from tests.postgres import PostgresServer
from tests.scenarios.test_files_api import upload
from tests.support import MODEL, Served, fetch, serving

TABLES = ("turns", "conversations", "shelved", "usage", "keys", "files", "parts")
LONG = "Be brief. " * 400


def run(*words: str | Path) -> int:
    return cli.main([str(word) for word in words])


def key(store: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert (
        run("keys", "create", "--name", "ada", "--budget-tokens-day", "9000", "--store", store) == 0
    )
    secret = capsys.readouterr().out.strip()
    return {"Authorization": f"Bearer {secret}"}


async def talk(served: Served, headers: dict[str, str]) -> dict[str, Any]:
    """Something of each kind; the ids by which it is found again."""
    ask = {"model": MODEL, "input": "hello", "instructions": LONG}
    first = (await fetch(served, "POST", "/v1/responses", ask, headers)).json["id"]
    chained = ask | {"previous_response_id": first}
    second = (await fetch(served, "POST", "/v1/responses", chained, headers)).json["id"]
    talk = (await fetch(served, "POST", "/v1/conversations", {}, headers)).json["id"]
    in_talk = {"model": MODEL, "input": "hi", "conversation": talk}
    assert (await fetch(served, "POST", "/v1/responses", in_talk, headers)).status == 200
    file = (await upload(served, b"contents", "a.txt", headers=headers))["id"]
    return {"first": first, "second": second, "talk": talk, "file": file}


async def check(served: Served, headers: dict[str, str], ids: dict[str, Any]) -> None:
    """Everything is there, the key is good, a chain goes on, and the usage is counted."""
    for name in ("first", "second"):
        found = await fetch(served, "GET", f"/v1/responses/{ids[name]}", None, headers)
        assert found.json["instructions"] == LONG
    listed = await fetch(served, "GET", f"/v1/conversations/{ids['talk']}/items", None, headers)
    assert len(listed.json["data"]) == 2
    content = await fetch(served, "GET", f"/v1/files/{ids['file']}/content", None, headers)
    assert content.body == b"contents"
    ask = {"model": MODEL, "input": "more", "previous_response_id": ids["second"]}
    assert (await fetch(served, "POST", "/v1/responses", ask, headers)).status == 200


def counts(path: Path) -> dict[str, int]:
    with sqlite3.connect(path) as connection:
        return {
            table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in TABLES
        }


SUMS = "SELECT subject, day, sum(tokens) FROM spending GROUP BY 1, 2 ORDER BY 1, 2"


def sums(path: Path) -> list[tuple[Any, ...]]:
    """What each key and owner has used on each day, of SQLite."""
    with sqlite3.connect(path) as connection:
        return connection.execute(SUMS).fetchall()


async def spending(postgres: PostgresServer, url: str) -> list[tuple[Any, ...]]:
    """The same of PostgreSQL."""
    return [(subject, day, int(tokens)) for subject, day, tokens in await postgres.ask(SUMS, url)]


async def test_store_moves_to_postgresql_and_back(
    tmp_path: Path, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    url = await postgres.make_database()
    store, files = f"sqlite:///{tmp_path / 'a.db'}", tmp_path / "shared"
    headers = await asyncio.to_thread(key, store, capsys)
    async with serving(store=store) as served:
        ids = await talk(served, headers)
    backup, back = tmp_path / "a.segue", tmp_path / "b.segue"
    assert await asyncio.to_thread(run, "backup", backup, "--store", store) == 0
    moving = ("restore", backup, "--store", url, "--files-dir", files)
    assert await asyncio.to_thread(run, *moving) == 0
    assert "responses: 3, conversations: 1, API keys: 1, files: 1" in capsys.readouterr().out
    before = counts(tmp_path / "a.db")
    for table in TABLES:
        ((found,),) = await postgres.ask(f"SELECT count(*) FROM {table}", url)
        assert found == before[table], table
    assert await spending(postgres, url) == sums(tmp_path / "a.db")
    # A second time it would replace what is there.
    assert await asyncio.to_thread(run, *moving) == 2
    assert "would be replaced" in capsys.readouterr().err
    async with serving(store=url, files_dir=str(files)) as served:
        await check(served, headers, ids)
        # The trigger counts again.
        ((tokens,),) = await postgres.ask(
            "SELECT sum(input_tokens + output_tokens) FROM usage", url
        )
        counted = await spending(postgres, url)
        assert sum(n for subject, _, n in counted if subject.startswith("key ")) == tokens
        # While a server runs nothing is moved in, and everything can be copied out.
        assert await asyncio.to_thread(run, *moving, "--force") == 2
        assert "use this database. Stop them first" in capsys.readouterr().err
        out = ("backup", back, "--portable", "--store", url, "--files-dir", files)
        assert await asyncio.to_thread(run, *out) == 0
    assert await asyncio.to_thread(run, *moving, "--force") == 0
    again = f"sqlite:///{tmp_path / 'c.db'}"
    assert await asyncio.to_thread(run, "restore", back, "--store", again) == 0
    # With the turn that came at PostgreSQL.
    assert counts(tmp_path / "c.db") == before | {
        "turns": before["turns"] + 1,
        "usage": before["usage"] + 1,
    }
    async with serving(store=again) as served:
        await check(served, headers, ids)


# What a store means for the processes that use it now, what is made again from the rest, and names of what is gone.
# Of PostgreSQL the numbers of rows, who wrote a row last, and that a dead process may know its usage better.
LEFT_OUT = {"turns": {"seq", "saved_by"}, "usage": {"is_provisional"}}
NOT_MOVED = {"places", "meters", "needs", "spending", "erased"}


async def test_every_table_is_moved_whole_or_left_for_a_reason(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    """A table or a column that is new would be lost on the way, and nobody would see it."""
    await (await SqliteStore.open(tmp_path / "a.db")).close()
    with sqlite3.connect(tmp_path / "a.db") as connection:
        names = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
        found = {
            table: {column for _, column, *_ in connection.execute(f"PRAGMA table_info({table})")}
            for (table,) in connection.execute(names)
        }
    assert found.keys() == transfer.TABLES.keys() | NOT_MOVED
    for table, columns in transfer.TABLES.items():
        # Numbers of rows are given again.
        assert found[table] - set(columns.split()) <= {"seq", "id"}, table
    url = await postgres.make_database()
    await (await PostgresDatabase.open(url)).close()
    rows = await postgres.ask(
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'",
        url,
    )
    # Seal keys are a file beside SQLite; who uses the file is told by its lease.
    beside = {"ring", "workers", "migrations"}
    assert {name for name, _ in rows} == transfer.TABLES.keys() | NOT_MOVED | beside
    for table, columns in transfer.TABLES.items():
        there = {column for name, column in rows if name == table}
        assert there - set(columns.split()) <= LEFT_OUT.get(table, set()), table


async def test_transfer_that_fails_changes_nothing(
    tmp_path: Path, postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is cut off in the middle, and begun again."""
    url = await postgres.make_database()
    store = f"sqlite:///{tmp_path / 'a.db'}"
    headers = await asyncio.to_thread(key, store, capsys)
    async with serving(store=store) as served:
        ask = {"model": MODEL, "input": "hello"}
        assert (await fetch(served, "POST", "/v1/responses", ask, headers)).status == 200
    backup = tmp_path / "a.segue"
    assert await asyncio.to_thread(run, "backup", backup, "--store", store) == 0
    # The tables are made first, and one of them refuses the rows.
    async with serving(store=url):
        pass
    await postgres.ask("ALTER TABLE keys ADD CONSTRAINT odd CHECK (name <> 'ada')", url)
    assert await asyncio.to_thread(run, "restore", backup, "--store", url) == 2
    assert "Nothing in it is changed; run it again." in capsys.readouterr().err
    assert await postgres.ask("SELECT * FROM turns", url) == []
    await postgres.ask("ALTER TABLE keys DROP CONSTRAINT odd", url)
    assert await asyncio.to_thread(run, "restore", backup, "--store", url) == 0
    assert len(await postgres.ask("SELECT * FROM turns", url)) == 1
