"""Background responses that wait for an engine outlive their process: each is run once, by the next one."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from segue.accounts.hashes import issue_key
from segue.limits import KeyLimits
from segue.seams.history import Turn
from segue.settings.checks import load_settings
from segue.turn.loop import TurnLoop
from segue_cli.commands.keys import revoke_key
from tests.engines.fakes.chat import FakeChat, delta, end, usage
from tests.events import check_turn
from tests.mcp_server import remote
from tests.scenarios.test_tools import stored_bytes
from tests.support import (
    WAIT_S,
    WEATHER,
    Answer,
    Served,
    ServedProcess,
    fetch,
    served_process,
    serving,
    until,
)

pytestmark = pytest.mark.timeout(60)

# What must be the same when another process runs it.
ASKED: dict[str, Any] = {
    "model": "gpt",
    "input": [{"role": "user", "content": "What is the weather?"}],
    "instructions": "Be brief.",
    "tools": [WEATHER],
    "tool_choice": "auto",
    "max_output_tokens": 77,
    "temperature": 0.3,
    "stop": ["END"],
    "metadata": {"a": "b"},
    "background": True,
}


@pytest.fixture
async def fake() -> AsyncIterator[FakeChat]:
    """An engine that takes one job and holds it."""
    async with FakeChat(events=[delta(content="Sunny."), end(), usage(9, 1)], hold_at=0) as fake:
        assert isinstance(fake, FakeChat)
        yield fake


def settings(fake: FakeChat, folder: Path) -> dict[str, Any]:
    store = f"sqlite:///{folder / 'turns.db'}"
    named = {"engine": "chat", "model": ["gpt"], "engine_url": [fake.url], "engine_parallel": 1}
    return {**named, "store": store}


@asynccontextmanager
async def stopped(fake: FakeChat, folder: Path) -> AsyncIterator[Served]:
    """A server that is asked to stop at the end."""
    async with serving(**settings(fake, folder)) as served:
        yield served


@asynccontextmanager
async def killed(fake: FakeChat, folder: Path) -> AsyncIterator[ServedProcess]:
    """A server that is killed at the end."""
    words = [
        (f"--{name.replace('_', '-')}", str(value[0] if isinstance(value, list) else value))
        for name, value in settings(fake, folder).items()
    ]
    with served_process(*(word for pair in words for word in pair), cwd=folder) as served:
        yield served
        served.process.kill()
        await asyncio.to_thread(served.process.wait, WAIT_S)


async def post(
    served: Served | ServedProcess, headers: dict[str, str] | None = None, **fields: Any
) -> Answer:
    return await fetch(served, "POST", "/v1/responses", ASKED | fields, headers)


async def get(served: Served | ServedProcess, turn_id: str, **headers: str) -> dict[str, Any]:
    found: dict[str, Any] = (
        await fetch(served, "GET", f"/v1/responses/{turn_id}", headers=headers)
    ).json
    return found


async def ended(served: Served | ServedProcess, turn_id: str, **headers: str) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        while True:
            found = await get(served, turn_id, **headers)
            if found["status"] not in ("queued", "in_progress"):
                return found


async def follow_until_cut(served: Served | ServedProcess, is_followed: asyncio.Event) -> bytes:
    """A stream of a queued response, read until its server goes."""
    body = json.dumps(ASKED | {"stream": True}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    data = b""
    try:
        writer.write(head.encode() + body)
        while part := await reader.read(65536):
            data += part
            if b"event: response.queued" in data:
                is_followed.set()
    except ConnectionError:
        pass
    finally:
        writer.close()
    return data


@pytest.mark.parametrize("first", [stopped, killed])
async def test_queued_responses_are_run_by_the_next_process(
    tmp_path: Path, fake: FakeChat, first: Any
) -> None:
    keyed = {"Idempotency-Key": "once"}
    async with first(fake, tmp_path) as served:
        begun = (await post(served)).json["id"]
        async with asyncio.timeout(WAIT_S):
            await fake.held.wait()
        queued = (await post(served, keyed)).json
        is_followed = asyncio.Event()
        following = asyncio.create_task(follow_until_cut(served, is_followed))
        async with asyncio.timeout(WAIT_S):
            await is_followed.wait()
        assert (await get(served, begun))["status"] == "in_progress"
        assert (await get(served, queued["id"]))["status"] == "queued"
    heard = await following
    assert b"[DONE]" not in heard
    events = [json.loads(line[6:]) for line in heard.split(b"\n") if line.startswith(b"data: ")]
    followed = events[0]["response"]["id"]
    fake.gate.set()
    async with serving(**settings(fake, tmp_path)) as served:
        for turn_id in (queued["id"], followed):
            response = await ended(served, turn_id)
            assert response["status"] == "completed"
            assert response["output"][0]["content"][0]["text"] == "Sunny."
        assert (await get(served, queued["id"]))["created_at"] == queued["created_at"]
        assert (await ended(served, begun))["status"] == "failed"
        # A repeat finds the response of its key.
        assert (await post(served, keyed)).json["id"] == queued["id"]
        after = events[-1]["sequence_number"]
        path = f"/v1/responses/{followed}?stream=true&starting_after="
        rest = (await fetch(served, "GET", f"{path}{after}")).events
        whole = (await fetch(served, "GET", f"{path}-1")).events
        assert check_turn(whole)["status"] == "completed"
        # A process that is killed may have sent what is not in the log yet.
        assert first is killed or events + rest == whole
        assert [one["sequence_number"] for one in rest] == list(
            range(after + 1, after + 1 + len(rest))
        )
    # What had begun was not run again, and the others were asked for in the same words.
    asked = [body for body in fake.requests if body.get("messages")]
    assert len(asked) == 3
    assert asked[1] == asked[0]
    with closing(sqlite3.connect(tmp_path / "turns.db")) as database:
        rows = database.execute("SELECT turn_id, status, output_tokens FROM usage").fetchall()
    assert sorted(rows) == sorted(
        [(begun, "failed", 0), (queued["id"], "completed", 1), (followed, "completed", 1)]
    )


async def test_queued_responses_count_for_their_keys_and_keep_their_conversations(
    tmp_path: Path, fake: FakeChat
) -> None:
    """In the next process: one whose key was revoked fails, another has a place of its key, and its conversation is
    locked until it has ended."""
    flags = settings(fake, tmp_path) | {"auth": "keys"}
    async with serving(**flags) as served:
        app = served.app
        limited = await issue_key(
            app.state.store.keys, app.state.hashes, "one", "ada", limits=KeyLimits(lanes_max=2)
        )
        revoked = await issue_key(app.state.store.keys, app.state.hashes, "gone", "bob")
        ada, bob = ({"Authorization": f"Bearer {secret}"} for _, secret in (limited, revoked))
        talk = (await fetch(served, "POST", "/v1/conversations", {}, ada)).json["id"]
        await post(served, ada)
        async with asyncio.timeout(WAIT_S):
            await fake.held.wait()
        queued = (await post(served, ada, conversation=talk)).json["id"]
        assert (await post(served, ada)).status == 429
        orphan = (await post(served, bob)).json["id"]
    # Before the next process can take it over.
    assert await revoke_key(load_settings(flags, environment={}), revoked[0].id)
    async with serving(**flags) as served:
        app = served.app
        await until(lambda: app.runner.registry.find("ada", queued) is not None)
        locked = await post(served, ada, conversation=talk, background=False)
        assert (locked.status, locked.json["error"]["code"]) == (409, "conversation_locked")
        beside = (await post(served, ada)).json["id"]
        assert (await post(served, ada)).status == 429
        fake.gate.set()
        assert (await ended(served, beside, **ada))["status"] == "completed"
        assert (await ended(served, queued, **ada))["status"] == "completed"
        items = (await fetch(served, "GET", f"/v1/conversations/{talk}/items", headers=ada)).json
        assert [one["role"] for one in items["data"]] == ["assistant", "user"]
        after = await post(served, ada, conversation=talk, background=False)
        assert (after.status, after.json["status"]) == (200, "completed")
        async with asyncio.timeout(WAIT_S):
            while (await read(served, orphan)).response.status != "failed":
                # The server has to go on meanwhile.
                await fetch(served, "GET", "/health")
        found = await read(served, orphan)
        assert found.response.error is not None
        assert found.response.error.code == "invalid_api_key"
        assert found.request == b""


async def read(served: Served, turn_id: str) -> Turn:
    found = await served.app.state.store.turns.read("bob", turn_id)
    assert found is not None
    return found


# --- secrets of the client ------------------------------------------------------------------------

TOKEN, HEADER = "canary-token-1c9f", "canary-header-5e2d"
SEEN = "canary-input-88aa"


class KeptIn(NamedTuple):
    """A store, and how all bytes are read that it has written."""

    url: str
    written: Callable[[], Awaitable[bytes]]


@pytest.fixture(params=["sqlite", "postgres"])
async def kept_in(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[KeptIn]:
    if request.param == "sqlite":

        async def read_files() -> bytes:
            return stored_bytes(tmp_path)

        yield KeptIn(f"sqlite:///{tmp_path / 'turns.db'}", read_files)
        return
    server = request.getfixturevalue("postgres")
    url = await server.make_database()

    async def read_heap_and_wal() -> bytes:
        """What the server still holds in memory is written first."""
        await server.ask("CHECKPOINT", url)
        (row,) = await server.ask(
            "SELECT oid FROM pg_database WHERE datname = current_database()", url
        )
        data = server.folder / "data"
        paths = [*(data / "base" / str(row["oid"])).iterdir(), *(data / "pg_wal").iterdir()]
        return b"".join(path.read_bytes() for path in paths if path.is_file())

    yield KeptIn(url, read_heap_and_wal)
    await server.drop_database(url)


async def test_secrets_of_a_queued_response_are_in_no_file_and_the_next_process_has_them(
    kept_in: KeptIn, tmp_path: Path, fake: FakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.gate.set()
    async with remote() as far:
        tool = {
            "type": "mcp",
            "server_label": "own",
            "server_url": far.url,
            "authorization": TOKEN,
            "headers": {"X-Key": HEADER},
        }
        added = {"type": "additional_tools", "role": "developer", "tools": [tool]}
        said = {"role": "user", "content": SEEN}
        flags = settings(fake, tmp_path) | {
            "store": kept_in.url,
            "mcp_hosts": [far.url.split("/")[2]],
        }
        async with serving(**flags) as served:
            # A turn with such tools leaves the queue as soon as it runs: this process does not come so far.
            monkeypatch.setattr(TurnLoop, "run", lambda loop: asyncio.Event().wait())
            asked: tuple[dict[str, Any], ...] = (
                {"input": [said], "tools": [tool]},
                {"input": [added, said]},
            )
            queued = [(await post(served, **fields)).json["id"] for fields in asked]
            # Its own words are there, so secrets would be found too.
            assert SEEN.encode() in await kept_in.written()
            assert_no_secret(await kept_in.written())
        assert_no_secret(await kept_in.written())
        monkeypatch.undo()
        async with serving(**flags) as served:
            for turn_id in queued:
                assert (await ended(served, turn_id))["status"] == "completed"
        assert {one.get("authorization") for one in far.headers} == {f"Bearer {TOKEN}"}
        assert {one.get("x-key") for one in far.headers} == {HEADER}
        assert_no_secret(await kept_in.written())


def assert_no_secret(written: bytes) -> None:
    assert not any(word.encode() in written for word in (TOKEN, HEADER))


async def test_queued_response_that_the_next_process_cannot_read_ends_as_failed(
    tmp_path: Path, fake: FakeChat
) -> None:
    async with serving(**settings(fake, tmp_path)) as served:
        await post(served)
        async with asyncio.timeout(WAIT_S):
            await fake.held.wait()
        queued = (await post(served)).json["id"]
    (tmp_path / "turns.db.seals").unlink()
    fake.gate.set()
    async with serving(**settings(fake, tmp_path)) as served:
        response = await ended(served, queued)
    assert response["status"] == "failed"
    assert "other seal keys" in response["error"]["message"]
