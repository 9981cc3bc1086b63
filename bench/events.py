"""What does one streamed event cost? Events a second and CPU an event, on one socket, on 64, and as SSE.

    python -m bench events

The scripted engine writes long texts as fast as it can, one delta a token; the server is pinned to one core, the client
to the other. The client counts frames and decodes nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from bench.peer import Client, cpu_s, server
from segue_bench.client import ClientConnection, local, post, read_chunk
from segue_bench.rounds import interleaved, print_table
from segue_bench.server import ServerProcess

TOKENS = 20_000
SCRIPT = {"turns": [{"text": "Once upon", "pad_tokens": TOKENS}]}
TURNS = 4
SOCKETS = 64
REQUEST = {"input": "Tell me.", "store": False}


def one_socket(port: int) -> int:
    """Events of some long turns on one socket."""
    client = Client(port)
    count = 0
    for _ in range(TURNS):
        client.send(**REQUEST)
        count += len(client.receive())
    client.close()
    return count


def many_sockets(port: int) -> int:
    """Events of one long turn on each of many sockets at once."""
    clients = [Client(port) for _ in range(SOCKETS)]
    for client in clients:
        client.send(**REQUEST)
    with ThreadPoolExecutor(8) as pool:
        count = sum(len(events) for events in pool.map(Client.receive, clients))
    for client in clients:
        client.close()
    return count


def as_sse(port: int) -> int:
    """Events of some long turns over HTTP."""
    body = json.dumps({"model": "scripted", **REQUEST, "stream": True}).encode()
    connection = ClientConnection(local(port))
    count = 0
    for _ in range(TURNS):
        post(connection, body, is_last=False)
        while chunk := read_chunk(connection):
            count += chunk.count(b"\nevent: ") + chunk.startswith(b"event: ")
    connection.close()
    return count


WAYS = {"one socket": one_socket, "64 sockets": many_sockets, "SSE": as_sse}


def measured(process: ServerProcess, way: Callable[[int], int]) -> tuple[float, float]:
    """Events a second, and seconds of processor time an event."""
    cpu, began = cpu_s(process), time.perf_counter()
    count = way(process.port)
    return count / (time.perf_counter() - began), (cpu_s(process) - cpu) / count


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench events", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    with server(SCRIPT) as process:
        candidates = {name: partial(measured, process, way) for name, way in WAYS.items()}
        results = interleaved(candidates, options.rounds)
    best = {
        name: (max(r for r, _ in runs), min(c for _, c in runs)) for name, runs in results.items()
    }
    print_table(
        "way {}|events/s {:,.0f}|CPU us an event {:.3f}|events/s of a full core (best round) {:,.0f}",
        [(name, rate, cost * 1e6, 1 / cost) for name, (rate, cost) in best.items()],
    )
