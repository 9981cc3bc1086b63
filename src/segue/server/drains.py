"""Which replicas of engines has the operator taken out of service?

Draining and returning hold for every process that shares the store, on all machines: the process that is asked tells
the others, and each answers with the replicas as it sees them. While an order differs from the settings, it is
repeated, for processes that start later or missed it; of two orders for one replica the later one holds. Nothing is
written down: when all processes have been restarted, the settings hold (`engine_drained`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec

from segue.errors import Misconfigured
from segue.seams.bus import OtherProcesses
from segue.seams.engine_status import EngineStatus, joined
from segue.server.control import DrainOrder, FleetStatus
from segue.server.models import ServedModels

SUBJECT = "drains"
REPEAT_S = 2.0
# So long an order for a replica that is no longer listed is kept: its address may be given to another one later.
UNLISTED_S = 86_400.0
# Two clocks may differ: a later order is later than the one that it replaces by at least this.
LATER_S = 0.001

# By the name of a replica: the time of the last order for it, and whether it is drained.
DrainOrders = dict[str, tuple[float, bool]]

encode = msgspec.json.encode
_orders = msgspec.json.Decoder(DrainOrders).decode
_engines = msgspec.json.Decoder(list[EngineStatus]).decode


class Drains:
    """The replicas that take no new jobs."""

    def __init__(
        self,
        served: ServedModels,
        look: Callable[[], list[EngineStatus]],
        probe: Callable[[], Awaitable[object]],
        peers: OtherProcesses | None,
    ) -> None:
        """`look` lists the replicas as this process sees them, `probe` asks each whether it is up."""
        self._served = served
        self._look = look
        self._probe = probe
        self._peers = peers
        self._known: DrainOrders = {}
        self._declared = served.declared
        if peers is not None:
            peers.on_message(SUBJECT, self._answer)

    async def order(self, body: bytes) -> bytes:
        """Drain or return a replica everywhere; returns all replicas, as `status` does."""
        order = msgspec.json.decode(body, type=DrainOrder)
        rows = self._look()
        name = _find(order.engine, rows)
        if order.is_drained and not order.is_forced:
            _refuse_last(name, rows)
        self._order(name, order.is_drained)
        return await self.status(b"")

    def reloaded(self) -> None:
        """The settings were reloaded: what has changed in `engine_drained` is an order."""
        before, self._declared = self._declared, self._served.declared
        for name in before ^ self._declared:
            self._order(name, name in self._declared)

    def _order(self, name: str, is_drained: bool) -> None:
        before, _ = self._known.get(name, (0.0, False))
        self._accept({name: (max(time.time(), before + LATER_S), is_drained)})

    async def status(self, body: bytes) -> bytes:
        """All replicas with the load of all processes, and how many of the processes have answered."""
        await self._probe()
        parts, workers = [self._look()], 1
        if self._peers is not None:
            others = self._peers.others
            workers += len(others)
            answers = await self._peers.ask(SUBJECT, encode(self._known), others)
            parts += map(_engines, answers.values())
        return encode(
            FleetStatus(
                joined(row for part in parts for row in part),
                workers,
                len(parts),
                sorted(self._declared),
            )
        )

    async def repeat_forever(self) -> None:
        """Repeat what differs from the settings, until cancelled."""
        while self._peers is not None:
            await asyncio.sleep(REPEAT_S)
            if not self._known:
                continue
            listed, since = {row.name for row in self._look()}, time.time() - UNLISTED_S
            self._known = {
                name: (at, is_drained)
                for name, (at, is_drained) in self._known.items()
                if name in listed or at > since
            }
            drained = {name for name, (_, is_drained) in self._known.items() if is_drained}
            if drained != self._known.keys() & self._declared:
                await self._peers.send(SUBJECT, encode(self._known))

    async def _answer(self, worker: str, body: bytes) -> bytes:
        self._accept(_orders(body))
        return encode(self._look())

    def _accept(self, orders: DrainOrders) -> None:
        newer = {
            name: order
            for name, order in orders.items()
            if name not in self._known or order[0] > self._known[name][0]
        }
        if newer:
            self._known |= newer
            self._served.drain({name: is_drained for name, (_, is_drained) in self._known.items()})


def _find(engine: str, rows: list[EngineStatus]) -> str:
    """The name of the replica that the operator means: its URL, or only host and port."""
    names = sorted({row.name for row in rows})
    wanted = engine.rstrip("/")
    found = [name for name in names if wanted in (name.rstrip("/"), urlsplit(name).netloc)]
    if len(found) != 1:
        raise Misconfigured(
            f"'{engine}' is not one of this server's engine URLs: {', '.join(names) or 'it has none'}."
        )
    return found[0]


def _refuse_last(name: str, rows: list[EngineStatus]) -> None:
    """A model must have another replica that is up."""
    up = {row.model for row in rows if row.name != name and row.is_up and not row.is_drained}
    alone = sorted({row.model for row in rows if row.name == name} - up)
    if alone:
        raise Misconfigured(
            f"no other engine of {', '.join(alone)} is up: with {name} drained, requests for it fail with status 503. "
            "To drain it all the same: --force."
        )
