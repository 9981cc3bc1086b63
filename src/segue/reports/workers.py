"""Where is the report on a turn's prompt, and what do all reports say, when several workers serve one port?"""

from __future__ import annotations

import time

import msgspec

from segue.listener.api import Route
from segue.listener.exchange import Exchange
from segue.reports.advice import Traffic, add_up, advise, unnamed
from segue.reports.watch import ReuseWatch
from segue.seams.bus import OtherProcesses
from segue.seams.history import Owner
from segue.wire.cache import CacheAdvice, CacheReport
from segue.wire.codec import encode as encode_json

REPORT, TRAFFIC = "cache_report", "cache_traffic"
# What advice looks back at.
ADVICE_S = 3_600
_key = msgspec.msgpack.Decoder(tuple[str, str]).decode
_asked = msgspec.msgpack.Decoder(tuple[str, bool]).decode
_report = msgspec.msgpack.Decoder(CacheReport | None).decode
_traffic = msgspec.msgpack.Decoder(Traffic).decode
encode = msgspec.msgpack.encode


class CacheReports:
    """The reports of this worker, and of the other workers of the same parent process."""

    def __init__(self, reuse: ReuseWatch, peers: OtherProcesses | None) -> None:
        self._reuse = reuse
        self._peers = peers
        if self._peers is not None:
            self._peers.on_message(REPORT, self._answer_report)
            self._peers.on_message(TRAFFIC, self._answer_traffic)

    @property
    def routes(self) -> tuple[Route, ...]:
        return (Route("GET", "/dashboard/advice", self._answer_advice, "dashboard"),)

    async def find(self, owner: Owner, turn_id: str) -> CacheReport | None:
        """The report on this turn."""
        found = await self._reuse.find(owner, turn_id)
        if found is not None or self._peers is None:
            return found
        body = encode((owner, turn_id))
        answers = await self._peers.ask(REPORT, body, self._peers.siblings)
        return next(filter(None, map(_report, answers.values())), None)

    async def advise(self, owner: Owner, *, sees_all: bool) -> CacheAdvice:
        """What costs this owner most, or all owners: then of the others only figures."""
        parts = [await self._traffic(owner, sees_all)]
        if self._peers is not None:
            asked = encode((owner, sees_all))
            answers = await self._peers.ask(TRAFFIC, asked, self._peers.siblings)
            parts += map(_traffic, answers.values())
        return advise(parts)

    async def _traffic(self, owner: Owner, sees_all: bool) -> Traffic:
        recent = await self._reuse.since(time.time() - ADVICE_S)
        return add_up(
            (client, report if whose == owner else unnamed(report))
            for whose, client, report in recent
            if sees_all or whose == owner
        )

    async def _answer_advice(self, exchange: Exchange) -> None:
        sees_all = exchange.account.is_operator
        advice = await self.advise(exchange.owner, sees_all=sees_all)
        await exchange.answer(200, encode_json(advice))

    async def _answer_report(self, worker: str, body: bytes) -> bytes:
        return encode(await self._reuse.find(*_key(body)))

    async def _answer_traffic(self, worker: str, body: bytes) -> bytes:
        return encode(await self._traffic(*_asked(body)))
