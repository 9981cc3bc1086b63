"""Two servers behind a real nginx, with the settings that we ship: silence, streams, large bodies, and a drain."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from tests.haproxy import Balanced
from tests.nginx import nginx
from tests.postgres import PostgresServer
from tests.support import MODEL, Served, ServedProcess, fetch, served_process, wire

pytestmark = [pytest.mark.timeout(200), pytest.mark.reliability]


@pytest.fixture
async def store(postgres: PostgresServer) -> AsyncIterator[str]:
    url = await postgres.make_database()
    yield url
    await postgres.drop_database(url)


def as_served(balanced: Balanced) -> Served:
    """What our small clients need to know of a server is its port."""
    return cast("Served", balanced)


def serve(stack: ExitStack, folder: Path, store: str) -> ServedProcess:
    script = folder / "script.json"
    script.write_text(json.dumps({"turns": [{"text": "x", "pad_tokens": 500}]}))
    words = ["--store", store, "--script", str(script), "--tps", "100", "--grace-s", "30"]
    return stack.enter_context(served_process(*words, cwd=folder))


async def test_sockets_and_streams_pass_nginx_as_they_are(tmp_path: Path, store: str) -> None:
    with ExitStack() as stack:
        here, there = serve(stack, tmp_path, store), serve(stack, tmp_path, store)
        balanced = as_served(stack.enter_context(nginx(tmp_path, [here.port, there.port])))

        async with wire(balanced) as one, wire(balanced) as other:
            first = await one.turn(input="x", max_output_tokens=2)
            # Longer than nginx waits for anything but an answer.
            await asyncio.sleep(4)
            for socket in (one, other):
                parent = first["response"]["id"]
                went_on = await socket.turn(
                    input="y", previous_response_id=parent, max_output_tokens=2
                )
                assert went_on["type"] == "response.incomplete"

        # A stream arrives event by event: the first while the model still talks, for five seconds.
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection("127.0.0.1", balanced.port)
        body = json.dumps({"model": MODEL, "input": "x", "stream": True}).encode()
        head = (
            f"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        times: dict[bytes, float] = {}
        async with asyncio.timeout(30):
            while b"event: response.completed\n" not in times:
                line = await reader.readline()
                if line.startswith(b"event: "):
                    times.setdefault(line, loop.time())
        writer.close()
        assert times[b"event: response.completed\n"] - times[b"event: response.created\n"] > 3

        large: dict[str, Any] = {"model": MODEL, "input": "x " * 10_000_000, "max_output_tokens": 1}
        answer = await fetch(balanced, "POST", "/v1/responses/input_tokens", large)
        assert answer.status in (200, 400), answer.body[:200]
        assert b"nginx" not in answer.body
        assert (await fetch(balanced, "GET", "/metrics")).status == 200


async def test_upgrades_go_elsewhere_while_a_server_drains(tmp_path: Path, store: str) -> None:
    with ExitStack() as stack:
        here, there = serve(stack, tmp_path, store), serve(stack, tmp_path, store)
        balanced = as_served(stack.enter_context(nginx(tmp_path, [here.port, there.port])))
        async with wire(here) as busy:
            await busy.create(input="x")
            await busy.next()
            here.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                while (await fetch(here, "GET", "/ready")).status != 503:
                    pass
            for _ in range(6):
                async with wire(balanced) as socket:
                    end = await socket.turn(input="x", max_output_tokens=1)
                    assert end["type"] == "response.incomplete"
            assert (await busy.events())[-1]["type"] == "response.completed"
