"""The short version of kills and power cuts: what was acknowledged is there, and nothing is half there.

`make test-reliability` has the long one. What the power-cut test can find, it finds here with `durability = "relaxed"`.
"""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.crashes import halves
from tests.cuts import SECTOR, WAYS, cut_at
from tests.disk import FolderSynced, Named, Step, Synced, Wrote
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


SLOTS = 3


@given(
    moves=st.lists(st.one_of(st.integers(0, SLOTS - 1), st.none()), max_size=12),
    way=st.sampled_from(WAYS),
    seed=st.integers(0, 99),
)
def test_cut_keeps_what_was_synced_and_any_of_what_came_after(
    moves: list[int | None], way: str, seed: int
) -> None:
    """The disk of these tests: a number is a write of one sector there, None is a sync."""
    blank = bytes(SLOTS * SECTOR)
    steps: list[Step] = [Named("a", 0), Wrote(0, 0, blank), Synced(0, 2), FolderSynced(3)]
    may_be = [{bytes(SECTOR)} for _ in range(SLOTS)]
    newest = [bytes(SECTOR)] * SLOTS
    for value, move in enumerate(moves, start=1):
        if move is None:
            steps.append(Synced(0, len(steps)))
            may_be = [{content} for content in newest]
        else:
            newest[move] = bytes([value]) * SECTOR
            may_be[move].add(newest[move])
            steps.append(Wrote(0, move * SECTOR, newest[move]))
    left = cut_at(steps, len(steps), random.Random(seed), way)["a"]
    found = [left[slot * SECTOR : (slot + 1) * SECTOR] for slot in range(SLOTS)]
    assert all(one in some for one, some in zip(found, may_be, strict=True))
    if way == "everything":
        assert found == newest
