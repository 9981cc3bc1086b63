"""The idempotency keys of unstored turns: one worker at a time holds each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from segue.cluster.idempotency import SharedIdempotencyKeys
from segue.cluster.local import LocalBus
from segue.cluster.peers import Peers
from segue.seams.store import Claim
from segue.stores.memory import MemoryIdempotencyKeys
from tests.support import until


def claim(turn_id: str, key: str = "key", owner: str = "ada", *, is_stored: bool = False) -> Claim:
    return Claim(owner, key, turn_id, b"digest", is_stored)


async def settled() -> None:
    """The messages that are on their way have arrived."""
    for _ in range(3):
        await asyncio.sleep(0)


class Fleet:
    """Three workers that know each other."""

    def __init__(self) -> None:
        bus = LocalBus()
        self.peers = [Peers(bus, "group") for _ in range(3)]
        self.exits = [AsyncExitStack() for _ in self.peers]
        self.idempotency_keys = [
            SharedIdempotencyKeys(MemoryIdempotencyKeys(), worker) for worker in self.peers
        ]

    async def leave(self, worker: int) -> None:
        """One is gone, and the others know it."""
        await self.exits[worker].aclose()
        rest = [one for place, one in enumerate(self.peers) if place != worker]
        await until(lambda: all(len(one.others) == 1 for one in rest))

    async def holder(self, worker: int, one: Claim) -> str:
        return (await self.idempotency_keys[worker].claim(one)).turn_id


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    async with AsyncExitStack() as stack:
        for worker, leaving in zip(made.peers, made.exits, strict=True):
            await stack.enter_async_context(leaving)
            await leaving.enter_async_context(worker.joined())
        await until(lambda: all(len(one.others) == 2 for one in made.peers))
        yield made


async def test_key_that_one_worker_holds_is_taken_everywhere(fleet: Fleet) -> None:
    assert await fleet.holder(0, claim("b")) == "b"
    assert await fleet.holder(1, claim("a")) == "b"
    assert await fleet.holder(2, claim("c")) == "b"
    assert await fleet.holder(0, claim("d")) == "b"
    assert await fleet.holder(1, claim("e", owner="eve")) == "e"
    assert await fleet.holder(1, claim("f", key="another \ud800")) == "f"


async def test_of_many_who_ask_at_once_one_has_it(fleet: Fleet) -> None:
    for number in range(30):
        asked = [claim(f"{place * 7 % 12:02}", f"key {number}") for place in range(12)]
        holders = await asyncio.gather(
            *(fleet.holder(place % 3, one) for place, one in enumerate(asked))
        )
        own = [
            one.turn_id for one, holder in zip(asked, holders, strict=True) if holder == one.turn_id
        ]
        assert len(own) == 1
        assert await fleet.holder(number % 3, claim("late", f"key {number}")) == own[0]


async def test_key_that_was_let_go_of_is_free_everywhere(fleet: Fleet) -> None:
    first = claim("a")
    assert await fleet.holder(0, first) == "a"
    await fleet.idempotency_keys[0].release(first)
    await settled()
    assert await fleet.holder(1, claim("b")) == "b"
    assert await fleet.holder(0, claim("c")) == "b"


async def test_key_that_holders_let_go_of_while_others_ask_is_free_everywhere(fleet: Fleet) -> None:
    async def claim_and_release(worker: int, one: Claim, steps: int) -> None:
        for _ in range(steps):
            await asyncio.sleep(0)
        if await fleet.holder(worker, one) == one.turn_id:
            await fleet.idempotency_keys[worker].release(one)

    draw = random.Random(14)
    for number in range(200):
        asked = [claim(f"{draw.random()}", f"key {number}") for _ in range(6)]
        await asyncio.gather(
            *(
                claim_and_release(place % 3, one, draw.randrange(8))
                for place, one in enumerate(asked)
            )
        )
        for worker in range(3):
            late = claim(f"late {worker}", f"key {number}")
            assert await fleet.holder(worker, late) == late.turn_id
            await fleet.idempotency_keys[worker].release(late)
            await settled()


async def test_keys_of_a_worker_that_has_died_are_free(fleet: Fleet) -> None:
    assert await fleet.holder(0, claim("a")) == "a"
    assert await fleet.holder(1, claim("b")) == "a"
    await fleet.leave(0)
    assert await fleet.holder(1, claim("b")) == "b"
    assert await fleet.holder(2, claim("c")) == "b"


async def test_keys_of_stored_turns_are_the_stores(fleet: Fleet) -> None:
    """Each of these stores is its worker's own, so both have it."""
    assert await fleet.holder(0, claim("a", is_stored=True)) == "a"
    assert await fleet.holder(1, claim("b", is_stored=True)) == "b"
