"""Is the model of the database true? The same operations of the real store on the model and on PostgreSQL.

Both run `PostgresStore` itself, as two processes on one database; one runs its statements on the model's tables, the
other on a real server. Every result must be the same: what is found, what is refused, who is fenced off, what is
counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any
from unittest.mock import patch

import asyncpg
import pytest
from msgspec import structs
from msgspec.structs import replace

from segue.errors import ApiError
from segue.limits import Draw, HeldPlaces, KeyLimits
from segue.seams.history import UsageEntry
from segue.seams.store import Claim, Conversation, ConversationItem
from segue.stores.postgres import PostgresStore
from segue.stores.postgres_database import QUERIES, PostgresDatabase
from segue.wire.events import Event
from tests.contracts.turns import OWNER, make_turn, said
from tests.postgres import PostgresServer
from tests.simulator.clock import ProcessLoop, World, ruling
from tests.simulator.database import Database, Faults
from tests.simulator.network import Network
from tests.simulator.statements import STATEMENTS

SEEDS, STEPS = 8, 120
LIMITS = KeyLimits(requests_per_min=600, lanes_max=4)
# What a server runs once, an hour apart, for an operator, or for uploaded files and skills; a simulation does not.
NOT_MODELLED = {
    "revoke_key", "limit_key", "add_to_ring", "note_migration", "unshelve",
    "add_skill_version", "skill_versions", "make_default_version", "delete_skill_version", "delete_skill",
    "present_skill_version",
    "add_file", "find_file", "newest_files", "delete_file", "expired_files", "present_files",
}  # fmt: skip
# Of commands, which no process of a server runs: an owner is erased, a database is moved.
NOT_MODELLED |= {name for name in QUERIES if name.startswith(("delete_owner_", "move_out_"))}
NOT_MODELLED |= {"count_owner", "mark_owner_erased", "owner_objects", "count_rows"}
NOT_MODELLED |= {"stop_counting", "count_moved", "go_on_counting"}
NOT_MODELLED |= {"keep_servers_out", "live_workers", "empty_all", "empty_ring", "newest_turns"}


class Script:
    """A random sequence of operations, and what each of them gave."""

    def __init__(self, seed: int, databases: list[PostgresDatabase]) -> None:
        self.random = Random(seed)
        self.databases = databases
        self.stores = [PostgresStore(one) for one in databases]
        self.results: list[object] = []
        self.numbers = [0, 0]

    async def run(self) -> list[object]:
        steps = [
            self.save, self.save, self.save, self.find, self.delete, self.append, self.read_events,
            self.claim, self.claim, self.release, self.write_conversation, self.write_conversation,
            self.read_conversation, self.settle, self.draw, self.die, self.beat, self.recover,
            self.take_over,
        ]  # fmt: skip
        for _ in range(STEPS):
            step = self.random.choice(steps)
            at = self.random.randrange(len(self.stores))
            self.results.append((step.__name__, at, await self.tried(step, at)))
        for number in range(5):
            self.results.append(await self.read_turn(0, f"t{number}"))
        self.results.append(await self.totals())
        return self.results

    async def tried(self, step: Callable[[int], Awaitable[object]], at: int) -> object:
        try:
            return await step(at)
        except ApiError as error:
            return type(error).__name__

    def turn_id(self) -> str:
        return f"t{self.random.randrange(5)}"

    async def save(self, at: int) -> object:
        status = self.random.choice(("queued", "in_progress", "completed", "failed"))
        instructions = self.random.choice((b"null", b'"' + b"x" * 100 + b'"'))
        is_keyed = status == "completed" and self.random.random() < 0.5
        turn = make_turn(self.turn_id(), status=status, instructions=instructions)
        request = self.random.choice((b"", b"{}")) if status == "queued" else b""
        return await self.stores[at].turns.save(replace(turn, holds_key=is_keyed, request=request))

    async def read_turn(self, at: int, turn_id: str) -> object:
        turn = await self.stores[at].turns.read(OWNER, turn_id)
        return None if turn is None else (turn.id, turn.response.status, len(turn.rounds))

    async def find(self, at: int) -> object:
        return await self.read_turn(at, self.turn_id())

    async def delete(self, at: int) -> object:
        if self.random.random() < 0.7:
            return None
        return await self.stores[at].turns.delete(OWNER, self.turn_id())

    async def append(self, at: int) -> object:
        first = self.random.randrange(4)
        events = [
            Event("response.in_progress", first + n, b"{}")
            for n in range(self.random.randrange(1, 4))
        ]
        return await self.stores[at].events.append(OWNER, self.turn_id(), events)

    async def read_events(self, at: int) -> object:
        after = self.random.randrange(-1, 3)
        events = await self.stores[at].events.read_after(OWNER, self.turn_id(), after)
        return None if events is None else [(one.type, one.number) for one in events]

    def a_claim(self) -> Claim:
        key = f"key{self.random.randrange(3)}"
        return Claim(OWNER, key, self.turn_id(), b"digest", is_stored=True)

    async def claim(self, at: int) -> object:
        return (await self.stores[at].idempotency_keys.claim(self.a_claim())).turn_id

    async def release(self, at: int) -> object:
        return await self.stores[at].idempotency_keys.release(self.a_claim())

    async def write_conversation(self, at: int) -> object:
        name, conversations = f"conv{self.random.randrange(2)}", self.stores[at].conversations
        found = await conversations.find(OWNER, name)
        self.numbers[0] += 1
        added = [ConversationItem(f"item{self.numbers[0]}", said("hello"))]
        speaker = self.random.choice((None, self.turn_id()))
        if found is None:
            return await conversations.save(Conversation(name, OWNER, 1_700_000_000, {}), added)
        turn = make_turn(self.turn_id()) if self.random.random() < 0.5 else None
        version = found.version - (self.random.random() < 0.2)
        moved = structs.replace(found, version=version or 1, speaker=speaker)
        return await conversations.save(moved, added, turn)

    async def read_conversation(self, at: int) -> object:
        name, conversations = f"conv{self.random.randrange(2)}", self.stores[at].conversations
        if self.random.random() < 0.1:
            return await conversations.delete(OWNER, name)
        items = await conversations.read(OWNER, name, self.random.randrange(2))
        return await conversations.find(OWNER, name), [item.id for item in items]

    async def settle(self, at: int) -> object:
        tokens = self.random.randrange(100)
        entry = UsageEntry(
            self.turn_id(), OWNER, "tiny", "failed", tokens, 0, tokens, 1_700_000_001
        )
        return await self.stores[at].ledger.settle([entry])

    async def draw(self, at: int) -> object:
        lanes = self.random.randrange(4)
        grant = await self.stores[at].shared_limits.draw(
            Draw("key", LIMITS, 1, held=HeldPlaces(0, lanes))
        )
        return grant.requests, grant.held, grant.others

    async def die(self, at: int) -> object:
        """Its lease runs out; it does not know yet."""
        return await self.databases[at].execute("expire", self.databases[at].worker)

    async def beat(self, at: int) -> object:
        return await self.stores[at].maintenance.beat()

    async def recover(self, at: int) -> object:
        return await self.stores[at].maintenance.recover()

    async def take_over(self, at: int) -> object:
        return list(await self.stores[at].maintenance.take_over(2))

    async def totals(self) -> object:
        ledger = self.stores[0].ledger
        day = 1_700_000_001 // 86_400
        return list(await ledger.report(None, 0)), await ledger.spent(OWNER, "", day, day)


async def play(seed: int, url: str) -> list[object]:
    databases = [await PostgresDatabase.open(url) for _ in range(2)]
    try:
        return await Script(seed, databases).run()
    finally:
        for database in databases:
            await database.close()


def play_on_model(seed: int) -> list[object]:
    world = World(seed)
    network = Network(world, Database(world, Faults()), lambda: 0.001)
    loop = ProcessLoop(world, "A")
    with (
        ruling(world),
        patch.object(asyncpg, "connect", network.connect),
        patch.object(asyncpg, "create_pool", network.create_pool),
    ):
        tasks: list[asyncio.Task[list[object]]] = []
        loop.call_soon(lambda: tasks.append(loop.create_task(play(seed, ""))))
        world.run(1_000, lambda: bool(tasks) and tasks[0].done())
        assert not world.broken, world.broken
        return tasks[0].result()


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_model_and_postgresql_give_the_same_results(
    postgres: PostgresServer, seed: int
) -> None:
    url = await postgres.make_database()
    try:
        real = await play(seed, url)
    finally:
        await postgres.drop_database(url)
    running = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        modelled: list[Any] = play_on_model(seed)
    finally:
        asyncio._set_running_loop(running)
    assert modelled == real


def test_model_knows_every_statement() -> None:
    assert set(QUERIES) - set(STATEMENTS) - NOT_MODELLED == set()
    assert set(STATEMENTS) - set(QUERIES) == {"notify"}
