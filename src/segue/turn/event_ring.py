"""Which events of a running turn can still be sent again? The last ones, within a limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import msgpack

from segue.wire.codec import without_slack
from segue.wire.events import Event

# Together with what waits for a reader that has stopped, less than 2 MiB.
RING_BYTES_MAX = 768 * 1024
# Older events of a ring are packed in blocks of about this many bytes. Twice as many stay loose where they are few:
# two or three snapshots with the tools of an agent would only be copied.
PACKED_BYTES = 64 * 1024
FEW_EVENTS = 128


class EventRing:
    """The last events of a turn, numbered without a gap.

    Older ones are packed: as thousands of small objects they would take twice the memory, and leave it in fragments.
    """

    __slots__ = ("_loose", "_loose_bytes", "_packed", "_packed_bytes", "last", "oldest")

    def __init__(self, first: int = 0) -> None:
        # The numbers of the oldest event that is still here, and of the last one.
        self.oldest, self.last = first, first - 1
        # Each block with the number of the first event after it.
        self._packed: deque[tuple[bytes, int]] = deque()
        self._packed_bytes = 0
        self._loose: list[Event] = []
        self._loose_bytes = 0

    def extend(self, events: Sequence[Event]) -> None:
        """Add these, and drop the oldest where they are too many."""
        if self.last < self.oldest:
            self.oldest = events[0].number
        self.last = events[-1].number
        self._loose += events
        self._loose_bytes += sum([len(event.data) for event in events])
        if self._loose_bytes > PACKED_BYTES * (2 if len(self._loose) <= FEW_EVENTS else 1):
            self._pack()

    def _pack(self) -> None:
        """Pack all but the last event, which may be a large terminal one."""
        *older, last = self._loose
        if older:
            block = without_slack(msgpack.encode(older))
            self._packed.append((block, last.number))
            self._packed_bytes += len(block)
            self._loose, self._loose_bytes = [last], len(last.data)
        while self.bytes > RING_BYTES_MAX and self._packed:
            block, self.oldest = self._packed.popleft()
            self._packed_bytes -= len(block)

    @property
    def bytes(self) -> int:
        """What they take."""
        return self._packed_bytes + self._loose_bytes

    def after(self, number: int) -> list[Event]:
        """Those with a higher number."""
        blocks = (block for block, end in self._packed if end > number + 1)
        older = (event for block in blocks for event in msgpack.decode(block, type=list[Event]))
        return [event for event in (*older, *self._loose) if event.number > number]
