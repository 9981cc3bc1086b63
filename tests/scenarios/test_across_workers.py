"""Two workers on one store and one bus, the hub's or PostgreSQL's: each can hear, stop and forget the other's turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from segue.cluster.hub import Hub
from segue.server.app import WorkerPlace
from segue.stores import maintenance
from tests.pgbouncer import POOLED
from tests.support import MODEL, WAIT_S, Answer, Served, fetch, kinds, metric, serving, until, wire

Pair = tuple[Served, Served]
COMPLETED = 'segue_turns_total{outcome="completed",transport="sse"}'


@pytest.fixture(params=["hub", "postgres", *POOLED])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """Two workers that know each other. Their turns talk for a second."""
    script = tmp_path / "script.json"
    turn = {"reasoning": "hm", "text": "x", "pad_tokens": 150}
    script.write_text(json.dumps({"turns": [turn]}))
    flags: dict[str, Any] = {
        "script": str(script),
        "tps": 150,
        "seal_keys": str(tmp_path / "seals"),
    }
    async with AsyncExitStack() as stack:
        if request.param == "hub":
            flags["store"] = f"sqlite:///{tmp_path / 'shared.db'}"
            place = WorkerPlace(group="here", hub=str(tmp_path / "hub"))
            await stack.enter_async_context(Hub().opened(place.hub))
        else:
            server = request.getfixturevalue("postgres")
            flags["store"] = await server.make_database()
            stack.push_async_callback(server.drop_database, flags["store"])
            if request.param == "pooled":
                direct = flags["store_direct"] = flags["store"]
                flags["store"] = request.getfixturevalue("pooler").url(direct)
            place = WorkerPlace(group="here")
        here = await stack.enter_async_context(serving(place, **flags))
        there = await stack.enter_async_context(serving(place, **flags))
        await until(lambda: here.app.state.peers.others and there.app.state.peers.others)
        yield here, there


async def post(served: Served, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    return await fetch(served, "POST", "/v1/responses", {"model": MODEL, **fields}, headers)


async def begin(served: Served, **fields: Any) -> str:
    response_id: str = (await post(served, input="x", background=True, **fields)).json["id"]
    return response_id


async def test_cancel_reaches_the_worker_that_runs_the_turn(pair: Pair) -> None:
    here, there = pair
    response_id = await begin(here)
    cancelled = await fetch(there, "POST", f"/v1/responses/{response_id}/cancel")
    assert cancelled.status == 200
    assert cancelled.json["status"] == "cancelled"
    for served in pair:
        found = await fetch(served, "GET", f"/v1/responses/{response_id}")
        assert found.json == cancelled.json
    again = await fetch(there, "POST", f"/v1/responses/{response_id}/cancel")
    assert again.json == cancelled.json


async def test_follower_elsewhere_hears_what_a_follower_here_hears(pair: Pair) -> None:
    here, there = pair
    response_id = await begin(here)
    path = f"/v1/responses/{response_id}?stream=true"
    own, foreign, late = await asyncio.gather(
        fetch(here, "GET", path), fetch(there, "GET", path), fetch(there, "GET", path)
    )
    assert own.events[-1]["type"] == "response.completed"
    assert foreign.events == own.events == late.events
    after = own.events[4]["sequence_number"]
    rest = await fetch(there, "GET", f"{path}&starting_after={after}")
    assert rest.events == own.events[5:]


async def test_follower_elsewhere_begins_behind_a_number(pair: Pair) -> None:
    here, there = pair
    response_id = await begin(here)
    path = f"/v1/responses/{response_id}?stream=true"
    rest, whole = await asyncio.gather(
        fetch(there, "GET", f"{path}&starting_after=1"), fetch(here, "GET", path)
    )
    assert rest.events == [event for event in whole.events if event["sequence_number"] > 1]


async def test_turn_that_runs_elsewhere_is_seen_as_it_stands(pair: Pair) -> None:
    here, there = pair
    response_id = await begin(here)
    async with asyncio.timeout(WAIT_S):
        while True:
            seen = (await fetch(there, "GET", f"/v1/responses/{response_id}")).json
            if seen["status"] != "queued":
                break
    assert seen["status"] == "in_progress"
    refused = await fetch(there, "DELETE", f"/v1/responses/{response_id}")
    assert refused.status == 409


async def test_repeat_elsewhere_hears_the_turn_and_starts_none(pair: Pair) -> None:
    here, there = pair
    key = {"Idempotency-Key": "one"}
    first = asyncio.create_task(post(here, key, input="x", stream=True))
    await until(lambda: here.app.runner.running_count)
    streamed, plain = await asyncio.gather(
        post(there, key, input="x", stream=True), post(there, key, input="x")
    )
    own = (await first).events
    assert streamed.events == own
    assert plain.json == own[-1]["response"]
    async with asyncio.timeout(WAIT_S):
        while await metric(there, COMPLETED) != 1:
            pass
    later = await post(there, key, input="x")
    assert later.json == own[-1]["response"]
    other = await post(there, key, input="another")
    assert other.json["error"]["code"] == "idempotency_key_reused"
    assert await metric(there, COMPLETED) == 1


async def test_socket_repeats_a_turn_of_the_other_worker(pair: Pair) -> None:
    here, there = pair
    async with wire(here) as socket, wire(there) as repeating:
        await socket.create(input="x", idempotency_key="k")
        await socket.next()
        await repeating.create(input="x", idempotency_key="k")
        mine, theirs = await asyncio.gather(socket.events(), repeating.events())
        assert kinds(theirs)[1:] == kinds(mine)
        following = await repeating.turn(
            input="y", previous_response_id=theirs[-1]["response"]["id"], store=False
        )
        assert following["type"] == "response.completed"


async def test_last_one_who_leaves_a_repeat_cancels_it_at_home(pair: Pair) -> None:
    """The first client has gone while another heard the turn elsewhere; when that one goes too, it is over."""
    here, there = pair
    async with wire(there) as repeating:
        async with wire(here) as socket:
            # Its echo takes longer than a busy machine may stand still.
            asked = {"input": "x " * 500, "idempotency_key": "k"}
            await socket.create(**asked)
            response_id = (await socket.next())["response"]["id"]
            await repeating.create(**asked)
            assert (await repeating.next())["response"]["id"] == response_id
        # Its own client has closed; the turn goes on for the other one.
        assert (await repeating.next())["type"] == "response.in_progress"
        assert here.app.runner.running_count == 1
    await until(lambda: not here.app.runner.running_count)
    found = await fetch(there, "GET", f"/v1/responses/{response_id}")
    assert found.json["status"] == "cancelled"


async def test_messages_between_workers_are_few(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored turn that runs here needs none, on HTTP and on a socket; a poll elsewhere a question and an answer."""
    here, there = pair
    sent: list[str] = []
    for bus in {type(served.app.state.peers._bus) for served in pair}:
        publish = bus.publish

        async def note(self: object, topic: str, body: bytes) -> None:
            if b"beat" not in body:
                sent.append(topic)
            await publish(self, topic, body)  # noqa: B023

        monkeypatch.setattr(bus, "publish", note)
    first = (await post(here, input="x", max_output_tokens=3)).json["id"]
    assert (
        await post(there, input="x", max_output_tokens=3, previous_response_id=first)
    ).status == 200
    assert (await fetch(there, "GET", f"/v1/responses/{first}")).status == 200
    assert (await fetch(there, "GET", f"/v1/responses/resp_{'0' * 32}")).status == 404
    async with wire(there) as socket:
        assert (await socket.turn(input="x", max_output_tokens=3))["type"] == "response.incomplete"
    assert sent == []
    running = await begin(here)
    assert (await fetch(there, "GET", f"/v1/responses/{running}")).json["status"] != "completed"
    assert len(sent) == 2
    assert (await fetch(here, "DELETE", f"/v1/responses/{first}")).status == 200
    assert sent[2:] == ["all"]


async def test_deleted_response_is_forgotten_at_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "BEAT_S", 3600)
    here, there = pair
    parent = (await post(here, input="one", max_output_tokens=1)).json["id"]
    async with wire(there) as socket:
        child = await socket.turn(input="two", previous_response_id=parent, max_output_tokens=1)
        assert (await fetch(here, "DELETE", f"/v1/responses/{parent}")).status == 200
        async with asyncio.timeout(WAIT_S):
            while True:
                again = await socket.turn(
                    input="three",
                    previous_response_id=child["response"]["id"],
                    max_output_tokens=1,
                )
                if again["type"] == "error":
                    break
        assert again["error"]["code"] == "previous_response_not_found"
    # What a client sent as a whole is known by what was sent, not by an id.
    kept = [one.app.runner.resources.prompt_cache for one in pair]
    said = [{"role": "user", "content": "four"}]
    sent = [(await post(one, input=said, max_output_tokens=1)).json["id"] for one in pair]
    assert all(cache.bytes for cache in kept)
    for response_id in sent:
        assert (await fetch(here, "DELETE", f"/v1/responses/{response_id}")).status == 200
    await until(lambda: not any(cache.bytes for cache in kept))


async def test_foreign_and_absent_responses_look_the_same_from_everywhere(pair: Pair) -> None:
    _, there = pair
    for method, path in (
        ("GET", "/v1/responses/resp_absent"),
        ("GET", "/v1/responses/resp_absent?stream=true"),
        ("POST", "/v1/responses/resp_absent/cancel"),
        ("DELETE", "/v1/responses/resp_absent"),
    ):
        assert (await fetch(there, method, path)).status == 404


async def test_metrics_of_either_are_those_of_both(pair: Pair) -> None:
    here, there = pair
    await asyncio.gather(
        *(post(one, input="x", max_output_tokens=1) for one in (here, there, here))
    )
    async with wire(here), wire(there):
        for served in pair:
            assert await metric(served, "segue_workers") == 2
            assert await metric(served, "segue_connections") == 2
            assert await metric(served, 'segue_engine_up{replica="scripted"}') == 1
            assert (
                await metric(served, 'segue_turns_total{outcome="incomplete",transport="http"}')
                == 3
            )


async def test_follower_of_a_worker_that_dies_hears_the_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source falls silent in the middle of a turn. The follower reads in the store how it ended."""
    monkeypatch.setattr("segue.stores.postgres.LEASE_S", 0)
    here, there = pair
    response_id = await begin(here)
    following = asyncio.create_task(fetch(there, "GET", f"/v1/responses/{response_id}?stream=true"))
    await until(lambda: there.app.runner.registry.find("local", response_id))
    guest = there.app.runner.registry.find("local", response_id)
    assert guest is not None
    await until(lambda: guest.bytes)
    # As if the bus had been cut in between.
    remote = here.app.runner.registry.others
    assert remote is not None
    for forwarder in tuple(remote._forwarders.values()):
        forwarder._bus = Mute()
    there.app.state.peers._remove(here.app.state.peers.worker)
    ended = (await following).events
    assert ended[-1]["type"] == "response.completed"
    numbers = [event["sequence_number"] for event in ended]
    assert numbers == list(range(len(numbers)))


class Mute:
    """A bus that loses everything."""

    async def publish(self, topic: str, body: bytes) -> None:
        """Nobody hears it."""


async def test_dashboard_of_either_shows_turns_and_sockets_of_both(pair: Pair) -> None:
    here, there = pair
    made = [(await post(one, input="x", max_output_tokens=1)).json["id"] for one in pair]
    async with wire(here), wire(there):
        heard: list[str] = []
        reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
        try:
            writer.write(b"GET /dashboard/feed HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            async with asyncio.timeout(WAIT_S):
                while len(heard) < 2:
                    line = await reader.readline()
                    if not line.startswith(b"data: "):
                        continue
                    message = json.loads(line.removeprefix(b"data: "))
                    heard += [turn["id"] for turn in message.get("turns", [])]
                    if message.get("picture"):
                        picture = message["picture"]
        finally:
            writer.close()
        assert sorted(heard) == sorted(made)
        assert picture["connections"]["count"] == 2
        assert picture["totals"]["turns"] == 2


async def speak(served: Served, name: str, **fields: Any) -> Answer:
    return await post(served, conversation=name, **fields)


async def said(served: Served, name: str) -> list[str]:
    path = f"/v1/conversations/{name}/items?order=asc&limit=100"
    listed = (await fetch(served, "GET", path)).json["data"]
    return [one["role"] for one in listed if one["type"] == "message"]


async def test_one_response_at_a_time_speaks_in_a_conversation_of_both(pair: Pair) -> None:
    here, there = pair
    name = (await fetch(here, "POST", "/v1/conversations", {})).json["id"]
    answers = await asyncio.gather(
        *(speak(one, name, input="x", max_output_tokens=40) for one in (here, there, here, there))
    )
    assert sorted(one.status for one in answers) == [200, 409, 409, 409]
    refused = {one.json["error"]["code"] for one in answers if one.status == 409}
    assert refused == {"conversation_locked"}
    assert await said(there, name) == ["user", "assistant"]


async def test_conversation_is_free_again_before_its_response_has_ended_on_the_wire(
    pair: Pair,
) -> None:
    here, there = pair
    name = (await fetch(here, "POST", "/v1/conversations", {})).json["id"]
    for turn in range(4):
        served = pair[turn % 2]
        assert (await speak(served, name, input="x", max_output_tokens=1)).status == 200
    assert await said(here, name) == ["user", "assistant"] * 4
    # Refused, failed and cancelled responses let go of it as well.
    assert (await speak(here, name, input="x", model="nobody's")).status == 404
    begun = await speak(here, name, input="x", background=True)
    assert (await speak(there, name, input="y")).status == 409
    ended = await fetch(there, "POST", f"/v1/responses/{begun.json['id']}/cancel")
    assert ended.json["status"] == "cancelled"
    async with wire(here) as socket:
        await socket.create(input="x", conversation=name)
        assert (await socket.next())["type"] == "response.created"
        assert (await speak(there, name, input="y")).status == 409
    await until(lambda: not here.app.runner.running_count)
    assert (await speak(there, name, input="z", max_output_tokens=1)).status == 200


async def test_items_added_beside_a_response_are_neither_lost_nor_in_the_middle_of_it(
    pair: Pair,
) -> None:
    here, there = pair
    name = (await fetch(here, "POST", "/v1/conversations", {})).json["id"]
    speaking = asyncio.create_task(speak(here, name, input="x", max_output_tokens=60))
    await until(lambda: here.app.runner.running_count)
    added = {"items": [{"type": "message", "role": "developer", "content": "beside"}]}
    path = f"/v1/conversations/{name}/items"
    assert (await fetch(there, "POST", path, added)).status == 200
    assert (await speaking).status == 200
    assert await said(there, name) == ["developer", "user", "assistant"]
    assert (await speak(there, name, input="y", max_output_tokens=1)).status == 200
    assert len(await said(here, name)) == 5
