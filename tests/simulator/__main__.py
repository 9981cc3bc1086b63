"""The simulator as a command: many seeds, what was injected, and the story of a seed that fails."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections import Counter
from pathlib import Path

# Read before a simulation takes the clock over.
cpu_s, wall_s = time.process_time, time.perf_counter
KEPT = Path(__file__).with_name("kept_seeds.txt")
PROGRESS_S = 2.0


def parse(words: list[str]) -> argparse.Namespace:
    from tests.simulator.removals import REMOVALS

    parser = argparse.ArgumentParser("python -m tests.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many (200)")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed (0)")
    parser.add_argument("--without", choices=REMOVALS, default=None, help="take a fix out")
    parser.add_argument("--trace", action="store_true", help="print the story of every seed")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first that fails")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of strings have an order of their own; with this one a seed is the same everywhere.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulator", *words])
    asked = parse(words)
    from tests.simulator.removals import without
    from tests.simulator.seed import simulate

    faults: Counter[str] = Counter()
    ran = turns = statements = 0
    virtual_s = 0.0
    failed: list[int] = []
    gc.freeze()
    began, cpu_began, told_at = wall_s(), cpu_s(), wall_s()
    with without(asked.without):
        for seed in range(asked.first, asked.first + asked.seeds):
            outcome = simulate(seed)
            ran += 1
            faults += outcome.faults
            turns, statements = turns + outcome.turns, statements + outcome.statements
            virtual_s += outcome.seconds
            if asked.trace:
                print(outcome.tell())
            if outcome.broken:
                failed.append(seed)
                print(f"\nseed {seed} fails: {outcome.broken[0]}")
                if asked.without is None:
                    keep(seed)
                if not asked.trace and not asked.keep_going:
                    print(outcome.tell())
                if not asked.keep_going:
                    break
            if wall_s() - told_at > PROGRESS_S and sys.stderr.isatty():
                told_at = wall_s()
                print(f"\r{ran} of {asked.seeds} seeds, {len(failed)} failed ", end="", file=sys.stderr)
    wall, cpu = wall_s() - began, cpu_s() - cpu_began
    print(f"\n{ran} seeds, {len(failed)} failed: {failed[:20]}" if failed else f"\n{ran} seeds, none failed")
    print(f"faults injected: {sum(faults.values())}: {', '.join(f'{n} {k}' for k, n in faults.most_common())}")
    print(f"{turns} turns, {statements} statements, {virtual_s / 3600:.1f} simulated hours")
    print(f"{wall:.1f} s, {ran / wall:.1f} seeds a second; {cpu / ran * 1000:.0f} ms of CPU each")
    return bool(failed) != (asked.without is not None)


def keep(seed: int) -> None:
    """Every test run replays it from now on."""
    kept = KEPT.read_text().split()
    if str(seed) not in kept:
        KEPT.write_text("\n".join([*kept, str(seed)]) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
