"""Does the time for a request grow faster than its size, and does any step of it hold the event loop?

A `Bench` runs a real server on uvloop in a thread of its own; the client sends by blocking sockets from the caller's
thread. Everything is counted in CPU time, so that other processes on the machine matter little. A *hold* is the CPU
time that the process used between two turns of the loop, worker threads included (one may hold the interpreter's lock,
which stops the loop as well), the client's own thread not.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

from tests.growth.client import Client
from tests.support import Served, serving
from tests.watch import freeze_heap

# Linear is 2 for a doubled size, quadratic 4.
RATIO_MAX = 2.9
HOLD_S_MAX = 0.050
# Below this, a ratio is noise.
FLOOR_S = 0.015
# How often each size is tried: the quickest counts. Where the result is bad, as often as the next number says.
TRIES = (1, 2, 4)
# No request is refused because the model could not read it.
CONTEXT_TOKENS = 1_000_000_000
# How often the loop is asked to turn.
TICK_S = 0.001
# The process is at rest once it uses less than this in `REST_S`.
REST_S, REST_CPU_S = 0.004, 0.0015
REST_TRIES_MAX = 500

# Prepares a request of this size, and returns what is to be measured.
Case = Callable[[Client, int], Callable[[], object]]


@dataclass(frozen=True)
class Structure:
    """A repeated structure of a request: how it is made, how often in `make test`, how often at its limit."""

    name: str
    case: Case
    short: int
    limit: int


@dataclass(frozen=True)
class Cost:
    """What one size cost: all CPU time, and the longest hold."""

    size: int
    cpu_s: float
    hold_s: float


@dataclass(frozen=True)
class Finding:
    """The costs of a structure by size."""

    name: str
    costs: Sequence[Cost]
    # Whether the time counts; else only that nothing was raised.
    is_counted: bool = True

    @property
    def ratio(self) -> float:
        """The worst growth by a doubling, where it is above the noise; 0 where nothing is."""
        pairs = zip(self.costs, self.costs[1:], strict=False)
        return max(
            (b.cpu_s / max(a.cpu_s, FLOOR_S / 2) for a, b in pairs if b.cpu_s > FLOOR_S),
            default=0.0,
        )

    @property
    def hold_s(self) -> float:
        return max(cost.hold_s for cost in self.costs)

    @property
    def is_bad(self) -> bool:
        return self.is_counted and (self.ratio > RATIO_MAX or self.hold_s > HOLD_S_MAX)

    def line(self) -> str:
        sizes = " ".join(f"{cost.size}:{cost.cpu_s * 1000:.0f}ms" for cost in self.costs)
        mark = "BAD" if self.is_bad else "   "
        return (
            f"{mark} {self.name:<44} x{self.ratio:4.2f}  hold {self.hold_s * 1000:6.1f} ms  {sizes}"
        )


class Meter:
    """CPU time of this process without one of its threads, and the most of it between two turns of a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, excluded: int) -> None:
        self._loop = loop
        self._clock = time.pthread_getcpuclockid(excluded)
        self._at = self.now()
        self.longest_s = 0.0
        self._is_on = True
        loop.call_soon_threadsafe(self._tick)

    def now(self) -> float:
        return time.process_time() - time.clock_gettime(self._clock)

    def start(self) -> None:
        """Forget the longest stretch so far; call it on the loop."""
        self._at, self.longest_s = self.now(), 0.0

    def stop(self) -> None:
        self._is_on = False

    def _tick(self) -> None:
        now = self.now()
        self.longest_s = max(self.longest_s, now - self._at)
        self._at = now
        if self._is_on:
            self._loop.call_later(TICK_S, self._tick)


class Bench:
    """A server in a thread, and what it costs."""

    def __init__(self, served: Served, loop: asyncio.AbstractEventLoop) -> None:
        self.served = served
        self._loop = loop
        self.client = Client(served)
        self._meter = Meter(loop, threading.get_ident())

    def cost(self, case: Case, size: int) -> Cost:
        """What this size costs, once."""
        work = case(self.client, size)
        self._rest()
        gc.collect()
        self._on_loop(self._meter.start)
        before = self._meter.now()
        work()
        idle_s = self._rest()
        return Cost(size, self._meter.now() - before - idle_s, self._meter.longest_s)

    def run(self, work: Coroutine[None, None, None]) -> None:
        """Run this on the server's loop."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self._meter.stop()

    def _rest(self) -> float:
        """Wait until the server has nothing more to do; the CPU time of the last, idle moment."""
        for _ in range(REST_TRIES_MAX):
            before = self._meter.now()
            time.sleep(REST_S)
            self._on_loop(lambda: None)
            used = self._meter.now() - before
            if used < REST_CPU_S:
                return used
        raise AssertionError("the server does not come to rest")

    def _on_loop(self, call: Callable[[], object]) -> None:
        done: Future[None] = Future()

        def run() -> None:
            call()
            done.set_result(None)

        self._loop.call_soon_threadsafe(run)
        done.result(60)


@contextmanager
def bench(**flags: object) -> Iterator[Bench]:
    """A server in a thread of its own, with these settings."""
    stop: list[Callable[[], object]] = []
    opened: Future[tuple[Served, asyncio.AbstractEventLoop]] = Future()

    async def serve() -> None:
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(over.set))
        async with serving(**({"context_tokens": CONTEXT_TOKENS} | flags)) as served:
            opened.set_result((served, loop))
            await over.wait()

    def run() -> None:
        try:
            uvloop.run(serve())
        except BaseException as fault:
            if not opened.done():
                opened.set_exception(fault)
            raise

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        served, loop = opened.result(60)
        # What the test runner has loaded is no part of the server.
        freeze_heap()
        made = Bench(served, loop)
        yield made
        made.close()
    finally:
        for call in stop:
            call()
        thread.join(60)
        freeze_heap()


def sizes_to(limit: int, doublings: int) -> list[int]:
    """Sizes that double up to this one."""
    return [max(limit >> left, 1) for left in range(doublings, -1, -1)]


def judge(name: str, cost: Callable[[int], Cost], sizes: Sequence[int]) -> Finding:
    """The costs at these sizes, the best of several tries."""
    best: dict[int, Cost] = {}
    for tries in TRIES:
        for size in sizes:
            for _ in range(tries):
                best[size] = _better(best.get(size), cost(size))
        finding = Finding(name, [best[size] for size in sizes])
        if not finding.is_bad:
            break
    return finding


def _better(one: Cost | None, other: Cost) -> Cost:
    if one is None:
        return other
    return Cost(one.size, min(one.cpu_s, other.cpu_s), min(one.hold_s, other.hold_s))
