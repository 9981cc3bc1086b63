"""What does a guard cost the first token? With and without one of 50 ms, for prompts that are read faster and slower.

    python -m bench guards

The scripted engine's first token comes after 1/tps seconds: that stands for prefill. The guard looks at the input for
50 ms and lets it pass, beside that prefill. Both servers run side by side and take turns, so that a noisy machine is
noisy for both. Medians; beside them what the first text would take if the guard were asked before the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack

from bench.peer import Client, server
from segue.settings import Settings
from segue.turn.values import PASSED, Verdict

GUARD_S = 0.05
SCRIPT = {"turns": [{"text": "Once."}]}
SIDES = {
    "no guard": (),
    "guard": ("--guard", "bench.guards:slow", "--guard-sides", "input"),
}


class SlowGuard:
    """Takes its time and lets everything pass."""

    name = "slow"

    async def check(self, texts: Sequence[str]) -> Verdict:
        """What a small classifier takes."""
        await asyncio.sleep(GUARD_S)
        return PASSED

    async def watch(self, text: str) -> Verdict:
        """Not asked here."""
        return PASSED


def slow(settings: Settings) -> SlowGuard:
    """The guard, as the settings name it."""
    return SlowGuard()


def first_text_s(client: Client) -> float:
    """From the request to the first delta of its answer."""
    began = time.perf_counter()
    client.send(input="Tell me.", store=False)
    while not client.next_event().startswith(b'{"type":"response.output_text.delta"'):
        pass
    took = time.perf_counter() - began
    client.receive()
    return took


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench guards", description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--prefill-ms", type=float, nargs="*", default=[20.0, 80.0, 200.0])
    options = parser.parse_args(arguments)
    print(f"a guard of {GUARD_S * 1e3:.0f} ms, time to first text")
    print("prefill      without     with   ratio   one after the other")
    for prefill_ms in options.prefill_ms:
        flags = ("--tps", str(1000 / prefill_ms))
        taken: dict[str, list[float]] = {name: [] for name in SIDES}
        with ExitStack() as stack:
            clients = {
                name: Client(stack.enter_context(server(SCRIPT, *flags, *more)).port)
                for name, more in SIDES.items()
            }
            for number in range(options.turns + 1):
                for name, client in clients.items():
                    took = first_text_s(client)
                    if number:  # The first turn warms up.
                        taken[name].append(took)
        without, guarded = (statistics.median(taken[name]) for name in SIDES)
        print(
            f"{prefill_ms:>4.0f} ms {without * 1e3:>9.1f} ms {guarded * 1e3:>6.1f} ms "
            f"{guarded / without:>6.2f} {(without + GUARD_S) / without:>11.2f}"
        )
