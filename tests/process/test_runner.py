"""One turn from beginning to end: it speaks first, saves before it says, and ends exactly once whatever happens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from segue.engines.scripted import Script, ScriptedTurn
from segue.errors import EngineFailed, InvalidRequest, StoreFailed, Unavailable
from segue.memory.budget import Memory
from segue.process import pace
from segue.seams.history import Owner, Turn
from segue.seams.model import EngineFacts, Finish, Ids, Job, Piece
from segue.seams.store import Turns
from segue.turn.notices import Cancel
from segue.turn.plan import Arrival, Caller, Receipt
from segue.turn.prepare import prepare
from segue.wire.codec import decode_create
from tests.contracts.engine import chatml
from tests.contracts.turns import said
from tests.events import check_turn
from tests.pipeline import OWNER, Connection, Listener, Stage, staged
from tests.support import until

WAIT_S = 20
ANSWER = chatml().write([said("Hello there, this is what I say.", "assistant")]).tolist()


@dataclass
class StuckEngine:
    """Says these ids, and then nothing more until it is closed."""

    ids: list[int] = field(default_factory=list)
    is_asked: asyncio.Event = field(default_factory=asyncio.Event)
    is_freed: asyncio.Event = field(default_factory=asyncio.Event)
    pieces: int = 0
    on_asked: Callable[[], None] = lambda: None
    can_constrain = False
    grammars: frozenset[str] = frozenset()
    facts = EngineFacts()

    async def is_ready(self) -> bool:
        return True

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        self.on_asked()
        try:
            for id in self.ids:
                self.pieces += 1
                yield Ids([id])
            self.is_asked.set()
            await asyncio.Event().wait()
        finally:
            self.is_freed.set()


@dataclass
class BrokenEngine:
    """Says a little and then does what no engine should."""

    fault: Callable[[], Exception] | None
    can_constrain = False
    grammars: frozenset[str] = frozenset()
    facts = EngineFacts()

    async def is_ready(self) -> bool:
        return False

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        yield Ids(ANSWER[:3])
        if self.fault is not None:
            raise self.fault()


def use(stage: Stage, engine: Any) -> None:
    models = stage.runner.models
    assert isinstance(models, dict)
    models["m"] = replace(models["m"], engine=engine)


async def wait(event: asyncio.Event) -> None:
    async with asyncio.timeout(WAIT_S):
        await event.wait()


def files_in(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.iterdir()]


async def found(stage: Stage, turn_id: str) -> Turn | None:
    return await stage.store.read(OWNER, turn_id)


# --- the beginning ----------------------------------------------------------------------------------


async def test_client_hears_first_and_then_the_engine_is_asked(tmp_path: Path) -> None:
    heard: list[str] = []
    async with staged(tmp_path / "s.db") as stage:
        listener = Listener()
        engine = StuckEngine(on_asked=lambda: heard.extend(one.type for one in listener.events))
        use(stage, engine)
        running = await stage.start(None, listener, input="Hello")
        await wait(engine.is_asked)
        running.notify(Cancel())
        check_turn(await listener.all())

    assert heard == ["response.created", "response.in_progress"]


async def test_turn_is_known_to_its_owner_while_it_runs(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db") as stage:
        engine, listener = StuckEngine(), Listener()
        use(stage, engine)
        running = await stage.start(None, listener, input="Hello")
        assert stage.runner.registry.find(OWNER, running.id) is running
        assert stage.runner.registry.find("somebody else", running.id) is None
        assert stage.runner.running_count == 1

        running.notify(Cancel())
        await listener.all()

        assert stage.runner.registry.find(OWNER, running.id) is None
        assert stage.runner.running_count == 0


async def test_draining_process_takes_no_new_turns(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db") as stage:
        await stage.runner.drain(0)

        with pytest.raises(Unavailable) as told:
            await stage.turn(input="Hello")

    assert told.value.status == 503


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"model": "nobody's", "input": "hi"}, "model"),
        ({"input": "hi", "previous_response_id": "resp_0"}, "previous_response_id"),
        ({"input": [{"role": "user", "content": ""}, {"type": "odd"}]}, "input[1].type"),
        ({"input": [7]}, "input[0]"),
        ({"input": [7] * 100_001}, "input"),
        ({}, "input"),
    ],
)
async def test_refused_request_says_nothing_and_asks_nobody(
    tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    async with staged(tmp_path / "s.db") as stage:
        listener = Listener()
        with pytest.raises(Exception) as told:  # several kinds, all with a param
            await stage.start(None, listener, **fields)

        assert getattr(told.value, "param", None) == param
        assert listener.events == []
        assert stage.engine.jobs == []
        assert stage.runner.running_count == 0


async def test_large_input_is_validated_in_slices(tmp_path: Path) -> None:
    """While a megabyte is checked the loop serves others: a competing task has its turn again and again."""
    items = [{"role": "user", "content": f"{n} " + "x" * 480} for n in range(2_000)]
    create = decode_create(json.dumps({"model": "m", "input": items}).encode())
    turns_had = 0
    is_over = False

    async def compete() -> None:
        nonlocal turns_had
        while not is_over:
            turns_had += 1
            await asyncio.sleep(0)

    async with staged(tmp_path / "s.db") as stage:
        competing = asyncio.create_task(compete())
        arrival = Arrival(create, Caller(OWNER, stage.store), Receipt())
        plan = await prepare(arrival, stage.runner.resources, "resp_1", Memory().preparing(0))
        is_over = True
        await competing

    assert len(plan.resolved.given) == plan.tally.items_validated == 2_000
    assert turns_had >= 4


# --- the end, exactly once --------------------------------------------------------------------------


async def test_plain_turn_counts_what_it_used(tmp_path: Path) -> None:
    script = Script((ScriptedTurn(reasoning="Hm.", text="Hello."),))
    async with staged(tmp_path / "s.db", script) as stage:
        told = await stage.turn(input="Hello")
        response = check_turn(told.events)

        usage = response["usage"]
        assert usage["input_tokens"] == len(stage.engine.prompt)
        assert usage["output_tokens"] == len(stage.engine.sampled[-1])
        assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
        await stage.records.afterwards.drained()
        (settled,) = stage.settled
        assert settled.entry.turn_id == response["id"]
        assert settled.entry.input_tokens == usage["input_tokens"]


@pytest.mark.parametrize(
    "fault, code",
    [
        (lambda: EngineFailed("It broke."), "server_error"),
        (lambda: Unavailable("It is away."), "server_is_overloaded"),
        (lambda: ValueError("a bug"), "server_error"),
        (lambda: TimeoutError("its own"), "server_error"),
        (None, "server_error"),
    ],
)
async def test_engine_that_breaks_fails_the_turn_once(
    tmp_path: Path, fault: Callable[[], Exception] | None, code: str
) -> None:
    async with staged(tmp_path / "s.db") as stage:
        use(stage, BrokenEngine(fault))
        told = await stage.turn(input="Hello")
        response = check_turn(told.events)

        assert response["status"] == "failed"
        assert response["error"]["code"] == code
        assert "a bug" not in json.dumps(told.events)
        assert response["output"][0]["status"] == "incomplete"
        stored = await found(stage, response["id"])
        assert stored is not None
        assert stored.response.status == "failed"
        assert stage.runner.running_count == 0


async def test_prompt_that_does_not_fit_fails_the_turn(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db", context_tokens=40) as stage:
        response = check_turn((await stage.turn(input="word " * 200)).events)

        assert response["error"]["code"] == "context_length_exceeded"
        assert stage.engine.jobs == []


async def test_answer_is_cut_at_the_limit_and_can_be_continued(tmp_path: Path) -> None:
    script = Script((ScriptedTurn(text="One two three four five six seven."),))
    async with staged(tmp_path / "s.db", script) as stage:
        cut = check_turn((await stage.turn(input="Hello", max_output_tokens=3)).events)
        assert cut["status"] == "incomplete"
        assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
        assert cut["usage"]["output_tokens"] == 3

        told = await stage.turn(input="Go on", previous_response_id=cut["id"])

        assert check_turn(told.events)["status"] == "completed"


async def test_context_bounds_the_answer(tmp_path: Path) -> None:
    script = Script((ScriptedTurn(pad_tokens=500),))
    async with staged(tmp_path / "s.db", script, context_tokens=100) as stage:
        response = check_turn((await stage.turn(input="Hello")).events)

    assert response["status"] == "incomplete"
    assert response["usage"]["total_tokens"] == 100


# --- leaving and stopping ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_stored", [True, False])
async def test_client_that_leaves_frees_the_engine(tmp_path: Path, is_stored: bool) -> None:
    async with staged(tmp_path / "s.db") as stage:
        engine, listener = StuckEngine(ANSWER[:4]), Listener()
        use(stage, engine)
        running = await stage.start(None, listener, input="Hello", store=is_stored)
        await wait(engine.is_asked)

        running.detach(listener)
        running.attach(listener, after=len(listener.events) - 1)
        running.notify(Cancel())

        response = check_turn(await listener.all())
        assert engine.is_freed.is_set()
        assert response["status"] == "cancelled"
        stored = await found(stage, response["id"])
        assert (stored is not None) == is_stored
        if stored is not None:
            assert stored.response.status == "cancelled"
            assert len(stored.response.output) == 1


async def test_cancelled_turn_cannot_be_continued(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db") as stage:
        engine, listener = StuckEngine(), Listener()
        use(stage, engine)
        running = await stage.start(None, listener, input="Hello")
        running.notify(Cancel())
        response = (await listener.all())[-1]["response"]

        with pytest.raises(InvalidRequest) as told:
            await stage.turn(input="On", model="alias", previous_response_id=response["id"])

    assert told.value.code == "previous_response_not_found"


async def test_stopping_process_ends_every_turn_as_failed(tmp_path: Path) -> None:
    listeners = [Listener() for _ in range(3)]
    async with staged(tmp_path / "s.db") as stage:
        engine = StuckEngine(ANSWER[:4])
        use(stage, engine)
        for listener in listeners:
            await stage.start(None, listener, input="Hello", store=False)
        await wait(engine.is_asked)
        async with asyncio.timeout(WAIT_S):
            await stage.runner.drain(0)

    for listener in listeners:
        response = check_turn(await listener.all())
        assert response["status"] == "failed"
        assert "shutting down" in response["error"]["message"]


async def test_stopping_process_lets_turns_finish_within_its_grace(tmp_path: Path) -> None:
    script = Script((ScriptedTurn(pad_tokens=40),))
    async with staged(tmp_path / "s.db", script, tokens_per_s=1_000) as stage:
        listener = Listener()
        await stage.start(None, listener, input="Hello")
        async with asyncio.timeout(WAIT_S):
            await stage.runner.drain(WAIT_S)

        assert check_turn(await listener.all())["status"] == "completed"


async def test_silent_engine_is_covered_by_heartbeats(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db", heartbeat_s=0.01) as stage:
        has_beaten = asyncio.Event()

        class Counting(Listener):
            def deliver(self, events: Any) -> None:
                super().deliver(events)
                if len(self.events) >= 8:
                    has_beaten.set()

        engine, listener = StuckEngine(ANSWER[:1]), Counting()
        use(stage, engine)
        running = await stage.start(None, listener, input="Hello")
        await wait(has_beaten)
        running.notify(Cancel())
        events = await listener.all()

    check_turn(events)
    beats = [event for event in events if event["type"] == "response.in_progress"]
    assert len(beats) >= 3
    assert all(beat["response"] == beats[0]["response"] for beat in beats)


async def test_reader_that_is_behind_slows_the_engine_down(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db") as stage:
        engine, listener = StuckEngine(ANSWER[:-1] * 4), Listener()
        use(stage, engine)
        listener.is_full = True
        running = await stage.start(None, listener, input="Hello")
        for _ in range(50):
            await asyncio.sleep(0)
        assert engine.pieces == 1

        listener.is_full = False
        running.wake()
        await wait(engine.is_asked)

        assert engine.pieces == len(engine.ids)
        running.notify(Cancel())
        check_turn(await listener.all())


# --- save before you say ----------------------------------------------------------------------------


@dataclass
class WatchedTurns:
    """A store that can refuse, and that notes what the client had heard when a turn was saved."""

    inner: Turns
    listener: Listener = field(default_factory=Listener)
    fault: Exception | None = None
    heard: list[str] = field(default_factory=list)

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        return await self.inner.find(owner, turn_id)

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        return await self.inner.read(owner, turn_id)

    async def save(self, turn: Turn) -> None:
        if self.fault is not None:
            raise self.fault
        await self.inner.save(turn)
        self.heard.append(self.listener.events[-1].type)

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        return await self.inner.delete(owner, turn_id)


async def test_terminal_event_leaves_after_the_save(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db") as stage:
        watched = WatchedTurns(stage.store)
        stage.store = watched
        await stage.start(None, watched.listener, input="Hello")
        check_turn(await watched.listener.all())

    assert watched.heard == ["response.output_item.done"]


@pytest.mark.parametrize(
    "fault, code",
    [
        (Unavailable("The store is away."), "server_is_overloaded"),
        (StoreFailed("The disk is full."), "server_error"),
        (RuntimeError("a bug"), "server_error"),
    ],
)
async def test_turn_that_could_not_be_saved_is_not_called_complete(
    tmp_path: Path, fault: Exception, code: str
) -> None:
    async with staged(tmp_path / "s.db") as stage:
        stage.store = WatchedTurns(stage.store, fault=fault)
        response = check_turn((await stage.turn(input="Hello")).events)

    assert response["status"] == "failed"
    assert response["error"]["code"] == code
    assert "a bug" not in response["error"]["message"]


async def test_unstored_turn_touches_no_disk(tmp_path: Path) -> None:
    secret = "a very particular phrase"
    async with staged(tmp_path / "s.db", Script((ScriptedTurn(text=secret[::-1]),))) as stage:
        connection: Connection = stage.connect()
        first = await stage.turn(connection, input=secret, store=False)
        second = await stage.turn(
            connection, input="On", store=True, previous_response_id=first.response["id"]
        )
        assert await found(stage, first.response["id"]) is None
        assert await found(stage, second.response["id"]) is not None
        await stage.records.afterwards.drained()

    assert not any(secret.encode() in data for data in files_in(tmp_path))


async def test_failed_unstored_turn_is_remembered_nowhere(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db") as stage:
        use(stage, BrokenEngine(None))
        connection = stage.connect()
        told = await stage.turn(connection, input="Hello", store=False)

        assert connection.near.held(OWNER, told.response["id"]) is None


async def test_engine_may_finish_without_a_word(tmp_path: Path) -> None:
    class Mute(BrokenEngine):
        async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
            yield Finish("stop")

    async with staged(tmp_path / "s.db") as stage:
        use(stage, Mute(None))
        response = check_turn((await stage.turn(input="Hello")).events)
        told = await stage.turn(input="On", model="alias", previous_response_id=response["id"])

    assert (response["status"], response["output"]) == ("completed", [])
    assert check_turn(told.events)["status"] == "completed"


# --- in the background ------------------------------------------------------------------------------


@dataclass
class BusyEngine(StuckEngine):
    """Has no place for a job until it is let in; then it says these ids and no more."""

    may_begin: asyncio.Event = field(default_factory=asyncio.Event)

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        self.is_asked.set()
        await self.may_begin.wait()
        async for piece in super().sample(job):
            yield piece


async def test_background_turn_is_queued_until_its_engine_begins(tmp_path: Path) -> None:
    """Waiting for an engine does not count as running, and nobody has to follow it."""
    async with staged(tmp_path / "s.db", heartbeat_s=0.01, background_s_max=0.05) as stage:
        engine, listener = BusyEngine(ANSWER[:4]), Listener()
        use(stage, engine)
        running = await stage.start(None, listener, input="Hello", background=True)
        await wait(engine.is_asked)
        # Ten heartbeats are twice the limit.
        await until(lambda: running.last > 10)
        assert running.visible.status == "queued"
        assert {one.type for one in listener.events} == {"response.created", "response.queued"}

        engine.may_begin.set()
        response = check_turn(await listener.all())

    assert response["status"] == "failed"
    assert response["error"]["code"] == "background_timeout"
    assert "0.05 s" in response["error"]["message"]
    assert response["output"], "what was written by then is kept"


async def test_background_turn_that_nobody_follows_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "UNHEARD_S_MAX", 0.0)
    async with staged(tmp_path / "s.db", heartbeat_s=0.001) as stage:
        engine, listener = StuckEngine(ANSWER[:4]), Listener()
        use(stage, engine)
        running = await stage.start(None, listener, input="Hello", background=True)
        running.detach(listener)
        await wait(engine.is_asked)
        before = running.last
        await until(lambda: running.last > before + 3)
        assert not running.inbox
        assert running.visible.status == "in_progress"


@dataclass
class SlowTurns(WatchedTurns):
    """A store that has written that a turn runs, and answers when it may."""

    has_written: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def save(self, turn: Turn) -> None:
        await self.inner.save(turn)
        if turn.response.status == "in_progress":
            self.has_written.set()
            await self.may_answer.wait()


async def test_stop_waits_for_a_background_turn_whose_beginning_is_being_written(
    tmp_path: Path,
) -> None:
    """Nobody takes over a turn that runs, so letting go of it would end it as failed."""
    async with staged(tmp_path / "s.db") as stage:
        slow = stage.store = SlowTurns(stage.store)
        running = await stage.start(None, slow.listener, input="Hello", background=True)
        await wait(slow.has_written)
        stopping = asyncio.create_task(stage.runner.drain(WAIT_S))
        await asyncio.sleep(0)
        slow.may_answer.set()
        await stopping
        turn = await found(stage, running.id)

    assert turn is not None
    assert turn.response.status == "completed"


@dataclass
class LateTurns(WatchedTurns):
    """A store that writes that a turn runs when it may, also if nobody waits for that any more."""

    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    may_write: asyncio.Event = field(default_factory=asyncio.Event)
    late: asyncio.Task[None] | None = None

    async def save(self, turn: Turn) -> None:
        if turn.response.status != "in_progress":
            await self.inner.save(turn)
            return
        self.late = asyncio.create_task(self._save_late(turn))
        await asyncio.shield(self.late)

    async def _save_late(self, turn: Turn) -> None:
        self.has_begun.set()
        await self.may_write.wait()
        await self.inner.save(turn)


async def test_end_of_a_background_turn_is_written_after_its_beginning(tmp_path: Path) -> None:
    """A cancel that comes while it is written that the turn runs: other workers would read that it runs for ever."""
    stores: list[LateTurns] = []

    def slowed(turns: Turns) -> Turns:
        stores.append(LateTurns(turns))
        return stores[0]

    async with staged(tmp_path / "s.db", wrap=slowed) as stage:
        late = stores[0]
        running = await stage.start(None, late.listener, input="Hello", background=True)
        await wait(late.has_begun)
        running.notify(Cancel())
        told = asyncio.create_task(late.listener.all())
        # As long as the end would take, if it did not wait.
        await asyncio.wait([told], timeout=0.2)
        late.may_write.set()
        assert (await told)[-1]["response"]["status"] == "cancelled"
        assert late.late is not None
        await late.late
        turn = await late.inner.read(OWNER, running.id)

    assert turn is not None
    assert turn.response.status == "cancelled"


@dataclass
class OneTokenEngine(StuckEngine):
    """Cannot but sample one token, as servers behind HTTP do."""

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        yield Finish("length", input_tokens=9, output_tokens=1)


async def test_warm_up_reports_no_output_tokens(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db") as stage:
        use(stage, OneTokenEngine())
        listener = Listener()
        await stage.start(None, listener, input="Hello", generate=False)
        usage = check_turn(await listener.all())["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (9, 0, 9)


async def test_references_are_weighed_as_what_they_stand_for(tmp_path: Path) -> None:
    async with staged(tmp_path / "turns.db") as stage:
        long = {"type": "message", "id": "long", "role": "user", "content": "word " * 20_000}
        first = await stage.turn(input=[long])
        named = [{"type": "item_reference", "id": "long"}]
        stage.runner._memory = Memory(300_000)
        more = {"previous_response_id": first.response["id"], "store": False}
        assert (await stage.turn(input=named, **more)).response["status"] == "completed"
        # A few hundred bytes that stand for 400 KB.
        with pytest.raises(InvalidRequest) as told:
            await stage.turn(input=4 * named, **more)
        assert told.value.code == "context_length_exceeded"
