"""The tool runners of the official Anthropic clients, which use threads by themselves: whatever becomes of a thread in
mid-loop, they end as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.clients.outside import NODE, NODE_MODULES, PYTHON, SCRIPTS, weather
from tests.support import MODEL, WAIT_S, Served, serving

CITIES = [f"City {number}" for number in range(1, 5)]
END = "All are sunny."
SCRIPT = {"turns": [*({"calls": [weather(city)]} for city in CITIES), {"text": END}]}
# One that thinks, as clients return thoughts as signatures.
THINKING = {
    "turns": [
        *({"reasoning": f"Now {city}.", "calls": [weather(city)]} for city in CITIES),
        {"reasoning": "Done.", "text": END},
    ]
}
CLIENTS = [("python", "json"), ("python", "stream"), ("node", "json"), ("node", "stream")]

Act = Callable[[int], Awaitable[None]]


@asynccontextmanager
async def controlled(act: Act) -> AsyncIterator[str]:
    """A URL that the client's tool asks each time it runs; `act` is called with the number of the run."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await act(int(head.split()[1].strip(b"/")))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def loop(served: Served, client: tuple[str, str], act: Act) -> Any:
    """What the client says of its loop."""
    name, way = client
    program = [PYTHON, SCRIPTS / "anthropic_threads.py"]
    if name == "node":
        program = [NODE, SCRIPTS / "anthropic_threads.cjs"]
    async with controlled(act) as control, asyncio.timeout(2 * WAIT_S):
        process = await asyncio.create_subprocess_exec(
            *map(str, program),
            *(served.url, control, MODEL, way),
            env={**os.environ, "NODE_PATH": str(NODE_MODULES)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    found = json.loads(out)
    assert found["text"] == END
    assert found["cities"] == CITIES
    assert found["answers"] == len(CITIES) + 1
    return found


def kinds(found: Any) -> list[tuple[str | None, int, int]]:
    """Of each request: what it says of its thread, how many messages it has, and its status."""
    threads = (request["thread"] for request in found["sent"])
    types = [None if thread is None else thread["type"] for thread in threads]
    rest = [(request["messages"], request["status"]) for request in found["sent"]]
    return [(kind, *more) for kind, more in zip(types, rest, strict=True)]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(SCRIPT))
    return str(path)


async def nothing(_: int) -> None:
    """The loop goes on."""


@pytest.mark.parametrize("client", CLIENTS, ids="-".join)
async def test_each_turn_of_the_loop_sends_what_is_new(
    client: tuple[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(THINKING if "stream" in client else SCRIPT))
    async with serving(script=str(path)) as served:
        found = await loop(served, client, nothing)
    assert kinds(found) == [("create", 1, 200), *[("continue", 1, 200)] * len(CITIES)]
    assert [request["has_head"] for request in found["sent"]] == [True] + [False] * len(CITIES)


@pytest.mark.parametrize("client", CLIENTS, ids="-".join)
async def test_server_that_restarts_in_mid_loop_gets_everything_once_more(
    client: tuple[str, str], script: str
) -> None:
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        served = await first.enter_async_context(serving(script=script))

        async def act(run: int) -> None:
            if run == 2:
                await first.aclose()
                await second.enter_async_context(serving(script=script, port=served.port))

        found = await loop(served, client, act)
    assert kinds(found) == [
        ("create", 1, 200),
        ("continue", 1, 200),
        ("continue", 1, 404),
        ("create", 5, 200),
        ("continue", 1, 200),
        ("continue", 1, 200),
    ]


@pytest.mark.parametrize("client", CLIENTS[:1] + CLIENTS[3:], ids="-".join)
async def test_thread_that_was_dropped_is_replayed(client: tuple[str, str], script: str) -> None:
    async with serving(script=script) as served:

        async def act(run: int) -> None:
            if run == 3:
                served.app.state.budget.shrink(1 << 30)

        found = await loop(served, client, act)
    assert [kind for kind, *_ in kinds(found)] == [
        *("create", "continue", "continue", "continue"),
        *("create", "continue"),
    ]


@pytest.mark.parametrize("client", CLIENTS[1:3], ids="-".join)
async def test_client_goes_on_without_threads_where_they_are_off(
    client: tuple[str, str], script: str
) -> None:
    async with serving(script=script, threads=False) as served:
        found = await loop(served, client, nothing)
    assert kinds(found) == [
        ("create", 1, 400),
        *((None, 1 + 2 * number, 200) for number in range(len(CITIES) + 1)),
    ]
