"""What do the other processes have at the replicas of an engine, and where did a conversation go there?

Every process reports twice a second, if something has changed, how many jobs it has at each replica, how much these
have computed for it, and the hints that are new: which replica has the history of which chain. So a choice counts
what all processes do, and a client that resends its history is known to all of them. A process that does not know a
history, because it has just started or the report is not there yet, asks the others before it reads the history
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import exp2
from typing import Protocol

import msgspec
from msgspec import Struct

from segue.aio import in_background
from segue.cluster.peers import Peers
from segue.cluster.slots import ReplicaShare, SharedSlots, SlotQueue
from segue.routing.book import NO_LOAD, OthersLoad, RouteBook
from segue.routing.measures import HALF_LIFE_S
from segue.seams.access import SharedLimits

REPORT_S = 0.5
# A job that changes the picture is reported at once, so often at most.
REPORT_S_MIN = 0.05
# Others answer within a millisecond or two; one that has just died must not hold a turn up for longer.
ASK_S = 0.1
# A change of less than this part of the work is not worth a report.
WORTH = 0.05


class RoutedModel(Protocol):
    """An engine with several replicas."""

    book: RouteBook

    def loads(self) -> Mapping[str, OthersLoad]:
        """What this process has at each replica."""

    def share_slots(self, share: Callable[[str, SlotQueue], ReplicaShare]) -> None:
        """The limits of replicas are for all processes together from now on."""


class RoutesReport(Struct, frozen=True, array_like=True):
    """What a process says of itself."""

    loads: dict[str, OthersLoad]
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
        peers: Peers,
        shared_limits: SharedLimits,
        models: Callable[[], Mapping[str, RoutedModel]],
    ) -> None:
        self._peers = peers
        self._slots = SharedSlots(peers, shared_limits)
        # Those that are served now: they may change.
        self._models = models
        self._reports: dict[str, tuple[float, dict[str, OthersLoad]]] = {}
        self._hints: dict[str, str] = {}
        self._reported: dict[str, OthersLoad] = {}
        # Set when a job is on its way that is worth a report at once.
        self._is_due = asyncio.Event()
        peers.answer("routes", self._take)
        peers.answer("route", self._answer)
        peers.when_gone(self._forget)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Report while inside."""
        self._join()
        try:
            async with in_background("route_reports", self._keep_reporting):
                yield
        finally:
            await self._slots.give_back()

    async def _keep_reporting(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_due.wait(), REPORT_S)
            self._is_due.clear()
            await self.report()
            await asyncio.sleep(REPORT_S_MIN)

    async def report(self) -> None:
        """Send the others what has changed, and add up what they have reported."""
        self._join()
        loads: dict[str, OthersLoad] = {}
        forgot: dict[str, float] = {}
        for model in self._models().values():
            loads.update(model.loads())
            forgot.update(model.book.forgot)
        hints, self._hints = self._hints, {}
        if hints or any(_differ(self._reported.get(name), one) for name, one in loads.items()):
            self._reported = loads
            await self._peers.send("routes", _encode(RoutesReport(loads, hints, forgot)))

    def _join(self) -> None:
        """Every model knows what the others have."""
        others = self._sum()
        for name, model in self._models().items():
            model.share_slots(partial(self._slots.share, name))
            book = model.book
            book.others, book.on_hint, book.find_hint = others, self._note, self._find
            book.on_work = self._note_work

    def _sum(self) -> dict[str, OthersLoad]:
        now = asyncio.get_running_loop().time()
        total: dict[str, OthersLoad] = {}
        for at, loads in self._reports.values():
            left = exp2((at - now) / HALF_LIFE_S)
            for name, one in loads.items():
                known = total.get(name, NO_LOAD)
                total[name] = OthersLoad(
                    known.running + one.running,
                    known.waiting + one.waiting,
                    known.work + left * one.work,
                )
        return total

    def _note(self, chain: str, name: str) -> None:
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

    async def _take(self, worker: str, body: bytes) -> None:
        report = _decode(body)
        self._reports[worker] = (asyncio.get_running_loop().time(), report.loads)
        for model in self._models().values():
            known = model.loads()
            for chain, name in report.hints.items():
                if name in known:
                    model.book.note_hint(chain, name)
            for name, at in report.forgot.items():
                model.book.note_forgot(name, at)
        self._join()

    async def _answer(self, _: str, body: bytes) -> bytes | None:
        hints = (model.book.hint(body.decode()) for model in self._models().values())
        return next((name.encode() for name in hints if name is not None), None)

    def _forget(self, worker: str) -> None:
        self._reports.pop(worker, None)


def _differ(known: OthersLoad | None, new: OthersLoad) -> bool:
    if known is None or (known.running, known.waiting) != (new.running, new.waiting):
        return known is not None or new != NO_LOAD
    return abs(known.work - new.work) > WORTH * max(known.work, new.work)
