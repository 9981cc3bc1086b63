"""What was not to be stored is nowhere, and secrets are nowhere at all: not in files, logs, metrics or tracebacks."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from segue.accounts.hashes import issue_key
from segue_cli.cli import main
from tests.canaries import WORD, find_traces, leave_traces, read_metrics
from tests.support import MODEL, fetch, metric, served_process, serving, wire

TURNS = 100


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
    with served_process(*flags, cwd=tmp_path, environment=temporary) as served:
        await leave_traces(served, secret, TURNS)
        metrics = await read_metrics(served, secret)
        assert find_traces(tmp_path, served.printed, metrics, secret) == []
        assert served.stop() == 0
        assert find_traces(tmp_path, served.printed, metrics, secret) == []


async def test_a_trace_would_be_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same search finds a turn that was to be stored; compressed or not, it is in the file."""
    store = f"sqlite:///{tmp_path}/s.db"
    secret = await make_key(store, capsys)
    headers = {"Authorization": f"Bearer {secret}"}
    with served_process("--store", store, cwd=tmp_path) as served:
        body = {"model": MODEL, "input": WORD}
        assert (await fetch(served, "POST", "/v1/responses", body, headers)).status == 200
        metrics = await read_metrics(served, secret)
        assert find_traces(tmp_path, served.printed, metrics, secret)


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
