"""What do healthy clients notice of a hostile one? Turns on a socket, beside a client that sends what costs the most.

    python -m bench hostile [WORD ...]        only the shapes whose names have one of these words
    python -m bench hostile --only NAME       this one; repeatable

For each shape a server of its own: the turns of a healthy client by the clock, first alone, then beside the hostile
client, then alone again. A shape passes whose p99 beside is at most twice the p99 alone, and for which the server took
at most 128 MiB more and some seconds later keeps at most 32, and what its caches count. The hostile client is a process
of its own; it sends the same bytes again as fast as they are taken, and comes back when it is cut off. The server has
the first core, both clients share the others: beside a process that only computes, the first shape, the healthy client
waits for its own core.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

from bench.peer import Client, server
from segue.printable import say
from segue.web.fetch import Fetched, Fetcher
from segue_bench.client import (
    ConnectionFailed,
    frame,
    get,
    local,
    open_websocket,
    read_message,
    upgrade_request,
)
from segue_bench.crowd import HealthProbe
from segue_bench.server import ScriptedModel, ServerOptions, ServerProcess, apart, serve
from segue_cli.cli import main as run_segue
from tests.growth.lying_engine import MODEL as LIAR
from tests.growth.lying_engine import lying_engine

MIB = 1024 * 1024
TEXT_CHARS = 10_000_000
# What is asked of a shape.
RATIO_MAX, GROWN_MIB_MAX, KEPT_MIB_MAX = 2.0, 128.0, 32.0
# For as long the server may keep what it took.
GIVEN_BACK_S = 8.0
# Longer than any measurement: a hostile process that is left over ends by itself.
HOSTILE_S_MAX = 300.0
STALLED = 200
APPENDS_MAX = 16
# As it stands in docs/inside/performance.md.
HEAD = """
| beside | alone: p99 | p50 | p99 | longest | times | memory | kept (by caches) | |
|---|---|---|---|---|---|---|---|---|""".lstrip("\n")
# Where answers go that nobody reads.
DISCARDED = bytearray(MIB)

SCRIPT = {"turns": [{"text": "Once", "pad_tokens": 20}]}
CALLING = {"turns": [{"calls": [{"name": "f", "arguments": {}}]}]}
LONG = {"turns": [{"text": "Once", "pad_tokens": 200_000}]}
PAGE_URL = "https://pages.example/a.html"
OPENING = {
    "turns": [{"calls": [{"name": "web.open_page", "arguments": {"url": f"{PAGE_URL}?{n}"}}]} for n in range(8)]
    + [{"text": "Read"}]
}  # fmt: skip
# Without text: it is not kept, and read again each time.
PAGE = b"<a" + b" b" * 4_000_000

Json = Any
# HTTP: one request after the other. Socket: frames. The others have a way of their own.
Way = Literal["http", "socket", "stalled", "appends", "computes"]


@dataclass(frozen=True)
class Shape:
    """What a hostile client sends, how, and to which server."""

    name: str
    make: Callable[[], bytes]
    way: Way = "http"
    # What its model says; the healthy client's says `SCRIPT`.
    script: Mapping[str, Json] = field(default_factory=lambda: SCRIPT)
    flags: tuple[str, ...] = ()
    # Behind Segue is an endpoint that says what it is asked to.
    is_before_liar: bool = False
    grown_mib_max: float = GROWN_MIB_MAX


def _create(**fields: object) -> bytes:
    return _encoded(type="response.create", model="hostile", store=False, **fields)


def _encoded(**fields: object) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode()


def _body(
    data: bytes,
    path: str = "/v1/responses",
    encoding: str = "identity",
    kind: str = "application/json",
) -> bytes:
    """A request over HTTP."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Encoding: {encoding}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def _one_byte_frames() -> bytes:
    """One message, each of its bytes in a frame of its own: a text frame, continuations, and the bit that ends it."""
    data = _create(input="a" * 8_000)
    return b"".join(
        bytes(
            [(0x80 if at == len(data) - 1 else 0) | (1 if at == 0 else 0), 0x81, 0, 0, 0, 0, byte]
        )
        for at, byte in enumerate(data)
    )


def _numbers() -> bytes:
    return _create(input="a", metadata={"numbers": list(range(1_000_000))})


def _words() -> bytes:
    return _create(input="word " * (TEXT_CHARS // 5))


def _text(piece: str) -> Callable[[], bytes]:
    return lambda: _body(_create(input=piece * (TEXT_CHARS // len(piece.encode()))))


def _tool(name: str, parameters: Json) -> Json:
    return {"type": "function", "name": name, "parameters": parameters}


def _unions() -> bytes:
    """Every way through it leads to itself again."""
    union = {"anyOf": [{"$ref": "#/properties/x"}] * 30}
    schema = {"type": "object", "required": ["x"], "properties": {"x": union}}
    return _body(_create(input="a", tools=[_tool("f", schema)]))


def _nested(depth: int) -> Json:
    properties: Json = {f"k{n}": {"type": "boolean"} for n in range(9)}
    if depth:
        properties["z"] = _nested(depth - 1)
    return {"type": "object", "properties": properties}


def _forced(tools: Sequence[Json]) -> bytes:
    return _body(_create(input="a", tools=tools, tool_choice="required"))


def _like_names() -> bytes:
    """Names that are one where an endpoint's 64 characters end, or where dots are not allowed."""
    long = "a_tool_with_a_long_name_" * 3
    names = [*(f"{long}{n}" for n in range(64)), *(f"a{'_' * n}" for n in range(1, 64))]
    tools = [_tool(name, {"type": "object"}) for name in names]
    return _body(_encoded(model=LIAR, store=False, input="deltas 3", tools=tools))


def _upload() -> bytes:
    """A file that is full of what looks like its end."""
    head = "".join(
        f'--xyz\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}'
        for name, value in (("purpose", "user_data\r\n"), ('file"; filename="a.txt', ""))
    ).encode()
    return _body(
        head + b"\r\n--xy" * 700_000 + b"\r\n--xyz--\r\n",
        "/v1/files",
        kind="multipart/form-data; boundary=xyz",
    )


def _messages(path: str) -> Callable[[], bytes]:
    """The body of another API: one text of a user that is full of marks and line breaks."""
    message = {"role": "user", "content": "<\n" * (TEXT_CHARS // 3)}
    return lambda: _body(_encoded(model="hostile", max_tokens=20, messages=[message]), path)


def _burst() -> bytes:
    return _body(_encoded(model=LIAR, store=False, input="deltas 20000"))


def _reading() -> bytes:
    return _body(_create(input="a", tools=[{"type": "web_search"}]))


SHAPES = (
    Shape("a process that computes", bytes, "computes"),
    Shape("one-byte frames", _one_byte_frames, "socket"),
    Shape("a million numbers, HTTP", lambda: _body(_numbers())),
    Shape("a million numbers, socket", lambda: frame(_numbers()), "socket"),
    Shape("10 MB of words, HTTP", lambda: _body(_words())),
    Shape("10 MB of words, gzip", lambda: _body(gzip.compress(_words()), encoding="gzip")),
    Shape("bad JSON, 80 KB", lambda: frame(b'{"input":' + b"[" * 2_000 + b'"' + b'\\"a' * 26_000), "socket"),
    Shape("10 MB of <", _text("<")),
    Shape("10 MB of line breaks", _text("\n")),
    Shape("10 MB of zero width", _text("\u200b")),
    Shape("Messages, 10 MB", _messages("/v1/messages")),
    Shape("Chat Completions, 10 MB", _messages("/v1/chat/completions")),
    Shape("a schema of unions", _unions, script=CALLING),
    Shape("a schema, forced call", lambda: _forced([_tool("f", _nested(5))]), script=CALLING),
    Shape("500 tools, forced call", lambda: _forced([_tool(f"f{n}", _nested(1)) for n in range(500)])),
    Shape("names that collide", _like_names, is_before_liar=True),
    Shape("20,000 deltas at once", _burst, is_before_liar=True),
    Shape("a hostile page", _reading, script=OPENING, flags=("--fetch", "public")),
    Shape("uploads of 4 MB", _upload),
    Shape("appends to a rollout", lambda: b"a" * MIB, "appends", script=CALLING),
    # Each of them may cost 2 MiB at the peak.
    Shape("200 that stop reading", lambda: frame(_create(input="a")), "stalled", LONG, grown_mib_max=2.0 * STALLED),
)  # fmt: skip
BY_NAME = {shape.name: shape for shape in SHAPES}


# --- the hostile client -----------------------------------------------------------------------------------


def be_hostile(port: int, shape: Shape) -> None:
    """Send until ended."""
    data = shape.make()
    until = time.monotonic() + HOSTILE_S_MAX
    print("ready", flush=True)
    while time.monotonic() < until:
        try:
            match shape.way:
                case "stalled":
                    _stop_reading(port, data)
                case "appends":
                    _append(port, data.decode())
                case "computes":
                    sum(range(1_000_000))
                case "http" | "socket":
                    _send(port, data, is_socket=shape.way == "socket", until=until)
        except (OSError, ConnectionFailed):
            time.sleep(0.01)


def _send(port: int, data: bytes, *, is_socket: bool, until: float) -> None:
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        if is_socket:
            connection.sendall(upgrade_request(local(port)))
            connection.recv(MIB)
        while time.monotonic() < until:
            connection.sendall(data)
            if not connection.recv_into(DISCARDED):
                return


def _stop_reading(port: int, data: bytes) -> None:
    """Ask for a long answer on each of many sockets, read nothing, and wait until the server has cut one off."""
    opened: list[socket.socket] = []
    try:
        for _ in range(STALLED):
            connection = socket.create_connection(("127.0.0.1", port), 10)
            opened.append(connection)
            connection.sendall(upgrade_request(local(port)))
            connection.recv(1024)
            connection.sendall(data)
        # A ping now and then: what was cut off cannot be written to.
        while True:
            time.sleep(0.2)
            opened[0].sendall(b"\x89\x80\0\0\0\0")
    finally:
        for connection in opened:
            connection.close()


def _append(port: int, text: str) -> None:
    """Answer each call of one response by a long text."""
    connection = open_websocket(local(port))
    try:
        tools = [_tool("f", {"type": "object"})]
        connection.send(frame(_create(input="a", rollout=True, tools=tools)))
        for _ in range(APPENDS_MAX):
            while not (data := read_message(connection)).startswith(b'{"type":"response.done"'):
                if data.startswith((b'{"type":"error"', b'{"type":"response.failed"')):
                    return
            done = json.loads(data)
            outputs = [
                {"type": "function_call_output", "call_id": call["call_id"], "output": text}
                for call in done["required_input"]
            ]
            event = {"type": "response.append", "response_id": done["response_id"], "input": outputs}  # fmt: skip
            connection.send(frame(json.dumps(event).encode()))
    finally:
        connection.close()


@contextmanager
def hostile(process: ServerProcess, shape: Shape) -> Iterator[None]:
    """A hostile client beside what is measured."""
    command = [sys.executable, "-m", "bench.hostile", str(process.port), shape.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        client.stdout.readline()
        try:
            yield
        finally:
            client.kill()


# --- what is measured -------------------------------------------------------------------------------------


async def fetch_hostile_page(_: Fetcher, url: str) -> Fetched:
    """In place of a fetch, which reaches no page on this machine."""
    return Fetched(url, "text/html", None, PAGE)


@contextmanager
def server_for(
    shape: Shape, module: str = "bench.hostile"
) -> Iterator[tuple[ServerProcess, dict[str, str]]]:
    """A server, and what a healthy client asks it. The module fetches the hostile page."""
    if shape.is_before_liar:
        with (
            lying_engine() as url,
            server(
                None, "--engine", "chat", "--engine-url", url, "--model", LIAR, module=module
            ) as process,
        ):
            yield process, {"model": LIAR, "input": "deltas 20"}
        return
    models = [
        ScriptedModel("scripted", json.dumps(SCRIPT).encode(), 0),
        ScriptedModel("hostile", json.dumps(shape.script).encode(), 0),
    ]
    with (
        serve(ServerOptions(models, shape.flags, module)) as process,
        apart(process),
    ):
        yield process, {"input": "Hello"}


def turn_times(client: Client, asked: Mapping[str, str], seconds: float) -> list[float]:
    """How long each turn took, in milliseconds."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        client.timed_turn(**asked, store=False)
        times.append((time.perf_counter() - began) * 1e3)
        # As an agent does: most of its time it does something else.
        time.sleep(0.005)
    return times


def at_share(times: Sequence[float], share: float) -> float:
    return sorted(times)[math.ceil(len(times) * share) - 1]


def cached_bytes(process: ServerProcess) -> float:
    """What the parts of the server that keep something count as theirs."""
    _, page = get(local(process.port), "/metrics")
    return sum(
        float(size) for size in re.findall(rb"^segue_memory_bytes\{\S+ (\S+)$", page, re.MULTILINE)
    )


@dataclass(frozen=True)
class Measured:
    """What a healthy client noticed of a shape, in milliseconds, and in mebibytes what the server took more, still had
    later, and counted as its caches' then."""

    shape: Shape
    alone: Sequence[float]
    beside: Sequence[float]
    grown_mib: float
    kept_mib: float
    cached_mib: float

    @property
    def ratio(self) -> float:
        return at_share(self.beside, 0.99) / at_share(self.alone, 0.99)

    @property
    def failures(self) -> list[str]:
        found = {
            "p99": self.ratio > RATIO_MAX,
            "memory": self.grown_mib > self.shape.grown_mib_max,
            "not given back": self.kept_mib - self.cached_mib > KEPT_MIB_MAX,
        }
        return [name for name, is_bad in found.items() if is_bad]

    @property
    def row(self) -> str:
        """Its line of the table."""
        p50, p99, longest = (at_share(self.beside, share) for share in (0.5, 0.99, 1.0))
        times = (
            f"{at_share(self.alone, 0.99):.1f} ms | {p50:.1f} ms | {p99:.1f} ms | {longest:.0f} ms"
        )
        memory = f"+{self.grown_mib:.0f} MiB | {self.kept_mib:.0f} ({self.cached_mib:.0f}) MiB"
        verdict = f"FAIL: {', '.join(self.failures)}" if self.failures else "pass"
        return f"| {self.shape.name} | {times} | {self.ratio:.1f} | {memory} | {verdict} |"


def measured(shape: Shape, seconds: float) -> Measured:
    """Alone, beside the hostile client, alone again."""
    with server_for(shape) as (process, asked):
        client = Client(process.port)
        turn_times(client, asked, 1.0)
        alone = turn_times(client, asked, seconds / 2)
        before, cached = process.memory_bytes() or 0, cached_bytes(process)
        with HealthProbe(process) as probe, hostile(process, shape):
            beside = turn_times(client, asked, seconds)
        # What was sent last is still worked off.
        turn_times(client, asked, 2.0)
        alone += turn_times(client, asked, seconds / 2)
        kept, more = math.inf, 0.0
        until = time.monotonic() + GIVEN_BACK_S
        while kept - more > KEPT_MIB_MAX and time.monotonic() < until:
            kept = ((process.memory_bytes() or 0) - before) / MIB
            more = max(0.0, cached_bytes(process) - cached) / MIB
            turn_times(client, asked, 0.2)
        client.close()
    return Measured(shape, alone, beside, (probe.peak_bytes - before) / MIB, kept, more)


def main(arguments: Sequence[str]) -> int:
    """Print one table; 1 where a shape fails."""
    parser = argparse.ArgumentParser(prog="python -m bench hostile", description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="for each shape (default: 6)")
    parser.add_argument("--only", choices=BY_NAME, action="append", help="this shape; repeatable")
    parser.add_argument("words", nargs="*", help="shapes whose names have one of these words")
    options = parser.parse_args(arguments)
    names = options.only or [
        name for name in BY_NAME if not options.words or any(word in name for word in options.words)
    ]
    if not names:
        parser.error(f"no shape has one of these words; there are: {', '.join(BY_NAME)}")
    # Each row at once: a run that is broken off has said what it found.
    say(HEAD)
    found: list[Measured] = []
    for number, name in enumerate(names, 1):
        print(f"{number} of {len(names)}: {name}", end=" \r", file=sys.stderr, flush=True)
        found.append(measured(BY_NAME[name], options.seconds))
        say(found[-1].row)
    failed = sum(bool(one.failures) for one in found)
    say(f"{len(found) - failed} of {len(found)} pass.")
    return min(failed, 1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        with patch.object(Fetcher, "fetch", fetch_hostile_page):
            raise SystemExit(run_segue(sys.argv[1:]))
    with suppress(KeyboardInterrupt):
        be_hostile(int(sys.argv[1]), BY_NAME[sys.argv[2]])
