"""A turn while it runs: who hears it, what slows it down, what interrupts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from segue.ids import item_ids
from segue.process.event_writer import EventWriter
from segue.stores.memory import MemoryEventLog
from segue.turn.assemble import Assembler
from segue.turn.event_ring import PACKED_BYTES, RING_BYTES_MAX, EventRing
from segue.turn.notices import Cancel, Drain, Steer
from segue.turn.running import INBOX_MAX, Interrupted, Running
from segue.wire.events import Event
from tests.contracts.turns import response_of

WAIT_S = 10


class Ear:
    """A subscriber that can be full."""

    can_catch_up = False

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.is_full = False

    def attached(self, running: Running) -> None:
        pass

    def lose(self) -> None:
        pass

    def deliver(self, events: Sequence[Event]) -> None:
        self.heard += [event.number for event in events]


def running() -> Running:
    first = response_of("resp_1", status="in_progress")
    return Running("ada", Assembler(first, item_ids("resp_1")), is_stored=True)


def events(*numbers: int, size: int = 10) -> list[Event]:
    return [Event("response.output_text.delta", number, b"x" * size) for number in numbers]


# --- hearing ----------------------------------------------------------------------------------------


async def test_every_subscriber_hears_all_events_in_order() -> None:
    turn, first, second = running(), Ear(), Ear()
    turn.attach(first)
    turn.attach(second)

    turn.publish(events(0, 1))
    turn.publish(events(2))

    assert first.heard == second.heard == [0, 1, 2]


async def test_late_subscriber_hears_what_it_missed_and_then_the_rest() -> None:
    turn, late = running(), Ear()
    turn.publish(events(0, 1, 2))

    assert turn.attach(late)
    turn.publish(events(3))

    assert late.heard == [0, 1, 2, 3]


async def test_subscriber_that_has_heard_some_hears_only_what_is_newer() -> None:
    turn, late = running(), Ear()
    turn.publish(events(0, 1, 2, 3))

    assert turn.attach(late, after=1)

    assert late.heard == [2, 3]


async def test_subscriber_that_has_heard_all_waits_for_the_next() -> None:
    turn, late = running(), Ear()
    turn.publish(events(0, 1))

    assert turn.attach(late, after=1)
    assert late.heard == []
    turn.publish(events(2))

    assert late.heard == [2]


async def test_subscriber_that_left_hears_no_more_and_the_turn_goes_on() -> None:
    turn, ear = running(), Ear()
    turn.attach(ear)
    assert turn.has_subscribers
    turn.publish(events(0))

    turn.detach(ear)
    turn.detach(ear)
    turn.publish(events(1))

    assert ear.heard == [0]
    assert not turn.has_subscribers


async def test_subscriber_that_leaves_while_it_hears_disturbs_nobody() -> None:
    turn, other = running(), Ear()

    class Leaving(Ear):
        def deliver(self, events: Sequence[Event]) -> None:
            super().deliver(events)
            turn.detach(self)

    leaving = Leaving()
    turn.attach(leaving)
    turn.attach(other)

    turn.publish(events(0))
    turn.publish(events(1))

    assert (leaving.heard, other.heard) == ([0], [0, 1])


async def test_terminal_event_ends_the_turn_and_can_still_be_heard() -> None:
    turn, late = running(), Ear()
    turn.publish(events(0))
    assert not turn.is_ended
    turn.publish([Event("response.completed", 1, b"")])

    assert turn.is_ended
    assert turn.attach(late)
    assert late.heard == [0, 1]


async def test_turn_that_is_over_keeps_none_of_its_hearers() -> None:
    """docs/inside/hazards.md F40: it may be kept for its events, and a subscriber holds its connection."""
    turn, ears = running(), [Ear() for _ in range(4)]
    turn.attach(ears[0])
    turn.publish(events(0))
    turn.publish([Event("response.completed", 1, b"")])
    assert ears[0].heard == [0, 1]
    turn.attach(ears[1])
    turn.attach_after(ears[2], events(0))
    turn.attach_to_rest(ears[3])
    assert not turn.has_subscribers
    assert [ear.heard[-1] for ear in ears] == [1, 1, 1, 1]


async def test_publishing_nothing_is_no_sign_of_life() -> None:
    turn = running()
    turn.publish([])
    assert turn.published_at == 0
    turn.publish(events(0))
    assert turn.published_at > 0


async def test_ring_forgets_the_oldest_events_and_says_so() -> None:
    turn = running()
    size = RING_BYTES_MAX // 5
    for number in range(6):
        turn.publish(events(number, size=size))
    late, later = Ear(), Ear()

    assert not turn.attach(late)
    assert not turn.attach(late, after=0)
    assert late.heard == []
    assert not turn.has_subscribers
    assert turn.attach(later, after=1)
    assert later.heard == [2, 3, 4, 5]


async def test_ring_keeps_one_event_however_large() -> None:
    turn, late = running(), Ear()
    turn.publish(events(0))
    turn.publish(events(1, size=2 * RING_BYTES_MAX))

    assert turn.attach(late, after=0)
    assert late.heard == [1]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, RING_BYTES_MAX), min_size=1, max_size=12),
    after=st.integers(-1, 12),
)
def test_attaching_never_leaves_a_gap(sizes: list[int], after: int) -> None:
    async def story() -> None:
        turn, ear = running(), Ear()
        for number, size in enumerate(sizes):
            turn.publish(events(number, size=size))
        if turn.attach(ear, after=after):
            assert ear.heard == list(range(after + 1, len(sizes)))
        else:
            assert ear.heard == []
            # The oldest go in blocks, of twice the size where they are few.
            left = sum(sizes[after + 1 :])
            assert after >= len(sizes) or left > RING_BYTES_MAX - 2 * PACKED_BYTES

    asyncio.run(story())


def test_thousands_of_small_events_are_packed_and_come_back_as_they_were() -> None:
    ring = EventRing()
    sent = [
        Event("response.output_text.delta", number, b"%08d" % number * 8)
        for number in range(20_000)
    ]
    for start in range(0, len(sent), 7):
        ring.extend(sent[start : start + 7])

    assert ring.bytes <= RING_BYTES_MAX
    assert ring.last == 19_999
    assert ring.after(ring.oldest - 1) == sent[ring.oldest :]
    assert ring.after(19_000) == sent[19_001:]
    assert ring.after(19_999) == []


# --- back-pressure ----------------------------------------------------------------------------------


async def test_full_subscriber_holds_the_turn_until_it_has_room() -> None:
    turn, ear = running(), Ear()
    turn.attach(ear)
    ear.is_full = True
    waiting = asyncio.create_task(turn.wait_for_room())
    await asyncio.sleep(0)
    turn.wake()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()

    ear.is_full = False
    turn.wake()

    await asyncio.wait_for(waiting, WAIT_S)


async def test_one_full_subscriber_of_two_is_enough_to_hold_it() -> None:
    turn, slow, quick = running(), Ear(), Ear()
    slow.is_full = True
    turn.attach(quick)
    turn.attach(slow)
    waiting = asyncio.create_task(turn.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()

    turn.detach(slow)

    await asyncio.wait_for(waiting, WAIT_S)


async def test_full_subscriber_that_can_catch_up_is_not_waited_for_while_another_reads() -> None:
    turn, slow, quick = running(), Ear(), Ear()
    slow.is_full = slow.can_catch_up = True
    turn.attach(slow)
    assert not turn.has_room
    turn.attach(quick)
    # Nobody could give it later what it misses.
    assert not turn.has_room
    assert not turn.goes_on_without(slow)

    turn.log_events(EventWriter(MemoryEventLog(1 << 20), "ada", "resp_1"))

    assert turn.has_room
    assert turn.goes_on_without(slow)
    assert not turn.goes_on_without(quick)
    quick.is_full = True
    assert not turn.has_room


async def test_turn_that_nobody_hears_feels_no_pressure() -> None:
    await asyncio.wait_for(running().wait_for_room(), WAIT_S)


async def test_room_made_before_anybody_waits_is_harmless() -> None:
    turn = running()
    turn.wake()
    await asyncio.wait_for(turn.wait_for_room(), WAIT_S)


# --- notices ----------------------------------------------------------------------------------------


async def test_notice_interrupts_a_waiting_engine() -> None:
    turn = running()
    is_freed = asyncio.Event()
    is_waiting = asyncio.Event()

    async def engine() -> AsyncGenerator[int, None]:
        try:
            is_waiting.set()
            await asyncio.Event().wait()
            yield 1
        finally:
            is_freed.set()

    async def sample() -> None:
        async with turn.interruptible(), aclosing(engine()) as pieces:
            async for _ in pieces:
                pass

    sampling = asyncio.create_task(sample())
    await is_waiting.wait()
    turn.notify(Cancel())

    with pytest.raises(Interrupted):
        await asyncio.wait_for(asyncio.shield(sampling), WAIT_S)
    assert is_freed.is_set()
    assert tuple(turn.inbox) == (Cancel(),)


async def test_notice_interrupts_a_turn_that_waits_for_room() -> None:
    turn, ear = running(), Ear()
    turn.attach(ear)
    ear.is_full = True

    async def wait() -> None:
        async with turn.interruptible():
            await turn.wait_for_room()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    turn.notify(Drain())

    with pytest.raises(Interrupted):
        await asyncio.wait_for(asyncio.shield(waiting), WAIT_S)


async def test_notice_that_came_before_interrupts_at_once() -> None:
    turn = running()
    turn.notify(Cancel())

    with pytest.raises(Interrupted):
        async with asyncio.timeout(WAIT_S), turn.interruptible():
            await asyncio.Event().wait()
    assert tuple(turn.inbox) == (Cancel(),)


async def test_second_notice_while_the_engine_is_being_freed_is_only_noted() -> None:
    """A client leaves, the engine takes its time to let go, and meanwhile the process stops."""
    turn = running()
    is_freeing, may_free = asyncio.Event(), asyncio.Event()

    async def sample() -> None:
        async with turn.interruptible():
            try:
                await asyncio.Event().wait()
            finally:
                is_freeing.set()
                await may_free.wait()

    sampling = asyncio.create_task(sample())
    await asyncio.sleep(0)
    turn.notify(Cancel())
    await asyncio.wait_for(is_freeing.wait(), WAIT_S)

    turn.notify(Drain())
    may_free.set()

    with pytest.raises(Interrupted):
        await asyncio.wait_for(asyncio.shield(sampling), WAIT_S)
    assert tuple(turn.inbox) == (Cancel(), Drain())


async def test_notice_between_scopes_is_not_lost() -> None:
    turn = running()
    async with turn.interruptible():
        pass
    turn.notify(Cancel())

    with pytest.raises(Interrupted):
        async with turn.interruptible():
            await asyncio.Event().wait()


async def test_engines_own_timeout_is_not_taken_for_a_notice() -> None:
    turn = running()

    with pytest.raises(TimeoutError):
        async with turn.interruptible():
            raise TimeoutError
    assert tuple(turn.inbox) == ()

    steer = Steer("steer_1", Raw(b'""'), ())
    with pytest.raises(TimeoutError):
        async with turn.interruptible(heeds_steers=False):
            turn.notify(steer)
            raise TimeoutError
    assert tuple(turn.inbox) == (steer,)


async def test_inbox_keeps_the_first_notices_in_order() -> None:
    turn = running()
    assert tuple(turn.inbox) == ()

    turn.notify(Cancel())
    for _ in range(2 * INBOX_MAX):
        turn.notify(Drain())

    assert tuple(turn.inbox) == (Cancel(), *[Drain()] * (INBOX_MAX - 1))
