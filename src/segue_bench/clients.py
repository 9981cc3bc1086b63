"""What do many clients do at once? Idle clients, readers that never read, streams, and clients that all reconnect.

Each group connects, runs a command, and reports its counts. What a server does to them is only counted here, never
judged.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol, get_args

import msgspec
from msgspec import Struct

from segue_bench.figures import percentile
from segue_bench.streams import (
    LATE_STEPS,
    ServerRefused,
    StreamConnection,
    StreamCounts,
    StreamLanes,
    create_frame,
    late_ms,
)
from segue_bench.ways import LAST

# The listener's queue is longer; opening is not what is measured.
OPENING_MAX = 200
OPEN_S_MAX = 120.0
ANSWER_S_MAX = 600.0
# Clients that never read have asked for as many answers as may wait, so that the server has to end the connection.
STALLED_ANSWERS = 64
# So that what is not read stays with the server, as on a slow network.
STALLED_RECEIVE_BYTES = 4_096
# Streams begin one after the other, so that they do not end together.
RAMP_S = 1.0
# A client that was refused when it came back tries again.
RETRY_S = 0.2
BACK_S_MAX = 300.0

ENDS = tuple(
    b'{"type":"%b"' % kind
    for kind in (b"response.completed", b"response.failed", b"response.incomplete", b"error")
)


class CrowdCounts(Struct, frozen=True, kw_only=True):
    """What a group of clients reports."""

    # How many are connected, and how many connections ended.
    open: int
    lost: int = 0
    # Why connections ended: close codes, and 0 where there was no close frame.
    codes: dict[int, int] = {}
    # Streams: what arrived while it was counted.
    tokens: int = 0
    answers: int = 0
    drops: int = 0
    seconds: float = 0.0
    late_ms_p50: float | None = None
    late_ms_p99: float | None = None
    # Clients that reconnect: how many went on from their stored turn, the errors before that, and how long it took.
    served: int = 0
    refused: dict[str, int] = {}
    served_s_p50: float | None = None
    served_s_p99: float | None = None
    served_s_max: float | None = None


class ClientGroup(Protocol):
    """The clients of one kind."""

    async def connect(self) -> None:
        """Open all connections."""

    async def run(self, command: str, amount: float) -> None:
        """Do what the command says."""

    def counts(self) -> CrowdCounts:
        """The state of the group."""


async def _each(count: int, work: Callable[[int], Awaitable[None]]) -> None:
    """Do this many pieces of work, some of them at once."""
    slots = asyncio.Semaphore(OPENING_MAX)

    async def do(number: int) -> None:
        async with slots:
            await work(number)

    try:
        async with asyncio.timeout(OPEN_S_MAX), asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(do(number))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


class ListeningClient:
    """A client that only counts how its connection ended."""

    def __init__(self, port: int, codes: Counter[int]) -> None:
        self._codes = codes
        self.connection = StreamConnection(port, self)

    def event(self, data: bytes, now: float) -> None:
        pass

    def lost(self, code: int | None) -> None:
        self._codes[code or 0] += 1


class IdleClients:
    """Clients that hold a connection open; with `is_stalled`, that have asked for much and read nothing."""

    def __init__(self, port: int, count: int, *, is_stalled: bool) -> None:
        self._port = port
        self._count = count
        self._is_stalled = is_stalled
        self._codes: Counter[int] = Counter()
        self._clients: list[ListeningClient] = []

    async def connect(self) -> None:
        await _each(self._count, self._open)

    async def _open(self, number: int) -> None:
        client = ListeningClient(self._port, self._codes)
        await client.connection.open(receive_bytes=STALLED_RECEIVE_BYTES * self._is_stalled)
        self._clients.append(client)
        if self._is_stalled:
            client.connection.stop_reading()
            for _ in range(STALLED_ANSWERS):
                client.connection.write(create_frame(store=False))

    async def run(self, command: str, amount: float) -> None:
        pass

    def counts(self) -> CrowdCounts:
        """Clients that do not read do not notice that their connection was closed."""
        lost = self._codes.total()
        return CrowdCounts(open=len(self._clients) - lost, lost=lost, codes=dict(self._codes))


class StreamingClients:
    """Clients that ask for one answer after the other, on each lane of each connection."""

    def __init__(
        self, port: int, count: int, tokens_per_s: float, lanes: int = 1, seed: int = 1
    ) -> None:
        self._counts = StreamCounts()
        self._clients = [StreamLanes(port, lanes, self._counts, tokens_per_s) for _ in range(count)]
        self._is_paced = tokens_per_s > 0
        self._random = random.Random(seed)
        self._seconds = 0.0

    async def connect(self) -> None:
        """Open all connections, and start the streams."""
        await _each(len(self._clients), lambda number: self._clients[number].connection.open())
        loop = asyncio.get_running_loop()
        for client in self._clients:
            for start in client.starts():
                loop.call_later(self._random.uniform(0, RAMP_S), start)
        await asyncio.sleep(1.5 * RAMP_S)

    async def run(self, command: str, amount: float) -> None:
        """Count for this many seconds."""
        counts = self._counts
        counts.tokens = counts.answers = 0
        counts.late = array("L", bytes(8 * LATE_STEPS)) if self._is_paced else None
        counts.is_counting = True
        began = time.perf_counter()
        await asyncio.sleep(amount)
        counts.is_counting = False
        self._seconds = time.perf_counter() - began

    def counts(self) -> CrowdCounts:
        """What arrived when it was last counted."""
        counts = self._counts
        return CrowdCounts(
            open=len(self._clients) - counts.drops,
            drops=counts.drops,
            tokens=counts.tokens,
            answers=counts.answers,
            seconds=self._seconds,
            late_ms_p50=late_ms(counts.late, 0.5),
            late_ms_p99=late_ms(counts.late, 0.99),
        )

    def close(self) -> None:
        self._counts.is_over = True
        for client in self._clients:
            client.connection.close()


class _Error(Struct):
    code: str | None = None


class ReturningClient(ListeningClient):
    """A client with a stored turn that it goes on from."""

    def __init__(self, port: int, codes: Counter[int], number: int) -> None:
        super().__init__(port, codes)
        self._port = port
        self._number = number
        self._last: asyncio.Future[bytes] | None = None
        self._parent = ""
        self.is_open = False

    async def open(self) -> None:
        """Connect; the socket is a new one each time."""
        self.connection = StreamConnection(self._port, self)
        await self.connection.open()
        self.is_open = True

    async def turn(self) -> None:
        """One stored turn after the last one."""
        self._last = asyncio.get_running_loop().create_future()
        fields: dict[str, object] = {"input": f"This is {self._number}."}
        if self._parent:
            fields["previous_response_id"] = self._parent
        self.connection.write(create_frame(**fields))
        async with asyncio.timeout(ANSWER_S_MAX):
            last = LAST.decode(await self._last)
        if last.type != "response.completed" or last.response is None:
            error = msgspec.json.decode(last.error, type=_Error | None)
            raise ServerRefused(error.code if error else last.type)
        if last.response.previous_response_id != (self._parent or None):
            raise ServerRefused("another parent")
        self._parent = last.response.id

    def event(self, data: bytes, now: float) -> None:
        if data.startswith(ENDS) and self._last is not None and not self._last.done():
            self._last.set_result(data)

    def lost(self, code: int | None) -> None:
        super().lost(code)
        self.is_open = False
        if self._last is not None and not self._last.done():
            self._last.set_exception(ConnectionError("lost"))


class ReturningClients:
    """Clients that lose their connections and all come back at once."""

    def __init__(self, port: int, count: int) -> None:
        self._codes: Counter[int] = Counter()
        self._clients = [ReturningClient(port, self._codes, number) for number in range(count)]
        self._refused: Counter[str] = Counter()
        self._served_s: list[float] = []

    async def connect(self) -> None:
        """Open all connections, each with a turn."""
        await _each(len(self._clients), self._open_with_turn)

    async def _open_with_turn(self, number: int) -> None:
        await self._clients[number].open()
        await self._clients[number].turn()

    async def run(self, command: str, amount: float) -> None:
        """`drop` all connections, or come `back`."""
        if command == "drop":
            for client in self._clients:
                client.connection.abort()
            return
        began = time.perf_counter()
        async with asyncio.timeout(BACK_S_MAX), asyncio.TaskGroup() as group:
            for client in self._clients:
                group.create_task(self._return(client, began))

    async def _return(self, client: ReturningClient, began: float) -> None:
        """Try until it is served; every error is counted."""
        while True:
            try:
                if not client.is_open:
                    await client.open()
                await client.turn()
            except OSError as error:
                self._refused[str(error)] += 1
                await asyncio.sleep(RETRY_S)
            else:
                self._served_s.append(time.perf_counter() - began)
                return

    def counts(self) -> CrowdCounts:
        times = self._served_s

        def share(part: float) -> float | None:
            return round(percentile(times, part), 3) if times else None

        return CrowdCounts(
            open=sum(client.is_open for client in self._clients),
            lost=self._codes.total(),
            codes=dict(self._codes),
            served=len(times),
            refused=dict(self._refused),
            served_s_p50=share(0.5),
            served_s_p99=share(0.99),
            served_s_max=share(1.0),
        )


ClientKind = Literal["idle", "stalled", "streams", "herd"]


def make_group(kind: str, port: int, count: int, tokens_per_s: float) -> ClientGroup:
    """The clients of this kind, not connected yet."""
    match kind:
        case "idle" | "stalled":
            return IdleClients(port, count, is_stalled=kind == "stalled")
        case "streams":
            return StreamingClients(port, count, tokens_per_s)
        case "herd":
            return ReturningClients(port, count)
        case _:
            raise ValueError(f"'{kind}' is not one of {', '.join(get_args(ClientKind))}")
