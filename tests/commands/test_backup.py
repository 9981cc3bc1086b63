"""`segue backup` and `segue restore`, as an operator runs them: while clients write, into another place, and when the
file, the store or the seal keys are not what they should be."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from segue_cli import cli
from tests.postgres import PostgresServer
from tests.scenarios.test_files_api import upload
from tests.support import MODEL, fetch, serving, wire

CLIENTS = 4
TRIES_MAX = 20
# Turns that every client has got before the backup begins.
TURNS = 5


def run(*words: str | Path) -> int:
    return cli.main([str(word) for word in words])


class Writer:
    """A client that writes one chain of stored turns until it is stopped."""

    def __init__(self) -> None:
        self.acknowledged: list[str] = []
        self.has_begun, self.is_stopped = asyncio.Event(), asyncio.Event()

    async def write(self, served: Any) -> None:
        async with wire(served) as socket:
            last = None
            while not self.is_stopped.is_set():
                ended = await socket.turn(input="x" * 2_000, previous_response_id=last)
                last = ended["response"]["id"]
                self.acknowledged.append(last)
                if len(self.acknowledged) >= TURNS:
                    self.has_begun.set()


async def test_backup_under_write_load_has_every_turn_that_was_acknowledged_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, file = f"sqlite:///{tmp_path / 'live.db'}", tmp_path / "segue.backup"
    writers = [Writer() for _ in range(CLIENTS)]
    async with serving(store=store) as served:
        tasks = [asyncio.create_task(writer.write(served)) for writer in writers]
        await asyncio.gather(*(writer.has_begun.wait() for writer in writers))
        during = tries = 0
        while not during and tries < TRIES_MAX:
            # A backup may be faster than all clients.
            tries += 1
            file.unlink(missing_ok=True)
            before = [list(writer.acknowledged) for writer in writers]
            assert await asyncio.to_thread(run, "backup", file, "--store", store) == 0
            during = sum(len(writer.acknowledged) for writer in writers) - sum(map(len, before))
        for writer in writers:
            writer.is_stopped.set()
        await asyncio.gather(*tasks)
        # A store that a server uses is not replaced, whatever the flags.
        assert run("restore", file, "--store", store, "--force") == 2
        assert "a server uses" in capsys.readouterr().err
    assert during > 0, "the clients went on writing meanwhile"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    elsewhere = tmp_path / "other" / "place.db"
    assert run("restore", file, "--store", f"sqlite:///{elsewhere}") == 0
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o600
    async with serving(store=f"sqlite:///{elsewhere}") as served:
        for chain in before:
            for turn in chain:
                assert (await fetch(served, "GET", f"/v1/responses/{turn}")).status == 200
            body = {"model": MODEL, "input": "go on", "previous_response_id": chain[-1]}
            answer = await fetch(served, "POST", "/v1/responses", body)
            assert answer.json["status"] == "completed"


async def make_store(folder: Path) -> str:
    """A store with a turn and an API key."""
    store = f"sqlite:///{folder / 'one.db'}"
    async with serving(store=store) as served:
        await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "x"})
    assert await asyncio.to_thread(run, "keys", "create", "--name", "one", "--store", store) == 0
    return store


def test_backup_refuses_what_would_be_lost_or_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, file = asyncio.run(make_store(tmp_path)), tmp_path / "b"
    at = ("--store", store)
    assert run("backup", file, *at) == 0
    assert "responses: 1, conversations: 0, API keys: 1" in capsys.readouterr().out

    def refusal(*words: str | Path) -> str:
        assert run(*words) == 2
        assert not list(tmp_path.glob(".segue-*")), "nothing is left over"
        return capsys.readouterr().err

    assert "--force" in refusal("backup", file, *at)
    assert run("backup", file, *at, "--force") == 0
    assert "would be replaced" in refusal("restore", file, *at)
    assert run("restore", file, *at, "--force") == 0
    assert "no database" in refusal("backup", tmp_path / "c", "--store", "sqlite:///absent.db")
    assert "memory" in refusal("backup", tmp_path / "c", "--store", "memory")
    assert "cannot become" in refusal("restore", file, "--store", "memory")
    assert "No such file" in refusal("backup", tmp_path / "no" / "folder", *at)
    assert "cannot be read" in refusal("restore", tmp_path / "absent", *at)
    # Damage anywhere in the database is noticed before anything is written.
    body = bytearray(file.read_bytes())
    body[body.index(b"SQLite format 3") + 5_000] ^= 1
    (tmp_path / "damaged").write_bytes(body)
    new = tmp_path / "new.db"
    assert "checksum" in refusal("restore", tmp_path / "damaged", "--store", f"sqlite:///{new}")
    (tmp_path / "noise").write_bytes(b"noise" * 1_000)
    assert "not a backup" in refusal("restore", tmp_path / "noise", "--store", f"sqlite:///{new}")
    assert not new.exists()
    # Without its seal keys no API key of the store would be valid.
    (tmp_path / "one.db.seals").rename(tmp_path / "elsewhere.seals")
    assert "seal keys are missing" in refusal("backup", tmp_path / "d", *at)
    assert "missing" in refusal("keys", "create", "--name", "x", *at)
    assert not (tmp_path / "one.db.seals").exists(), "a refused command writes no new seal keys"
    keys = ("--seal-keys", tmp_path / "elsewhere.seals")
    assert run("backup", tmp_path / "d", *at, *keys) == 0


def test_transfer_that_fails_keeps_the_seal_keys_that_were_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are all that opens what the database holds."""
    store, file = asyncio.run(make_store(tmp_path)), tmp_path / "b"
    assert run("backup", file, "--store", store) == 0
    seals = tmp_path / "own.seals"
    seals.write_bytes(b"the seal keys of this database")
    away = ("--store", "postgresql://127.0.0.1:1/absent", "--seal-keys", seals)
    assert run("restore", file, *away, "--force") == 2
    assert "store" in capsys.readouterr().err
    assert seals.read_bytes() == b"the seal keys of this database"


SHM = Path("/dev/shm")


@pytest.mark.skipif(
    not SHM.is_dir() or SHM.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev,
    reason="there is one disk",
)
def test_seal_keys_are_restored_onto_another_disk(tmp_path: Path) -> None:
    store, file = asyncio.run(make_store(tmp_path)), tmp_path / "b"
    assert run("backup", file, "--store", store) == 0
    new = f"sqlite:///{tmp_path / 'new.db'}"
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        seals = Path(folder, "own.seals")
        assert run("restore", file, "--store", new, "--seal-keys", seals) == 0
        assert seals.read_bytes() == (tmp_path / "one.db.seals").read_bytes()
        assert stat.S_IMODE(seals.stat().st_mode) == 0o600
        assert [path.name for path in Path(folder).iterdir()] == ["own.seals"]


def test_unreadable_turn_is_reported_and_the_rest_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = asyncio.run(make_store(tmp_path))
    with sqlite3.connect(tmp_path / "one.db") as database:
        database.execute("UPDATE turns SET history = x'00'")
    database.close()
    assert run("backup", tmp_path / "b", "--store", store) == 1
    assert "1 responses cannot be read" in capsys.readouterr().out
    assert tarfile.is_tarfile(tmp_path / "b")


async def test_postgresql_is_backed_up_with_the_printed_commands(
    postgres: PostgresServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands are run as printed, the second into another database."""
    url, other = await postgres.make_database(), await postgres.make_database()
    async with serving(store=url) as served:
        done = await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "x"})
    assert run("backup", tmp_path / "b", "--store", url) == 2, "nothing was written"
    dump, load = (line.strip() for line in capsys.readouterr().out.splitlines() if "  pg_" in line)
    path = {"PATH": f"{postgres.programs / 'bin'}:{os.environ['PATH']}"}
    for command in (dump, load.replace(url, other)):
        await asyncio.to_thread(
            subprocess.run, command, shell=True, check=True, cwd=tmp_path, env=os.environ | path
        )
    async with serving(store=other) as served:
        body = {"model": MODEL, "input": "on", "previous_response_id": done.json["id"]}
        assert (await fetch(served, "POST", "/v1/responses", body)).status == 200
    for one in (url, other):
        await postgres.drop_database(one)


async def test_uploaded_files_are_in_the_backup_and_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, file = f"sqlite:///{tmp_path / 'live.db'}", tmp_path / "segue.backup"
    async with serving(store=store) as served:
        kept, deleted = [await upload(served, name.encode() * 100, name) for name in ("a", "b")]
        await fetch(served, "DELETE", f"/v1/files/{deleted['id']}")
        assert await asyncio.to_thread(run, "backup", file, "--store", store) == 0
    assert "files: 1" in capsys.readouterr().out
    with tarfile.open(file) as archive:
        assert [name for name in archive.getnames() if "file-" in name] == [f"files/{kept['id']}"]
    moved = f"sqlite:///{tmp_path / 'moved' / 'segue.db'}"
    assert run("restore", file, "--store", moved) == 0
    async with serving(store=moved) as served:
        content = await fetch(served, "GET", f"/v1/files/{kept['id']}/content")
        assert content.body == b"a" * 100
        assert len((await fetch(served, "GET", "/v1/files")).json["data"]) == 1


async def test_backup_refuses_a_store_whose_uploaded_file_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = f"sqlite:///{tmp_path / 'live.db'}"
    async with serving(store=store) as served:
        await upload(served)
    (left,) = (tmp_path / "live.db.files").glob("??/*")
    left.unlink()
    assert run("backup", tmp_path / "segue.backup", "--store", store) == 2
    assert (
        "1 uploaded files were deleted while it was made, or are missing" in capsys.readouterr().err
    )
    assert not (tmp_path / "segue.backup").exists()
