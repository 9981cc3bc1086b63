"""A turn that runs in another worker: followed in order, each event once, and no faster than its reader reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from segue.cluster import remote as module
from segue.cluster.local import LocalBus
from segue.cluster.peers import Peers
from segue.cluster.remote import RemoteTurns
from segue.ids import new_turn_id
from segue.seams.model import ItemOpened, ItemText
from segue.stores.memory import MemoryEventLog
from segue.stores.memory_turns import MemoryTurns
from segue.turn.assemble import Assembler
from segue.turn.notices import Cancel
from segue.turn.running import Running
from segue.wire.codec import encode
from segue.wire.events import Event
from tests.contracts.turns import OWNER, make_turn
from tests.support import until

PLENTY = 1 << 20


@dataclass
class Worker:
    """As much of a worker as a turn needs to be followed elsewhere."""

    bus: LocalBus
    turns: MemoryTurns
    log: MemoryEventLog
    runnings: dict[str, Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.peers = Peers(self.bus)
        self.remote = RemoteTurns(self.bus, self.peers, self.find, self.turns, self.log, 30.0)

    def find(self, owner: str, turn_id: str) -> Running | None:
        running = self.runnings.get(turn_id)
        return running if running is not None and running.owner == owner else None

    def start(self, *, is_stored: bool = True) -> Running:
        """A turn that has published its first events."""
        response = make_turn(new_turn_id(self.remote.home), status="in_progress").response
        running = Running(OWNER, Assembler(response, str), is_stored=is_stored)
        self.runnings[running.id] = running
        running.publish(running.assembler.start())
        running.publish(running.assembler.feed([ItemOpened("message")]))
        return running


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Worker, Worker]]:
    bus, turns, log = LocalBus(), MemoryTurns(PLENTY), MemoryEventLog(PLENTY)
    async with AsyncExitStack() as stack:
        source, follower = Worker(bus, turns, log), Worker(bus, turns, log)
        for worker in (source, follower):
            await stack.enter_async_context(worker.peers.joined())
        await until(lambda: source.peers.others and follower.peers.others)
        yield source, follower


class Reader:
    """A subscriber that remembers, and may be slow."""

    can_catch_up = False

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_full = False

    def attached(self, running: Running) -> None:
        self.running = running

    def lose(self) -> None:
        pass

    def deliver(self, events: Sequence[Event]) -> None:
        self.events += events


def speak(running: Running, count: int = 1) -> None:
    for _ in range(count):
        running.publish(running.assembler.feed([ItemText("x")]))


async def test_follower_receives_the_same_events_in_the_same_order(
    pair: tuple[Worker, Worker],
) -> None:
    source, follower = pair
    running = source.start()
    own = Reader()
    running.attach(own)
    remote = await follower.remote.reach(OWNER, running.id, is_known=False)
    assert remote is not None
    assert await follower.remote.reach(OWNER, running.id, is_known=False) is remote
    foreign = Reader()
    assert remote.attach(foreign)
    speak(running, 100)
    await until(lambda: len(foreign.events) == len(own.events))
    assert foreign.events == own.events
    assert await follower.remote.snapshot(OWNER, running.id, is_known=False) is not None


async def test_foreign_unstored_and_absent_turns_are_not_found(pair: tuple[Worker, Worker]) -> None:
    source, follower = pair
    unstored = source.start(is_stored=False)
    stored = source.start()
    for owner, turn_id in ((OWNER, unstored.id), ("bert", stored.id), (OWNER, "resp_absent")):
        assert await follower.remote.reach(owner, turn_id, is_known=False) is None
        assert await follower.remote.snapshot(owner, turn_id, is_known=False) is None


async def test_made_up_ids_ask_nobody_and_others_only_their_home(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, follower = pair
    third = Worker(follower.bus, follower.turns, follower.log)
    async with third.peers.joined():
        await until(lambda: len(follower.peers.others) == 2)
        asked: list[str] = []
        publish = follower.bus.publish

        async def note(topic: str, body: bytes) -> None:
            if b"look" in body or b"follow" in body:
                asked.append(topic)
            await publish(topic, body)

        monkeypatch.setattr(follower.bus, "publish", note)
        running = source.start()
        for name in ("resp_" + "0" * 32, "resp_absent", "", "x", new_turn_id()):
            assert await follower.remote.snapshot(OWNER, name, is_known=False) is None
            assert await follower.remote.reach(OWNER, name, is_known=False) is None
        assert asked == []
        assert await follower.remote.snapshot(OWNER, running.id, is_known=False) is not None
        assert asked == [f"to/{source.peers.worker}", f"to/{follower.peers.worker}"]


async def test_turn_that_was_taken_over_is_found_where_it_runs(pair: tuple[Worker, Worker]) -> None:
    """Its id names a worker that is gone, and the store knows that it has not ended."""
    source, follower = pair
    running = source.start()
    moved = new_turn_id()
    source.runnings[moved] = running
    assert await follower.remote.snapshot(OWNER, moved, is_known=False) is None
    assert await follower.remote.snapshot(OWNER, moved, is_known=True) is not None


async def test_turn_that_was_taken_over_is_asked_for_at_all_workers_once(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, follower = pair
    third = Worker(source.bus, source.turns, source.log)
    moved = new_turn_id()
    source.runnings[moved] = source.start()
    topics: list[str] = []
    publish = follower.bus.publish

    async def note(topic: str, body: bytes) -> None:
        if b"look" in body:
            topics.append(topic)
        await publish(topic, body)

    async with third.peers.joined():
        await until(lambda: len(follower.peers.others) == 2)
        monkeypatch.setattr(follower.bus, "publish", note)
        back = f"to/{follower.peers.worker}"
        for asked in (["all", back, back], [f"to/{source.peers.worker}", back]):
            assert await follower.remote.snapshot(OWNER, moved, is_known=True) is not None
            await until(lambda: len(topics) == len(asked))  # noqa: B023
            assert topics == asked
            topics.clear()


async def test_slow_reader_of_a_follower_slows_the_turn_and_lets_it_go_on(
    pair: tuple[Worker, Worker],
) -> None:
    source, follower = pair
    running = source.start()
    remote = await follower.remote.reach(OWNER, running.id, is_known=False)
    assert remote is not None
    slow = Reader()
    remote.attach(slow)
    slow.is_full = True
    speak(running)
    await until(lambda: any(one.is_full for one in running._subscribers))
    waiting = asyncio.create_task(running.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    slow.is_full = False
    remote.wake()
    async with asyncio.timeout(10):
        await waiting


async def test_remote_turn_without_subscribers_goes_and_the_turn_runs_on(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.01)
    source, follower = pair
    running = source.start()
    assert await follower.remote.reach(OWNER, running.id, is_known=False) is not None
    await until(lambda: not running.has_subscribers)
    assert follower.remote.find(OWNER, running.id) is None
    assert not running.inbox


async def test_worker_that_dies_no_longer_holds_a_turn(pair: tuple[Worker, Worker]) -> None:
    source, follower = pair
    running = source.start()
    remote = await follower.remote.reach(OWNER, running.id, is_known=False)
    assert remote is not None
    slow = Reader()
    remote.attach(slow)
    slow.is_full = True
    speak(running)
    await until(lambda: any(one.is_full for one in running._subscribers))
    source.peers._remove(follower.peers.worker)
    assert not running.has_subscribers
    async with asyncio.timeout(10):
        await running.wait_for_room()


async def test_cancel_of_a_remote_turn_reaches_its_source(pair: tuple[Worker, Worker]) -> None:
    source, follower = pair
    running = source.start()
    remote = await follower.remote.reach(OWNER, running.id, is_known=False)
    assert remote is not None
    remote.attach(Reader())
    remote.notify(Cancel())
    await until(lambda: running.inbox)
    assert tuple(running.inbox) == (Cancel(),)


async def test_subscriber_that_leaves_does_not_cancel_for_others(
    pair: tuple[Worker, Worker],
) -> None:
    source, follower = pair
    running = source.start()
    own = Reader()
    running.attach(own)
    remote = await follower.remote.reach(OWNER, running.id, is_known=False)
    assert remote is not None
    reader = Reader()
    remote.attach(reader)
    remote.detach(reader)
    remote.notify(Cancel())
    await until(lambda: follower.remote.find(OWNER, running.id) is None)
    await until(lambda: len(running._subscribers) == 1)
    assert not running.inbox


async def test_turn_that_has_just_ended_is_followed_to_its_end(pair: tuple[Worker, Worker]) -> None:
    """Its source has sent the terminal event, and is still writing it to the store."""
    source, follower = pair
    running = source.start()
    last = Event("response.completed", running.last + 1, ended(running))
    running.publish([last])
    remote = await follower.remote.reach(OWNER, running.id, is_known=False)
    assert remote is not None
    reader = Reader()
    assert remote.attach(reader)
    assert [event.number for event in reader.events] == list(range(last.number + 1))
    assert remote.response.status == "in_progress"
    await until(lambda: follower.remote.find(OWNER, running.id) is None)


def ended(running: Running) -> bytes:
    return b'{"response":' + encode(running.response) + b"}"
