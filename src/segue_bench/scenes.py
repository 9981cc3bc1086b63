"""What does a crowd do to those who are served? `segue bench crowd`: streams alone, beside idle connections, beside
readers that never read; and a herd that comes back after a restart.

Every scene has a server of its own on one core; the streams and the crowd are processes of their own beside it. The
same streams are counted alone, beside the crowd, and alone again, so that a machine that is slow for a while is seen to
be. Somebody asks for `/health` all the time.
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
from types import TracebackType
from typing import Literal

import msgspec
from msgspec import Struct
from rich.table import Table

from segue.errors import Misconfigured
from segue_bench.crowd import Crowd, crowd
from segue_bench.guests import Told
from segue_bench.line import Address, LineFailed, get
from segue_bench.load import apart
from segue_bench.machine import Machine, describe, in_words
from segue_bench.report import paper
from segue_bench.server import NotServing, Played, Process, Served, serve, serve_in
from segue_bench.streams import MODEL

# An answer lasts about this long, so that ends and beginnings are part of the load.
ANSWER_S = 1.0
# How long a reader that never reads may stay beyond what the server allows.
STAY_S_MAX = 30.0
WATCH_S = 0.1
GUESTS_MAX = 50_000

# Crowds that do nothing.
Still = Literal["idle", "stalled"]
RESTART = 1012
# How a herd comes to be outside: the server says so and stops, it dies, or the network breaks.
How = Literal["stop", "kill", "cut"]
HOW: dict[How, str] = {"stop": "a restart", "kill": "a kill -9", "cut": "a broken network"}


class Beside(Struct, frozen=True, kw_only=True):
    """Streams alone, beside a crowd, and alone again."""

    crowd: Still
    guests: int
    streams: int
    tokens_per_s: float
    alone: Told
    beside: Told
    again: Told
    # What the server needed of a core in each of the three.
    cpu_cores: list[float]
    # What the server held before they came, at most while they were there, and for each of them when all had come.
    memory_bytes: int
    peak_bytes: int
    guest_bytes: float
    # Of those guests, how many the server had at the end, and after how many seconds the last one was out.
    left: int
    out_s: float | None = None
    health_ms_max: float = 0.0


class Return(Struct, frozen=True, kw_only=True):
    """A herd that came back."""

    guests: int
    how: How
    herd: Told
    health_ms_max: float


class Scenes(Struct, frozen=True):
    """The JSON file."""

    machine: Machine
    beside: list[Beside]
    returns: list[Return]


class Watch:
    """Looks at a server all the time: its memory, and how long it takes to say that it is well."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._address = Address(f"http://127.0.0.1:{process.port}")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.peak_bytes = 0
        self.health_ms_max = 0.0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, at: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(WATCH_S):
            began = time.perf_counter()
            try:
                status, _ = get(self._address, "/health")
            except LineFailed:
                status = 0
            took = time.perf_counter() - began
            if status == 200:
                self.health_ms_max = max(self.health_ms_max, round(took * 1e3, 1))
            self.peak_bytes = max(self.peak_bytes, self._process.memory_bytes() or 0)


def connected(process: Process) -> int:
    """How many sockets the server has."""
    _, page = get(Address(f"http://127.0.0.1:{process.port}"), "/metrics")
    found = re.search(r"^segue_connections (\S+)$", page.decode(), re.MULTILINE)
    return int(float(found[1])) if found else 0


def served(tokens_per_s: float, flags: Sequence[str]) -> Served:
    """A server whose answers last about a second, or are short where there is no speed."""
    tokens = max(10, int(tokens_per_s * ANSWER_S))
    script = {"turns": [{"text": "Once", "pad_tokens": tokens}]}
    return Served([Played(MODEL, msgspec.json.encode(script), tokens_per_s)], flags)


def beside(
    kind: Still,
    guests: int,
    streams: int,
    tokens_per_s: float,
    seconds: float,
    *flags: str,
) -> Beside:
    """Count streams alone, beside this crowd, and alone again."""
    with (
        serve(served(tokens_per_s, flags)) as process,
        apart(process),
        crowd(process.port, "streams", streams, tokens_per_s) as others,
    ):
        alone, alone_cores = _count(process, others, seconds)
        before = process.memory_bytes() or 0
        began = time.perf_counter()
        with Watch(process) as watch, crowd(process.port, kind, guests) as crowded:
            arrived = (process.memory_bytes() or 0) - before
            meanwhile, cores = _count(process, others, seconds)
            out_s = None
            if kind == "stalled":
                wait_until_out(process, streams)
                out_s = round(time.perf_counter() - began, 1)
            left = connected(process) - streams
            lost = crowded.ask().lost
        again, again_cores = _count(process, others, seconds)
    grown = arrived if kind == "idle" else watch.peak_bytes - before
    return Beside(
        crowd=kind,
        guests=guests,
        streams=streams,
        tokens_per_s=tokens_per_s,
        alone=alone,
        beside=msgspec.structs.replace(meanwhile, lost=lost),
        again=again,
        cpu_cores=[alone_cores, cores, again_cores],
        memory_bytes=before,
        peak_bytes=watch.peak_bytes,
        guest_bytes=round(grown / guests),
        left=left,
        out_s=out_s,
        health_ms_max=watch.health_ms_max,
    )


def _count(process: Process, streams: Crowd, seconds: float) -> tuple[Told, float]:
    """What the streams hear for so long, and what the server needed of a core."""
    before = process.cpu_s() or 0.0
    told = streams.ask(f"count {seconds}")
    return told, round(((process.cpu_s() or 0.0) - before) / (told.seconds or seconds), 2)


def wait_until_out(process: Process, streams: int) -> None:
    """Until the server has cut all others."""
    limit = re.compile(r'^segue_limit\{setting="write_s_max"\} (\S+)$', re.MULTILINE)
    _, page = get(Address(f"http://127.0.0.1:{process.port}"), "/metrics")
    found = limit.search(page.decode())
    until = time.perf_counter() + STAY_S_MAX + (float(found[1]) if found else 0.0)
    while connected(process) > streams:
        if time.perf_counter() > until:
            raise NotServing(f"{connected(process) - streams} readers that never read are not cut")
        time.sleep(WATCH_S)


def come_back(guests: int, how: How, *flags: str) -> Return:
    """Put a herd out, and let all of it come back at once, each to its stored turn."""
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as name, ExitStack() as stack:
        folder, first = Path(name), stack.enter_context(ExitStack())
        process = first.enter_context(serve_in(folder, served(0, flags)))
        with apart(process):
            herd = stack.enter_context(crowd(process.port, "herd", guests))
        if how == "cut":
            herd.ask("drop")
        else:
            if how == "kill":
                os.kill(process.pid, signal.SIGKILL)
            first.close()
            process = stack.enter_context(serve_in(folder, served(0, flags), process.port))
        _wait_until_outside(herd)
        with apart(process), Watch(process) as watch:
            told = herd.ask("back")
        return Return(guests=guests, how=how, herd=told, health_ms_max=watch.health_ms_max)


def _wait_until_outside(herd: Crowd) -> None:
    until = time.perf_counter() + STAY_S_MAX
    while herd.ask().open:
        if time.perf_counter() > until:
            raise NotServing("a herd that was put out is still inside")
        time.sleep(WATCH_S)


# --- the action -----------------------------------------------------------------------------------


def add_action(parser: argparse.ArgumentParser) -> None:
    """Give `crowd` its flags."""
    parser.description = (
        "Streams alone and beside a crowd: idle connections, readers that never read; then a herd that comes back "
        "after a restart, each to its stored turn. 0 leaves a crowd out."
    )
    add = parser.add_argument
    add("--streams", type=int, default=50, metavar="N", help="sockets that stream (default: 50)")
    add("--tps", type=float, default=100.0, metavar="T", help="tokens a second of each (100)")
    add("--idle", type=int, default=5_000, metavar="N", help="idle connections (default: 5000)")
    add("--stalled", type=int, default=200, metavar="N", help="readers that never read (200)")
    add("--herd", type=int, default=2_000, metavar="N", help="who comes back at once (2000)")
    add("--seconds", type=float, default=5.0, metavar="S", help="how long is counted (default: 5)")
    add("--json", type=Path, metavar="FILE", help="write all figures")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write; the exit status says whether anybody was harmed."""
    _check(options)
    console = paper()
    machine = describe()
    found: list[Beside] = []
    returns: list[Return] = []
    crowds: dict[Still, int] = {"idle": options.idle, "stalled": options.stalled}
    for kind, guests in crowds.items():
        if guests:
            with console.status(f"{options.streams} streams beside {guests} {kind}"):
                found.append(beside(kind, guests, options.streams, options.tps, options.seconds))
    for how in HOW if options.herd else ():
        with console.status(f"a herd of {options.herd}"):
            returns.append(come_back(options.herd, how))
    for table in tables(found, returns):
        console.print(table)
    console.print(f"{in_words(machine)}.", style="dim")
    if options.json:
        scenes = Scenes(machine, found, returns)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(scenes), indent=1) + b"\n")
    return int(any(harmed(one) for one in found) or any(map(is_short, returns)))


def harmed(scene: Beside) -> int:
    """Streams that were dropped, and idle guests that were lost."""
    lost = scene.guests - scene.left if scene.crowd == "idle" else 0
    return scene.alone.drops + scene.beside.drops + scene.again.drops + lost


def is_short(scene: Return) -> bool:
    """Whether somebody of a herd was not served."""
    return scene.herd.served < scene.guests


def _check(options: argparse.Namespace) -> None:
    crowds = (options.idle, options.stalled, options.herd)
    if not 1 <= options.streams <= GUESTS_MAX or not all(0 <= one <= GUESTS_MAX for one in crowds):
        raise Misconfigured(f"--streams, --idle, --stalled, --herd: at most {GUESTS_MAX}.")
    if not 0 < options.tps <= 1e6 or not 0 < options.seconds <= 600:
        raise Misconfigured("--tps: more than 0; --seconds: more than 0, at most 600.")


def tables(scenes: Sequence[Beside], returns: Sequence[Return]) -> Iterator[Table]:
    """What was found, for people."""
    if scenes:
        names = "streams|delivered|late p50 ms|p99 ms|answers|drops|CPU cores"
        table = _table(f"{names}|guests left|memory MB|a guest KiB|health ms max")
        for scene in scenes:
            for row in _rows(scene):
                table.add_row(*row)
            table.add_section()
        yield table
    if returns:
        names = "a herd comes back after|served|turned away|p50 s|p99 s|all s|told to leave|health ms max"
        table = _table(names)
        for one in returns:
            herd = one.herd
            table.add_row(
                HOW[one.how],
                f"{herd.served:,} of {one.guests:,}",
                str(sum(herd.refused.values())),
                *(_shown(value, ".2f") for value in (herd.served_s_p50, herd.served_s_p99)),
                _shown(herd.served_s_max, ".2f"),
                f"{herd.codes.get(RESTART, 0):,}",
                f"{one.health_ms_max:.0f}",
            )
        yield table


def _table(names: str) -> Table:
    table = Table(header_style="bold", pad_edge=False)
    first, *others = names.split("|")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _rows(scene: Beside) -> Iterator[list[str]]:
    asked = scene.streams * scene.tokens_per_s
    words = {"idle": "idle", "stalled": "that never read"}[scene.crowd]
    parts = (
        (f"{scene.streams} alone", scene.alone),
        (f"beside {scene.guests:,} {words}", scene.beside),
        ("alone again", scene.again),
    )
    for (name, told), cores in zip(parts, scene.cpu_cores, strict=True):
        is_beside = told is scene.beside
        beside = (
            f"{scene.left:,}",
            f"{scene.memory_bytes / 1e6:.0f} to {scene.peak_bytes / 1e6:.0f}",
            f"{scene.guest_bytes / 1024:,.1f}",
            f"{scene.health_ms_max:.0f}",
        )
        yield [
            name,
            _shown(told.tokens / told.seconds / asked if told.seconds else None, ".1%"),
            _shown(told.late_ms_p50, ".1f"),
            _shown(told.late_ms_p99, ".1f"),
            f"{told.answers:,}",
            str(told.drops),
            f"{cores:.2f}",
            *(beside if is_beside else ("",) * len(beside)),
        ]


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
