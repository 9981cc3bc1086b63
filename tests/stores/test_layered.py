"""Near, then far: what is kept where, and what is said when far does not answer."""

import asyncio

import pytest
from msgspec.structs import replace

from segue.errors import Unavailable
from segue.seams.history import Owner, Turn
from segue.seams.store import Claim
from segue.stores.layered import LayeredIdempotencyKeys
from segue.stores.memory import MemoryIdempotencyKeys
from segue.stores.memory_turns import LayeredTurns, MemoryTurns
from tests.contracts.turns import OWNER, make_chain, make_turn

PLENTY = 1 << 30


class FarTurns:
    """A far store in memory that gives turns alone as a database does, writes down what it is
    asked, can be out of reach, and can be held up."""

    def __init__(self) -> None:
        self.turns = MemoryTurns(PLENTY, stored_only=True)
        self.asked: list[str] = []
        self.is_down = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_asked = asyncio.Event()

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        await self._ask("find")
        return await self.turns.find(owner, turn_id)

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        found = await self.turns.read(owner, turn_id)
        await self._ask("read")
        return replace(found, parent=None, is_whole=found.parent_id is None) if found else None

    async def save(self, turn: Turn) -> None:
        await self._ask("save")
        await self.turns.save(turn)

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        self.asked.append("delete")
        return await self.turns.delete(owner, turn_id)

    async def _ask(self, verb: str) -> None:
        self.asked.append(verb)
        self.is_asked.set()
        if self.is_down:
            raise Unavailable("down")
        await self.gate.wait()


@pytest.fixture
def near() -> MemoryTurns:
    return MemoryTurns(PLENTY)


@pytest.fixture
def far() -> FarTurns:
    return FarTurns()


@pytest.fixture
def turns(near: MemoryTurns, far: FarTurns) -> LayeredTurns:
    return LayeredTurns(near, far)


async def test_turn_found_far_is_kept_near(
    turns: LayeredTurns, near: MemoryTurns, far: FarTurns
) -> None:
    turn = make_turn("t")
    await far.save(turn)
    assert await turns.find(OWNER, "none") is None
    assert near.held(OWNER, "t") is None
    assert await turns.find(OWNER, "t") == turn
    assert near.held(OWNER, "t") == turn


async def test_near_turn_never_asks_far(turns: LayeredTurns, far: FarTurns) -> None:
    turn = make_turn("t", is_stored=False)
    await turns.save(turn)
    far.is_down = True
    assert await turns.find(OWNER, "t") is turn
    assert far.asked == []


async def test_unreachable_far_store_is_not_an_absent_turn(
    turns: LayeredTurns, far: FarTurns
) -> None:
    far.is_down = True
    for verb in (turns.find, turns.read):
        with pytest.raises(Unavailable):
            await verb(OWNER, "t")


async def test_turn_that_far_refused_is_not_near_either(
    turns: LayeredTurns, near: MemoryTurns, far: FarTurns
) -> None:
    far.is_down = True
    with pytest.raises(Unavailable):
        await turns.save(make_turn("t"))
    assert near.bytes == 0


async def test_child_found_far_stands_on_the_near_parent(
    turns: LayeredTurns, near: MemoryTurns, far: FarTurns
) -> None:
    chain = make_chain(3)
    await far.save(chain[2])
    await near.save(chain[1])
    far.asked.clear()
    found = await turns.find(OWNER, "t2")
    assert found is not None
    assert found.parent is chain[1]
    assert found.is_whole
    assert far.asked == ["read"]
    assert await near.find(OWNER, "t2") is found


async def test_stored_child_is_whole_only_where_its_unstored_parent_is(
    turns: LayeredTurns, near: MemoryTurns, far: FarTurns
) -> None:
    secret = make_turn("secret", is_stored=False)
    child = make_turn("child", secret)
    await turns.save(secret)
    await turns.save(child)
    assert await turns.find(OWNER, "child") is child
    near.forget(OWNER, "child")
    again = await turns.find(OWNER, "child")
    assert again is not None
    assert again.is_whole
    remote = await LayeredTurns(MemoryTurns(PLENTY), far).find(OWNER, "child")
    assert remote is not None
    assert not remote.is_whole
    assert remote.parent is None


async def test_forgotten_stored_turn_is_found_far(turns: LayeredTurns, near: MemoryTurns) -> None:
    await turns.save(make_turn("t"))
    near.forget(OWNER, "t")
    assert near.held(OWNER, "t") is None
    assert await turns.find(OWNER, "t") is not None


async def test_deletion_reaches_both(turns: LayeredTurns, near: MemoryTurns, far: FarTurns) -> None:
    await turns.save(make_turn("stored"))
    await turns.save(make_turn("unstored", is_stored=False))
    for name in ("stored", "unstored"):
        assert await turns.delete(OWNER, name) is True
        assert await turns.delete(OWNER, name) is False
    assert near.bytes == far.turns.bytes == 0


async def test_turn_deleted_while_it_is_being_read_is_not_kept_near(
    turns: LayeredTurns, near: MemoryTurns, far: FarTurns
) -> None:
    await far.save(make_turn("t"))
    far.gate.clear()
    far.is_asked.clear()
    look = asyncio.create_task(turns.find(OWNER, "t"))
    await far.is_asked.wait()
    await turns.delete(OWNER, "t")
    far.gate.set()
    await look
    assert await near.find(OWNER, "t") is None


async def test_turn_that_runs_elsewhere_is_not_kept_near(
    turns: LayeredTurns, near: MemoryTurns, far: FarTurns
) -> None:
    """Its end, in another process, would never be seen here."""
    await far.save(make_turn("t", status="in_progress"))
    found = await turns.find(OWNER, "t")
    assert found is not None
    assert found.response.status == "in_progress"
    assert near.held(OWNER, "t") is None
    await far.save(make_turn("t"))
    ended = await turns.find(OWNER, "t")
    assert ended is not None
    assert ended.response.status == "completed"
    assert near.held(OWNER, "t") is not None


async def test_key_of_an_unstored_turn_never_goes_far() -> None:
    near, far = MemoryIdempotencyKeys(), MemoryIdempotencyKeys()
    idempotency_keys = LayeredIdempotencyKeys(near, far)
    secret = Claim(OWNER, "key", "secret", b"d", is_stored=False)
    assert await idempotency_keys.claim(secret) == secret
    assert far.bytes == 0
    stored = Claim(OWNER, "key", "stored", b"e", is_stored=True)
    assert await idempotency_keys.claim(stored) == secret, "the key is taken, wherever it is held"
    assert far.bytes == 0
    other = Claim(OWNER, "other", "stored", b"e", is_stored=True)
    assert await idempotency_keys.claim(other) == other
    assert far.bytes > 0
