"""A server that was taken for dead while it stood still: one end for every request, and the work goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from segue.process import idempotency
from segue.stores import maintenance
from segue.stores.postgres import PostgresStore
from segue.stores.postgres_database import PostgresDatabase
from tests.postgres import PostgresServer
from tests.support import MODEL, Served, fetch, serving, until

KEY = {"idempotency-key": "k"}


@pytest.fixture
async def url(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(maintenance, "BEAT_S", 0.05)
    url = await postgres.make_database()
    yield url
    await postgres.drop_database(url)


@pytest.fixture
async def served(url: str, tmp_path: Path) -> AsyncIterator[Served]:
    """Its turns talk for some seconds."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"text": "x", "pad_tokens": 300}]}))
    async with serving(store=url, script=str(script), tps=100) as served:
        yield served


async def post(served: Served, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return await fetch(
        served, "POST", "/v1/responses", {"model": MODEL, "input": "x", **fields}, headers
    )


async def take_for_dead(postgres: PostgresServer, url: str) -> None:
    """Another process claims the lease of every other one, and ends what it finds."""
    database = await PostgresDatabase.open(url)
    claim = f"UPDATE workers SET seen_at = 0, claimed_by = '{database.worker}'"
    await postgres.ask(f"{claim} WHERE id <> '{database.worker}'", url)
    store = PostgresStore(database)
    # A row that is just being written waits for the next time.
    while await postgres.ask("SELECT 1 FROM turns WHERE worker IS NOT NULL", url):
        await store.maintenance.recover()
    await database.close()


async def test_paused_server_ends_what_others_have_ended_and_keeps_the_rest(
    served: Served, postgres: PostgresServer, url: str
) -> None:
    background = (await post(served, background=True)).json["id"]
    path = f"/v1/responses/{background}"
    following = asyncio.create_task(fetch(served, "GET", f"{path}?stream=true"))
    keyed = asyncio.create_task(post(served, KEY, stream=True))
    plain = asyncio.create_task(post(served, stream=True, max_output_tokens=100))
    await until(lambda: served.app.runner.running_count == 3)
    await until(lambda: served.app.runner.registry.running[background].last > 10)
    await take_for_dead(postgres, url)
    assert (await following).events[-1]["type"] == "response.failed"
    assert (await keyed).events[-1]["type"] == "response.failed"
    assert (await plain).events[-1]["type"] == "response.incomplete"
    seen = (await fetch(served, "GET", path)).json
    assert seen["status"] == "failed"
    replayed = (await fetch(served, "GET", f"{path}?stream=true")).events
    assert [event["type"] for event in replayed].count("response.failed") == 1
    assert (
        await fetch(served, "GET", f"/v1/responses/{(await plain).events[0]['response']['id']}")
    ).status == 200
    # Others may write the end of a turn before the paused process comes to it.
    await until(lambda: not served.app.runner.running_count)
    await served.app.runner.records.afterwards.drained()
    usage = await postgres.ask(
        f"SELECT is_provisional, output_tokens FROM usage WHERE turn_id = '{background}'", url
    )
    assert [(row["is_provisional"], row["output_tokens"] > 0) for row in usage] == [(False, True)]
    again = await post(served, KEY, max_output_tokens=1)
    assert again.status == 200, "its key is free again, and so is its server"


async def test_repeat_after_a_crash_waits_for_the_lease_and_runs(
    served: Served, postgres: PostgresServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await post(served, KEY, max_output_tokens=1)
    await postgres.ask(f"DELETE FROM turns WHERE id = '{first.json['id']}'", url)
    await post(served, KEY, max_output_tokens=1)
    # As if a process had died in the middle of it.
    dead = "'worker_dead'"
    await postgres.ask(f"INSERT INTO workers (id, seen_at) VALUES ({dead}, seconds_now())", url)
    await postgres.ask(f"UPDATE claims SET worker = {dead}, turn_id = 'resp_{'d' * 32}'", url)
    with monkeypatch.context() as patched:
        patched.setattr(idempotency, "REPEAT_S_MAX", 0.1)
        undecided = await post(served, KEY, max_output_tokens=1)
    assert undecided.status == 503
    assert int(undecided.headers["retry-after"]) >= 1
    repeating = asyncio.create_task(post(served, KEY, max_output_tokens=1))
    await postgres.ask(f"UPDATE workers SET seen_at = 0 WHERE id = {dead}", url)
    repeated = await repeating
    assert repeated.status == 200
    assert (await fetch(served, "GET", f"/v1/responses/{repeated.json['id']}")).status == 200
