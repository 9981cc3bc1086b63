"""Is a drained replica drained in every process, those that start later and those whose clock is wrong included?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from segue.aio import in_background
from segue.cluster.local import LocalBus
from segue.cluster.peers import Peers
from segue.engines.queued import servers_of
from segue.seams.engine_status import EngineStatus
from segue.server import drains as module
from segue.server.control import DrainOrder, FleetStatus
from segue.server.drains import Drains
from segue.server.models import ServedModels, build_models
from segue.settings.checks import load_settings
from tests.cluster.test_peers import met
from tests.support import until

A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"
encode = msgspec.json.encode


async def no_probe() -> None:
    """Nothing listens there."""


class Process:
    """A process among others: its models, and what the operator ordered."""

    def __init__(self, bus: LocalBus, drained: Sequence[str] = ()) -> None:
        flags: dict[str, Any] = {"engine": "chat", "model": ["m"], "store": "memory"}
        flags |= {"engine_url": [A, B], "engine_drained": [*drained]}
        self.served: ServedModels = build_models(load_settings(flags, {}))
        self.peers = Peers(bus)
        self.drains = Drains(self.served, self.look, no_probe, self.peers)

    def look(self) -> list[EngineStatus]:
        engine = self.served.models["m"].engine
        servers = servers_of(engine)
        return [EngineStatus("m", one.name, True, 1, 0, one.is_drained) for one in servers]

    async def order(self, engine: str, *, is_drained: bool) -> FleetStatus:
        answer = await self.drains.order(encode(DrainOrder(engine, is_drained)))
        return msgspec.json.decode(answer, type=FleetStatus)

    def drained(self) -> list[str]:
        return [one.name for one in self.look() if one.is_drained]


async def test_all_processes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPEAT_S", 0.01)
    bus, now = LocalBus(), 1_000.0
    async with AsyncExitStack() as stack:

        async def start(*drained: str) -> Process:
            process = Process(bus, drained)
            await stack.enter_async_context(process.peers.joined())
            await stack.enter_async_context(
                in_background("drain_orders", process.drains.repeat_forever)
            )
            return process

        one, other = await start(), await start()
        await met(one.peers, other.peers)
        monkeypatch.setattr(module.time, "time", lambda: now)
        fleet = await one.order(A, is_drained=True)
        assert (one.drained(), other.drained()) == ([A], [A])
        assert (fleet.workers, fleet.answered) == (2, 2)
        assert [(row.name, row.running, row.is_drained) for row in fleet.engines] == [
            (A, 2, True),
            (B, 2, False),
        ]
        later = await start()
        await until(lambda: later.drained() == [A])
        # The clock of the machine that returns it is behind.
        now = 900.0
        await later.order("127.0.0.1:1", is_drained=False)
        assert (one.drained(), other.drained(), later.drained()) == ([], [], [])
        # What the settings of a machine say holds until it hears of an order.
        last = await start(B, A)
        assert last.drained() == [A, B]
        fleet = await last.order(B, is_drained=False)
        assert fleet.engine_drained == [A, B]
        again = await start(B)
        await until(lambda: not again.drained())
        for process in (one, other, later, last, again):
            await process.served.aclose()
