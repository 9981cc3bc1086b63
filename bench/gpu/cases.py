"""What is measured, in which order? Stages of engines that fit on the card together, and the cases of each.

A case is one agent loop: a model, a way, a context, so many conversations at once. Where one conversation is measured
the ways take turns, in two rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from threading import BrokenBarrierError
from typing import Any
from urllib.request import urlopen

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bench.gpu.agents import AGENT_WAYS
from bench.gpu.servers import Servers
from bench.gpu.talk import (
    ChatTalk,
    IdsTalk,
    Place,
    ResponsesTalk,
    SocketTalk,
    StoredSocketTalk,
    Talk,
    Turn,
    tokenizer,
)
from segue_bench.figures import percentile
from segue_bench.rounds import rotated
from segue_bench.workload import WorkloadMaker, WorkloadShape

# By each way: what stands in front of vLLM, and how the client talks.
PLAIN_WAYS: dict[str, tuple[str, type[Talk]]] = {
    "ids": ("", IdsTalk),
    "chat": ("", ChatTalk),
    "responses": ("", ResponsesTalk),
    "agentic": ("agentic", SocketTalk),
    "http-off": ("segue-off", ResponsesTalk),
    "http": ("segue", ResponsesTalk),
    "ws": ("segue", SocketTalk),
    "ws-stored": ("segue", StoredSocketTalk),
}
WAYS = PLAIN_WAYS | AGENT_WAYS
SHAPE = WorkloadShape(
    instructions_bytes=0, tools_bytes=20_000, tool_output_bytes=2_000, output_tokens=100
)
# Source text, as both vocabularies cut it; tools and instructions are counted too.
BYTES_PER_TOKEN = 3.8
HEAD_TOKENS = 5_000
CASE_S_MAX = 240.0
# vLLM counts a request just after its last event.
METRICS_S = 0.3
# Where the flags say what is measured.
CHOSEN_WAYS = ("ids", "ws")
WAITED_IN_VAIN = "another conversation failed"


class Case(Struct, frozen=True):
    """One loop."""

    engine: str
    way: str
    context: int
    conversations: int = 1
    turns: int = 10
    round: int = 0


class Figures(Struct, frozen=True, kw_only=True):
    """What came of it; times in milliseconds but for the loop's."""

    case: Case
    failed: str = ""
    loop_s: float = 0.0
    ttft_ms: list[float] = []
    turn_ms: list[float] = []
    tokens_per_s: float = 0.0
    prompt_first: int = 0
    prompt_last: int = 0
    computed_per_turn: float | None = None
    output_per_turn: float = 0.0
    sent_per_turn: float = 0.0
    opening_s: float = 0.0
    # A turn: gateway, front (vLLM's API processes), core (vLLM's engine).
    cpu_ms: dict[str, float] = {}
    # A request, by vLLM's own counters: queued, prefill, decode; means, and how many there were.
    engine_ms: dict[str, float] = {}


class Stage(Struct, frozen=True):
    """Engines that run at the same time, and what is asked of them."""

    engines: tuple[str, ...]
    cases: list[Case]


def alone(
    engine: str, ways: Sequence[str], contexts: Sequence[int], rounds: int = 2
) -> Iterator[Case]:
    """One conversation."""
    for context in contexts:
        for number in range(rounds):
            for way in rotated(list(ways), 3 * number):
                yield Case(engine, way, context, round=number)


def crowd(engine: str, ways: Sequence[str], conversations: int, turns: int) -> Iterator[Case]:
    """Many conversations at 20k tokens."""
    for way in ways:
        yield Case(engine, way, 20_000, conversations, turns)


def agent_cases(rounds: int = 2) -> list[Case]:
    """Claude Code's loop at 100k tokens through vLLM's own APIs, its Rust front end, and Segue."""
    rust = [way for way in AGENT_WAYS if not way.startswith("cc-messages")]
    return [
        *alone("plain", tuple(AGENT_WAYS), [100_000], rounds),
        *alone("rust", rust, [100_000], rounds),
    ]


class Choice(Struct, frozen=True):
    """What the flags ask for instead of everything."""

    ways: Sequence[str] = CHOSEN_WAYS
    # Engine and way, where not every way is played on every engine.
    pairs: Sequence[tuple[str, str]] = ()
    contexts: Sequence[int] = (20_000,)
    conversations: Sequence[int] = (1,)
    turns: int = 10
    rounds: int = 3

    def cases(self, engines: Sequence[str]) -> list[Case]:
        """Round by round, so that all cases have as many where the time ends; they take turns within each."""
        return [
            Case(engine, way, context, conversations, self.turns, number)
            for number in range(self.rounds)
            for context in self.contexts
            for conversations in self.conversations
            for engine, way in self._pairs(engines, number)
        ]

    def _pairs(self, engines: Sequence[str], number: int) -> list[tuple[str, str]]:
        if self.pairs:
            return [pair for pair in rotated(list(self.pairs), number) if pair[0] in engines]
        return [(engine, way) for engine in engines for way in rotated(list(self.ways), number)]


def stages() -> list[Stage]:
    """Everything."""
    every, own = tuple(PLAIN_WAYS), ("chat", "responses")
    short = ("ids", "chat", "responses", "agentic", "http", "ws")
    first = [
        *alone("plain", every, [100_000, 20_000]),
        *alone("rust", ("chat", "ws", "ids"), [100_000, 20_000]),
        *alone("tuned", ("chat", "responses"), [100_000, 20_000]),
        *alone("plain", every, [1_000], rounds=1),
        *alone("rust", ("chat", "ws"), [1_000], rounds=1),
        *crowd("plain", short, 8, 10),
        *crowd("rust", ("chat", "ws"), 8, 10),
        *crowd("tuned", own, 8, 10),
    ]
    second = [
        *alone("fast", short, [100_000, 20_000, 1_000]),
        *alone("fast-rust", ("ids", "chat", "ws"), [100_000, 20_000]),
        *crowd("real", (*short, "http-off"), 32, 5),
        *crowd("real-tuned", (*own, "ws"), 32, 5),
        *crowd("real-rust", ("chat", "ws"), 32, 5),
        *alone("real", ("ids", "chat", "responses", "http", "ws"), [100_000], rounds=1),
        *alone("real-rust", ("chat",), [100_000], rounds=1),
    ]
    return [
        Stage(("plain", "rust", "tuned"), first),
        Stage(("fast", "fast-rust", "real", "real-rust", "real-tuned"), second),
    ]


# --- one case -------------------------------------------------------------------------------------


def measure(case: Case, servers: Servers, seconds: float = CASE_S_MAX) -> Figures:
    """Play it; each conversation in a process of its own. It fails if it takes longer than these seconds."""
    until = time.monotonic() + seconds
    gateway, talk = WAYS[case.way]
    maker = WorkloadMaker(SHAPE, 1)
    place = Place(
        f"http://127.0.0.1:{servers.port(case.engine, gateway)}",
        msgspec.json.decode(maker.tools),
        servers.model(case.engine),
        SHAPE.output_tokens,
        # Real weights are sampled; the written model always says the same.
        0.7 if servers.model(case.engine).name == "real" else 0.0,
    )
    if talk is IdsTalk:
        tokenizer(place.tokenizer)
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(case.conversations + 1)
    clients = []
    for number in range(case.conversations):
        ours, theirs = fork.Pipe(False)
        arguments = (talk, place, case, number, barrier, theirs)
        process = fork.Process(target=_converse, args=arguments, daemon=True)
        process.start()
        clients.append((process, ours))
    try:
        barrier.wait(_left(until))
        counted = _counters(servers.port(case.engine))
        before = servers.cpu_s(case.engine, gateway)
        barrier.wait(_left(until))
        told = [ours.recv() if ours.poll(_left(until)) else "too slow" for _, ours in clients]
        after = servers.cpu_s(case.engine, gateway)
        time.sleep(METRICS_S)
        engine_ms = _between(counted, _counters(servers.port(case.engine)))
    except BrokenBarrierError:  # By a client that failed, which says why, or by the time.
        said = [ours.recv() for _, ours in clients if ours.poll(0.1)]
        told = [words for words in said if words != WAITED_IN_VAIN] or ["too slow"]
    for process, _ in clients:
        process.terminate()
        process.join()
    wrong = [words for words in told if isinstance(words, str)]
    loops = [loop for loop in told if not isinstance(loop, str)]
    if wrong or not loops:
        return Figures(case=case, failed=wrong[0] if wrong else "no answer")
    turns = case.turns * case.conversations
    cpu_ms = {name: round((after[name] - before[name]) * 1e3 / turns, 2) for name in after}
    return replace(_summed(case, loops, cpu_ms), engine_ms=engine_ms)


_COUNTER = re.compile(
    r"^vllm:request_(queue|prefill|decode)_time_seconds_(sum|count)(?:{[^}]*})? (\S+)", re.MULTILINE
)


def _counters(port: int) -> dict[tuple[str, str], float]:
    """What vLLM has counted so far, over all its engines."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    sums: dict[tuple[str, str], float] = {}
    for name, kind, value in _COUNTER.findall(text):
        sums[name, kind] = sums.get((name, kind), 0.0) + float(value)
    return sums


def _between(
    before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]
) -> dict[str, float]:
    """Means of the requests between, in ms; nothing where none was counted."""
    means: dict[str, float] = {}
    for name in {name for name, _ in after}:
        count = after[name, "count"] - before.get((name, "count"), 0.0)
        if count:
            spent = after[name, "sum"] - before.get((name, "sum"), 0.0)
            means |= {name: round(spent * 1e3 / count, 2), "requests": count}
    return means


def _left(until: float) -> float:
    return max(0.0, until - time.monotonic())


def _converse(
    talk_class: type[Talk], place: Place, case: Case, number: int, barrier: Any, pipe: Connection
) -> None:
    """One conversation: its history, a first turn that is not measured, and the loop."""
    try:
        talk = talk_class(place)
        opening_s = _open(talk, case.context, number)
        texts = WorkloadMaker(SHAPE, int.from_bytes(os.urandom(6))).workload(0, 1.0, case.turns)
        barrier.wait(CASE_S_MAX)
        barrier.wait(CASE_S_MAX)
        began, turns = time.perf_counter(), []
        for text in texts.outputs:
            talk.say("user", text)
            turns.append(talk.turn())
        pipe.send((opening_s, time.perf_counter() - began, turns))
    except BrokenBarrierError:
        pipe.send(WAITED_IN_VAIN)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        barrier.abort()


def _open(talk: Talk, context: int, number: int) -> float:
    """The history: users and assistants in turn, the same by every way."""
    size = max(0, context - HEAD_TOKENS) * BYTES_PER_TOKEN / SHAPE.tool_output_bytes
    texts = WorkloadMaker(SHAPE, 1 + number).workload(0, 1.0, 2 * round(size / 2)).outputs
    for place, text in enumerate(texts):
        talk.say("assistant" if place % 2 else "user", text)
    talk.say("user", f"Conversation {number}: go on.")
    return talk.turn().turn_s


def _summed(
    case: Case, told: Sequence[tuple[float, float, list[Turn]]], cpu_ms: dict[str, float]
) -> Figures:
    turns = [turn for _, _, loop in told for turn in loop]
    speeds = [(turn.output - 1) / turn.decode_s for turn in turns if turn.decode_s > 0]
    computed = [turn.prompt - turn.cached for turn in turns if turn.cached is not None]
    kept = turns if len(turns) <= 40 else random.Random(1).sample(turns, 40)
    return Figures(
        case=case,
        loop_s=round(statistics.median(loop_s for _, loop_s, _ in told), 4),
        ttft_ms=[round(turn.ttft_s * 1e3, 2) for turn in kept],
        turn_ms=[round(turn.turn_s * 1e3, 2) for turn in kept],
        tokens_per_s=round(statistics.median(speeds), 1) if speeds else 0.0,
        prompt_first=turns[0].prompt,
        prompt_last=told[0][2][-1].prompt,
        computed_per_turn=round(statistics.mean(computed), 1) if computed else None,
        output_per_turn=round(statistics.mean(turn.output for turn in turns), 1),
        sent_per_turn=round(statistics.mean(turn.sent for turn in turns)),
        opening_s=round(statistics.median(opening_s for opening_s, _, _ in told), 3),
        cpu_ms=cpu_ms,
    )


def in_words(figures: Figures) -> str:
    """One line for people."""
    case = figures.case
    head = f"{case.engine:<11}{case.way:<11}{case.context:>7,} x{case.conversations:<3}"
    if figures.failed:
        return f"{head} FAILED {figures.failed[:300]}"
    ttft = f"{statistics.median(figures.ttft_ms):7.1f}"
    late = f"{percentile(figures.ttft_ms, 0.95):7.1f}"
    cpu = " ".join(f"{name} {ms:.1f}" for name, ms in figures.cpu_ms.items())
    return (
        f"{head} loop {figures.loop_s:6.2f} s  ttft {ttft} (p95 {late})  turn"
        f" {statistics.median(figures.turn_ms):7.1f}  {figures.tokens_per_s:5.0f} tok/s  prompt"
        f" {figures.prompt_first}..{figures.prompt_last}  new {figures.computed_per_turn}  out"
        f" {figures.output_per_turn}  cpu {cpu}  sent {figures.sent_per_turn / 1e3:.0f} kB"
        f"  opening {figures.opening_s:.2f} s"
    )
