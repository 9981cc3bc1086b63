"""The access log and the request id: every request on every transport leaves its lines, and not a word of content."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import websockets

from segue.accounts.hashes import issue_key
from segue.errors import Misconfigured
from segue.exports.access import text_of
from segue.listener.access_line import AccessLine
from segue.observe.logs import LogFormat, make_formatter
from segue.settings.checks import load_settings
from tests.engines.fakes.chat import FakeChat, delta, end, usage
from tests.support import Served, fetch, serving, until, wire

CANARY = "canary-content"
ASK: dict[str, Any] = {"model": "gpt", "input": CANARY, "store": False}


@contextmanager
def logged(log_format: LogFormat, log_level: int = logging.DEBUG) -> Iterator[io.StringIO]:
    """What our loggers write, as the operator sees it."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(make_formatter(log_format))
    root = logging.getLogger("segue")
    level = root.level
    root.addHandler(handler)
    root.setLevel(log_level)
    try:
        yield written
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


@asynccontextmanager
async def keyed(fake: FakeChat, **flags: object) -> AsyncIterator[tuple[Served, dict[str, str]]]:
    """A server with keys in front of a FAKE endpoint, and the header of a key that is called `laptop one`."""
    flags = {"engine": "chat", "engine_url": [fake.url], "model": ["gpt"], "auth": "keys"} | flags
    async with serving(**flags) as served:
        app = served.app
        _, secret = await issue_key(app.state.store.keys, app.state.hashes, "laptop one", "ada")
        yield served, {"Authorization": f"Bearer {secret}"}


def fake_chat() -> FakeChat:
    return FakeChat(events=[delta(content=CANARY), end(), usage(5, 1)])


async def test_every_request_on_every_transport_is_one_line_and_can_be_found_by_its_id(
    tmp_path: Path,
) -> None:
    file = tmp_path / "access.jsonl"
    with logged("json") as written:
        async with (
            fake_chat() as fake,
            keyed(fake, access_log=str(file), audit_log="log", log_format="json") as (
                served,
                headers,
            ),
        ):
            async with wire(served, additional_headers=headers) as socket:
                await socket.turn(**ASK)
                fake.refuses = (500, "boom inside")
                failed = await socket.turn(**ASK)
                assert failed["type"] == "response.failed"
                fake.refuses = None
                await socket.turn(**ASK, previous_response_id="resp_none")
                await socket.send(f'{{"{CANARY}')
                await socket.next()
                upgraded = socket.socket.response
                assert upgraded is not None
                connection = upgraded.headers["x-request-id"]
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with wire(served):
                    pass
            stream = await fetch(served, "POST", "/v1/responses", {**ASK, "stream": True}, headers)
            proxied = {**headers, "X-Forwarded-For": "203.0.113.7"}
            plain = await fetch(served, "POST", "/v1/responses", ASK, proxied)
            bad = await fetch(served, "POST", "/v1/responses", {"input": {CANARY: 1}}, headers)
            secret_path = f"/v1/nowhere/{headers['Authorization'].split()[1]}?q={CANARY}"
            lost = await fetch(served, "GET", secret_path, headers=headers)
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    told = [(one["event"], one["method"], one["status"], one.get("reason")) for one in lines]
    assert told == [
        ("open", "GET", 101, None),
        ("turn", "response.create", 200, None),
        ("turn", "response.create", 502, "server_error"),
        ("turn", "response.create", 400, "previous_response_not_found"),
        ("turn", "response.create", 400, "invalid_json"),
        ("close", "GET", 1000, None),
        ("request", "GET", 401, "invalid_api_key"),
        ("request", "POST", 200, None),
        ("request", "POST", 200, None),
        ("request", "POST", 400, bad.json["error"]["code"]),
        ("request", "GET", 404, "unknown_url"),
    ]
    ids = [one["request_id"] for one in lines]
    numbered = [f"{connection}.{number}" for number in (1, 2, 3)]
    assert ids[:6] == [connection, *numbered, connection, connection]
    assert ids[6] == refused.value.response.headers["x-request-id"]
    assert ids[7:] == [one.headers["x-request-id"] for one in (stream, plain, bad, lost)]
    assert all(one["address"] == "127.0.0.1" for one in lines)
    assert {(one.get("owner"), one.get("key")) for one in lines[:6]} == {("ada", "laptop one")}
    assert lines[8]["forwarded_for"] == "203.0.113.7"
    assert lines[8]["sent_bytes"] == len(plain.body)
    assert lines[8]["response_id"] == plain.json["id"]
    assert lines[7]["response_id"] == stream.events[0]["response"]["id"]
    assert lines[5]["turns"] == 2
    assert lines[10]["path"] == "/v1/nowhere/sk-segue-…"
    # The same ids stand in the audit log and in the engine's warnings.
    others = [json.loads(line) for line in written.getvalue().splitlines()]
    audited = [one["request_id"] for one in others if one["logger"] == "segue.audit"]
    assert set(audited) == set(ids)
    answered, failed = [one for one in others if one["level"] == "warning"]
    assert answered["request_id"] == failed["request_id"] == numbered[1]
    assert "status 500" in answered["message"]
    refusals = [one for one in others if "refused" in one.get("message", "")]
    assert {one["request_id"] for one in refusals} == {*ids[3:5], ids[6], *ids[9:]}
    assert CANARY not in text + written.getvalue()


async def test_client_that_leaves_has_a_line_too(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    with logged("text") as written:
        async with serving(access_log=str(file), tps=1) as served:
            async with wire(served) as socket:
                await socket.create(input="Hello", store=False)
                assert (await socket.next())["type"] == "response.created"
            await until(lambda: not served.app.runner.running_count)
    lines = file.read_text().splitlines()
    assert written.getvalue() == ""
    patterns = (
        r"\S+ \S+ INFO segue\.access \[(req_\w+)\] 127\.0\.0\.1 open GET /v1/responses 101 "
        r"0 bytes 0\.\d+ s owner=local",
        r"\S+ \S+ INFO segue\.access \[(req_\w+)\.1\] 127\.0\.0\.1 turn response\.create /v1/responses "
        r"499 \d+ bytes \d+\.\d+ s owner=local response_id=resp_\w+ reason=client_left",
        r"\S+ \S+ INFO segue\.access \[(req_\w+)\] 127\.0\.0\.1 close GET /v1/responses 1000 "
        r"0 bytes \d+\.\d+ s owner=local",
    )
    matches = [re.fullmatch(pattern, line) for pattern, line in zip(patterns, lines, strict=True)]
    assert all(matches), lines
    assert len({match[1] for match in matches if match}) == 1


async def test_lines_go_to_the_servers_log_whatever_its_level_is() -> None:
    with logged("text", logging.ERROR) as written:
        async with serving(access_log="log") as served:
            await fetch(served, "GET", "/health")
    assert re.search(r" 127\.0\.0\.1 request GET /health 200 15 bytes", written.getvalue())


def test_values_that_are_not_one_plain_word_are_quoted() -> None:
    line = AccessLine("request", "req_1", "GET", "/", 200, 0.0126, key='a "b"\nc=d', turns=2)
    text = text_of(line)
    assert text == r'- request GET / 200 0 bytes 0.013 s key="a \"b\"\nc=d" turns=2'


async def test_file_that_cannot_be_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="access_log"):
        async with serving(access_log=str(tmp_path / "none" / "access.log")):
            pass


def test_off_is_not_the_name_of_a_file() -> None:
    settings = load_settings({"access_log": "off", "audit_log": "off"}, {})
    assert (settings.access_log, settings.audit_log) == ("", "")
