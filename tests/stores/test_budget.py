"""Whose history goes when memory is short: never that of somebody who holds less than a fair part."""

from __future__ import annotations

import time
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from segue.stores.memory_turns import Budget, MemoryTurns
from tests.contracts.turns import OWNER, make_turn

PLENTY = 1 << 30


class Pile:
    """A cache that is a list of sizes, the oldest first, each with its last use."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.uses: list[float] = []

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    def next_use(self) -> float:
        return self.uses[0] if self.uses else inf

    def shed(self) -> None:
        del self.sizes[0], self.uses[0]


def put(budget: Budget, pile: Pile, size: int) -> None:
    pile.sizes.append(size)
    pile.uses.append(time.monotonic())
    budget.settle(pile)


def test_greedy_key_pays_for_itself() -> None:
    budget = Budget(100)
    modest, greedy = Pile(), Pile()
    budget.add(modest, "ada", None)
    budget.add(greedy, "eve", int)
    put(budget, modest, 30)
    for _ in range(20):
        put(budget, greedy, 10)
    assert modest.sizes == [30]
    assert greedy.bytes == 70


def test_longest_unused_connection_of_a_key_goes_first() -> None:
    budget = Budget(1_000)
    piles = [Pile() for _ in range(3)]
    for pile in piles:
        budget.add(pile, "ada", lambda: 30)
        put(budget, pile, 10)
    piles[0].uses = [time.monotonic()]
    put(budget, piles[2], 10)
    assert [pile.bytes for pile in piles] == [10, 0, 20]


async def test_chain_in_use_stays_while_another_cache_holds_older_ones() -> None:
    """Also where that other cache, as the one of all threads, is used all the time."""
    budget = Budget(60_000)
    threads, socket = MemoryTurns(PLENTY), MemoryTurns(PLENTY)
    for cache in (threads, socket):
        budget.add(cache, "ada", None)
    for number in range(30):
        await threads.save(make_turn(f"t{number}", node_bytes=1_000))
    await socket.save(make_turn("mine", node_bytes=1_000))
    for number in range(30, 60):
        await threads.save(make_turn(f"t{number}", node_bytes=1_000))
        assert socket.held(OWNER, "mine") is not None
    assert threads.held(OWNER, "t0") is None
    assert budget.bytes <= 60_000


def test_key_whose_limit_has_shrunk_lets_go() -> None:
    budget = Budget(1_000)
    pile, limit = Pile(), [100]
    budget.add(pile, "ada", lambda: limit[0])
    for _ in range(9):
        put(budget, pile, 10)
    limit[0] = 40
    budget.trim("eve")
    assert pile.bytes == 90
    budget.trim("ada")
    assert pile.bytes == 40


def test_closed_connection_counts_no_longer() -> None:
    budget = Budget(100)
    pile = Pile()
    budget.add(pile, "ada", None)
    put(budget, pile, 60)
    budget.remove(pile)
    budget.remove(pile)
    assert budget.bytes == 0
    put(budget, pile, 60)
    assert budget.bytes == 0, "a turn that ends after its connection"


steps = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=60)


@settings(deadline=None)
@given(steps, st.integers(10, 120), st.integers(0, 50))
def test_whatever_happens_all_limits_hold_and_the_modest_lose_nothing(
    puts: list[tuple[int, int]], bytes_max: int, key_max: int
) -> None:
    budget = Budget(bytes_max)
    piles = [Pile() for _ in range(6)]
    for n, pile in enumerate(piles):
        budget.add(pile, f"k{n % 3}", lambda: key_max)
    for which, size in puts:
        before = {n: sum(p.bytes for p in piles[n::3]) for n in range(3)}
        put(budget, piles[which], size)
        after = {n: sum(p.bytes for p in piles[n::3]) for n in range(3)}
        assert budget.bytes == sum(after.values()) <= bytes_max
        assert all(held <= key_max for held in after.values()) or not key_max
        for key in range(3):
            if key != which % 3 and before[key] <= bytes_max / 3:
                assert after[key] == before[key]


async def test_owners_of_one_cache_keep_their_part() -> None:
    turns = MemoryTurns(60_000, stored_only=True)
    for number in range(4):
        await turns.save(make_turn(f"a{number}", owner="ada", node_bytes=1_000))
    for number in range(200):
        await turns.save(make_turn(f"e{number}", owner="eve", node_bytes=1_000))
    assert turns.bytes <= 60_000
    for number in range(4):
        assert turns.held("ada", f"a{number}") is not None
    assert turns.held("eve", "e199") is not None
    assert turns.held("eve", "e0") is None


async def test_caches_at_their_limit_are_looked_at_once_for_many_saves() -> None:
    """Each look costs as much as there are connections, or owners."""

    class CountedBudget(Budget):
        looks = 0

        def _count_all(self) -> None:
            self.looks += 1
            super()._count_all()

    budget = CountedBudget(20_000_000)
    piles = [Pile() for _ in range(100)]
    for number, pile in enumerate(piles):
        budget.add(pile, f"key{number % 10}", None)
        put(budget, pile, 200_000)
    assert budget.looks == 0
    for number in range(1_500):
        put(budget, piles[number % 100], 1_000)
        assert budget.bytes <= 20_000_000
    assert 0 < budget.looks <= 15


async def test_cache_of_many_owners_at_its_limit_sheds_for_many_saves_at_once() -> None:
    turns = MemoryTurns(2_000_000, stored_only=True)
    size = 0
    falls = 0
    for number in range(3_000):
        await turns.save(make_turn(f"t{number}", owner=f"o{number % 500}", node_bytes=400))
        falls += turns.bytes < size
        size = turns.bytes
        assert size <= 2_000_000
    assert 0 < falls <= 200
    assert turns.held("o499", "t2999") is not None
