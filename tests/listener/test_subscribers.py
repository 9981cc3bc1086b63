"""What waits for a client that does not read is known, wherever it waits."""

from __future__ import annotations

import asyncio

import pytest

from segue.errors import Unavailable
from segue.listener.exchange import ANSWER_BYTES
from segue.listener.subscribers import CHUNK_BYTES, SseSubscriber
from segue.memory.budget import UNREAD_BYTES_MIN, Unread
from segue.responses.routes import DONE, write_sse
from segue.wire.events import Event


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
