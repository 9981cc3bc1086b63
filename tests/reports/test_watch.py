"""The report on a prompt is made after the answer: no turn waits for it, and whoever asks for it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from segue.reports.watch import ReuseWatch
from segue.turn.plan import FirstPrompt
from tests.pipeline import BUDGET, OWNER, Stage, staged
from tests.support import until

RULES = "Follow the rules of the house. " * 60


@asynccontextmanager
async def watched(path: Path, bytes_max: int = BUDGET) -> AsyncIterator[tuple[Stage, ReuseWatch]]:
    """A process whose prompts wait to be compared until somebody asks."""
    watch = ReuseWatch(bytes_max, set())
    async with staged(path / "turns.db") as stage:
        stage.runner.resources = replace(
            stage.runner.resources, report_prompt=watch.add, diagnose=watch.diagnose
        )
        yield stage, watch


async def changed(stage: Stage) -> tuple[str, str]:
    """A turn and one that goes on from it with other instructions: their ids."""
    first = (await stage.turn(input="Hi.", instructions=f"red {RULES}")).response["id"]
    fields = {"previous_response_id": first, "instructions": f"blue {RULES}"}
    return first, (await stage.turn(input="More.", **fields)).response["id"]


async def test_terminal_event_does_not_wait_for_the_report(tmp_path: Path) -> None:
    is_asked, may_go_on = asyncio.Event(), asyncio.Event()

    async def report(prompt: FirstPrompt, held_bytes: int) -> None:
        is_asked.set()
        await may_go_on.wait()

    async with staged(tmp_path / "turns.db") as stage:
        stage.runner.resources = replace(stage.runner.resources, report_prompt=report)
        turn = await stage.turn(input="Hi.")
        assert turn.events[-1]["type"] == "response.completed"
        assert is_asked.is_set()
        # The next turn does not wait either.
        fields = {"previous_response_id": turn.response["id"]}
        assert (await stage.turn(input="More.", **fields)).response["status"] == "completed"
        may_go_on.set()


async def test_nothing_is_compared_before_somebody_asks(tmp_path: Path) -> None:
    async with watched(tmp_path) as (stage, watch):
        first, second = await changed(stage)
        assert watch.bytes == 0
        assert watch.waiting_bytes > len(RULES)
        report = await watch.find(OWNER, second)
        assert report is not None
        assert (report.compared_with, report.reason) == (first, "input_changed")
        assert watch.waiting_bytes == 0
        assert watch.bytes > 0


async def test_advice_counts_what_has_just_ended(tmp_path: Path) -> None:
    async with watched(tmp_path) as (stage, watch):
        first, second = await changed(stage)
        assert [report.response_id for _, _, report in await watch.since(0)] == [second, first]


async def test_observers_after_it_learn_what_was_lost(tmp_path: Path) -> None:
    async with watched(tmp_path) as (stage, watch):
        await changed(stage)
        await stage.records.afterwards.drained()
        for ended in stage.settled:
            awaited = watch.observe(ended)
            assert awaited is not None
            await awaited
            assert watch.observe(ended) is None
        assert [ended.tally.lost is not None for ended in stage.settled] == [False, True]


async def test_too_much_that_waits_is_compared_at_once(tmp_path: Path) -> None:
    async with watched(tmp_path, bytes_max=1) as (stage, watch):
        await changed(stage)
        await until(lambda: len(stage.settled) == 2)
        assert watch.waiting_bytes == 0
        assert [ended.tally.lost is not None for ended in stage.settled] == [False, True]


async def test_erased_response_gets_no_report(tmp_path: Path) -> None:
    async with watched(tmp_path) as (stage, watch):
        _, second = await changed(stage)
        await watch.forget(OWNER, second)
        assert await watch.find(OWNER, second) is None
        assert len(await watch.since(0)) == 1


async def test_response_that_is_erased_while_it_is_compared_gets_no_report(tmp_path: Path) -> None:
    async with watched(tmp_path) as (stage, watch):
        first, second = await changed(stage)
        await watch.find(OWNER, first)
        asked = asyncio.create_task(watch.find(OWNER, second))
        await asyncio.sleep(0)
        await watch.forget(OWNER, second)
        assert await asked is None
        assert watch.waiting_bytes == 0


async def test_whoever_asks_and_leaves_takes_no_report_away(tmp_path: Path) -> None:
    async with watched(tmp_path) as (stage, watch):
        _, second = await changed(stage)
        asked = asyncio.create_task(watch.find(OWNER, second))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert watch.waiting_bytes > 0
        assert await watch.find(OWNER, second) is not None


async def test_comparison_that_a_client_asks_for_knows_a_prompt_that_waits(tmp_path: Path) -> None:
    async with watched(tmp_path) as (stage, _):
        fields = {"store": False, "instructions": RULES}
        first = await stage.turn(input="Hi.", **fields)
        options = {"comparison_response_id": first.response["id"]}
        second = await stage.turn(input="Hi.", prompt_cache_options=options, **fields)
        assert second.response["prompt_cache_diagnostics"] == {"type": "cache_hit"}
