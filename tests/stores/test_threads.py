"""Threads are held for an hour after their last use, for their owner alone; as bytes they are sealed, and whole."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from segue.seals.cipher import RingSeals, new_key
from segue.seams.history import Turn, ancestors
from segue.stores import threads as module
from segue.stores.memory_turns import SLOT_BYTES, Budget
from segue.stores.threads import UNUSED_S_MAX, Threads, open_chain, seal_chain
from tests.contracts.turns import (
    NASTY,
    OWNER,
    SAMPLES,
    item,
    make_chain,
    make_turn,
    meaning,
    rich_turn,
    said,
)

PLENTY = 1 << 30


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Kept:
    """Threads with a clock, and their budget."""

    def __init__(self, bytes_max: int = PLENTY) -> None:
        self.clock = Clock()
        self.budget = Budget(bytes_max)
        self.threads = Threads(self.budget, PLENTY, self.clock)
        self.limits: dict[str, int] = {}
        self.turns = self.open("key_a")

    def open(self, key_id: str, owner: str = OWNER) -> module.ThreadTurns:
        found = self.threads.open(owner, key_id, lambda: self.limits.get(key_id, 0))
        assert isinstance(found, module.ThreadTurns)
        return found


async def unstored(*ids: str, turns: module.ThreadTurns, owner: str = OWNER) -> list[Turn]:
    """A chain of unstored turns, saved one after the other."""
    chain: list[Turn] = []
    for turn_id in ids:
        parent = chain[-1] if chain else None
        turn = make_turn(turn_id, parent, owner=owner, is_stored=False)
        await turns.save(turn)
        chain.append(turn)
    return chain


async def test_turn_is_found_for_an_hour_after_its_last_use() -> None:
    kept = Kept()
    await unstored("a", turns=kept.turns)
    kept.clock.now += UNUSED_S_MAX - 1
    assert await kept.turns.find(OWNER, "a") is not None
    kept.clock.now += UNUSED_S_MAX - 1
    assert await kept.turns.find(OWNER, "a") is not None, "the hour begins again with each use"
    kept.clock.now += UNUSED_S_MAX + 1
    assert await kept.turns.find(OWNER, "a") is None
    assert kept.threads.bytes == 0


async def test_history_of_a_turn_that_is_used_stays_and_an_unused_fork_goes() -> None:
    kept = Kept()
    first, second = await unstored("a", "b", turns=kept.turns)
    await kept.turns.save(make_turn("fork", first, is_stored=False))
    for _ in range(3):
        kept.clock.now += UNUSED_S_MAX / 2
        assert await kept.turns.find(OWNER, "b") is not None
    assert await kept.turns.find(OWNER, "fork") is None
    found = await kept.turns.find(OWNER, "b")
    assert found is not None
    assert [turn.id for turn in ancestors(found)] == ["a", "b"]
    assert second.parent is first
    assert kept.threads.bytes == 2 * (1_000 + SLOT_BYTES)


async def test_what_is_too_old_goes_without_a_request() -> None:
    kept = Kept()
    await unstored("a", "b", turns=kept.turns)
    await unstored("c", turns=kept.open("key_c", "cleo"), owner="cleo")
    kept.clock.now += UNUSED_S_MAX + 1
    kept.threads.expire()
    assert kept.threads.bytes == kept.budget.bytes == 0


async def test_owners_are_apart_and_keys_of_one_owner_are_not() -> None:
    kept = Kept()
    await unstored("a", turns=kept.turns)
    assert await kept.open("key_e", "eve").find("eve", "a") is None
    other = kept.open("key_b")
    assert await other.find(OWNER, "a") is not None
    kept.threads.drop(OWNER, "key_a")
    assert await other.find(OWNER, "a") is None
    assert kept.budget.bytes == 0


async def test_turn_that_ends_after_its_key_was_revoked_is_not_kept() -> None:
    kept = Kept()
    kept.threads.drop(OWNER, "key_a")
    await unstored("a", turns=kept.turns)
    assert await kept.turns.find(OWNER, "a") is None
    assert kept.threads.bytes == kept.budget.bytes == 0


async def test_budget_and_the_limit_of_a_key_count_threads() -> None:
    kept = Kept()
    await unstored(*"abcdefgh", turns=kept.turns)
    assert kept.budget.bytes_of("key_a") == kept.threads.bytes == 8 * (1_000 + SLOT_BYTES)
    # Its limit is another one since.
    kept.limits["key_a"] = 4 * (1_000 + SLOT_BYTES)
    await kept.turns.save(make_turn("x", is_stored=False))
    assert kept.threads.bytes <= 4 * (1_000 + SLOT_BYTES)
    assert await kept.turns.find(OWNER, "h") is None
    assert await kept.turns.find(OWNER, "x") is not None


async def test_greedy_key_does_not_push_out_another_one() -> None:
    kept = Kept(bytes_max=10 * (1_000 + SLOT_BYTES))
    modest = kept.open("key_m", "mia")
    await unstored("m", turns=modest, owner="mia")
    for number in range(40):
        await kept.turns.save(make_turn(f"t{number}", is_stored=False))
    assert await modest.find("mia", "m") is not None
    assert kept.threads.bytes <= 10 * (1_000 + SLOT_BYTES)


async def test_turn_of_another_worker_is_kept_here_once_it_came() -> None:
    kept = Kept()
    asked: list[str] = []
    chain = make_chain(3, is_stored=False)

    async def fetch(owner: str, turn_id: str) -> Turn | None:
        asked.append(turn_id)
        return chain[-1] if (owner, turn_id) == (OWNER, "t2") else None

    kept.threads.fetch = fetch
    for _ in range(2):
        found = await kept.turns.find(OWNER, "t2")
        assert found is not None
        assert [turn.id for turn in ancestors(found)] == ["t0", "t1", "t2"]
    assert asked == ["t2"]
    assert await kept.turns.find(OWNER, "none") is None
    assert kept.threads.held(OWNER, "t1") is None, "it came along, and has no name here"


# --- as bytes -------------------------------------------------------------------------------------


@pytest.fixture
def seals() -> RingSeals:
    return RingSeals([new_key()])


def moved(turn: Turn, seals: RingSeals) -> Turn:
    sealed = seal_chain(seals, turn)
    assert sealed is not None
    found = open_chain(seals, turn.owner, sealed)
    assert found is not None
    return found


def test_chain_comes_back_to_the_byte_and_to_the_id(seals: RingSeals) -> None:
    items = [item(raw) for raw in SAMPLES.values()]
    first = make_turn("a", given=items, wrote=[said("x", "assistant")], is_stored=False)
    second = replace(rich_turn(), parent=first, parent_id="a", is_stored=False)
    last = make_turn("c", second, given=[said(text) for text in NASTY.values()], is_stored=False)
    found = moved(last, seals)
    assert list(map(meaning, ancestors(found))) == list(map(meaning, ancestors(last)))
    assert all(turn.is_whole and not turn.is_stored for turn in ancestors(found))


def test_long_texts_of_a_chain_travel_once(seals: RingSeals) -> None:
    tools = b'[{"type":"function","name":"' + bytes(range(97, 122)) * 800 + b'"}]'
    head = (b'"be brief"', tools)
    chain = [replace(turn, head_sent=head) for turn in make_chain(50, is_stored=False, tools=tools)]
    linked: Turn | None = None
    for turn in chain:
        linked = replace(turn, parent=linked)
    assert linked is not None
    found = moved(linked, seals)
    assert all(turn.head_sent == head for turn in ancestors(found))
    sealed = seal_chain(seals, linked)
    assert sealed is not None
    assert len(sealed) < 2 * len(tools)


def test_only_the_owner_and_the_same_seal_keys_open_a_chain(seals: RingSeals) -> None:
    sealed = seal_chain(seals, make_turn("a", given=[said("a secret")], is_stored=False))
    assert sealed is not None
    assert b"secret" not in sealed
    assert open_chain(seals, "eve", sealed) is None
    assert open_chain(RingSeals([new_key()]), OWNER, sealed) is None
    assert open_chain(seals, OWNER, sealed[:-1]) is None


@pytest.mark.parametrize(
    "body", [b"", b"x", zlib.compress(b"x"), zlib.compress(b"\x92\x91\x01\x80")]
)
def test_chain_that_another_version_wrote_in_another_way_is_not_there(
    seals: RingSeals, body: bytes
) -> None:
    assert open_chain(seals, OWNER, seals.seal_bytes(OWNER, body)) is None


def test_chain_that_is_too_long_stays(seals: RingSeals, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = make_turn("a", given=[said("x" * 10_000)], is_stored=False)
    monkeypatch.setattr(module, "HELD_BYTES_MAX", 999)
    assert seal_chain(seals, turn) is None
    monkeypatch.setattr(module, "HELD_BYTES_MAX", PLENTY)
    monkeypatch.setattr(module, "SENT_BYTES_MAX", 100)
    assert seal_chain(seals, turn) is None


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from(["save", "find"]), st.floats(0, 4_000)),
        max_size=40,
    )
)
async def test_turn_is_found_exactly_while_it_or_a_descendant_was_used(
    steps: list[tuple[int, str, float]],
) -> None:
    """Against a model: the last use of a turn is a use of all its ancestors."""
    kept = Kept()
    made: list[Turn] = []
    used: dict[str, float] = {}

    def is_there(turn: Turn) -> bool:
        below = [other for other in made if turn in ancestors(other)]
        return any(kept.clock.now - used[other.id] <= UNUSED_S_MAX for other in below)

    def use(turn: Turn) -> None:
        used[turn.id] = kept.clock.now

    gone: set[str] = set()
    for number, verb, seconds in steps:
        kept.clock.now += seconds
        gone |= {turn.id for turn in made if not is_there(turn)}
        left = [turn for turn in made if turn.id not in gone]
        if verb == "save" or not left:
            parent = left[number % len(left)] if left and number else None
            turn = make_turn(f"t{len(made)}", parent, is_stored=False)
            await kept.turns.save(turn)
            made.append(turn)
            use(turn)
        else:
            turn = left[number % len(left)]
            assert await kept.turns.find(OWNER, turn.id) is turn
            # Of a turn with descendants only those are used: they hold it.
            if not any(other.parent is turn and other.id not in gone for other in made):
                use(turn)
    for turn in made:
        is_found = await kept.turns.find(OWNER, turn.id) is not None
        assert is_found == (turn.id not in gone)
