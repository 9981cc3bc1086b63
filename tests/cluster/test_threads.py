"""A thread comes from the worker that made it, or is not found: a worker that is gone or silent holds up no request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from segue.cluster import peers as peers_module
from segue.cluster import threads as module
from segue.cluster.local import LocalBus
from segue.cluster.peers import Peers
from segue.cluster.threads import RemoteThreads
from segue.ids import new_turn_id, tag_of
from segue.seams.history import Owner, Turn
from tests.contracts.turns import OWNER, make_turn
from tests.support import until


@dataclass
class Worker:
    """A worker that has turns, and sends their names instead of their bytes."""

    peers: Peers
    turns: dict[str, Turn] = field(default_factory=dict)
    questions: int = 0

    def __post_init__(self) -> None:
        self.remote = RemoteThreads(self.peers, self.held, self.seal, self.open)

    def make(self) -> Turn:
        turn = make_turn(new_turn_id(tag_of(self.peers.worker)), is_stored=False)
        self.turns[turn.id] = turn
        return turn

    def held(self, owner: Owner, turn_id: str) -> Turn | None:
        self.questions += 1
        turn = self.turns.get(turn_id)
        return turn if turn is not None and turn.owner == owner else None

    def seal(self, turn: Turn) -> bytes | None:
        return turn.id.encode()

    def open(self, owner: Owner, sealed: bytes) -> Turn | None:
        return make_turn(sealed.decode(), owner=owner, is_stored=False)


@pytest.fixture
async def workers() -> AsyncIterator[list[Worker]]:
    bus = LocalBus()
    async with AsyncExitStack() as stack:
        three = [Worker(Peers(bus)) for _ in range(3)]
        for worker in three:
            await stack.enter_async_context(worker.peers.joined())
        await until(lambda: all(len(worker.peers.others) == 2 for worker in three))
        yield three


async def test_worker_that_made_the_turn_is_asked_and_no_other(workers: list[Worker]) -> None:
    here, there, third = workers
    turn = there.make()
    found = await here.remote.fetch(OWNER, turn.id)
    assert found is not None
    assert found.id == turn.id
    assert (here.questions, there.questions, third.questions) == (0, 1, 0)


async def test_foreign_dropped_and_made_up_turns_are_not_found(workers: list[Worker]) -> None:
    here, there, _ = workers
    turn = there.make()
    assert await here.remote.fetch("eve", turn.id) is None
    assert await here.remote.fetch(OWNER, new_turn_id(tag_of(there.peers.worker))) is None
    assert await here.remote.fetch(OWNER, here.make().id) is None
    for made_up in ("", "resp_", "x" * 1_000, new_turn_id("00000000")):
        assert await here.remote.fetch(OWNER, made_up) is None


async def test_silent_worker_costs_its_time_and_no_more(
    workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, _ = workers
    turn = there.make()
    monkeypatch.setattr(peers_module, "ANSWER_S", 0.05)
    block = asyncio.Event()

    async def never(worker: str, body: bytes) -> bytes | None:
        await block.wait()
        return None

    there.peers._handlers["thread"] = never
    async with asyncio.timeout(5):
        assert await here.remote.fetch(OWNER, turn.id) is None
    block.set()


async def test_worker_that_leaves_meanwhile_is_not_waited_for(workers: list[Worker]) -> None:
    here, there, _ = workers
    turn = there.make()
    block = asyncio.Event()

    async def leave(worker: str, body: bytes) -> bytes | None:
        here.peers._remove(there.peers.worker)
        await block.wait()
        return None

    there.peers._handlers["thread"] = leave
    async with asyncio.timeout(peers_module.ANSWER_S / 2):
        assert await here.remote.fetch(OWNER, turn.id) is None
    block.set()


async def test_few_chains_are_on_their_way_at_once(workers: list[Worker]) -> None:
    here, there, _ = workers
    open_now, most = 0, 0
    block = asyncio.Event()

    async def count(worker: str, body: bytes) -> bytes | None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await block.wait()
        open_now -= 1
        return None

    there.peers._handlers["thread"] = count
    turns = [there.make() for _ in range(3 * module.FETCHED_MAX)]
    fetching = [asyncio.create_task(here.remote.fetch(OWNER, turn.id)) for turn in turns]
    await until(lambda: open_now == module.FETCHED_MAX)
    block.set()
    assert await asyncio.gather(*fetching) == [None] * len(turns)
    assert most == module.FETCHED_MAX
