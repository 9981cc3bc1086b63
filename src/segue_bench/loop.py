"""What happens in one loop? Open a session by a way, take its turns, and read what it cost on both sides.

The opening, which sends the context, is timed separately. The server's counters and processor time are read before the
first turn and after the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from segue_bench.client import Traffic
from segue_bench.plan import BenchCase
from segue_bench.server import MeasuredServer, ServerCounters
from segue_bench.ways import TurnTiming, WayTarget, make_way


@dataclass(frozen=True, slots=True)
class MeasuredLoop:
    """One repetition of a case."""

    case: BenchCase
    opening: TurnTiming
    turns: tuple[TurnTiming, ...]
    total_s: float
    traffic: Traffic
    client_cpu_s: float
    cpu_s: float | None
    counted: ServerCounters | None


def run_loop(
    case: BenchCase,
    target: WayTarget,
    server: MeasuredServer,
    tool_s: float,
    on_turn: Callable[[], None],
) -> MeasuredLoop:
    """Play the workload by this way."""
    way = make_way(case.way, target)
    try:
        opening = way.open()
        before = replace(way.traffic)
        counters = server.counters()
        cpu = server.cpu_s()
        client_cpu = time.process_time()
        began = time.perf_counter()
        turns = []
        for output in target.workload.outputs[: case.turns]:
            if tool_s:
                time.sleep(tool_s)
            turns.append(way.turn(output))
            on_turn()
        total = time.perf_counter() - began
        client_cpu = time.process_time() - client_cpu
        cpu_after = server.cpu_s()
        counters_after = server.counters()
    finally:
        way.close()
    return MeasuredLoop(
        case,
        opening,
        tuple(turns),
        total,
        Traffic(way.traffic.sent - before.sent, way.traffic.received - before.received),
        client_cpu,
        None if cpu_after is None or cpu is None else cpu_after - cpu,
        None if counters_after is None or counters is None else counters_after.since(counters),
    )
