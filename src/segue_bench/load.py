"""How many streams at once? `segue bench load`: many sockets and lanes at a given speed against one server on one core.

Every lane asks for one answer after the other. An event is *late* by how much later it came than in a steady stream at
the asked speed that starts with the answer's earliest event; so no clocks are compared. The search finds how many such
streams the server sustains: all tokens delivered in time, none dropped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import uvloop
from msgspec import Struct
from rich.table import Table

from segue.errors import Misconfigured
from segue_bench.clients import StreamingClients
from segue_bench.machine import Machine, describe, in_words
from segue_bench.report import empty_table, open_console, shown, write_json
from segue_bench.server import ServerNotStarted, ServerProcess, apart, serve
from segue_bench.streams import ANSWER_S, stream_server

ANSWER_TOKENS_MAX = 5_000
CONNECTIONS_MAX = 4_096
LANES_MAX = 16

# A machine that is busy with something else for a moment must not end the search.
TRIES = 2

# What "sustained" means.
DELIVERED_MIN = 0.97
LATE_P99_S_MAX = 0.1
SEARCH_SPEED = 1_000.0
SEARCH_STREAMS_MAX = 1_024
SEARCH_S = 2.0
SEARCH_PROBES_MAX = 16
# From here on the client itself is short of processor time.
CLIENT_BUSY = 0.9


class LoadRun(Struct, frozen=True):
    """One load, measured."""

    connections: int
    lanes: int
    tokens_per_s: float
    seconds: float
    tokens_per_s_delivered: float
    delivered: float | None
    event_late_ms_p50: float | None
    event_late_ms_p99: float | None
    answers: int
    drops: int
    cpu_cores: float | None
    client_cores: float
    memory_mb: float | None

    @property
    def streams(self) -> int:
        return self.connections * self.lanes

    @property
    def is_sustained(self) -> bool:
        """Whether everything came, and in time."""
        late = self.event_late_ms_p99 or 0.0
        return (
            self.drops == 0
            and (self.delivered or 0.0) >= DELIVERED_MIN
            and late <= LATE_P99_S_MAX * 1e3
        )


class LoadReport(Struct, frozen=True):
    """The JSON file of a load."""

    machine: Machine
    load: LoadRun
    search: list[LoadRun]
    streams_per_core: int | None
    # What the processor time of a token would allow on a core that does nothing else.
    streams_by_cpu: int | None
    is_client_bound: bool
    seed: int


async def _apply(
    process: ServerProcess,
    connections: int,
    lanes: int,
    tokens_per_s: float,
    seconds: float,
    seed: int,
) -> LoadRun:
    """Put the load on the server for this long."""
    clients = StreamingClients(process.port, connections, tokens_per_s, lanes, seed)
    try:
        await clients.connect()
        cpu = process.cpu_s()
        own = time.process_time()
        await clients.run("count", seconds)
        spent = process.cpu_s()
        own = time.process_time() - own
        memory = process.memory_bytes()
    except (OSError, TimeoutError) as error:
        raise ServerNotStarted(f"{connections} connections cannot be opened: {error}") from None
    finally:
        clients.close()
    counts = clients.counts()
    rate = counts.tokens / counts.seconds
    asked = connections * lanes * tokens_per_s
    return LoadRun(
        connections=connections,
        lanes=lanes,
        tokens_per_s=tokens_per_s,
        seconds=round(counts.seconds, 2),
        tokens_per_s_delivered=round(rate),
        delivered=round(rate / asked, 4) if asked else None,
        event_late_ms_p50=counts.late_ms_p50,
        event_late_ms_p99=counts.late_ms_p99,
        answers=counts.answers,
        drops=counts.drops,
        cpu_cores=None
        if cpu is None or spent is None
        else round((spent - cpu) / counts.seconds, 3),
        client_cores=round(own / counts.seconds, 3),
        memory_mb=None if memory is None else round(memory / 1e6, 1),
    )


def apply(connections: int, lanes: int, tokens_per_s: float, seconds: float, seed: int) -> LoadRun:
    """One load on a server of its own, which has one core for itself where there are two."""
    tokens = min(ANSWER_TOKENS_MAX, (tokens_per_s or ANSWER_TOKENS_MAX) * ANSWER_S)
    with serve(stream_server(tokens, tokens_per_s)) as process, apart(process):
        return uvloop.run(_apply(process, connections, lanes, tokens_per_s, seconds, seed))


def search(lanes: int, seed: int, on_probe: Callable[[LoadRun], None]) -> list[LoadRun]:
    """Double the streams until they are not sustained, then halve the gap; every probe that was made."""
    probes: list[LoadRun] = []
    good = 0
    bad = 0
    streams = 16
    while len(probes) < SEARCH_PROBES_MAX:
        connections = max(1, streams // lanes)
        for _ in range(TRIES):
            probe = apply(connections, lanes, SEARCH_SPEED, SEARCH_S, seed)
            probes.append(probe)
            on_probe(probe)
            if probe.is_sustained:
                break
        streams = probe.streams
        if probe.is_sustained:
            good = streams
        else:
            bad = streams
        if bad and bad - good <= max(lanes, 4, good // 12):
            break
        if not bad and streams >= SEARCH_STREAMS_MAX:
            break
        streams = (good + bad) // 2 if bad else streams * 2
        if streams < lanes:
            break
    return probes


# --- the action -----------------------------------------------------------------------------------


def add_action(parser: argparse.ArgumentParser) -> None:
    """Give `load` its flags."""
    parser.description = (
        "Many streams at once against a server on one core: tokens delivered, how late, and the processor time; "
        "then a search for the number of streams of 1,000 tokens/s that this core sustains."
    )
    add = parser.add_argument
    add("--connections", type=int, default=16, metavar="N", help="WebSockets (default: 16)")
    add("--lanes", type=int, default=1, metavar="M", help="streams on each WebSocket (default: 1)")
    speed = "tokens a second of each stream (default: 1000); 0: unlimited"
    add("--tps", type=float, default=1_000.0, metavar="T", help=speed)
    add("--seconds", type=float, default=5.0, metavar="S", help="how long to count (default: 5)")
    add("--no-search", action="store_true", help="only this load, no search for the limit")
    add("--seed", type=int, default=1, help="for the order in which streams begin (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write all figures as JSON")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    _check(options)
    console = open_console()
    machine = describe()
    with console.status("measuring the load"):
        load = apply(options.connections, options.lanes, options.tps, options.seconds, options.seed)
    probes: list[LoadRun] = []
    if not options.no_search:
        with console.status("searching how many streams a core sustains") as status:

            def show(probe: LoadRun) -> None:
                result = "sustained" if probe.is_sustained else "too many"
                status.update(f"searching: {probe.streams} streams {result}")

            probes = search(options.lanes, options.seed, show)
    report = summarise(machine, load, probes, options.seed)
    console.print(load_table(report))
    console.print(verdict(report))
    console.print(f"{in_words(machine)}. Seed {options.seed}.", style="dim")
    if options.json:
        write_json(options.json, report)
    return 0 if not load.drops else 1


def _check(options: argparse.Namespace) -> None:
    if not 1 <= options.connections <= CONNECTIONS_MAX:
        raise Misconfigured(f"--connections: from 1 to {CONNECTIONS_MAX}.")
    if not 1 <= options.lanes <= LANES_MAX:
        raise Misconfigured(f"--lanes: from 1 to {LANES_MAX}; more lanes do not run at once.")
    if not 0 <= options.tps <= 1e6 or not 0 < options.seconds <= 600:
        raise Misconfigured("--tps: 0 or more; --seconds: more than 0, at most 600.")


def summarise(machine: Machine, load: LoadRun, probes: list[LoadRun], seed: int) -> LoadReport:
    """The report of a load and of the probes after it."""
    sustained = [probe.streams for probe in probes if probe.is_sustained]
    failed = [probe for probe in probes if not probe.is_sustained]
    is_bound = any(probe.client_cores >= CLIENT_BUSY > (probe.cpu_cores or 0.0) for probe in failed)
    most = max(sustained, default=None)
    return LoadReport(machine, load, probes, most, by_cpu([load, *probes]), is_bound, seed)


def by_cpu(runs: list[LoadRun]) -> int | None:
    """How many streams of 1,000 tokens/s the processor time would allow, by the busiest load that was sustained.

    A server that is short of processor time writes more tokens at once, and would seem cheaper than it is.
    """
    known = [
        (run.tokens_per_s_delivered, run.cpu_cores)
        for run in runs
        if run.cpu_cores and run.tokens_per_s == SEARCH_SPEED and run.is_sustained
    ]
    if not known:
        return None
    rate, used = max(known)
    return int(rate / SEARCH_SPEED / used)


def load_table(report: LoadReport) -> Table:
    """The load that was asked for, and the probes of the search."""
    names = "streams|asked tok/s|delivered|of asked|late p50 ms|p99 ms|answers|drops|CPU cores|client|memory MB"
    table = empty_table(*names.split("|"))
    table.add_row(*_row(report.load), end_section=True)
    for probe in sorted(report.search, key=lambda probe: probe.connections):
        table.add_row(*_row(probe), style="" if probe.is_sustained else "dim")
    return table


def _row(run: LoadRun) -> list[str]:
    return [
        f"{run.connections} × {run.lanes}",
        f"{run.streams * run.tokens_per_s:,.0f}" if run.tokens_per_s else "all",
        f"{run.tokens_per_s_delivered:,.0f}",
        shown(run.delivered, ".1%"),
        shown(run.event_late_ms_p50, ".1f"),
        shown(run.event_late_ms_p99, ".1f"),
        f"{run.answers:,}",
        str(run.drops),
        shown(run.cpu_cores, ".2f"),
        f"{run.client_cores:.2f}",
        shown(run.memory_mb, ".0f"),
    ]


def verdict(report: LoadReport) -> str:
    """The result in a sentence."""
    if not report.search:
        return "No search was asked for."
    if report.streams_per_core is None:
        return "One core does not sustain even the smallest load of the search."
    most = max(probe.streams for probe in report.search)
    least = "at least " if report.is_client_bound or report.streams_per_core == most else ""
    why = " (the client was the limit)" if report.is_client_bound else ""
    return (
        f"One core sustains {least}{report.streams_per_core} streams of {SEARCH_SPEED:,.0f} tokens/s{why}: "
        f"{DELIVERED_MIN:.0%} delivered, p99 at most {LATE_P99_S_MAX * 1e3:.0f} ms late, no drops. "
        f"By its processor time alone it would be {report.streams_by_cpu or 'unknown'}."
    )
