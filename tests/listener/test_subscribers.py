"""What waits for a client that does not read is known, wherever it waits."""

from __future__ import annotations

import asyncio

import pytest

from segue.errors import Unavailable
from segue.ids import item_ids
from segue.listener.exchange import ANSWER_BYTES
from segue.listener.subscribers import CHUNK_BYTES, LastSubscriber, SseSubscriber
from segue.memory.budget import UNREAD_BYTES_MIN, Unread
from segue.process.event_writer import EventWriter
from segue.responses.routes import DONE, write_sse
from segue.stores.memory import MemoryEventLog
from segue.turn.assemble import Assembler
from segue.turn.running import Running
from segue.wire.events import Event
from tests.contracts.turns import response_of


async def test_stream_counts_what_was_taken_until_the_connection_has_written_it() -> None:
    unread = Unread()
    subscriber = SseSubscriber(write_sse, 1024 * 1024, unread, DONE)
    subscriber.deliver([Event("x", 0, b"x" * UNREAD_BYTES_MIN)])
    waiting = unread.bytes
    assert waiting > UNREAD_BYTES_MIN
    data = await subscriber.read()
    assert unread.bytes == len(data) == waiting - CHUNK_BYTES
    # The next call says that it is written.
    following = asyncio.create_task(subscriber.read())
    await asyncio.sleep(0)
    assert (unread.bytes, unread.writers) == (0, set())
    subscriber.deliver([Event("x", 1, b"x")])
    await following
    assert (unread.bytes, unread.writers) == (0, set())


async def test_stream_is_full_until_what_was_taken_is_written() -> None:
    subscriber = SseSubscriber(write_sse, 1_000, Unread(), DONE)
    subscriber.deliver([Event("x", 0, b"x" * 1_000)])
    assert subscriber.is_full
    await subscriber.read()
    assert subscriber.is_full
    following = asyncio.create_task(subscriber.read())
    await asyncio.sleep(0)
    assert not subscriber.is_full
    subscriber.deliver([Event("x", 1, b"x")])
    await following


async def test_client_is_refused_a_long_replay_while_others_do_not_read_theirs() -> None:
    unread = Unread(4 * ANSWER_BYTES)
    first, second, short = (SseSubscriber(write_sse, 1_000, unread, DONE) for _ in range(3))
    # One of any length is sent.
    first.deliver([Event("x", 0, b"x" * 5 * ANSWER_BYTES)])
    first.check()
    second.deliver([Event("x", 0, b"x" * 2 * ANSWER_BYTES)])
    before = unread.bytes
    with pytest.raises(Unavailable) as refused:
        second.check()
    assert refused.value.wait_s
    assert unread.bytes < before - 2 * ANSWER_BYTES
    short.deliver([Event("x", 0, b"x")])
    short.check()


async def test_stream_that_missed_events_drops_more_until_it_gets_the_first_that_it_missed() -> (
    None
):
    turn = other_reads()
    slow = SseSubscriber(write_sse, 1_000, Unread(), DONE)
    turn.attach(slow)
    turn.publish([Event("x", 0, b"x" * 2_000)])
    assert await slow.read()
    turn.publish([Event("x", 1, b"1")])
    turn.publish([Event("x", 2, b"2")])
    assert (slow.missed_after, slow.is_full) == (0, True)
    # What was taken is written now.
    assert await slow.read() == b""
    turn.publish([Event("x", 3, b"3")])
    assert turn.attach(slow, after=0)
    turn.publish([Event("x", 4, b"4")])
    assert [line for line in (await slow.read()).split(b"\n") if line.startswith(b"data")] == [
        b"data: %d" % number for number in (1, 2, 3, 4)
    ]


def other_reads() -> Running:
    """A turn that is logged, and that another client follows that reads."""
    first = response_of("resp_1", status="in_progress")
    turn = Running("ada", Assembler(first, item_ids("resp_1")), is_stored=True)
    turn.attach(LastSubscriber())
    turn.log_events(EventWriter(MemoryEventLog(1 << 20), "ada", "resp_1"))
    return turn
