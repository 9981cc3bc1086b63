"""How much work is done again? Recorded agent sessions, replayed by each way, and what a server did for what was new.

The sessions (`sessions.py`) are replayed turn by turn, with their resets, forks and sub-agents; texts are words drawn
by seed with exactly the recorded sharing. The engine is a replica that counts blocks (`segue_fleet.replica`) and takes
no time. What the server received, validated and tokenized is read from its own counters, what the engine computed from
the usage of each turn. A *way* has servers of its own, so that it begins with empty caches.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_args

import msgspec

import segue.vocabularies
from segue.vocabularies.gguf import read_gguf
from segue_bench.client import ClientConnection, ConnectionFailed, frame, local, open_websocket
from segue_bench.rival import agentic
from segue_bench.server import LISTENING, ServerCounters, ServerProcess, read_counters, spawn
from segue_bench.sessions import (
    MESSAGE_TOKENS,
    Answered,
    Part,
    Said,
    SeededText,
    Session,
    Step,
    plan,
)
from segue_bench.ways import (
    ResponseSummary,
    Stopwatch,
    TurnFailed,
    TurnTiming,
    http_turn,
    socket_turn,
)
from segue_bench.workload import user_message

TraceWay = Literal["ws", "http-chained", "http-full", "json-chained", "json-full"]
TRACE_WAYS: tuple[TraceWay, ...] = get_args(TraceWay)
Kind = Literal["continuation", "reset", "root"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MODEL = "counted"
VOCABULARY = Path(segue.vocabularies.__path__[0]) / "smollm2.gguf"
# A whole word of SmolLM2's vocabulary, with the space before it.
WORD = re.compile("\u0120[a-z]{3,12}")
STOP = "<|im_end|>"
TOKENS_MAX = 1 << 30
# Blocks of the engine, before the scale.
BLOCK_TOKENS = 16
SETTLE_S_MAX = 2.0
LOST = "previous_response_not_found"
STATELESS = ("--render-cache-bytes-max", "0", "--piece-cache", "false")


@dataclass(frozen=True, slots=True)
class Words:
    """Words that are one token each, by text and by id."""

    texts: list[str]
    ids: list[int]
    stop: int


def vocabulary_words() -> Words:
    """Those of SmolLM2's vocabulary that are one token with a space before them and without."""
    tokens = msgspec.convert(read_gguf(VOCABULARY)["tokenizer.ggml.tokens"], list[str])
    known = set(tokens)
    found = {
        token[1:]: id
        for id, token in enumerate(tokens)
        if WORD.fullmatch(token) and token[1:] in known
    }
    return Words(list(found), list(found.values()), tokens.index(STOP))


# --- servers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TracedServer:
    """What a client talks to, and the Segue that counts: the same one, or the endpoint that a peer asks."""

    port: int
    counted: ServerProcess
    is_peer: bool = False

    def counters(self) -> ServerCounters:
        counters = read_counters(local(self.counted.port))
        assert counters is not None, "our own server has counters"
        return counters


@contextmanager
def traced_server(words: Words, scale: int, *, is_peer: bool) -> Iterator[TracedServer]:
    """A Segue in front of an engine of its own; or a peer in front of a Segue that keeps nothing."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="segue-trace-")))
        listed = folder / "words.json"
        listed.write_bytes(msgspec.json.encode({"ids": words.ids, "stop": words.stop}))
        block = max(1, BLOCK_TOKENS // scale)
        command = [
            *("-m", "segue_fleet.replica", "--model", MODEL, "--words", str(listed)),
            *("--block", str(block), "--kv-tokens", str(TOKENS_MAX), "--slots", "64"),
            *("--prefill-tps", str(TOKENS_MAX), "--decode-tps", str(TOKENS_MAX)),
        ]
        (folder / "engine").mkdir()
        replica = stack.enter_context(spawn(command, r" at http://\S+:(\d+)", folder / "engine"))
        command = [
            *("-m", "segue_cli.cli", "serve", "--port", "0", "--config", "none"),
            *("--engine", "vllm", "--engine-url", f"http://127.0.0.1:{replica.port}"),
            *("--model", MODEL, "--tokenizer", str(VOCABULARY)),
            *("--store", f"sqlite:///{folder}/trace.db"),
            *(STATELESS if is_peer else ()),
        ]
        own = stack.enter_context(spawn(command, LISTENING, folder))
        port = own.port
        if is_peer:
            port = stack.enter_context(agentic(own.port, is_pinned=False)).port
        yield TracedServer(port, own, is_peer)


# --- one session by one way -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request, and the bytes of its parts: all items that are sent, those that are new, tools and instructions."""

    data: bytes
    items_bytes: int
    new_bytes: int
    new_items: int
    head_bytes: int


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """One turn as it was: tokens of its prompt, computed and new ones, and how long until the first text."""

    step: Step
    request: TraceRequest
    input_tokens: int
    computed_tokens: int
    new_tokens: int
    ttft_s: float
    # Whether the server had lost its parent, so that the whole history was sent.
    is_restarted: bool

    @property
    def kind(self) -> Kind:
        return kind_of_step(self.step)


def kind_of_step(step: Step) -> Kind:
    """A fork goes on from all of its parent, as a continuation does."""
    return "continuation" if step.kind == "fork" else step.kind


class Client(Protocol):
    """How requests of a session are sent."""

    def send(self, chain: int, request: TraceRequest) -> TurnTiming:
        """One turn of a chain, which is named by its first step."""

    def close(self) -> None:
        """The session is over."""


class SocketClient:
    """A WebSocket for each chain, as an agent and its sub-agents have."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._chains: dict[int, ClientConnection] = {}

    def send(self, chain: int, request: TraceRequest) -> TurnTiming:
        if chain not in self._chains:
            self._chains[chain] = open_websocket(local(self._port))
        watch = Stopwatch()
        data = frame(request.data)
        watch.ready()
        return socket_turn(self._chains[chain], watch, data)

    def close(self) -> None:
        for connection in self._chains.values():
            connection.close()


class HttpClient:
    """One connection, kept open; a server may close it while it is idle, and then another one is opened."""

    def __init__(self, port: int, *, is_streamed: bool) -> None:
        self._address = local(port)
        self._connection = ClientConnection(self._address)
        self._is_streamed = is_streamed

    def send(self, chain: int, request: TraceRequest) -> TurnTiming:
        try:
            return self._send_once(request)
        except ConnectionFailed:
            self._connection.close()
            self._connection = ClientConnection(self._address)
            return self._send_once(request)

    def _send_once(self, request: TraceRequest) -> TurnTiming:
        watch = Stopwatch()
        watch.ready()
        return http_turn(self._connection, watch, request.data, is_streamed=self._is_streamed)

    def close(self) -> None:
        self._connection.close()


class Replay:
    """One session by one way: requests from steps, and what was answered to each."""

    def __init__(self, session: Session, way: TraceWay, words: SeededText, client: Client) -> None:
        self._session = session
        self._way = way
        self._is_chained = way in ("ws", "http-chained", "json-chained")
        self._words = words
        self._client = client
        self._answers: dict[int, ResponseSummary] = {}
        self._chains: dict[int, int] = {}
        self._heads: dict[Said, bytes] = {}
        self._said: dict[Said, bytes] = {}

    def turn(self, step: Step) -> TracedTurn:
        """Send it, and read its turn."""
        parent = step.parent
        self._chains[step.number] = step.number if parent is None else self._chains[parent]
        request = self._request(step, is_chained=self._is_chained)
        is_restarted = False
        chain = self._chains[step.number]
        try:
            timing = self._client.send(chain, request)
        except TurnFailed as error:
            if not self._is_chained or step.parent is None or LOST not in str(error):
                raise
            # As clients do (docs/protocol.md).
            request = self._request(step, is_chained=False)
            is_restarted = True
            timing = self._client.send(chain, request)
        response = timing.last.response
        if response is None or response.usage is None:
            raise TurnFailed("the last event has no response with usage")
        self._answers[step.number] = response
        used = response.usage
        return TracedTurn(
            step,
            request,
            used.input_tokens,
            used.input_tokens - used.input_tokens_details.cached_tokens,
            self._new_tokens(step, used.input_tokens),
            timing.ttft_s,
            is_restarted,
        )

    def _new_tokens(self, step: Step, input_tokens: int) -> int:
        """By how much the prompt grew beyond its parent and its answer; else the text that nothing has had yet."""
        if step.kind == "root":
            return input_tokens
        if kind_of_step(step) == "continuation" and step.parent is not None:
            before = self._answers[step.parent].usage
            assert before is not None, "it was answered with usage"
            return input_tokens - before.input_tokens - before.output_tokens
        return step.history[-1].tokens + MESSAGE_TOKENS

    def _request(self, step: Step, *, is_chained: bool) -> TraceRequest:
        parts = step.new if is_chained else step.history
        items = [item for part in parts for item in self._items(part)]
        fresh = self._items(step.history[-1])
        head = self._head(step.head)
        given = b",".join(items)
        fields = [head, b'"input":[' + given + b"]", *self._fields(step, is_chained=is_chained)]
        data = b"{" + b",".join(fields) + b"}"
        return TraceRequest(data, len(given), sum(map(len, fresh)), len(fresh), len(head))

    def _fields(self, step: Step, *, is_chained: bool) -> Iterator[bytes]:
        if self._way == "ws":
            yield b'"type":"response.create"'
        elif self._way.startswith("http"):
            yield b'"stream":true'
        yield b'"model":"' + MODEL.encode() + b'"'
        is_stored = self._is_chained and self._way != "ws"
        yield b'"store":true' if is_stored else b'"store":false'
        yield b'"max_output_tokens":%d' % step.output_tokens
        if is_chained and step.parent is not None:
            yield b'"previous_response_id":"' + self._answers[step.parent].id.encode() + b'"'

    def _items(self, part: Part) -> list[bytes]:
        if isinstance(part, Answered):
            return [bytes(raw) for raw in self._answers[part.step].output]
        if part not in self._said:
            self._said[part] = user_message(self._words.text(part))
        return [self._said[part]]

    def _head(self, head: Said) -> bytes:
        """Instructions and one tool, in the recorded proportion."""
        if head not in self._heads:
            session = self._session
            words = self._words.text(head).split()
            tools = len(words) * session.tools // max(1, session.tools + session.system)
            tool = {
                "type": "function",
                "name": "run",
                "description": " ".join(words[:tools]),
                "parameters": {"type": "object", "properties": {}},
            }
            value = {"instructions": " ".join(words[tools:]), "tools": [tool]}
            self._heads[head] = msgspec.json.encode(value)[1:-1]
        return self._heads[head]


# --- all sessions by one way ----------------------------------------------------------------------


@dataclass(slots=True)
class TraceTotals:
    """What was counted over all turns of one kind."""

    turns: int = 0
    failed: int = 0
    restarted: int = 0
    received_bytes: float = 0
    sent_bytes: int = 0
    items_bytes: int = 0
    new_bytes: int = 0
    head_bytes: int = 0
    new_items: int = 0
    items_validated: float = 0
    tokens_tokenized: float = 0
    input_tokens: int = 0
    computed_tokens: int = 0
    new_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)

    def add_turn(self, turn: TracedTurn) -> None:
        request = turn.request
        self.turns += 1
        self.restarted += turn.is_restarted
        self.sent_bytes += len(request.data)
        self.items_bytes += request.items_bytes
        self.new_bytes += request.new_bytes
        self.head_bytes += request.head_bytes
        self.new_items += request.new_items
        self.input_tokens += turn.input_tokens
        self.computed_tokens += turn.computed_tokens
        self.new_tokens += turn.new_tokens
        self.ttft_s.append(turn.ttft_s)

    def add_counted(self, counters: ServerCounters) -> None:
        self.received_bytes += counters.bytes_received
        self.items_validated += counters.items_validated
        self.tokens_tokenized += counters.tokens_tokenized


@dataclass(slots=True)
class TraceRun:
    """A way, by a server: totals by kind, and each turn's place in its session with its prompt and TTFT."""

    server: str
    way: TraceWay
    totals: dict[Kind, TraceTotals]
    along: list[tuple[int, int, float]]
    first_failure: str = ""


class Watcher(Protocol):
    """Receives the progress of a run."""

    def began(self, server: str, way: TraceWay) -> None: ...

    def advanced(self) -> None: ...


def replay(
    sessions: Sequence[Session],
    way: TraceWay,
    words: Words,
    scale: int,
    watcher: Watcher,
    *,
    is_peer: bool = False,
) -> TraceRun:
    """All sessions by one way, one after the other."""
    run = TraceRun(
        "agentic-api" if is_peer else "segue", way, {kind: TraceTotals() for kind in KINDS}, []
    )
    watcher.began(run.server, way)
    with traced_server(words, scale, is_peer=is_peer) as server:
        counting = _Counting(server, run)
        for session in sessions:
            client: Client = (
                SocketClient(server.port)
                if way == "ws"
                else HttpClient(server.port, is_streamed=way.startswith("http"))
            )
            played = Replay(session, way, SeededText(words.texts), client)
            try:
                _replay_session(played, plan(session, scale), run, counting, watcher)
            finally:
                client.close()
        counting.close()
    return run


def _replay_session(
    played: Replay, steps: Sequence[Step], run: TraceRun, counting: _Counting, watcher: Watcher
) -> None:
    lost: set[int] = set()
    for step in steps:
        kind = kind_of_step(step)
        needed = {part.step for part in step.history if isinstance(part, Answered)}
        counting.enter(kind)
        try:
            if needed & lost:
                raise TurnFailed("an earlier turn of the chain failed")
            turn = played.turn(step)
        except (TurnFailed, ConnectionFailed) as error:
            lost.add(step.number)
            run.totals[kind].failed += 1
            run.first_failure = run.first_failure or f"{step.kind} {step.number}: {error}"
        else:
            run.totals[kind].add_turn(turn)
            run.along.append((step.number + 1, turn.input_tokens, turn.ttft_s))
            counting.turned()
        watcher.advanced()


class _Counting:
    """Reads the server's counters when the kind of turn changes, and adds what happened to that kind."""

    def __init__(self, server: TracedServer, run: TraceRun) -> None:
        self._server = server
        self._run = run
        self._kind: Kind | None = None
        self._turns = 0
        self._before = server.counters()

    def enter(self, kind: Kind) -> None:
        if kind != self._kind:
            self.close()
            self._kind = kind

    def turned(self) -> None:
        self._turns += 1

    def close(self) -> None:
        """A turn is counted after its last event: wait until all are."""
        if self._kind is None:
            return
        until = time.monotonic() + SETTLE_S_MAX
        now = self._server.counters()
        while now.turns - self._before.turns < self._turns and time.monotonic() < until:
            time.sleep(0.002)
            now = self._server.counters()
        self._run.totals[self._kind].add_counted(now.since(self._before))
        self._before = now
        self._turns = 0
