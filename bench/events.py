"""What does one streamed event cost? Events a second and CPU an event, on one socket, on 64, and as SSE.

    python -m bench events

The scripted engine writes long texts as fast as it can, one delta a token; the server is pinned to one core, the client
to the other. The client counts frames and decodes nothing.
"""

from __future__ import annotations

import argparse
import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.peer import Client, Server, server

TOKENS = 20_000
SCRIPT = {"turns": [{"text": "Once upon", "pad_tokens": TOKENS}]}


def one_socket(peer: Server, turns: int) -> int:
    """Events of some long turns on one socket."""
    client = Client(peer.port)
    count = 0
    for _ in range(turns):
        client.send(input="Tell me.", store=False)
        count += len(client.receive())
    client.close()
    return count


def many_sockets(peer: Server, sockets: int) -> int:
    """Events of one long turn on each of many sockets at once."""
    clients = [Client(peer.port) for _ in range(sockets)]
    for client in clients:
        client.send(input="Tell me.", store=False)
    with ThreadPoolExecutor(8) as pool:
        count = sum(len(events) for events in pool.map(Client.receive, clients))
    for client in clients:
        client.close()
    return count


def as_sse(peer: Server, turns: int) -> int:
    """Events of some long turns over HTTP."""
    body = json.dumps({"model": "scripted", "input": "Tell me.", "store": False, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", peer.port)
    count = 0
    for _ in range(turns):
        connection.request("POST", "/v1/responses", body)
        answer = connection.getresponse()
        while chunk := answer.read1(1 << 18):
            count += chunk.count(b"\nevent: ") + chunk.startswith(b"event: ")
    connection.close()
    return count


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench events", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    ways = {
        "one socket": lambda peer: one_socket(peer, 4),
        "64 sockets": lambda peer: many_sockets(peer, 64),
        "SSE": lambda peer: as_sse(peer, 4),
    }
    best: dict[str, tuple[float, float]] = {}
    with server(SCRIPT) as peer:
        for number in range(options.rounds + 1):
            for way, run in ways.items():
                cpu, began = peer.cpu_s(), time.perf_counter()
                count = run(peer)
                took, cpu = time.perf_counter() - began, peer.cpu_s() - cpu
                if number:  # The first round warms up.
                    rate, cost = count / took, cpu / count
                    seen = best.get(way, (0.0, 1.0))
                    best[way] = (max(rate, seen[0]), min(cost, seen[1]))
    print("way          events/s   CPU us an event   events/s of a full core   (best round)")
    for way, (rate, cost) in best.items():
        print(f"{way:<10} {rate:>10,.0f} {cost * 1e6:>17.1f} {1 / cost:>25,.0f}")
