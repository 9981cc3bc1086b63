"""What happens at an odd time: a repeat while the first is prepared, a store that is away for a moment, a steer or a
cancel between two steps, a history that is compacted twice. Each of these went wrong once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from segue.errors import Unavailable
from segue.seams.history import Turn
from segue.seams.model import Job, Piece
from segue.seams.store import Claim, Conversation, ConversationItem
from segue.turn.compose import compose
from segue.turn.plan import Composed
from segue.wire.items import Compaction, Item
from tests.scenarios.test_background import KEY, LONG, follow, post
from tests.scenarios.test_compaction import CALL, STORY
from tests.scenarios.test_rollout import append, outputs, scripted, until_done
from tests.scenarios.test_steering import started, steer, until
from tests.support import MODEL, WAIT_S, WEATHER, Answer, Served, Wire, fetch, metric, wire

TRIGGER = [{"type": "compaction_trigger"}]
MANAGED = [{"type": "compaction", "compact_threshold": 1_000}]
SECRET = "SECRETHERON"
# Eight messages that do not fit into a context of 2,000 tokens, and a question.
CROWD = [{"role": "user", "content": f"{n} {STORY[:1500]}"} for n in range(8)] + [
    {"role": "user", "content": "Well?"}
]


def watch(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What the engine is asked from now on."""
    jobs: list[Job] = []
    engine = served.app.runner.models[MODEL].engine
    sample = engine.sample

    def sampling(job: Job) -> AsyncIterator[Piece]:
        jobs.append(job)
        return sample(job)

    monkeypatch.setattr(engine, "sample", sampling)
    return jobs


def shown(job: Job) -> list[Item]:
    """All items that the model sees."""
    past = [item for one in job.scene.history() for item in (*one.given, *one.wrote)]
    return [*past, *job.scene.given]


def words(job: Job) -> str:
    return "\n".join(str(item.value) for item in shown(job))


def stored(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/s.db"


def on_disk(tmp_path: Path) -> bytes:
    return b"".join(path.read_bytes() for path in tmp_path.glob("s.db*"))


async def windowed(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """The window that the endpoint makes of this."""
    body = {"model": MODEL, **fields}
    answer = await fetch(served, "POST", "/v1/responses/compact", body)
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = answer.json["output"]
    return found


async def goes_on(socket: Wire, parent: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The terminal event of a turn that continues the one that ended with this event."""
    return await socket.turn(previous_response_id=parent["response"]["id"], **fields)


async def retrieved(served: Served, turn_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await fetch(served, "GET", f"/v1/responses/{turn_id}")).json
    return found


async def hear(served: Served, turn_id: str, name: str) -> None:
    """Follow a background response until it has told this event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    head = f"GET /v1/responses/{turn_id}?stream=true HTTP/1.1\r\nHost: 127.0.0.1:{served.port}"
    writer.write(f"{head}\r\n\r\n".encode())
    async with asyncio.timeout(WAIT_S):
        await reader.readuntil(f"event: {name}\n".encode())
    writer.transport.abort()


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask until it is so."""
    async with asyncio.timeout(WAIT_S):
        while not await condition():
            pass


def kinds_of(last: dict[str, Any]) -> list[str]:
    return [item["type"] for item in last["response"]["output"]]


# --- compaction -----------------------------------------------------------------------------------------


async def test_window_that_is_compacted_again_is_read_and_not_carried_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        scripted(tmp_path, {"text": "One."}, {"text": "Heron."}, context_tokens=4_000) as served,
        wire(served) as socket,
    ):
        jobs = watch(served, monkeypatch)
        window = await windowed(served, input="Tell me.")
        last = await socket.turn(input=[*window, {"role": "user", "content": "Go on."}])
        assert "One." in words(jobs[-1])
        last = await goes_on(socket, last, input=TRIGGER)
        assert kinds_of(last) == ["compaction"]
        last = await goes_on(socket, last, input="And?")
        assert last["type"] == "response.completed"
        assert not [item for item in shown(jobs[-1]) if isinstance(item.value, Compaction)]
        assert "Heron." in words(jobs[-1])


async def test_window_of_a_window_has_one_compaction(tmp_path: Path) -> None:
    async with scripted(tmp_path, {"text": "One."}, context_tokens=4_000) as served:
        window = await windowed(served, input="Tell me.")
        given = [*window, {"role": "user", "content": "More."}]
        again = [item["type"] for item in await windowed(served, input=given)]
        assert again == ["message", "message", "compaction"]


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
async def test_threshold_above_the_context_compacts_before_it_is_full(
    tmp_path: Path, truncation: str
) -> None:
    async with scripted(tmp_path, {"text": "Yes."}, context_tokens=2_000) as served:
        high = [{"type": "compaction", "compact_threshold": 200_000}]
        answer = await post(served, input=CROWD, truncation=truncation, context_management=high)
        assert answer.status == 200, answer.body
        assert [item["type"] for item in answer.json["output"]] == ["compaction", "message"]


async def test_turn_goes_on_uncompacted_where_only_thoughts_come_and_all_of_it_fits(
    tmp_path: Path,
) -> None:
    thoughts = {"reasoning": STORY * 3, "text": "Heron."}
    script = ({"text": STORY}, {"text": STORY}, thoughts)
    flags: dict[str, Any] = {"context_tokens": 4_000, "dialect": "qwen3"}
    async with scripted(tmp_path, *script, **flags) as served, wire(served) as socket:
        more: dict[str, Any] = {"context_management": MANAGED}
        last = await socket.turn(input="A story.", **more)
        last = await goes_on(socket, last, input="More.", **more)
        last = await goes_on(socket, last, input="The code word?", **more)
        assert last["type"] == "response.completed"
        assert kinds_of(last) == ["reasoning", "message"]


async def test_cancel_while_the_history_is_compacted_reads_cancelled(tmp_path: Path) -> None:
    async with scripted(tmp_path, {"text": LONG}, context_tokens=2_000, tps=50) as served:
        first = (await post(served, input=CROWD, background=True, context_management=MANAGED)).json
        await hear(served, first["id"], "response.compaction.compacting")
        answer = await fetch(served, "POST", f"/v1/responses/{first['id']}/cancel")
        assert (answer.json["status"], answer.json["error"]) == ("cancelled", None)


async def test_what_the_developer_said_survives_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(tmp_path, {"text": "Yes."}, context_tokens=4_000) as served:
        jobs = watch(served, monkeypatch)
        given = [
            {"role": "developer", "content": "Answer in French."},
            {"role": "user", "content": "Hi."},
        ]
        window = await windowed(served, input=given)
        await post(served, input=[*window, {"role": "user", "content": "Go on."}])
        assert "Answer in French." in words(jobs[-1])


async def test_last_words_of_the_user_survive_two_compactions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        scripted(tmp_path, {"text": "Yes."}, context_tokens=4_000) as served,
        wire(served) as socket,
    ):
        jobs = watch(served, monkeypatch)
        last = await socket.turn(input=f"Please do this. {STORY * 2}")
        for _ in range(2):
            last = await goes_on(socket, last, input=TRIGGER)
            assert kinds_of(last) == ["compaction"]
        await goes_on(socket, last, input=[])
        assert "Please do this." in words(jobs[-1])


async def test_window_of_a_compacted_chain_shows_no_summary(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, {"text": "Yes."}, {"text": SECRET}, context_tokens=4_000) as served,
        wire(served) as socket,
    ):
        last = await socket.turn(input="Hi.")
        last = await goes_on(socket, last, input=TRIGGER)
        parent_id = last["response"]["id"]
        window = await windowed(served, previous_response_id=parent_id, input="More.")
        texts = [part["text"] for item in window[:-1] for part in item["content"]]
        assert texts == ["Hi.", "More."]


async def test_words_that_are_not_stored_do_not_reach_the_disk_by_a_compaction(
    tmp_path: Path,
) -> None:
    flags: dict[str, Any] = {"store": stored(tmp_path), "context_tokens": 4_000}
    async with scripted(tmp_path, {"text": "Yes."}, **flags) as served, wire(served) as socket:
        first = await socket.turn(input=f"The code word is {SECRET}. {STORY * 3}", store=False)
        last = await goes_on(socket, first, input="And?", store=True, context_management=MANAGED)
        assert kinds_of(last) == ["message"]
        unstored = await goes_on(socket, first, input=TRIGGER, store=False)
        assert kinds_of(unstored) == ["compaction"]
        refused = await goes_on(socket, first, input=TRIGGER, store=True)
        assert (refused["status"], refused["error"]["param"]) == (400, "store")
    assert SECRET.encode() not in on_disk(tmp_path)


async def test_compaction_of_a_chain_is_not_resent_together_with_a_parent(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, {"text": "Yes."}, context_tokens=4_000) as served,
        wire(served) as socket,
    ):
        last = await goes_on(socket, await socket.turn(input="Hi."), input=TRIGGER)
        (compaction,) = last["response"]["output"]
        given = [compaction, {"role": "user", "content": "Well?"}]
        refused = await goes_on(socket, last, input=given)
        assert (refused["status"], refused["error"]["param"]) == (400, "input")
        assert (await socket.turn(input=given))["type"] == "response.completed"


async def test_output_behind_a_compaction_needs_its_call_behind_it_too(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, {"text": "Yes."}, context_tokens=4_000) as served,
        wire(served) as socket,
    ):
        last = await goes_on(socket, await socket.turn(input="Hi."), input=TRIGGER)
        (compaction,) = last["response"]["output"]
        called = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
        refused = await socket.turn(input=[called, compaction, output])
        assert (refused["type"], refused["status"]) == ("error", 400)
        last = await socket.turn(input=[compaction, called, output])
        assert last["type"] == "response.completed"


async def test_trigger_with_nothing_before_it_is_refused(tmp_path: Path) -> None:
    async with scripted(tmp_path, {"text": "Yes."}) as served, wire(served) as socket:
        refused = await socket.turn(input=TRIGGER)
        assert (refused["status"], refused["error"]["param"]) == (400, "input")


# --- repeats --------------------------------------------------------------------------------------------


async def test_repeat_of_a_steered_response_makes_no_second_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        scripted(tmp_path, {"text": LONG}, {"text": "Short."}, tps=400) as served,
        wire(served) as socket,
        wire(served) as other,
    ):
        jobs = watch(served, monkeypatch)
        target = await started(socket, input="Tell me.", idempotency_key="k")
        await steer(socket, target)
        await until(socket, "response.incomplete")
        assert (await socket.events())[-1]["response"]["previous_response_id"] == target
        await other.create(input="Tell me.", idempotency_key="k")
        repeated = (await until(other, "response.incomplete"))[-1]
        assert repeated["response"]["id"] == target
        next_one = await other.turn(input=[{"role": "assistant", "content": "x"}])
        assert next_one["response"]["previous_response_id"] is None
        assert len(jobs) == 3


async def test_steered_response_that_two_hear_has_one_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        scripted(tmp_path, {"text": LONG}, {"text": "Short."}, tps=400) as served,
        wire(served) as socket,
        wire(served) as other,
    ):
        jobs = watch(served, monkeypatch)
        target = await started(socket, input="Tell me.", idempotency_key="k")
        assert await started(other, input="Tell me.", idempotency_key="k") == target
        await steer(socket, target)
        for one in (socket, other):
            await until(one, "response.incomplete")
        assert (await socket.events())[-1]["response"]["previous_response_id"] == target
        next_one = await other.turn(input=[{"role": "assistant", "content": "x"}])
        assert next_one["response"]["previous_response_id"] is None
        assert len(jobs) == 3


@pytest.mark.parametrize("kind", ["parent", "background"])
async def test_several_at_once_with_one_key_are_all_answered(tmp_path: Path, kind: str) -> None:
    flags = {"store": stored(tmp_path)}
    more: dict[str, Any] = {"background": True}
    if kind == "parent":
        async with scripted(tmp_path, {"text": "Yes."}, **flags) as served:
            more = {"previous_response_id": (await post(served)).json["id"]}
    async with scripted(tmp_path, {"text": "Yes."}, **flags) as served:
        answers = await asyncio.gather(*(post(served, KEY, **more) for _ in range(4)))
        assert [one.status for one in answers] == [200] * 4, [one.body for one in answers]
        assert len({one.json["id"] for one in answers}) == 1


async def test_client_that_leaves_while_its_key_is_claimed_does_not_spend_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(tmp_path, {"text": "Yes."}, store=stored(tmp_path)) as served:
        idempotency_keys = served.app.runner.records.idempotency_keys
        claim, release = idempotency_keys.claim, idempotency_keys.release
        is_claimed, may_go_on, is_released = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def claiming(asked: Claim) -> Claim:
            held = await claim(asked)
            is_claimed.set()
            await may_go_on.wait()
            return held

        async def releasing(asked: Claim) -> None:
            await release(asked)
            is_released.set()

        monkeypatch.setattr(idempotency_keys, "claim", claiming)
        monkeypatch.setattr(idempotency_keys, "release", releasing)

        async def is_alone() -> bool:
            return await metric(served, "segue_connections") == 0

        async with asyncio.timeout(WAIT_S):
            async with wire(served) as socket:
                await socket.create(input="Hi.", idempotency_key="k")
                await is_claimed.wait()
            await eventually(is_alone)
            may_go_on.set()
            await is_released.wait()
        async with wire(served) as socket:
            last = await socket.turn(input="Hi.", idempotency_key="k")
        assert last["type"] == "response.completed"


async def test_turn_that_ended_with_its_process_does_not_spend_its_key(tmp_path: Path) -> None:
    flags = {"store": stored(tmp_path)}
    async with scripted(tmp_path, {"text": LONG}, tps=50, **flags) as served:
        asking = asyncio.create_task(post(served, KEY))

        async def has_begun() -> bool:
            await asyncio.sleep(0)
            return served.app.runner.running_count == 1

        await eventually(has_begun)
        await served.app.drain(0)
        broken: Answer = await asking
        assert broken.status >= 500
    async with scripted(tmp_path, {"text": "Yes."}, **flags) as served:
        assert (await post(served, KEY)).json["status"] == "completed"


async def test_turn_whose_client_left_does_not_spend_its_key(tmp_path: Path) -> None:
    async with scripted(tmp_path, {"text": LONG[:200]}, tps=100) as served:
        async with wire(served) as socket:
            await started(socket, input="Hi.", idempotency_key="k", store=False)
            socket.socket.transport.abort()

        async def is_cancelled() -> bool:
            name = 'segue_turns_total{outcome="cancelled",transport="websocket"}'
            return await metric(served, name) == 1

        await eventually(is_cancelled)
        async with wire(served) as socket:
            last = await socket.turn(input="Hi.", idempotency_key="k", store=False)
        assert last["type"] == "response.completed"


async def test_repeat_after_a_restart_can_be_continued(tmp_path: Path) -> None:
    flags = {"store": stored(tmp_path)}
    asked: dict[str, Any] = {"input": "And?", "idempotency_key": "k"}
    async with scripted(tmp_path, {"text": "Yes."}, **flags) as served, wire(served) as socket:
        first = await socket.turn(input="Hi.")
        second = await goes_on(socket, first, **asked)
    async with scripted(tmp_path, {"text": "Yes."}, **flags) as served, wire(served) as socket:
        again = await goes_on(socket, first, **asked)
        assert again == second
        last = await goes_on(socket, again, input="More?")
        assert last["type"] == "response.completed"


# --- saves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "status"), [(1, "queued"), (2, "in_progress")])
async def test_background_response_waits_for_a_store_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int, status: str
) -> None:
    """When its engine begins, and when it ends: until it is saved it is told as it is stored."""
    monkeypatch.setattr("segue.process.patient_save.RETRY_S", 0.01)
    async with scripted(tmp_path, {"text": "Yes."}, store=stored(tmp_path)) as served:
        save = served.app.state.store.turns.save
        tried: list[str] = []

        async def saving(turn: Turn) -> None:
            tried.append(turn.response.status)
            if saved < len(tried) < saved + 4:
                assert (await retrieved(served, turn.id))["status"] == status
                raise Unavailable("The store cannot be reached.")
            await save(turn)

        monkeypatch.setattr(served.app.state.store.turns, "save", saving)
        first = (await post(served, background=True)).json
        assert (await follow(served, first["id"]))[-1]["type"] == "response.completed"
        assert (await retrieved(served, first["id"]))["status"] == "completed"
        expected = ["queued", "in_progress", "completed"]
        assert tried == [*expected[:saved], *[expected[saved]] * 3, *expected[saved:]]


async def test_response_whose_conversation_is_not_saved_stays_failed(tmp_path: Path) -> None:
    async with scripted(tmp_path, {"text": "Yes."}, store=stored(tmp_path)) as served:
        conversation = (await fetch(served, "POST", "/v1/conversations", {})).json["id"]

        runner = served.app.runner
        records = runner.records
        inner = records.conversations

        async def saving(
            given: Conversation, added: Sequence[ConversationItem] = (), turn: Turn | None = None
        ) -> bool:
            if added:
                raise Unavailable("The store cannot be reached.")
            return await inner.save(given, added, turn)

        away = SimpleNamespace(find=inner.find, read=inner.read, save=saving)
        runner.records = replace(records, conversations=cast(Any, away))
        answer = await post(served, conversation=conversation, stream=True)
        told = answer.events[-1]["response"]
        assert told["status"] == "failed"
        assert (await retrieved(served, told["id"]))["status"] == "failed"
        runner.records = records
        assert (await post(served, conversation=conversation)).status == 200, "it is free again"


# --- rollouts and steers --------------------------------------------------------------------------------


async def test_accepted_append_does_not_time_out_while_no_place_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_s_max = 0.5
    async with (
        scripted(
            tmp_path, {"calls": [CALL]}, {"text": "Done."}, append_s_max=append_s_max
        ) as served,
        wire(served) as socket,
    ):
        engine = served.app.runner.models[MODEL].engine
        sample, may_go_on = engine.sample, asyncio.Event()

        async def sampling(job: Job) -> AsyncIterator[Piece]:
            if job.model_turns:
                await may_go_on.wait()
            async for piece in sample(job):
                yield piece

        monkeypatch.setattr(engine, "sample", sampling)
        said = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
        for lane in range(15):
            await socket.create(input=said, stream_id=f"lane{lane}", store=False)
            await until(socket, "response.in_progress")
        await socket.create(input="Weather?", tools=[WEATHER], rollout=True, stream_id="rollout")
        done = (await until(socket, "response.done"))[-1]
        await socket.create(input=said, stream_id="lane15", store=False)
        await until(socket, "response.in_progress")
        await append(socket, done["response_id"], outputs(done))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * append_s_max):
                await until(socket, "response.failed")
        may_go_on.set()
        assert (await socket.events("rollout"))[-1]["type"] == "response.completed"


async def test_append_that_names_a_file_is_refused_and_the_rollout_goes_on_waiting(
    tmp_path: Path,
) -> None:
    async with (
        scripted(tmp_path, {"calls": [CALL]}, {"text": "Done."}) as served,
        wire(served) as socket,
    ):
        await socket.create(input="Weather?", tools=[WEATHER], rollout=True)
        done = (await until_done(socket))[-1]
        (output,) = outputs(done)
        named = {**output, "output": [{"type": "input_file", "file_id": "file_1"}]}
        await append(socket, done["response_id"], [named])
        refused = await socket.next()
        assert (refused["type"], refused["status"]) == ("error", 404)
        await append(socket, done["response_id"], [output])
        assert (await until_done(socket))[-1]["type"] == "response.completed"


async def test_steer_before_a_forced_call_is_begun_shows_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = asyncio.Event()

    async def composing(*given: Any, **named: Any) -> Composed:
        await may_go_on.wait()
        return await compose(*given, **named)

    monkeypatch.setattr("segue.turn.loop.compose", composing)
    async with scripted(tmp_path, {"calls": [CALL]}) as served, wire(served) as socket:
        engine = served.app.runner.models[MODEL].engine
        monkeypatch.setattr(type(engine), "can_constrain", True)
        choice = {"type": "function", "name": "get_weather"}
        await socket.create(input="Weather?", tools=[WEATHER], tool_choice=choice)
        target = (await socket.next())["response"]["id"]
        await steer(socket, target)
        await until(socket, "response.steer.accepted")
        may_go_on.set()
        events = await until(socket, "response.incomplete")
        assert "response.output_item.added" not in {one["type"] for one in events}
        assert events[-1]["response"]["output"] == []
        successor = (await socket.events())[-1]
        assert successor["type"] == "response.completed"
        assert successor["response"]["previous_response_id"] == target


async def test_steers_that_wait_are_bounded_and_the_oldest_is_given_back(tmp_path: Path) -> None:
    async with scripted(tmp_path, {"calls": [CALL]}, tps=60) as served, wire(served) as socket:
        pending: list[str] = []
        for lanes in (16, 16, 1):
            made: dict[str, str] = {}
            for lane in range(lanes):
                await socket.create(input="Weather?", tools=[WEATHER], stream_id=f"lane{lane}")
            expected = len(pending) + lanes
            while len(pending) < expected:
                event = await socket.next()
                if event["type"] == "response.created":
                    made[event["stream_id"]] = event["response"]["id"]
                elif event["type"] == "response.output_item.added":
                    await steer(socket, made[event["stream_id"]])
                elif event["type"] == "response.steer.pending":
                    pending.append(event["steer"]["id"])
                elif event["type"] == "response.steer.failed":
                    break
        while event["type"] != "response.steer.failed":
            event = await socket.next()
        assert len(pending) >= 32
        assert event["steer"]["id"] == pending[0]
        assert event["error"]["code"] == "successor_creation_failed"


# --- background -----------------------------------------------------------------------------------------


async def test_nobody_follows_a_response_beyond_its_newest_event(tmp_path: Path) -> None:
    async with scripted(tmp_path, {"text": LONG}, tps=50) as served:
        first = (await post(served, background=True)).json
        path = f"/v1/responses/{first['id']}?stream=true&starting_after=100000"
        answer = await fetch(served, "GET", path)
        assert (answer.status, answer.json["error"]["param"]) == (400, "stream")


async def test_cancel_in_another_process_is_never_told_as_done_while_it_runs(
    tmp_path: Path,
) -> None:
    """It is refused where the processes cannot speak with each other, and else it is done."""
    flags = {"store": stored(tmp_path), "tps": 50}
    async with (
        scripted(tmp_path, {"text": LONG}, **flags) as here,
        scripted(tmp_path, {"text": LONG}, **flags) as there,
    ):
        first = (await post(here, background=True)).json
        await hear(here, first["id"], "response.output_text.delta")
        answer = await fetch(there, "POST", f"/v1/responses/{first['id']}/cancel")
        found = await retrieved(here, first["id"])
        assert (answer.status, found["status"]) in {(409, "in_progress"), (200, "cancelled")}
