"""A turn that runs in another worker: heard in order, each event once, and no faster than its reader reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import pytest

from segue.cluster import remote as module
from segue.cluster.local import LocalBus
from segue.cluster.peers import Peers
from segue.cluster.remote import Kept, RemoteTurns
from segue.stores.memory import MemoryEventLog
from segue.stores.memory_turns import MemoryTurns
from segue.turn.assemble import Assembler
from segue.turn.running import Running
from segue.turn.values import Cancel, ItemOpened, ItemText
from segue.wire.codec import encode
from segue.wire.events import Event
from tests.contracts.turns import OWNER, make_turn
from tests.support import until

PLENTY = 1 << 20


@dataclass
class Worker:
    """As much of a worker as a turn needs to be heard elsewhere."""

    bus: LocalBus
    turns: MemoryTurns
    log: MemoryEventLog
    runnings: dict[str, Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.peers = Peers(self.bus)
        self.remote = RemoteTurns(self.bus, self.peers, self.find, Kept(self.turns, self.log), 30.0)

    def find(self, owner: str, turn_id: str) -> Running | None:
        running = self.runnings.get(turn_id)
        return running if running is not None and running.owner == owner else None

    def start(self, *, is_stored: bool = True) -> Running:
        """A turn that has begun to speak."""
        response = make_turn(f"resp_{len(self.runnings)}", status="in_progress").response
        running = Running(OWNER, Assembler(response, str), is_stored=is_stored)
        self.runnings[running.id] = running
        running.publish(running.assembler.start())
        running.publish(running.assembler.feed([ItemOpened("message")]))
        return running


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Worker, Worker]]:
    bus, turns, log = LocalBus(), MemoryTurns(PLENTY), MemoryEventLog(PLENTY)
    async with AsyncExitStack() as stack:
        home, guest = Worker(bus, turns, log), Worker(bus, turns, log)
        for one in (home, guest):
            await stack.enter_async_context(one.peers.joined())
        await until(lambda: home.peers.others and guest.peers.others)
        yield home, guest


class Reader:
    """A sink that remembers, and may be slow."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_full = False

    def attached(self, running: Running) -> None:
        """It may be slowed down."""
        self.running = running

    def deliver(self, events: Sequence[Event]) -> None:
        self.events += events


def speak(running: Running, count: int = 1) -> None:
    for _ in range(count):
        running.publish(running.assembler.feed([ItemText("x")]))


async def test_guest_hears_the_same_events_in_the_same_order(pair: tuple[Worker, Worker]) -> None:
    home, there = pair
    running = home.start()
    own = Reader()
    running.attach(own)
    guest = await there.remote.reach(OWNER, running.id)
    assert guest is not None
    assert await there.remote.reach(OWNER, running.id) is guest
    foreign = Reader()
    assert guest.attach(foreign)
    speak(running, 100)
    await until(lambda: len(foreign.events) == len(own.events))
    assert foreign.events == own.events
    assert await there.remote.look(OWNER, running.id) is not None


async def test_foreign_unstored_and_absent_turns_are_nobodys(pair: tuple[Worker, Worker]) -> None:
    home, there = pair
    unstored = home.start(is_stored=False)
    stored = home.start()
    for owner, turn_id in ((OWNER, unstored.id), ("bert", stored.id), (OWNER, "resp_absent")):
        assert await there.remote.reach(owner, turn_id) is None
        assert await there.remote.look(owner, turn_id) is None


async def test_slow_reader_elsewhere_slows_the_turn_and_lets_it_go_on(
    pair: tuple[Worker, Worker],
) -> None:
    home, there = pair
    running = home.start()
    guest = await there.remote.reach(OWNER, running.id)
    assert guest is not None
    slow = Reader()
    guest.attach(slow)
    slow.is_full = True
    speak(running)
    await until(lambda: any(one.is_full for one in running._subscribers))
    waiting = asyncio.create_task(running.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    slow.is_full = False
    guest.wake()
    async with asyncio.timeout(10):
        await waiting


async def test_guest_that_nobody_hears_goes_and_leaves_the_turn_running(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.01)
    home, there = pair
    running = home.start()
    assert await there.remote.reach(OWNER, running.id) is not None
    await until(lambda: not running.has_subscribers)
    assert there.remote.find(OWNER, running.id) is None
    assert running.inbox == ()


async def test_worker_that_dies_no_longer_holds_a_turn(pair: tuple[Worker, Worker]) -> None:
    home, there = pair
    running = home.start()
    guest = await there.remote.reach(OWNER, running.id)
    assert guest is not None
    slow = Reader()
    guest.attach(slow)
    slow.is_full = True
    speak(running)
    await until(lambda: any(one.is_full for one in running._subscribers))
    home.peers._lose(there.peers.worker)
    assert not running.has_subscribers
    async with asyncio.timeout(10):
        await running.wait_for_room()


async def test_cancel_of_a_guest_is_told_at_home(pair: tuple[Worker, Worker]) -> None:
    home, there = pair
    running = home.start()
    guest = await there.remote.reach(OWNER, running.id)
    assert guest is not None
    guest.attach(Reader())
    guest.notify(Cancel())
    await until(lambda: running.inbox)
    assert running.inbox == (Cancel(),)


async def test_who_leaves_does_not_cancel_for_others(pair: tuple[Worker, Worker]) -> None:
    home, there = pair
    running = home.start()
    own = Reader()
    running.attach(own)
    guest = await there.remote.reach(OWNER, running.id)
    assert guest is not None
    reader = Reader()
    guest.attach(reader)
    guest.detach(reader)
    guest.notify(Cancel())
    await until(lambda: there.remote.find(OWNER, running.id) is None)
    await until(lambda: len(running._subscribers) == 1)
    assert running.inbox == ()


async def test_turn_that_has_just_ended_is_heard_to_its_end(pair: tuple[Worker, Worker]) -> None:
    """Its home has said the last word, and is still writing it down."""
    home, there = pair
    running = home.start()
    last = Event("response.completed", running.last + 1, ended(running))
    running.publish([last])
    guest = await there.remote.reach(OWNER, running.id)
    assert guest is not None
    reader = Reader()
    assert guest.attach(reader)
    assert [event.number for event in reader.events] == list(range(last.number + 1))
    assert guest.response.status == "in_progress"
    await until(lambda: there.remote.find(OWNER, running.id) is None)


def ended(running: Running) -> bytes:
    return b'{"response":' + encode(running.response) + b"}"
