"""How much of a resent history is known again? Recorded sessions of real clients, played with this server's answers.

    python -m bench wires [--recordings FOLDER] [--only NAME …] [--engine scripted|llamacpp|hollow]

Each folder below FOLDER (default: tests/golden/wires) is a session as a client sent it (`bench/replay.py`). Everything
after the first turn of a conversation is counted: what was new to the prompt, what was computed for it, and how much
of what had been there before was taken over. With the scripted engine these are Segue's own counters; in front of a
real llama.cpp (SmolLM2) or a real vLLM without a model (`bench/hollow`) they are what the engine itself says of its
cache. Those write what they like, so there the client's calls are the recorded ones after the engine's own words.
The exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from bench.exchange import Body, ExchangeFailed, Reply, exchange
from bench.hollow.server import hollow_vllm, write_model
from bench.peer import server
from bench.replay import TURN_PATHS, Recorded, Recording, body_for, finds_tools, free_body_for, load
from segue_bench.client import ClientConnection, local
from segue_bench.rounds import print_table
from segue_bench.server import (
    ScriptedModel,
    ServerCounters,
    ServerOptions,
    ServerProcess,
    read_counters,
    serve_in,
)
from segue_embedded.weights import find_weights
from tests.engines.llama_listener import KEY, llama_server

RECORDINGS = Path(__file__).parents[1] / "tests" / "golden" / "wires"
# Per new token, and per new item; what is taken over of what was there.
COMPUTED_MAX, ITEMS_MAX, REUSED_MIN = 1.01, 1.05, 0.99
CHAT = TURN_PATHS[1]
# What an engine computes again each turn however well its cache is used: the last token that was sampled was never
# computed, and vLLM shares whole blocks.
SLACK_TOKENS = {"scripted": 0, "llamacpp": 2, "hollow": 129}
# What a free engine may say in a turn, and the context that a llama.cpp of ours has.
FREE_TOKENS = 24
CONTEXT_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class Played:
    """One request after the first of its conversation, in tokens and items."""

    recording: str
    number: int
    prompt: int
    # Of the prompt: what was there before (the last prompt and its answer), and what is new.
    known: int
    new: int
    computed: int
    reused: int
    items_new: int
    items: int


@dataclass(frozen=True, slots=True)
class Session:
    """A recording, summed up."""

    name: str
    api: str
    turns: int
    prompt_last: int
    new: int
    computed: int
    reused_share: float
    items_new: int
    items: int
    slack: int = 0

    @property
    def computed_per_new(self) -> float:
        return max(0, self.computed - self.slack) / self.new

    @property
    def items_per_new(self) -> float:
        return self.items / self.items_new

    @property
    def is_held(self) -> bool:
        computed, items = self.computed_per_new, self.items_per_new
        return computed <= COMPUTED_MAX and items <= ITEMS_MAX and self.reused_share >= REUSED_MIN


def model_of(conversation: int) -> str:
    return f"model-{conversation}"


@contextmanager
def scripted_server(recording: Recording, *flags: str) -> Iterator[ServerProcess]:
    """A server whose models answer as the recording says, one for each of its conversations."""
    models = [
        ScriptedModel(model_of(number), msgspec.json.encode(script), 0)
        for number, script in enumerate(recording.scripts())
    ]
    with tempfile.TemporaryDirectory(prefix="segue-wires-") as name:
        options = ServerOptions(models, ("--context-tokens", "1000000", *flags))
        with serve_in(Path(name), options) as process:
            yield process


def play(recording: Recording, process: ServerProcess, *, is_free: bool = False) -> list[Played]:
    """All requests of a recording, one after the other, as the client would have sent them to this server.

    A free engine says what it likes, and what it computed is what it says itself.
    """
    address = local(process.port)
    connection = ClientConnection(address)
    played = []
    for number, request in enumerate(recording.requests):
        body = json.dumps(_fields(request, is_free=is_free)).encode()
        before = read_counters(address)
        try:
            request.reply = exchange(connection, request.path, body, request.headers)
        except ExchangeFailed:
            # A side call for a tool that this server does not run; the session goes on without it.
            if any(other.parent is request for other in recording.requests):
                raise
            continue
        after = read_counters(address)
        assert before is not None
        assert after is not None
        if request.parent is not None:
            counted = _counted(recording.name, number, request, after.since(before))
            played.append(_by_engine(counted, request) if is_free else counted)
    connection.close()
    return played


def _fields(request: Recorded, *, is_free: bool) -> Body:
    model = model_of(request.conversation)
    fields = free_body_for(request, model, FREE_TOKENS) if is_free else body_for(request, model)
    if request.path == CHAT and fields.get("stream"):
        # Not every client asks for the count of tokens, which we need.
        fields["stream_options"] = {"include_usage": True}
    return fields


def _counted(name: str, number: int, request: Recorded, counted: ServerCounters) -> Played:
    reply = request.reply
    assert reply is not None
    known = known_tokens(request)
    return Played(
        recording=name,
        number=number,
        prompt=reply.prompt_tokens,
        known=known,
        new=reply.prompt_tokens - known,
        computed=round(counted.tokens_tokenized),
        reused=round(counted.tokens_reused),
        items_new=sum(map(items_of, request.messages[len(_parent(request).messages) :])),
        items=round(counted.items_validated),
    )


def _by_engine(counted: Played, request: Recorded) -> Played:
    """What the engine itself says: its cache holds whole blocks, so a block may be computed again."""
    reply, said = request.reply, request.messages[len(_parent(request).messages) :]
    assert reply is not None
    cached = reply.cached_tokens or 0
    known = counted.known
    if finds_tools(said):
        # The client put a call after the words, so they are not the answer any more.
        parent = _parent(request).reply
        assert parent is not None
        known = parent.prompt_tokens
    return replace(
        counted,
        known=known,
        new=reply.prompt_tokens - known,
        computed=reply.prompt_tokens - cached,
        reused=cached,
    )


def _parent(request: Recorded) -> Recorded:
    assert request.parent is not None
    return request.parent


def known_tokens(request: Recorded) -> int:
    """The prompt before, and the answer to it if the client sends it back."""
    parent = _parent(request)
    said: Reply | None = parent.reply
    assert said is not None
    goes_on = request.messages[len(parent.messages)]["role"] == "assistant"
    return said.prompt_tokens + (said.output_tokens if goes_on else 0)


def items_of(message: Body) -> int:
    """How many items of a conversation a message is: results, calls and thoughts each, and its other content."""
    content = message.get("content")
    blocks = [{"type": "text"}] if isinstance(content, str) and content else content or []
    apart = ("tool_result", "tool_use", "thinking")
    separate = sum(block["type"] in apart for block in blocks)
    thoughts = any(message.get(key) for key in ("reasoning_content", "reasoning"))
    calls = len(message.get("tool_calls") or ())
    return separate + (separate < len(blocks)) + thoughts + calls


def summed(recording: Recording, played: Sequence[Played], engine: str = "scripted") -> Session:
    """All turns of a recording but the first of each conversation."""
    slack = SLACK_TOKENS[engine] * len(played)
    known = sum(one.known for one in played)
    return Session(
        recording.name,
        recording.api,
        len(played),
        played[-1].prompt,
        sum(one.new for one in played),
        sum(one.computed for one in played),
        min(1.0, (slack + sum(min(one.reused, one.known) for one in played)) / known),
        sum(one.items_new for one in played),
        sum(one.items for one in played),
        slack,
    )


def recordings(folder: Path, only: Sequence[str] = ()) -> list[Recording]:
    """Those that have a turn after the first, by name."""
    found = [load(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    return [
        recording
        for recording in found
        if any(request.parent for request in recording.requests)
        and (not only or any(word in recording.name for word in only))
    ]


@contextmanager
def free_server(engine: str, conversations: int) -> Iterator[ServerProcess]:
    """A server in front of a real engine, with a name for each conversation."""
    names = [flag for n in range(conversations) for flag in ("--model", model_of(n))]
    with ExitStack() as stack:
        if engine == "hollow":
            vllm = stack.enter_context(hollow_vllm())
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_model(folder)
            flags = ["--engine", "vllm", "--engine-url", vllm.url, "--tokenizer", str(folder)]
        else:
            llama = stack.enter_context(llama_server(1, context_tokens=CONTEXT_TOKENS))
            flags = ["--engine", "llamacpp", "--engine-url", llama.url, "--engine-key", KEY]
            flags += ["--tokenizer", str(find_weights("smollm2"))]
        yield stack.enter_context(server(None, *flags, *names, is_pinned=False))


COLUMNS = (
    "client {}|API {}|turns {}|prompt {:,}|new tokens {:,}|computed {:,}|computed per new {:.3f}"
    "|reused {:.2%}|items per new {:.2f}|{}"
)


def print_sessions(sessions: Sequence[Session]) -> None:
    """One line a recording."""
    print_table(
        COLUMNS,
        [
            (
                one.name,
                one.api,
                one.turns,
                one.prompt_last,
                one.new,
                one.computed,
                one.computed_per_new,
                one.reused_share,
                one.items_per_new,
                "held" if one.is_held else "missed",
            )
            for one in sessions
        ],
    )


def played_free(
    engine: str, found: Sequence[Recording]
) -> Iterator[tuple[Recording, list[Played]]]:
    """All of them in front of one engine."""
    count = 1 + max(request.conversation for one in found for request in one.requests)
    with free_server(engine, count) as process:
        for recording in found:
            yield recording, play(recording, process, is_free=True)


def played_scripted(found: Sequence[Recording]) -> Iterator[tuple[Recording, list[Played]]]:
    """Each in front of its own script."""
    for recording in found:
        with scripted_server(recording) as process:
            yield recording, play(recording, process)


def main(arguments: Sequence[str]) -> int:
    """Play all recordings; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench wires", description=__doc__)
    parser.add_argument("--recordings", type=Path, default=RECORDINGS, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="parts of names")
    parser.add_argument("--engine", choices=("scripted", "llamacpp", "hollow"), default="scripted")
    parser.add_argument("--each", action="store_true", help="print each request too")
    options = parser.parse_args(arguments)
    found = recordings(options.recordings, options.only)
    if not found:
        parser.error(f"--recordings: there is none in {options.recordings}")
    is_scripted = options.engine == "scripted"
    results = played_scripted(found) if is_scripted else played_free(options.engine, found)
    sessions = []
    for recording, played in results:
        if options.each:
            print(*played, sep="\n", flush=True)
        sessions.append(summed(recording, played, options.engine))
    print_sessions(sessions)
    return int(any(not one.is_held for one in sessions))
