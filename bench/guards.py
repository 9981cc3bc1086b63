"""What does a guard cost the first token? With and without one of 50 ms, for prompts that are read faster and slower.

    python -m bench guards

The scripted engine's first token comes after 1/tps seconds: that stands for prefill. The guard looks at the input for
50 ms and lets it pass, beside that prefill. Both servers run side by side and take turns, so that a noisy machine is
noisy for both. Medians; the last column is what the first text would take if the guard ran before the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from bench.peer import Client, server
from segue.seams.guard import PASSED, Verdict
from segue.settings.values import Settings
from segue_bench.rounds import interleaved, print_table

GUARD_S = 0.05
SCRIPT = {"turns": [{"text": "Once."}]}
SIDES = {
    "no guard": (),
    "guard": ("--guard", "bench.guards:slow", "--guard-sides", "input"),
}


class SlowGuard:
    """Takes as long as a small classifier, and lets everything pass."""

    name = "slow"

    async def check(self, texts: Sequence[str]) -> Verdict:
        await asyncio.sleep(GUARD_S)
        return PASSED

    async def watch(self, text: str) -> Verdict:
        return PASSED


def slow(settings: Settings) -> SlowGuard:
    """The guard, as the settings name it."""
    return SlowGuard()


def first_texts_s(prefill_ms: float, turns: int) -> list[float]:
    """Median seconds from the request to the first delta, without and with the guard."""
    flags = ("--tps", str(1000 / prefill_ms))
    with ExitStack() as stack:
        clients = {
            name: Client(stack.enter_context(server(SCRIPT, *flags, *more)).port)
            for name, more in SIDES.items()
        }
        sides = {
            name: partial(client.timed_turn, input="Tell me.", store=False)
            for name, client in clients.items()
        }
        results = interleaved(sides, turns).values()
        return [statistics.median(turn.first_s for turn in side) for side in results]


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench guards", description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--prefill-ms", type=float, nargs="*", default=[20.0, 80.0, 200.0])
    options = parser.parse_args(arguments)
    rows = []
    for prefill_ms in options.prefill_ms:
        without, guarded = first_texts_s(prefill_ms, options.turns)
        ratios = (guarded / without, (without + GUARD_S) / without)
        rows.append((prefill_ms, without * 1e3, guarded * 1e3, *ratios))
    print(f"a guard of {GUARD_S * 1e3:.0f} ms, time to first text")
    columns = (
        "prefill {:.0f} ms|without {:.1f} ms|with {:.1f} ms|ratio {:.2f}|one after the other {:.2f}"
    )
    print_table(columns, rows)
