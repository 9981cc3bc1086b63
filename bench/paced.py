"""What does one token cost on its way through, and how late does it come? Beside the fastest other server.

    python -m bench paced [--pinned] [--only NAME …]

Segue with its *chat* engine, with vLLM's ids, with vLLM's plugin `segue-vllm` (sessions), and `agentic-api`, a gateway
in Rust, in front of one engine that gives every stream a token at each of its steps, as batching engines do
(`bench.engine_steps`). Beside them stands a relay that does no work at all (`bench.bare`): no gateway on the same
event loop can be cheaper. The servers take turns, and figures are medians over the rounds. The cores are left to the
system; with `--pinned` each server has the first core, engine and client the others.

paced      64 sockets, 100 tokens a second each: processor time of the server a token, and how much later a token came
           than the engine had written it. Beginnings and ends of answers are not in it.
one        one socket, answers of 100 tokens, 400 a second: processor time of a whole turn.
unlimited  one answer of 20,000 tokens as fast as the server takes it, on a socket and as SSE.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import uvloop

from bench.engine_steps import Plan, numbered
from bench.peer import cpu_s, server
from segue_bench.client import (
    READ_BYTES,
    ClientConnection,
    frame,
    get,
    local,
    open_websocket,
    post,
    read_chunk,
)
from segue_bench.rival import agentic
from segue_bench.rounds import interleaved, print_table
from segue_bench.server import ServerProcess, apart, cores, spawn
from segue_bench.streams import StreamConnection

SEGUE = ("segue chat", "segue vllm", "segue sessions")
PEER = "agentic-api"
BARE = "relay without work"
PACED = Plan(streams=64, tokens=225, per_s=100)
ONE = Plan(streams=1, tokens=100, per_s=400)
ONE_TURNS = 8
UNLIMITED = Plan(streams=1, tokens=20_000, per_s=0)
# Tokens at the beginning and at the end of an answer that are not measured.
FIRST, LAST = 20, 5
TYPE = b'"type":"response.'
DELTA = TYPE + b'output_text.delta"'
TEXT = b'"delta":"'
END = TYPE + b'completed"'
FAILURES = (b'"type":"error"', TYPE + b'failed"', TYPE + b'incomplete"')
REQUEST = {"model": "scripted", "input": "Tell me.", "store": False}
RUN_S_MAX = 60.0
# The vocabulary whose ids the engine sends.
TOKENIZER = files("segue") / "vocabularies" / "smollm2.gguf"
CHAT = ("--engine", "chat")
SESSIONS = ("--engine", "vllm", "--tokenizer", str(TOKENIZER))
VLLM = (*SESSIONS, "--engine-sessions", "off")


class Rig(NamedTuple):
    """A server, and the engine behind it."""

    process: ServerProcess
    engine_port: int

    def plan(self, plan: Plan) -> None:
        """The engine plays this from now on."""
        body = json.dumps(plan._asdict()).encode()
        connection = ClientConnection(local(self.engine_port))
        head = f"POST /plan HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.send(head.encode() + body)
        connection.read_until(b"\r\n\r\n")
        connection.close()

    def times(self) -> dict[int, list[float]]:
        """When each token was written, by the number of its answer."""
        _, body = get(local(self.engine_port), "/times")
        return {int(number): times for number, times in json.loads(body).items()}


@contextmanager
def bare(engine_port: int, folder: Path, *, is_pinned: bool) -> Iterator[ServerProcess]:
    """The relay."""
    with (
        spawn(["-m", "bench.bare", str(engine_port)], r"(\d+)", folder) as process,
        apart(process) if is_pinned else nullcontext(),
    ):
        yield process


# --- paced ------------------------------------------------------------------------------------------


class Streams:
    """All streams of a run: when each token came, and the server's processor time in the middle of the run."""

    def __init__(self, rig: Rig, plan: Plan) -> None:
        self._process = rig.process
        self._first, self._last = plan.streams * FIRST, plan.streams * (plan.tokens - LAST)
        self._left = plan.streams
        self._count = 0
        self._cpu = 0.0
        self.cpu_s = 0.0
        self.measured = self._last - self._first
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def token(self) -> None:
        """One more has come."""
        self._count += 1
        if self._count == self._first:
            self._cpu = cpu_s(self._process)
        elif self._count == self._last:
            self.cpu_s = cpu_s(self._process) - self._cpu

    def ended(self, failure: str = "") -> None:
        """One stream is over."""
        self._left -= 1
        if failure and not self.over.done():
            self.over.set_exception(SystemExit(f"bench: a stream failed: {failure}"))
        elif not self._left and not self.over.done():
            self.over.set_result(None)


class PacedStream:
    """One socket and its answer."""

    def __init__(self, port: int, streams: Streams) -> None:
        self._streams = streams
        self.words: list[str] = []
        self.arrivals: list[float] = []
        self.connection = StreamConnection(port, self)

    def event(self, data: bytes, now: float) -> None:
        if DELTA in data:
            start = data.find(TEXT) + len(TEXT)
            self.words.append(data[start : data.find(b'"', start)].decode())
            self.arrivals.append(now)
            self._streams.token()
        elif END in data:
            self._streams.ended()
        elif any(failure in data for failure in FAILURES):
            self._streams.ended(data[:200].decode())

    def lost(self, code: int | None) -> None:
        self._streams.ended("" if self._streams.over.done() else f"connection lost ({code})")


class Paced(NamedTuple):
    """Seconds of processor time a token, and how late tokens were."""

    cpu: float
    late: list[float]


async def _paced(rig: Rig, plan: Plan) -> Paced:
    streams = Streams(rig, plan)
    clients = [PacedStream(rig.process.port, streams) for _ in range(plan.streams)]
    request = frame(json.dumps({"type": "response.create", **REQUEST}).encode())
    for client in clients:
        await client.connection.open()
    for client in clients:
        client.connection.write(request)
    async with asyncio.timeout(RUN_S_MAX):
        await streams.over
    for client in clients:
        client.connection.close()
    times, late = rig.times(), []
    for client in clients:
        written = times[numbered(client.words)]
        if len(client.arrivals) != len(written):
            raise SystemExit(f"bench: {len(client.arrivals)} deltas of {len(written)} tokens came")
        pairs = list(zip(client.arrivals, written, strict=True))[FIRST:-LAST]
        late += [came - wrote for came, wrote in pairs]
    return Paced(streams.cpu_s / streams.measured, late)


def paced(rig: Rig) -> Paced:
    """64 streams that move together."""
    rig.plan(PACED)
    return uvloop.run(_paced(rig, PACED))


# --- one stream ---------------------------------------------------------------------------------------


def one(rig: Rig) -> float:
    """Seconds of processor time for a turn of 100 tokens that come one by one."""
    rig.plan(ONE)
    turns = []
    for _ in range(ONE_TURNS):
        before = cpu_s(rig.process)
        received(rig.process.port, is_sse=False)
        turns.append(cpu_s(rig.process) - before)
    return statistics.median(turns)


# --- unlimited ----------------------------------------------------------------------------------------


def received(port: int, *, is_sse: bool) -> tuple[int, float]:
    """Deltas of one answer, and the seconds from the first byte to the end; nothing is decoded."""
    address = local(port)
    if is_sse:
        connection = ClientConnection(address)
        post(connection, json.dumps({**REQUEST, "stream": True}).encode(), is_last=True)
        more = partial(read_chunk, connection)
    else:
        connection = open_websocket(address)
        connection.send(frame(json.dumps({"type": "response.create", **REQUEST}).encode()))
        more = partial(connection.socket.recv, READ_BYTES)
    count, began, tail = 0, 0.0, b""
    while END not in tail:
        came = more()
        began = began or time.perf_counter()
        data = tail + came
        if not came or any(failure in data for failure in FAILURES):
            raise SystemExit(f"bench: the answer failed: {data[-300:]!r}")
        # What may be cut at the end is looked at again.
        cut = max(data.rfind(TYPE), 0)
        count += data.count(DELTA, 0, cut)
        tail = data[cut:]
    seconds = time.perf_counter() - began
    connection.close()
    return count, seconds


class Unlimited(NamedTuple):
    """Events a second, and seconds of processor time an event."""

    rate: float
    cpu: float


def unlimited(rig: Rig, *, is_sse: bool) -> Unlimited:
    """One long answer."""
    rig.plan(UNLIMITED)
    before = cpu_s(rig.process)
    count, seconds = received(rig.process.port, is_sse=is_sse)
    if count != UNLIMITED.tokens:
        raise SystemExit(f"bench: {count:,} deltas of {UNLIMITED.tokens:,} tokens came")
    return Unlimited(count / seconds, (cpu_s(rig.process) - before) / count)


# --- tables -------------------------------------------------------------------------------------------


def show_paced(results: Mapping[str, list[Paced]]) -> None:
    """Medians over the rounds, and each against the peer's."""
    rows = {}
    for name, runs in results.items():
        cuts = [statistics.quantiles(run.late, n=100) for run in runs]
        p50, p99 = (statistics.median(cut[place] for cut in cuts) for place in (49, 98))
        rows[name] = statistics.median(run.cpu for run in runs), p50, p99
    peer = rows.get(PEER)
    print_table(
        "64 x 100/s {}|CPU us a token {:.1f}|late ms p50 {:.2f}|p99 {:.2f}|against agentic-api: CPU {}|p50 {}|p99 {}",
        [
            (name, row[0] * 1e6, row[1] * 1e3, row[2] * 1e3, *against(row, peer))
            for name, row in rows.items()
        ],
    )


def show_one(results: Mapping[str, list[float]]) -> None:
    """Medians over the rounds."""
    rows = {name: (statistics.median(runs),) for name, runs in results.items()}
    print_table(
        "one stream, 100 tokens at 400/s {}|CPU ms a turn {:.1f}|against agentic-api: CPU {}",
        [(name, row[0] * 1e3, *against(row, rows.get(PEER))) for name, row in rows.items()],
    )


def show_unlimited(results: Mapping[str, list[Unlimited]]) -> None:
    """Medians over the rounds, and the best one: a machine that is busy with other things only makes it slower."""
    print_table(
        "no pace {}|events/s {:,.0f}|best {:,.0f}|CPU us an event {:.1f}|events/s of a full core {:,.0f}|best {:,.0f}",
        [
            (
                name,
                statistics.median(run.rate for run in runs),
                max(run.rate for run in runs),
                (cost := statistics.median(run.cpu for run in runs)) * 1e6,
                1 / cost,
                1 / min(run.cpu for run in runs),
            )
            for name, runs in results.items()
        ],
    )


def against(row: Sequence[float], peer: Sequence[float] | None) -> list[str]:
    """Each figure as a multiple of the peer's."""
    if peer is None:
        return ["-"] * len(row)
    return [f"{own / other:.2f} x" for own, other in zip(row, peer, strict=True)]


def main(arguments: Sequence[str]) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m bench paced",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5)
    servers = (*SEGUE, PEER, BARE)
    parser.add_argument("--servers", nargs="+", choices=servers, default=servers)
    parser.add_argument("--pinned", action="store_true", help="the server on a core of its own")
    kinds = ("paced", "one", "unlimited")
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, metavar="NAME")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = stack.enter_context(spawn(["-m", "bench.engine_steps"], r"(\d+)", folder))
        is_pinned = options.pinned and len(cores()) > 1
        if is_pinned:
            os.sched_setaffinity(engine.pid, cores() - {min(cores())})
        flags = ("--engine-url", f"http://127.0.0.1:{engine.port}", "--model", "scripted")
        starts = {
            "segue chat": lambda: server(None, *CHAT, *flags, is_pinned=is_pinned),
            "segue vllm": lambda: server(None, *VLLM, *flags, is_pinned=is_pinned),
            "segue sessions": lambda: server(None, *SESSIONS, *flags, is_pinned=is_pinned),
            PEER: lambda: agentic(engine.port, is_pinned=is_pinned),
            BARE: lambda: bare(engine.port, folder, is_pinned=is_pinned),
        }
        rigs = {
            name: Rig(stack.enter_context(starts[name]()), engine.port) for name in options.servers
        }
        if "paced" in options.only:
            runs = {name: partial(paced, rig) for name, rig in rigs.items()}
            show_paced(interleaved(runs, options.rounds))
        if "one" in options.only:
            turns = {name: partial(one, rig) for name, rig in rigs.items()}
            show_one(interleaved(turns, options.rounds))
        if "unlimited" in options.only:
            ways = {
                f"{name}, {'SSE' if is_sse else 'socket'}": partial(unlimited, rig, is_sse=is_sse)
                for name, rig in rigs.items()
                if name != BARE
                for is_sse in (False, True)
            }
            show_unlimited(interleaved(ways, options.rounds))
