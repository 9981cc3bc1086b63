"""Bytes on their way in: bounded, fair, and never stuck."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from segue.memory.intake import GRANT_BYTES_MIN, Inflow, Intake

MIB = 1024 * 1024
BYTES_MAX = 16 * MIB
PART = 64 * 1024


@dataclass(eq=False)
class Upload:
    """A client that sends one message, as far as it is read."""

    inflow: Inflow
    size: int
    sent: int = 0
    is_read: bool = True

    def step(self) -> None:
        """Send one more part, if the server reads it."""
        if not self.is_read or self.sent == self.size:
            return
        self.sent = min(self.size, self.sent + PART)
        if self.sent == self.size:
            self.inflow.count(0, 0)
        else:
            self.inflow.count(self.sent, 0)
            self.is_read = self.inflow.read_on(self.wake)

    def wake(self) -> None:
        self.is_read = True


def uploads(intake: Intake, sizes: list[tuple[int, int]]) -> list[Upload]:
    return [Upload(Inflow(intake, f"key{key}"), size) for key, size in sizes]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8 * MIB)), min_size=1, max_size=30),
    seed=st.integers(0, 1000),
)
def test_every_message_arrives_and_the_limit_holds(sizes: list[tuple[int, int]], seed: int) -> None:
    async def story() -> None:
        intake = Intake(BYTES_MAX)
        waiting, chance = uploads(intake, sizes), random.Random(seed)
        for _ in range(100_000):
            if not waiting:
                break
            one = chance.choice(waiting)
            one.step()
            if not one.is_read:
                await asyncio.sleep(0)
            if one.sent == one.size:
                waiting.remove(one)
            assert intake.bytes <= BYTES_MAX + 8 * MIB
        assert not waiting
        assert intake.bytes == intake.pool.granted == intake.pool.members == intake.waiting == 0

    asyncio.run(story())


async def test_half_messages_wait_and_small_ones_go_on() -> None:
    intake = Intake(BYTES_MAX)
    halves = uploads(intake, [(0, 8 * MIB)] * 12)
    for _ in range(200):
        for one in halves:
            one.step()
        # Only the first comes to its last part: then it would be complete.
        halves[0].sent = min(halves[0].sent, 7 * MIB)
    assert intake.bytes < BYTES_MAX + 8 * MIB
    assert sum(not one.is_read for one in halves) >= 10

    small = Upload(Inflow(intake, "key1"), 4 * GRANT_BYTES_MIN)
    for _ in range(10):
        small.step()
    assert small.sent == small.size


async def test_message_that_waits_goes_on_when_another_is_gone() -> None:
    intake = Intake(4 * MIB)
    first, second = Inflow(intake, ""), Inflow(intake, "")
    first.count(3 * MIB, 0)
    second.count(2 * MIB, 0)
    woken: list[str] = []
    assert first.read_on(lambda: woken.append("first"))
    assert not second.read_on(lambda: woken.append("second"))
    first.count(0, 0)
    await asyncio.sleep(0)
    assert woken == ["second"]


async def test_request_that_waits_for_its_turn_counts_and_does_not_stop_the_oldest() -> None:
    intake = Intake(4 * MIB)
    waiting, arriving = Inflow(intake, ""), Inflow(intake, "")
    waiting.count(0, 4 * MIB)
    arriving.count(MIB, 0)
    assert intake.bytes == 5 * MIB
    assert arriving.read_on(lambda: None)
    assert not waiting.extend(8 * MIB)


async def test_one_key_has_half_of_it() -> None:
    intake = Intake(32 * MIB)
    mine, theirs = uploads(intake, [(0, 64 * MIB)] * 8), uploads(intake, [(1, 4 * MIB)])
    for _ in range(600):
        for one in mine[1:]:
            one.step()
    assert intake.bytes <= 16 * MIB + mine[1].sent
    for _ in range(100):
        theirs[0].step()
    assert theirs[0].sent == theirs[0].size


async def test_who_gives_up_while_waiting_leaves_nothing() -> None:
    intake = Intake(2 * MIB)
    first, second = Inflow(intake, ""), Inflow(intake, "")
    first.count(2 * MIB, 0)
    second.count(MIB, 0)
    waiting = asyncio.create_task(second.more())
    await asyncio.sleep(0)
    assert intake.waiting == 1
    waiting.cancel()
    second.count(0, 0)
    first.count(0, 0)
    await asyncio.sleep(0)
    assert (intake.bytes, intake.waiting, intake.pool.granted, intake.pool.members) == (0, 0, 0, 0)


async def test_closed_intake_reads_the_oldest_only() -> None:
    intake = Intake(BYTES_MAX)
    first, second = Inflow(intake, ""), Inflow(intake, "")
    first.count(MIB, 0)
    second.count(MIB, 0)
    intake.set_closed(is_closed=True)
    woken: list[int] = []
    assert first.read_on(lambda: None)
    assert not second.read_on(lambda: woken.append(1))
    intake.set_closed(is_closed=False)
    await asyncio.sleep(0)
    assert woken == [1]
