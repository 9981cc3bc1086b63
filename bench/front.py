"""What does vLLM's own front cost a turn, by how its prompt comes? The same ids by each of its ways, without a GPU.

    python -m bench front [--contexts 1000 20000 100000]
    python -m bench front --sessions --contexts 1000 100000 500000 [--nice -15]
    python -m bench front --grpc PACKAGES --rust PROGRAM

The vLLM is a real one without a model (`bench/hollow`): its front, checks, scheduler and prefix cache are its own,
nothing is computed. Each turn adds 500 ids to the prompt and gets 16 tokens; all before is cached. Processor time is
that of the API's process ("front") and of the engine core, TTFT is what the client waits for the first event with a
token, the turn what it waits for the last. The ways take turns.

More fronts of vLLM, each with a core of its own, where their files are given:
--grpc   `vllm serve --grpc`. Packages that it needs beside vLLM: pip install --no-deps --target PACKAGES
         smg-grpc-servicer==0.14.1 smg-grpc-proto==0.4.28 grpcio-health-checking grpcio-reflection
--sessions  vLLM with the plugin `segue-vllm`, asked as Segue asks it: a handle, a digest and the new ids. By step one,
         by step two, and step two and the ids in JSON with blocks of 128 tokens; each by a server of its own.
--rust   VLLM_USE_RUST_FRONTEND=1, by HTTP and with --grpc-port. PROGRAM is `vllm/vllm-rs` out of the wheel of vLLM for
         CUDA, of the same version; that for CPUs does not have it. vLLM's environment must have grpcio.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from bench.hollow.server import (
    CONTEXT_TOKENS,
    HERE,
    MODEL,
    HollowVllm,
    free_port,
    hollow_vllm,
    vllm_python,
)
from bench.peer import cpu_s
from segue.engine_sessions.frames import (
    SessionAsk,
    SessionEnd,
    SessionTaken,
    SessionTokens,
    id_bytes,
    read_said,
)
from segue.engine_sessions.known import new_digest
from segue.seams.prompt import id_array
from segue_bench.client import (
    ClientConnection,
    ConnectionFailed,
    ServerAddress,
    Traffic,
    frame,
    open_websocket,
    read_body,
    read_head,
    read_message,
)
from segue_bench.rounds import interleaved, print_table
from segue_bench.ways import sse_events

CONTEXTS = (1_000, 20_000, 100_000)
NEW_TOKENS, OUTPUT_TOKENS = 500, 16
SETTLE_S, SETTLE_S_MAX = 0.05, 2.0
WORD = " the"
WORD_ID = 260
# Of an event with a token.
TOKENS = (b'"token_ids":[', b'"text":"', b'"content":"')
SAMPLING = {"max_tokens": OUTPUT_TOKENS, "temperature": 1.0}


class FrontCost(NamedTuple):
    """One turn."""

    sent: int
    received: int
    ttft_s: float
    turn_s: float
    front_s: float
    core_s: float


Body = Callable[[list[int]], tuple[str, dict[str, Any]]]


def generate(ids: list[int], **sampling: object) -> tuple[str, dict[str, Any]]:
    """Ids in, ids out."""
    asked = {"token_ids": ids, "sampling_params": {**SAMPLING, "detokenize": False, **sampling}}
    return "/inference/v1/generate", asked


def completions(ids: list[int], **more: object) -> tuple[str, dict[str, Any]]:
    """A prompt of ids; text comes back, and ids where they are asked for."""
    return "/v1/completions", {"prompt": ids, **SAMPLING, **more}


def chat(ids: list[int]) -> tuple[str, dict[str, Any]]:
    """The same number of tokens as text."""
    content = WORD * len(ids)
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **SAMPLING}


HTTP: dict[str, Body] = {
    "generate, ids in JSON": generate,
    "completions, ids back": partial(completions, return_token_ids=True),
    "completions, text back": completions,
    "chat, text": chat,
}
# Of the Rust front end.
RUST_HTTP: dict[str, Body] = {
    "Rust, generate": HTTP["generate, ids in JSON"],
    "Rust, completions": HTTP["completions, ids back"],
    "Rust, chat": chat,
}


class Client(Protocol):
    """Sends a prompt that grows."""

    def ask(self, new: list[int]) -> tuple[int, int, float, float]:
        """Bytes sent and received, and the seconds to the first token and to the end."""
        ...


class HttpClient:
    """One kept connection; the body is written before the clock starts."""

    def __init__(self, url: str, make: Body) -> None:
        self._make = make
        self._ids: list[int] = []
        self._traffic = Traffic()
        self._connection = ClientConnection(ServerAddress(url), self._traffic)

    def ask(self, new: list[int]) -> tuple[int, int, float, float]:
        self._ids += new
        path, fields = self._make(self._ids)
        body = msgspec.json.encode({"model": MODEL, "stream": True, **fields})
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        sent, received = self._traffic.sent, self._traffic.received
        began = time.perf_counter()
        try:
            first_s = self._exchange(data) - began
        except ConnectionFailed as error:
            raise SystemExit(f"bench: {path} with {len(self._ids)} ids: {error}") from None
        turn_s = time.perf_counter() - began
        return self._traffic.sent - sent, self._traffic.received - received, first_s, turn_s

    def _exchange(self, data: bytes) -> float:
        """When the first event with a token came."""
        self._connection.send(data)
        answer = read_head(self._connection)
        if answer.status != 200:
            raise SystemExit(f"bench: vLLM refused: {read_body(self._connection, answer)[:300]!r}")
        first = 0.0
        for event, _ in sse_events(self._connection):
            if not first and any(mark in event for mark in TOKENS):
                first = time.perf_counter()
        return first or time.perf_counter()


class SessionAddress(ServerAddress):
    """The path of the plugin's connection."""

    path = "/v1/segue/session"


class SessionClient:
    """One connection to the plugin; the engine has what was said before."""

    def __init__(self, url: str) -> None:
        self._traffic = Traffic()
        self._connection = open_websocket(SessionAddress(url), self._traffic)
        read_said(read_message(self._connection))
        self._digest = new_digest()
        self._handle = self._length = self._stream = 0

    def ask(self, new: list[int]) -> tuple[int, int, float, float]:
        ids = id_bytes(id_array(new))
        self._stream += 1
        digest = self._digest.digest()
        asked = (self._stream, self._handle, self._length, digest, ids)
        ask = SessionAsk(*asked, "bench", MODEL, None, 0, msgspec.json.encode(SAMPLING))
        data = frame(msgspec.msgpack.encode(ask), 2)
        self._digest.update(ids)
        self._length += len(new)
        sent, received, first = self._traffic.sent, self._traffic.received, 0.0
        began = time.perf_counter()
        self._connection.send(data)
        is_over = False
        while not is_over:
            for said in read_said(read_message(self._connection)):
                if isinstance(said, SessionTaken):
                    self._handle = said.handle
                elif isinstance(said, SessionTokens):
                    first = first or time.perf_counter()
                    self._length += len(said.ids)
                    self._digest.update(id_bytes(id_array(said.ids)))
                elif isinstance(said, SessionEnd):
                    is_over = True
                else:
                    raise SystemExit(f"bench: the plugin refused: {said}")
        turn_s = time.perf_counter() - began
        return (
            self._traffic.sent - sent,
            self._traffic.received - received,
            first - began,
            turn_s,
        )


class GrpcClient:
    """A process with vLLM's packages (`bench/hollow/grpc_client.py`)."""

    def __init__(self, kind: str, port: int) -> None:
        program = [str(vllm_python()), str(HERE / "grpc_client.py")]
        self._process = subprocess.Popen(
            [*program, kind, str(port), MODEL, str(OUTPUT_TOKENS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, new: list[int]) -> tuple[int, int, float, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(new) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("bench: the gRPC client failed, see above")
        sent, received, first_s, turn_s = json.loads(line)
        return sent, received, first_s, turn_s


class Way(NamedTuple):
    """A server, and how it is asked."""

    vllm: HollowVllm
    client: Callable[[], Client]
    # One word a token, so that text and ids are as long.
    is_text: bool = False


class Conversation:
    """A prompt that grows, by one way."""

    def __init__(self, way: Way, tokens: int, seed: int) -> None:
        self._front, self._core = way.vllm.front(), way.vllm.core()
        self._client = way.client()
        self._is_text = way.is_text
        self._source = random.Random(seed)
        self._client.ask(self._drawn(tokens))

    def _settle(self) -> None:
        """What servers free and tidy after an answer is no cost of the next one."""
        spent = -1.0
        until = time.monotonic() + SETTLE_S_MAX
        while time.monotonic() < until and spent < (spent := self._spent_s()):
            time.sleep(SETTLE_S)

    def _spent_s(self) -> float:
        return cpu_s(self._front) + cpu_s(self._core)

    def _drawn(self, count: int) -> list[int]:
        """Ids that differ, so that nothing else is found."""
        if self._is_text:
            return [WORD_ID] * count
        return [self._source.randrange(1_000, 40_000) for _ in range(count)]

    def turn(self) -> FrontCost:
        """Ask with 500 tokens more, when what the turn of another way has left is done."""
        self._settle()
        front, core = cpu_s(self._front), cpu_s(self._core)
        cost = self._client.ask(self._drawn(NEW_TOKENS))
        return FrontCost(*cost, cpu_s(self._front) - front, cpu_s(self._core) - core)


def measure(
    ways: dict[str, Way], contexts: Sequence[int], rounds: int
) -> Iterator[tuple[Any, ...]]:
    """The medians of each way at each context."""
    for tokens in contexts:
        talks = {
            name: Conversation(way, tokens, seed)
            for seed, (name, way) in enumerate(ways.items(), tokens)
        }
        costs = interleaved({name: talk.turn for name, talk in talks.items()}, rounds)
        for name, found in costs.items():
            sent, received, *times = (
                statistics.median(column) for column in zip(*found, strict=True)
            )
            yield (name, tokens, sent / 1e3, received / 1e3, *(1e3 * seconds for seconds in times))


@contextmanager
def servers(options: argparse.Namespace) -> Iterator[dict[str, Way]]:
    """The ways of all servers that are asked for."""
    more = options.vllm_flags.split()
    most = max(options.contexts) + 20_000
    if most > CONTEXT_TOKENS:
        more += ["--max-model-len", str(most)]
    flags = ("--block-size", "16", *more)
    tokens = {
        "HOLLOW_ANSWER_TOKENS": f"{OUTPUT_TOKENS},{OUTPUT_TOKENS}",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    }
    with ExitStack() as stack:
        if options.sessions:
            yield _sessions(stack, flags, more, tokens)
            return
        plain = stack.enter_context(hollow_vllm(*flags, variables=tokens))
        ways = _http(plain, HTTP)
        if options.grpc is not None:
            found = os.pathsep.join([str(HERE), str(options.grpc.resolve())])
            variables = {**tokens, "PYTHONPATH": found}
            vllm = stack.enter_context(hollow_vllm("--grpc", *flags, variables=variables))
            ways["gRPC, packed ids"] = Way(vllm, partial(GrpcClient, "python", vllm.port))
        if options.rust is not None:
            program = str(options.rust.resolve())
            rust = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": program}
            port = free_port()
            more = ("--grpc-port", str(port), *flags)
            vllm = stack.enter_context(hollow_vllm(*more, variables={**tokens, **rust}))
            ways |= _http(vllm, RUST_HTTP)
            ways["Rust, gRPC"] = Way(vllm, partial(GrpcClient, "rust", port))
        yield ways


def _sessions(
    stack: ExitStack, flags: Sequence[str], more: Sequence[str], variables: Mapping[str, str]
) -> dict[str, Way]:
    """A server for each way: what ids in JSON leave behind in its memory is a cost of every turn after."""
    variables = {**variables, "VLLM_PLUGINS": "segue"}
    keeps = ("--scheduler-cls", "segue_vllm.scheduler.KeepScheduler")
    large = ("--block-size", "128", *more)
    starts = {
        "generate, ids in JSON": (flags, False),
        "sessions, step one": (flags, True),
        "sessions, step two": ((*flags, *keeps), True),
        "generate, blocks of 128": (large, False),
        "step two, blocks of 128": ((*large, *keeps), True),
    }

    def start(flags: Sequence[str]) -> HollowVllm:
        return stack.enter_context(hollow_vllm(*flags, variables=variables))

    # Each takes half a minute, and two cores.
    with ThreadPoolExecutor(2) as pool:
        vllms = list(pool.map(start, [flags for flags, _ in starts.values()]))
    return {
        name: Way(
            vllm,
            partial(SessionClient, vllm.url)
            if is_kept
            else partial(HttpClient, vllm.url, generate),
        )
        for vllm, (name, (_, is_kept)) in zip(vllms, starts.items(), strict=True)
    }


def _http(vllm: HollowVllm, bodies: dict[str, Body]) -> dict[str, Way]:
    return {
        name: Way(vllm, partial(HttpClient, vllm.url, make), make is chat)
        for name, make in bodies.items()
    }


def prefer(ways: Iterable[Way], nice: int) -> None:
    """All threads of these servers, and this one, have that priority from now on."""
    for way in ways:
        for process in (way.vllm, way.vllm.front(), way.vllm.core()):
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
    os.setpriority(os.PRIO_PROCESS, 0, nice)


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m bench front", description=__doc__, formatter_class=formatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way (default: 7)")
    about = "with the plugin that keeps conversations"
    parser.add_argument("--sessions", action="store_true", help=about)
    parser.add_argument("--grpc", type=Path, metavar="PACKAGES", help="also by vLLM's gRPC server")
    parser.add_argument("--rust", type=Path, metavar="PROGRAM", help="also by its Rust front end")
    about = "priority of servers and client, such as -15, on a machine that others use (as root)"
    parser.add_argument("--nice", type=int, default=0, metavar="N", help=about)
    flags = "flags for vLLM, such as --vllm-flags='--prefix-caching-hash-algo xxhash'"
    parser.add_argument("--vllm-flags", default="", help=flags)
    options = parser.parse_args(arguments)
    for path in filter(None, (options.grpc, options.rust)):
        if not path.exists():
            parser.error(f"there is no {path}")
    with servers(options) as ways:
        if options.nice:
            prefer(ways.values(), options.nice)
        rows = list(measure(ways, options.contexts, options.rounds))
    sizes = "way {}|context {:,}|sent kB {:.0f}|received kB {:.0f}"
    times = "TTFT ms {:.1f}|turn ms {:.1f}|front CPU ms {:.1f}|core CPU ms {:.1f}"
    print_table(f"{sizes}|{times}", rows)
