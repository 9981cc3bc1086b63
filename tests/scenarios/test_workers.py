"""`--workers N`: one command, several processes, one port. They are seen, stopped and counted as one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import websockets

from tests.support import (
    MODEL,
    WAIT_S,
    ServedProcess,
    Wire,
    fetch,
    metric,
    served_process,
    until,
    wire,
)

pytestmark = pytest.mark.timeout(100)


def flags(folder: Path, *more: str, pad_tokens: int = 5, tps: int = 0) -> list[str]:
    script = folder / "script.json"
    script.write_text(json.dumps({"turns": [{"text": "x", "pad_tokens": pad_tokens}]}))
    store = f"sqlite:///{folder / 'turns.db'}"
    words = ["--workers", "2", "--store", store, "--script", str(script), "--tps", str(tps)]
    return [*words, *more]


def children(served: ServedProcess) -> list[int]:
    """The processes that this one has started."""
    path = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children")
    return [int(word) for word in path.read_text().split()]


def sockets_of(process: int) -> int:
    """How many sockets it has open."""
    count = 0
    for link in Path(f"/proc/{process}/fd").iterdir():
        # It may be closed meanwhile.
        with suppress(FileNotFoundError):
            count += os.readlink(link).startswith("socket:")
    return count


def is_there(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


async def post(served: ServedProcess, **fields: Any) -> dict[str, Any]:
    answer = await fetch(served, "POST", "/v1/responses", {"model": MODEL, **fields})
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


async def test_chain_cancel_and_follow_cross_workers_and_counters_are_one(tmp_path: Path) -> None:
    settings = flags(tmp_path, pad_tokens=100, tps=100)
    with served_process(*settings, cwd=tmp_path) as served:
        assert len(children(served)) == 2
        assert "".join(served.printed).count("Segue ") == 1
        # Every request is a connection of its own, and the kernel spreads them: after a dozen both have had some.
        last = None
        for _ in range(6):
            answer = await post(served, input="x", previous_response_id=last, max_output_tokens=1)
            last = answer["id"]
        begun = [await post(served, input="x", background=True) for _ in range(6)]
        followed, *cancelled = begun
        following = asyncio.create_task(
            fetch(served, "GET", f"/v1/responses/{followed['id']}?stream=true")
        )
        for one in cancelled:
            ended = await fetch(served, "POST", f"/v1/responses/{one['id']}/cancel")
            assert ended.json["status"] == "cancelled"
        assert (await following).events[-1]["type"] == "response.completed"
        assert await metric(served, "segue_workers") == 2
        name = 'segue_turns_total{outcome="%s",transport="http"}'
        assert await metric(served, name % "incomplete") == 6
        assert await metric(served, name % "cancelled") == 5
        before = list(map(sockets_of, children(served)))
        opened = [await open_socket(served) for _ in range(40)]
        held = [
            now - then for now, then in zip(map(sockets_of, children(served)), before, strict=True)
        ]
        assert sum(held) >= 35
        assert min(held) >= 5, "the kernel spreads connections"
        await asyncio.gather(*(one.socket.close() for one in opened))
        assert served.stop() == 0
    assert "Traceback" not in "".join(served.printed)


async def test_worker_that_dies_or_hangs_is_replaced(tmp_path: Path) -> None:
    """What was stored is there all the time. A worker hangs when its event loop stands still, as if it were stopped."""
    with served_process(*flags(tmp_path, "--hang-s", "2"), cwd=tmp_path) as served:
        done = await post(served, input="remember")
        for victim in children(served):
            os.kill(victim, signal.SIGKILL)
        # What arrives meanwhile waits for the next one.
        found = await fetch(served, "GET", f"/v1/responses/{done['id']}")
        assert found.json == done
        async with asyncio.timeout(WAIT_S):
            while await metric(served, "segue_workers") != 2:
                pass
        victim = children(served)[0]
        os.kill(victim, signal.SIGSTOP)
        await until(lambda: victim not in children(served) and len(children(served)) == 2)
        async with asyncio.timeout(WAIT_S):
            while await metric(served, "segue_workers_replaced_total") < 1:
                pass
        assert await metric(served, "segue_loop_lag_seconds_count") > 0
        assert (await fetch(served, "GET", f"/v1/responses/{done['id']}")).json == done
        assert served.stop() == 0
    printed = "".join(served.printed)
    assert re.search(
        r"worker \d hangs: its event loop has been blocked for .* replacing it", printed
    )


async def test_stop_is_clean_while_a_worker_starts_again(tmp_path: Path) -> None:
    """It has nothing to finish yet. Else a unit of systemd counts as failed whenever it is stopped in that second."""
    with served_process(*flags(tmp_path), cwd=tmp_path) as served:
        victim = children(served)[0]
        os.kill(victim, signal.SIGKILL)
        await until(lambda: victim not in children(served) and len(children(served)) == 2)
        assert served.stop() == 0


async def test_stop_truncates_none_of_two_hundred_responses(tmp_path: Path) -> None:
    """Half over sockets, half as streams; some are new to the stop, all are whole after it."""
    settings = flags(tmp_path, "--grace-s", "30", pad_tokens=120, tps=60)
    with served_process(*settings, cwd=tmp_path) as served:
        sockets = [await open_socket(served) for _ in range(20)]
        for socket in sockets:
            for lane in range(5):
                await socket.create(input="x", stream_id=str(lane), store=lane % 2 == 0)
        body = {"model": MODEL, "input": "x", "stream": True}
        streams = [
            asyncio.create_task(fetch(served, "POST", "/v1/responses", body)) for _ in range(100)
        ]
        async with asyncio.timeout(WAIT_S):
            # Each has begun.
            waiting = [begun(socket, 5) for socket in sockets]
            events = await asyncio.gather(*waiting)
        served.process.send_signal(signal.SIGTERM)
        ends = await asyncio.gather(*map(rest, sockets, events))
        assert [sorted(one) for one in ends] == [["response.completed"] * 5] * 20
        for answer in await asyncio.gather(*streams):
            if answer.status == 200:
                assert answer.events[-1]["type"] == "response.completed"
            else:
                # It came after the signal.
                assert answer.status == 503
        codes = [socket.socket.close_code for socket in sockets]
        assert codes == [1012] * 20
        assert await asyncio.to_thread(served.process.wait, WAIT_S) == 0
    # And they come back.
    with served_process(*flags(tmp_path), cwd=tmp_path) as served:
        async with wire(served) as socket:
            assert (await socket.turn(input="again"))["type"] == "response.completed"


async def open_socket(served: ServedProcess) -> Wire:
    return Wire(
        await websockets.asyncio.client.connect(served.ws_url, max_size=None, compression=None)
    )


async def begun(socket: Wire, count: int) -> list[str]:
    """Read until so many turns have begun; how any of them have ended by then."""
    ended = []
    while count:
        event = await socket.next()
        count -= event["type"] == "response.created"
        if event["type"] in ("response.completed", "response.failed", "error"):
            ended.append(event["type"])
    return ended


async def rest(socket: Wire, ended: list[str]) -> list[str]:
    """Read until the server closes; how all turns have ended."""
    try:
        while True:
            event = await socket.next()
            if event["type"] in ("response.completed", "response.failed", "error"):
                ended.append(event["type"])
    except websockets.ConnectionClosed:
        return ended


async def test_second_signal_hurries_all(tmp_path: Path) -> None:
    settings = flags(tmp_path, "--grace-s", "60", pad_tokens=9_000, tps=100)
    with served_process(*settings, cwd=tmp_path) as served:
        async with wire(served) as one, wire(served) as other:
            for socket in (one, other):
                await socket.create(input="x")
                await socket.next()
            served.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                while (await fetch(served, "GET", "/ready")).status != 503:
                    pass
            served.process.send_signal(signal.SIGINT)
            asked_at = time.monotonic()
            for socket in (one, other):
                assert (await socket.events())[-1]["type"] == "response.failed"
        assert await asyncio.to_thread(served.process.wait, WAIT_S) == 0
        assert time.monotonic() - asked_at < 10


async def test_workers_stop_when_their_parent_is_killed(tmp_path: Path) -> None:
    with served_process(*flags(tmp_path), cwd=tmp_path) as served:
        workers = children(served)
        served.process.kill()
        served.process.wait(WAIT_S)
        await until(lambda: not any(map(is_there, workers)))


def test_memory_store_and_taken_port_are_refused_in_words(tmp_path: Path) -> None:
    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "segue_cli.cli", "serve", "--engine", "scripted", *words],
            cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr

    status, said = run("--workers", "2", "--store", "memory", "--port", "0")
    assert status == 2
    assert "workers" in said
    assert "memory" in said
    with served_process(*flags(tmp_path), cwd=tmp_path) as served:
        status, said = run("--workers", "2", "--port", str(served.port))
        assert status == 2
        assert re.search(r"port: port .* is in use", said)
    # What only a worker notices is said once, and is the status of all.
    status, said = run("--workers", "2", "--port", "0", "--script", "absent.json")
    assert status == 2
    assert said.count("segue:") == 1


async def test_workers_share_one_model_inside(tmp_path: Path) -> None:
    """Two workers and one engine: it is loaded once, and a conversation keeps its place in it from either worker."""
    words = ["--engine", "embedded", "--context-tokens", "512", "--engine-parallel", "1"]
    store = ["--workers", "2", "--store", f"sqlite:///{tmp_path / 'turns.db'}"]
    with served_process(*words, *store, cwd=tmp_path) as served:
        assert len(children(served)) == 3
        assert (await fetch(served, "GET", "/ready")).status == 200
        last, cached = None, []
        for _ in range(4):
            answer = await fetch(
                served,
                "POST",
                "/v1/responses",
                {
                    "model": "smollm2",
                    "input": "Hi",
                    "max_output_tokens": 4,
                    "previous_response_id": last,
                },
            )
            assert answer.status == 200, answer.body
            last = answer.json["id"]
            cached.append(answer.json["usage"]["input_tokens_details"]["cached_tokens"])
        assert cached == sorted(cached)
        assert cached[-1] > cached[1] > 0
        engine = next(one for one in children(served) if is_engine(one))
        os.kill(engine, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            while (
                len([one for one in children(served) if is_engine(one)]) != 1
                or (await fetch(served, "GET", "/ready")).status != 200
            ):
                pass
        assert served.stop() == 0


def is_engine(process: int) -> bool:
    """Whether this process has the model's file in memory; one that has ended meanwhile has nothing."""
    try:
        return "xllamacpp" in Path(f"/proc/{process}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
