"""A client steers a response while it is written (docs/protocol.md 6.10), over real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import WEATHER, Served, Wire, fetch, serving, wire

LONG = "Once there was a river. It went on and on and nobody knew where. " * 30
PICTURE = "data:image/png;base64,iVBORw0KGgo="
CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}


@asynccontextmanager
async def scripted(
    tmp_path: Path, *turns: dict[str, Any], tps: float = 300, **flags: object
) -> AsyncIterator[Served]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": turns}))
    async with serving(script=str(script), tps=tps, **flags) as served:
        yield served


async def until(socket: Wire, kind: str) -> list[dict[str, Any]]:
    """The events up to the next one of this kind."""
    found = [await socket.next()]
    while found[-1]["type"] != kind:
        found.append(await socket.next())
    return found


async def started(socket: Wire, **fields: Any) -> str:
    """A response that has begun to write; its id."""
    await socket.create(**fields)
    events = await until(socket, "response.output_text.delta")
    found: str = events[0]["response"]["id"]
    return found


async def steer(socket: Wire, target: str, given: object = "Keep it short.", **more: Any) -> None:
    await socket.send(
        {"type": "response.steer", "previous_response_id": target, "input": given, **more}
    )


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("lane", [None, "main"])
async def test_client_steers_a_long_answer_and_the_successor_follows(
    tmp_path: Path, store: bool, lane: str | None
) -> None:
    async with (
        scripted(tmp_path, {"text": LONG}, {"text": "Short."}) as served,
        wire(served) as socket,
    ):
        lanes = {} if lane is None else {"stream_id": lane}
        target = await started(
            socket,
            input="Tell me.",
            store=store,
            instructions="Be kind.",
            metadata={"a": "b"},
            **lanes,
        )
        await steer(socket, target)
        told = await until(socket, "response.incomplete")
        accepted = next(one for one in told if one["type"] == "response.steer.accepted")
        assert accepted["steer"]["previous_response_id"] == target
        assert accepted["steer"]["id"].startswith("steer_")
        steered = told[-1]["response"]
        assert steered["incomplete_details"] == {"reason": "steered"}
        assert steered["output"][-1]["status"] == "incomplete"
        numbers = [one["sequence_number"] for one in told]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))

        after = await socket.events()
        assert after[0]["type"] == "response.created"
        successor = after[-1]["response"]
        assert successor["previous_response_id"] == target
        assert successor["instructions"] == "Be kind."
        assert successor["metadata"] == {"a": "b"}
        assert successor["store"] is store
        assert successor["output"][0]["content"][0]["text"] == "Short."
        assert {one.get("stream_id") for one in (*told, *after)} == {lane}


async def test_steers_are_given_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, {"text": LONG}, {"text": "Yes."}) as served,
        wire(served) as socket,
    ):
        target = await started(socket, input="Tell me.")
        await steer(socket, target, "First.")
        await steer(socket, target, [{"role": "user", "content": "Second."}])
        await until(socket, "response.incomplete")
        successor = (await socket.events())[-1]["response"]
        turn = await served.app.state.store.turns.read("local", successor["id"])
        assert turn is not None
        assert [b"First." in turn.given[0].raw, b"Second." in turn.given[1].raw] == [True, True]


async def test_steer_waits_for_what_the_client_owes_and_goes_first_into_its_next_create(
    tmp_path: Path,
) -> None:
    script = (
        {"calls": [CALL], "text": "Let me look that up for you, one moment please."},
        {"text": "Sun."},
    )
    async with scripted(tmp_path, *script, tps=60) as served, wire(served) as socket:
        target = await started(socket, input="Weather?", tools=[WEATHER])
        await until(socket, "response.output_item.added")
        await steer(socket, target)
        told = await until(socket, "response.steer.pending")
        done, pending = told[-2:]
        assert done["type"] == "response.completed"
        call = done["response"]["output"][-1]
        assert pending["reason"] == "waiting_for_required_input"
        assert pending["required_input"] == [
            {"type": "function_call_output", "call_id": call["call_id"], "name": "get_weather"}
        ]
        assert pending["sequence_number"] == done["sequence_number"] + 1
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
        last = await socket.turn(previous_response_id=target, input=[output], tools=[WEATHER])
        turn = await served.app.state.store.turns.read("local", last["response"]["id"])
        assert turn is not None
        assert b"Keep it short." in turn.given[0].raw
        assert b"function_call_output" in turn.given[1].raw


async def test_create_that_waits_already_takes_the_steer_along(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, {"text": LONG}, {"text": "Yes."}, {"text": "No."}) as served,
        wire(served) as socket,
    ):
        target = await started(socket, input="Tell me.")
        await socket.create(previous_response_id=target, input="And then?")
        await steer(socket, target)
        await until(socket, "response.incomplete")
        last = (await socket.events())[-1]["response"]
        turn = await served.app.state.store.turns.read("local", last["id"])
        assert turn is not None
        assert len(turn.given) == 2
        assert b"Keep it short." in turn.given[0].raw


async def test_successor_goes_before_a_create_of_another_chain(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, {"text": LONG}, {"text": "Yes."}) as served,
        wire(served) as socket,
    ):
        target = await started(socket, input="Tell me.")
        await socket.create(input="Something else.")
        await steer(socket, target)
        await until(socket, "response.incomplete")
        first = (await socket.events())[0]["response"]
        second = (await socket.events())[0]["response"]
        assert (first["previous_response_id"], second["previous_response_id"]) == (target, None)


@pytest.mark.parametrize(
    "given, more",
    [
        ("", {}),
        ([], {}),
        (7, {}),
        (None, {}),
        ([{"role": "developer", "content": "x"}], {}),
        ([{"role": "user", "content": "x", "id": "msg_1"}], {}),
        ([{"type": "function_call_output", "call_id": "c", "output": "x"}], {}),
        ("fine", {"stream_id": "main"}),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "file_1"}]}], {}),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}], {}),
    ],
)
async def test_bad_steer_fails_and_disturbs_nothing(
    tmp_path: Path, given: object, more: dict[str, Any]
) -> None:
    async with (
        scripted(tmp_path, {"text": LONG[:400]}, tps=600, unseen="refuse") as served,
        wire(served) as socket,
    ):
        target = await started(socket, input="Tell me.")
        await steer(socket, target, given, **more)
        events = await socket.events()
        failed = next(one for one in events if one["type"] == "response.steer.failed")
        assert failed["error"]["code"] == "invalid_input"
        assert failed["steer"] == {"previous_response_id": target, "input": given}
        assert events[-1]["type"] == "response.completed"


async def test_response_can_be_continued_though_its_successor_could_not_be_made(
    tmp_path: Path,
) -> None:
    """An address that leads nowhere is found out when the successor is prepared: too late to refuse the steer."""
    nowhere = {"type": "input_file", "file_url": "http://127.0.0.1:1/nothing.txt"}
    script = ({"text": LONG}, {"text": "Yes."})
    async with (
        scripted(tmp_path, *script, fetch="public") as served,
        wire(served) as socket,
    ):
        target = await started(socket, input="Tell me.", store=False)
        await steer(socket, target, [{"role": "user", "content": [nowhere]}])
        failed = (await until(socket, "response.steer.failed"))[-1]
        assert failed["error"]["code"] == "successor_creation_failed"
        last = await socket.turn(previous_response_id=target, input="Go on.", store=False)
        assert last["type"] == "response.completed"


async def test_steer_needs_a_running_response_of_this_connection(tmp_path: Path) -> None:
    async with scripted(tmp_path, {"text": "Hello."}, tps=0) as served:
        async with wire(served) as socket:
            done = (await socket.turn(input="Hi."))["response"]["id"]
            await steer(socket, done)
            late = await socket.next()
            assert late["error"]["code"] == "response_already_completed"
            assert late["sequence_number"] > 0
        async with wire(served) as other:
            await steer(other, done)
            failed = await other.next()
            assert failed["type"] == "response.steer.failed"
            assert failed["error"]["code"] == "response_not_found"
            assert "id" not in failed["steer"]
            assert (await other.turn(input="Hi."))["type"] == "response.completed"


async def test_too_many_steers_are_refused_and_the_rest_is_applied(tmp_path: Path) -> None:
    word = "word " * 400
    async with (
        scripted(tmp_path, {"text": word}, {"text": "Yes."}, tps=40) as served,
        wire(served) as socket,
    ):
        target = await started(socket, input="Tell me.")
        for number in range(17):
            await steer(socket, target, f"Number {number}.")
        events = await until(socket, "response.steer.failed")
        accepted = [one for one in events if one["type"] == "response.steer.accepted"]
        assert len(accepted) == 16
        assert events[-1]["error"]["code"] == "too_many_pending_steers"


async def test_warm_up_and_rollout_cannot_be_steered(tmp_path: Path) -> None:
    async with scripted(tmp_path, {"calls": [CALL]}, tps=0) as served, wire(served) as socket:
        await socket.create(input="Weather?", tools=[WEATHER], rollout=True)
        done = (await until(socket, "response.done"))[-1]
        await steer(socket, done["response_id"])
        failed = await socket.next()
        assert failed["error"]["code"] == "steering_not_supported"


async def test_steers_of_two_lanes_go_their_own_ways(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, {"text": LONG}, {"text": "Yes."}) as served,
        wire(served) as socket,
    ):
        ids = {}
        for lane in ("a", "b"):
            await socket.create(input=f"Tell {lane}.", stream_id=lane)
        while len(ids) < 2:
            event = await socket.next()
            if event["type"] == "response.created":
                ids[event["stream_id"]] = event["response"]["id"]
        await steer(socket, ids["a"])
        ended: dict[str, list[str]] = {"a": [], "b": []}
        while len(ended["a"]) < 2 or len(ended["b"]) < 1:
            event = await socket.next()
            if event["type"] in ("response.incomplete", "response.completed"):
                ended[event["stream_id"]].append(event["type"])
        assert ended == {
            "a": ["response.incomplete", "response.completed"],
            "b": ["response.completed"],
        }


async def test_steers_that_wait_die_with_the_connection(tmp_path: Path) -> None:
    script = (
        {"calls": [CALL], "text": "Let me look that up for you, one moment please."},
        {"text": "Sun."},
    )
    async with scripted(tmp_path, *script, tps=60) as served:
        async with wire(served) as socket:
            target = await started(socket, input="Weather?", tools=[WEATHER])
            await until(socket, "response.output_item.added")
            await steer(socket, target, "Only in French.")
            told = await until(socket, "response.steer.pending")
            owed = told[-1]["required_input"][0]["call_id"]
        output = {"type": "function_call_output", "call_id": owed, "output": "sun"}
        async with wire(served) as other:
            last = await other.turn(previous_response_id=target, input=[output], tools=[WEATHER])
        assert last["type"] == "response.completed"
        path = f"/v1/responses/{last['response']['id']}/input_items"
        listed = (await fetch(served, "GET", path)).json["data"]
        assert [item["type"] for item in listed] == ["function_call_output"]
