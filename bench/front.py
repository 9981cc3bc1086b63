"""What does vLLM's own front cost a turn, by how its prompt comes? The same ids by each of its ways, without a GPU.

    python -m bench front [--contexts 1000 20000 100000]

The vLLM is a real one without a model (`bench/hollow`): HTTP, checks, scheduler and prefix cache are its own, nothing
is computed. Each turn adds 500 ids to the prompt and asks for 16 tokens; all before is cached. Processor time is that
of the API's process ("front") and of the engine core, TTFT is what the client waits for the first event with a token.
The ways take turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from bench.hollow.server import MODEL, HollowVllm, hollow_vllm
from bench.peer import cpu_s
from segue_bench.client import ClientConnection, ServerAddress, Traffic, read_body, read_head
from segue_bench.rounds import interleaved, print_table
from segue_bench.ways import sse_events

CONTEXTS = (1_000, 20_000, 100_000)
NEW_TOKENS, OUTPUT_TOKENS = 500, 16
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


WAYS: dict[str, Body] = {
    "generate, ids in JSON": generate,
    "completions, ids back": partial(completions, return_token_ids=True),
    "completions, text back": completions,
    "chat, text": chat,
}


class Conversation:
    """A prompt that grows, by one way."""

    def __init__(self, vllm: HollowVllm, make: Body, tokens: int, seed: int) -> None:
        self._vllm = vllm
        self._core = vllm.core()
        self._make = make
        self._source = random.Random(seed)
        # One word a token, so that text and ids are as long; ids that differ, so that nothing else is found.
        self._ids = [WORD_ID] * tokens if make is chat else self._drawn(tokens)
        self._traffic = Traffic()
        self._connection = ClientConnection(ServerAddress(vllm.url), self._traffic)
        self.turn()

    def _drawn(self, count: int) -> list[int]:
        return [self._source.randrange(1_000, 40_000) for _ in range(count)]

    def turn(self) -> FrontCost:
        """Ask with 500 tokens more."""
        self._ids += [WORD_ID] * NEW_TOKENS if self._make is chat else self._drawn(NEW_TOKENS)
        path, fields = self._make(self._ids)
        body = msgspec.json.encode({"model": MODEL, "stream": True, **fields})
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        sent, received = self._traffic.sent, self._traffic.received
        front, core = cpu_s(self._vllm), cpu_s(self._core)
        began = time.perf_counter()
        first_s = self._exchange(data) - began
        return FrontCost(
            self._traffic.sent - sent,
            self._traffic.received - received,
            first_s,
            cpu_s(self._vllm) - front,
            cpu_s(self._core) - core,
        )

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


def measure(vllm: HollowVllm, contexts: Sequence[int], rounds: int) -> list[tuple[object, ...]]:
    """The medians of each way at each context."""
    rows: list[tuple[object, ...]] = []
    for tokens in contexts:
        talks = {
            name: Conversation(vllm, make, tokens, seed)
            for seed, (name, make) in enumerate(WAYS.items(), tokens)
        }
        costs = interleaved({name: talk.turn for name, talk in talks.items()}, rounds)
        for name, found in costs.items():
            sent, received, ttft, front, core = (
                statistics.median(column) for column in zip(*found, strict=True)
            )
            row = sent / 1e3, received / 1e3, ttft * 1e3, front * 1e3, core * 1e3
            rows.append((name, tokens, *row))
    return rows


def main(arguments: Sequence[str]) -> None:
    """Print the table, once for each set of flags of vLLM."""
    parser = argparse.ArgumentParser(prog="python -m bench front", description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way (default: 7)")
    flags = "flags for vLLM, such as --vllm-flags='--prefix-caching-hash-algo xxhash'"
    parser.add_argument("--vllm-flags", default="", help=flags)
    options = parser.parse_args(arguments)
    with hollow_vllm("--block-size", "16", *options.vllm_flags.split()) as vllm:
        rows = measure(vllm, options.contexts, options.rounds)
    sizes = "way {}|context {:,}|sent kB {:.0f}|received kB {:.0f}"
    print_table(f"{sizes}|TTFT ms {{:.1f}}|front CPU ms {{:.1f}}|core CPU ms {{:.1f}}", rows)
