"""A write that went through although its answer was lost, and one that did not: what they hold is given back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from segue.accounts.account import LOCAL
from segue.errors import Unavailable
from segue.process import runner
from tests.support import MODEL, Answer, Served, fetch, serving, until

KEY = {"idempotency-key": "k"}
When = Literal["before", "after"]


@pytest.fixture(params=["memory", "sqlite"])
async def served(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Served]:
    monkeypatch.setattr(runner, "RETRY_S", 0.01)
    store = "memory" if request.param == "memory" else f"sqlite:///{tmp_path}/s.db"
    async with serving(store=store) as served:
        yield served


def fail_once(patch: pytest.MonkeyPatch, owner: object, name: str, when: When) -> None:
    """The next call of this method ends with an error, with its work done or not."""
    method: Callable[..., Awaitable[Any]] = getattr(type(owner), name)
    left = [True]

    async def call(self: object, *args: Any) -> Any:
        if left and when == "before":
            left.clear()
            raise Unavailable("The store is away.")
        found = await method(self, *args)
        if left:
            left.clear()
            raise Unavailable("The store is away.")
        return found

    patch.setattr(type(owner), name, call)


async def post(served: Served, **fields: Any) -> Answer:
    return await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "x", **fields})


async def test_conversation_is_free_again_after_a_lock_whose_answer_was_lost(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = (await fetch(served, "POST", "/v1/conversations", {})).json["id"]
    fail_once(monkeypatch, served.app.runner.records.conversations, "save", "after")
    assert (await post(served, conversation=name)).status == 503
    await until(lambda: not served.app.runner._retries)
    assert (await post(served, conversation=name)).status == 200


@pytest.mark.parametrize("store", [True, False])
async def test_key_is_free_again_after_a_claim_whose_answer_was_lost(
    served: Served, monkeypatch: pytest.MonkeyPatch, store: bool
) -> None:
    fail_once(monkeypatch, served.app.runner.records.idempotency_keys, "claim", "after")
    assert (await post(served, idempotency_key="k", store=store)).status == 503
    await until(lambda: not served.app.runner._retries)
    assert (await post(served, idempotency_key="k", store=store)).status == 200


async def test_background_response_that_its_client_was_refused_is_not_kept(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is queued for as long as the process lives, and then another one runs it."""
    store = served.app.state.store
    fail_once(monkeypatch, store.turns, "save", "after")
    assert (await post(served, background=True)).status == 503
    await until(lambda: not served.app.runner._retries)
    assert not await store.listing.newest(LOCAL, None, 9, is_tips=False)


async def test_store_that_is_away_for_long_is_asked_for_a_few_keys_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(self: object, *args: object) -> None:
        raise Unavailable("The store is away.")

    keys = type(served.app.runner.records.idempotency_keys)
    monkeypatch.setattr(runner, "RETRIES_MAX", 3)
    for name in ("claim", "release"):
        monkeypatch.setattr(keys, name, away)
    for number in range(6):
        assert (await post(served, idempotency_key=f"k{number}")).status == 503
    assert len(served.app.runner._retries) == 3


async def test_key_of_a_refused_request_is_free_again_though_the_store_was_away(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_once(monkeypatch, served.app.runner.records.idempotency_keys, "release", "before")
    refused = await post(served, idempotency_key="k", previous_response_id="resp_absent")
    assert (refused.status, refused.json["error"]["code"]) == (400, "previous_response_not_found")
    await until(lambda: not served.app.runner._retries)
    assert (await post(served, idempotency_key="k")).status == 200
