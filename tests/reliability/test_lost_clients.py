"""Clients that are lost in the middle of a response, two hundred times at random points."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.scenarios.test_background import LONG, follow, lose, scripted
from tests.support import fetch, metric, wire

pytestmark = pytest.mark.reliability
LOSSES = 200


async def test_stored_responses_are_finished_and_replayed_without_gap_or_repeat(
    tmp_path: Path,
) -> None:
    chance = random.Random(11)
    store = f"sqlite:///{tmp_path}/s.db"
    async with scripted(tmp_path, LONG[:600], tps=2_000, store=store) as served:
        for _ in range(LOSSES):
            async with wire(served) as socket:
                turn_id, heard = await lose(served, socket, chance.randint(0, 120))
            events = await follow(served, turn_id, heard)
            numbers = [one["sequence_number"] for one in events]
            assert numbers == list(range(heard + 1, heard + 1 + len(numbers)))
            if events:
                response = events[-1]["response"]
                assert response["status"] == "completed"
                kept = (await fetch(served, "GET", f"/v1/responses/{turn_id}")).json
                assert kept == response


async def test_unstored_responses_stop_within_a_second(tmp_path: Path) -> None:
    chance = random.Random(12)
    async with scripted(tmp_path, LONG * 40, tps=1_000) as served:
        for _ in range(LOSSES):
            async with wire(served) as socket:
                await lose(served, socket, chance.randint(0, 60), store=False)
                async with asyncio.timeout(1):
                    while (
                        await fetch(served, "GET", "/health")
                    ).status and served.app.runner.running_count:
                        pass
        name = 'segue_turns_total{outcome="cancelled",transport="websocket"}'
        assert await metric(served, name) == LOSSES
