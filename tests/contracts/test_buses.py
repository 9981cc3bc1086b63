"""What every `Bus` does, whatever carries the messages: two workers, one topic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from segue.cluster.hub import Hub, open_hub_bus
from segue.cluster.local import LocalBus
from segue.cluster.notify import PART_BYTES, PartJoiner, cut, open_notify_bus
from segue.errors import Unavailable
from segue.seams.bus import Bus

WAIT_S = 20


@dataclass(frozen=True)
class Pair:
    """Two ends of one bus; `lose` cuts off the second one, which comes back by itself."""

    here: Bus
    there: Bus
    lose: Callable[[], Awaitable[None]] | None = None


@pytest.fixture(params=["local", "hub", "postgres"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        if request.param == "local":
            bus = LocalBus()
            yield Pair(bus, bus)
        elif request.param == "hub":
            path = str(tmp_path / "hub")
            hub = Hub()
            await stack.enter_async_context(hub.opened(path))
            here = await stack.enter_async_context(open_hub_bus(path))
            there = await stack.enter_async_context(open_hub_bus(path))

            async def lose() -> None:
                assert there._writer is not None
                there._writer.transport.abort()
                await asyncio.sleep(0)

            yield Pair(here, there, lose)
        else:
            server = request.getfixturevalue("postgres")
            url = await server.make_database()
            first = await stack.enter_async_context(open_notify_bus(url))
            second = await stack.enter_async_context(open_notify_bus(url))

            async def end_session() -> None:
                assert second._session is not None
                pid = second._session.get_server_pid()  # type: ignore[attr-defined]
                await server.ask(f"SELECT pg_terminate_backend({pid})")

            yield Pair(first, second, end_session)
            await stack.aclose()
            await server.drop_database(url)


class Received:
    """What was received, and a way to wait for it."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()

    def __call__(self, body: bytes) -> None:
        self._queue.put_nowait(body)

    async def next(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self._queue.get()

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()


async def test_message_reaches_every_listener(pair: Pair) -> None:
    here, there = Received(), Received()
    async with pair.here.subscribe("news", here), pair.there.subscribe("news", there):
        await pair.here.publish("news", b"one")
        assert (await here.next(), await there.next()) == (b"one", b"one")
        await pair.there.publish("news", b"two")
        assert (await here.next(), await there.next()) == (b"two", b"two")


async def test_messages_of_one_worker_keep_their_order(pair: Pair) -> None:
    heard = Received()
    async with pair.there.subscribe("news", heard):
        for number in range(50):
            await pair.here.publish("news", b"%d" % number)
        assert [await heard.next() for _ in range(50)] == [b"%d" % n for n in range(50)]


async def test_topics_are_apart(pair: Pair) -> None:
    wanted, other = Received(), Received()
    async with pair.there.subscribe("wanted", wanted), pair.there.subscribe("other", other):
        await pair.here.publish("nobody's", b"lost")
        await pair.here.publish("wanted", b"found")
        assert await wanted.next() == b"found"
        await pair.here.publish("other", b"last")
        assert await other.next() == b"last"
        assert wanted.is_empty


@pytest.mark.parametrize("size", [0, 1, 7_999, 8_000, 300_000])
async def test_bytes_arrive_as_they_are_however_many(pair: Pair, size: int) -> None:
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    heard = Received()
    async with pair.there.subscribe("bytes", heard):
        await pair.here.publish("bytes", body)
        assert await heard.next() == body


async def test_listener_that_has_left_receives_nothing_and_may_come_again(pair: Pair) -> None:
    early, stays = Received(), Received()
    async with pair.there.subscribe("news", stays):
        async with pair.there.subscribe("news", early):
            await pair.here.publish("news", b"one")
            assert await early.next() == b"one"
        await pair.here.publish("news", b"two")
        assert [await stays.next(), await stays.next()] == [b"one", b"two"]
        assert early.is_empty
    async with pair.there.subscribe("news", early):
        await pair.here.publish("news", b"three")
        assert await early.next() == b"three"


async def test_listener_that_fails_keeps_nothing_from_the_others(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(body: bytes) -> None:
        raise RuntimeError

    heard = Received()
    async with pair.there.subscribe("news", fail), pair.there.subscribe("news", heard):
        await pair.here.publish("news", b"secret")
        assert await heard.next() == b"secret"
    assert "listener for bus topic news failed" in caplog.text
    assert "secret" not in caplog.text


async def test_worker_that_was_cut_off_listens_again(pair: Pair) -> None:
    if pair.lose is None:
        return
    heard = Received()
    async with pair.there.subscribe("news", heard):
        await pair.lose()
        async with asyncio.timeout(WAIT_S):
            while heard.is_empty:
                await pair.here.publish("news", b"again")
                await asyncio.sleep(0.02)
        assert await heard.next() == b"again"
        # And it can publish again.
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    await pair.there.publish("news", b"back")
                    break
                except Unavailable:
                    await asyncio.sleep(0.02)
        while await heard.next() != b"back":
            pass


def test_parts_of_lost_messages_do_not_gather() -> None:
    joiner = PartJoiner()
    for _ in range(1_000):
        assert joiner.join(cut(b"x" * (PART_BYTES + 1))[0]) is None
    assert len(joiner._partial) <= 64
    assert joiner.join("not ours") is None
    assert joiner.join("a.b.c.d") is None
    # The first part was missed: half a message is none.
    assert joiner.join(cut(b"y" * (PART_BYTES + 1))[1]) is None
