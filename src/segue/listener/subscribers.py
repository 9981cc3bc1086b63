"""How does a stream of events leave by HTTP? As SSE, event by event, or as JSON, after the last event.

Both are subscribers of a running turn and get the same events. A subscriber takes events at once and wakes its writer.
What an event looks like on the stream is said by the API's own function (`WriteEvents`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from segue.errors import Unavailable
from segue.listener.exchange import ANSWER_BYTES, ANSWER_WAIT_S, UNREAD
from segue.memory.budget import UNREAD_BYTES_MIN, Unread
from segue.turn.running import Running
from segue.wire.events import Event

SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx buffers a stream without this.
    (b"x-accel-buffering", b"no"),
)

# What Python needs for each event beside its bytes.
CHUNK_BYTES = 48

# Events of a turn as an API writes them: the bytes of each, or nothing for those that its clients do not know.
WriteEvents = Callable[[Sequence[Event]], list[bytes]]


class SseSubscriber:
    """Buffers events as SSE until the connection takes them, and slows the turn down when it does not. Where others
    read, it misses events instead, and follows again once it has been read."""

    can_catch_up = True

    def __init__(
        self, write: WriteEvents, bytes_max: int, unread: Unread, last: bytes = b""
    ) -> None:
        """`last`: what follows the last event."""
        self._write = write
        self._last = last
        self._unread = unread
        # Whether everything has been taken, the end included.
        self.is_over = False
        # Whether the turn goes on in another process.
        self.is_lost = False
        self._is_ended = False
        # The last event before those that it has missed.
        self.missed_after: int | None = None
        self._bytes_max = bytes_max
        self._chunks: list[bytes] = []
        self._bytes = 0
        # What was taken and is not written yet.
        self._taken_bytes = 0
        self._wake = asyncio.Event()
        # The turn, from before its first event on.
        self.running: Running | None = None

    def attached(self, running: Running) -> None:
        self.running = running

    @property
    def is_full(self) -> bool:
        return self.missed_after is not None or self.unread_bytes > min(
            self._bytes_max, self._unread.share
        )

    @property
    def unread_bytes(self) -> int:
        return self._bytes + self._taken_bytes

    def deliver(self, events: Sequence[Event]) -> None:
        if (self._taken_bytes or self.missed_after is not None) and self._misses(events):
            return
        chunks = self._write(events)
        self._bytes += sum(map(len, chunks)) + CHUNK_BYTES * len(chunks)
        self._chunks += chunks
        if self._bytes > UNREAD_BYTES_MIN:
            self._unread.writers.add(self)
        if events[-1].is_terminal:
            self.end()
        elif chunks:
            self._wake.set()

    def _misses(self, events: Sequence[Event]) -> bool:
        """Whether these come too early: it is full and others read, or has missed some before them."""
        number, running = events[0].number, self.running
        if self.missed_after is None and self.is_full:
            if running is not None and running.goes_on_without(self):
                self.missed_after = number - 1
                return True
        elif self.missed_after is not None:
            if number > self.missed_after + 1:
                return True
            self.missed_after = None
        return False

    def end(self) -> None:
        """No event follows."""
        if not self._is_ended:
            self._chunks.append(self._last)
            self._is_ended = True
            self._wake.set()

    def check(self) -> None:
        """Refuse a long replay where too much waits for clients that do not read; one of any length is always sent."""
        room = max(self._unread.bytes_max, self._bytes)
        if self._bytes > ANSWER_BYTES and self._unread.bytes > room:
            self.close()
            raise Unavailable(UNREAD, wait_s=ANSWER_WAIT_S)

    def lose(self) -> None:
        self.is_lost = True
        self._wake.set()

    def close(self) -> None:
        """No client reads on. What waits is dropped, and the turn and the writer are let go: a writer that knows its
        subscriber would keep all of it until the garbage collector comes."""
        self._unread.writers.discard(self)
        if self.running is not None:
            self.running.detach(self)
        self._write, self.running, self._chunks = lambda events: [], None, []
        self._bytes = self._taken_bytes = 0

    async def read(self) -> bytes:
        """Everything that is ready, as one write of whole events; it is written when this is called again. Nothing, if
        it has to catch up first."""
        self._taken_bytes = 0
        if self.running is not None:
            self.running.wake()
        if self._bytes <= UNREAD_BYTES_MIN:
            self._unread.writers.discard(self)
        if self.missed_after is None:
            await self._wake.wait()
        self._wake.clear()
        data = b"".join(self._chunks)
        self._chunks, self._bytes, self._taken_bytes = [], 0, len(data)
        if self._taken_bytes <= UNREAD_BYTES_MIN:
            self._unread.writers.discard(self)
        self.is_over = self._is_ended
        return data


class LastSubscriber:
    """Waits for the terminal event: plain JSON."""

    is_full = False
    can_catch_up = False
    # It is never cut to come back for the rest.
    is_lost = False

    def __init__(self) -> None:
        self._end = asyncio.Event()

    def attached(self, running: Running) -> None:
        """Nothing to do: its user knows the turn."""

    def deliver(self, events: Sequence[Event]) -> None:
        if events[-1].is_terminal:
            self._end.set()

    def lose(self) -> None:
        self._end.set()

    async def ended(self) -> None:
        """Wait for the end of the turn."""
        await self._end.wait()
