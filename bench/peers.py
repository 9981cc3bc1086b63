"""How does a turn compare with the fastest other server? One agent loop, one upstream, one run.

    python -m bench peers [--stored]

Segue with its *chat* engine beside `agentic-api`, a gateway in Rust, which is fetched from the package index once. An
agent loop on a WebSocket: 19 KB of tools resent each turn, 2 KB of tool output. Turns 21 to 40 of each conversation
are measured. The servers take turns, conversation by conversation, each on the first core; the client is on the second.
The upstream costs next to nothing.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from bench.peer import cpu_s, server
from bench.turns import AgentLoop
from segue_bench.rounds import interleaved, print_table
from segue_bench.server import START_S_MAX, ServerProcess, apart, spawn

FOLDER = Path(__file__).parents[1] / ".cache" / "peers"
PEER = "agentic-api==0.9.0"
WARM, MEASURED = 20, 20


def installed() -> Path:
    """The peer's program."""
    program = FOLDER / "bin" / "agentic-server"
    if not program.exists():
        print(f"installing {PEER} into {FOLDER.relative_to(FOLDER.parents[1])}")
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        pip = [str(FOLDER / "bin" / "pip"), "install", "--quiet", "--no-deps", PEER]
        subprocess.run(pip, check=True)
    return program


@contextmanager
def agentic(upstream_port: int) -> Iterator[ServerProcess]:
    """The peer on a free port, on the core that Segue has too."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as home:
        command = [
            str(installed()),
            *("--llm-api-base", f"http://127.0.0.1:{upstream_port}"),
            *("--gateway-host", "127.0.0.1", "--gateway-port", str(port)),
            *("--db-url", f"sqlite://{home}/peer.db"),
        ]
        environment = {**os.environ, "HOME": home, "RUST_LOG": "error"}
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _wait_for(port, child)
            process = ServerProcess(port, child.pid)
            with apart(process):
                yield process
        finally:
            child.terminate()
            child.wait(30)


def _wait_for(port: int, child: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S_MAX
    while child.poll() is None and time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"bench: {PEER} did not start")


def conversation(process: ServerProcess, *, is_stored: bool) -> tuple[list[float], float, int]:
    """Seconds of each measured turn, processor time of a turn, and its events."""
    loop = AgentLoop(process.port, 0, is_stored=is_stored)
    for _ in range(WARM):
        loop.turn()
    before = cpu_s(process)
    walls = [loop.turn() for _ in range(MEASURED)]
    cpu = (cpu_s(process) - before) / MEASURED
    loop.close()
    return walls, cpu, loop.events


def measure(rounds: int, *, is_stored: bool) -> dict[str, tuple[float, float, int]]:
    """Seconds of wall and of processor time a turn, and the events of a turn, by server."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        upstream = stack.enter_context(spawn(["-m", "bench.upstream"], r"(\d+)", folder))
        url = f"http://127.0.0.1:{upstream.port}/v1"
        flags = ("--engine", "chat", "--engine-url", url, "--model", "scripted")
        servers = {
            "segue": stack.enter_context(server(None, *flags)),
            "agentic-api": stack.enter_context(agentic(upstream.port)),
        }
        candidates = {
            name: partial(conversation, process, is_stored=is_stored)
            for name, process in servers.items()
        }
        costs = {}
        for name, results in interleaved(candidates, rounds, warm_ups=0).items():
            wall = statistics.median(wall for walls, _, _ in results for wall in walls)
            cpu = statistics.median(cpu for _, cpu, _ in results)
            costs[name] = wall, cpu, results[-1][2]
        return costs


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--stored", action="store_true", help="with store: true")
    options = parser.parse_args(arguments)
    costs = measure(options.rounds, is_stored=options.stored)
    own_wall, own_cpu, _ = costs["segue"]
    print_table(
        "server {}|events {}|wall ms p50 {:.2f}|CPU ms {:.2f}|Segue against it: wall {:.2f} x|CPU {:.2f} x",
        [
            (name, events, wall * 1e3, cpu * 1e3, own_wall / wall, own_cpu / cpu)
            for name, (wall, cpu, events) in costs.items()
        ],
    )
