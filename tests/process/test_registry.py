"""What is known of the turns of a process."""

from __future__ import annotations

from pathlib import Path

from segue.turn.notices import Cancel
from tests.pipeline import Listener, staged


async def test_oldest_turn_is_the_one_that_was_received_first(tmp_path: Path) -> None:
    """It may have been prepared for longer than one that was received, and began, after it."""
    async with staged(tmp_path / "turns.db", tokens_per_s=1) as stage:
        turns = [await stage.start(None, Listener(), input="Hi.") for _ in range(2)]
        registry = stage.runner.registry
        turns[0].received_at, turns[1].received_at = 100.0, 50.0
        assert registry.oldest_at() == 50.0
        for running in turns:
            running.notify(Cancel())
