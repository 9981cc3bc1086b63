"""The loops beside a store go on, whatever fails, and none waits for another."""

import asyncio
from collections.abc import Sequence

import pytest

from segue.errors import Outdated, StoreFailed, Unavailable
from segue.seams.history import Owner
from segue.seams.store import Retention
from segue.stores import maintenance
from segue.stores.maintenance import maintained
from tests.support import until


class Troubled:
    """An upkeep that fails first, and writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.told: list[tuple[Owner, str]] = []
        self.is_done = asyncio.Event()
        self.fenced = 0

    async def beat(self) -> bool:
        self.asked.append("beat")
        if self.asked.count("beat") == 1:
            raise Unavailable("down")
        return self.asked.count("beat") != 3

    async def recover(self) -> int:
        self.asked.append("recover")
        if self.asked.count("recover") == 1:
            raise Unavailable("down")
        return 1

    async def erasures(self) -> Sequence[tuple[Owner, str]]:
        return [("ada", "t")]

    async def sweep(self, retention: Retention) -> bool:
        assert retention == Retention(turns_s=7)
        self.asked.append("sweep")
        if self.asked.count("sweep") == 1:
            raise StoreFailed("no")
        if self.asked.count("sweep") >= 5 and self.asked.count("recover") >= 5 and self.fenced:
            self.is_done.set()
        return self.asked.count("sweep") < 4

    async def on_erased(self, owner: Owner, turn_id: str) -> None:
        self.told.append((owner, turn_id))

    def on_fenced(self) -> None:
        self.fenced += 1


async def test_loops_survive_a_store_that_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("BEAT_S", "PAUSE_S", "SWEEP_EVERY_S"):
        monkeypatch.setattr(maintenance, name, 0.001)
    troubled = Troubled()
    keep = (troubled, Retention(turns_s=7), troubled.on_erased, troubled.on_fenced)
    async with asyncio.timeout(10), maintained(*keep):
        await troubled.is_done.wait()
    assert troubled.told == [("ada", "t")], "once"
    assert troubled.fenced == 1
    assert "ended as failed" in caplog.text
    assert "old rows could not be deleted" in caplog.text


async def test_one_that_cannot_be_forgotten_keeps_no_other_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an owner with containers, while what holds them is started again."""
    monkeypatch.setattr(maintenance, "BEAT_S", 0.001)
    turns = [("ada", name) for name in "abcdefgh"]

    class Hindered(Troubled):
        async def erasures(self) -> Sequence[tuple[Owner, str]]:
            return [("ada", ""), *turns]

        async def on_erased(self, owner: Owner, turn_id: str) -> None:
            await super().on_erased(owner, turn_id)
            if not turn_id and self.told.count((owner, turn_id)) < 4:
                raise Unavailable("The keeper does not answer.")

    store = Hindered()
    async with asyncio.timeout(10):
        task = asyncio.create_task(maintenance.recover_forever(store, store.on_erased))
        await until(lambda: store.told.count(("ada", "")) == 4)
        await until(lambda: store.asked.count("recover") > 8)
        task.cancel()
    assert sorted(store.told) == sorted([*[("ada", "")] * 4, *turns])


async def test_heartbeat_waits_for_no_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending what a dead process left may take longer than a lease."""
    monkeypatch.setattr(maintenance, "BEAT_S", 0.001)

    class Recovering(Troubled):
        async def recover(self) -> int:
            await asyncio.Event().wait()
            return 0

    store = Recovering()
    async with maintained(store, Retention(turns_s=7), store.on_erased, store.on_fenced):
        await until(lambda: store.asked.count("beat") > 5)


async def test_process_whose_store_needs_a_newer_version_gives_up() -> None:
    class Replaced(Troubled):
        async def beat(self) -> bool:
            raise Outdated("written by a newer Segue")

    replaced, gave_up = Replaced(), asyncio.Event()
    keep = (replaced, Retention(turns_s=7), replaced.on_erased, replaced.on_fenced)
    async with asyncio.timeout(10), maintained(*keep, gave_up.set):
        await gave_up.wait()
