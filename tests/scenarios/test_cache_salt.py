"""Can one owner learn from an engine's prefix cache what another has sent? A real server in front of FAKE engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from segue.accounts.hashes import issue_key
from tests.contracts.dialect import find_weights
from tests.engines.asking import reply
from tests.engines.fakes.chat import FakeChat, delta, end, usage
from tests.engines.fakes.server import Fake
from tests.engines.fakes.sglang import FakeSglang
from tests.engines.fakes.vllm import FakeVllm
from tests.support import Served, fetch, serving

SECRET = "The launch code is 0000. " * 20
ENGINES: dict[str, tuple[str, str, Callable[[], Fake]]] = {
    "vllm": ("vllm", "cache_salt", lambda: FakeVllm(reply)),
    "vllm by the other endpoint": (
        "vllm", "cache_salt", lambda: FakeVllm(reply, is_scaled_out=True)
    ),
    "sglang": ("sglang", "extra_key", lambda: FakeSglang(reply)),
    "chat": (
        "chat",
        "cache_salt",
        lambda: FakeChat(events=[delta(content="Hi."), end(), usage(9, 1)], owned_by="vllm"),
    ),
}  # fmt: skip


def flags(engine: str, fake: Fake, store: Path, **more: object) -> dict[str, Any]:
    tokenizer = {} if engine == "chat" else {"tokenizer": str(find_weights("smollm2"))}
    return {
        "engine": engine,
        "engine_url": [fake.url],
        "model": ["fake"],
        "auth": "keys",
        "store": f"sqlite:///{store / 'turns.db'}",
        **tokenizer,
        **more,
    }


async def key(served: Served, owner: str) -> str:
    _, secret = await issue_key(served.app.state.store.keys, served.app.state.hashes, "test", owner)
    return secret


async def ask(served: Served, secret: str) -> int:
    """The same prompt each time; how much of it the engine had, as the client is told."""
    body = {"model": "fake", "input": SECRET, "store": False}
    headers = {"authorization": f"Bearer {secret}"}
    answer = await fetch(served, "POST", "/v1/responses", body, headers)
    assert answer.status == 200, answer.body
    cached: int = answer.json["usage"]["input_tokens_details"]["cached_tokens"]
    return cached


@pytest.mark.parametrize("name", ENGINES)
async def test_owners_do_not_share_what_an_engine_has_cached(name: str, tmp_path: Path) -> None:
    engine, field, make = ENGINES[name]
    async with make() as fake:
        async with serving(**flags(engine, fake, tmp_path)) as served:
            ada, bob = await key(served, "ada"), await key(served, "bob")
            fake.requests.clear()
            told = [await ask(served, secret) for secret in (ada, bob, ada)]
            salts = [body.get(field) for body in fake.requests if field in body]
        assert len(salts) == 3
        assert salts[0] == salts[2] != salts[1]
        assert all(isinstance(salt, str) and len(salt) == 43 for salt in salts)
        if engine != "chat":
            assert told[:2] == [0, 0]
            assert told[2] > 0
        # The same after a restart.
        async with serving(**flags(engine, fake, tmp_path)) as served:
            await ask(served, ada)
        assert fake.requests[-1][field] == salts[0]


@pytest.mark.parametrize(
    "owners, setting, is_salted",
    [
        (["ada"], "auto", False),
        (["ada"], "on", True),
        (["ada", "bob"], "off", False),
        (["ada", "bob"], "auto", True),
    ],
)
async def test_salt_is_sent_where_there_are_several_owners_or_the_operator_says_so(
    owners: list[str], setting: str, is_salted: bool, tmp_path: Path
) -> None:
    async with FakeVllm(reply) as fake:
        async with serving(**flags("vllm", fake, tmp_path, cache_salt=setting)) as served:
            secrets = [await key(served, owner) for owner in owners]
            await ask(served, secrets[0])
        assert ("cache_salt" in fake.requests[-1]) is is_salted


async def test_owner_that_comes_later_finds_nothing_of_the_one_who_was_alone(
    tmp_path: Path,
) -> None:
    async with FakeVllm(reply) as fake, serving(**flags("vllm", fake, tmp_path)) as served:
        ada = await key(served, "ada")
        assert await ask(served, ada) == 0
        assert await ask(served, ada) > 0
        bob = await key(served, "bob")
        assert await ask(served, bob) == 0
