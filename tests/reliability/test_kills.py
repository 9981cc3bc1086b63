"""A server that is killed at random moments while clients write, and a PostgreSQL that is killed under it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.crashes import halves
from tests.kills import Victim, new_seed

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(1_800)]

KILLS = 300
# Processor time from nothing to listening, interpreter and recovery included: what it takes on a machine that has
# nothing else to do. Others may be at work on this one.
START_S = 2.0


async def test_three_hundred_kills_lose_nothing_that_was_acknowledged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "turns.db"

    async def look() -> list[str]:
        return halves(path) if path.exists() else []

    words = ["--store", f"sqlite:///{path}", "--tps", "3000"]
    tally = await Victim(words, tmp_path, random.Random(new_seed()), look).run(KILLS)
    with capsys.disabled():
        print(f"\nSQLite: {tally}")
    assert sorted(tally.cpu_s)[len(tally.cpu_s) // 2] < START_S
