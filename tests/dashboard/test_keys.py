"""An operator manages API keys over HTTP; no other key can, and no page of another origin."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from segue.accounts.hashes import issue_key
from tests.support import MODEL, WAIT_S, Answer, Served, fetch, serving

KEYS = "/dashboard/keys"


@dataclass(frozen=True, slots=True)
class Desk:
    """A server with keys, and an operator's and a normal key of it."""

    served: Served
    operator: str
    user: str

    async def ask(self, verb: str, path: str, body: Any = None, **more: str) -> Answer:
        """A request with the operator's key, unless `key` names another."""
        headers = {"Authorization": f"Bearer {more.pop('key', self.operator)}", **more}
        return await fetch(self.served, verb, path, body, headers)


@asynccontextmanager
async def desk(**flags: object) -> AsyncIterator[Desk]:
    async with serving(auth="keys", **flags) as served:
        app = served.app
        _, operator = await issue_key(
            app.state.store.keys, app.state.hashes, "ops", "ops", ["operator"]
        )
        _, user = await issue_key(
            app.state.store.keys, app.state.hashes, "ada", "ada", ["responses", "dashboard"]
        )
        yield Desk(served, operator, user)


async def until_status(served: Served, status: int, verb: str, path: str, key: str = "") -> None:
    """A server confirms its keys as soon as it has answered."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": MODEL, "input": "hello"} if verb == "POST" else None
    async with asyncio.timeout(WAIT_S):
        while (await fetch(served, verb, path, body, headers)).status != status:
            pass


@pytest.fixture(autouse=True)
def never_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are confirmed when they have changed; the regular look at them would hide a change that is not passed on."""
    monkeypatch.setattr("segue.accounts.account.CONFIRM_S", 1000.0)
    monkeypatch.setattr("segue.accounts.account.TRUST_S", 1000.0)


async def test_operator_creates_limits_and_revokes_a_key(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    turn = ("POST", "/v1/responses")
    async with desk(audit_log=str(audit)) as one:
        wanted = {"name": "laptop", "scopes": ["responses"], "limits": {"lanes_max": 2}}
        made = await one.ask("POST", KEYS, wanted)
        assert made.status == 201
        key, secret = made.json["key"], made.json["secret"]
        assert (key["owner"], key["scopes"], key["limits"]["lanes_max"]) == (
            "laptop",
            ["responses"],
            2,
        )
        await until_status(one.served, 200, *turn, secret)

        listed = (await one.ask("GET", KEYS)).json
        assert {row["name"] for row in listed["keys"]} == {"ops", "ada", "laptop"}
        assert secret not in json.dumps(listed)
        assert listed["are_required"]
        used = {row["owner"]: row for row in listed["usage"]}
        assert used["laptop"]["turns"] == 1
        assert used["laptop"]["output_tokens"] > 0

        # The new limit holds for a key that is in use, at once.
        place = f"{KEYS}/{key['id']}"
        assert (await one.ask("POST", place, {"requests_per_min": 1})).status == 200
        await until_status(one.served, 429, *turn, secret)
        assert (await one.ask("POST", place, {"request_per_min": 9})).status == 400
        assert (await one.ask("POST", place, {})).status == 200
        await until_status(one.served, 200, *turn, secret)

        assert (await one.ask("DELETE", place)).json == {"id": key["id"], "revoked": True}
        await until_status(one.served, 401, *turn, secret)
        assert (await one.ask("DELETE", place)).status == 404
        assert (await one.ask("POST", place, {})).status == 404
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    done = [line for line in lines if line["event"].startswith("key.")]
    assert [line["event"] for line in done] == [
        *("key.create", "key.limit", "key.limit", "key.revoke"),
    ]
    assert {(line["owner"], line["key_id"]) for line in done} == {("ops", key["id"])}
    assert all(line["request_id"].startswith("req_") for line in done)
    assert secret not in audit.read_text()


async def test_budget_of_an_owner_is_that_of_all_its_keys() -> None:
    """A new key cannot leave it out, and a change of one is a change of all; of the owner alone."""
    async with desk() as one:

        async def budgets() -> dict[str, tuple[int, int]]:
            keys = (await one.ask("GET", KEYS)).json["keys"]
            names = ("lanes_max", "owner_budget_tokens_day")
            return {key["name"]: tuple(key["limits"][name] for name in names) for key in keys}

        async def create(name: str, **limits: int) -> str:
            wanted = {"name": name, "owner": "ops", "limits": limits}
            return str((await one.ask("POST", KEYS, wanted)).json["key"]["id"])

        first = await create("first", lanes_max=3, owner_budget_tokens_day=500)
        await create("second", lanes_max=2)
        left = {"ada": (0, 0)}
        assert await budgets() == left | {"ops": (0, 500), "first": (3, 500), "second": (2, 500)}
        changed = {"lanes_max": 4, "owner_budget_tokens_day": 900}
        assert (await one.ask("POST", f"{KEYS}/{first}", changed)).status == 200
        assert await budgets() == left | {"ops": (0, 900), "first": (4, 900), "second": (2, 900)}


async def test_keys_are_for_operators_and_their_own_pages_only() -> None:
    asked = (("GET", KEYS), ("POST", KEYS), ("POST", f"{KEYS}/x"), ("DELETE", f"{KEYS}/x"))
    async with desk(cors_origins=["https://listed.test"]) as one:
        for verb, path in asked:
            assert (await one.ask(verb, path, {}, key=one.user)).status == 403
            assert (await one.ask(verb, path, {}, key="sk-segue-wrong")).status == 401
            assert (await fetch(one.served, verb, path, {})).status == 401
            for origin in ("https://listed.test", "null", "http://127.0.0.1:1"):
                refused = await one.ask(verb, path, {}, Origin=origin)
                assert (refused.status, refused.json["error"]["code"]) == (
                    403,
                    "origin_not_allowed",
                )
        assert (await one.ask("GET", KEYS, Origin=one.served.url)).status == 200


REFUSED: tuple[tuple[dict[str, Any], int, str], ...] = (
    ({}, 400, "name"),
    ({"name": ""}, 400, "name"),
    ({"name": "a\nb"}, 400, "printable"),
    ({"name": "x", "scopes": []}, 400, "scopes"),
    ({"name": "x", "scopes": ["root"]}, 400, "root"),
    ({"name": "x", "limits": {"lanes_max": -1}}, 400, "lanes_max"),
    ({"name": "x", "limits": {"lanes_max": "many"}}, 400, "lanes_max"),
    ({"name": "x", "limits": {"lanes": 1}}, 400, "lanes"),
    ({"name": "x", "colour": "red"}, 400, "colour"),
    ({"name": "x", "expires_at": 1_700_000_000}, 400, "future"),
    ({"name": "x", "expires_at": 10**18}, 400, "future"),
    # A key for them would read what the operator may not see.
    ({"name": "x", "owner": "ada"}, 403, "--owner 'ada'"),
    ({"name": "x", "owner": "local"}, 403, "local"),
)


async def test_key_that_may_not_be_made_is_refused_in_words() -> None:
    async with desk() as one:
        for wanted, status, word in REFUSED:
            answer = await one.ask("POST", KEYS, wanted)
            assert (answer.status, word in answer.json["error"]["message"]) == (status, True), (
                wanted
            )
        assert len((await one.ask("GET", KEYS)).json["keys"]) == 2


async def test_first_key_of_an_open_server_is_made_there_and_closes_it() -> None:
    async with serving() as served:
        assert not (await fetch(served, "GET", KEYS)).json["are_required"]
        made = await fetch(served, "POST", KEYS, {"name": "me", "scopes": ["operator"]})
        assert made.status == 201
        await until_status(served, 401, "GET", KEYS)
        headers = {"Authorization": f"Bearer {made.json['secret']}"}
        listed = await fetch(served, "GET", KEYS, headers=headers)
        assert listed.json["key_id"] == made.json["key"]["id"]
