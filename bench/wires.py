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
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.exchange import Body, Reply, exchange
from bench.replay import Recorded, Recording, body_for, load
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

RECORDINGS = Path(__file__).parents[1] / "tests" / "golden" / "wires"
# Per new token, and per new item; what is taken over of what was there.
COMPUTED_MAX, ITEMS_MAX, REUSED_MIN = 1.01, 1.05, 0.99


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


def play(recording: Recording, process: ServerProcess) -> list[Played]:
    """All requests of a recording, one after the other, as the client would have sent them to this server."""
    address = local(process.port)
    connection = ClientConnection(address)
    played = []
    for number, request in enumerate(recording.requests):
        fields = body_for(request, model_of(request.conversation))
        if recording.api == "Chat" and fields.get("stream"):
            # Not every client asks for the count of tokens, which we need.
            fields["stream_options"] = {"include_usage": True}
        body = json.dumps(fields).encode()
        before = read_counters(address)
        request.reply = exchange(connection, request.path, body, request.headers)
        after = read_counters(address)
        assert before is not None
        assert after is not None
        if request.parent is not None:
            played.append(_counted(recording.name, number, request, after.since(before)))
    connection.close()
    return played


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


def recordings(folder: Path, only: Sequence[str] = ()) -> list[Recording]:
    """Those that have a turn after the first, by name."""
    found = [load(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    return [
        recording
        for recording in found
        if any(request.parent for request in recording.requests)
        and (not only or any(word in recording.name for word in only))
    ]


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
    parser.add_argument("--recordings", type=Path, default=RECORDINGS, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="parts of names")
    parser.add_argument("--each", action="store_true", help="print each request too")
    options = parser.parse_args(arguments)
    sessions = []
    for recording in recordings(options.recordings, options.only):
        with ExitStack() as stack:
            process = stack.enter_context(scripted_server(recording))
            try:
                played = play(recording, process)
            except Exception as error:
                print(f"{recording.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
        if options.each:
            for one in played:
                print(one, flush=True)
        sessions.append(summed(recording, played))
    print_sessions(sessions)
    return int(any(not one.is_held for one in sessions))
