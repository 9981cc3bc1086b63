"""A process that stood still finds that others went on without it, and does no harm when it comes back."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from segue.errors import Fenced, ServerFault, Unavailable
from segue.limits import Draw, HeldPlaces, KeyLimits
from segue.memory.budget import Memory
from segue.process.conversations import acquire
from segue.seams.history import Turn
from segue.seams.store import Claim, Conversation
from segue.stores import postgres
from segue.stores.maintenance import BATCH
from segue.stores.postgres_database import PostgresConnection, PostgresDatabase
from segue.turn.commit import entry_of
from segue.wire.events import Event
from segue.wire.requests import Create
from tests.contracts.stores import Stores, open_stores
from tests.contracts.turns import OWNER, make_turn, said
from tests.postgres import PostgresServer

Open = Callable[[], Awaitable[Stores]]


@pytest.fixture
async def open_one(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    async with open_stores("postgres", request, tmp_path) as open_one:
        yield open_one


async def status(stores: Stores, turn_id: str) -> str | None:
    turn = await stores.turns.read(OWNER, turn_id)
    return turn and turn.response.status


def claim(turn_id: str) -> Claim:
    return Claim(OWNER, "key", turn_id, b"d", is_stored=True)


def keyed(turn_id: str) -> Turn:
    return replace(make_turn(turn_id), holds_key=True)


# --- the lease ---------------------------------------------------------------------------------------


async def test_lease_that_nobody_took_away_is_renewed_however_late(open_one: Open) -> None:
    paused, _ = await open_one(), await open_one()
    await paused.crash()
    assert await paused.maintenance.beat()


async def test_process_whose_lease_was_taken_away_goes_on_under_a_new_name(open_one: Open) -> None:
    paused, other = await open_one(), await open_one()
    await paused.turns.save(make_turn("before", status="in_progress"))
    await paused.crash()
    await other.maintenance.recover()
    assert not await paused.maintenance.beat()
    assert await paused.maintenance.beat()
    await paused.turns.save(make_turn("after", status="in_progress"))
    assert await other.maintenance.recover() == 0
    await paused.turns.save(make_turn("after"))
    with pytest.raises(Fenced):
        await paused.turns.save(make_turn("before"))
    assert await status(other, "after") == "completed"
    assert await status(other, "before") == "failed"


async def test_lease_that_is_claimed_cannot_be_renewed(open_one: Open) -> None:
    """Whoever ends the turns of a process may take a while: it must not come back to life meanwhile."""
    paused, other = await open_one(), await open_one()
    await paused.crash()
    name, me = paused.store.maintenance._database.worker, other.store.maintenance._database.worker  # type: ignore[attr-defined]
    database: PostgresDatabase = other.store.maintenance._database  # type: ignore[attr-defined]
    assert await database.execute("claim_worker", name, me, 15)
    assert not await paused.maintenance.beat()


async def test_one_survivor_claims_a_dead_process_and_another_if_that_one_dies_too(
    open_one: Open,
) -> None:
    dead, one, two = await open_one(), await open_one(), await open_one()
    names = [stores.store.maintenance._database.worker for stores in (dead, one, two)]  # type: ignore[attr-defined]
    database: PostgresDatabase = two.store.maintenance._database  # type: ignore[attr-defined]

    async def take(claimant: str) -> int:
        return await database.execute("claim_worker", names[0], claimant, 15)

    assert not await take(names[1]), "it lives"
    await dead.crash()
    assert await take(names[1])
    assert await take(names[1]), "it may be tried again"
    assert not await take(names[2])
    await one.crash()
    assert await take(names[2])


async def test_turns_of_a_dead_process_end_in_a_few_statements(
    open_one: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, alive = await open_one(), await open_one()
    log = [Event("response.created", 0, b"{}")]
    for number in range(2 * BATCH):
        tools = b"[" + b" " * 100 + b"]"
        await dead.turns.save(make_turn(f"t{number}", status="in_progress", tools=tools))
        await dead.log.append(OWNER, f"t{number}", log)
    await dead.crash()
    statements: list[str] = []
    end_some = postgres._end_some

    async def counted(connection: PostgresConnection, **names: str) -> int:
        statements.append("batch")
        return await end_some(connection, **names)

    monkeypatch.setattr(postgres, "_end_some", counted)
    assert await alive.maintenance.recover() == 2 * BATCH
    assert len(statements) == 3
    ended = await alive.log.read_after(OWNER, f"t{BATCH + 1}", -1)
    assert ended is not None
    assert [event.type for event in ended] == ["response.created", "response.failed"]


async def test_long_turns_of_a_dead_process_end_a_few_at_a_time(open_one: Open) -> None:
    """They are decoded within a transaction, which must not be idle for long."""
    dead, alive = await open_one(), await open_one()
    given = [said("x" * 9_000_000)]
    for number in range(3):
        await dead.turns.save(make_turn(f"t{number}", given=given, status="in_progress"))
    await dead.crash()
    database: PostgresDatabase = alive.store.maintenance._database  # type: ignore[attr-defined]
    names = (dead.store.maintenance._database.worker, BATCH)  # type: ignore[attr-defined]
    assert len(await database.fetch("abandoned", lambda *row: row, *names)) == 2
    assert await alive.maintenance.recover() == 3


# --- what a process that was taken for dead still writes ---------------------------------------------


async def test_end_that_was_announced_stays_and_the_real_usage_counts_once(open_one: Open) -> None:
    paused, other = await open_one(), await open_one()
    await paused.turns.save(make_turn("t", wrote=[], status="in_progress"))
    await paused.log.append(OWNER, "t", [Event("response.created", 0, b"{}")])
    await paused.crash()
    await other.maintenance.recover()
    late = make_turn("t")
    with pytest.raises(Fenced):
        await paused.turns.save(late)
    await paused.log.append(OWNER, "t", [Event("late", 1, b"{}"), Event("later", 2, b"{}")])
    events = await other.log.read_after(OWNER, "t", -1)
    assert events is not None
    assert [event.type for event in events] == ["response.created", "response.failed"]
    assert await status(other, "t") == "failed"
    entry = entry_of(OWNER, late.response)
    assert entry is not None
    assert entry.output_tokens
    for _ in range(2):
        await paused.ledger.settle([entry])
    (kept,) = await other.entries()
    assert (kept.status, kept.output_tokens) == ("failed", entry.output_tokens)


async def test_key_that_was_given_away_is_not_used_twice(open_one: Open) -> None:
    paused, other = await open_one(), await open_one()
    await paused.idempotency_keys.claim(claim("late"))
    await paused.crash()
    await other.maintenance.recover()
    assert (await other.idempotency_keys.claim(claim("next"))).turn_id == "next"
    with pytest.raises(Fenced):
        await paused.turns.save(keyed("late"))
    with pytest.raises(Unavailable):
        await paused.idempotency_keys.claim(claim("again"))
    await paused.idempotency_keys.release(claim("next"))
    await other.turns.save(keyed("next"))
    assert await status(other, "late") is None
    assert await status(other, "next") == "completed"
    assert (await other.idempotency_keys.claim(claim("repeat"))).turn_id == "next"


async def test_key_of_a_turn_that_is_being_saved_is_not_given_away(open_one: Open) -> None:
    """Whoever saves locks the key, and whoever would give it away looks again once it is free."""
    paused, other = await open_one(), await open_one()
    await paused.idempotency_keys.claim(claim("late"))
    await paused.crash()
    turns, database = paused.store.turns, paused.store.maintenance._database  # type: ignore[attr-defined]
    is_written, may_commit = asyncio.Event(), asyncio.Event()

    async def save_slowly(connection: PostgresConnection) -> None:
        async with connection.transaction():
            await turns.writer(keyed("late"))(connection)  # type: ignore[attr-defined]
            is_written.set()
            await may_commit.wait()

    saving = asyncio.create_task(database.run(save_slowly))
    await is_written.wait()
    recovering = asyncio.create_task(other.maintenance.recover())
    asyncio.get_running_loop().call_later(0.1, may_commit.set)
    await asyncio.gather(saving, recovering)
    assert (await other.idempotency_keys.claim(claim("repeat"))).turn_id == "late"


async def test_conversation_that_was_given_away_gets_no_late_items(open_one: Open) -> None:
    paused, other = await open_one(), await open_one()
    await other.conversations.save(Conversation("conv", OWNER, 0, {}))
    create = Create(model="m", conversation="conv")
    late = await acquire(create, OWNER, paused.turns, paused.conversations, Memory(), "late")
    await paused.crash()
    await other.maintenance.recover()
    held = await acquire(create, OWNER, other.turns, other.conversations, Memory(), "next")
    with pytest.raises(ServerFault):
        await late.save(make_turn("late"))
    await late.release("late")
    await held.save(make_turn("next"))
    items = await other.conversations.read(OWNER, "conv")
    assert len(items) == 2
    assert await status(other, "late") is None


async def test_turn_that_was_stored_after_its_conversation_was_given_away_can_still_end(
    open_one: Open,
) -> None:
    """Its process has a new name by then, under which nobody else would end the turn."""
    paused, other = await open_one(), await open_one()
    await other.conversations.save(Conversation("conv", OWNER, 0, {}))
    create = Create(model="m", conversation="conv")
    late = await acquire(create, OWNER, paused.turns, paused.conversations, Memory(), "late")
    await paused.crash()
    await other.maintenance.recover()
    assert not await paused.maintenance.beat()
    await late.save(make_turn("late", wrote=[], status="in_progress"))
    with pytest.raises(ServerFault) as refused:
        await late.save(make_turn("late"))
    assert not isinstance(refused.value, Fenced)
    await late.save(make_turn("late", status="failed"))
    assert await status(other, "late") == "failed"


async def test_turn_that_was_taken_over_is_no_longer_its_first_process_s(open_one: Open) -> None:
    paused, other = await open_one(), await open_one()
    queued = replace(make_turn("t", wrote=[], status="queued"), request=b"asked")
    await paused.idempotency_keys.claim(claim("t"))
    await paused.turns.save(queued)
    await paused.crash()
    await other.maintenance.recover()
    with pytest.raises(Fenced):
        await paused.turns.save(make_turn("t", wrote=[], status="in_progress"))
    assert await other.maintenance.take_over(1) == [(OWNER, "t")]
    with pytest.raises(Fenced):
        await paused.turns.save(make_turn("t", wrote=[], status="failed"))
    await paused.idempotency_keys.release(claim("t"))
    await other.turns.save(make_turn("t"))
    assert (await other.idempotency_keys.claim(claim("repeat"))).turn_id == "t"


# --- what nobody may hold for long -------------------------------------------------------------------


async def test_sessions_that_stand_still_lose_their_locks(postgres: PostgresServer) -> None:
    url = await postgres.make_database()
    database = await PostgresDatabase.open(url)
    try:
        for name in ("idle_in_transaction_session_timeout", "lock_timeout"):
            row = await database.run(lambda one: one.fetch(f"SHOW {name}"))  # noqa: B023
            assert row[0][0] == "10s"
    finally:
        await database.close()
        await postgres.drop_database(url)


async def test_process_that_vanishes_in_the_middle_of_a_draw_holds_up_nobody(
    open_one: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    vanished, alive = await open_one(), await open_one()
    draw = Draw("key", KeyLimits(requests_per_min=60, connections_max=3), 1, held=HeldPlaces(1))
    share_out, has_drawn = postgres.share_out, []

    async def others_draw() -> None:
        for _ in range(3):
            grant = await alive.shared_limits.draw(draw)
            has_drawn.append(grant.held.connections)

    def vanish(*asked: object) -> object:
        monkeypatch.setattr(postgres, "share_out", share_out)
        raise asyncio.CancelledError

    monkeypatch.setattr(postgres, "share_out", vanish)
    with pytest.raises(asyncio.CancelledError):
        await vanished.shared_limits.draw(draw)
    await others_draw()
    assert has_drawn == [1, 1, 1]


async def test_draws_at_the_same_time_see_each_other(open_one: Open) -> None:
    here, there = await open_one(), await open_one()
    draw = Draw("key", KeyLimits(requests_per_min=60, connections_max=3), 5, held=HeldPlaces(2))
    grants = await asyncio.gather(
        *(one.shared_limits.draw(draw) for one in (here, there) for _ in range(8))
    )
    assert sum(grant.requests for grant in grants) == 60
    assert {grant.held.connections for grant in grants} == {1, 2}
