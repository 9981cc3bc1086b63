"""How does a turn compare with the fastest other server? One agent loop, one upstream, one run.

    python -m bench peers [--stored]

Segue with its *chat* engine beside `agentic-api`, a gateway in Rust, which is fetched from the package index once. An
agent loop on a WebSocket: 19 KB of tools resent each turn, 2 KB of tool output. Turns 21 to 40 of each conversation
are measured. The servers take turns, conversation by conversation, each on the first core; the client and the upstream,
which costs next to nothing, are on the second.
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
from pathlib import Path

from bench.peer import Server, server
from bench.turns import Loop

FOLDER = Path(__file__).parents[1] / ".cache" / "peers"
PEER = "agentic-api==0.9.0"
START_S_MAX = 30.0
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
def upstream() -> Iterator[int]:
    """The port of an inference server that answers at once."""
    command = [sys.executable, "-m", "bench.upstream"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def agentic(upstream_port: int) -> Iterator[Server]:
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
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _wait_for(port, process)
            yield Server(port, process.pid)
        finally:
            process.terminate()
            process.wait(30)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > 1:
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {0})
    until = time.monotonic() + START_S_MAX
    while process.poll() is None and time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"bench: {PEER} did not start")


def measure(rounds: int, *, is_stored: bool) -> dict[str, tuple[float, float, int]]:
    """Seconds of wall and of processor time a turn, and the events of one, by server."""
    with ExitStack() as stack:
        below = stack.enter_context(upstream())
        url = f"http://127.0.0.1:{below}/v1"
        flags = ("--engine", "chat", "--engine-url", url, "--model", "scripted")
        servers = {
            "segue": stack.enter_context(server(None, *flags)),
            "agentic-api": stack.enter_context(agentic(below)),
        }
        walls: dict[str, list[float]] = {name: [] for name in servers}
        cpus: dict[str, list[float]] = {name: [] for name in servers}
        events: dict[str, int] = {}
        for _ in range(rounds):
            for name, peer in servers.items():
                loop = Loop(peer.port, 0, is_stored=is_stored)
                for _ in range(WARM):
                    loop.turn()
                before = peer.cpu_s()
                walls[name] += [loop.turn() for _ in range(MEASURED)]
                cpus[name].append((peer.cpu_s() - before) / MEASURED)
                events[name] = loop.events
                loop.close()
        return {
            name: (statistics.median(walls[name]), statistics.median(cpus[name]), events[name])
            for name in servers
        }


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--stored", action="store_true", help="with store: true")
    options = parser.parse_args(arguments)
    costs = measure(options.rounds, is_stored=options.stored)
    own_wall, own_cpu, _ = costs["segue"]
    print("server        events   wall ms p50   CPU ms   Segue against it: wall, CPU")
    for name, (wall, cpu, events) in costs.items():
        print(
            f"{name:<12}   {events:>5}   {wall * 1e3:>11.2f}   {cpu * 1e3:>6.2f}   "
            f"{own_wall / wall:>19.2f} x, {own_cpu / cpu:.2f} x"
        )
