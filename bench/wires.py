"""How much of a resent history is known again? Recorded sessions of real clients, played with this server's answers.

    python -m bench wires [--only NAME …] [--engine scripted|llamacpp|hollow]

Each file of tests/golden/wires is a session as a client sent it (`bench/replay.py`). Everything after the first turn of
a conversation is counted: what was new to the prompt, what was computed for it, and how much of what had been there
before was taken over. With the scripted engine these are Segue's own counters; in front of a real llama.cpp (SmolLM2)
or a real vLLM without a model (`bench/hollow`) they are what the engine itself says of its cache. Those say what they
like: their words go back as they are, and the outputs of tools as the user's text. The exit status is 1 if a bar is
missed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
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
from tests.clients.recordings import recordings
from tests.engines.llama_listener import KEY, llama_server

# Per new token, and per new item; what is taken over of what was there.
COMPUTED_MAX, ITEMS_MAX, REUSED_MIN = 1.01, 1.05, 0.99
CHAT = TURN_PATHS[1]
# An engine's cache shares blocks of so many tokens, and the last token that was sampled was never computed: what no
# cache could have held is not charged.
BLOCK_TOKENS = {"llamacpp": 1, "hollow": 128}
# The name of a free engine's model, and what it may say in a turn; the context that SmolLM2 has.
FREE, FREE_TOKENS = "smollm2", 24
CONTEXT_TOKENS = 8_192


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

    @property
    def computed_per_new(self) -> float:
        return self.computed / self.new

    @property
    def items_per_new(self) -> float:
        return self.items / self.items_new

    @property
    def is_held(self) -> bool:
        computed, items = self.computed_per_new, self.items_per_new
        return computed <= COMPUTED_MAX and items <= ITEMS_MAX and self.reused_share >= REUSED_MIN


def model_of(request: Recorded, recording: Recording) -> str:
    """A name for each conversation of each recording: each has a script of its own."""
    return f"{recording.name}-{request.conversation}"


@contextmanager
def scripted_server(found: Sequence[Recording]) -> Iterator[ServerProcess]:
    """A server whose models answer as the recordings say."""
    models = [
        ScriptedModel(f"{recording.name}-{number}", msgspec.json.encode(script), 0)
        for recording in found
        for number, script in enumerate(recording.scripts())
    ]
    with tempfile.TemporaryDirectory(prefix="segue-wires-") as name:
        options = ServerOptions(models, ("--context-tokens", "1000000"))
        with serve_in(Path(name), options) as process:
            yield process


def play(recording: Recording, process: ServerProcess, engine: str = "scripted") -> list[Played]:
    """All requests of a recording, one after the other, as the client would have sent them to this server.

    Engines other than the scripted one say what they like, and what they computed is what they say themselves.
    """
    is_free = engine != "scripted"
    address = local(process.port)
    connection = ClientConnection(address)
    played = []
    for number, request in enumerate(recording.requests):
        body = json.dumps(_fields(recording, request, is_free=is_free)).encode()
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
            played.append(_by_engine(counted, request, engine) if is_free else counted)
    connection.close()
    return played


def _fields(recording: Recording, request: Recorded, *, is_free: bool) -> Body:
    scripted = partial(body_for, request, model_of(request, recording))
    fields = free_body_for(request, FREE, FREE_TOKENS) if is_free else scripted()
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


def _by_engine(counted: Played, request: Recorded, engine: str) -> Played:
    """What the engine itself says, against what its cache could hold of what was there."""
    reply, parent = request.reply, _parent(request)
    assert reply is not None
    assert parent.reply is not None
    known, block = counted.known, BLOCK_TOKENS[engine]
    if finds_tools(request.messages[len(parent.messages) :]):
        # The client put a call after the words, so they are not the answer any more.
        known = parent.reply.prompt_tokens
    held = (known - 1) // block * block
    cached = reply.cached_tokens or 0
    new = reply.prompt_tokens - known
    return replace(
        counted, known=held, new=new, computed=new + max(0, held - cached), reused=cached
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


def summed(recording: Recording, played: Sequence[Played]) -> Session:
    """All turns of a recording but the first of each conversation."""
    return Session(
        recording.name,
        recording.api,
        len(played),
        played[-1].prompt,
        sum(one.new for one in played),
        sum(one.computed for one in played),
        sum(min(one.reused, one.known) for one in played) / sum(one.known for one in played),
        sum(one.items_new for one in played),
        sum(one.items for one in played),
    )


def sessions_of(only: Sequence[str] = ()) -> list[Recording]:
    """Those that have a turn after the first, by parts of their names."""
    names = [name for name in recordings() if not only or any(word in name for word in only)]
    found = [load(name) for name in names]
    return [one for one in found if any(request.parent for request in one.requests)]


@contextmanager
def free_server(engine: str) -> Iterator[ServerProcess]:
    """A server in front of a real engine."""
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
        yield stack.enter_context(server(None, *flags, "--model", FREE, is_pinned=False))


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


def main(arguments: Sequence[str]) -> int:
    """Play all recordings; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench wires", description=__doc__)
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="parts of names")
    parser.add_argument("--engine", choices=("scripted", "llamacpp", "hollow"), default="scripted")
    parser.add_argument("--each", action="store_true", help="print each request too")
    options = parser.parse_args(arguments)
    if not (found := sessions_of(options.only)):
        parser.error(f"--only: no recording has {' or '.join(options.only)} in its name")
    is_free = options.engine != "scripted"
    sessions = []
    with free_server(options.engine) if is_free else scripted_server(found) as process:
        for recording in found:
            played = play(recording, process, options.engine)
            if options.each:
                print(*played, sep="\n", flush=True)
            sessions.append(summed(recording, played))
    print_sessions(sessions)
    return int(any(not one.is_held for one in sessions))
