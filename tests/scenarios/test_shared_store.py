"""Two servers on one store, SQLite or PostgreSQL: what one keeps the other finds, what one erases the other forgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from segue.stores import maintenance
from tests.pgbouncer import POOLED
from tests.support import MODEL, Answer, Served, ServedProcess, fetch, served_process, serving, wire

Server = Served | ServedProcess


@pytest.fixture(params=["sqlite", "postgres", *POOLED])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[dict[str, str]]:
    if request.param == "sqlite":
        yield {"store": f"sqlite:///{tmp_path / 'shared.db'}"}
        return
    server = request.getfixturevalue("postgres")
    url = await server.make_database()
    if request.param == "postgres":
        yield {"store": url}
    else:
        yield {"store": request.getfixturevalue("pooler").url(url), "store_direct": url}
    await server.drop_database(url)


async def post(served: Server, **fields: object) -> Answer:
    return await fetch(served, "POST", "/v1/responses", {"model": MODEL, **fields})


@pytest.fixture
def flags(store: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """What two servers on one store have in common."""
    return {**store, "seal_keys": str(tmp_path / "seals")}


async def test_chain_goes_on_at_the_other_server(flags: dict[str, str]) -> None:
    async with serving(**flags) as here, serving(**flags) as there:
        first = (await post(here, input="one")).json
        second = (await post(there, input="two", previous_response_id=first["id"])).json
        async with wire(here) as socket:
            third = await socket.turn(input="three", previous_response_id=second["id"])
        assert third["type"] == "response.completed"
        found = await fetch(there, "GET", f"/v1/responses/{third['response']['id']}")
        assert found.json == third["response"]


async def test_deleted_response_leaves_the_other_servers_memory(
    flags: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "BEAT_S", 0.02)
    async with serving(**flags) as here, serving(**flags) as there, wire(there) as socket:
        parent = (await post(here, input="one")).json["id"]
        child = await socket.turn(input="two", previous_response_id=parent)
        assert child["type"] == "response.completed"
        assert (await post(there, input="x", previous_response_id=parent)).status == 200
        assert (await fetch(here, "DELETE", f"/v1/responses/{parent}")).status == 200
        async with asyncio.timeout(20):
            while (await fetch(there, "GET", f"/v1/responses/{parent}")).status != 404:
                pass
        again = await socket.turn(input="three", previous_response_id=child["response"]["id"])
        assert again["error"]["code"] == "previous_response_not_found"


async def test_stored_turns_survive_the_process_queued_ones_too_and_running_ones_end_as_failed(
    flags: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    # A turn is queued until its first token.
    with served_process(*words, "--tps", "1", cwd=tmp_path) as served:
        first = (await post(served, input="one", max_output_tokens=1)).json
        running = (await post(served, input="two", background=True)).json
        async with asyncio.timeout(20):
            while (await status_of(served, running)) != "in_progress":
                pass
        queued = (await post(served, input="four", background=True)).json
        assert queued["status"] == "queued"
        served.process.kill()
        served.process.wait(30)
    # A lease in PostgreSQL is over after a while, by its clock; here after a moment.
    monkeypatch.setattr("segue.stores.postgres.LEASE_S", 0)
    monkeypatch.setattr(maintenance, "BEAT_S", 0.05)
    async with serving(**flags) as again:
        answer = await post(again, input="three", previous_response_id=first["id"])
        assert answer.status == 200
        async with asyncio.timeout(20):
            while await status_of(again, running) != "failed":
                pass
            while await status_of(again, queued) != "completed":
                pass
        found = (await fetch(again, "GET", f"/v1/responses/{running['id']}")).json
        assert found["error"]["code"] == "server_error"


async def status_of(served: Server, response: dict[str, Any]) -> str:
    found: str = (await fetch(served, "GET", f"/v1/responses/{response['id']}")).json["status"]
    return found
