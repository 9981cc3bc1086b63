"""Does a job find the right replica, wait its turn, and survive the loss of one?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing

import pytest

from segue.engines.queued import QueuedEngine
from segue.engines.token_engine import TokenEngine
from segue.engines.vllm import VLLM
from segue.errors import EngineFailed, InvalidRequest, TooMany, Unavailable
from segue.replicas.router import RoutedEngine
from segue.seams.engine_status import EngineStatus
from segue.seams.history import Unfinished, Warm
from segue.seams.lineage import Lineage
from segue.seams.model import Engine, EngineFacts, Finish, Job, JobStarted, Piece, Scene
from segue.seams.prompt import Head, Tokens, id_array
from tests.contracts.engine import Bench, chatml
from tests.engines.asking import (
    PROMISES,
    WAIT_S,
    Promise,
    heard,
    ids_of,
    job,
    reply,
    route_of,
    tokens,
    upstream,
)
from tests.engines.fakes.server import Fake
from tests.engines.fakes.thread import remote
from tests.engines.fakes.vllm import FakeVllm
from tests.support import until

JOB = job(tokens([1]))


class Pair:
    """Two FAKE replicas, `a` and `b`, and the engine in front of them."""

    def __init__(
        self, slots: int = 4, down_s_max: float = 0.0, names: tuple[str, ...] = ("a", "b")
    ) -> None:
        self._names = names
        self._stack = AsyncExitStack()
        self._slots = slots
        self._down_s_max = down_s_max
        self.a = FakeVllm(lambda ids: [10, 11, 12])
        self.b = FakeVllm(lambda ids: [20, 21, 22])
        self.engine: RoutedEngine
        self.engines: dict[str, Engine]
        self.servers: dict[str, QueuedEngine] = {}

    async def __aenter__(self) -> Pair:
        self.engines = engines = dict[str, Engine]()
        for name, fake in {"a": self.a, "b": self.b}.items():
            await self._stack.enter_async_context(fake)
            address = await self._stack.enter_async_context(upstream(fake.url))
            engines[name] = TokenEngine(VLLM, address, "fake")
        servers = [self._server(name, self._slots) for name in self._names]
        self.engine = RoutedEngine(servers, self._down_s_max)
        return self

    def _server(self, name: str, slots: int) -> QueuedEngine:
        if name not in self.servers or self.servers[name].successor is not None:
            self.servers[name] = QueuedEngine(name, self.engines[name])
        self.servers[name].set_slots(slots)
        return self.servers[name]

    def use(self, *names: str, slots: int) -> None:
        """As after a reload: these servers, others are removed."""
        before = self.engine.servers
        self.engine.set_servers([self._server(name, slots) for name in names])
        for server in before:
            if server.name not in names:
                server.remove(self.engine)

    def drain(self, *names: str) -> None:
        for name, server in self.servers.items():
            server.set_drained(name in names)

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    def health(self, name: str) -> EngineStatus:
        return self.servers[name].status("m")


def continuing(route: str, held: int) -> Job:
    """A job of a chain that has so many tokens, read by this replica."""
    warm = Warm("", Head(), Tokens(None, id_array(), held), route)
    past = Unfinished(None, (), warm)
    return job(tokens([1]), route=route, scene=Scene(Head(), past, ()))


async def is_held(fake: Fake) -> None:
    async with asyncio.timeout(WAIT_S):
        await fake.held.wait()


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_engine_keeps_its_promise(promise: Promise) -> None:
    with remote(lambda: FakeVllm(reply)) as one, remote(lambda: FakeVllm(reply)) as other:
        async with upstream(one.url) as first, upstream(other.url) as second:
            engine = RoutedEngine(
                [
                    QueuedEngine("one", TokenEngine(VLLM, first, "fake")),
                    QueuedEngine("other", TokenEngine(VLLM, second, "fake")),
                ]
            )
            await promise(Bench(engine, chatml()))


async def test_child_goes_where_its_parent_was_served() -> None:
    async with Pair() as pair:
        for _ in range(3):
            assert route_of(await heard(pair.engine, job(tokens([1]), route="b"))) == "b"
        assert not any("completions" in path for path in pair.a.paths)


async def test_first_turn_does_not_wait_while_another_replica_is_free() -> None:
    async with Pair(slots=1) as pair:
        pair.a.hold_at = 1
        first = asyncio.create_task(heard(pair.engine, job(tokens([1]), route="a")))
        await is_held(pair.a)
        assert pair.health("a").running == 1

        assert route_of(await heard(pair.engine, JOB)) == "b"
        assert route_of(await heard(pair.engine, JOB)) == "b"

        pair.a.gate.set()
        assert route_of(await first) == "a"
        assert pair.health("a") == EngineStatus("m", "a", True, 0, 0)


async def test_replica_that_is_removed_finishes_its_job_and_one_that_returns_is_used_again() -> (
    None
):
    """A job that waits for it goes elsewhere at once; of replicas that stay, what is known stays too."""
    async with Pair(slots=1, names=("a",)) as pair:
        pair.a.hold_at = 1
        running = asyncio.create_task(heard(pair.engine, JOB))
        await is_held(pair.a)
        waiting = asyncio.create_task(heard(pair.engine, JOB))
        await until(lambda: bool(pair.health("a").waiting))
        pair.use("b", slots=1)
        assert route_of(await waiting) == "b"
        assert [one.name for one in pair.engine.servers] == ["b"]
        assert not running.done()
        pair.a.gate.set()
        assert route_of(await running) == "a"
        pair.b.hold_at = 1
        held = asyncio.create_task(heard(pair.engine, JOB))
        await is_held(pair.b)
        pair.use("a", "b", slots=2)
        assert pair.health("b").running == 1
        assert route_of(await heard(pair.engine, job(tokens([1]), route="a"))) == "a"
        pair.b.gate.set()
        assert route_of(await held) == "b"


async def test_drained_replica_finishes_its_job_and_is_used_again_when_it_is_returned() -> None:
    """A job that waits for it goes elsewhere at once; so do its chains, which say why; new settings change nothing."""
    child = job(tokens([1]), route="a")
    async with Pair(slots=1) as pair:
        pair.a.hold_at = 1
        running = asyncio.create_task(heard(pair.engine, child))
        await is_held(pair.a)
        pair.use("a", slots=1)
        waiting = asyncio.create_task(heard(pair.engine, child))
        await until(lambda: bool(pair.health("a").waiting))
        pair.use("a", "b", slots=1)
        pair.drain("a")
        assert pair.health("a").is_drained
        assert started_of(await waiting) == ("b", "drained")
        pair.use("a", "b", slots=2)
        assert started_of(await heard(pair.engine, child)) == ("b", "drained")
        pair.a.gate.set()
        assert route_of(await running) == "a", "what ran there has ended there"
        assert pair.health("a") == EngineStatus("m", "a", True, 0, 0, is_drained=True)
        pair.drain("a", "b")
        assert not await pair.engine.is_ready()
        with pytest.raises(Unavailable, match="drained by the operator"):
            await heard(pair.engine, child)
        pair.drain("b")
        assert started_of(await heard(pair.engine, child)) == ("a", "")
        pair.use("b", slots=2)
        pair.drain()
        assert started_of(await heard(pair.engine, child)) == ("b", "removed")


def started_of(pieces: Sequence[Piece]) -> tuple[str | None, str]:
    """Where a job ran, and why not at its parent's replica."""
    started = [piece for piece in pieces if isinstance(piece, JobStarted)]
    return started[-1].route, started[-1].moved


async def test_unknown_route_is_a_first_turn() -> None:
    """A replica that was taken out of the settings."""
    async with Pair() as pair:
        assert route_of(await heard(pair.engine, job(tokens([1]), route="gone"))) in ("a", "b")


async def test_chains_spread_over_replicas_that_are_equally_free_and_come_back() -> None:
    """Each process counts alone: without a route, the chain itself says where it belongs."""
    async with Pair() as pair:
        chains = [f"resp_{n}" for n in range(24)]
        routes = [
            [
                route_of(await heard(pair.engine, job(tokens([1]), lineage=Lineage(one))))
                for one in chains
            ]
            for _ in range(2)
        ]
        assert routes[0] == routes[1]
        assert 6 <= routes[0].count("a") <= 18


async def test_sticky_job_gives_way_to_a_free_replica_when_its_own_has_a_long_queue() -> None:
    async with Pair(slots=4) as pair:
        pair.a.hold_at = 1
        # Reading these again takes 20 s, so long as nothing else was measured; two seconds of waiting are less.
        wanted = continuing("a", 100_000)
        jobs = [asyncio.create_task(heard(pair.engine, wanted)) for _ in range(6)]
        await is_held(pair.a)
        assert pair.health("a") == EngineStatus("m", "a", True, 4, 2)
        assert route_of(await heard(pair.engine, continuing("a", 1_000))) == "b"
        pair.a.gate.set()
        assert [route_of(await one) for one in jobs] == ["a"] * 6
        reasons = [set(server.choices) for server in pair.servers.values()]
        assert reasons == [{"parent"}, {"queue"}]


async def test_limit_of_our_key_at_one_replica_is_not_that_of_another() -> None:
    async with Pair() as pair:
        pair.a.limited = "Slow down."
        assert route_of(await heard(pair.engine, job(tokens([1]), route="a"))) == "b"
        assert pair.health("a").is_up
        pair.b.limited = "Slow down."
        with pytest.raises(TooMany, match="Slow down"):
            await heard(pair.engine, JOB)


async def test_job_fails_over_when_the_parents_replica_refuses_connections() -> None:
    async with Pair() as pair:
        await pair.a.stop()
        pieces = await heard(pair.engine, job(tokens([1]), route="a"))
        assert ids_of(pieces) == [20, 21, 22]
        assert route_of(pieces) == "b"
        assert not pair.health("a").is_up
        assert pair.health("b").is_up


async def test_job_fails_over_when_a_replica_dies_before_its_first_token() -> None:
    async with Pair() as pair:
        pair.a.break_at = 0
        assert route_of(await heard(pair.engine, job(tokens([1]), route="a"))) == "b"


async def test_answer_that_has_begun_does_not_move() -> None:
    async with Pair() as pair:
        pair.a.break_at = pair.a.hold_at = 1
        said: list[int] = []
        wanted = job(tokens([1]), route="a")
        async with aclosing(pair.engine.sample(wanted)) as pieces:
            with pytest.raises(EngineFailed):
                async for piece in pieces:
                    said += ids_of([piece])
                    pair.a.gate.set()
        assert said == [10]
        assert pair.b.requests == []
        assert not pair.health("a").is_up
        assert pair.health("a").running == 0


async def test_replica_that_failed_is_left_alone_and_comes_back_when_it_is_ready() -> None:
    async with Pair() as pair:
        await pair.a.stop()
        await heard(pair.engine, job(tokens([1]), route="a"))
        await pair.a.start()
        assert route_of(await heard(pair.engine, job(tokens([1]), route="a"))) == "b"

        assert await pair.engine.is_ready()

        assert pair.health("a").is_up
        assert route_of(await heard(pair.engine, job(tokens([1]), route="a"))) == "a"


async def test_engine_is_ready_as_long_as_one_replica_is() -> None:
    async with Pair() as pair:
        assert await pair.engine.is_ready()
        pair.a.is_healthy = False
        assert await pair.engine.is_ready()
        assert [pair.health(name).is_up for name in ("a", "b")] == [False, True]
        await pair.b.stop()
        assert not await pair.engine.is_ready()
        assert [pair.health(name).is_up for name in ("a", "b")] == [False, False]


async def test_question_that_is_not_answered_takes_no_replica_away() -> None:
    """Anybody may have the question asked; only jobs decide who gets jobs."""
    async with Pair() as pair:
        pair.a.is_healthy = False
        assert await pair.engine.is_ready()
        assert route_of(await heard(pair.engine, job(tokens([1]), route="a"))) == "a"


async def test_job_is_refused_with_a_time_to_wait_when_no_replica_answers() -> None:
    async with Pair() as pair:
        await pair.a.stop()
        await pair.b.stop()
        with pytest.raises(Unavailable) as raised:
            await heard(pair.engine, JOB)
        assert raised.value.wait_s is not None
        assert raised.value.wait_s >= 1


async def test_job_waits_a_moment_for_a_replica_to_come_back() -> None:
    async with Pair(down_s_max=10) as pair:
        await pair.a.stop()
        await pair.b.stop()
        assert not await pair.engine.is_ready()
        asking = asyncio.create_task(heard(pair.engine, JOB))
        await pair.b.start()
        assert route_of(await asking) == "b"


async def test_job_that_breaks_replicas_is_not_tried_on_all_of_them() -> None:
    class Broken:
        can_constrain = True
        grammars = frozenset[str]()
        facts = EngineFacts()
        count = 0

        async def is_ready(self) -> bool:
            return True

        async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
            Broken.count += 1
            raise EngineFailed("broke")
            yield Finish("stop")

    engine = RoutedEngine([QueuedEngine(str(n), Broken()) for n in range(5)])
    with pytest.raises(EngineFailed):
        await heard(engine, JOB)
    assert Broken.count == 2


async def test_one_error_may_be_the_jobs_but_several_in_a_row_are_the_replicas() -> None:
    """Somebody's job that no replica can digest must not take the replicas away from the others."""
    async with Pair() as pair:
        pair.a.model = "another"
        for _ in range(2):
            assert route_of(await heard(pair.engine, job(tokens([1]), route="a"))) == "b"
            assert pair.health("a").is_up
        await heard(pair.engine, job(tokens([1]), route="a"))
        assert not pair.health("a").is_up


async def test_clients_error_is_not_the_replicas() -> None:
    async with Pair() as pair:
        pair.a.context_tokens = 1
        with pytest.raises(InvalidRequest):
            await heard(pair.engine, job(tokens([1]), route="a"))
        assert pair.b.requests == []
        assert pair.health("a") == EngineStatus("m", "a", True, 0, 0)


async def test_jobs_that_wait_for_a_replica_that_dies_go_elsewhere() -> None:
    async with Pair(slots=1) as pair:
        pair.a.hold_at = pair.a.break_at = 0
        wanted = job(tokens([1]), route="a")
        jobs = [asyncio.create_task(heard(pair.engine, wanted)) for _ in range(4)]
        await is_held(pair.a)
        pair.a.gate.set()
        assert [route_of(await one) for one in jobs] == ["b"] * 4
