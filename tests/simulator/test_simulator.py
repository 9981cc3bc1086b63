"""Several processes on one database, as the simulator sees them: a few seeds here, ten thousand with the mark
`reliability`; and what it finds when a fix is taken out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.simulator.removals import REMOVALS, without
from tests.simulator.seed import EVERYTHING, NETWORKS, Emphasis, simulate

ROOT = Path(__file__).parents[2]
KEPT = [int(line) for line in Path(__file__).with_name("kept_seeds.txt").read_text().split()]
SEEDS, CHUNK = 120, 40
# Small worlds: a crowd alone takes as long as thirty of these.
QUICK = Emphasis(
    processes=(2, 2, 3),
    networks=NETWORKS[:3],
    story_counts=(2, 5),
    fault_counts=(1, 1, 2),
    crowd=0.0,
)
# On a machine with much else to do.
SLOW_S = 300
# Within so many seeds a removal is found, mostly in the first few.
FOUND_WITHIN = 40
LONG_SEEDS = 10_000
LONG_S = 3_600


@pytest.mark.timeout(SLOW_S)
@pytest.mark.parametrize("seeds", [KEPT, *(range(at, at + CHUNK) for at in range(0, SEEDS, CHUNK))])
def test_what_clients_hear_is_true_whatever_happens_to_processes(seeds: Sequence[int]) -> None:
    faults = 0
    for seed in seeds:
        outcome = simulate(seed, EVERYTHING if seeds is KEPT else QUICK)
        faults += sum(outcome.faults.values())
        assert not outcome.broken, outcome.tell()
    assert faults or seeds is KEPT


@pytest.mark.timeout(SLOW_S)
@pytest.mark.parametrize("name", REMOVALS)
def test_simulator_finds_what_a_fix_was_for(name: str) -> None:
    with without(name) as emphasis:
        found = next(
            (seed for seed in range(FOUND_WITHIN) if simulate(seed, emphasis).broken), None
        )
    assert found is not None
    # With the fix the same seed is right.
    assert not simulate(found, emphasis).broken


def test_seed_determines_everything() -> None:
    assert simulate(7).trace == simulate(7).trace
    assert simulate(7).trace != simulate(8, EVERYTHING).trace


@pytest.mark.reliability
@pytest.mark.timeout(LONG_S)
def test_ten_thousand_seeds() -> None:
    words = ["--seeds", str(LONG_SEEDS), "--jobs", str(os.cpu_count() or 1)]
    run = subprocess.run(
        [sys.executable, "-m", "tests.simulator", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr[-2_000:]
