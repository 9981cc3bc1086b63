"""What every `Keys` promises: a key is found by its digest until it is taken back, by everybody."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec import structs

from segue.limits import Key, KeyLimits
from tests.contracts.stores import KINDS, SHARED, Stores, open_stores

LIMITS = KeyLimits(requests_per_min=60, state_bytes_max=1 << 40)


@pytest.fixture(params=KINDS)
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async with open_stores(request.param, request, tmp_path) as open_one:
        yield await open_one()


def key(number: int = 0, owner: str = "ada") -> Key:
    return Key(
        f"key_{number}", "Ключ 🗝", owner, ("responses", "models"), LIMITS, "0a0b", 1_700 + number
    )


async def test_key_is_found_by_its_digest_as_it_was_given_out(stores: Stores) -> None:
    await stores.keys.add(key(), "d0")
    assert await stores.keys.find(["d0"]) == {"d0": key()}
    assert await stores.keys.given_out() == [key()]


async def test_many_are_found_at_once_and_strangers_are_not(stores: Stores) -> None:
    for number in range(5):
        await stores.keys.add(key(number), f"d{number}")
    found = await stores.keys.find(["d1", "d3", "d9", "", "' OR 1=1 --", '"]'])
    assert {digest: one.id for digest, one in found.items()} == {"d1": "key_1", "d3": "key_3"}
    assert await stores.keys.find([]) == {}
    assert [one.id for one in await stores.keys.given_out()] == [f"key_{n}" for n in range(5)]


async def test_revoked_key_is_nobodys_and_stays_on_the_list(stores: Stores) -> None:
    await stores.keys.add(key(0), "d0")
    await stores.keys.add(key(1), "d1")
    assert await stores.keys.revoke("key_0")
    assert await stores.keys.find(["d0", "d1"]) == {"d1": key(1)}
    revoked, kept = await stores.keys.given_out()
    assert revoked.revoked_at is not None
    assert structs.replace(revoked, revoked_at=None) == key(0)
    assert kept == key(1)


async def test_expired_key_is_nobodys_and_stays_on_the_list(stores: Stores) -> None:
    soon = int(stores.now()) + 1_000
    good = structs.replace(key(0), expires_at=soon, secret_start="sk-segue-abcd")
    over = structs.replace(key(1), expires_at=soon - 2_000)
    await stores.keys.add(good, "d0")
    await stores.keys.add(over, "d1")
    assert await stores.keys.find(["d0", "d1"]) == {"d0": good}
    assert await stores.keys.given_out() == [good, over]


async def test_last_use_is_kept(stores: Stores) -> None:
    await stores.keys.add(key(0), "d0")
    await stores.keys.add(key(1), "d1")
    await stores.keys.note_use(["key_1", "key_9"])
    never, used = await stores.keys.given_out()
    assert never.used_at is None
    assert used.used_at is not None
    assert structs.replace(used, used_at=None) == key(1)


async def test_revoking_twice_or_nobody_says_so(stores: Stores) -> None:
    await stores.keys.add(key(), "d0")
    assert await stores.keys.revoke("key_0")
    for name in ("key_0", "key_9", "", "\0", "\ud800"):
        assert not await stores.keys.revoke(name)


async def test_limits_change_while_the_key_is_valid(stores: Stores) -> None:
    await stores.keys.add(key(), "d0")
    limits = KeyLimits(lanes_max=3)
    assert await stores.keys.limit("key_0", limits)
    assert await stores.keys.find(["d0"]) == {"d0": structs.replace(key(), limits=limits)}
    for name in ("key_9", "", "\0", "\ud800"):
        assert not await stores.keys.limit(name, limits)
    await stores.keys.revoke("key_0")
    assert not await stores.keys.limit("key_0", LIMITS)


async def test_adding_a_key_again_does_not_bring_it_back(stores: Stores) -> None:
    await stores.keys.add(key(), "d0")
    await stores.keys.revoke("key_0")
    await stores.keys.add(key(), "d0")
    assert await stores.keys.find(["d0"]) == {}


@pytest.mark.parametrize("kind", SHARED)
async def test_other_processes_see_keys_come_and_go(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with open_stores(kind, request, tmp_path) as open_one:
        here, there = await open_one(), await open_one()
        await here.keys.add(key(), "d0")
        assert await there.keys.find(["d0"]) == {"d0": key()}
        assert await there.keys.revoke("key_0")
        assert await here.keys.find(["d0"]) == {}


async def test_digest_of_an_expired_key_says_since_when(stores: Stores) -> None:
    now = int(stores.now())
    old = structs.replace(key(1), expires_at=now - 60)
    await stores.keys.add(key(0), "digest")
    await stores.keys.add(old, "old")
    gone = structs.replace(old, id="key_gone")
    await stores.keys.add(gone, "gone")
    await stores.keys.revoke("key_gone")
    assert await stores.keys.expired(["digest", "unknown", "gone"]) is None
    assert await stores.keys.expired(["unknown", "old"]) == now - 60


async def test_limits_of_every_kind_are_kept(stores: Stores) -> None:
    await stores.keys.add(key(), "digest")
    limits = KeyLimits(1, 2, 3, 4, 5, 6, 2**40, 8, 9, 10, ("gpt-*", "ü"))
    assert await stores.keys.limit("key_0", limits)
    assert (await stores.keys.find(["digest"]))["digest"].limits == limits
