"""The short version of kills and power cuts: what was acknowledged is there, and nothing is half there.

`make test-reliability` has the long one. What the power-cut test can find, it finds here with `durability = "relaxed"`.
"""

from __future__ import annotations

import random
from pathlib import Path

from tests.crashes import halves
from tests.kills import Victim, new_seed
from tests.powercuts import cut, record

LOAD_S = 0.5


async def test_killed_server_knows_what_it_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "turns.db"

    async def look() -> list[str]:
        return halves(path) if path.exists() else []

    words = ["--store", f"sqlite:///{path}", "--tps", "3000"]
    tally = await Victim(words, tmp_path, random.Random(new_seed()), look).run(kills=1)
    assert tally.facts


async def test_acknowledged_turns_survive_a_power_cut(tmp_path: Path) -> None:
    recorded = await record(tmp_path / "live", LOAD_S)
    outcome = await cut(recorded, tmp_path, 3, random.Random(new_seed()))
    assert outcome.facts
    assert outcome.found == []


async def test_power_cut_shows_what_relaxed_durability_loses(tmp_path: Path) -> None:
    recorded = await record(tmp_path / "live", LOAD_S, "relaxed")
    outcome = await cut(recorded, tmp_path, 1, random.Random(new_seed()))
    assert any(" lost: " in word for word in outcome.found)
