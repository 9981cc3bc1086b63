"""What happens in one loop? Open a session by a way, take its turns, and read what it cost on both sides.

The opening, which puts the context in place, is timed for itself. The server's counters and processor time are read
before the first turn and after the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from segue_bench.plan import Case
from segue_bench.server import Counters, Peer
from segue_bench.ways import Heard, Talk, open_way


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop, measured."""

    case: Case
    opening: Heard
    turns: tuple[Heard, ...]
    total_s: float
    bytes_sent: int
    bytes_received: int
    client_cpu_s: float
    cpu_s: float | None
    counted: Counters | None


def run_loop(
    case: Case, talk: Talk, peer: Peer, tool_s: float, on_turn: Callable[[], None]
) -> Loop:
    """Play the story by this way."""
    way = open_way(case.way, talk)
    try:
        opening = way.open()
        sent, received = way.bytes_sent, way.bytes_received
        counters, cpu, client_cpu = peer.counters(), peer.cpu_s(), time.process_time()
        began = time.perf_counter()
        turns = []
        for output in talk.story.outputs[: case.turns]:
            if tool_s:
                time.sleep(tool_s)
            turns.append(way.turn(output))
            on_turn()
        total = time.perf_counter() - began
        client_cpu = time.process_time() - client_cpu
        spent = _spent(peer.cpu_s(), cpu)
        counted = peer.counters()
    finally:
        way.close()
    return Loop(
        case,
        opening,
        tuple(turns),
        total,
        way.bytes_sent - sent,
        way.bytes_received - received,
        client_cpu,
        spent,
        counted.since(counters) if counted is not None and counters is not None else None,
    )


def _spent(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else now - before
