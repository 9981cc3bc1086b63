"""Responses that nobody waits for: in the background, after a lost connection, repeated by their key."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.events import check_turn
from tests.scenarios.test_connections import narrow_socket
from tests.support import MODEL, Answer, Served, Wire, fetch, metric, serving, until, wire

LONG = "Once there was a river that went on and on, and nobody knew where. " * 12


@asynccontextmanager
async def scripted(tmp_path: Path, text: str = LONG, **flags: Any) -> AsyncIterator[Served]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"text": text}]}))
    async with serving(script=str(script), **flags) as served:
        yield served


async def post(served: Served, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    body = {"model": MODEL, "input": "Tell me.", **fields}
    return await fetch(served, "POST", "/v1/responses", body, headers)


async def follow(served: Served, turn_id: str, after: int = -1) -> list[dict[str, Any]]:
    path = f"/v1/responses/{turn_id}?stream=true&starting_after={after}"
    answer = await fetch(served, "GET", path)
    assert answer.status == 200, answer.body
    return answer.events


async def ended(served: Served, turn_id: str) -> dict[str, Any]:
    """The response once it has ended, heard to its end."""
    events = await follow(served, turn_id)
    found: dict[str, Any] = events[-1]["response"]
    return found


# --- background -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_client_comes_back_for_a_background_response(tmp_path: Path, store: str) -> None:
    where = "memory" if store == "memory" else f"sqlite:///{tmp_path}/s.db"
    async with scripted(tmp_path, store=where) as served:
        first = (await post(served, background=True)).json
        assert (first["status"], first["background"], first["output"]) == ("queued", True, [])
        events = await follow(served, first["id"])
        response = check_turn(events)
        assert [one["type"] for one in events[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        found = (await fetch(served, "GET", f"/v1/responses/{first['id']}")).json
        assert found == response
        for after in (0, 5, len(events) - 2, len(events) - 1):
            assert await follow(served, first["id"], after) == events[after + 1 :]


async def test_client_that_has_more_events_than_the_log_gets_a_terminal_event(
    tmp_path: Path,
) -> None:
    """As after a crash, when the log is behind what a client has had."""
    where = f"sqlite:///{tmp_path}/s.db"
    async with scripted(tmp_path, store=where) as served:
        first = (await post(served, background=True)).json
        events = await follow(served, first["id"])
    async with scripted(tmp_path, store=where) as served:
        after = len(events) + 7
        (last,) = await follow(served, first["id"], after)
        assert (last["type"], last["sequence_number"]) == ("response.completed", after + 1)
        assert last["response"] == events[-1]["response"]


async def test_background_response_is_streamed_and_survives_its_reader(tmp_path: Path) -> None:
    async with scripted(tmp_path, tps=300) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        body = json.dumps(
            {"model": MODEL, "input": "Tell me.", "background": True, "stream": True}
        ).encode()
        head = f"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        seen = await reader.readuntil(b"response.output_text.delta")
        turn_id = seen[seen.index(b'"id":"resp_') + 6 :].split(b'"')[0].decode()
        writer.transport.abort()
        assert check_turn(await follow(served, turn_id))["status"] == "completed"


async def test_client_cancels_a_background_response(tmp_path: Path) -> None:
    async with scripted(tmp_path, tps=20) as served:
        first = (await post(served, background=True)).json
        answer = await fetch(served, "POST", f"/v1/responses/{first['id']}/cancel")
        assert answer.status == 200
        assert answer.json["status"] == "cancelled"
        again = await fetch(served, "POST", f"/v1/responses/{first['id']}/cancel")
        assert again.json == answer.json
        assert (await fetch(served, "GET", f"/v1/responses/{first['id']}")).json == answer.json
        events = await follow(served, first["id"])
        assert events[-1]["type"] == "response.incomplete"


async def test_only_background_responses_are_cancelled_by_name(tmp_path: Path) -> None:
    async with scripted(tmp_path) as served:
        plain = (await post(served)).json
        refused = await fetch(served, "POST", f"/v1/responses/{plain['id']}/cancel")
        assert refused.status == 400
        missing = await fetch(served, "POST", "/v1/responses/resp_0/cancel")
        assert missing.status == 404
        refused = await fetch(served, "GET", f"/v1/responses/{plain['id']}?stream=true")
        assert refused.status == 400


async def test_background_belongs_to_http_and_to_stored_responses(tmp_path: Path) -> None:
    async with scripted(tmp_path) as served, wire(served) as socket:
        assert (await post(served, background=True, store=False)).status == 400
        refused = await socket.turn(input="x", background=True)
        assert refused["error"]["param"] == "background"


async def test_background_response_is_a_parent_once_it_has_ended(tmp_path: Path) -> None:
    async with scripted(tmp_path, tps=200) as served:
        first = (await post(served, background=True)).json
        early = await post(served, previous_response_id=first["id"])
        assert early.json["error"]["code"] == "previous_response_not_found"
        await ended(served, first["id"])
        assert (await post(served, previous_response_id=first["id"])).status == 200


# --- lost connections -----------------------------------------------------------------------------------


async def lose(served: Served, socket: Wire, pieces: int, **fields: Any) -> tuple[str, int]:
    """A turn whose connection is lost after so many events; its id and the last number heard."""
    await socket.create(input="Tell me.", **fields)
    event = await socket.next()
    turn_id: str = event["response"]["id"]
    for _ in range(pieces):
        event = await socket.next()
    socket.socket.transport.abort()
    return turn_id, event["sequence_number"]


async def test_stored_response_of_a_lost_socket_is_replayed_without_gap_or_repeat(
    tmp_path: Path,
) -> None:
    """Short version of the reliability run: 20 losses at random points."""
    chance = random.Random(7)
    async with scripted(tmp_path, LONG[:400], tps=2_000) as served:
        for _ in range(20):
            async with wire(served) as socket:
                turn_id, heard = await lose(served, socket, chance.randint(1, 40))
            events = await follow(served, turn_id, heard)
            assert [one["sequence_number"] for one in events] == list(
                range(heard + 1, heard + 1 + len(events))
            )
            response = events[-1]["response"]
            assert response["status"] == "completed"
            assert response == (await fetch(served, "GET", f"/v1/responses/{turn_id}")).json


async def test_unstored_response_of_a_lost_socket_stops_costing_the_engine(tmp_path: Path) -> None:
    async with scripted(tmp_path, LONG * 20, tps=200) as served:
        for _ in range(3):
            async with wire(served) as socket:
                await lose(served, socket, 5, store=False)
        name = 'segue_turns_total{outcome="cancelled",transport="websocket"}'
        async with asyncio.timeout(10):
            while await metric(served, name) < 3:
                pass
        assert served.app.runner.running_count == 0


@pytest.mark.parametrize("reconnect_s, code", [(0, "previous_response_not_found"), (60, None)])
async def test_unstored_chain_goes_on_after_a_drop_if_the_operator_allows_it(
    tmp_path: Path, reconnect_s: float, code: str | None
) -> None:
    async with scripted(tmp_path, "Yes.", reconnect_s=reconnect_s) as served:
        async with wire(served) as socket:
            first = await socket.turn(input="Hello.", store=False)
            socket.socket.transport.abort()
        async with wire(served) as again:
            async with asyncio.timeout(10):
                while await metric(served, "segue_connections") > 1:
                    pass
            last = await again.turn(
                previous_response_id=first["response"]["id"], input="And?", store=False
            )
            if code is None:
                assert last["type"] == "response.completed"
                assert last["response"]["usage"]["input_tokens"] > 20
            else:
                assert last["error"]["code"] == code


# --- repeats --------------------------------------------------------------------------------------------

KEY = {"Idempotency-Key": "once"}


@pytest.mark.parametrize("store", [True, False])
async def test_model_runs_once_for_one_key(tmp_path: Path, store: bool) -> None:
    async with scripted(tmp_path, tps=500) as served, wire(served) as socket:
        plain, streamed = await asyncio.gather(
            post(served, KEY, store=store), post(served, KEY, store=store, stream=True)
        )
        assert plain.json == streamed.events[-1]["response"]
        again = await post(served, KEY, store=store)
        assert again.json == plain.json
        told = await post(served, KEY, store=store, stream=True)
        assert told.events == streamed.events
        await socket.create(input="Tell me.", store=store, idempotency_key="once")
        assert check_turn(await socket.events()) == plain.json
        last = await socket.turn(previous_response_id=plain.json["id"], input="And?", store=store)
        assert last["type"] == "response.completed"
        assert await metric(served, 'segue_turns_total{outcome="completed",transport="http"}') <= 1
        other = await post(served, KEY, store=store, temperature=0.5)
        assert (other.status, other.json["error"]["code"]) == (409, "idempotency_key_reused")


async def test_key_of_a_stored_response_survives_a_restart(tmp_path: Path) -> None:
    where = f"sqlite:///{tmp_path}/s.db"
    async with scripted(tmp_path, store=where) as served:
        first = await post(served, KEY, stream=True)
    async with scripted(tmp_path, store=where) as served:
        assert (await post(served, KEY, stream=True)).events == first.events
        assert (await post(served, KEY)).json == first.events[-1]["response"]


async def test_refused_request_does_not_spend_its_key(tmp_path: Path) -> None:
    async with scripted(tmp_path) as served:
        refused = await post(served, KEY, previous_response_id="resp_0")
        assert refused.status == 400
        assert (await post(served, KEY)).status == 200


# --- references and counts ------------------------------------------------------------------------------


async def test_client_names_items_that_the_server_keeps(tmp_path: Path) -> None:
    async with scripted(tmp_path, "Yes.") as served:
        first = (await post(served)).json
        answer = first["output"][0]
        given = [{"role": "user", "content": "Tell me."}, answer, {"role": "user", "content": "?"}]
        in_full = (await post(served, input=given)).json
        given[1] = {"type": "item_reference", "id": answer["id"]}
        by_name = (await post(served, input=given)).json
        assert by_name["usage"]["input_tokens"] == in_full["usage"]["input_tokens"]
        given[1] = {"id": "msg_" + "0" * 36}
        lost = await post(served, input=given)
        assert (lost.status, lost.json["error"]["code"]) == (404, "item_not_found")


async def test_input_tokens_are_those_of_the_response(tmp_path: Path) -> None:
    async with scripted(tmp_path, "Yes.") as served:
        first = (await post(served, instructions="Be kind.")).json
        body = {"model": MODEL, "input": "Tell me.", "instructions": "Be kind."}
        counted = await fetch(served, "POST", "/v1/responses/input_tokens", body)
        assert counted.json == {
            "object": "response.input_tokens",
            "input_tokens": first["usage"]["input_tokens"],
        }


async def test_header_with_a_long_key_is_refused(tmp_path: Path) -> None:
    """Cut short, two keys would be one."""
    async with scripted(tmp_path) as served:
        refused = await post(served, {"idempotency-key": "k" * 256})
        assert (refused.status, refused.json["error"]["param"]) == (400, "Idempotency-Key")
        assert (await post(served, {"idempotency-key": "k" * 255})).status == 200


# --- followers that do not read ---------------------------------------------------------------------------


async def test_follower_that_reads_does_not_wait_for_those_that_do_not(tmp_path: Path) -> None:
    """They have what their buffers hold; later they get the rest all the same."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"text": "x", "pad_tokens": 40_000}]}))
    flags: dict[str, Any] = {"outbox_bytes_max": 32 * 1024, "write_s_max": 600}
    async with serving(script=str(script), store=f"sqlite:///{tmp_path}/s.db", **flags) as served:
        turn_id = (await post(served, background=True)).json["id"]
        idle = [await asyncio.open_connection(sock=narrow_socket(served.port)) for _ in range(3)]
        for _, writer in idle:
            path = f"/v1/responses/{turn_id}?stream=true&starting_after=-1"
            named = "Host: localhost\r\nConnection: close"
            writer.write(f"GET {path} HTTP/1.1\r\n{named}\r\n\r\n".encode())
            await writer.drain()
        await until(lambda: metric(served, "segue_unread_bytes"))
        events = await follow(served, turn_id)
        assert check_turn(events)["status"] == "completed"
        assert await metric(served, "segue_unread_bytes") < 3 * 1024 * 1024
        for reader, writer in idle:
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
            lines = dechunked(body).decode().splitlines()
            data = [line[6:] for line in lines if line.startswith("data: {")]
            assert [json.loads(one) for one in data] == events, head
            writer.close()


def dechunked(body: bytes) -> bytes:
    """A body without the frames of its chunks."""
    whole = bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        whole += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return bytes(whole)
