"""Memory holds the turns that fit, counts what it holds, and drops the coldest chain first."""

import asyncio
import gc
import weakref

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from segue.seams.history import Turn, Warm
from segue.seams.prompt import NO_TOKENS, Head
from segue.stores.memory_turns import SLOT_BYTES, Budget, MemoryTurns
from tests.contracts.turns import OWNER, make_chain, make_turn

NODE = SLOT_BYTES + 1_000
PLENTY = 1 << 30
WARM = Warm("dialect/1", Head(), NO_TOKENS)


async def held(turns: MemoryTurns, *ids: str) -> list[str]:
    return [turn_id for turn_id in ids if await turns.find(OWNER, turn_id)]


async def test_the_very_object_comes_back_with_its_warmth() -> None:
    turns = MemoryTurns(PLENTY)
    root = replace(make_turn("root", is_stored=False), warm=WARM)
    child = replace(make_turn("child", root, is_stored=False), warm=WARM)
    await turns.save(root)
    await turns.save(child)
    assert await turns.find(OWNER, "child") is child
    assert await turns.read(OWNER, "child") is child
    assert child.parent is root


async def test_shared_ancestors_are_counted_once() -> None:
    turns = MemoryTurns(PLENTY)
    chain = make_chain(10)
    await turns.save(chain[-1])
    assert turns.bytes == 10 * NODE
    await turns.save(make_turn("fork", chain[4]))
    await turns.save(chain[-1])
    assert turns.bytes == 11 * NODE


async def test_ancestors_of_a_saved_turn_can_be_forked() -> None:
    turns = MemoryTurns(PLENTY)
    chain = make_chain(3)
    await turns.save(chain[2])
    assert await turns.find(OWNER, "t0") is chain[0]


async def test_coldest_line_is_peeled_from_its_tip() -> None:
    turns = MemoryTurns(6 * NODE)
    a, b = make_chain(3, prefix="a"), make_chain(3, prefix="b")
    for pair in zip(a, b, strict=True):
        for turn in pair:
            await turns.save(turn)
    await turns.find(OWNER, "a2")
    await turns.save(make_turn("a3", a[2]))
    assert await held(turns, "b0", "b1", "b2") == ["b0", "b1"]
    await turns.save(make_turn("a4", await turns.find(OWNER, "a3")))
    await turns.save(make_turn("a5", await turns.find(OWNER, "a4")))
    assert await held(turns, "b0", "b1", "b2") == []
    assert await held(turns, "a0", "a1", "a2", "a3", "a4", "a5") == [f"a{n}" for n in range(6)]
    assert turns.bytes == 6 * NODE


async def test_turn_larger_than_the_budget_is_not_held() -> None:
    turns = MemoryTurns(NODE)
    await turns.save(make_turn("small"))
    await turns.save(make_turn("large", node_bytes=10_000))
    assert await turns.find(OWNER, "large") is None
    assert turns.bytes <= NODE


async def test_evicted_turns_are_freed() -> None:
    turns = MemoryTurns(2 * NODE)
    await turns.save(make_turn("old"))
    found = await turns.find(OWNER, "old")
    assert found is not None
    ids = weakref.ref(found.rounds[0].ids[0])
    del found
    await turns.save(make_turn("a"))
    await turns.save(make_turn("b"))
    gc.collect()
    assert ids() is None


async def test_dropped_history_counts_as_long_as_a_running_turn_stands_on_it() -> None:
    turns = MemoryTurns(PLENTY)
    parent: Turn | None = make_chain(10)[-1]
    await turns.save(parent)
    turns.shrink(5 * NODE)
    assert (turns.bytes, turns.dropped.bytes) == (5 * NODE, 5 * 1_000)
    # Its child brings it back.
    await turns.save(make_turn("child", parent))
    assert (turns.bytes, turns.dropped.bytes) == (11 * NODE, 0)
    turns.close()
    assert turns.dropped.bytes == 0, "what comes later is not counted any more"


async def test_dropped_turn_does_not_count_while_another_cache_holds_it_or_once_it_is_free() -> (
    None
):
    budget = Budget(PLENTY)
    caches = [MemoryTurns(PLENTY), MemoryTurns(PLENTY)]
    parent: Turn | None = make_turn("parent")
    for cache in caches:
        budget.add(cache, "ada", None)
        await cache.save(parent)
    caches[0].shrink(NODE)
    assert budget.dropped.bytes == 0
    caches[1].close()
    assert budget.dropped.bytes == 1_000
    del cache, caches
    assert budget.dropped.bytes == 1_000
    parent = None
    assert (budget.dropped.bytes, parent) == (0, None)


async def test_forgotten_turn_is_not_found_and_its_child_goes_on() -> None:
    turns = MemoryTurns(PLENTY)
    root, child = make_chain(2)
    await turns.save(child)
    turns.forget(OWNER, "t0")
    assert await turns.find(OWNER, "t0") is None
    found = await turns.find(OWNER, "t1")
    assert found is child
    assert found.is_whole
    assert turns.bytes == 2 * NODE, "the child still holds it"
    turns.forget(OWNER, "t1")
    assert turns.bytes == 0
    turns.forget(OWNER, "t1")
    await turns.save(child)
    assert await turns.find(OWNER, "t0") is root


async def test_forgetting_touches_one_owner_only() -> None:
    turns = MemoryTurns(PLENTY)
    await turns.save(make_turn("t"))
    turns.forget("eve", "t")
    assert await turns.find(OWNER, "t") is not None


async def test_deletion_takes_the_warmth_of_descendants() -> None:
    """A warm prompt contains the tokens of all that came before it."""
    turns = MemoryTurns(PLENTY)
    await turns.save(replace(make_chain(3)[-1], warm=WARM))
    assert await turns.delete(OWNER, "t0")
    found = await turns.find(OWNER, "t2")
    assert found is not None
    assert found.warm is None
    assert found.parent is not None
    assert found.parent.parent is None
    assert turns.bytes == 2 * NODE


async def test_connection_cache_keeps_an_unstored_turn_that_came_along_unnamed() -> None:
    turns = MemoryTurns(PLENTY)
    secret = make_turn("secret", is_stored=False)
    child = make_turn("child", secret)
    await turns.save(child)
    assert await turns.find(OWNER, "child") is child
    assert await turns.find(OWNER, "secret") is None
    assert turns.bytes == 2 * NODE


async def test_stored_only_keeps_nothing_unstored() -> None:
    turns = MemoryTurns(PLENTY, stored_only=True)
    secret = make_turn("secret", is_stored=False)
    await turns.save(secret)
    assert turns.bytes == 0
    await turns.save(replace(make_turn("child", secret), warm=WARM))
    found = await turns.find(OWNER, "child")
    assert found is not None
    assert (found.parent, found.warm, found.is_whole) == (None, None, False)


verbs = st.sampled_from(["save", "save", "save", "find", "forget", "delete"])


@settings(deadline=None)
@given(
    st.lists(st.tuples(verbs, st.integers(0, 15), st.integers(0, 3_000)), max_size=60),
    st.integers(0, 12),
    st.booleans(),
)
def test_any_history_keeps_the_books_right(
    steps: list[tuple[str, int, int]], nodes_max: int, stored_only: bool
) -> None:
    """Whatever happens: the sum is right, the budget holds, and every held turn's past is held."""
    asyncio.run(live(steps, nodes_max * NODE, stored_only))


async def live(steps: list[tuple[str, int, int]], bytes_max: int, stored_only: bool) -> None:
    turns = MemoryTurns(bytes_max, stored_only=stored_only)
    made: list[Turn] = []
    for verb, pick, weight in steps:
        turn = made[pick % len(made)] if made else None
        if verb == "save":
            parent = turn if weight % 4 else None
            turn = make_turn(
                f"t{len(made)}", parent, is_stored=weight % 3 > 0, node_bytes=weight, given=[]
            )
            made.append(turn)
            await turns.save(turn)
        elif turn is None:
            continue
        elif verb == "find":
            await turns.find(OWNER, turn.id)
        elif verb == "forget":
            turns.forget(OWNER, turn.id)
        else:
            await turns.delete(OWNER, turn.id)
        check(turns, bytes_max)


def check(turns: MemoryTurns, bytes_max: int) -> None:
    slots = turns._slots
    assert turns.bytes == sum(slot.bytes for slot in slots.values()) <= bytes_max
    leaves = {(owner, tip) for owner, tips in turns._leaves.items() for tip in tips}
    assert leaves == {key for key, slot in slots.items() if not slot.children}
    assert sum(turns._owner_bytes.values()) == turns.bytes
    for tips in turns._leaves.values():
        assert list(tips.values()) == sorted(tips.values())
    for (owner, _), slot in slots.items():
        parent = slot.turn.parent
        if parent is not None:
            above = slots[(owner, parent.id)]
            assert above.turn is parent
            assert slot.turn.id in above.children
        assert slot.is_named or slot.children
    dropped = turns.dropped
    assert set(dropped._caches) == {id(slot.turn) for slot in slots.values()}
    assert set(dropped._caches).isdisjoint(dropped._used)
    assert dropped.bytes == sum(turn.bytes for one in dropped._used.values() if (turn := one()))
