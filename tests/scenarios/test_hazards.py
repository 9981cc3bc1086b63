"""What broke at other servers, and what attackers try (docs/inside/hazards.md), where no other test has it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import socket as net
from pathlib import Path
from typing import Any

import pytest
import websockets

from segue.accounts.hashes import issue_key
from segue.ids import new_id
from segue.limits import KeyLimits
from segue.listener.edge_limits import EdgeLimits
from segue.listener.protocol import HttpProtocol
from segue.listener.socket import Socket
from segue.responses import websocket
from segue.responses.websocket import SocketSession
from segue.settings.checks import load_settings
from segue.turn.plan import Plan
from segue.turn.running import Running
from segue.wire import codec
from tests.engines.fakes.chat import FakeChat
from tests.support import MODEL, TERMINAL, WAIT_S, Served, Wire, fetch, serving, until, wire

ASK: dict[str, Any] = {"model": MODEL, "input": "x", "store": False}


def write_script(folder: Path, **turn: Any) -> str:
    path = folder / "script.json"
    path.write_text(json.dumps({"turns": [turn]}))
    return str(path)


async def new_secret(served: Served, owner: str, **limits: int) -> str:
    app = served.app
    return (
        await issue_key(
            app.state.store.keys, app.state.hashes, "test", owner, limits=KeyLimits(**limits)
        )
    )[1]


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


# Silence and liveness.


def test_limits_are_those_that_the_field_has_taught() -> None:
    """docs/inside/hazards.md F1, F3, F7, F11, T9: pings in time for proxies, a busy peer has time, large frames."""
    usual, limits = load_settings({"engine": "scripted"}, environment={}), EdgeLimits()
    assert usual.heartbeat_s <= 15
    assert limits.ping_s <= 20
    assert limits.pong_s_max >= 60
    assert usual.body_bytes_max >= 32 * 1024 * 1024
    assert usual.handshake_s_max <= 10
    assert usual.write_s_max <= 30
    assert usual.outbox_bytes_max <= 1024 * 1024
    assert usual.host == "127.0.0.1"


@pytest.mark.skipif(not hasattr(net, "TCP_USER_TIMEOUT"), reason="only Linux has all of these")
async def test_line_of_a_dead_peer_is_given_up_by_the_system_too() -> None:
    """docs/inside/hazards.md F5: bytes that are not acknowledged, and keep-alives that are not answered. (Pulling a
    cable needs root, so this looks at the options of the socket.)"""
    async with serving() as served, wire(served):
        (session,) = served.app.upgrades.sessions
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"ok")
        (plain,) = https()
        for transport in (session.socket._transport, plain.transport):
            line = transport.get_extra_info("socket")
            assert 0 < line.getsockopt(net.IPPROTO_TCP, net.TCP_USER_TIMEOUT) <= 60_000
        # A socket is pinged; a plain request may wait for minutes without a word from either side.
        assert line.getsockopt(net.SOL_SOCKET, net.SO_KEEPALIVE)
        assert line.getsockopt(net.IPPROTO_TCP, net.TCP_KEEPIDLE) <= 20
        writer.close()


def https() -> list[HttpProtocol]:
    """The HTTP connections of this process that have been asked something."""
    found = [one for one in gc.get_objects() if issubclass(type(one), HttpProtocol)]
    return [one for one in found if one.cycle is not None and not one.transport.is_closing()]


async def test_every_frame_is_answered_within_a_second_while_a_response_runs(
    tmp_path: Path,
) -> None:
    """docs/inside/hazards.md F6: odd, unknown, and creates with words of the future. (One in a busy lane waits.)"""
    frames = [
        "",
        "null",
        "[]",
        "{}",
        "{",
        '"response.create"',
        '{"type": 7}',
        '{"type": "response.cancel"}',
        '{"type": "session.update", "session": {}}',
        '{"type": "response.create", "stream_id": "c"}',
        '{"type": "response.append", "response_id": "resp_1", "input": []}',
        '{"type": "response.append"}',
        '{"type": "response.steer", "previous_response_id": "resp_1", "input": "x"}',
        '{"type": "response.steer"}',
        '{"type": "response.create", "stream_id": ["x"]}',
        json.dumps({"type": "response.create", **ASK, "stream_id": "a", "mode": {"of": "2031"}}),
        json.dumps({"type": "response.create", **ASK, "stream_id": "b", "stream": False}),
    ]
    answers = ("error", "response.steer.failed", "response.created")
    script = write_script(tmp_path, text="x", pad_tokens=100_000)
    async with serving(script=script, tps=1) as served, wire(served) as socket:
        await socket.create(input="x", store=False)
        assert (await socket.next())["type"] == "response.created"
        assert (await socket.next())["type"] == "response.in_progress"
        for frame in frames:
            await socket.send(frame)
            asked_at = asyncio.get_running_loop().time()
            while (await socket.next())["type"] not in answers:
                pass
            # A second is what a client may expect, of a machine that does nothing else.
            assert asyncio.get_running_loop().time() - asked_at < 5, frame


async def test_mistake_of_ours_in_reading_a_frame_is_told_and_the_socket_lives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """docs/inside/hazards.md F6, F17: our own fault is said to be ours; nothing else on the connection suffers."""

    def stumble(*_: object) -> None:
        raise RuntimeError("a mistake")

    async with serving() as served, wire(served) as socket:
        with monkeypatch.context() as broken:
            broken.setattr(codec, "decode_traceparent", stumble)
            event = await socket.turn(input="x", store=False, client_metadata={})
        assert (event["status"], event["error"]["code"]) == (500, "server_error")
        assert "mistake" not in event["error"]["message"]
        assert (await socket.turn(input="x", store=False))["type"] == "response.completed"
    assert "RuntimeError: a mistake" in caplog.text


# Closing and limits.


async def test_connections_of_one_hour_do_not_all_end_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """docs/inside/hazards.md F10: each lives a little shorter than the limit, by chance."""
    assert 0.01 <= websocket.AGE_JITTER <= 0.05
    monkeypatch.setattr(websocket, "AGE_JITTER", 0.9)
    age_s, loop = 3.0, asyncio.get_running_loop()
    async with serving(connection_age_s=age_s) as served:
        began = loop.time()
        sockets = [await websockets.connect(served.ws_url) for _ in range(20)]
        # With chances between a tenth and the whole, the first of twenty ends long before the limit.
        closings = [asyncio.create_task(one.wait_closed()) for one in sockets]
        await asyncio.wait(closings, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
        assert loop.time() - began < age_s / 2
        assert not all(one.done() for one in closings)
        for one in sockets:
            one.transport.abort()
        await asyncio.gather(*closings)


async def test_faults_of_caller_engine_and_server_have_three_statuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """docs/inside/hazards.md F17: whoever watches a fleet must see whose fault it was."""

    async def stumble(*_: object, **__: object) -> None:
        raise RuntimeError("a mistake")

    async with FakeChat() as engine:
        flags = {"engine": "chat", "engine_url": [engine.url], "model": ["m"]}
        async with serving(**flags) as served:
            asked = {**ASK, "model": "m"}
            wrong = await fetch(served, "POST", "/v1/responses", {**asked, "temperature": 9})
            engine.status = 500
            broken = await fetch(served, "POST", "/v1/responses", asked)
            with monkeypatch.context() as patched:
                patched.setattr(served.app.runner, "_prepare", stumble)
                ours = await fetch(served, "POST", "/v1/responses", asked)
        assert [one.status for one in (wrong, broken, ours)] == [400, 502, 500]
    async with serving(**flags) as served:
        away = await fetch(served, "POST", "/v1/responses", asked)
        assert (away.status, "retry-after" in away.headers) == (503, True)


async def test_next_create_may_follow_a_terminal_event_at_once() -> None:
    """docs/inside/hazards.md F22: nothing that a turn held is still held when its client hears of its end."""
    async with serving(auth="keys") as served:
        secret = await new_secret(served, "ada", lanes_max=1)
        headers = bearer(secret)
        talk = (await fetch(served, "POST", "/v1/conversations", {}, headers)).json["id"]
        async with (
            wire(served, additional_headers=headers) as one,
            wire(served, additional_headers=headers) as other,
        ):
            for socket in (one, other) * 10:
                event = await socket.turn(input="x", conversation=talk)
                assert event["type"] == "response.completed", event


# State.


def hang_up(socket: Wire, *, is_said: bool) -> None:
    """Leave at once, with a close frame or without; the library would first wait for what it has not read."""
    if is_said:
        socket.socket.transport.write(b"\x88\x80\0\0\0\0")
        socket.socket.transport.close()
    else:
        socket.socket.transport.abort()


async def leave_early(served: Served, body: dict[str, Any], headers: dict[str, str]) -> str:
    """Ask over SSE and hang up in the middle; what was heard until then."""
    data = json.dumps({**body, "stream": True})
    lines = ["POST /v1/responses HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write("\r\n".join([*lines, "", data]).encode())
    heard = await reader.readuntil(b"response.output_text.delta")
    writer.transport.abort()
    return heard.decode()


async def test_storm_of_leaving_clients_mixes_no_owners(tmp_path: Path) -> None:
    """docs/inside/hazards.md F35, T13: whatever is cancelled wherever, nobody reads a word of another."""
    rng = random.Random(35)
    owners = [f"owner{number}" for number in range(6)]
    heard: dict[str, list[str]] = {owner: [] for owner in owners}

    async def speak(owner: str, socket: Wire, parent: str | None) -> str | None:
        """One turn; sometimes its client is gone before it is over."""
        await socket.create(input=f"canary-{owner}", previous_response_id=parent)
        patience = rng.randrange(30)
        while True:
            text = await socket.socket.recv()
            heard[owner].append(str(text))
            event = json.loads(text)
            if event["type"] in TERMINAL:
                assert event["type"] == "response.completed", event
                return str(event["response"]["id"])
            patience -= 1
            if not patience:
                return None

    async def chain(served: Served, owner: str, secret: str) -> None:
        parent = None
        for _ in range(12):
            async with wire(served, additional_headers=bearer(secret)) as socket:
                while (made := await speak(owner, socket, parent)) and rng.random() < 0.7:
                    parent = made
                hang_up(socket, is_said=rng.random() < 0.5)

    async def ask(served: Served, owner: str, secret: str) -> None:
        asked = {"model": MODEL, "input": f"canary-{owner}"}
        for _ in range(12):
            heard[owner].append(await leave_early(served, asked, bearer(secret)))
            answer = await fetch(served, "POST", "/v1/responses", asked, bearer(secret))
            heard[owner].append(answer.body.decode())

    async with serving(auth="keys", tps=2_000, store=f"sqlite:///{tmp_path}/s.db") as served:
        keys = {owner: await new_secret(served, owner) for owner in owners}
        tasks = [do(served, *one) for one in keys.items() for do in (chain, ask)]
        await asyncio.gather(*tasks)
    for owner in owners:
        words = set(re.findall(r"canary-\w+", "".join(heard[owner])))
        assert words == {f"canary-{owner}"}


async def test_all_is_as_before_once_everybody_has_left(tmp_path: Path) -> None:
    """docs/inside/hazards.md F40: connections that come and go leave neither tasks nor files nor memory."""
    script = write_script(tmp_path, reasoning="hm", text="x", pad_tokens=30)

    async def come_and_go(served: Served, number: int) -> None:
        async with wire(served) as socket:
            await socket.create(input="x", store=number % 2 == 0)
            if number % 3 == 0:
                await socket.events()
            else:
                await socket.next()
            if number % 5 == 0:
                await socket.send(b"no")
            hang_up(socket, is_said=number % 4 == 0)
        if number % 4 == 1:
            await leave_early(served, ASK, {})

    def counts() -> tuple[int, int, int]:
        gc.collect()
        kept = sum(issubclass(type(one), SocketSession | Socket | Plan) for one in gc.get_objects())
        return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")), kept

    def alive() -> int:
        return sum(type(one) is Running for one in gc.get_objects())

    async with serving(script=script, tps=1_000, reconnect_s=0) as served:
        await come_and_go(served, 0)
        await until(lambda: not served.app.upgrades.sessions)
        before, alive_before = counts(), alive()
        for _ in range(3):
            await asyncio.gather(*(come_and_go(served, number) for number in range(20)))
        runner = served.app.runner
        await until(lambda: not runner.running_count and not served.app.upgrades.sessions)
        await until(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)))
        # Stored turns whose line was lost may be asked for once more, within their own limit.
        assert alive() <= alive_before + len(runner.registry._ended)


# Keys.


def test_ids_cannot_be_guessed() -> None:
    """docs/inside/hazards.md T1: at least 128 bits of chance."""
    ids = {new_id("resp") for _ in range(1_000)}
    assert len(ids) == 1_000
    digits = [one.removeprefix("resp_") for one in ids]
    assert {len(one) for one in digits} == {32}
    # Every digit takes every value: none of it is a clock or a counter.
    for place in zip(*digits, strict=True):
        assert set(place) == set("0123456789abcdef")


PATHS = [
    "//v1/models",
    "/v1//models",
    "/v1/./models",
    "/health/../v1/models",
    "/health/%2e%2e/v1/models",
    "/health%2f..%2fv1%2fmodels",
    "/%76%31/models",
    "/v1/models/",
    "/v1/models;/health",
    "/v1/models%00/health",
    "/v1/models?/health",
    "/v1/models#/health",
    "/V1/models",
    "/v1/models%20",
    "/openapi.json/../v1/models",
    "/dashboard/app.js/../../v1/models",
    "http://localhost/v1/models",
    "http://localhost/health/../v1/models",
    "http://localhost\\@evil/v1/models",
]
HOSTS = ["localhost", "localhost/health?", "localhost/health#", "health", "localhost:80/health"]


async def test_no_spelling_of_a_path_or_host_leads_around_the_key() -> None:
    """docs/inside/hazards.md T3: what is decided on is what is routed on, and nothing else."""
    async with serving(auth="keys") as served:
        asked = [(path, {"Host": "localhost"}) for path in PATHS]
        asked += [("/v1/models", {"Host": host}) for host in HOSTS]
        remote = {"X-Original-URL": "/health", "X-Forwarded-Prefix": "/health"}
        asked += [(path, {**remote, "X-Forwarded-Host": "localhost"}) for path in PATHS]
        for path, headers in asked:
            answer = await fetch(served, "GET", path, headers=headers)
            assert answer.status in (400, 401, 403, 404), (path, headers, answer.body)
            assert MODEL.encode() not in answer.body, (path, headers)


async def test_key_is_read_from_its_header_alone() -> None:
    """docs/inside/hazards.md T4, T5: a browser sends cookies by itself, and addresses are written down everywhere."""
    async with serving(auth="keys") as served:
        secret = await new_secret(served, "ada")
        places = [
            {"Cookie": f"api_key={secret}; Authorization=Bearer {secret}"},
            {"X-Api-Key": secret},
            {"Proxy-Authorization": f"Bearer {secret}"},
            {"Referer": f"http://localhost/?key={secret}"},
        ]
        for headers in places:
            path = f"/v1/responses?api_key={secret}"
            asked = {**ASK, "api_key": secret}
            assert (await fetch(served, "POST", path, asked, headers)).status == 401
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with websockets.connect(
                    f"{served.ws_url}?api_key={secret}", additional_headers=headers
                ):
                    pass
            assert refused.value.response.status_code == 401
