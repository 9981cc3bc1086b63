"""What does it cost to compare every prompt with the one that it goes on from? CPU of clean turns, with and without.

    python -m bench reuse

Two servers, one of them with `--reuse-bytes-max 0`, take turns: an agent loop on one WebSocket, each turn continues the
last one and changes nothing. At most 2 % more CPU is allowed, over all rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from bench.peer import cpu_s, server
from bench.turns import SCRIPT, AgentLoop
from segue_bench.rounds import interleaved, print_table
from segue_bench.server import ServerProcess

HISTORY_TOKENS = 20_000
SHARE_MAX = 0.02
FLAGS = {"compared": (), "not compared": ("--reuse-bytes-max", "0")}


def round_of(process: ServerProcess, turns: int) -> float:
    """CPU seconds of so many turns of a new conversation, without its first one."""
    loop = AgentLoop(process.port, HISTORY_TOKENS, is_stored=False)
    before = cpu_s(process)
    for _ in range(turns):
        loop.turn()
    took = cpu_s(process) - before
    loop.close()
    return took


def main(arguments: Sequence[str]) -> int:
    """Print CPU per turn; 1 where comparing costs too much."""
    parser = argparse.ArgumentParser(prog="python -m bench reuse", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--turns", type=int, default=50, help="turns of a round, on each server")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        candidates = {}
        for name, flags in FLAGS.items():
            process = stack.enter_context(server(SCRIPT, *flags))
            candidates[name] = partial(round_of, process, options.turns)
        results = interleaved(candidates, options.rounds)
    count = options.rounds * options.turns
    ms = {name: 1000 * sum(rounds) / count for name, rounds in results.items()}
    share = ms["compared"] / ms["not compared"] - 1
    rows = [(name, count, one) for name, one in ms.items()]
    print_table("prompts {}|turns {:,}|CPU ms a turn {:.4f}", rows)
    print(f"comparing costs {share:+.2%} of the CPU of a clean turn (at most {SHARE_MAX:.0%})")
    return int(share > SHARE_MAX)
