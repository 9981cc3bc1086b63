"""One turn by values: a scripted list of pieces in, events, a saved turn and its usage out.

The engine, the store, the hosted tools and the gate are doubles at their seams; everything between them is the product.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from msgspec import Raw, structs

from segue.dialects.messages import MessagesDialect
from segue.errors import EngineFailed, StoreFailed
from segue.ids import item_ids
from segue.memory.budget import Memory
from segue.resent.render_cache import RenderCache
from segue.seams.access import Seals
from segue.seams.history import Round, Turn, Unfinished
from segue.seams.model import Delta, Deltas, EngineFacts, Finish, Job, JobStarted, Piece, Scene
from segue.stores.memory_turns import MemoryTurns
from segue.turn.assemble import Assembler
from segue.turn.loop import TurnLoop
from segue.turn.notices import Cancel, Drain, Steer
from segue.turn.plan import Arrival, Caller, Model, Plan, Receipt
from segue.turn.prepare import prepare
from segue.turn.resources import Gate, Resources
from segue.turn.running import Running
from segue.wire.codec import decode_create, decode_item, user_message
from segue.wire.events import Event
from segue.wire.items import HostedOutput, Item, weigh
from tests.hosted import AtHand
from tests.support import until

OWNER = "ada"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def text(*words: str) -> list[Piece]:
    return [Deltas((Delta(text=word),)) for word in words]


MIB = 1024 * 1024
CALL: list[Piece] = [
    Deltas((Delta(call_index=0, call_name="weather"),)),
    Deltas((Delta(call_index=0, call_arguments="{}"),)),
]


@dataclass
class ListEngine:
    """Plays one list of pieces for each job; an exception in it is raised."""

    scripts: list[list[Piece | Exception]]
    jobs: list[Job] = field(default_factory=list)
    can_constrain: bool = False
    grammars: frozenset[str] = frozenset()
    facts = EngineFacts()

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        self.jobs.append(job)
        for piece in self.scripts[len(self.jobs) - 1]:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def is_ready(self) -> bool:
        return True


class OpenSeals:
    """Seals that anybody can open."""

    def seal(self, owner: str, body: bytes) -> str:
        return body.hex()

    def open(self, owner: str, sealed: str) -> bytes | None:
        return bytes.fromhex(sealed)


class Ear:
    """A subscriber with room for everything."""

    is_full = False
    can_catch_up = False

    def __init__(self) -> None:
        self.events: list[Event] = []

    def attached(self, running: Running) -> None: ...

    def lose(self) -> None:
        pass

    def deliver(self, events: Sequence[Event]) -> None:
        self.events += events

    @property
    def types(self) -> list[str]:
        return [event.type.removeprefix("response.") for event in self.events]


@dataclass
class Played:
    loop: TurnLoop
    running: Running
    ear: Ear
    plan: Plan

    @property
    def response(self) -> Any:
        return self.running.assembler.response

    @property
    def turn(self) -> Turn:
        assert self.running.turn is not None
        return self.running.turn


async def begin(
    *scripts: Sequence[Piece | Exception],
    turns: Any = None,
    hosted: Any = None,
    **fields: Any,
) -> Played:
    """A turn that is about to run."""
    engine = ListEngine([list(script) for script in scripts])
    model = Model("m", cast(Any, engine), MessagesDialect(), context_tokens_set=1_000)
    resources = Resources(
        {"m": model},
        cast(Seals, OpenSeals()),
        RenderCache(0),
        hosted=AtHand(hosted) if hosted else None,
    )
    body = {"model": "m", "input": "Go.", "store": False, **fields}
    create = decode_create(json.dumps(body).encode())
    turns = turns or MemoryTurns(10_000_000)
    arrival = Arrival(create, Caller(OWNER, turns), Receipt())
    plan = await prepare(arrival, resources, "resp_1", Memory().preparing(0))
    if hosted is not None:
        plan = structs.replace(plan, resolved=_hosted(plan))
    running = Running(
        OWNER,
        Assembler(plan.response, item_ids(plan.id), "text", lambda body: body.hex()),
        is_stored=plan.is_stored,
        is_rollout=plan.is_rollout,
    )
    ear = Ear()
    running.attach(ear)
    return Played(TurnLoop(plan, running, turns.save, resources), running, ear, plan)


def _hosted(plan: Plan) -> Any:
    from msgspec import structs

    return structs.replace(plan.resolved, is_hosted=True)


async def play(*scripts: Sequence[Piece | Exception], **fields: Any) -> Played:
    played = await begin(*scripts, **fields)
    await played.loop.run()
    return played


async def test_turn_of_text_is_events_in_order_then_a_saved_turn() -> None:
    finish = Finish("stop", cached_tokens=3, input_tokens=10, output_tokens=2)
    played = await play([JobStarted(route="a"), *text("Hel", "lo."), finish])

    assert played.ear.types == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ], "the terminal event is the runner's"
    assert [event.number for event in played.ear.events] == list(range(9))
    assert (played.response.status, played.response.usage.total_tokens) == ("completed", 12)
    assert played.response.usage.input_tokens_details.cached_tokens == 3
    assert played.turn.usage is not None
    assert played.turn.usage.output_tokens == 2
    assert played.turn.warm is not None
    assert played.turn.warm.route == "a"


async def test_one_timeline_has_every_stage_once() -> None:
    played = await play([*text("Hi."), Finish("stop")])

    assert [span.stage for span in played.plan.tally.spans] == [
        "validate",
        "resolve",
        "render",
        "first_token",
        "sample",
        "save",
    ]


@pytest.mark.parametrize(
    "pieces, status, why",
    [
        ([*text("Hi"), Finish("length")], "incomplete", "max_output_tokens"),
        ([*text("Hi")], "failed", "server_error"),
        ([EngineFailed("no engine", code="engine_down")], "failed", "engine_down"),
        ([RuntimeError("a bug")], "failed", "server_error"),
    ],
)
async def test_how_the_engine_ends_is_how_the_response_ends(
    pieces: list[Piece | Exception], status: str, why: str
) -> None:
    played = await play(pieces)

    assert played.response.status == status
    details, error = played.response.incomplete_details, played.response.error
    assert why == (details.reason if details else error.code)


async def test_stop_string_ends_the_answer_whole_and_leaves_no_ids() -> None:
    played = await play([*text("One. ", "Two. ", "Three."), Finish("stop")], stop=["Two"])

    assert played.response.status == "completed"
    assert json.loads(played.turn.output[0].raw)["content"][0]["text"] == "One. "
    assert [one.fingerprint for one in played.turn.rounds] == [None]
    assert played.turn.warm is None, "what is kept is not what was sampled"


@pytest.mark.parametrize("notice, status", [(Cancel(), "cancelled"), (Drain(), "failed")])
async def test_notice_ends_the_turn_before_the_engine_is_asked(notice: Any, status: str) -> None:
    played = await begin([*text("Hi."), Finish("stop")])
    played.running.notify(notice)
    await played.loop.run()

    assert played.response.status == status
    assert not cast(ListEngine, played.plan.model.engine).jobs


async def test_timeout_of_the_engine_while_a_steer_waits_is_a_fault() -> None:
    """The steer waits for the end of a sentence; then the engine breaks off."""
    steer = Steer("steer_1", Raw(b'"Stop."'), (user_message("Stop."),))
    played = await begin([*text("One"), TimeoutError()])

    class Steering(Ear):
        def deliver(self, events: Sequence[Event]) -> None:
            if events[-1].type == "response.output_text.delta":
                played.running.notify(steer)

    played.running.attach(Steering())
    await played.loop.run()

    assert (played.response.status, played.response.error.code) == ("failed", "server_error")


class BrokenTurns(MemoryTurns):
    """A store that is away for its first writes."""

    def __init__(self, failures: int) -> None:
        super().__init__(10_000_000)
        self.left = failures

    async def save(self, turn: Turn) -> None:
        if self.left:
            self.left -= 1
            raise StoreFailed("the store is away")
        await super().save(turn)


async def test_turn_that_cannot_be_saved_fails_and_is_saved_as_failed() -> None:
    turns = BrokenTurns(1)
    played = await play([*text("Hi."), Finish("stop")], turns=turns, store=True)

    assert (played.response.status, played.loop.unsaved) == ("failed", None)
    kept = await turns.find(OWNER, "resp_1")
    assert kept is not None
    assert kept.response.status == "failed"


async def test_turn_that_the_store_never_takes_is_handed_to_whoever_retries() -> None:
    played = await play([*text("Hi."), Finish("stop")], turns=BrokenTurns(9), store=True)

    assert played.response.status == "failed"
    assert played.loop.unsaved is not None
    assert played.loop.unsaved.response.status == "failed"


@dataclass
class Echoing:
    """Hosted tools that answer every call of the first round."""

    answered: list[Scene] = field(default_factory=list)
    is_spent: bool = False

    def open(self, plan: Plan, running: Running, gate: Gate | None) -> Echoing:
        self.plan = plan
        return self

    async def begin(self, may_act: Callable[[Plan], Awaitable[bool]]) -> Plan:
        assert await may_act(self.plan), "no guard is asked"
        return self.plan

    async def answer(
        self, wrote: Sequence[Item], scene: Scene, *, may_run: bool, following: Any = None
    ) -> tuple[Item, ...]:
        self.answered.append(scene)
        if len(self.answered) > 1:
            return ()
        value = HostedOutput(call_id="c", output="sun")
        return (Item(b'{"type":"hosted"}', value),)

    async def append(self, items: Any, rounds: Sequence[Round], may_act: Any) -> Any:
        return items


async def test_output_of_a_hosted_tool_is_another_round_of_the_same_turn() -> None:
    hosted = Echoing()
    played = await play(
        [JobStarted(route="a"), *text("Looking."), Finish("stop")],
        [*text("Sun."), Finish("stop")],
        hosted=hosted,
    )

    assert played.response.status == "completed"
    first, second = cast(ListEngine, played.plan.model.engine).jobs
    assert (first.route, second.route, played.turn.route) == (None, "a", "a")
    assert first.scene.past is None
    assert isinstance(second.scene.past, Unfinished), "the round before is a link of the history"
    assert isinstance(second.scene.given[0].value, HostedOutput)
    assert [len(one.wrote) for one in played.turn.rounds] == [1, 1]
    assert played.response.usage is not None
    made = [*(item for one in played.turn.rounds for item in one.wrote), *second.scene.given]
    assert played.running.input_bytes >= weigh(made)


class Reading(Echoing):
    """Hosted tools that give the model more than the client sent."""

    async def begin(self, may_act: Callable[[Plan], Awaitable[bool]]) -> Plan:
        given = (*self.plan.resolved.given, user_message("page " * MIB))
        return structs.replace(self.plan, resolved=structs.replace(self.plan.resolved, given=given))


async def test_what_hosted_tools_give_before_the_model_speaks_counts() -> None:
    played = await play([*text("Hi."), Finish("stop")], [Finish("stop")], hosted=Reading())
    # As bytes, as a value, and in the messages.
    assert 3 * 5 * MIB < played.running.input_bytes < 4 * 5 * MIB


async def test_rollout_waits_for_its_outputs_and_goes_on_with_them() -> None:
    played = await begin(
        [*CALL, Finish("stop")], [*text("Sunny."), Finish("stop")], rollout=True, tools=[WEATHER]
    )
    running = asyncio.create_task(played.loop.run())
    await until(lambda: played.running.is_waiting)
    assert played.ear.types[-1] == "done"
    (call_id,) = played.running.awaited_calls or ()
    output = {"type": "function_call_output", "call_id": call_id, "output": "sun"}
    item = decode_item(json.dumps(output).encode(), "input[0]")
    before = played.running.input_bytes
    append = played.running.accept_append((item,), MIB)
    # Until the model reads it, it weighs what it came in.
    assert played.running.input_bytes >= before + MIB
    played.running.notify(append)
    await running

    assert played.response.status == "completed"
    # What was appended counts once: as what came, and then as an item.
    assert before + weigh([item]) < played.running.input_bytes < MIB
    assert [len(one.given) for one in played.turn.rounds] == [1, 1]
    assert not played.turn.open_calls


async def test_rollout_whose_client_never_answers_fails() -> None:
    played = await begin([*CALL, Finish("stop")], rollout=True, tools=[WEATHER])
    played.loop.resources = replace(played.loop.resources, append_s_max=0.01)
    await played.loop.run()

    assert played.response.error.code == "append_timeout"
