"""The end of a response in the background is announced when the store has it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from segue.errors import Fenced
from segue.process.patient_save import save_patiently
from segue.seams.history import Owner, Turn
from segue.stores.postgres_database import LEASE_S, PostgresDatabase
from tests.contracts.stores import Stores, open_stores
from tests.contracts.turns import OWNER, make_turn

Open = Callable[[], Awaitable[Stores]]


@pytest.fixture
async def open_one(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    async with open_stores("postgres", request, tmp_path) as open_one:
        yield open_one


@pytest.fixture(autouse=True)
def _retries_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segue.process.patient_save.RETRY_S", 0.01)


async def save(stores: Stores, turn: Turn) -> None:
    await save_patiently(stores.turns.save, stores.turns.read, lambda: False, turn)


def database_of(stores: Stores) -> PostgresDatabase:
    database = stores.store.maintenance._database  # type: ignore[attr-defined]
    assert isinstance(database, PostgresDatabase)
    return database


async def test_process_that_was_taken_for_dead_waits_until_others_have_ended_its_turn(
    open_one: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused, other = await open_one(), await open_one()
    await paused.turns.save(make_turn("t", wrote=[], status="in_progress"))
    await paused.crash()
    names = (database_of(paused).worker, database_of(other).worker)
    assert await database_of(other).execute("claim_worker", *names, LEASE_S)
    assert not await paused.maintenance.beat()

    looks: asyncio.Queue[str] = asyncio.Queue()
    read = paused.turns.read

    async def reading(owner: Owner, turn_id: str) -> Turn | None:
        found = await read(owner, turn_id)
        looks.put_nowait(found.response.status if found else "absent")
        return found

    monkeypatch.setattr(paused.turns, "read", reading)
    saving = asyncio.create_task(save(paused, make_turn("t")))
    assert [await looks.get(), await looks.get()] == ["in_progress", "in_progress"]
    assert not saving.done()
    await other.maintenance.recover()
    with pytest.raises(Fenced):
        await saving
    kept = await other.turns.read(OWNER, "t")
    assert kept is not None
    assert kept.response.status == "failed"


async def test_end_that_a_process_wrote_under_its_former_name_stands(open_one: Open) -> None:
    """It was committed, its answer was lost, and others took the process for dead before it tried again."""
    paused, other = await open_one(), await open_one()
    await paused.turns.save(make_turn("t", wrote=[], status="in_progress"))
    await save(paused, make_turn("t"))
    await paused.crash()
    await other.maintenance.recover()
    assert not await paused.maintenance.beat()
    await save(paused, make_turn("t"))
    kept = await other.turns.read(OWNER, "t")
    assert kept is not None
    assert kept.response.status == "completed"


async def test_queued_turn_that_others_took_over_is_let_go_at_once(open_one: Open) -> None:
    paused, other = await open_one(), await open_one()
    await paused.turns.save(replace(make_turn("t", wrote=[], status="queued"), request=b"asked"))
    await paused.crash()
    await other.maintenance.recover()
    assert await other.maintenance.take_over(1) == [(OWNER, "t")]
    async with asyncio.timeout(10):
        with pytest.raises(Fenced):
            await save(paused, make_turn("t", wrote=[], status="in_progress"))
