"""A power cut at fifty random moments of a server's life, with the disk that it leaves."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.kills import new_seed
from tests.powercuts import Outcome, cut, record

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(1_800)]

RECORDINGS = 5
CUTS = 10
LOAD_S = 3.0
START_S = 2.0
# A response that is not there, that ends otherwise than it was told, or that was deleted and is there again.
LOSSES = (" lost: ", " changed: ", " returned: ")


async def cut_often(folder: Path, durability: str) -> list[Outcome]:
    chance = random.Random(new_seed())
    outcomes = []
    for number in range(RECORDINGS):
        place = folder / f"recording{number}"
        place.mkdir()
        recorded = await record(place / "live", chance.uniform(0.5, LOAD_S), durability)
        outcomes.append(await cut(recorded, place, CUTS, chance))
    return outcomes


async def test_fifty_power_cuts_lose_nothing_that_was_acknowledged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = await cut_often(tmp_path, "full")
    starts = sorted(start for one in outcomes for start in one.starts_s)
    with capsys.disabled():
        cuts, facts = sum(one.cuts for one in outcomes), sum(one.facts for one in outcomes)
        print(
            f"\n{cuts} power cuts, {facts} things acknowledged before them; slowest start: {starts[-1]:.2f} s"
        )
    assert [word for one in outcomes for word in one.found] == []
    assert starts[len(starts) // 2] < START_S


async def test_relaxed_durability_loses_what_was_acknowledged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same cuts find what `synchronous=NORMAL` loses, and nothing worse: what is there is whole."""
    outcomes = await cut_often(tmp_path, "relaxed")
    found = [word for one in outcomes for word in one.found]
    lost = [word for word in found if any(kind in word for kind in LOSSES)]
    with capsys.disabled():
        print(
            f"\nrelaxed: {len(lost)} things lost in {sum(one.cuts for one in outcomes)} power cuts"
        )
    assert all(one.found for one in outcomes)
    assert lost == found
