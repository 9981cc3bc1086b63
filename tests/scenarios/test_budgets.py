"""What a team lead sets for a key: its models, its tokens of a day and a month; and what its clients read of limits."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from typing import Any

import pytest

from segue.accounts.hashes import issue_key
from segue.budgets.budget import DAY_S, day_of, next_month
from segue.limits import Key, KeyLimits
from segue.seams.history import UsageEntry
from tests.postgres import PostgresServer
from tests.support import WAIT_S, Answer, Served, fetch, serving, until, wire

MODELS = ["small", "large-1", "large-2"]
# How each API asks for a turn.
ASKS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hello", "store": False},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50},
}


async def key_with(served: Served, owner: str = "ada", **limits: Any) -> tuple[Key, dict[str, str]]:
    """A key, and the headers that present it, to each API."""
    state = served.app.state
    key, secret = await issue_key(
        state.store.keys, state.hashes, "test", owner, limits=KeyLimits(**limits)
    )
    return key, {"Authorization": f"Bearer {secret}"}


async def ask(
    served: Served, headers: dict[str, str], path: str = "/v1/responses", model: str = "small"
) -> Answer:
    return await fetch(served, "POST", path, {"model": model, **ASKS[path]}, headers)


async def spend(served: Served, key: Key, tokens: int, ended_at: float | None = None) -> None:
    """A turn of this key that is in the ledger."""
    at = int(time.time() if ended_at is None else ended_at)
    turn_id = f"{key.id}{at}{tokens}"
    entry = UsageEntry(turn_id, key.owner, "small", "completed", tokens, 0, 0, at, key_id=key.id)
    await served.app.state.store.ledger.settle([entry])


async def budget_events(served: Served) -> dict[tuple[str, str], int]:
    """What the metric has counted."""
    state = served.app.state
    _, secret = await issue_key(state.store.keys, state.hashes, "prometheus", "ops", ["metrics"])
    page = await fetch(served, "GET", "/metrics", None, {"Authorization": f"Bearer {secret}"})
    line = r'segue_budget_events_total\{event="(\w+)",period="(\w+)"\} (\d+)'
    return {(event, of): int(n) for event, of, n in re.findall(line, page.body.decode())}


# --- models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ASKS)
async def test_model_of_another_key_is_as_one_that_does_not_exist(path: str) -> None:
    async with serving(auth="keys", model=MODELS) as served:
        _, headers = await key_with(served, models=("small", "large-*"))
        _, narrow = await key_with(served, models=("small",))
        for model in MODELS:
            assert (await ask(served, headers, path, model)).status == 200
        refused = await ask(served, narrow, path, "large-1")
        unknown = await ask(served, narrow, path, "large-9")
        assert refused.status == unknown.status == 404
        named = refused.body.replace(b"large-1", b"large-9")
        assert _without_id(named) == _without_id(unknown.body)
        assert "large-2" not in refused.body.decode()


async def test_list_of_models_has_those_of_the_key() -> None:
    async with serving(auth="keys", model=MODELS) as served:
        _, all_models = await key_with(served)
        _, narrow = await key_with(served, models=("large-*",))
        for more in ({}, {"anthropic-version": "2023-06-01"}):
            listed = await fetch(served, "GET", "/v1/models", None, all_models | more)
            assert [one["id"] for one in listed.json["data"]] == MODELS
            listed = await fetch(served, "GET", "/v1/models", None, narrow | more)
            assert [one["id"] for one in listed.json["data"]] == MODELS[1:]
            for model, status in (("small", 404), ("large-1", 200)):
                found = await fetch(served, "GET", f"/v1/models/{model}", None, narrow | more)
                assert found.status == status


async def test_models_of_a_key_change_on_an_open_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.accounts.account.CONFIRM_S", 0.02)
    async with serving(auth="keys", model=MODELS) as served:
        key, headers = await key_with(served)
        async with wire(served, additional_headers=headers) as socket:
            turn = await socket.turn(model="large-1", input="hello", store=False)
            assert turn["type"] == "response.completed"
            state = served.app.state
            await state.store.keys.limit(key.id, KeyLimits(models=("small",)))
            (session,) = served.app.upgrades.sessions
            await until(lambda: session.account.limits.models == ("small",))
            await socket.create(model="large-1", input="hello", store=False)
            assert (await socket.next())["error"]["code"] == "model_not_found"
            turn = await socket.turn(model="small", input="hello", store=False)
            assert turn["type"] == "response.completed"


async def test_key_for_an_alias_and_key_for_its_model(tmp_path: Any) -> None:
    """The name that is asked for is on the list, or the one that the model is served under."""
    config = tmp_path / "segue.toml"
    config.write_text('[[models]]\nname = "own"\naliases = ["gpt-*", "fast"]\n')
    async with serving(auth="keys", config=str(config)) as served:
        _, of_alias = await key_with(served, models=("fast",))
        _, of_model = await key_with(served, models=("own",))
        for headers, statuses in ((of_alias, (200, 404, 404)), (of_model, (200, 200, 200))):
            for name, status in zip(("fast", "own", "gpt-5"), statuses, strict=True):
                assert (await ask(served, headers, model=name)).status == status, name


# --- budgets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["memory", "sqlite"])
@pytest.mark.parametrize("path", ASKS)
async def test_turn_after_the_budget_is_refused_until_it_begins_anew(
    path: str, store: str, tmp_path: Any
) -> None:
    url = "memory" if store == "memory" else f"sqlite:///{tmp_path}/segue.db"
    async with serving(auth="keys", model=MODELS, store=url) as served:
        _, headers = await key_with(served, budget_tokens_day=1)
        # It is known to be too small only when the turn has ended.
        assert (await ask(served, headers, path)).status == 200
        refused = await ask(served, headers, path)
        assert refused.status == 429
        tomorrow = (day_of(time.time())[0] + 1) * DAY_S
        assert 0 < int(refused.headers["retry-after"]) <= tomorrow - time.time() + 2
        assert refused.headers["x-should-retry"] == "false"
        error = refused.json["error"]
        assert "You exceeded your current quota" in error["message"]
        if path == "/v1/messages":
            assert error["type"] == "rate_limit_error"
        else:
            assert (error["code"], error["type"]) == ("insufficient_quota", "insufficient_quota")
        assert await budget_events(served) == {("refused", "day"): 1}


async def test_budget_holds_on_a_socket_and_a_turn_that_runs_finishes() -> None:
    async with serving(auth="keys", model=MODELS, tps=20) as served:
        _, headers = await key_with(served, budget_tokens_month=1)
        async with wire(served, additional_headers=headers) as socket:
            await socket.create(model="small", input="hello", store=False, stream_id="a")
            while (await socket.next())["type"] != "response.in_progress":
                pass
            # It runs: what it will use is not known yet.
            await socket.create(model="small", input="hello", store=False, stream_id="b")
            for lane in "ab":
                assert (await socket.events(lane))[-1]["type"] == "response.completed"
            await socket.create(model="small", input="hello", store=False)
            assert (await socket.next())["error"]["code"] == "insufficient_quota"


async def test_budget_of_an_owner_is_that_of_all_its_keys() -> None:
    async with serving(auth="keys", model=MODELS) as served:
        _, one = await key_with(served, "team", owner_budget_tokens_day=1)
        _, two = await key_with(served, "team", owner_budget_tokens_day=1)
        _, other = await key_with(served, "others", owner_budget_tokens_day=1)
        assert (await ask(served, one)).status == 200
        assert (await ask(served, two)).status == 429
        assert (await ask(served, other)).status == 200


async def test_client_and_operator_are_warned_before(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(auth="keys", model=MODELS) as served:
        key, headers = await key_with(served, budget_tokens_day=100_000)
        assert "x-segue-warnings" not in (await ask(served, headers)).headers
        await spend(served, key, 80_000)
        with caplog.at_level(logging.WARNING, "segue.budgets"):
            for _ in range(2):
                warning = (await ask(served, headers)).headers["x-segue-warnings"]
        assert warning.startswith("This key has used 80,")
        assert warning.endswith("of 100,000 tokens of this day (UTC), 80 %.")
        assert [key.id in line for line in caplog.messages] == [True]
        assert await budget_events(served) == {("warning", "day"): 1}


async def test_what_was_used_yesterday_counts_for_the_month_alone() -> None:
    async with serving(auth="keys", model=MODELS) as served:
        now = time.time()
        today, first = day_of(now)
        key, headers = await key_with(served, budget_tokens_day=1_000)
        other, monthly = await key_with(served, budget_tokens_month=1_000)
        for one in (key, other):
            await spend(served, one, 2_000, (today - 1) * DAY_S if today > first else now - DAY_S)
            await spend(served, one, 2_001, (first - 1) * DAY_S)
        assert (await ask(served, headers)).status == 200
        expected = 429 if today > first else 200
        assert (await ask(served, monthly)).status == expected


async def test_many_turns_at_once_pass_the_border_by_no_more_than_run(tmp_path: Any) -> None:
    """Each waits for what has ended before it: with one lane, one turn passes the border."""
    async with serving(auth="keys", model=MODELS, store=f"sqlite:///{tmp_path}/segue.db") as served:
        key, headers = await key_with(served, budget_tokens_day=200)
        answers = [await ask(served, headers) for _ in range(8)]
        used = [a.json["usage"]["total_tokens"] for a in answers if a.status == 200]
        assert sum(used[:-1]) < 200 <= sum(used)
        assert {answer.status for answer in answers[len(used) :]} == {429}
        many = await asyncio.gather(*[ask(served, headers) for _ in range(20)])
        assert {answer.status for answer in many} == {429}
        spent = await served.app.state.store.ledger.spent("ada", key.id, *day_of(time.time()))
        assert spent.day == spent.month == spent.owner_day == sum(used)


async def test_request_that_is_refused_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has used nothing: the next turn does not look for its usage."""
    monkeypatch.setattr("segue.budgets.budget.SETTLE_S_MAX", 10 * WAIT_S)
    async with serving(auth="keys", model=MODELS) as served, asyncio.timeout(WAIT_S):
        _, headers = await key_with(served, budget_tokens_day=100_000)
        for path in ASKS:
            assert (await ask(served, headers, path, "unknown")).status == 404
            assert (await ask(served, headers, path)).status == 200


async def test_budget_that_is_changed_while_a_turn_ends_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("segue.budgets.budget.SETTLE_S_MAX", 10 * WAIT_S)
    async with serving(auth="keys", model=MODELS) as served, asyncio.timeout(WAIT_S):
        state = served.app.state
        key, headers = await key_with(served, budget_tokens_day=100_000)
        assert (await ask(served, headers)).status == 200
        for limits in (KeyLimits(), KeyLimits(budget_tokens_day=100_000)):
            await state.store.keys.limit(key.id, limits)
            await state.accounts.confirm()
            # What has ended is in the ledger while the key has no budget.
            await state.meter.budget_sources.settle()
        assert (await ask(served, headers)).status == 200


@pytest.mark.parametrize("period", ["day", "month"])
@pytest.mark.parametrize("of", ["budget", "owner_budget"])
async def test_two_servers_pass_the_border_by_no_more_than_they_run(
    postgres: PostgresServer, of: str, period: str
) -> None:
    """Each asks what the other one has counted; a client is warned before it is refused."""
    url, most = await postgres.make_database(), 1_000
    async with (
        serving(auth="keys", model=MODELS, store=url) as one,
        serving(auth="keys", model=MODELS, store=url) as two,
    ):
        clients = []
        for served in (one, two):
            key, headers = await key_with(served, **{f"{of}_tokens_{period}": most})
            clients.append((served, headers))
        if of == "budget":
            # One key at both.
            clients = [(one, headers), (two, headers)]
        body = {"model": "small", "input": "hello"}

        async def asks_until_refused(served: Served, headers: dict[str, str]) -> list[Answer]:
            answers = list[Answer]()
            while not answers or answers[-1].status == 200:
                answers.append(await fetch(served, "POST", "/v1/responses", body, headers))
            return answers

        asked = await asyncio.gather(*[asks_until_refused(*client) for client in clients])
        used = [[answer.json["usage"]["total_tokens"] for answer in row[:-1]] for row in asked]
        total = sum(map(sum, used))
        assert most <= total < most + sum(max(turns) for turns in used)
        for row in asked:
            assert row[-1].json["error"]["code"] == "insufficient_quota"
            warned = ["x-segue-warnings" in answer.headers for answer in row[:-1]]
            assert warned == sorted(warned)
            assert (warned[0], warned[-1]) == (False, True)
        spent = await two.app.state.store.ledger.spent("ada", key.id, *day_of(time.time()))
        assert {spent.owner_day, spent.owner_month} == {total}


def test_months_of_all_lengths() -> None:
    for text, following in (("2026-01-31", "2026-02-01"), ("2028-02-29", "2028-03-01")):
        at = time.mktime(time.strptime(text, "%Y-%m-%d")) - time.timezone
        day, first = day_of(at)
        assert time.strftime("%Y-%m-%d", time.gmtime(day * DAY_S)) == text
        assert time.strftime("%Y-%m-%d", time.gmtime(first * DAY_S)) == text[:8] + "01"
        month = next_month(first)
        assert time.strftime("%Y-%m-%d", time.gmtime(month * DAY_S)) == following


# --- what is left of a minute ------------------------------------------------------------------------


async def test_answers_say_what_is_left_of_the_minute() -> None:
    async with serving(auth="keys", model=MODELS) as served:
        _, headers = await key_with(served, requests_per_min=40, tokens_per_min=10_000)
        for path in ("/v1/responses", "/v1/chat/completions"):
            answer = await ask(served, headers, path)
            assert answer.headers["x-ratelimit-limit-requests"] == "40"
            assert answer.headers["x-ratelimit-limit-tokens"] == "10000"
        assert int(answer.headers["x-ratelimit-remaining-requests"]) == 38
        assert 9_000 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 10_000
        assert answer.headers["x-ratelimit-reset-requests"].startswith(("3s", "2."))
        answer = await ask(served, headers, "/v1/messages")
        assert answer.headers["anthropic-ratelimit-requests-limit"] == "40"
        assert int(answer.headers["anthropic-ratelimit-requests-remaining"]) == 37
        at = answer.headers["anthropic-ratelimit-tokens-reset"]
        assert time.strptime(at, "%Y-%m-%dT%H:%M:%SZ")
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


async def test_refusal_says_it_too_and_a_key_without_limits_nothing() -> None:
    async with serving(auth="keys", model=MODELS) as served:
        _, headers = await key_with(served, requests_per_min=1)
        _, free = await key_with(served)
        await ask(served, headers)
        refused = await ask(served, headers)
        assert refused.status == 429
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert "x-ratelimit-limit-tokens" not in refused.headers
        assert not [n for n in (await ask(served, free)).headers if "ratelimit" in n]


# --- expired keys ------------------------------------------------------------------------------------


async def test_expired_key_is_told_to_who_presents_it_and_nobody_else() -> None:
    async with serving(auth="keys", model=MODELS) as served:
        state = served.app.state
        _, secret = await issue_key(
            state.store.keys, state.hashes, "old", "ada", expires_at=int(time.time()) - 60
        )
        answer = await ask(served, {"Authorization": f"Bearer {secret}"})
        assert (answer.status, answer.json["error"]["code"]) == (401, "api_key_expired")
        assert "This API key expired on" in answer.json["error"]["message"]
        other = secret[:-1] + ("a" if secret[-1] != "a" else "b")
        answer = await ask(served, {"Authorization": f"Bearer {other}"})
        assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")


def _without_id(body: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(body)
    decoded.pop("request_id", None)
    return decoded
