"""What does one turn cost? Wall and CPU of a turn on a WebSocket, with histories of 1k to 500k tokens.

    python -m bench turns

An agent loop: 19 KB of tools resent each turn, 2 KB of tool output, 35 events back, `store: false`. The history is put
in place by one first request; then turns are chained on it. CPU is the server's processor time (all threads) over the
measured turns, the scripted engine included. The sizes take turns, round by round, so that a noisy machine is noisy for
all.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.peer import Client, server

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


# What a tool says: 2 KB of source text.
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


class Loop:
    """One conversation, one turn at a time."""

    def __init__(self, port: int, history_tokens: int, *, is_stored: bool) -> None:
        self._client = Client(port)
        self._settings = {"tools": agent_tools(), "store": is_stored}
        text = WORD * max(1, history_tokens - 5_000)
        self._last, _ = self._client.turn(input=text, **self._settings)
        self.events = 0

    def turn(self) -> float:
        """Answer the open call; the seconds until the terminal event is here."""
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
        """Hang up."""
        self._client.close()


def measure(sizes: Sequence[int], rounds: int, turns: int, *, is_stored: bool) -> list[Cost]:
    """Wall and CPU per turn for each size of history."""
    with server(SCRIPT) as peer:
        loops = {size: Loop(peer.port, size, is_stored=is_stored) for size in sizes}
        walls: dict[int, list[float]] = {size: [] for size in sizes}
        cpus: dict[int, list[float]] = {size: [] for size in sizes}
        for number in range(rounds + 1):
            for size, loop in loops.items():
                before = peer.cpu_s()
                took = [loop.turn() for _ in range(turns)]
                if number:  # The first round warms up.
                    cpus[size].append((peer.cpu_s() - before) / turns)
                    walls[size] += took
        return [
            Cost(size, loop.events, statistics.median(walls[size]), statistics.median(cpus[size]))
            for size, loop in loops.items()
        ]


class Cost(NamedTuple):
    """What a turn cost on a history of this size."""

    history_tokens: int
    events: int
    wall_s: float
    cpu_s: float


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
    print("history   events   wall ms p50   CPU ms   CPU against the smallest")
    for cost in costs:
        print(
            f"{cost.history_tokens:>7,}   {cost.events:>6}   {cost.wall_s * 1e3:>11.2f}   "
            f"{cost.cpu_s * 1e3:>6.2f}   {cost.cpu_s / costs[0].cpu_s:>6.2f} x"
        )
    if options.svg:
        full = resent(options.sizes, options.turns)
        for cost in full:
            print(
                f"{cost.history_tokens:>7,}   sent again over HTTP: {cost.cpu_s * 1e3:>6.1f} ms CPU"
            )
        Path(options.svg).write_text(chart(costs, full))


def resent(sizes: Sequence[int], turns: int) -> list[Cost]:
    """The same turns over plain HTTP with the full history each time and nothing recalled: what others do."""
    found = []
    with server(SCRIPT, "--render-cache-bytes-max", "0") as peer:
        for size in sizes:
            connection = http.client.HTTPConnection("127.0.0.1", peer.port)
            history = [{"role": "user", "content": WORD * max(1, size - 5_000)}]
            body = json.dumps(
                {"model": "scripted", "input": history, "tools": agent_tools(), "store": False}
            )
            walls, before = [], peer.cpu_s()
            for _ in range(max(3, turns // 4)):
                began = time.perf_counter()
                connection.request("POST", "/v1/responses", body)
                connection.getresponse().read()
                walls.append(time.perf_counter() - began)
            cpu = (peer.cpu_s() - before) / len(walls)
            found.append(Cost(size, 1, statistics.median(walls), cpu))
            connection.close()
    return found


def chart(chained: Sequence[Cost], full: Sequence[Cost]) -> str:
    """Server CPU a turn against history, both axes logarithmic, light and dark."""
    left, top, width, height = 70, 40, 560, 260
    low, high = 3e-4, 1.0

    def x(tokens: int) -> float:
        return left + width * math.log(tokens / 1_000) / math.log(500)

    def y(seconds: float) -> float:
        share = math.log(min(max(seconds, low), high) / low) / math.log(high / low)
        return top + height * (1 - share)

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 360" font-family="sans-serif" '
        'font-size="13" role="img" aria-label="Server CPU of a turn against the history">',
        "<style>text{fill:#444}.grid{stroke:#ccc}.a{stroke:#0a7d4f;fill:#0a7d4f}"
        ".b{stroke:#c2410c;fill:#c2410c}.line{fill:none;stroke-width:3}"
        "@media(prefers-color-scheme:dark){text{fill:#ccc}.grid{stroke:#555}"
        ".a{stroke:#34d399;fill:#34d399}.b{stroke:#fb923c;fill:#fb923c}}</style>",
        f'<text x="{left}" y="22" font-size="15">Server CPU of one turn, by tokens of history</text>',
    ]
    for seconds, label in ((1e-3, "1 ms"), (1e-2, "10 ms"), (1e-1, "100 ms"), (1.0, "1 s")):
        lines.append(
            f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y(seconds):.0f}" '
            f'y2="{y(seconds):.0f}"/><text x="{left - 10}" y="{y(seconds) + 4:.0f}" '
            f'text-anchor="end">{label}</text>'
        )
    for size in (1_000, 10_000, 100_000, 500_000):
        lines.append(
            f'<text x="{x(size):.0f}" y="{top + height + 22}" text-anchor="middle">'
            f"{size // 1000}k</text>"
        )
    for kind, costs, label in (
        ("b", full, "HTTP, full history each turn"),
        ("a", chained, "WebSocket, only what is new"),
    ):
        points = [(x(cost.history_tokens), y(cost.cpu_s)) for cost in costs]
        path = " ".join(f"{at:.0f},{to:.0f}" for at, to in points)
        lines.append(f'<polyline class="{kind} line" points="{path}"/>')
        lines += [
            f'<circle class="{kind}" cx="{at:.0f}" cy="{to:.0f}" r="4"/>' for at, to in points
        ]
        at, to = points[-1]
        lines.append(
            f'<text x="{min(at, left + width):.0f}" y="{to - 12:.0f}" text-anchor="end">'
            f"{label}: {costs[-1].cpu_s * 1e3:.3g} ms</text>"
        )
    lines.append("</svg>")
    return "\n".join(lines) + "\n"
