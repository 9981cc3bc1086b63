"""What every `IdempotencyKeys` promises: one turn for each key, whoever comes first."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from segue.seams.store import Claim
from tests.contracts.stores import KINDS, SHARED, Stores, open_stores
from tests.contracts.turns import OWNER, make_turn


@pytest.fixture(params=KINDS)
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async with open_stores(request.param, request, tmp_path) as open_one:
        yield await open_one()


def claim(turn_id: str, key: str = "key", owner: str = OWNER, digest: bytes = b"d") -> Claim:
    return Claim(owner, key, turn_id, digest, is_stored=True)


async def test_first_to_come_holds_the_key(stores: Stores) -> None:
    first = claim("a")
    assert await stores.idempotency_keys.claim(first) == first
    assert await stores.idempotency_keys.claim(claim("b")) == first
    assert await stores.idempotency_keys.claim(first) == first


async def test_digest_of_the_holder_is_told(stores: Stores) -> None:
    await stores.idempotency_keys.claim(claim("a", digest=b"one"))
    assert (await stores.idempotency_keys.claim(claim("b", digest=b"two"))).digest == b"one"


async def test_of_many_at_once_one_wins(stores: Stores) -> None:
    claims = [claim(f"t{number}") for number in range(50)]
    holders = await asyncio.gather(*map(stores.idempotency_keys.claim, claims))
    assert len({holder.turn_id for holder in holders}) == 1


async def test_owners_and_keys_do_not_meet(stores: Stores) -> None:
    keys = ["key", "Key", "key ", "", "\0", "\ud800", "k" * 100_000, "ключ"]
    mine = [claim(f"mine {key[:9]!a}", key) for key in keys]
    theirs = [claim(f"theirs {key[:9]!a}", key, "eve") for key in keys]
    for one in mine + theirs:
        assert await stores.idempotency_keys.claim(one) == one
    for one in mine + theirs:
        assert (await stores.idempotency_keys.claim(claim("late", one.key, one.owner))) == one


async def test_key_is_free_again_after_a_day(stores: Stores) -> None:
    await stores.idempotency_keys.claim(claim("a"))
    await stores.age(86_000)
    assert (await stores.idempotency_keys.claim(claim("b"))).turn_id == "a"
    await stores.age(1_000)
    assert (await stores.idempotency_keys.claim(claim("b"))).turn_id == "b"
    assert (await stores.idempotency_keys.claim(claim("c"))).turn_id == "b"


async def test_key_goes_with_its_turn(stores: Stores) -> None:
    await stores.turns.save(make_turn("a"))
    await stores.idempotency_keys.claim(claim("a"))
    await stores.idempotency_keys.claim(claim("other", "other key"))
    await stores.turns.delete(OWNER, "a")
    assert (await stores.idempotency_keys.claim(claim("b"))).turn_id == "b"
    assert (await stores.idempotency_keys.claim(claim("c", "other key"))).turn_id == "other"


async def test_key_of_a_refused_turn_is_free_again(stores: Stores) -> None:
    refused = claim("a")
    await stores.idempotency_keys.claim(refused)
    await stores.idempotency_keys.release(claim("b"))
    assert (await stores.idempotency_keys.claim(claim("b"))).turn_id == "a", (
        "only its holder lets go of it"
    )
    await stores.idempotency_keys.release(refused)
    await stores.idempotency_keys.release(refused)
    assert (await stores.idempotency_keys.claim(claim("b"))).turn_id == "b"


@pytest.mark.parametrize("kind", SHARED)
async def test_two_processes_agree(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with open_stores(kind, request, tmp_path) as open_one:
        here, there = await open_one(), await open_one()
        for number in range(20):
            key = f"key {number}"
            holders = await asyncio.gather(
                here.idempotency_keys.claim(claim("here", key)),
                there.idempotency_keys.claim(claim("there", key)),
            )
            assert holders[0] == holders[1]


@pytest.mark.parametrize("kind", SHARED)
async def test_key_of_a_turn_that_never_was_dies_with_its_process(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with open_stores(kind, request, tmp_path) as open_one:
        dead, alive = await open_one(), await open_one()
        await dead.idempotency_keys.claim(claim("lost"))
        await dead.turns.save(make_turn("saved"))
        await dead.idempotency_keys.claim(claim("saved", "other key"))
        await alive.maintenance.recover()
        assert (await alive.idempotency_keys.claim(claim("mine"))).turn_id == "lost", (
            "it may still run"
        )
        await dead.crash()
        await alive.maintenance.recover()
        assert (await alive.idempotency_keys.claim(claim("mine"))).turn_id == "mine"
        assert (await alive.idempotency_keys.claim(claim("mine", "other key"))).turn_id == "saved"
