"""Workers know of each other, ask each other, and are not held up by one that has died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from segue.cluster import peers as module
from segue.cluster.local import LocalBus
from segue.cluster.peers import Peers
from segue.errors import Unavailable
from tests.support import until

WAIT_S = 10


@pytest.fixture
def bus() -> LocalBus:
    return LocalBus()


@pytest.fixture
async def three(bus: LocalBus) -> AsyncIterator[list[Peers]]:
    """Three workers, two of them of one group."""
    async with AsyncExitStack() as stack:
        workers = [Peers(bus, group) for group in ("one", "one", "two")]
        for one in workers:
            await stack.enter_async_context(one.joined())
        await met(*workers)
        yield workers


async def met(*workers: Peers) -> None:
    await until(lambda: all(len(one.others) == len(workers) - 1 for one in workers))


async def silent(worker: str, body: bytes) -> bytes | None:
    await asyncio.Event().wait()
    return b"never"


def says(answer: bytes | None) -> module.PeerHandler:
    async def answers(worker: str, body: bytes) -> bytes | None:
        return None if answer is None else answer + body

    return answers


async def test_workers_know_each_other_and_their_siblings(three: list[Peers]) -> None:
    here, there, far = three
    assert set(here.others) == {there.worker, far.worker}
    assert here.siblings == [there.worker]
    assert far.siblings == []


async def test_all_answers_are_gathered(three: list[Peers]) -> None:
    here, there, far = three
    for one in three:
        one.on_message("name", says(one.group.encode()))
    assert await here.ask("name", b"!", here.others) == {there.worker: b"one!", far.worker: b"two!"}
    assert await here.ask("name", b"!", here.siblings) == {there.worker: b"one!"}
    assert await far.ask("name", b"!", far.siblings) == {}


async def test_first_answer_is_enough_to_find_something(three: list[Peers]) -> None:
    here, there, far = three
    there.on_message("who", silent)
    far.on_message("who", says(b"me"))
    async with asyncio.timeout(module.ANSWER_S / 2):
        assert await here.find("who", b"", here.others) == (far.worker, b"me")


async def test_nothing_is_found_if_no_worker_has_an_answer(three: list[Peers]) -> None:
    here, there, _ = three
    there.on_message("who", says(None))
    async with asyncio.timeout(module.ANSWER_S / 2):
        assert await here.find("who", b"", here.others) is None


async def test_worker_that_does_not_answer_is_not_waited_for_long(
    three: list[Peers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.05)
    here, there, far = three
    there.on_message("name", silent)
    far.on_message("name", says(b"far"))
    async with asyncio.timeout(WAIT_S):
        assert await here.ask("name", b"", here.others) == {far.worker: b"far"}


async def test_worker_that_leaves_is_missed_at_once_and_waited_for_no_longer(
    bus: LocalBus, three: list[Peers]
) -> None:
    here, *_ = three
    gone: list[str] = []
    here.when_gone(gone.append)
    leaving = Peers(bus)
    leaving.on_message("name", silent)
    async with leaving.joined():
        await met(*three, leaving)
        asking = asyncio.create_task(here.ask("name", b"", [leaving.worker]))
        await asyncio.sleep(0)
    async with asyncio.timeout(module.ANSWER_S / 2):
        assert await asking == {}
    assert gone == [leaving.worker]
    assert leaving.worker not in here.others


async def test_worker_that_falls_silent_is_gone_after_a_while(
    bus: LocalBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(module, "GONE_S", 0.1)
    here, dead = Peers(bus), Peers(bus)
    async with here.joined(), dead.joined():
        await met(here, dead)
        # It is killed: no more heartbeats, and no goodbye.
        monkeypatch.setattr(dead, "_publish", lambda topic, message: asyncio.sleep(0))
        await until(lambda: not here.others)


async def test_message_reaches_the_other_workers_and_not_its_sender(three: list[Peers]) -> None:
    heard: list[tuple[str, bytes]] = []
    over = asyncio.Event()

    def keep(name: str) -> module.PeerHandler:
        async def take(worker: str, body: bytes) -> None:
            heard.append((name, body))
            if len(heard) >= 3:
                over.set()

        return take

    for name, one in zip("abc", three, strict=True):
        one.on_message("news", keep(name))
    await three[0].send("news", b"to all")
    await three[0].send("news", b"to one", to=three[2].worker)
    async with asyncio.timeout(WAIT_S):
        await over.wait()
    assert sorted(heard) == [("b", b"to all"), ("c", b"to all"), ("c", b"to one")]


async def test_answer_that_breaks_is_none(
    three: list[Peers], caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(worker: str, body: bytes) -> bytes:
        raise RuntimeError

    here, there, _ = three
    there.on_message("name", broken)
    assert await here.ask("name", b"secret", [there.worker]) == {}
    assert "handler for cluster message name failed" in caplog.text
    assert "secret" not in caplog.text


async def test_bus_that_is_away_is_a_line_in_the_log(
    bus: LocalBus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = Peers(bus), Peers(bus)
    async with here.joined(), there.joined():
        await met(here, there)

        async def publish(topic: str, body: bytes) -> None:
            raise Unavailable("away")

        monkeypatch.setattr(module, "ANSWER_S", 0.01)
        with monkeypatch.context() as away:
            away.setattr(bus, "publish", publish)
            assert await here.find("who", b"", here.others) is None
            await here.send("news", b"")
    assert "cluster message not sent" in caplog.text
