"""A made-up API comes in by one row: its three files are in `echo_api/`, and no other file knows of it.

It runs real turns over real sockets, in its own words. What complains when a part of an API is missing is here as well.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import websockets

from segue.accounts.hashes import issue_key
from segue.errors import Misconfigured
from segue.listener.api import Api, Route, Upgrade
from segue.listener.http import HttpApp
from segue.listener.table import RouteTable, routes_of
from segue.responses.api import RESPONSES
from segue.server.apis import APIS
from tests.doors.echo_api.api import ECHO
from tests.listener.doubles import Stage
from tests.listener.test_http import Client
from tests.support import MODEL, Served, fetch, metric, serving, wire

ROW = {"echo": ECHO}
SHOUT = {"voice": MODEL, "words": "Hello"}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(rows=APIS | ROW) as one:
        yield one


def events_of(body: bytes) -> list[tuple[str, Any]]:
    """The names and the values of server-sent events."""
    blocks = [block.split("\n") for block in body.decode().split("\n\n") if block]
    return [(name[7:], json.loads(data[6:])) for name, data in blocks]


async def test_client_of_another_api_has_a_turn_as_json(served: Served) -> None:
    answer = await fetch(served, "POST", "/v1/shouts", SHOUT)
    assert answer.status == 200
    assert answer.json["echo"].startswith("resp_")
    assert "Hello" in answer.json["sounds"][0]


async def test_client_of_another_api_has_a_turn_as_events_of_its_own(served: Served) -> None:
    whole = await fetch(served, "POST", "/v1/shouts", SHOUT)
    answer = await fetch(served, "POST", "/shouts", SHOUT | {"live": True})
    assert (answer.status, answer.headers["content-type"]) == (
        200,
        "text/event-stream; charset=utf-8",
    )
    *sounds, (last, ending) = events_of(answer.body)
    assert {name for name, _ in sounds} == {"sound"}
    assert "".join(value["text"] for _, value in sounds) == whole.json["sounds"][0]
    assert (last, ending) == ("silence", {"ending": "completed", "sounds": len(sounds)})


async def test_turn_of_one_api_is_continued_by_the_other(served: Served) -> None:
    made = (await fetch(served, "POST", "/v1/shouts", SHOUT)).json["echo"]
    body = {"model": MODEL, "input": "And?", "previous_response_id": made}
    next_turn = await fetch(served, "POST", "/v1/responses", body)
    assert next_turn.json["previous_response_id"] == made
    again = await fetch(served, "POST", "/v1/shouts", SHOUT | {"after": next_turn.json["id"]})
    assert again.status == 200


@pytest.mark.parametrize(
    "method, path, body, status, kind",
    [
        ("POST", "/v1/shouts", {"voice": MODEL}, 400, "not_a_shout"),
        ("POST", "/v1/shouts", SHOUT | {"voice": "none"}, 404, "model_not_found"),
        ("POST", "/v1/shouts", SHOUT | {"after": "resp_0"}, 400, "previous_response_not_found"),
        ("GET", "/v1/shouts", None, 405, "method_not_allowed"),
        ("GET", "/shouts/no/such/path", None, 404, "unknown_url"),
    ],
)
async def test_errors_have_the_shape_of_the_api_that_the_path_belongs_to(
    served: Served, method: str, path: str, body: object, status: int, kind: str
) -> None:
    answer = await fetch(served, method, path, body)
    assert (answer.status, answer.json["fault"]["kind"]) == (status, kind)
    assert answer.json["shout"] == answer.headers["echo-request"] == answer.headers["x-request-id"]
    other = await fetch(served, method, "/v1/responses/no/such/path", body)
    assert other.json["error"]["code"] == "unknown_url"


async def test_host_that_is_not_ours_is_refused_in_the_words_of_the_api(served: Served) -> None:
    answer = await fetch(served, "POST", "/v1/shouts", SHOUT, {"Host": "evil.example"})
    assert (answer.status, answer.json["fault"]["kind"]) == (403, "host_not_allowed")


async def test_turn_that_fails_before_its_first_event_is_answered_with_a_status() -> None:
    async with serving(rows=ROW, context_tokens=64) as served:
        shout = SHOUT | {"words": "word " * 200, "live": True}
        answer = await fetch(served, "POST", "/v1/shouts", shout)
    assert (answer.status, answer.json["fault"]["kind"]) == (400, "context_length_exceeded")


async def test_key_is_where_the_api_has_it() -> None:
    async with serving(rows=APIS | ROW, auth="keys") as served:
        state = served.app.state
        _, secret = await issue_key(state.store.keys, state.hashes, "test", "ada")
        own, bearer = {"x-echo-key": secret}, {"Authorization": f"Bearer {secret}"}
        assert (await fetch(served, "POST", "/v1/shouts", SHOUT, own)).status == 200
        refused = await fetch(served, "POST", "/v1/shouts", SHOUT, bearer)
        assert (refused.status, refused.json["fault"]["kind"]) == (401, "invalid_api_key")
        ask = {"model": MODEL, "input": "Hello"}
        assert (await fetch(served, "POST", "/v1/responses", ask, own)).status == 401
        assert (await fetch(served, "POST", "/v1/responses", ask, bearer)).status == 200


async def test_metrics_tell_the_apis_apart(served: Served) -> None:
    await fetch(served, "POST", "/v1/shouts", SHOUT)
    await fetch(served, "POST", "/v1/shouts", SHOUT | {"live": True})
    await fetch(served, "POST", "/v1/shouts", {})
    await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "Hello"})
    for outcome, transport in (
        ("completed", "echo_http"),
        ("completed", "echo_sse"),
        ("refused", "echo_http"),
        ("completed", "http"),
    ):
        name = f'segue_turns_total{{outcome="{outcome}",transport="{transport}"}}'
        assert await metric(served, name) == 1, name
    route = 'segue_http_requests_total{method="POST",route="/v1/shouts",status="200"}'
    assert await metric(served, route) == 2


async def test_two_apis_share_a_path_and_tell_their_clients_apart_by_a_header(
    served: Served,
) -> None:
    theirs = await fetch(served, "GET", "/v1/models", headers={"echo-version": "1"})
    assert theirs.json == {"voices": [MODEL]}
    assert (await fetch(served, "GET", "/v1/models")).json["data"][0]["id"] == MODEL


async def test_server_with_another_api_alone_has_no_responses_and_no_websocket() -> None:
    async with serving(rows=ROW) as served:
        assert (await fetch(served, "POST", "/v1/shouts", SHOUT)).status == 200
        assert (await fetch(served, "POST", "/v1/responses", {})).status == 404
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with wire(served):
                pass
        assert refused.value.response.status_code == 404
        described = (await fetch(served, "GET", "/openapi.json")).json["paths"]
        assert "/v1/models" in described
        assert "/v1/responses" not in described


async def test_api_that_is_switched_off_says_so_in_its_own_shape() -> None:
    services = Stage().services
    table = RouteTable(routes_of([RESPONSES], services), off=[ECHO])
    answer = await Client(HttpApp(services, table)).ask("POST", "/v1/shouts")
    assert (answer.status, answer.json["fault"]["kind"]) == (404, "unknown_url")
    assert "The API 'echo' is switched off: --apis" in answer.json["fault"]["words"]


# What complains.


async def start(api: Api) -> None:
    async with serving(rows=APIS | {api.name: api}):
        pass


@pytest.mark.parametrize("part", ["routes", "error_answer", "find_secret"])
async def test_api_without_a_part_is_refused_at_the_start(part: str) -> None:
    with pytest.raises(Misconfigured, match=f"API 'echo': '{part}' is missing"):
        await start(replace(ECHO, **{part: None}))  # type: ignore[arg-type]


@pytest.mark.parametrize("scope", [None, "shouting"])
async def test_route_without_a_scope_is_refused_at_the_start(scope: str | None) -> None:
    routes = [replace(route, scope=scope) for route in ECHO.routes(Stage().services)]
    with pytest.raises(Misconfigured, match="API 'echo': POST /v1/shouts has no scope"):
        await start(replace(ECHO, routes=lambda services: routes))


async def test_websocket_without_a_scope_is_refused_at_the_start() -> None:
    assert RESPONSES.upgrade is not None
    upgrade = Upgrade("/v1/shouts", RESPONSES.upgrade.open, "")
    with pytest.raises(Misconfigured, match="API 'echo': the WebSocket at /v1/shouts has no scope"):
        await start(replace(ECHO, upgrade=upgrade))


@pytest.mark.parametrize(
    "path, owner",
    [
        ("/v1/responses", "the API 'responses'"),
        ("/v1/codex/responses/{id}", "the API 'responses'"),
        ("/health", "the server's own pages"),
    ],
)
async def test_two_owners_of_one_path_are_refused_at_the_start(path: str, owner: str) -> None:
    verb = "POST" if path == "/v1/responses" else "GET"
    route = Route(verb, path, ECHO.routes(Stage().services)[0].call, "responses")
    with pytest.raises(Misconfigured) as refused:
        await start(replace(ECHO, routes=lambda services: [route]))
    assert str(refused.value).startswith(f"{verb} {path} is a route of both ")
    assert owner in str(refused.value)
    assert "the API 'echo'" in str(refused.value)
