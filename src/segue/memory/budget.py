"""How much may this process hold in all, and what gives way when it holds more?

In: the parts that hold memory, each with its own limit and its own count. Once a second they are added up. Above the
limit of all, caches shrink, those first that cost least to fill again; if that is not enough, only the oldest message
is read on, and new turns and what is appended to running ones are refused. Counted is what the parts know of: not the
program, not the model.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol, Self

from segue.errors import InvalidRequest, Unavailable
from segue.memory.intake import Intake
from segue.wire.items import ITEM_BYTES

log = logging.getLogger(__name__)

ENFORCE_S, RETRY_S = 1.0, 5
# A look is due as well once this part of the limit has come since the last one.
ENFORCE_PART = 32
# How long a request that reads much by name waits for the memory of other requests.
ROOM_S = 10.0
# Of the limit; what a server asks of its own store is smaller.
SMALL_PART = 256
# How often what a client sends is in memory: as it came, as the bytes of its items, and as their values.
SENT_COST = 3
# Where the system does not say how much memory there is.
ASSUMED_BYTES = 4 * 1024**3
# What may be held by default of the memory that there is: the program, the model and the system need the rest.
PART = 2
# Files with the limit of the process's control group: version 2, version 1.
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# No writer has to do with less.
UNREAD_BYTES_MIN = 64 * 1024
NO_ROOM = "The server has no memory for what this request would read. Please retry."
TOO_LARGE = "What this request names does not fit into the memory of this server."


def machine_bytes() -> int:
    """The memory that this process may use: the machine's, or what its control group allows."""
    sizes = [ASSUMED_BYTES]
    with suppress(OSError, ValueError):
        sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in CGROUPS:
        with suppress(OSError, ValueError):  # "max": no limit
            sizes.append(int(Path(name).read_text()))
    return min(sizes)


def resident_bytes() -> int:
    """The memory that this process has now, as the system counts it; 0 where the system does not say."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def memory_for(wanted: int, workers: int) -> int:
    """What each of so many workers may hold, if all may hold this much; 0: by the memory that there is."""
    return (wanted or machine_bytes() // PART) // workers


def sent_bytes(size: int, items: int) -> int:
    """What so many bytes with so many items hold once they are decoded."""
    return SENT_COST * size + ITEM_BYTES * items


class Writer(Protocol):
    """Has an answer that its client does not read."""

    @property
    def unread_bytes(self) -> int:
        """What waits for the client."""


class Unread:
    """The answers that wait for clients that do not read."""

    def __init__(self, bytes_max: int = ASSUMED_BYTES) -> None:
        self.bytes_max = bytes_max
        self.writers: set[Writer] = set()

    @property
    def bytes(self) -> int:
        """How much waits."""
        return sum(writer.unread_bytes for writer in self.writers)

    @property
    def share(self) -> int:
        """How much may wait for each of those that do not read."""
        return max(UNREAD_BYTES_MIN, self.bytes_max // max(1, len(self.writers)))


class MemoryRoom:
    """Memory that is set aside for one request until a part counts what it holds."""

    def __init__(self, memory: Memory, size: int = 0) -> None:
        self._memory = memory
        self.bytes = size
        memory.preparing_bytes += size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.give(self.bytes)

    def give(self, size: int) -> None:
        """So much is not needed any more."""
        self.bytes -= size
        self._memory.preparing_bytes -= size
        self._memory.freed.set()

    async def take(self, size: int, param: str | None = None) -> None:
        """Set so much more aside, before it is read. A large request waits until
        other requests have given memory back."""
        memory = self._memory
        if size * ENFORCE_PART <= memory.bytes_max:
            memory.check(size)
        elif size > memory.bytes_max:
            raise InvalidRequest(TOO_LARGE, code="context_length_exceeded", param=param)
        elif memory.bytes + size > memory.bytes_max:
            try:
                async with asyncio.timeout(ROOM_S), memory.large:
                    while not memory.shrink(size):
                        memory.freed.clear()
                        await memory.freed.wait()
            except TimeoutError:
                raise Unavailable(NO_ROOM, wait_s=RETRY_S) from None
        self.give(-size)


class Memory:
    """What the parts of this process hold, and one limit for all."""

    def __init__(self, bytes_max: int = ASSUMED_BYTES, body_bytes_max: int = 0) -> None:
        self.bytes_max = bytes_max
        # One message is always accepted. Most of the memory is for histories and prompts.
        self.intake = Intake(max(bytes_max // 32, body_bytes_max))
        self.unread = Unread(bytes_max // 16)
        # Whether the limit is reached although the caches are empty.
        self.is_full = False
        # What the requests hold that are being prepared, and what came since the last look.
        self.preparing_bytes = 0
        self._unseen_bytes = 0
        # Those that need much wait here, first come, first served; and for this, which is set when some may be free.
        self.large = asyncio.Lock()
        self.freed = asyncio.Event()
        # What each part holds now.
        self.parts: Mapping[str, Callable[[], int]] = {}
        self._caches: Sequence[Callable[[int], None]] = ()

    def watch(
        self, parts: Mapping[str, Callable[[], int]], caches: Sequence[Callable[[int], None]]
    ) -> None:
        """From now on these are the parts. Each of `caches` gives up so many bytes, as far as it has them."""
        self.parts = {
            **parts,
            "inbound": lambda: self.intake.bytes + self.preparing_bytes,
            "unread": lambda: self.unread.bytes,
        }
        self._caches = caches

    @property
    def bytes(self) -> int:
        """What all of them hold."""
        return sum(read() for read in self.parts.values())

    def check(self, size: int = 0) -> None:
        """Refuse what would hold so much more while the limit is reached. Where much has come since the last look, look
        again now: a second is long enough to send many times the limit."""
        self._unseen_bytes += size
        if self._unseen_bytes * ENFORCE_PART > self.bytes_max:
            self.enforce()
        if self.is_full:
            raise Unavailable("The server has reached its memory limit.", wait_s=RETRY_S)

    def preparing(self, size: int) -> MemoryRoom:
        """What is prepared inside holds so much, and what it takes beside; refused while the limit is reached."""
        self.check(size)
        return MemoryRoom(self, size)

    @asynccontextmanager
    async def reading(self, size: int, param: str | None = None) -> AsyncIterator[None]:
        """What is read inside holds so much, until the reader counts it. What is small is always read."""
        with MemoryRoom(self) as room:
            if size * SMALL_PART > self.bytes_max:
                await room.take(size, param)
            yield

    def shrink(self, size: int = 0) -> bool:
        """Let caches give way to so much more; whether there is room for it now."""
        for shrink in self._caches:
            if (excess := self.bytes + size - self.bytes_max) <= 0:
                break
            shrink(excess)
        return self.bytes + size <= self.bytes_max

    def enforce(self) -> None:
        """Shrink what is above the limit."""
        self._unseen_bytes = 0
        self.freed.set()
        self.shrink()
        was_full, self.is_full = self.is_full, self.bytes > self.bytes_max
        if self.is_full != was_full:
            self.intake.set_closed(is_closed=self.is_full)
        if self.is_full and not was_full:
            log.warning("memory_bytes_max is reached: new requests are refused until turns end")

    async def enforce_forever(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.sleep(ENFORCE_S)
            self.enforce()
