"""What every `Maintenance` promises: what dead processes left ends, what is old goes, what was erased is told."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from segue.aio import failures
from segue.seams.history import Turn
from segue.seams.store import Conversation, Retention
from segue.stores import maintenance
from segue.stores.maintenance import BATCH, maintained
from segue.wire.events import Event
from tests.contracts.stores import KINDS, SHARED, Stores, open_stores
from tests.contracts.turns import OWNER, make_chain, make_turn
from tests.support import until

Open = Callable[[], Awaitable[Stores]]


@pytest.fixture(params=KINDS)
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async with open_stores(request.param, request, tmp_path) as open_one:
        yield await open_one()


@pytest.fixture(params=SHARED)
async def open_one(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    async with open_stores(request.param, request, tmp_path) as open_one:
        yield open_one


async def sweep(stores: Stores, **kept: int) -> None:
    """One whole pass."""
    async with asyncio.timeout(30):
        while await stores.maintenance.sweep(Retention(**kept)):
            pass


async def left(stores: Stores, turns: list[Turn]) -> list[str]:
    return [turn.id for turn in turns if await stores.turns.read(OWNER, turn.id)]


def made_now(stores: Stores, turn: Turn) -> Turn:
    """Memory goes by when a turn began, databases by when it was saved."""
    created_at = int(stores.now())
    return replace(turn, response=msgspec.structs.replace(turn.response, created_at=created_at))


# --- what dead processes left ------------------------------------------------------------------------


async def test_turns_of_a_dead_process_end_as_failed(open_one: Open) -> None:
    dead, alive = await open_one(), await open_one()
    for number in range(BATCH + 1):
        status = "queued" if number % 2 else "in_progress"
        await dead.turns.save(make_turn(f"t{number}", wrote=[], status=status))
    await dead.turns.save(make_turn("done"))
    await dead.crash()
    assert await alive.maintenance.recover() == BATCH + 1
    assert await alive.maintenance.recover() == 0
    for name in ("t0", f"t{BATCH}"):
        found = await alive.turns.find(OWNER, name)
        assert found is not None
        assert found.response.status == "failed"
        assert found.response.error is not None
        assert found.response.error.code == "server_error"
        assert found.given == make_turn(name).given
    done = await alive.turns.find(OWNER, "done")
    assert done is not None
    assert done.response.status == "completed"
    entries = {entry.turn_id: entry.status for entry in await alive.entries()}
    assert len(entries) == BATCH + 2
    assert entries["t0"] == "failed"


async def test_log_of_a_dead_process_gets_its_last_word(open_one: Open) -> None:
    dead, alive = await open_one(), await open_one()
    tools = b"[" + b" " * 500 + b"]"
    await dead.turns.save(make_turn("t", wrote=[], status="in_progress", tools=tools))
    told = [Event("response.created", 0, b"{}"), Event("response.in_progress", 1, b"{}")]
    await dead.log.append(OWNER, "t", told)
    await dead.crash()
    await alive.maintenance.recover()
    found = await alive.log.read_after(OWNER, "t", -1)
    assert found is not None
    assert list(found[:2]) == told
    assert (found[2].type, found[2].number, len(found)) == ("response.failed", 2, 3)
    turn = await alive.turns.read(OWNER, "t")
    assert turn is not None
    body = msgspec.json.decode(found[2].data)
    assert body["response"] == msgspec.json.decode(msgspec.json.encode(turn.response))
    assert bytes(turn.response.tools) == tools


async def test_queued_turns_of_a_dead_process_are_taken_over_once(open_one: Open) -> None:
    """What it had not begun stays queued, is nobody's, and each survivor gets others of them."""
    dead, one, two = await open_one(), await open_one(), await open_one()
    queued = [
        replace(make_turn(f"t{number}", wrote=[], status="queued"), request=b"asked")
        for number in range(BATCH + 2)
    ]
    for turn in queued:
        await dead.turns.save(turn)
    await dead.turns.save(make_turn("begun", wrote=[], status="in_progress"))
    assert await one.maintenance.take_over(9) == []
    await dead.crash()
    assert await one.maintenance.recover() == 1
    assert await two.maintenance.recover() == 0
    some = [await one.maintenance.take_over(3), await two.maintenance.take_over(4)]
    rest = await asyncio.gather(*(each.maintenance.take_over(BATCH) for each in (one, two)))
    taken = [name for names in (*some, *rest) for name in names]
    assert sorted(taken) == sorted((OWNER, turn.id) for turn in queued)
    assert [len(names) for names in some] == [3, 4]
    found = await one.turns.read(OWNER, "t0")
    assert found is not None
    assert (found.response.status, found.request) == ("queued", b"asked")
    assert [entry.turn_id for entry in await one.entries()] == ["begun"]


async def test_turn_that_was_taken_over_is_left_again_by_the_next_who_dies(
    open_one: Open,
) -> None:
    dead, next_, last = await open_one(), await open_one(), await open_one()
    await dead.turns.save(replace(make_turn("t", wrote=[], status="queued"), request=b"asked"))
    await dead.store.close()
    await next_.maintenance.recover()
    assert await next_.maintenance.take_over(1) == [(OWNER, "t")]
    assert await last.maintenance.recover() == 0
    assert await last.maintenance.take_over(1) == []
    await next_.crash()
    await last.maintenance.recover()
    assert await last.maintenance.take_over(1) == [(OWNER, "t")]
    await last.turns.save(make_turn("t", wrote=[], status="in_progress"))
    await last.crash()
    again = await open_one()
    assert await again.maintenance.recover() == 1


async def test_queued_turn_keeps_its_conversation_locked(open_one: Open) -> None:
    dead, alive = await open_one(), await open_one()
    await dead.turns.save(replace(make_turn("t", wrote=[], status="queued"), request=b"asked"))
    for name, speaker in (("kept", "t"), ("freed", "other")):
        made = Conversation(name, OWNER, 0, {})
        locked = msgspec.structs.replace(made, version=1, speaker=speaker)
        assert [await dead.conversations.save(one) for one in (made, locked)] == [True, True]
    await dead.crash()
    await alive.maintenance.recover()
    assert await alive.maintenance.take_over(1) == [(OWNER, "t")]
    await alive.maintenance.recover()
    kept, freed = [await alive.conversations.find(OWNER, name) for name in ("kept", "freed")]
    assert kept is not None
    assert freed is not None
    assert (kept.speaker, freed.speaker) == ("t", None)


async def test_row_that_cannot_be_read_keeps_nobody_waiting(
    open_one: Open, caplog: pytest.LogCaptureFixture
) -> None:
    dead, alive = await open_one(), await open_one()
    for name in ("bad", "good"):
        await dead.turns.save(make_turn(name, status="in_progress"))
    await dead.spoil("bad")
    await dead.crash()
    assert await alive.maintenance.recover() == 2
    assert await alive.maintenance.recover() == 0
    good = await alive.turns.read(OWNER, "good")
    assert good is not None
    assert good.response.status == "failed"
    assert "bad was left running" in caplog.text


async def test_turns_of_a_living_process_are_left_alone(open_one: Open) -> None:
    here, there = await open_one(), await open_one()
    for one in (here, there):
        await one.turns.save(make_turn("here" if one is here else "there", status="in_progress"))
    for one in (here, there):
        assert await one.maintenance.recover() == 0
    for name in ("here", "there"):
        found = await here.turns.read(OWNER, name)
        assert found is not None
        assert found.response.status == "in_progress"
    assert await here.entries() == []


async def test_process_that_left_without_ending_its_turns_is_dead(open_one: Open) -> None:
    gone, alive = await open_one(), await open_one()
    await gone.turns.save(make_turn("t", status="in_progress"))
    await gone.store.close()
    assert await alive.maintenance.recover() == 1


async def test_turn_that_ended_in_time_is_not_ended_again(open_one: Open) -> None:
    dead, alive = await open_one(), await open_one()
    await dead.turns.save(make_turn("t", status="in_progress"))
    await dead.turns.save(make_turn("t"))
    await dead.crash()
    assert await alive.maintenance.recover() == 0
    found = await alive.turns.read(OWNER, "t")
    assert found is not None
    assert found.response.status == "completed"


async def test_two_who_recover_at_once_end_each_turn_once(open_one: Open) -> None:
    dead, one, two = await open_one(), await open_one(), await open_one()
    for turn in make_chain(20, status="in_progress"):
        await dead.turns.save(turn)
    await dead.crash()
    await asyncio.gather(one.maintenance.recover(), two.maintenance.recover())
    await asyncio.gather(one.maintenance.recover(), two.maintenance.recover())
    assert len(await one.entries()) == 20


# --- what is old -------------------------------------------------------------------------------------


async def test_old_chain_goes_whole_and_a_chain_with_a_young_tip_stays_whole(
    stores: Stores,
) -> None:
    old, living = make_chain(2 * BATCH + 5, prefix="old"), make_chain(5, prefix="living")
    for turn in (*old, *living[:4]):
        await stores.turns.save(turn)
    await stores.age(1_000)
    await stores.turns.save(made_now(stores, living[4]))
    await sweep(stores, turns_s=500)
    assert await left(stores, old) == []
    assert await left(stores, living) == [turn.id for turn in living]
    tip = await stores.turns.find(OWNER, "living4")
    assert tip is not None
    assert tip.is_whole


async def test_old_branch_goes_and_its_trunk_stays(stores: Stores) -> None:
    trunk = make_chain(3)
    branch = [make_turn("b1", trunk[1])]
    for turn in (*trunk[:2], *branch):
        await stores.turns.save(turn)
    await stores.age(1_000)
    await stores.turns.save(made_now(stores, trunk[2]))
    await sweep(stores, turns_s=500)
    assert await left(stores, [*trunk, *branch]) == ["t0", "t1", "t2"]


async def test_nothing_goes_where_nothing_is_asked(stores: Stores) -> None:
    chain = make_chain(3)
    for turn in chain:
        await stores.turns.save(turn)
    await stores.age(10**9)
    await sweep(stores)
    assert await left(stores, chain) == ["t0", "t1", "t2"]


async def test_running_turn_is_never_too_old(open_one: Open) -> None:
    stores = await open_one()
    await stores.turns.save(make_turn("t", status="in_progress"))
    await stores.age(1_000)
    await sweep(stores, turns_s=500)
    assert await stores.turns.read(OWNER, "t") is not None


async def test_usage_outlives_retention(stores: Stores) -> None:
    await stores.turns.save(make_turn("t"))
    await stores.age(1_000)
    await sweep(stores, turns_s=500)
    assert await stores.turns.read(OWNER, "t") is None
    assert [entry.turn_id for entry in await stores.entries()] == ["t"]


# --- what was erased ---------------------------------------------------------------------------------


async def test_deleted_turn_stays_deleted_when_its_last_save_comes_late(stores: Stores) -> None:
    tools = b"[" + b" " * 500 + b"]"
    await stores.turns.save(make_turn("t", status="in_progress", tools=tools))
    assert await stores.turns.delete(OWNER, "t") is True
    await stores.turns.save(make_turn("t", tools=tools))
    assert await stores.turns.find(OWNER, "t") is None
    assert await stores.turns.read(OWNER, "t") is None


async def test_usage_of_a_turn_deleted_while_it_ran_is_recorded(open_one: Open) -> None:
    stores = await open_one()
    await stores.turns.save(make_turn("t", status="in_progress"))
    await stores.turns.delete(OWNER, "t")
    await stores.turns.save(make_turn("t"))
    assert [entry.turn_id for entry in await stores.entries()] == ["t"]


async def test_other_processes_hear_what_was_erased(open_one: Open) -> None:
    here, there = await open_one(), await open_one()
    await here.turns.save(make_turn("t"))
    assert ("ada", "t") not in await there.maintenance.erasures()
    await here.turns.delete(OWNER, "t")
    await here.turns.delete(OWNER, "never was")
    assert await there.maintenance.erasures() == [(OWNER, "t")]
    await there.age(1_000)
    assert await there.maintenance.erasures() == []


async def test_swept_turns_are_not_told_one_by_one(open_one: Open) -> None:
    stores = await open_one()
    for turn in make_chain(3):
        await stores.turns.save(turn)
    await stores.age(1_000)
    await sweep(stores, turns_s=500)
    assert await stores.maintenance.erasures() == []


# --- mistakes of our own -----------------------------------------------------------------------------


class FailingSweep:
    """A store's own upkeep, with a mistake in its sweep."""

    def __init__(self, stores: Stores) -> None:
        real = stores.maintenance
        self.recover, self.erasures, self.take_over = real.recover, real.erasures, real.take_over
        self._beat = real.beat
        self.beats: list[bool] = []

    async def beat(self) -> bool:
        self.beats.append(await self._beat())
        return self.beats[-1]

    async def sweep(self, retention: Retention) -> bool:
        raise ZeroDivisionError


async def test_heartbeat_goes_on_while_the_sweep_fails(
    open_one: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(maintenance, "BEAT_S", 0.005)
    alive, other = await open_one(), await open_one()
    await alive.turns.save(make_turn("t", wrote=[], status="in_progress"))
    upkeep, failed_before = FailingSweep(alive), failures["sweep"]

    async def forget(owner: str, turn_id: str) -> None: ...

    async with maintained(upkeep, Retention(), forget, lambda: None):
        await until(lambda: failures["sweep"] > failed_before)
        before = len(upkeep.beats)
        await until(lambda: len(upkeep.beats) > before + 3)
        assert all(upkeep.beats)
        assert await other.maintenance.recover() == 0
    assert "background loop sweep failed" in caplog.text
