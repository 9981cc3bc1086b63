"""What many tests need: a real server on a free loopback port, and small clients that speak to it.

`serving` runs the whole product in this process, on this event loop. `served_process` runs the `segue` command itself.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import websockets.asyncio.client

from segue.listener.api import Api
from segue.server.apis import APIS
from segue.server.app import ALONE, App, WorkerPlace, open_app
from segue.server.serve import build_server
from segue.settings.checks import load_settings
from tests import last_turn, shapes

TERMINAL = {"response.completed", "response.failed", "response.incomplete", "error"}
MODEL = "scripted"
WAIT_S = 30
# Of a process: a machine that does ten other things is ten times as slow.
START_S = 60

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@dataclass(frozen=True)
class Served:
    """A server that runs in this event loop."""

    url: str
    app: App

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def ws_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/v1/responses"


@asynccontextmanager
async def serving(
    place: WorkerPlace = ALONE, rows: Mapping[str, Api] = APIS, **flags: object
) -> AsyncIterator[Served]:
    """The whole product with these settings; the store is in memory unless one is named."""
    settings = load_settings(
        {"engine": "scripted", "store": "memory", "port": 0, "grace_s": 0} | flags, environment={}
    )
    async with open_app(settings, place, rows=rows) as app:
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = build_server(app, settings, listening.set_result)
        task = asyncio.create_task(server.serve())
        try:
            async with asyncio.timeout(WAIT_S):
                url = await listening
            yield Served(url, app)
        finally:
            await app.drain(settings.grace_s)
            server.should_exit = True
            await task


class Wire:
    """One WebSocket, spoken by hand."""

    def __init__(self, socket: websockets.asyncio.client.ClientConnection) -> None:
        self.socket = socket

    async def send(self, event: Mapping[str, Any] | str | bytes) -> None:
        """A frame as given; a mapping as JSON."""
        await self.socket.send(event if isinstance(event, str | bytes) else json.dumps(event))

    async def create(self, **fields: Any) -> None:
        """A `response.create`; the model is the scripted one unless named."""
        await self.send({"type": "response.create", "model": MODEL, **fields})

    async def next(self) -> dict[str, Any]:
        """The next event."""
        async with asyncio.timeout(WAIT_S):
            frame = await self.socket.recv()
        last_turn.note(frame)
        return json.loads(frame)

    async def events(self, lane: str | None = None) -> list[dict[str, Any]]:
        """The events up to a terminal one; only those of this lane, if one is named."""
        found: list[dict[str, Any]] = []
        while not found or found[-1]["type"] not in TERMINAL:
            event = await self.next()
            if lane is None or event.get("stream_id") == lane:
                found.append(event)
        return found

    async def turn(self, **fields: Any) -> dict[str, Any]:
        """One whole turn; its terminal event."""
        await self.create(**fields)
        return (await self.events(fields.get("stream_id")))[-1]


@asynccontextmanager
async def wire(served: Served | ServedProcess, **options: Any) -> AsyncIterator[Wire]:
    """An open WebSocket to a server."""
    async with websockets.asyncio.client.connect(
        served.ws_url, max_size=None, compression=None, **options
    ) as socket:
        yield Wire(socket)


@dataclass(frozen=True)
class Answer:
    """What came back from a plain HTTP request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of an SSE body; checks its framing on the way."""
        chunks = self.body.decode().split("\n\n")
        assert chunks[-2:] == ["data: [DONE]", ""], chunks[-2:]
        found = []
        for chunk in chunks[:-2]:
            name, data = chunk.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            found.append(event)
        return found


async def fetch(
    served: Served | ServedProcess,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """One HTTP request on a connection of its own; a body that is not bytes is sent as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {"Host": f"127.0.0.1:{served.port}", "Connection": "close", **(headers or {})}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    lines += [f"Content-Length: {len(data)}", "", ""]
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        try:
            writer.write("\r\n".join(lines).encode() + data)
            raw = await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()
    answer = _parse(raw)
    last_turn.note_body(answer.status, answer.headers, answer.body)
    shapes.note(path, named, answer.status, answer.headers, answer.body)
    return answer


def _parse(raw: bytes) -> Answer:
    head, _, rest = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body += rest[: int(size, 16)]
            rest = rest[int(size, 16) + 2 :]
    else:
        body = rest
    return Answer(int(status.split()[1]), headers, body)


async def metric(served: Served | ServedProcess, name: str) -> float:
    """The value of a counter at /metrics, with its labels as they are written there; 0 if absent."""
    page = (await fetch(served, "GET", "/metrics")).body.decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


@dataclass(frozen=True)
class ServedProcess:
    """A `segue serve` of its own, with what it has printed."""

    url: str
    process: subprocess.Popen[str]
    printed: list[str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def ws_url(self) -> str:
        return self.url.replace("http", "ws", 1) + "/v1/responses"

    def stop(self) -> int:
        """Ask it to stop and wait; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


def loaded_modules(served: ServedProcess) -> set[str]:
    """The modules that a stopped server has imported, and the packages that they are in; it must have run with
    PYTHONPROFILEIMPORTTIME=1."""
    lines = [line.split("|") for line in "".join(served.printed).splitlines()]
    names = {parts[2].strip() for parts in lines if parts[0].startswith("import time:")}
    return (names | {name.rpartition(".")[0] for name in names}) - {"", "imported package"}


@contextmanager
def served_process(
    *flags: str,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
    program: Sequence[str] = (sys.executable, "-m", "segue_cli.cli"),
) -> Iterator[ServedProcess]:
    """Run the command as a person would, on a free port; everything it prints is kept. A wrapper is a command that runs
    the rest of its line; `program` is another `segue` than that of the checkout."""
    command = [*wrapper, *program, "serve", "--port", "0", *flags]
    if "--engine" not in flags:
        command += ["--engine", "scripted"]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed: list[str] = []
    is_up = threading.Event()

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            printed.append(line)
            if " at http" in line:
                is_up.set()
        is_up.set()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        assert is_up.wait(START_S), f"the server did not start: {printed}"
        found = re.search(r" at (https?://\S+)/v1", "".join(printed))
        assert found, "".join(printed)
        yield ServedProcess(found[1], process, printed)
    finally:
        try:
            if process.poll() is None:
                process.terminate()
                process.wait(WAIT_S)
        finally:
            process.kill()
            process.wait()
        listener.join(WAIT_S)
        assert process.stdout is not None
        process.stdout.close()


async def until(is_so: Callable[[], object]) -> None:
    """Wait, but not for ever, until this holds; it may have to be awaited. For state that sets no event."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = is_so()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.002)


def kinds(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """The types of events; heartbeats, which depend on time, are left out."""
    first_progress = True
    found = []
    for event in events:
        if event["type"] == "response.in_progress":
            if not first_progress:
                continue
            first_progress = False
        found.append(event["type"])
    return found
