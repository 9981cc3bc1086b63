"""Who may come in, for what, and how much of it: keys over HTTP and over sockets."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from segue.accounts.hashes import issue_key
from segue.errors import Misconfigured
from segue.limits import Key, KeyLimits
from segue.server.app import open_app
from segue.settings.checks import load_settings
from tests.support import MODEL, Answer, Served, fetch, serving, until, wire

WRONG = "sk-segue-" + "x" * 43
ASK: dict[str, Any] = {"model": MODEL, "input": "hello", "store": False}
NOWHERE = "/v1/responses/resp_" + "0" * 32


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(auth="keys") as one:
        yield one


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are confirmed all the time."""
    monkeypatch.setattr("segue.accounts.account.CONFIRM_S", 0.02)


async def new_key(served: Served, owner: str = "ada", **limits: int) -> tuple[Key, str]:
    app = served.app
    return await issue_key(
        app.state.store.keys, app.state.hashes, "test", owner, limits=KeyLimits(**limits)
    )


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def refused_upgrade(served: Served, **options: Any) -> Any:
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with wire(served, **options):
            pass
    return caught.value.response


def refusal_of(answer: Answer) -> tuple[int, str, str]:
    return answer.status, answer.json["error"]["code"], answer.headers["www-authenticate"]


async def test_request_without_a_key_with_a_wrong_one_or_a_revoked_one_is_refused(
    served: Served, quick: None
) -> None:
    key, secret = await new_key(served)
    assert await served.app.state.store.keys.revoke(key.id)
    nothing = await fetch(served, "POST", "/v1/responses", ASK)
    wrong, revoked, odd = [
        await fetch(served, "POST", "/v1/responses", ASK, headers)
        for headers in (bearer(WRONG), bearer(secret), {"Authorization": "Basic YTpi"})
    ]
    assert refusal_of(nothing) == (401, "invalid_api_key", 'Bearer realm="segue"')
    assert refusal_of(wrong) == (
        401,
        "invalid_api_key",
        'Bearer realm="segue", error="invalid_token"',
    )
    assert wrong.body == revoked.body == odd.body
    assert secret not in revoked.body.decode()
    for headers in ({}, bearer(WRONG), bearer(secret)):
        response = await refused_upgrade(served, additional_headers=headers)
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"].startswith("Bearer")
        assert json.loads(response.body)["error"]["code"] == "invalid_api_key"


async def test_key_in_the_address_is_no_key(served: Served) -> None:
    _, secret = await new_key(served)
    answer = await fetch(served, "GET", f"/v1/models?api_key={secret}&key={secret}")
    assert answer.status == 401


async def test_fresh_key_opens_http_and_sockets_at_once(served: Served) -> None:
    _, secret = await new_key(served)
    async with wire(served, additional_headers=bearer(secret)) as socket:
        assert (await socket.turn(input="hello", store=False))["type"] == "response.completed"
    _, other = await new_key(served)
    answer = await fetch(served, "POST", "/v1/responses", ASK, bearer(other))
    assert answer.status == 200


async def test_browser_presents_its_key_as_a_subprotocol_which_is_not_answered(
    served: Served,
) -> None:
    _, secret = await new_key(served)
    offered = [Subprotocol("segue.v1"), Subprotocol(f"segue-key.{secret}")]
    async with connect(served.ws_url, subprotocols=offered) as socket:
        assert socket.subprotocol == "segue.v1"
        assert socket.response is not None
        assert secret not in str(socket.response.headers)
    wrong = [Subprotocol("segue.v1"), Subprotocol(f"segue-key.{WRONG}")]
    response = await refused_upgrade(served, subprotocols=wrong)
    assert response.status_code == 401


async def test_key_opens_only_what_its_scopes_say(served: Served) -> None:
    app = served.app
    _, secret = await issue_key(
        app.state.store.keys, app.state.hashes, "prometheus", "ops", ["metrics"]
    )
    _, plain = await new_key(served)
    assert (await fetch(served, "GET", "/metrics", headers=bearer(secret))).status == 200
    for verb, path, body in (("GET", "/v1/models", None), ("POST", "/v1/responses", ASK)):
        answer = await fetch(served, verb, path, body, bearer(secret))
        assert (answer.status, answer.json["error"]["code"]) == (403, "insufficient_permissions")
    assert (await refused_upgrade(served, additional_headers=bearer(secret))).status_code == 403
    assert (await fetch(served, "GET", "/metrics", headers=bearer(plain))).status == 403
    assert (await fetch(served, "GET", "/health")).status == 200
    ready = await fetch(served, "GET", "/ready")
    assert ready.json == {"status": "ready"}
    assert "checks" in (await fetch(served, "GET", "/ready", headers=bearer(secret))).json


async def test_revoked_key_finishes_its_turn_and_then_loses_its_socket(
    served: Served, quick: None
) -> None:
    async with serving(auth="keys", tps=100) as slow:
        key, secret = await new_key(slow)
        async with wire(slow, additional_headers=bearer(secret)) as socket:
            await socket.create(input="hello", store=False)
            assert (await socket.next())["type"] == "response.created"
            assert await slow.app.state.store.keys.revoke(key.id)
            events = await socket.events()
            assert events[-1]["type"] == "response.completed"
            error = await socket.next()
            assert (error["status"], error["error"]["code"]) == (401, "invalid_api_key")
            with pytest.raises(websockets.ConnectionClosed):
                await socket.next()
            assert socket.socket.close_code == 1008


async def test_revoked_key_is_refused_on_its_open_socket(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for a running turn is refused, although it was sent in time."""
    monkeypatch.setattr("segue.accounts.account.CONFIRM_S", 0.02)
    async with serving(auth="keys", tps=100) as slow:
        key, secret = await new_key(slow)
        async with wire(slow, additional_headers=bearer(secret)) as socket:
            await socket.create(input="hello", store=False)
            assert (await socket.next())["type"] == "response.created"
            await socket.create(input="and another", store=False)
            assert await slow.app.state.store.keys.revoke(key.id)
            assert (await socket.events())[-1]["type"] == "response.completed"
            assert (await socket.next())["error"]["code"] == "invalid_api_key"


async def test_key_that_expires_on_an_open_socket_says_so(quick: None) -> None:
    async with serving(auth="keys") as served:
        state, soon = served.app.state, int(time.time()) + 2
        _, secret = await issue_key(state.store.keys, state.hashes, "test", "ada", expires_at=soon)
        async with wire(served, additional_headers=bearer(secret)) as socket:
            error = await socket.next()
            assert (error["status"], error["error"]["code"]) == (401, "api_key_expired")
            with pytest.raises(websockets.ConnectionClosed):
                await socket.next()
            assert socket.socket.close_code == 1008


async def test_waiting_rollout_of_a_revoked_key_ends(quick: None, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"calls": [{"name": "f", "arguments": {}}]}]}))
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    async with serving(auth="keys", script=str(script)) as served:
        key, secret = await new_key(served)
        async with wire(served, additional_headers=bearer(secret)) as socket:
            await socket.create(input="go", rollout=True, tools=[tool], store=False)
            while (await socket.next())["type"] != "response.done":
                pass
            assert await served.app.state.store.keys.revoke(key.id)
            kinds = []
            with pytest.raises(websockets.ConnectionClosed):
                while True:
                    kinds.append((await socket.next())["type"])
            assert socket.socket.close_code == 1008
            assert "error" in kinds


async def test_first_key_shuts_an_open_door(quick: None) -> None:
    async with serving() as served, wire(served) as stranger:
        assert (await stranger.turn(input="hello", store=False))["type"] == "response.completed"
        assert (await fetch(served, "GET", "/v1/models", headers=bearer("any"))).status == 200
        _, secret = await new_key(served)
        error = await stranger.next()
        assert error["error"]["code"] == "invalid_api_key"
        with pytest.raises(websockets.ConnectionClosed):
            await stranger.next()
        assert stranger.socket.close_code == 1008
        assert (await fetch(served, "GET", "/v1/models")).status == 401
        assert (await fetch(served, "GET", "/v1/models", headers=bearer(secret))).status == 200


async def test_with_keys_switched_off_no_client_needs_one(tmp_path: Path) -> None:
    async with serving(auth="off", store=f"sqlite:///{tmp_path}/s.db") as served:
        await new_key(served)
        await served.app.state.accounts.confirm()
        assert (await fetch(served, "GET", "/v1/models")).status == 200


async def test_requests_a_minute_are_counted_for_all_transports_together(served: Served) -> None:
    _, secret = await new_key(served, requests_per_min=2)
    async with wire(served, additional_headers=bearer(secret)) as socket:
        assert (await socket.turn(input="1", store=False))["type"] == "response.completed"
        answer = await fetch(served, "POST", "/v1/responses", ASK, bearer(secret))
        assert answer.status == 200
        error = await socket.turn(input="3", store=False)
        assert (error["status"], error["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 0 < error["retry_after"] <= 60
        answer = await fetch(served, "POST", "/v1/responses", ASK, bearer(secret))
        assert answer.status == 429
        assert 0 < int(answer.headers["retry-after"]) <= 31
    _, other = await new_key(served)
    assert (await fetch(served, "POST", "/v1/responses", ASK, bearer(other))).status == 200


async def test_requests_that_start_no_response_have_a_limit_of_their_own(served: Served) -> None:
    """No key can flood with deletes, polls or lists; turns, and the other keys, go on."""
    _, secret = await new_key(served, other_requests_per_min=4)
    headers = bearer(secret)
    asked = (("DELETE", NOWHERE, 404), ("GET", NOWHERE, 404), ("GET", "/v1/models", 200))
    for method, path, status in asked:
        assert (await fetch(served, method, path, headers=headers)).status == status
    made = await fetch(served, "POST", "/v1/conversations", {}, headers)
    assert made.status == 200
    for method, path, _ in asked:
        refused = await fetch(served, method, path, headers=headers)
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 0 < int(refused.headers["retry-after"]) <= 15
        assert refused.headers["x-request-id"]
    assert (await fetch(served, "POST", "/v1/responses", ASK, headers)).status == 200
    _, other = await new_key(served)
    assert (await fetch(served, "DELETE", NOWHERE, headers=bearer(other))).status == 404


async def test_tokens_a_minute_are_paid_when_a_turn_is_over(served: Served) -> None:
    _, secret = await new_key(served, tokens_per_min=5)
    first = await fetch(served, "POST", "/v1/responses", ASK, bearer(secret))
    assert first.status == 200
    assert first.json["usage"]["total_tokens"] > 5
    second = await fetch(served, "POST", "/v1/responses", ASK, bearer(secret))
    assert second.status == 429
    assert "tokens a minute" in second.json["error"]["message"]


async def test_connections_of_a_key_are_counted(served: Served) -> None:
    _, secret = await new_key(served, connections_max=1)
    headers = bearer(secret)
    async with wire(served, additional_headers=headers):
        response = await refused_upgrade(served, additional_headers=headers)
        assert (response.status_code, "retry-after" in response.headers) == (429, True)
    await until(lambda: not served.app.upgrades.sessions)
    async with wire(served, additional_headers=headers) as socket:
        assert (await socket.turn(input="1", store=False))["type"] == "response.completed"


async def test_turns_at_once_of_a_key_are_counted() -> None:
    async with serving(auth="keys", tps=50) as served:
        _, secret = await new_key(served, lanes_max=1)
        async with wire(served, additional_headers=bearer(secret)) as socket:
            await socket.create(input="1", store=False, stream_id="a")
            assert (await socket.next())["type"] == "response.created"
            await socket.create(input="2", store=False, stream_id="b")
            refused = await socket.events("b")
            assert refused[-1]["error"]["code"] == "rate_limit_exceeded"
            answer = await fetch(served, "POST", "/v1/responses", ASK, bearer(secret))
            assert answer.status == 429
            assert (await socket.events("a"))[-1]["type"] == "response.completed"
            assert (await socket.turn(input="3", store=False, stream_id="b"))["type"] == (
                "response.completed"
            )


async def test_state_of_a_key_is_bounded_over_its_connections(served: Served) -> None:
    _, secret = await new_key(served, state_bytes_max=60_000)
    headers = bearer(secret)
    async with (
        wire(served, additional_headers=headers) as first,
        wire(served, additional_headers=headers) as second,
    ):
        early = await first.turn(input="x" * 10_000, store=False)
        late = await second.turn(input="y" * 10_000, store=False)
        error = await first.turn(
            input="go on", store=False, previous_response_id=early["response"]["id"]
        )
        assert error["error"]["code"] == "previous_response_not_found"
        again = await second.turn(
            input="go on", store=False, previous_response_id=late["response"]["id"]
        )
        assert again["type"] == "response.completed"


async def test_state_of_a_key_covers_what_its_owner_has_in_the_caches_of_the_process(
    tmp_path: Path,
) -> None:
    async with serving(auth="keys", store=f"sqlite:///{tmp_path}/s.db") as served:
        app = served.app
        _, free = await new_key(served, "bob")
        _, bound = await new_key(served, "ada", state_bytes_max=100_000)
        _, operator = await issue_key(
            app.state.store.keys, app.state.hashes, "ops", "ops", ["operator"]
        )

        async def held() -> float:
            # What waits to be settled is settled before metrics are read.
            page = await fetch(served, "GET", "/metrics", headers=bearer(operator))
            lines = page.body.decode().splitlines()
            return float(
                next(one for one in lines if one.startswith("segue_state_bytes ")).split()[1]
            )

        async def talk(secret: str) -> None:
            last = None
            for _ in range(8):
                asked = {"model": MODEL, "input": "x" * 20_000, "previous_response_id": last}
                answer = await fetch(served, "POST", "/v1/responses", asked, bearer(secret))
                assert answer.status == 200
                last = answer.json["id"]

        before = await held()
        await talk(bound)
        between = await held()
        assert between - before <= 100_000
        await talk(free)
        assert await held() - between > 300_000, "no other key pays for it"


async def test_public_address_needs_keys(tmp_path: Path) -> None:
    flags = {"engine": "scripted", "host": "0.0.0.0", "store": f"sqlite:///{tmp_path}/s.db"}
    settings = load_settings(flags, environment={})
    with pytest.raises(Misconfigured, match="segue keys create"):
        async with open_app(settings):
            pass
    async with open_app(load_settings({**flags, "auth": "keys"}, environment={})) as app:
        await issue_key(app.state.store.keys, app.state.hashes, "first", "ada")
    async with open_app(settings) as app:
        assert app.state.accounts.is_required


async def test_keys_of_another_ring_are_reported_at_the_start(tmp_path: Path) -> None:
    flags = {"engine": "scripted", "store": f"sqlite:///{tmp_path}/s.db"}
    async with open_app(load_settings(flags, environment={})) as app:
        await issue_key(app.state.store.keys, app.state.hashes, "first", "ada")
    strange = load_settings({**flags, "seal_keys": str(tmp_path / "other")}, environment={})
    with pytest.raises(Misconfigured, match="seal_keys"):
        async with open_app(strange):
            pass


async def test_process_has_a_limit_of_connections() -> None:
    async with serving(connections_max=1) as served, wire(served):
        waits = set()
        for _ in range(20):
            response = await refused_upgrade(served)
            assert response.status_code == 503
            waits.add(int(response.headers["retry-after"]))
        # They do not all come back at once (docs/inside/hazards.md T15).
        assert len(waits) > 1
        assert waits <= {1, 2, 3, 4, 5}
        assert (await fetch(served, "GET", "/health")).status == 200
