"""How does a turn compare with the fastest other server? One agent loop, one upstream, one run.

    python -m bench peers [--unpinned] [--ways ws,http-full]

Segue with its *chat* engine beside `agentic-api`, a gateway in Rust, which is fetched from the package index once. An
agent loop of 30 turns by each way: 19 KB of tools resent each turn, 2 KB of tool output. It is counted twice: *all 30*
is the mean over the whole loop, which is what a user waits and pays for; *late* is turn 30 alone, and the CPU of the
last ten. Wall is from the first byte sent to the last event, the request being ready before; CPU is that of the
gateway. The servers take turns, loop by loop, each on the first core, client and upstream on the second; `--unpinned`
leaves the cores to the system. "alone" is the same client with the same requests straight to the upstream, which costs
next to nothing: what it takes is in the walls of both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress

from bench.peer import cpu_s, server
from bench.turns import OUTPUT, agent_tools
from segue_bench.client import local
from segue_bench.rival import agentic
from segue_bench.rounds import interleaved, print_table
from segue_bench.server import ServerProcess, spawn
from segue_bench.ways import HttpWay, SocketWay, Way, WayTarget
from segue_bench.workload import Workload, user_message

TURNS, LATE = 30, 10
OWN, RIVAL, ALONE = "segue", "agentic-api", "alone"

# Each with what Segue's wall and CPU may be of the rival's.
WAYS: dict[str, tuple[Callable[[WayTarget], Way], float | None]] = {
    "ws": (SocketWay, 0.5),
    "ws-stored": (partial(SocketWay, store=True), 0.5),
    "http-chained": (partial(HttpWay, is_chained=True), 0.5),
    "http-full": (HttpWay, 1.0),
    "json-chained": (partial(HttpWay, is_chained=True, is_streamed=False), None),
    "json-full": (partial(HttpWay, is_streamed=False), None),
}


class LoopCost(NamedTuple):
    """What a turn of a loop takes, by both ways of counting."""

    all_wall_s: float
    all_cpu_s: float
    late_wall_s: float
    late_cpu_s: float


class PeerRow(NamedTuple):
    """A way, with the median costs of each server."""

    way: str
    costs: dict[str, LoopCost]


def loop(process: ServerProcess, make: Callable[[WayTarget], Way]) -> LoopCost:
    """One conversation of thirty turns."""
    workload = Workload(json.dumps(agent_tools()).encode(), (user_message("Find it."),), ())
    began = cpu_s(process)
    way = make(WayTarget(local(process.port), "scripted", workload))
    way.open()
    timings = [way.turn(OUTPUT) for _ in range(TURNS - LATE)]
    before = cpu_s(process)
    timings += [way.turn(OUTPUT) for _ in range(LATE)]
    ended = cpu_s(process)
    way.close()
    walls = [timing.turn_s - timing.client_s for timing in timings]
    return LoopCost(
        statistics.mean(walls),
        (ended - began) / TURNS,
        walls[-1],
        (ended - before) / LATE,
    )


def measure(ways: Sequence[str], rounds: int, *, is_pinned: bool = True) -> list[PeerRow]:
    """The medians of each way by each server."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        upstream = stack.enter_context(spawn(["-m", "bench.upstream"], r"(\d+)", folder))
        url = f"http://127.0.0.1:{upstream.port}/v1"
        flags = ("--engine", "chat", "--engine-url", url, "--model", "scripted")
        servers = {
            OWN: stack.enter_context(server(None, *flags, is_pinned=is_pinned)),
            RIVAL: stack.enter_context(agentic(upstream.port, is_pinned=is_pinned)),
            ALONE: upstream,
        }
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        task = progress.add_task("loops", total=len(ways) * len(servers) * rounds)

        def counted(process: ServerProcess, way: str) -> LoopCost:
            cost = loop(process, WAYS[way][0])
            progress.advance(task)
            return cost

        candidates = {
            (way, name): partial(counted, process, way)
            for way in ways
            for name, process in servers.items()
        }
        results = interleaved(candidates, rounds, warm_ups=0)
    return [PeerRow(way, {name: middle(results[way, name]) for name in servers}) for way in ways]


def middle(costs: Sequence[LoopCost]) -> LoopCost:
    """The medians of several loops."""
    return LoopCost(*(statistics.median(values) for values in zip(*costs, strict=True)))


COLUMNS = (
    "way {}|counted {}|wall ms: segue {:.2f}|agentic-api {:.2f}|alone {:.2f}|ratio {:.2f} x|less alone {:.2f} x"
    "|CPU ms: segue {:.2f}|agentic-api {:.2f}|ratio {:.2f} x|bar {}"
)


def print_rows(rows: Sequence[PeerRow]) -> None:
    """Two lines a way, one for each way of counting."""
    lines = []
    for row in rows:
        bar = WAYS[row.way][1]
        for counted, at in (("all 30", 0), ("late", 2)):
            walls = [row.costs[name][at] * 1e3 for name in (OWN, RIVAL, ALONE)]
            own, rival, alone = walls
            cpus = [row.costs[name][at + 1] * 1e3 for name in (OWN, RIVAL)]
            ratios = own / rival, (own - alone) / (rival - alone)
            cpu = cpus[0] / cpus[1]
            lines.append(
                (row.way, counted, *walls, *ratios, *cpus, cpu, f"{bar} x" if bar else "-")
            )
    print_table(COLUMNS, lines)


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="loops of each (default: 40)")
    parser.add_argument("--unpinned", action="store_true", help="leave the cores to the system")
    parser.add_argument(
        "--ways",
        default=",".join(WAYS),
        metavar="WAY,…",
        help=f"some of {','.join(WAYS)} (default: all); http-… are streamed, json-… in one piece",
    )
    options = parser.parse_args(arguments)
    ways = options.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"--ways: '{unknown[0]}' is not one of {', '.join(WAYS)}")
    print_rows(measure(ways, options.rounds, is_pinned=not options.unpinned))
