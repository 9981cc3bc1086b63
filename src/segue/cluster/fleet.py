"""What do the other processes have at the replicas of an engine, and where did a conversation go there?

Every process reports twice a second, if something has changed, how many jobs it has at each replica, how much these
have computed for it, and the hints that are new: which replica has the history of which chain. So a choice counts
what all processes do, and a client that resends its history is known to all of them. A process that does not know a
history, because it has just started or the report is not there yet, asks the others before it reads the history
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from math import exp2
from typing import Protocol

import msgspec
from msgspec import Struct

from segue.background import in_background
from segue.cluster.peers import Peers
from segue.routing.book import NO_LOAD, OthersLoad, RouteBook
from segue.routing.measures import HALF_LIFE_S

REPORT_S = 0.5
# Others answer within a millisecond or two; one that has just died must not hold a turn up for longer.
ASK_S = 0.1
# A change of less than this part of the work is not worth a report.
WORTH = 0.05


class RoutedModel(Protocol):
    """An engine with several replicas."""

    book: RouteBook

    def loads(self) -> Mapping[str, OthersLoad]:
        """What this process has at each replica."""


class RoutesReport(Struct, frozen=True, array_like=True):
    """What a process says of itself."""

    loads: dict[str, OthersLoad]
    # Replicas by chains.
    hints: dict[str, str]


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(RoutesReport).decode


class Fleet:
    """The routes of this process among those of the others."""

    def __init__(self, peers: Peers, models: Callable[[], Iterable[RoutedModel]]) -> None:
        self._peers = peers
        # Those that are served now: they may change.
        self._models = models
        self._reports: dict[str, tuple[float, dict[str, OthersLoad]]] = {}
        self._hints: dict[str, str] = {}
        self._reported: dict[str, OthersLoad] = {}
        peers.answer("routes", self._take)
        peers.answer("route", self._answer)
        peers.when_gone(self._forget)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """RoutesReport while inside."""
        self._join()
        async with in_background(self._keep_reporting()):
            yield

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            await self.report()

    async def report(self) -> None:
        """Tell the others what has changed, and add up what they have told."""
        self._join()
        loads: dict[str, OthersLoad] = {}
        for model in self._models():
            loads.update(model.loads())
        hints, self._hints = self._hints, {}
        if hints or any(_differ(self._reported.get(name), one) for name, one in loads.items()):
            self._reported = loads
            await self._peers.send("routes", _encode(RoutesReport(loads, hints)))

    def _join(self) -> None:
        """Every model knows what the others have."""
        others = self._sum()
        for model in self._models():
            book = model.book
            book.others, book.on_hint, book.find_hint = others, self._note, self._find

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
        for model in self._models():
            known = model.loads()
            for chain, name in report.hints.items():
                if name in known:
                    model.book.note_hint(chain, name)
        self._join()

    async def _answer(self, _: str, body: bytes) -> bytes | None:
        hints = (model.book.hint(body.decode()) for model in self._models())
        return next((name.encode() for name in hints if name is not None), None)

    def _forget(self, worker: str) -> None:
        self._reports.pop(worker, None)


def _differ(known: OthersLoad | None, new: OthersLoad) -> bool:
    if known is None or (known.running, known.waiting) != (new.running, new.waiting):
        return known is not None or new != NO_LOAD
    return abs(known.work - new.work) > WORTH * max(known.work, new.work)
