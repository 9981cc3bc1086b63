"""Does a job get to its server, wait its turn, and is a server that fails left alone?"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import Any, cast

import pytest

from segue.engines import queued
from segue.engines.queued import QueuedEngine, servers_of
from segue.engines.scripted import ScriptedEngine
from segue.engines.token_engine import TokenEngine
from segue.engines.vllm import VLLM
from segue.errors import EngineFailed, InvalidRequest, TooMany, Unavailable
from segue.seams.engine_status import EngineStatus
from segue.seams.model import EngineFacts, Finish, JobStarted
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
OTHER = job(tokens([1]), owner="another")


class Alone:
    """A FAKE server `a`, and the queue in front of it."""

    def __init__(self, slots: int = 4, down_s_max: float = 0.0) -> None:
        self._stack = AsyncExitStack()
        self._slots = slots
        self._down_s_max = down_s_max
        self.fake = FakeVllm(lambda ids: [10, 11, 12])
        self.engine: QueuedEngine

    async def __aenter__(self) -> Alone:
        await self._stack.enter_async_context(self.fake)
        address = await self._stack.enter_async_context(upstream(self.fake.url))
        engine = TokenEngine(VLLM, address, "fake")
        self.engine = QueuedEngine("a", engine, self._slots)
        self.engine.down_s_max = self._down_s_max
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    def health(self) -> EngineStatus:
        return self.engine.status("m")


async def is_held(fake: Fake) -> None:
    async with asyncio.timeout(WAIT_S):
        await fake.held.wait()


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_engine_keeps_its_promise(promise: Promise) -> None:
    with remote(lambda: FakeVllm(reply)) as fake:
        async with upstream(fake.url) as address:
            engine = QueuedEngine("one", TokenEngine(VLLM, address, "fake"))
            await promise(Bench(engine, chatml()))


async def test_replica_runs_as_many_jobs_as_it_says(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that says nothing gets many; one that tells its slots as many; and long waiting is logged, once."""
    monkeypatch.setattr(queued, "WAITING_S", 0.01)
    async with Alone(slots=0) as alone:
        alone.fake.hold_at = 1
        wanted = job(tokens([1]), route="a")
        jobs = [asyncio.create_task(heard(alone.engine, wanted)) for _ in range(20)]
        await is_held(alone.fake)
        assert alone.health() == EngineStatus("m", "a", True, 20, 0)
        # It says so only now, as one does that has come back with other options.
        engine = alone.engine.engine
        cast("Any", engine).facts = EngineFacts(slots=3)
        with caplog.at_level("INFO"):
            jobs += [asyncio.create_task(heard(alone.engine, wanted)) for _ in range(2)]
            await until(lambda: caplog.records)
        assert alone.health() == EngineStatus("m", "a", True, 20, 2)
        assert [(one.levelname, one.message) for one in caplog.records] == [
            (
                "WARNING",
                "engine a is full: 20 requests run and 2 wait, one of them for 0.01 s (see engine_parallel)",
            )
        ]
        alone.fake.gate.set()
        await asyncio.gather(*jobs)


async def test_limit_of_our_key_is_for_whoever_hit_it() -> None:
    """The caller reads the endpoint's words; the server's health is as before."""
    async with Alone() as alone:
        alone.fake.limited = "Rate limit reached: 30 requests a minute."
        with pytest.raises(TooMany, match="30 requests a minute") as raised:
            await heard(alone.engine, JOB)
        assert raised.value.wait_s == 7
        assert alone.health() == EngineStatus("m", "a", True, 0, 0)
        alone.fake.limited = ""
        # Until then this owner does not ask it again.
        asked = len(alone.fake.requests)
        with pytest.raises(
            Unavailable, match=r"asks this server to wait: please retry in 7 s\."
        ) as told:
            await heard(alone.engine, JOB)
        assert told.value.wait_s is not None
        assert 6 < told.value.wait_s <= 7
        assert len(alone.fake.requests) == asked
        assert ids_of(await heard(alone.engine, OTHER)) == [10, 11, 12]


async def test_short_wait_that_an_engine_asks_for_is_waited_for() -> None:
    async with Alone() as alone:
        now = asyncio.get_running_loop().time()
        alone.engine._note_retry_after(now, "", 1.0)
        assert alone.engine.usable_at("") == 0.0
        alone.engine.down_s_max = 2.0
        alone.engine._note_retry_after(now, "", 1.05)
        assert alone.engine.usable_at("") > now
        assert ids_of(await heard(alone.engine, JOB)) == [10, 11, 12]


async def test_replica_gets_only_so_many_jobs_at_a_time() -> None:
    async with Alone(slots=2) as alone:
        alone.fake.hold_at = 1
        wanted = job(tokens([1]), route="a")
        jobs = [asyncio.create_task(heard(alone.engine, wanted)) for _ in range(8)]
        await is_held(alone.fake)
        assert alone.health() == EngineStatus("m", "a", True, 2, 6)
        alone.fake.gate.set()
        await asyncio.gather(*jobs)
        assert alone.fake.running_max == 2
        assert alone.health() == EngineStatus("m", "a", True, 0, 0)


async def test_job_that_leaves_the_queue_gives_its_place_on() -> None:
    async with Alone(slots=1) as alone:
        alone.fake.hold_at = 1
        wanted = job(tokens([1]), route="a")
        jobs = [asyncio.create_task(heard(alone.engine, wanted)) for _ in range(3)]
        await is_held(alone.fake)
        assert alone.health().waiting == 2
        jobs[1].cancel()
        await asyncio.wait([jobs[1]])
        assert alone.health().waiting == 1
        jobs[0].cancel()
        alone.fake.gate.set()
        assert ids_of(await jobs[2]) == [10, 11, 12]
        assert alone.health() == EngineStatus("m", "a", True, 0, 0)


async def test_job_waits_a_moment_for_its_server_to_come_back_and_is_then_refused() -> None:
    async with Alone() as alone:
        await alone.fake.stop()
        with pytest.raises(Unavailable, match="No engine answers"):
            await heard(alone.engine, JOB)
        assert not alone.health().is_up
        with pytest.raises(Unavailable, match="No engine answers") as raised:
            await heard(alone.engine, JOB)
        assert raised.value.wait_s is not None
        assert raised.value.wait_s >= 1
        alone.engine.down_s_max = 10.0
        asking = asyncio.create_task(heard(alone.engine, JOB))
        await alone.fake.start()
        pieces = await asking
        assert ids_of(pieces) == [10, 11, 12]
        started = next(piece for piece in pieces if isinstance(piece, JobStarted))
        assert started.route == "a"
        assert alone.health() == EngineStatus("m", "a", True, 0, 0)
        # It may have lost what it had read before.
        assert alone.engine.recovered_at > 0


async def test_server_that_failed_comes_back_when_it_is_ready() -> None:
    async with Alone() as alone:
        await alone.fake.stop()
        with pytest.raises(Unavailable):
            await heard(alone.engine, JOB)
        assert not await alone.engine.is_ready()
        await alone.fake.start()
        assert await alone.engine.is_ready()
        assert alone.health().is_up
        assert ids_of(await heard(alone.engine, JOB)) == [10, 11, 12]


async def test_answer_that_has_begun_does_not_begin_again() -> None:
    async with Alone(down_s_max=10.0) as alone:
        alone.fake.break_at = alone.fake.hold_at = 1
        said: list[int] = []
        async with aclosing(alone.engine.sample(JOB)) as pieces:
            with pytest.raises(EngineFailed):
                async for piece in pieces:
                    said += ids_of([piece])
                    alone.fake.gate.set()
        assert said == [10]
        assert alone.health() == EngineStatus("m", "a", False, 0, 0)


async def test_one_error_may_be_the_jobs_but_several_in_a_row_are_the_servers() -> None:
    async with Alone() as alone:
        alone.fake.context_tokens = 1
        for _ in range(4):
            with pytest.raises(InvalidRequest):
                await heard(alone.engine, JOB)
        assert alone.health().is_up, "a client's mistake is not the server's"
        alone.fake.context_tokens = 1_000
        alone.fake.model = "another"
        for is_up in (True, True, False):
            with pytest.raises(EngineFailed, match="does not know the model"):
                await heard(alone.engine, JOB)
            assert alone.health().is_up is is_up


@pytest.mark.parametrize("is_cut", [False, True])
async def test_what_one_of_several_owners_meets_closes_no_server_for_others(is_cut: bool) -> None:
    """A request that the server cannot answer, sent again and again; and what two have met is the server's fault."""
    async with Alone() as alone:
        assert ids_of(await heard(alone.engine, OTHER)) == [10, 11, 12]
        if is_cut:
            alone.fake.break_at = 0
        else:
            alone.fake.model = "another"
        for _ in range(1 if is_cut else queued.ERRORS_MAX):
            with pytest.raises(EngineFailed):
                await heard(alone.engine, JOB)
        assert alone.health().is_up
        with pytest.raises(Unavailable):
            await heard(alone.engine, JOB)
        alone.fake.break_at, model, alone.fake.model = None, alone.fake.model, "fake"
        assert ids_of(await heard(alone.engine, OTHER)) == [10, 11, 12]

        alone.engine._holds.clear()
        alone.fake.break_at, alone.fake.model = 0 if is_cut else None, model
        for wanted in (JOB, OTHER, OTHER):
            with pytest.raises((EngineFailed, Unavailable)):
                await heard(alone.engine, wanted)
        assert not alone.health().is_up


async def test_drained_server_finishes_its_job_and_refuses_others_until_it_is_returned() -> None:
    async with Alone(slots=1, down_s_max=2.0) as alone:
        alone.fake.hold_at = 1
        running = asyncio.create_task(heard(alone.engine, JOB))
        await is_held(alone.fake)
        waiting = asyncio.create_task(heard(alone.engine, JOB))
        await until(lambda: bool(alone.health().waiting))
        alone.engine.set_drained(True)
        with pytest.raises(Unavailable, match="drained by the operator") as raised:
            await waiting
        assert raised.value.wait_s == queued.PAUSE_S_MAX
        assert not await alone.engine.is_ready()
        alone.fake.gate.set()
        assert ids_of(await running) == [10, 11, 12]
        assert alone.health() == EngineStatus("m", "a", True, 0, 0, is_drained=True)
        alone.engine.set_drained(False)
        assert ids_of(await heard(alone.engine, JOB)) == [10, 11, 12]


async def test_jobs_of_a_removed_server_go_to_its_successor() -> None:
    """Those that wait for a slot, and those of a turn that began before; what runs there ends there."""
    child = job(tokens([1]), route="a")
    async with (
        Alone(slots=1) as alone,
        FakeVllm(lambda ids: [20]) as other,
        upstream(other.url) as address,
    ):
        successor = QueuedEngine("b", TokenEngine(VLLM, address, "fake"))
        alone.fake.hold_at = 1
        running = asyncio.create_task(heard(alone.engine, child))
        await is_held(alone.fake)
        waiting = asyncio.create_task(heard(alone.engine, child))
        await until(lambda: bool(alone.health().waiting))
        alone.engine.remove(successor)
        pieces = await waiting
        assert route_of(pieces) == "b"
        started = [piece for piece in pieces if isinstance(piece, JobStarted)]
        assert {piece.moved for piece in started} == {"removed"}
        assert route_of(await heard(alone.engine, JOB)) == "b"
        alone.fake.gate.set()
        assert route_of(await running) == "a"


async def test_server_that_miscounts_is_counted_each_time_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Miscounting(ScriptedEngine):
        async def sample(self, job: Any) -> Any:
            yield Finish("stop", -1)

    server = QueuedEngine("a", Miscounting(chatml()))
    for _ in range(2):
        assert (await heard(server, JOB))[-1] == Finish("stop", 0)
    assert server.corrected == {"counts": 2}
    lines = [one.getMessage() for one in caplog.records]
    assert [line.split()[1] for line in lines if "cannot be true" in line] == ["a"]


async def test_only_engines_over_http_have_servers() -> None:
    async with Alone() as alone:
        assert servers_of(alone.engine) == (alone.engine,)
    assert servers_of(ScriptedEngine(chatml())) == ()
