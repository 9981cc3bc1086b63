"""Does every request of a key count against its limits, whatever it asks for?"""

from __future__ import annotations

import re

import pytest

from segue.accounts.hashes import issue_key
from segue.accounts.scopes import SCOPES
from segue.limits import KeyLimits
from tests.support import MODEL, WEATHER, Served, fetch, serving, wire

ID = "0" * 32


async def key_with(served: Served, **limits: int) -> dict[str, str]:
    """The headers of a key that may do everything, so often."""
    state = served.app.state
    _, secret = await issue_key(
        state.store.keys, state.hashes, "test", "ada", tuple(SCOPES), KeyLimits(**limits)
    )
    return {"Authorization": f"Bearer {secret}"}


async def test_every_route_that_needs_a_key_counts() -> None:
    """All routes of the table: where one request a minute is allowed, and was made, each is refused."""
    async with serving(auth="keys") as served:
        routes = [route for route in served.app.http.table.routes if route.scope is not None]
        assert len(routes) >= 40
        turn, other = ("POST", "/v1/responses", {}), ("GET", "/v1/models", None)
        for route in routes:
            headers = await key_with(served, requests_per_min=1, other_requests_per_min=1)
            if route.header:
                headers[route.header.decode()] = "x"
            before, beside = (turn, other) if route.is_turn else (other, turn)
            assert (await fetch(served, *before, headers)).status != 429
            path = re.sub(r"\{[^}]*\}", ID, route.path)
            body: object = {} if route.verb == "POST" else None
            answer = await fetch(served, route.verb, path, body, headers)
            assert answer.status == 429, (route.verb, route.path)
            # One limit does not use up the other.
            assert (await fetch(served, *beside, headers)).status != 429


async def test_upgrades_count() -> None:
    async with serving(auth="keys") as served:
        headers = await key_with(served, other_requests_per_min=2)
        for _ in range(2):
            async with wire(served, additional_headers=headers):
                pass
        with pytest.raises(Exception, match="429"):
            async with wire(served, additional_headers=headers):
                pass


async def test_steers_count() -> None:
    async with serving(auth="keys") as served:
        # The upgrade is one of them.
        headers = await key_with(served, other_requests_per_min=2)
        async with wire(served, additional_headers=headers) as socket:
            steer = {"type": "response.steer", "previous_response_id": "resp_" + ID, "input": "x"}
            codes = []
            for _ in range(2):
                await socket.send(steer)
                codes.append((await socket.next())["error"]["code"])
            assert codes[0] != "rate_limit_exceeded"
            assert codes[1] == "rate_limit_exceeded"


async def test_appends_count_as_the_creates_that_they_stand_for() -> None:
    """At the limit the rollout goes on waiting."""
    async with serving(auth="keys") as served:
        headers = await key_with(served, requests_per_min=1)
        async with wire(served, additional_headers=headers) as socket:
            await socket.create(
                input="Weather?", tools=[WEATHER], model=MODEL, store=False, rollout=True
            )
            event = await socket.next()
            while event["type"] != "response.done":
                event = await socket.next()
            output = {
                "type": "function_call_output",
                "call_id": event["required_input"][0]["call_id"],
                "output": "sunny",
            }
            append = {"type": "response.append", "response_id": event["response_id"]}
            await socket.send({**append, "input": [output]})
            assert (await socket.next())["error"]["code"] == "rate_limit_exceeded"
            (quota,) = {session.account.quota for session in served.app.upgrades.sessions}
            quota.limit(KeyLimits())
            (session,) = served.app.upgrades.sessions
            session.account.is_limited = False
            await socket.send({**append, "input": [output]})
            assert (await socket.events())[-1]["type"] == "response.completed"
