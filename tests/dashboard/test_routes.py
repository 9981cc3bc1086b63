"""The page, its parts and its stream, as any HTTP client gets them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from segue.accounts.hashes import issue_key
from segue.listener.auth import KEY_PROTOCOL, PROTOCOL
from segue_dashboard.routes import policy, read_assets
from tests.support import MODEL, WAIT_S, Served, fetch, serving, wire

HTML = {"Accept": "text/html,application/xhtml+xml"}


@asynccontextmanager
async def feed(served: Served, secret: str = "") -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The stream's messages, until we leave."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    key = f"Authorization: Bearer {secret}\r\n" if secret else ""
    head = f"GET /dashboard/feed HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{key}\r\n"
    writer.write(head.encode())

    async def messages() -> AsyncIterator[dict[str, Any]]:
        async with asyncio.timeout(WAIT_S):
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

    try:
        yield messages()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_browser_gets_a_page_and_curl_gets_a_line() -> None:
    async with serving() as served:
        page = await fetch(served, "GET", "/", headers=HTML)
        line = await fetch(served, "GET", "/", headers={"Accept": "*/*"})

    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert b"<title>Segue</title>" in page.body
    assert line.headers["content-type"] == "text/plain; charset=utf-8"
    assert line.body.decode().count("\n") == 1
    assert page.headers["vary"] == line.headers["vary"] == "accept"


async def test_page_may_load_nothing_from_elsewhere_and_runs_nothing_inline() -> None:
    async with serving() as served:
        page = await fetch(served, "GET", "/", headers=HTML)

    rules = dict(
        one.strip().split(" ", 1) for one in page.headers["content-security-policy"].split(";")
    )
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    assert "unsafe" not in page.headers["content-security-policy"]


def test_policy_does_not_repeat_a_strange_host() -> None:
    assert "ws://example.com:8080 " in policy("example.com:8080")
    assert "ws://[::1]:8080 " in policy("[::1]:8080")
    assert "evil" not in policy("a; script-src evil")
    assert "connect-src 'self';" in policy("")


def test_no_part_of_the_page_names_another_server() -> None:
    for name, asset in read_assets().items():
        found = set(re.findall(rb"(?:https?|wss?)://[^\s\"'`)]+", asset.body))
        assert found <= {b"http://www.w3.org/2000/svg"}, name


async def test_every_part_of_the_page_is_served_and_cached_by_its_tag() -> None:
    async with serving() as served:
        page = (await fetch(served, "GET", "/", headers=HTML)).body.decode()
        named = set(re.findall(r'"/dashboard/([a-z]+\.[a-z]+)"', page))
        for name in sorted(named | set(read_assets()) - {"index.html", "docs.html"}):
            answer = await fetch(served, "GET", f"/dashboard/{name}")
            again = await fetch(
                served,
                "GET",
                f"/dashboard/{name}",
                headers={"If-None-Match": answer.headers["etag"]},
            )
            assert answer.status == 200, name
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "feed.py", "index.html"])
async def test_what_is_not_a_part_of_the_page_is_not_found(name: str) -> None:
    async with serving() as served:
        answer = await fetch(served, "GET", f"/dashboard/{name}")

    assert answer.status == 404
    assert answer.json["error"]["code"] == "unknown_url"


async def test_feed_says_who_it_is_and_tells_turns_as_they_end() -> None:
    async with serving() as served, feed(served) as messages, wire(served) as socket:
        hello = await anext(messages)
        assert hello["type"] == "hello"
        assert hello["models"] == [MODEL]
        first = (await socket.turn(input="one"))["response"]["id"]
        second = (await socket.turn(input="two", previous_response_id=first))["response"]["id"]
        found: dict[str, Any] = {}
        async for message in messages:
            found |= {turn["id"]: turn for turn in message["turns"]}
            if second in found and message["picture"]["connections"]["rows"]:
                break

    turn = found[second]
    assert (turn["parent"], turn["transport"], turn["status"]) == (first, "websocket", "completed")
    assert turn["reused"] > 0
    assert turn["connection"] == message["picture"]["connections"]["rows"][0]["id"]
    known = [at for at in turn["marks"] if at is not None]
    assert len(known) == len(hello["marks"])
    assert known == sorted(known), "stages follow each other"


async def test_feed_counts_what_was_refused() -> None:
    async with serving() as served, feed(served) as messages:
        await fetch(served, "POST", "/v1/responses", {"model": "nobody", "input": "x"})
        async for message in messages:
            refusals = (message.get("picture") or {}).get("refusals")
            if refusals:
                break

    assert [(one["transport"], one["count"]) for one in refusals] == [("http", 1)]


async def test_feed_carries_no_content() -> None:
    async with serving() as served, feed(served) as messages:
        await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "a secret word"})
        async for message in messages:
            assert "secret" not in json.dumps(message)
            if message.get("turns"):
                break


async def test_feed_ends_when_the_server_stops_and_is_not_begun_then() -> None:
    async with serving() as served, feed(served) as messages:
        await anext(messages)
        await served.app.drain(0)
        async for _ in messages:
            pass
        answer = await fetch(served, "GET", "/dashboard/feed")

    assert answer.status == 503


async def test_asking_for_the_feeds_head_does_not_watch() -> None:
    async with serving() as served:
        answer = await fetch(served, "HEAD", "/dashboard/feed")

    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_feed_that_was_opened_without_a_key_ends_with_the_first_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("segue.accounts.account.CONFIRM_S", 0.02)
    async with serving() as served, feed(served) as messages:
        assert (await anext(messages))["is_operator"]
        app = served.app
        _, secret = await issue_key(
            app.state.store.keys, app.state.hashes, "first", "ada", ["dashboard"]
        )
        async for message in messages:
            assert not message["turns"]
        assert (await fetch(served, "GET", "/dashboard/feed")).status == 401
        async with feed(served, secret) as own:
            assert not (await anext(own))["is_operator"]


async def test_operator_sees_figures_of_all_and_turns_of_nobody_else() -> None:
    async with serving(auth="keys") as served:
        app = served.app
        secrets = {}
        for owner, scopes in (
            ("ada", ["responses", "dashboard"]),
            ("bob", ["responses", "dashboard"]),
            ("ops", ["operator"]),
        ):
            _, secrets[owner] = await issue_key(
                app.state.store.keys, app.state.hashes, owner, owner, scopes
            )
        for owner in ("ada", "bob"):
            headers = {"Authorization": f"Bearer {secrets[owner]}"}
            asked = {"model": MODEL, "input": "hello"}
            assert (await fetch(served, "POST", "/v1/responses", asked, headers)).status == 200
        # What waits to be settled is settled before metrics are told.
        for owner, status in (("ada", 403), ("ops", 200)):
            headers = {"Authorization": f"Bearer {secrets[owner]}"}
            assert (await fetch(served, "GET", "/metrics", headers=headers)).status == status
        for owner, turns, listed in (("ada", 1, 1), ("ops", 2, 0)):
            async with feed(served, secrets[owner]) as messages:
                hello = await anext(messages)
                assert hello["is_operator"] is (owner == "ops")
                message = await anext(messages)
                assert message["picture"]["totals"]["turns"] == turns
                assert len(message["turns"]) == listed
                assert bool(message["picture"]["memory"]) is (owner == "ops")
        headers = {"Authorization": f"Bearer {secrets['ops']}"}
        assert (await fetch(served, "GET", "/v1/models", headers=headers)).status == 403


def test_page_presents_its_key_to_the_socket_as_the_door_expects() -> None:
    script = read_assets()["api.js"].body.decode()
    assert f'["{PROTOCOL}", `{KEY_PROTOCOL}${{key}}`]' in script
