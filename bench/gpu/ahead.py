"""How long until the first token after a tool's long output, if the engine reads it while the tool runs?

    python -m bench.gpu.ahead ENGINE [--folder FOLDER] [--history 50000] [--rounds 3] [--json FILE]
    python -m bench.gpu.ahead two --dry     without a GPU and a model, where nothing is computed

The gateway is `segue-tool`: a shell whose output appears over 5 s (`slow_tool.py`). Four outputs take turns after the
same history: 500 tokens; 20,000 tokens, read while they appear; the same, read when all is there; and 20,000 tokens,
in place of which the model gets 500 others in the end, so that all that was read is thrown away.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.gpu.cases import BYTES_PER_TOKEN, SHAPE
from bench.gpu.servers import Servers
from bench.gpu.talk import INSTRUCTIONS
from segue_bench.client import ServerAddress, Traffic, frame, open_websocket, read_message
from segue_bench.workload import WorkloadMaker

TOOLS = [{"type": "shell", "environment": {"type": "container_auto"}}]
SECONDS = 5.0
LONG, SHORT = 20_000, 500
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


class Client:
    """A WebSocket to the gateway; a chain of turns."""

    def __init__(self, url: str) -> None:
        self._connection = open_websocket(ServerAddress(url), Traffic())
        self._parent: str | None = None

    def turn(self, items: Sequence[dict[str, Any]], choice: Any, tokens: int) -> dict[str, float]:
        """When each type of event first came, in seconds after the request."""
        body: dict[str, Any] = {
            "type": "response.create",
            "model": "m",
            "instructions": INSTRUCTIONS,
            "tools": TOOLS,
            "tool_choice": choice,
            "input": items,
            "store": False,
            "max_output_tokens": tokens,
            "temperature": 0,
        }
        if self._parent is not None:
            body["previous_response_id"] = self._parent
        began = time.perf_counter()
        self._connection.send(frame(json.dumps(body).encode()))
        came: dict[str, float] = {}
        while True:
            event = msgspec.json.decode(read_message(self._connection))
            came.setdefault(event["type"], time.perf_counter() - began)
            if event["type"] in ENDS:
                break
        if event["type"] != "response.completed" and choice != "none":
            raise SystemExit(f"bench: the turn ended otherwise: {str(event)[:400]}")
        self._parent = event["response"]["id"]
        return came


def texts(tokens: int, seed: int) -> str:
    """Source text of about so many tokens."""
    size = int(tokens * BYTES_PER_TOKEN)
    count = -(-size // SHAPE.tool_output_bytes)
    return "\n".join(WorkloadMaker(SHAPE, seed).workload(0, 1.0, count).outputs)[:size]


def message(role: str, text: str) -> dict[str, Any]:
    """An item."""
    return {"type": "message", "role": role, "content": text}


def orders(seed: int) -> dict[str, dict[str, object]]:
    """What the tool does, by name."""
    short, long = texts(SHORT, seed), texts(LONG, seed + 1)
    return {
        "short": {"text": short, "seconds": SECONDS},
        "long": {"text": long, "seconds": SECONDS},
        "long, not ahead": {"text": long, "seconds": SECONDS, "shows": False},
        "thrown away": {"text": long, "seconds": SECONDS, "instead": short},
    }


def measure(url: str, history: int, seed: int, name: str) -> float:
    """Milliseconds from the end of the output to the first token."""
    client = Client(url)
    past = texts(history, 1)
    pieces = [past[at : at + 2_000] for at in range(0, len(past), 2_000)]
    roles = ("user", "assistant")
    items = [message(roles[place % 2], piece) for place, piece in enumerate(pieces)]
    client.turn([*items, message("user", f"Number {seed} begins: {name}.")], "none", 16)
    order = json.dumps(orders(1_000 * seed)[name])
    came = client.turn([message("user", order)], {"type": "shell"}, 200)
    ended = came["response.shell_call_output_content.done"]
    return (came["response.output_text.delta"] - ended) * 1e3


def main(arguments: Sequence[str]) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.ahead", description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--url", help="of a gateway with that tool")
    parser.add_argument("--folder", type=Path, default=Path.home() / "segue-gpu")
    parser.add_argument("--history", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry", action="store_true", help="start a vLLM without a model for it")
    options = parser.parse_args(arguments)
    if not options.dry:
        show(options, Servers(options.folder))
        return
    # Imported here: on a GPU machine there is no hollow vLLM.
    from bench.gpu.dry import hollow_servers

    with hollow_servers([]) as servers:
        try:
            servers.start([options.engine])
            if servers.await_engines([options.engine]):
                servers.start_gateways(options.engine, ["segue-tool"])
                show(options, servers)
        finally:
            servers.stop([options.engine])


def show(options: argparse.Namespace, servers: Servers) -> None:
    """Measure in front of these, and print."""
    url = options.url or f"http://127.0.0.1:{servers.port(options.engine, 'segue-tool')}"
    found: dict[str, list[float]] = {name: [] for name in orders(0)}
    # Kernels for these lengths are compiled with the first.
    measure(url, options.history, 99, "short")
    for number in range(options.rounds):
        for name, kept in found.items():
            kept.append(round(measure(url, options.history, 1 + number, name), 1))
            print(f"{options.history:,} + {name}: {kept[-1]:.1f} ms", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps({"engine": options.engine, "ms": found}))
    for name, kept in found.items():
        middle = statistics.median(kept)
        base = statistics.median(found["short"])
        print(f"{name:<16} {middle:8.1f} ms  {middle / base:5.2f} of short")


if __name__ == "__main__":
    main(sys.argv[1:])
