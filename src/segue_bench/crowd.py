"""What do many clients do to the streams of others? `segue bench crowd`: streams alone, beside idle connections, beside
readers that never read; and many clients that reconnect at once after a restart.

Every run has a server of its own on one core; the streams and the crowd are processes of their own beside it. The same
streams are counted alone, beside the crowd, and alone again, so that a machine that is slow for a while shows it.
`/health` is asked for all the time.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from rich.table import Table

from segue.errors import Misconfigured
from segue_bench.client import ConnectionFailed, get, local
from segue_bench.clients import CrowdCounts
from segue_bench.crowd_process import CrowdProcess, crowd
from segue_bench.machine import Machine, describe, in_words
from segue_bench.report import empty_table, open_console, shown, write_json
from segue_bench.server import (
    ServerNotStarted,
    ServerProcess,
    apart,
    serve,
    serve_in,
)
from segue_bench.streams import ANSWER_S, stream_server

# How long a reader that never reads may stay connected beyond what the server allows.
STAY_S_MAX = 30.0
WATCH_S = 0.1
CLIENTS_MAX = 50_000

CrowdKind = Literal["idle", "stalled"]
RESTART = 1012
# Why connections were lost: the server closed them and stopped, it died, or the network broke.
DisconnectCause = Literal["stop", "kill", "cut"]
DISCONNECT_CAUSES: dict[DisconnectCause, str] = {
    "stop": "a restart",
    "kill": "a kill -9",
    "cut": "a broken network",
}


class CrowdRun(Struct, frozen=True, kw_only=True):
    """Streams alone, beside a crowd, and alone again."""

    crowd: CrowdKind
    guests: int
    streams: int
    tokens_per_s: float
    alone: CrowdCounts
    beside: CrowdCounts
    again: CrowdCounts
    # What the server needed of a core in each of the three.
    cpu_cores: list[float]
    # The server's memory before the crowd connected, its peak, and what each client of the crowd added to it.
    memory_bytes: int
    peak_bytes: int
    guest_bytes: float
    # How many of the crowd were still connected at the end, and after how many seconds the last one was cut.
    left: int
    out_s: float | None = None
    health_ms_max: float = 0.0


class ReconnectRun(Struct, frozen=True, kw_only=True):
    """Many clients that reconnected at once."""

    guests: int
    how: DisconnectCause
    herd: CrowdCounts
    health_ms_max: float


class CrowdReport(Struct, frozen=True):
    """The JSON file."""

    machine: Machine
    beside: list[CrowdRun]
    returns: list[ReconnectRun]


class HealthProbe:
    """Watches a server all the time: its memory, and how long `/health` takes."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._probe_forever, daemon=True)
        self.peak_bytes = 0
        self.health_ms_max = 0.0

    def __enter__(self) -> HealthProbe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _probe_forever(self) -> None:
        is_over = False
        while not is_over:
            began = time.perf_counter()
            try:
                status, _ = get(local(self._process.port), "/health")
            except ConnectionFailed:
                status = 0
            took = time.perf_counter() - began
            if status == 200:
                self.health_ms_max = max(self.health_ms_max, round(took * 1e3, 1))
            self.peak_bytes = max(self.peak_bytes, self._process.memory_bytes() or 0)
            is_over = self._is_over.wait(WATCH_S)


def read_gauge(process: ServerProcess, name: str) -> float:
    """A value of the server's `/metrics`; 0 where it is not there."""
    _, page = get(local(process.port), "/metrics")
    value = re.search(rf"^{re.escape(name)} (\S+)$", page.decode(), re.MULTILINE)
    return float(value[1]) if value else 0.0


def connected(process: ServerProcess) -> int:
    """How many WebSockets the server has."""
    return int(read_gauge(process, "segue_connections"))


def run_crowd(
    kind: CrowdKind,
    clients: int,
    streams: int,
    tokens_per_s: float,
    seconds: float,
    *flags: str,
) -> CrowdRun:
    """Count streams alone, beside this crowd, and alone again."""
    with (
        serve(stream_server(tokens_per_s * ANSWER_S, tokens_per_s, flags)) as process,
        apart(process),
        crowd(process.port, "streams", streams, tokens_per_s) as others,
    ):
        alone, alone_cores = _count(process, others, seconds)
        before = process.memory_bytes() or 0
        began = time.perf_counter()
        with HealthProbe(process) as probe, crowd(process.port, kind, clients) as crowded:
            arrived = (process.memory_bytes() or 0) - before
            meanwhile, cores = _count(process, others, seconds)
            out_s = None
            if kind == "stalled":
                wait_until_cut(process, streams)
                out_s = round(time.perf_counter() - began, 1)
            left = connected(process) - streams
            lost = crowded.command().lost
        again, again_cores = _count(process, others, seconds)
    grown = arrived if kind == "idle" else probe.peak_bytes - before
    return CrowdRun(
        crowd=kind,
        guests=clients,
        streams=streams,
        tokens_per_s=tokens_per_s,
        alone=alone,
        beside=msgspec.structs.replace(meanwhile, lost=lost),
        again=again,
        cpu_cores=[alone_cores, cores, again_cores],
        memory_bytes=before,
        peak_bytes=probe.peak_bytes,
        guest_bytes=round(grown / clients),
        left=left,
        out_s=out_s,
        health_ms_max=probe.health_ms_max,
    )


def _count(
    process: ServerProcess, streams: CrowdProcess, seconds: float
) -> tuple[CrowdCounts, float]:
    """What the streams receive in this time, and what the server needed of a core."""
    before = process.cpu_s() or 0.0
    counts = streams.command(f"count {seconds}")
    return counts, round(((process.cpu_s() or 0.0) - before) / (counts.seconds or seconds), 2)


def wait_until_cut(process: ServerProcess, streams: int) -> None:
    """Wait until the server has closed all connections but the streams."""
    allowed = read_gauge(process, 'segue_limit{setting="write_s_max"}')
    until = time.perf_counter() + STAY_S_MAX + allowed
    while connected(process) > streams:
        if time.perf_counter() > until:
            left = connected(process) - streams
            raise ServerNotStarted(f"{left} readers that never read are still connected")
        time.sleep(WATCH_S)


def run_reconnect(clients: int, cause: DisconnectCause, *flags: str) -> ReconnectRun:
    """Disconnect many clients, and let all of them come back at once, each to its stored turn."""
    options = stream_server(0, 0, flags)
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        first = stack.enter_context(ExitStack())
        process = first.enter_context(serve_in(folder, options))
        with apart(process):
            herd = stack.enter_context(crowd(process.port, "herd", clients))
        if cause == "cut":
            herd.command("drop")
        else:
            if cause == "kill":
                os.kill(process.pid, signal.SIGKILL)
            first.close()
            process = stack.enter_context(serve_in(folder, options, process.port))
        _wait_until_disconnected(herd)
        with apart(process), HealthProbe(process) as probe:
            counts = herd.command("back")
        return ReconnectRun(
            guests=clients, how=cause, herd=counts, health_ms_max=probe.health_ms_max
        )


def _wait_until_disconnected(herd: CrowdProcess) -> None:
    until = time.perf_counter() + STAY_S_MAX
    while herd.command().open:
        if time.perf_counter() > until:
            raise ServerNotStarted("clients that were disconnected are still connected")
        time.sleep(WATCH_S)


# --- the action -----------------------------------------------------------------------------------


def add_action(parser: argparse.ArgumentParser) -> None:
    """Give `crowd` its flags."""
    parser.description = (
        "Streams alone and beside a crowd: idle connections, readers that never read; then many clients that "
        "reconnect at once after a restart, each to its stored turn. 0 leaves a crowd out."
    )
    add = parser.add_argument
    add("--streams", type=int, default=50, metavar="N", help="WebSockets that stream (default: 50)")
    add("--tps", type=float, default=100.0, metavar="T", help="tokens/s of each (default: 100)")
    add("--idle", type=int, default=5_000, metavar="N", help="idle connections (default: 5000)")
    stalled = "readers that never read (default: 200)"
    add("--stalled", type=int, default=200, metavar="N", help=stalled)
    herd = "clients that reconnect at once (default: 2000)"
    add("--herd", type=int, default=2_000, metavar="N", help=herd)
    add("--seconds", type=float, default=5.0, metavar="S", help="how long to count (default: 5)")
    add("--json", type=Path, metavar="FILE", help="write all figures as JSON")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write; the exit status says whether a client was dropped."""
    _check(options)
    console = open_console()
    machine = describe()
    runs: list[CrowdRun] = []
    returns: list[ReconnectRun] = []
    crowds: dict[CrowdKind, int] = {"idle": options.idle, "stalled": options.stalled}
    for kind, clients in crowds.items():
        if clients:
            with console.status(f"{options.streams} streams beside {clients} {kind}"):
                runs.append(run_crowd(kind, clients, options.streams, options.tps, options.seconds))
    for cause in DISCONNECT_CAUSES if options.herd else ():
        with console.status(f"{options.herd} clients reconnect"):
            returns.append(run_reconnect(options.herd, cause))
    for table in tables(runs, returns):
        console.print(table)
    console.print(f"{in_words(machine)}.", style="dim")
    if options.json:
        write_json(options.json, CrowdReport(machine, runs, returns))
    return int(
        any(map(drops, runs))
        or any(reconnect.herd.served < reconnect.guests for reconnect in returns)
    )


def drops(run: CrowdRun) -> int:
    """Streams that were dropped, and idle connections that were lost."""
    lost = run.guests - run.left if run.crowd == "idle" else 0
    return run.alone.drops + run.beside.drops + run.again.drops + lost


def _check(options: argparse.Namespace) -> None:
    crowds = (options.idle, options.stalled, options.herd)
    if not 1 <= options.streams <= CLIENTS_MAX or not all(0 <= n <= CLIENTS_MAX for n in crowds):
        raise Misconfigured(f"--streams, --idle, --stalled, --herd: at most {CLIENTS_MAX}.")
    if not 0 < options.tps <= 1e6 or not 0 < options.seconds <= 600:
        raise Misconfigured("--tps: more than 0; --seconds: more than 0, at most 600.")


def tables(runs: Sequence[CrowdRun], returns: Sequence[ReconnectRun]) -> Iterator[Table]:
    """The results, for people."""
    if runs:
        names = "streams|delivered|late p50 ms|p99 ms|answers|drops|CPU cores|still connected|memory MB|KiB a client"
        table = empty_table(*names.split("|"), "health ms max")
        for run in runs:
            for row in _rows(run):
                table.add_row(*row)
            table.add_section()
        yield table
    if returns:
        names = (
            "clients reconnect after|served|refused|p50 s|p99 s|all s|closed by 1012|health ms max"
        )
        table = empty_table(*names.split("|"))
        for back in returns:
            herd = back.herd
            table.add_row(
                DISCONNECT_CAUSES[back.how],
                f"{herd.served:,} of {back.guests:,}",
                str(sum(herd.refused.values())),
                shown(herd.served_s_p50, ".2f"),
                shown(herd.served_s_p99, ".2f"),
                shown(herd.served_s_max, ".2f"),
                f"{herd.codes.get(RESTART, 0):,}",
                f"{back.health_ms_max:.0f}",
            )
        yield table


def _rows(run: CrowdRun) -> Iterator[list[str]]:
    asked = run.streams * run.tokens_per_s
    words = {"idle": "idle", "stalled": "that never read"}[run.crowd]
    parts = (
        (f"{run.streams} alone", run.alone),
        (f"beside {run.guests:,} {words}", run.beside),
        ("alone again", run.again),
    )
    for (name, counts), cores in zip(parts, run.cpu_cores, strict=True):
        beside = (
            f"{run.left:,}",
            f"{run.memory_bytes / 1e6:.0f} to {run.peak_bytes / 1e6:.0f}",
            f"{run.guest_bytes / 1024:,.1f}",
            f"{run.health_ms_max:.0f}",
        )
        yield [
            name,
            shown(counts.tokens / counts.seconds / asked if counts.seconds else None, ".1%"),
            shown(counts.late_ms_p50, ".1f"),
            shown(counts.late_ms_p99, ".1f"),
            f"{counts.answers:,}",
            str(counts.drops),
            f"{cores:.2f}",
            *(beside if counts is run.beside else ()),
        ]
