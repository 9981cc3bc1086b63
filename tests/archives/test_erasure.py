"""`segue erase`: nothing of an owner is left, at rest or in running servers, and nothing of others is touched."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from segue.accounts.hashes import issue_key
from segue_cli import cli
from tests.postgres import PostgresServer
from tests.scenarios.test_files_api import upload
from tests.support import MODEL, Served, fetch, serving, until, wire

CANARY = "canary-9f3b7c"
QUIET = "nothing special"


def run(*words: str | Path) -> int:
    return cli.main([str(word) for word in words])


def bytes_in(folder: Path) -> list[bytes]:
    """What all files have."""
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers look for marks all the time."""
    monkeypatch.setattr("segue.stores.maintenance.BEAT_S", 0.1)
    monkeypatch.setattr("segue.accounts.account.CONFIRM_S", 0.02)
    monkeypatch.setattr("segue.archives.erasure.SETTLE_S", 0.6)


@pytest.fixture(params=["sqlite", "postgresql"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'segue.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return await server.make_database()


async def key(served: Served, owner: str) -> dict[str, str]:
    state = served.app.state
    _, secret = await issue_key(state.store.keys, state.hashes, f"of {owner}", owner)
    return {"Authorization": f"Bearer {secret}"}


async def talk(served: Served, headers: dict[str, str], word: str) -> str:
    """Something of each kind; the id of a response."""
    conversation = (await fetch(served, "POST", "/v1/conversations", {}, headers)).json["id"]
    ask = {"model": MODEL, "input": word, "instructions": word * 500}
    found = await fetch(served, "POST", "/v1/responses", ask, headers)
    more = ask | {"conversation": conversation, "idempotency_key": word}
    assert (await fetch(served, "POST", "/v1/responses", more, headers)).status == 200
    background = ask | {"background": True, "stream": True}
    assert (await fetch(served, "POST", "/v1/responses", background, headers)).status == 200
    await upload(served, word.encode(), "a.txt", headers=headers)
    unstored = {"model": MODEL, "messages": [{"role": "user", "content": word}]}
    assert (await fetch(served, "POST", "/v1/chat/completions", unstored, headers)).status == 200
    return str(found.json["id"])


async def test_nothing_of_an_owner_is_left(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "files"
    flags: dict[str, Any] = {"store": store, "files_dir": str(files), "auth": "keys"}
    words = ("erase", "--owner", "ada", "--store", store, "--files-dir", files)
    async with serving(**flags) as served:
        ada, eve = await key(served, "ada"), await key(served, "eve")
        erased, kept = await talk(served, ada, CANARY), await talk(served, eve, QUIET)
        async with wire(served, additional_headers=ada) as socket:
            turn = await socket.turn(input=CANARY, store=False)
            assert turn["type"] == "response.completed"
            state = served.app.state
            assert state.store.state.bytes_of("ada")
            assert state.render_cache.bytes_of("ada")
            assert await asyncio.to_thread(run, *words, "--dry-run") == 0
            assert "3 responses" in capsys.readouterr().out
            assert (await fetch(served, "GET", f"/v1/responses/{erased}", None, ada)).status == 200
            assert await asyncio.to_thread(run, *words) == 2
            assert "Say --yes" in capsys.readouterr().err
            assert await asyncio.to_thread(run, *words, "--yes") == 0
            # The connection with its cache is closed, and what the process knew is gone.
            await until(lambda: not served.app.upgrades.sessions)
        await until(lambda: not state.store.state.bytes_of("ada"))
        assert not state.render_cache.bytes_of("ada")
        assert not state.reuse.bytes_of("ada")
        assert (await fetch(served, "GET", f"/v1/responses/{erased}", None, ada)).status == 404
        assert (await fetch(served, "GET", "/v1/files", None, ada)).json["data"] == []
        # The key was kept, and may write again.
        found = await fetch(served, "GET", f"/v1/responses/{kept}", None, eve)
        assert found.json["instructions"] == QUIET * 500
        assert len((await fetch(served, "GET", "/v1/files", None, eve)).json["data"]) == 1
        assert await asyncio.to_thread(run, *words, "--yes", "--keys", "--usage") == 0
        while (await fetch(served, "GET", "/v1/models", None, ada)).status != 401:
            pass
        report = await state.store.ledger.report(None, 0)
        assert {row.owner for row in report} == {"eve"}
    capsys.readouterr()
    assert await asyncio.to_thread(run, *words, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "0 responses" in said
    # Rows of revoked keys stay, so that the store goes on asking for keys; they name nobody.
    assert "0 API keys" in said
    assert await asyncio.to_thread(run, "keys", "list", "--store", store) == 0
    listed = capsys.readouterr().out
    assert [row.split()[1:3] for row in listed.splitlines() if "revoked" in row] == [
        ["erased", "-"]
    ]
    assert bytes_in(files) == [QUIET.encode()]
    assert not [body for body in bytes_in(tmp_path) if CANARY.encode() in body]


async def test_turn_that_runs_is_cancelled_and_leaves_nothing(store: str, tmp_path: Path) -> None:
    flags: dict[str, Any] = {"store": store, "files_dir": str(tmp_path / "f"), "auth": "keys"}
    async with serving(tps=5, **flags) as served:
        ada = await key(served, "ada")
        async with wire(served, additional_headers=ada) as socket:
            await socket.create(input=CANARY * 50)
            while (await socket.next())["type"] != "response.in_progress":
                pass
            words = ("erase", "--owner", "ada", "--yes", "--store", store)
            assert await asyncio.to_thread(run, *words) == 0
        await until(lambda: not served.app.runner.registry.running)
        tables = served.app.state.store.files.tables  # type: ignore[attr-defined]
        ((turns,),) = await tables.fetch("count_owner", lambda *row: row[:1], "ada")
        assert turns == 0


async def test_owner_that_is_misspelt_is_not_taken_for_one_that_is_gone(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("erase", "--store", store, "--files-dir", tmp_path / "files", "--yes", "--owner")
    async with serving(store=store, files_dir=str(tmp_path / "files"), auth="keys") as served:
        headers = await key(served, "research")
        await talk(served, headers, QUIET)
        assert await asyncio.to_thread(run, *words, "reserch") == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "nothing is known of an owner 'reserch'. Did you mean research?" in said.err
        # Somebody who is erased may be erased again.
        for _ in range(2):
            assert await asyncio.to_thread(run, *words, "research", "--keys", "--usage") == 0
