"""What does one turn cost? Wall and CPU of a turn on a WebSocket, with histories of 1k to 500k tokens.

    python -m bench turns

An agent loop: 19 KB of tools resent each turn, 2 KB of tool output, 35 events back, `store: false`. The history is put
in place by one first request; then turns are chained on it. CPU is the server's processor time (all threads) over the
measured turns, the scripted engine included. The sizes take turns, round by round, so that a noisy machine is noisy for
all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.peer import Client, cpu_s, server
from segue_bench.charts import ChartAxis, ChartLine, line_chart, log_ticks
from segue_bench.client import ClientConnection, local, post, read_body
from segue_bench.figures import tokens_words
from segue_bench.rounds import interleaved, print_table

SIZES = (1_000, 10_000, 100_000, 500_000)
# SmolLM2 writes this in one token a word, and so do most vocabularies.
WORD = " the"


def agent_tools() -> list[dict[str, Any]]:
    """Tools as a coding agent sends them: about 19 KB."""
    parameters = {
        "type": "object",
        "properties": {
            f"argument_{i}": {"type": "string", "description": "x" * 60} for i in range(8)
        },
        "required": ["argument_0"],
    }
    return [
        {
            "type": "function",
            "name": f"tool_{i}",
            "description": "What this tool does, at some length. " * 8,
            "parameters": parameters,
            "strict": False,
        }
        for i in range(17)
    ]


# The output of a tool: 2 KB of source text.
OUTPUT = Path(__file__).read_text()[:2000]

# A few words and a call: 35 events with SmolLM2's vocabulary.
SCRIPT = {
    "turns": [
        {
            "text": "I will look at the next file",
            "calls": [{"name": "tool_0", "arguments": {"argument_0": "src/main.py line 20"}}],
        }
    ]
}


def history(tokens: int) -> str:
    """A text that makes a prompt of about this many tokens, tools included."""
    return WORD * max(1, tokens - 5_000)


class AgentLoop:
    """One conversation, one turn at a time."""

    def __init__(self, port: int, history_tokens: int, *, is_stored: bool) -> None:
        self._client = Client(port)
        self._settings = {"tools": agent_tools(), "store": is_stored}
        self._client.send(input=history(history_tokens), **self._settings)
        self._last = json.loads(self._client.receive()[-1])
        self.events = 0

    def turn(self) -> float:
        """Answer the open call; the seconds until the last event is here."""
        if "response" not in self._last:
            raise SystemExit(f"bench: a turn was refused: {self._last}")
        response = self._last["response"]
        call = response["output"][-1]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": OUTPUT}
        began = time.perf_counter()
        self._client.send(previous_response_id=response["id"], input=[output], **self._settings)
        events = self._client.receive()
        took = time.perf_counter() - began
        self._last, self.events = json.loads(events[-1]), len(events)
        return took

    def close(self) -> None:
        self._client.close()


class TurnCost(NamedTuple):
    """What a turn cost on a history of this size."""

    history_tokens: int
    events: int
    wall_ms: float
    cpu_ms: float


def measure(sizes: Sequence[int], rounds: int, turns: int, *, is_stored: bool) -> list[TurnCost]:
    """Wall and CPU per turn for each size of history."""
    with server(SCRIPT) as process:
        loops = {size: AgentLoop(process.port, size, is_stored=is_stored) for size in sizes}

        def round_of(loop: AgentLoop) -> tuple[list[float], float]:
            before = cpu_s(process)
            walls = [loop.turn() for _ in range(turns)]
            return walls, (cpu_s(process) - before) / turns

        candidates = {size: partial(round_of, loop) for size, loop in loops.items()}
        costs = []
        for size, results in interleaved(candidates, rounds).items():
            wall = statistics.median(wall for walls, _ in results for wall in walls)
            cpu = statistics.median(cpu for _, cpu in results)
            costs.append(TurnCost(size, loops[size].events, wall * 1e3, cpu * 1e3))
        return costs


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench turns", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=20, help="turns of a round")
    parser.add_argument("--stored", action="store_true", help="with store: true")
    parser.add_argument("--svg", metavar="FILE", help="draw the chart of the README")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args(arguments)
    costs = measure(options.sizes, options.rounds, options.turns, is_stored=options.stored)
    print_table(
        "history {:,}|events {}|wall ms p50 {:.2f}|CPU ms {:.2f}|CPU against the smallest {:.2f} x",
        [(*cost[:2], cost.wall_ms, cost.cpu_ms, cost.cpu_ms / costs[0].cpu_ms) for cost in costs],
    )
    if options.svg:
        full = resent(options.sizes, options.turns)
        for cost in full:
            print(f"{cost.history_tokens:>7,}   sent again over HTTP: {cost.cpu_ms:>6.1f} ms CPU")
        Path(options.svg).write_text(chart(costs, full))


def resent(sizes: Sequence[int], turns: int) -> list[TurnCost]:
    """The same turns over plain HTTP with the full history each time and the render cache off."""
    costs = []
    with server(SCRIPT, "--render-cache-bytes-max", "0") as process:
        for size in sizes:
            connection = ClientConnection(local(process.port))
            given = [{"role": "user", "content": history(size)}]
            body = {"model": "scripted", "input": given, "tools": agent_tools(), "store": False}
            data = json.dumps(body).encode()
            walls, before = [], cpu_s(process)
            for _ in range(max(3, turns // 4)):
                began = time.perf_counter()
                read_body(connection, post(connection, data, is_last=False))
                walls.append(time.perf_counter() - began)
            cpu = (cpu_s(process) - before) / len(walls)
            costs.append(TurnCost(size, 1, statistics.median(walls) * 1e3, cpu * 1e3))
            connection.close()
    return costs


def chart(chained: Sequence[TurnCost], full: Sequence[TurnCost]) -> str:
    """Server CPU a turn against history, both axes logarithmic."""
    named = {"full history": ("http-full", full), "WebSocket": ("ws", chained)}
    lines = [
        ChartLine(
            f"{name}: {costs[-1].cpu_ms:.3g} ms",
            colour,
            [(cost.history_tokens, cost.cpu_ms) for cost in costs],
        )
        for name, (colour, costs) in named.items()
    ]
    sizes = [cost.history_tokens for cost in chained]
    low, high = 0.3, 1_000.0
    return line_chart(
        "Server CPU of one turn, by tokens of history, ms (logarithmic)",
        lines,
        ChartAxis(sizes[0], sizes[-1], [(n, tokens_words(n)) for n in sizes], is_log=True),
        ChartAxis(low, high, [(ms, f"{ms:g}") for ms in log_ticks(low, high, (1,))], is_log=True),
        "tokens of history",
    )
