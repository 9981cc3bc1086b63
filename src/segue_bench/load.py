"""How many streams at once? `segue bench load`: many sockets and lanes at a given speed against one server on one core.

Every lane asks for one answer after the other. An event is *late* by how much later it came than the steady stream that
its answer would have been at the asked speed, anchored at the answer's earliest event; so no clocks are compared. The
search asks how many such streams the server sustains: all tokens delivered in time, none dropped.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop
from msgspec import Struct
from rich.table import Table

from segue.errors import Misconfigured
from segue_bench.machine import Machine, describe, in_words
from segue_bench.report import paper
from segue_bench.server import NotServing, Played, Process, Served, serve
from segue_bench.streams import LATE_STEPS, MODEL, Lanes, Tally, late_ms

# An answer lasts about this long, so that ends and beginnings are part of the load.
ANSWER_S = 1.0
ANSWER_TOKENS_MAX = 5_000
# Lanes begin one after the other within this time; only then is anything counted.
RAMP_S = 1.0
CONNECT_S_MAX = 30.0
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
    process: Process, connections: int, lanes: int, tokens_per_s: float, seconds: float, seed: int
) -> LoadRun:
    """Put the load on the server for so long."""
    loop = asyncio.get_running_loop()
    tally = Tally(late=array("L", bytes(8 * LATE_STEPS)) if tokens_per_s else None)
    made: list[Lanes] = []
    try:
        async with asyncio.timeout(CONNECT_S_MAX):
            for _ in range(connections):
                made.append(Lanes(process.port, lanes, tally, tokens_per_s))
                await made[-1].connection.open()
        source = random.Random(seed)
        for one in made:
            for begin in one.start():
                loop.call_later(source.uniform(0, RAMP_S), begin)
        await asyncio.sleep(RAMP_S + ANSWER_S / 2)
        cpu, own, began = process.cpu_s(), time.process_time(), time.perf_counter()
        tally.is_counting = True
        await asyncio.sleep(seconds)
        tally.is_counting = False
        took = time.perf_counter() - began
        spent, own = process.cpu_s(), time.process_time() - own
        memory = process.memory_bytes()
    except (OSError, TimeoutError) as error:
        raise NotServing(
            f"connection {len(made)} of {connections} cannot be had: {error}"
        ) from None
    finally:
        tally.is_over = True
        for one in made:
            one.connection.close()
    rate = tally.tokens / took
    asked = connections * lanes * tokens_per_s
    has_late = tally.late is not None and any(tally.late)
    return LoadRun(
        connections=connections,
        lanes=lanes,
        tokens_per_s=tokens_per_s,
        seconds=round(took, 2),
        tokens_per_s_delivered=round(rate),
        delivered=round(rate / asked, 4) if asked else None,
        event_late_ms_p50=late_ms(tally.late, 0.5) if has_late and tally.late else None,
        event_late_ms_p99=late_ms(tally.late, 0.99) if has_late and tally.late else None,
        answers=tally.answers,
        drops=tally.drops,
        cpu_cores=None if cpu is None or spent is None else round((spent - cpu) / took, 3),
        client_cores=round(own / took, 3),
        memory_mb=None if memory is None else round(memory / 1e6, 1),
    )


def apply(connections: int, lanes: int, tokens_per_s: float, seconds: float, seed: int) -> LoadRun:
    """One load on a server of its own, which has one core for itself where there are two."""
    tokens = int(min(ANSWER_TOKENS_MAX, (tokens_per_s or ANSWER_TOKENS_MAX) * ANSWER_S))
    script = {"turns": [{"text": "Once", "pad_tokens": max(10, tokens)}]}
    played = Played(MODEL, msgspec.json.encode(script), tokens_per_s)
    with serve(Served([played])) as process, apart(process):
        return uvloop.run(_apply(process, connections, lanes, tokens_per_s, seconds, seed))


@contextmanager
def apart(process: Process) -> Iterator[None]:
    """The server on the first core that we may use, we on the others; afterwards as before."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = set(os.sched_getaffinity(0))
    if len(cores) > 1:
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {min(cores)})
        os.sched_setaffinity(0, cores - {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def search(lanes: int, seed: int, on_probe: Callable[[LoadRun], None]) -> list[LoadRun]:
    """Double the streams until they are not sustained, then halve the gap; every probe that was made."""
    probes: list[LoadRun] = []
    good, bad, streams = 0, 0, 16
    while len(probes) < SEARCH_PROBES_MAX:
        connections = max(1, streams // lanes)
        for _ in range(TRIES):
            probe = apply(connections, lanes, SEARCH_SPEED, SEARCH_S, seed)
            probes.append(probe)
            on_probe(probe)
            if probe.is_sustained:
                break
        streams = connections * lanes
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
        "Many streams at once against a server on one core: tokens delivered, how late, at what cost; and how many "
        "streams of 1,000 tokens/s that core sustains."
    )
    add = parser.add_argument
    add("--connections", type=int, default=16, metavar="N", help="sockets (default: 16)")
    add("--lanes", type=int, default=1, metavar="M", help="streams on each (default: 1)")
    add(
        "--tps",
        type=float,
        default=1_000.0,
        metavar="T",
        help="tokens a second of each stream; 0: unlimited",
    )
    add("--seconds", type=float, default=5.0, metavar="S", help="how long is counted (default: 5)")
    add("--no-search", action="store_true", help="only this load, no search for the limit")
    add("--seed", type=int, default=1, help="for the order in which streams begin (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write all figures")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    _check(options)
    console = paper()
    machine = describe()
    with console.status("loading"):
        asked = apply(
            options.connections, options.lanes, options.tps, options.seconds, options.seed
        )
    probes: list[LoadRun] = []
    if not options.no_search:
        with console.status("searching how many streams a core sustains") as status:

            def show(probe: LoadRun) -> None:
                held = "sustained" if probe.is_sustained else "too many"
                status.update(f"searching: {probe.connections * probe.lanes} streams {held}")

            probes = search(options.lanes, options.seed, show)
    report = summarise(machine, asked, probes, options.seed)
    console.print(load_table(report))
    console.print(verdict(report))
    console.print(f"{in_words(machine)}. Seed {options.seed}.", style="dim")
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return 0 if not asked.drops else 1


def _check(options: argparse.Namespace) -> None:
    if not 1 <= options.connections <= CONNECTIONS_MAX:
        raise Misconfigured(f"--connections: from 1 to {CONNECTIONS_MAX}.")
    if not 1 <= options.lanes <= LANES_MAX:
        raise Misconfigured(f"--lanes: from 1 to {LANES_MAX}; more do not run at once.")
    if not 0 <= options.tps <= 1e6 or not 0 < options.seconds <= 600:
        raise Misconfigured("--tps: 0 or more; --seconds: more than 0, at most 600.")


def summarise(machine: Machine, asked: LoadRun, probes: list[LoadRun], seed: int) -> LoadReport:
    """What the probes amount to."""
    held = [one.connections * one.lanes for one in probes if one.is_sustained]
    lost = [one for one in probes if not one.is_sustained]
    is_bound = any(one.client_cores >= CLIENT_BUSY > (one.cpu_cores or 0.0) for one in lost)
    most = max(held) if held else None
    return LoadReport(machine, asked, probes, most, by_cpu([asked, *probes]), is_bound, seed)


def by_cpu(runs: list[LoadRun]) -> int | None:
    """How many streams of 1,000 tokens/s the processor time would allow, by the busiest load that was sustained.

    A server that is kept waiting writes more tokens at once, and would seem cheaper than it is.
    """
    known = [
        (run.tokens_per_s_delivered, run.cpu_cores)
        for run in runs
        if run.cpu_cores and run.tokens_per_s == SEARCH_SPEED and run.is_sustained
    ]
    if not known:
        return None
    rate, cores = max(known)
    return int(rate / SEARCH_SPEED / cores)


def load_table(report: LoadReport) -> Table:
    """The load that was asked for, and the probes of the search."""
    table = Table(header_style="bold", pad_edge=False)
    names = "streams|asked tok/s|delivered|of asked|late p50 ms|p99 ms|answers|drops|CPU cores|client|memory MB"
    for name in names.split("|"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(*_row(report.load))
    for number, probe in enumerate(sorted(report.search, key=lambda one: one.connections)):
        if not number:
            table.add_section()
        table.add_row(*_row(probe), style="" if probe.is_sustained else "dim")
    return table


def _row(run: LoadRun) -> list[str]:
    def shown(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return [
        f"{run.connections} × {run.lanes}",
        f"{run.connections * run.lanes * run.tokens_per_s:,.0f}" if run.tokens_per_s else "all",
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
    """The sentence that one looks for."""
    if not report.search:
        return "No search was asked for."
    if report.streams_per_core is None:
        return "One core sustains not even the smallest load of the search."
    most = max(one.connections * one.lanes for one in report.search)
    least = "at least " if report.is_client_bound or report.streams_per_core == most else ""
    why = " (the client was the limit)" if report.is_client_bound else ""
    return (
        f"One core sustains {least}{report.streams_per_core} streams of {SEARCH_SPEED:,.0f} tokens/s{why}: "
        f"{DELIVERED_MIN:.0%} delivered, p99 at most {LATE_P99_S_MAX * 1e3:.0f} ms late, no drops. "
        f"By its processor time alone it would be {report.streams_by_cpu or 'unknown'}."
    )
