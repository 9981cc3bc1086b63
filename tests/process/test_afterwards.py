"""After the answer: nothing is lost, nobody waits, and one bad listener does not spoil it for the rest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from segue.process.afterwards import BACKLOG_MAX, BATCH_MAX, Afterwards, EndedTurn, Observer
from segue.seams.history import UsageEntry
from segue.stores.memory import MemoryLedger
from segue.turn.commit import entry_of
from segue.turn.plan import Receipt, Span, Tally
from tests.contracts.turns import make_turn

WAIT_S = 10


def settled(number: int, *, is_stored: bool = False) -> EndedTurn:
    turn_id = f"resp_{number}"
    entry = UsageEntry(turn_id, "ada", "m", "completed", 1, 0, 2, 1_700_000_000)
    tally = Tally(is_recorded=is_stored)
    tally.spans.append(Span("send", 0.0, 0.0))
    return EndedTurn(entry, tally, Receipt("websocket"))


def ids(turns: Sequence[EndedTurn]) -> list[str]:
    return [one.entry.turn_id for one in turns]


@asynccontextmanager
async def working(
    *observers: Observer, ledger: MemoryLedger | None = None
) -> AsyncIterator[Afterwards]:
    """A queue with its worker, ended as the process ends it."""
    afterwards = Afterwards(ledger or MemoryLedger(), observers)
    worker = asyncio.create_task(afterwards.work())
    try:
        yield afterwards
    finally:
        async with asyncio.timeout(WAIT_S):
            await afterwards.drained()
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


async def test_every_turn_is_settled_once_and_in_order() -> None:
    seen: list[EndedTurn] = []
    ledger = MemoryLedger()
    count = 3 * BATCH_MAX + 7

    async with working(seen.append, ledger=ledger) as afterwards:
        for number in range(count):
            await afterwards.put(settled(number))

    assert ids(seen) == [f"resp_{number}" for number in range(count)]
    assert [entry.turn_id for entry in ledger.entries] == ids(seen)


async def test_drained_waits_for_what_was_handed_over() -> None:
    seen: list[EndedTurn] = []
    async with working(seen.append) as afterwards:
        await afterwards.put(settled(1))
        assert afterwards.backlog == 1

        await afterwards.drained()

        assert ids(seen) == ["resp_1"]
        assert afterwards.backlog == 0


async def test_drained_returns_at_once_when_there_is_nothing() -> None:
    async with working() as afterwards, asyncio.timeout(WAIT_S):
        await afterwards.drained()
        await afterwards.drained()


async def test_two_may_wait_for_the_drain_at_once() -> None:
    seen: list[EndedTurn] = []
    async with working(seen.append) as afterwards:
        await afterwards.put(settled(1))
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(afterwards.drained(), afterwards.drained())
    assert ids(seen) == ["resp_1"]


async def test_stored_turn_is_not_told_to_the_ledger_again() -> None:
    """Its row was written in the turn's own transaction; observers hear of it all the same."""
    seen: list[EndedTurn] = []
    ledger = MemoryLedger()
    async with working(seen.append, ledger=ledger) as afterwards:
        await afterwards.put(settled(1, is_stored=True))
        await afterwards.put(settled(2))

    assert [entry.turn_id for entry in ledger.entries] == ["resp_2"]
    assert ids(seen) == ["resp_1", "resp_2"]


async def test_full_queue_makes_the_ending_turn_wait() -> None:
    afterwards = Afterwards(MemoryLedger(), [])
    for number in range(BACKLOG_MAX):
        await afterwards.put(settled(number))
    one_more = asyncio.create_task(afterwards.put(settled(BACKLOG_MAX)))
    await asyncio.sleep(0)
    assert not one_more.done()

    worker = asyncio.create_task(afterwards.work())
    async with asyncio.timeout(WAIT_S):
        await one_more
        await afterwards.drained()
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)

    assert afterwards.backlog == 0


async def test_failing_observer_loses_nothing_for_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[EndedTurn] = []
    ledger = MemoryLedger()

    def fail(one: EndedTurn) -> None:
        if one.entry.turn_id == "resp_1":
            raise RuntimeError("a bad listener")

    with caplog.at_level(logging.ERROR):
        async with working(fail, seen.append, ledger=ledger) as afterwards:
            for number in range(3):
                await afterwards.put(settled(number))

    assert ids(seen) == ["resp_0", "resp_1", "resp_2"]
    assert len(ledger.entries) == 3
    assert "an observer failed for turn resp_1" in caplog.text


class BrokenLedger(MemoryLedger):
    """A ledger that cannot be reached the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken = True

    async def settle(self, entries: Sequence[UsageEntry]) -> None:
        if self.is_broken:
            self.is_broken = False
            raise ConnectionError("no route to the ledger")
        await super().settle(entries)


async def test_failing_ledger_does_not_silence_the_observers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[EndedTurn] = []
    ledger = BrokenLedger()

    with caplog.at_level(logging.ERROR):
        async with working(seen.append, ledger=ledger) as afterwards:
            await afterwards.put(settled(1))
            await afterwards.drained()
            await afterwards.put(settled(2))

    assert ids(seen) == ["resp_1", "resp_2"]
    assert "resp_2" in [entry.turn_id for entry in ledger.entries]
    assert "no route to the ledger" in caplog.text


async def test_drained_does_not_wait_for_what_comes_after_it() -> None:
    """A scrape must end although turns keep coming faster than a slow ledger takes them."""

    class SlowLedger(MemoryLedger):
        async def settle(self, entries: Sequence[UsageEntry]) -> None:
            await asyncio.sleep(0)
            await super().settle(entries)

    async with working(ledger=SlowLedger()) as afterwards:
        is_over = False

        async def keep_putting() -> None:
            number = 0
            while not is_over:
                number += 1
                await afterwards.put(settled(number))
                await asyncio.sleep(0)

        putting = asyncio.create_task(keep_putting())
        async with asyncio.timeout(WAIT_S):
            for _ in range(20):
                await afterwards.drained()
        is_over = True
        await putting


async def test_usage_that_the_ledger_could_not_take_is_told_again() -> None:
    class MoodyLedger(MemoryLedger):
        is_down = True

        async def settle(self, entries: Sequence[UsageEntry]) -> None:
            if self.is_down:
                raise OSError("not now")
            await super().settle(entries)

    ledger = MoodyLedger()
    async with working(ledger=ledger) as afterwards:
        await afterwards.put(settled(1))
        await afterwards.drained()
        ledger.is_down = False
        await afterwards.put(settled(2))
        await afterwards.drained()
    assert [entry.turn_id for entry in ledger.entries] == ["resp_1", "resp_2"]


def usage_of(status: str) -> UsageEntry | None:
    turn = make_turn("t", status=status)
    return entry_of(turn.owner, turn.response)


def test_usage_of_a_failed_turn_is_recorded_and_of_a_running_one_is_not() -> None:
    failed = usage_of("failed")
    assert failed is not None
    assert (failed.status, failed.input_tokens, failed.cached_tokens) == ("failed", 7, 3)
    assert usage_of("in_progress") is None


async def test_observer_that_takes_its_time_is_awaited_before_the_next_one() -> None:
    seen: list[str] = []

    async def observe(ended: EndedTurn) -> None:
        await asyncio.sleep(0)
        seen.append("first")

    async with working(observe, lambda ended: seen.append("second")) as afterwards:
        await afterwards.put(settled(1))
    assert seen == ["first", "second"]
