"""What do the other processes have at the servers of an engine, and where did a conversation go there?

Every process reports twice a second, if something has changed, how many jobs it has at each server, how much these
have computed for it, and the hints that are new: which server has the history of which chain. So a choice counts
what all processes do, and a client that resends its history is known to all of them. A process that does not know a
history, because it has just started or the report is not there yet, asks the others before it reads the history
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from math import exp2

import msgspec
from msgspec import Struct

from segue.aio import in_background
from segue.engines.queued import NO_LOAD, ServerLoad, servers_of
from segue.replicas.measures import HALF_LIFE_S
from segue.replicas.router import RoutedEngine
from segue.replicas.slots import SharedSlots
from segue.seams.access import SharedLimits
from segue.seams.bus import OtherProcesses
from segue.seams.model import Engine

REPORT_S = 0.5
# A job that changes the picture is reported at once, so often at most.
REPORT_S_MIN = 0.05
# Others answer within a millisecond or two; one that has just died must not hold a turn up for longer.
ASK_S = 0.1
# A change of less than this part of the work is not worth a report.
WORTH = 0.05


class RoutesReport(Struct, frozen=True, array_like=True):
    """What a process says of itself."""

    loads: dict[str, ServerLoad]
    # Replicas by chains.
    hints: dict[str, str]
    # When replicas have come back empty.
    forgot: dict[str, float] = {}


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(RoutesReport).decode


class Fleet:
    """The routes of this process among those of the others."""

    def __init__(
        self,
        peers: OtherProcesses,
        shared_limits: SharedLimits,
        engines: Callable[[], Mapping[str, Engine]],
    ) -> None:
        """`engines` are those that are served now, by model."""
        self._peers = peers
        self._slots = SharedSlots(peers, shared_limits)
        self._engines = engines
        self._reports: dict[str, tuple[float, dict[str, ServerLoad]]] = {}
        self._hints: dict[str, str] = {}
        self._reported: dict[str, ServerLoad] = {}
        # Set when a job is on its way that is worth a report at once.
        self._is_due = asyncio.Event()
        peers.on_message("routes", self._note_report)
        peers.on_message("route", self._answer)
        peers.when_gone(self._forget)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Report while inside."""
        self.join()
        try:
            async with in_background("route_reports", self._report_forever):
                yield
        finally:
            await self._slots.give_back()

    async def _report_forever(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_due.wait(), REPORT_S)
            self._is_due.clear()
            await self.report()
            await asyncio.sleep(REPORT_S_MIN)

    async def report(self) -> None:
        """Send the others what has changed, and add up what they have reported."""
        self.join()
        loads: dict[str, ServerLoad] = {}
        forgot: dict[str, float] = {}
        now = asyncio.get_running_loop().time()
        for engine in self._engines().values():
            book = engine.book if isinstance(engine, RoutedEngine) else None
            for server in servers_of(engine):
                work = 0.0 if book is None else book.pace(server.name).work.at(now)
                loads[server.name] = ServerLoad(server.queue.running, server.queue.waiting, work)
            if book is not None:
                forgot.update(book.forgot)
        hints, self._hints = self._hints, {}
        if hints or any(_differ(self._reported.get(name), load) for name, load in loads.items()):
            self._reported = loads
            await self._peers.send("routes", _encode(RoutesReport(loads, hints, forgot)))

    def join(self) -> None:
        """Every server shares its slots, and knows what the others have there."""
        others = self._sum()
        for model, engine in self._engines().items():
            for server in servers_of(engine):
                server.others = others.get(server.name, NO_LOAD)
                if server.on_demand is None:
                    self._slots.share(model, server)
            if isinstance(engine, RoutedEngine):
                book = engine.book
                book.on_hint, book.on_work = self._note_hint, self._note_work
                book.find_hint = self._find

    def _sum(self) -> dict[str, ServerLoad]:
        now = asyncio.get_running_loop().time()
        total: dict[str, ServerLoad] = {}
        for at, loads in self._reports.values():
            left = exp2((at - now) / HALF_LIFE_S)
            for name, load in loads.items():
                known = total.get(name, NO_LOAD)
                total[name] = ServerLoad(
                    known.running + load.running,
                    known.waiting + load.waiting,
                    known.work + left * load.work,
                )
        return total

    def _note_hint(self, chain: str, name: str) -> None:
        self._hints[chain] = name

    def _note_work(self, name: str, tokens: int) -> None:
        known = self._reported.get(name, NO_LOAD)
        if tokens > WORTH * known.work:
            self._is_due.set()

    async def _find(self, chain: str) -> str | None:
        """The replica that has the history of this chain, as far as another process knows."""
        try:
            async with asyncio.timeout(ASK_S):
                found = await self._peers.find("route", chain.encode(), self._peers.others)
        except TimeoutError:
            return None
        return None if found is None else found[1].decode()

    async def _note_report(self, worker: str, body: bytes) -> None:
        report = _decode(body)
        self._reports[worker] = (asyncio.get_running_loop().time(), report.loads)
        for engine in self._routed():
            known = {server.name for server in engine.servers}
            for chain, name in report.hints.items():
                if name in known:
                    engine.book.note_hint(chain, name)
            for name, at in report.forgot.items():
                engine.book.note_forgot(name, at)
        self.join()

    async def _answer(self, _: str, body: bytes) -> bytes | None:
        hints = (engine.book.hint(body.decode()) for engine in self._routed())
        return next((name.encode() for name in hints if name is not None), None)

    def _routed(self) -> list[RoutedEngine]:
        return [engine for engine in self._engines().values() if isinstance(engine, RoutedEngine)]

    def _forget(self, worker: str) -> None:
        self._reports.pop(worker, None)


def _differ(known: ServerLoad | None, new: ServerLoad) -> bool:
    if known is None or (known.running, known.waiting) != (new.running, new.waiting):
        return known is not None or new != NO_LOAD
    return abs(known.work - new.work) > WORTH * max(known.work, new.work)
