"""What do many clients do at once? Idle ones, readers that never read, streams, a herd; each a party with one verb.

A party comes, heeds a word, and tells how it stands. What a server does to it is only counted here, never judged.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
from msgspec import Struct

from segue_bench.line import frame
from segue_bench.streams import LATE_STEPS, MODEL, Connection, Lanes, Refused, Tally, late_ms

# The listener's queue is longer; opening is not what is measured.
OPENING_MAX = 200
OPEN_S_MAX = 120.0
ANSWER_S_MAX = 600.0
# Those who never read have asked for as many answers as may wait, so that the server is the one that ends it.
STALLED_ANSWERS = 64
# So that what is not read stays with the server, as on a thin line.
STALLED_RECEIVE_BYTES = 4_096
# Streams begin one after the other, so that they do not end together.
RAMP_S = 1.0
# A guest of a herd that was turned away tries again.
RETRY_S = 0.2
BACK_S_MAX = 300.0


class Told(Struct, frozen=True, kw_only=True):
    """What a crowd says of itself."""

    # How many are connected, and how many were lost without having been told to leave.
    open: int
    lost: int = 0
    # Why connections ended: close codes, and 0 where there was no close frame.
    codes: dict[int, int] = {}
    # Streams: what came while it was counted.
    tokens: int = 0
    answers: int = 0
    drops: int = 0
    seconds: float = 0.0
    late_ms_p50: float | None = None
    late_ms_p99: float | None = None
    # Herd: how many went on from their stored turn, what else they heard, and how long it took them all.
    served: int = 0
    refused: dict[str, int] = {}
    served_s_p50: float | None = None
    served_s_p99: float | None = None
    served_s_max: float | None = None


class Party(Protocol):
    """The guests of one kind."""

    async def come(self) -> None:
        """All of them."""

    async def heed(self, word: str, amount: float) -> None:
        """Do what they are told."""

    def tell(self) -> Told:
        """How it stands."""


def create(**fields: object) -> bytes:
    """A frame that asks for a turn."""
    asked = {"type": "response.create", "model": MODEL, "input": "Tell me.", **fields}
    return frame(msgspec.json.encode(asked))


async def _each(count: int, work: Callable[[int], Awaitable[None]]) -> None:
    """Do this so many times, some at once."""
    gate = asyncio.Semaphore(OPENING_MAX)

    async def one(number: int) -> None:
        async with gate:
            await work(number)

    async with asyncio.timeout(OPEN_S_MAX), asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one(number))


class Guest:
    """One that only listens; the party knows how it ended."""

    def __init__(self, port: int, codes: Counter[int]) -> None:
        self._codes = codes
        self.connection = Connection(port, self)

    def hear(self, event: bytes, now: float) -> None:
        """Nothing was asked for."""

    def lost(self, code: int | None) -> None:
        """Count how it ended."""
        self._codes[code or 0] += 1


class Idle:
    """Guests that hold a connection open; with `is_stalled`, that have asked for much and read none of it."""

    def __init__(self, port: int, count: int, *, is_stalled: bool) -> None:
        self._port = port
        self._count = count
        self._is_stalled = is_stalled
        self._codes: Counter[int] = Counter()
        self._guests: list[Guest] = []

    async def come(self) -> None:
        """All of them."""
        await _each(self._count, self._enter)

    async def _enter(self, number: int) -> None:
        guest = Guest(self._port, self._codes)
        await guest.connection.open(receive_bytes=STALLED_RECEIVE_BYTES * self._is_stalled)
        self._guests.append(guest)
        if self._is_stalled:
            guest.connection.stop_reading()
            for _ in range(STALLED_ANSWERS):
                guest.connection.write(create(store=False))

    async def heed(self, word: str, amount: float) -> None:
        """They only tell."""

    def tell(self) -> Told:
        """How many are left. Those who do not read do not notice that they were cut."""
        lost = self._codes.total()
        return Told(open=len(self._guests) - lost, lost=lost, codes=dict(self._codes))


class Streams:
    """Guests that ask for one answer after the other."""

    def __init__(self, port: int, count: int, tokens_per_s: float) -> None:
        self._tally = Tally()
        self._all = [Lanes(port, 1, self._tally, tokens_per_s) for _ in range(count)]
        self._seconds = 0.0

    async def come(self) -> None:
        """All of them, and begin."""
        await _each(len(self._all), lambda number: self._all[number].connection.open())
        loop, chance = asyncio.get_running_loop(), random.Random(1)
        for one in self._all:
            for begin in one.start():
                loop.call_later(chance.uniform(0, RAMP_S), begin)
        await asyncio.sleep(1.5 * RAMP_S)

    async def heed(self, word: str, amount: float) -> None:
        """Count for so long."""
        tally = self._tally
        tally.tokens = tally.answers = 0
        tally.late = array("L", bytes(8 * LATE_STEPS))
        tally.is_counting, began = True, time.perf_counter()
        await asyncio.sleep(amount)
        tally.is_counting = False
        self._seconds = time.perf_counter() - began

    def tell(self) -> Told:
        """What came when it was last counted."""
        tally = self._tally
        late = tally.late if tally.late is not None and any(tally.late) else None
        return Told(
            open=len(self._all) - tally.drops,
            drops=tally.drops,
            tokens=tally.tokens,
            answers=tally.answers,
            seconds=self._seconds,
            late_ms_p50=late_ms(late, 0.5) if late else None,
            late_ms_p99=late_ms(late, 0.99) if late else None,
        )


class Member(Guest):
    """One of a herd: has a stored turn, and wants to go on from it."""

    def __init__(self, port: int, codes: Counter[int], number: int) -> None:
        super().__init__(port, codes)
        self._port = port
        self._number = number
        self._heard: asyncio.Future[bytes] | None = None
        self._parent = ""
        self.is_open = False

    async def enter(self) -> None:
        """Connect; the socket is a new one each time."""
        self.connection = Connection(self._port, self)
        await self.connection.open()
        self.is_open = True

    async def turn(self) -> None:
        """One stored turn after the last one; or what was said instead."""
        self._heard = asyncio.get_running_loop().create_future()
        fields: dict[str, object] = {"input": f"This is {self._number}."}
        if self._parent:
            fields["previous_response_id"] = self._parent
        self.connection.write(create(**fields))
        async with asyncio.timeout(ANSWER_S_MAX):
            last = msgspec.json.decode(await self._heard, type=Ended)
        if last.type != "response.completed":
            raise Refused(last.error.code if last.error else last.type)
        assert last.response is not None
        if last.response.previous_response_id != (self._parent or None):
            raise Refused("another parent")
        self._parent = last.response.id

    def hear(self, event: bytes, now: float) -> None:
        """The end of its turn."""
        kinds = (b"response.completed", b"response.failed", b"response.incomplete", b"error")
        is_end = event.startswith(tuple(b'{"type":"%b"' % kind for kind in kinds))
        if is_end and self._heard is not None and not self._heard.done():
            self._heard.set_result(event)

    def lost(self, code: int | None) -> None:
        """It is out."""
        super().lost(code)
        self.is_open = False
        if self._heard is not None and not self._heard.done():
            self._heard.set_exception(ConnectionError("lost"))


class _Error(Struct):
    code: str | None = None


class _Response(Struct):
    id: str
    previous_response_id: str | None = None


class Ended(Struct):
    """As much of a terminal event as a herd must know."""

    type: str
    response: _Response | None = None
    error: _Error | None = None


class Herd:
    """Guests that come back all at once."""

    def __init__(self, port: int, count: int) -> None:
        self._codes: Counter[int] = Counter()
        self._members = [Member(port, self._codes, number) for number in range(count)]
        self._refused: Counter[str] = Counter()
        self._served_s: list[float] = []

    async def come(self) -> None:
        """All of them, each with a turn."""
        await _each(len(self._members), self._begin)

    async def _begin(self, number: int) -> None:
        await self._members[number].enter()
        await self._members[number].turn()

    async def heed(self, word: str, amount: float) -> None:
        """Be cut off, or come back."""
        if word == "drop":
            for one in self._members:
                one.connection.abort()
            return
        began = time.perf_counter()
        async with asyncio.timeout(BACK_S_MAX), asyncio.TaskGroup() as group:
            for one in self._members:
                group.create_task(self._return(one, began))

    async def _return(self, member: Member, began: float) -> None:
        """Until it is served; everything that it hears instead is noted."""
        while True:
            try:
                if not member.is_open:
                    await member.enter()
                await member.turn()
            except OSError as error:
                self._refused[str(error)] += 1
                await asyncio.sleep(RETRY_S)
            else:
                self._served_s.append(time.perf_counter() - began)
                return

    def tell(self) -> Told:
        """How many are here, and how long it took them to come back."""
        times = sorted(self._served_s)

        def share(part: float) -> float | None:
            return round(times[min(len(times) - 1, int(part * len(times)))], 3) if times else None

        return Told(
            open=sum(one.is_open for one in self._members),
            lost=self._codes.total(),
            codes=dict(self._codes),
            served=len(times),
            refused=dict(self._refused),
            served_s_p50=share(0.5),
            served_s_p99=share(0.99),
            served_s_max=share(1.0),
        )


def gather(kind: str, port: int, count: int, tokens_per_s: float) -> Party:
    """The guests of this kind."""
    match kind:
        case "idle" | "stalled":
            return Idle(port, count, is_stalled=kind == "stalled")
        case "streams":
            return Streams(port, count, tokens_per_s)
        case "herd":
            return Herd(port, count)
        case _:
            raise ValueError(kind)
