"""What was not to be stored is nowhere, and secrets are nowhere at all: not in files, logs, metrics or tracebacks."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segue.accounts.hashes import issue_key
from segue_cli.cli import main
from tests.bundles.bad import FRONT
from tests.canaries import FALSE_KEY, WORD, find_traces, leave_traces, read_metrics
from tests.engines.hostile import HEAD, event, raw_server, whole_response
from tests.escapes.conftest import sandboxes_can_be_made
from tests.keepers import OWN
from tests.scenarios.test_files_api import upload
from tests.scenarios.test_shell import inline, run, shell_with
from tests.scenarios.test_tools import scripted
from tests.support import MODEL, fetch, metric, served_process, serving, wire

__all__ = ["sandboxes_can_be_made"]

TURNS = 100
SHORT: dict[str, Any] = {"text": "Done."}


async def make_key(store: str, capsys: pytest.CaptureFixture[str]) -> str:
    words = ["--name", "c", "--store", store, "--scopes", "responses,models,metrics"]
    assert await asyncio.to_thread(main, ["keys", "create", *words]) == 0
    return capsys.readouterr().out.strip()


async def test_unstored_turns_and_keys_leave_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = f"sqlite:///{tmp_path}/s.db"
    secret = await make_key(store, capsys)
    # What it writes for a moment would be looked through as well.
    flags, temporary = ("--store", store, "--log-level", "debug"), {"TMPDIR": str(tmp_path)}
    logs = ("--access-log", str(tmp_path / "access"), "--audit-log", str(tmp_path / "audit"))
    with served_process(*flags, *logs, cwd=tmp_path, environment=temporary) as served:
        await leave_traces(served, secret, TURNS)
        metrics = await read_metrics(served, secret)
        assert find_traces(tmp_path, served.printed, metrics, secret) == []
        words = ["backup", str(tmp_path / "backup"), "--store", store]
        assert await asyncio.to_thread(main, words) == 0
        assert served.stop() == 0
        assert find_traces(tmp_path, served.printed, metrics, secret) == []
    assert (tmp_path / "access").stat().st_size > 10_000
    assert (tmp_path / "audit").stat().st_size > 10_000


async def test_process_that_dies_leaves_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its write-ahead log, what was queued, and whatever else it had open."""
    store = f"sqlite:///{tmp_path}/s.db"
    secret = await make_key(store, capsys)
    flags, temporary = ("--store", store, "--log-level", "debug"), {"TMPDIR": str(tmp_path)}
    with served_process(*flags, cwd=tmp_path, environment=temporary) as served:
        await leave_traces(served, secret, 20)
        served.process.kill()
        served.process.wait()
        assert find_traces(tmp_path, served.printed, b"", secret) == []


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Sandboxes are another user's, who may not enter the usual folder of a test."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


async def test_files_skills_and_containers_of_unstored_turns_leave_no_trace(
    tmp_path: Path,
    open_folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What such turns were given inline, and what they named that has been deleted since."""
    caplog.set_level(logging.DEBUG)
    kept = open_folder
    monkeypatch.setattr(tempfile, "tempdir", str(kept))
    writes = run(f"echo {WORD} | tee /mnt/data/{WORD}.txt", "cat /home/user/skills/*/SKILL.md")
    flags = {"store": f"sqlite:///{kept}/s.db", "files_dir": str(kept / "files"), **OWN}
    text = f"Read {WORD}."
    data = "data:text/plain;base64," + b64encode(text.encode()).decode()
    async with scripted(tmp_path, writes, SHORT, **flags) as served:
        made = await upload(served, text.encode())
        files = [{"filename": "a.txt", "file_data": data}, {"file_id": made["id"]}]
        parts = [{"type": "input_file", **one} for one in files]
        tool = shell_with(inline(words=FRONT.decode() + text))
        asked = {"model": MODEL, "input": [{"role": "user", "content": parts}], "tools": [tool]}
        answer = await fetch(served, "POST", "/v1/responses", {**asked, "store": False})
        assert f"Sums of CSV files.\\n---\\n{text}" in answer.body.decode(), answer.body
        # Until then the file has it, and nothing else: what a container has on its disk is not to be seen from here.
        (found,) = find_traces(kept, [caplog.text], b"", "sk-segue-none")
        assert found.startswith(f"{kept}/files/")
        listed = await fetch(served, "GET", "/v1/containers")
        for one in listed.json["data"]:
            await fetch(served, "DELETE", f"/v1/containers/{one['id']}")
        await fetch(served, "DELETE", f"/v1/files/{made['id']}")
        assert find_traces(kept, [caplog.text], b"", "sk-segue-none") == []
    assert find_traces(kept, [caplog.text], b"", "sk-segue-none") == []


async def test_words_of_an_engine_leave_no_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An endpoint that repeats the prompt in each of its errors, and in answers that cannot be read."""
    caplog.set_level(logging.DEBUG)
    flags = {"engine": "chat", "model": ["m"], "store": f"sqlite:///{tmp_path}/s.db"}
    quoted = json.dumps({"error": {"message": WORD, "type": WORD * 3, "code": WORD}}).encode()
    odd = [
        *(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(quoted), quoted)
          for status in (400, 401, 404, 422, 429, 500, 503)),
        whole_response(b"data: " + quoted + b"\n\n", 0),
        whole_response(f"data: {WORD}\n\n".encode(), 7),
        whole_response(event({"choices": [{"delta": {"content": WORD}, "finish_reason": 5}]}), 0),
        HEAD + f"{WORD}\r\n\r\n".encode(),
        f"HTTP/1.1 {WORD}\r\n".encode(),
    ]  # fmt: skip
    for said in odd:
        async with (
            raw_server([said]) as engine,
            serving(engine_url=[engine.url], **flags) as served,
        ):
            body = {"model": "m", "input": WORD, "store": False}
            answer = await fetch(served, "POST", "/v1/responses", body)
            assert answer.status >= 400
            assert engine.jobs
    assert find_traces(tmp_path, [caplog.text], b"", "sk-segue-none") == []


async def test_a_trace_would_be_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same search finds a turn that was to be stored; compressed or not, it is in the file."""
    store = f"sqlite:///{tmp_path}/s.db"
    secret = await make_key(store, capsys)
    headers = {"Authorization": f"Bearer {secret}"}
    with served_process("--store", store, cwd=tmp_path) as served:
        body = {"model": MODEL, "input": WORD}
        assert (await fetch(served, "POST", "/v1/responses", body, headers)).status == 200
        metrics = await read_metrics(served, secret)
        words = ["backup", str(tmp_path / "backup"), "--store", store]
        assert await asyncio.to_thread(main, words) == 0
        found = find_traces(tmp_path, served.printed, metrics, secret)
        assert {Path(name).name for name in found} >= {"backup", "s.db-wal"}


@pytest.mark.parametrize("word", [WORD, FALSE_KEY, "sk-segue-own"])
@pytest.mark.parametrize(
    "place", ["log", "metrics", "s.db", "s.db-wal", "access", "audit", "tmp/x"]
)
def test_word_is_found_wherever_it_is_planted(tmp_path: Path, place: str, word: str) -> None:
    (tmp_path / "tmp").mkdir()
    for name in ("s.db", "s.db-wal", "access", "audit", "tmp/x"):
        said = f"- request GET /{word} 404 {word if name == place else ''}\n"
        (tmp_path / name).write_text(said if name in (place, "access") else "")
    log, metrics = (word if place == name else "" for name in ("log", "metrics"))
    (found,) = find_traces(tmp_path, ["a", log], metrics.encode(), "sk-segue-own")
    assert found.endswith(place)


async def test_unexpected_faults_are_logged_without_key_and_content(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def break_down(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    caplog.set_level(logging.DEBUG)
    async with serving(auth="keys") as served:
        app = served.app
        key, secret = await issue_key(app.state.store.keys, app.state.hashes, "test", "ada")
        headers = {"Authorization": f"Bearer {secret}"}
        monkeypatch.setattr("segue.process.runner.prepare", break_down)
        body = {"model": MODEL, "input": WORD, "store": False}
        answer = await fetch(served, "POST", "/v1/responses", body, headers)
        assert answer.status == 500
        async with wire(served, additional_headers=headers) as socket:
            assert (await socket.turn(input=WORD, store=False))["error"]["code"] == "server_error"
    # The client in this process logs what it sends; that is its own affair.
    logged = [one for one in caplog.records if not one.name.startswith("websockets.client")]
    text = "\n".join(map(logging.Formatter().format, logged))
    assert "broken" in text
    assert secret not in text
    assert WORD not in text
    assert secret not in json.dumps(answer.json)
    assert key.id not in answer.body.decode()


async def test_limits_are_among_the_metrics() -> None:
    async with serving(connections_max=77) as served:
        assert await metric(served, 'segue_limit{setting="connections_max"}') == 77
