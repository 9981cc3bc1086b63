"""Events are written down in order, at boundaries, and never hold the turn up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from segue.errors import StoreFailed
from segue.process import event_writer as scribes
from segue.process.event_writer import EventWriter
from segue.stores.memory import MemoryEventLog
from segue.wire.events import Event


class CountingLog(MemoryEventLog):
    """Notes how often it was written to, and can fail."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.batches: list[int] = []
        self.is_written = asyncio.Event()
        self.fault: Exception | None = None

    async def append(self, owner: str, turn_id: str, events: Sequence[Event]) -> None:
        if self.fault is not None:
            raise self.fault
        self.batches.append(len(events))
        self.is_written.set()
        await super().append(owner, turn_id, events)


def delta(number: int, size: int = 10) -> Event:
    return Event("response.output_text.delta", number, b"x" * size)


def item_done(number: int) -> Event:
    return Event("response.output_item.done", number, b"{}")


async def test_tokens_are_written_together_at_the_end_of_their_item() -> None:
    log = CountingLog()
    event_writer = EventWriter(log, "ada", "resp_1")
    for number in range(50):
        event_writer.deliver([delta(number)])
        await asyncio.sleep(0)
    assert log.batches == []
    event_writer.deliver([item_done(50)])
    await event_writer.finish()
    assert log.batches == [51]
    found = await log.read_after("ada", "resp_1", -1)
    assert found is not None
    assert [event.number for event in found] == list(range(51))


async def test_much_text_is_written_before_its_item_ends() -> None:
    log = CountingLog()
    event_writer = EventWriter(log, "ada", "resp_1")
    event_writer.deliver([delta(0, scribes.FLUSH_BYTES + 1)])
    event_writer.deliver([delta(1)])
    await event_writer.finish()
    assert sum(log.batches) == 2


async def test_moment_is_enough_to_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scribes, "FLUSH_S", 0.0)
    log = CountingLog()
    event_writer = EventWriter(log, "ada", "resp_1")
    event_writer.deliver([delta(0)])
    async with asyncio.timeout(10):
        await log.is_written.wait()
    await event_writer.finish()


async def test_log_that_fails_is_left_alone_and_the_turn_goes_on() -> None:
    log = CountingLog()
    log.fault = StoreFailed("gone")
    event_writer = EventWriter(log, "ada", "resp_1")
    event_writer.deliver([item_done(0)])
    await event_writer.finish()
    log.fault = None
    event_writer.deliver([item_done(1)])
    await event_writer.finish()
    assert log.batches == []
    assert not await log.read_after("ada", "resp_1", -1)


async def test_nothing_to_write_is_nothing_written() -> None:
    log = CountingLog()
    event_writer = EventWriter(log, "ada", "resp_1")
    event_writer.deliver([])
    await event_writer.finish()
    assert log.batches == []
