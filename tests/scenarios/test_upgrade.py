"""A store of an earlier version goes on with this one: its key is valid, its responses and conversations continue.

The stores in tests/golden/upgrade were written by Segue 0.1.0 (SQLite schema 7, PostgreSQL schema 8): a call of a
function and its answer, a conversation, and the API key that they belong to. They are dumps as SQL text.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from segue.stores.sql_files import load_migrations
from tests.postgres import PostgresServer
from tests.support import MODEL, fetch, serving

OLD = Path(__file__).parents[1] / "golden" / "upgrade"
NAMES: dict[str, Any] = json.loads((OLD / "names.json").read_text())


@asynccontextmanager
async def old_store(kind: str, folder: Path, postgres: PostgresServer) -> AsyncIterator[str]:
    """The address of a store as the earlier version has left it."""
    script = (OLD / f"{kind}.sql").read_text()
    if kind.startswith("sqlite"):
        with closing(sqlite3.connect(folder / "old.db")) as database:
            database.executescript(script)
        (folder / "old.db.seals").write_text(json.dumps(NAMES[kind]["seals"]))
        yield f"sqlite:///{folder / 'old.db'}"
        return
    url = await postgres.make_database()
    connection = await asyncpg.connect(url)
    await connection.execute(script)
    await connection.close()
    yield url
    await postgres.drop_database(url)


@pytest.mark.parametrize("kind", ["sqlite_7", "postgresql_8"])
async def test_store_of_an_earlier_version_goes_on(
    kind: str, tmp_path: Path, postgres: PostgresServer
) -> None:
    names = NAMES[kind]
    head = {"authorization": f"Bearer {names['secret']}"}
    # Nothing in it is ever too old for this test.
    async with (
        old_store(kind, tmp_path, postgres) as store,
        serving(store=store, retention_s=0, events_retention_s=0) as served,
    ):
        assert (await fetch(served, "GET", "/v1/models")).status == 401, "its keys are required"

        async def ask(method: str, path: str, **body: object) -> Any:
            answer = await fetch(served, method, f"/v1/{path}", body or None, head)
            assert answer.status == 200, answer.body
            return answer.json

        call = await ask("GET", f"responses/{names['call']}")
        assert call["output"][0]["name"] == "get_weather"
        assert "patient assistant" in call["instructions"]
        onwards = {"model": MODEL, "input": "And tomorrow?"}
        again = await ask("POST", "responses", previous_response_id=names["answer"], **onwards)
        assert again["status"] == "completed"
        alone = await ask("POST", "responses", **onwards)
        assert again["usage"]["input_tokens"] > alone["usage"]["input_tokens"] + 20, "its history"
        spoken = await ask("POST", "responses", conversation=names["conversation"], **onwards)
        assert spoken["status"] == "completed"
        items = await ask("GET", f"conversations/{names['conversation']}/items")
        assert len(items["data"]) == 4
    newest = load_migrations(kind.partition("_")[0].removesuffix("ql"))[-1][0]
    assert newest >= int(kind.partition("_")[2])
