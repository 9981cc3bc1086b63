"""The simulator as a command: many seeds, what was injected, and the story of a seed that fails."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulator.seed import Outcome

# Read before a simulation takes the clock over.
cpu_s, wall_s = time.process_time, time.perf_counter
KEPT = Path(__file__).with_name("kept_seeds.txt")
PROGRESS_S = 2.0
CHUNK = 8


def parse(words: list[str]) -> argparse.Namespace:
    from tests.simulator.removals import REMOVALS

    parser = argparse.ArgumentParser("python -m tests.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many (200)")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first seed (0)")
    parser.add_argument(
        "--without", choices=REMOVALS, default=None, help="take a fix out; success: it is found"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in (1)")
    parser.add_argument("--trace", action="store_true", help="print the story of every seed")
    parser.add_argument(
        "--keep", action="store_true", help=f"note a seed that fails in {KEPT.name}"
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="do not stop at the first that fails"
    )
    return parser.parse_args(words)


@dataclass
class Totals:
    """What came of all seeds so far."""

    seeds: int
    ran: int = 0
    turns: int = 0
    statements: int = 0
    simulated_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)
    began: float = field(default_factory=wall_s)
    told_at: float = field(default_factory=wall_s)

    def add(self, outcome: Outcome) -> None:
        self.ran += 1
        self.turns += outcome.turns
        self.statements += outcome.statements
        self.simulated_s += outcome.seconds
        self.faults += outcome.faults
        if outcome.broken:
            self.failed.append(outcome.seed)
        if wall_s() - self.told_at > PROGRESS_S:
            self.told_at = wall_s()
            print(f"{self.progress()}", file=sys.stderr, flush=True)

    def progress(self) -> str:
        wall = wall_s() - self.began
        return f"{self.ran} of {self.seeds} seeds, {len(self.failed)} failed, {self.ran / wall:.1f} a second"

    def tell(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.faults.most_common())
        failed = f": {', '.join(map(str, self.failed[:20]))}" if self.failed else ""
        return (
            f"{self.progress()}{failed}\n"
            f"faults injected: {sum(self.faults.values())}: {kinds}\n"
            f"{self.turns} turns, {self.statements} statements, {self.simulated_s / 3600:.1f} simulated hours "
            f"in {wall_s() - self.began:.0f} s"
        )


@contextmanager
def outcomes(seeds: Iterable[int], without: str | None, jobs: int) -> Iterator[Iterator[Outcome]]:
    """What came of each of these seeds, as they are done."""
    from tests.simulator import removals
    from tests.simulator.process import answer_ids
    from tests.simulator.seed import simulate

    answer_ids()
    gc.freeze()
    with removals.without(without) as emphasis:
        run = partial(simulate, emphasis=emphasis)
        if jobs == 1:
            yield map(run, seeds)
            return
        # Forked, so that the fix is taken out there too.
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            yield pool.imap_unordered(run, seeds, CHUNK)


def main(words: list[str]) -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of strings have an order of their own; with this one a seed is the same everywhere.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulator", *words])
    asked = parse(words)
    totals = Totals(asked.seeds)
    seeds = range(asked.first, asked.first + asked.seeds)
    with outcomes(seeds, asked.without, asked.jobs) as found:
        for outcome in found:
            totals.add(outcome)
            if asked.trace or (outcome.broken and not asked.keep_going):
                print(outcome.tell())
            if outcome.broken:
                print(f"seed {outcome.seed} fails: {outcome.broken[0]}")
                if asked.keep:
                    keep(outcome.seed)
                if not asked.keep_going:
                    break
    print(totals.tell())
    return int(bool(totals.failed) != bool(asked.without))


def keep(seed: int) -> None:
    """Every test run replays it from now on."""
    kept = KEPT.read_text().split()
    if str(seed) not in kept:
        KEPT.write_text("\n".join([*kept, str(seed)]) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
