"""The last ends of a conversation: what is kept of them, and what that weighs."""

from __future__ import annotations

from typing import Any

import pytest

from segue.engines.scripted import Script, ScriptedEngine, ScriptedTurn
from segue.resent.render_cache import RenderCache
from tests.contracts.engine import chatml
from tests.pipeline import OWNER, Listener, Stage, Told
from tests.scenarios.test_upstream_engines import staged

Json = dict[str, Any]

TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
SCRIPT = Script(
    (ScriptedTurn(text="An answer of some length, so that it weighs something. " * 20),)
)
LONG = "What is said here is long enough to be seen in the figures. " * 50


def user(text: str) -> Json:
    return {"type": "message", "role": "user", "content": text}


def cache_of(stage: Stage) -> RenderCache:
    cache = stage.runner.resources.prompt_cache
    assert isinstance(cache, RenderCache)
    return cache


async def send(stage: Stage, history: list[Json], **fields: Any) -> Told:
    told = await stage.turn(input=history, store=False, **fields)
    assert told.response["status"] == "completed"
    return told


async def loop(
    stage: Stage, turns: int, name: str = "", **fields: Any
) -> tuple[list[Json], list[Told]]:
    """A conversation that is sent as a whole each time: its history before the last answer, and its turns."""
    history = [user(f"{name} {LONG}")]
    told = [await send(stage, history, **fields)]
    for number in range(turns - 1):
        history = [*history, *told[-1].response["output"], user(f"{number} {LONG}")]
        told.append(await send(stage, history, **fields))
    return history, told


async def test_last_message_may_be_changed_again_and_again() -> None:
    dialect = chatml()
    async with staged(ScriptedEngine(dialect, SCRIPT), dialect, checks_rendering=True) as stage:
        history, told = await loop(stage, 4, tools=TOOLS)
        usual = told[-1].tally.tokens_tokenized
        for text in ("changed", "changed again", "and again"):
            again = await send(stage, [*history[:-1], user(f"{text} {LONG}")], tools=TOOLS)
            assert again.tally.tokens_tokenized <= usual + 3
            assert again.tally.items_validated == 1
        # The first end is still there as well.
        after = [*history, *told[-1].response["output"], user(LONG)]
        assert (await send(stage, after, tools=TOOLS)).tally.tokens_tokenized <= usual + 3


async def test_side_calls_push_nothing_out() -> None:
    """Subagents, titles and a compaction stand beside the main loop."""
    dialect = chatml()
    async with staged(ScriptedEngine(dialect, SCRIPT), dialect) as stage:
        history, told = await loop(stage, 3, tools=TOOLS)
        usual = told[-1].tally.tokens_tokenized
        await loop(stage, 3, "subagent", instructions="You are a subagent.")
        await send(stage, [user("Write a title.")])
        compaction = [*history, *told[-1].response["output"], user("Summarise all of it.")]
        assert (await send(stage, compaction, tools=TOOLS)).tally.tokens_tokenized < usual
        after = [*history, *told[-1].response["output"], user(LONG)]
        assert (await send(stage, after, tools=TOOLS)).tally.tokens_tokenized <= usual + 3


async def test_histories_that_end_alike_go_on_each_from_its_own() -> None:
    dialect = chatml()
    async with staged(ScriptedEngine(dialect, SCRIPT), dialect, checks_rendering=True) as stage:
        ended = []
        for name in ("one", "other"):
            history, told = await loop(stage, 2, name, tools=TOOLS)
            history = [*history, *told[-1].response["output"], user("Go on.")]
            ended.append((history, await send(stage, history, tools=TOOLS)))
        usual = ended[0][1].tally.tokens_tokenized
        for history, last in ended:
            after = [*history, *last.response["output"], user("Go on.")]
            told_after = await send(stage, after, tools=TOOLS)
            assert told_after.tally.tokens_tokenized <= usual + 3
            # Other instructions stand before the same items: nothing of it is known.
            elsewhere = await send(stage, after, tools=TOOLS, instructions="Be brief.")
            assert elsewhere.tally.tokens_tokenized > len(history) * usual


async def test_turn_of_a_known_history_weighs_what_it_would_weigh_alone() -> None:
    dialect = chatml()
    async with (
        staged(ScriptedEngine(dialect, SCRIPT), dialect) as stage,
        staged(ScriptedEngine(dialect, SCRIPT), dialect) as other,
    ):
        history, told = await loop(stage, 3, tools=TOOLS)
        # The same items, one of them spelt at length, which the cache takes for the same.
        wide = {**history[0], "content": [{"type": "input_text", "text": history[0]["content"]}]}
        again = [wide, *history[1:], *told[-1].response["output"], user(LONG)]
        weights = []
        for each in (stage, other):
            listener = Listener()
            running = await each.start(None, listener, input=again, store=False, tools=TOOLS)
            weights.append(running.held_bytes)
            await listener.all()
        assert running.tally.items_validated > told[-1].tally.items_validated
        assert weights[0] == weights[1] > 5 * len(LONG)


async def test_pictures_of_a_known_history_are_told_each_time() -> None:
    dialect = chatml()
    async with staged(ScriptedEngine(dialect, SCRIPT), dialect) as stage:
        picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
        history = [user("Look."), {"type": "message", "role": "user", "content": [picture]}]
        for _ in range(3):
            told = await send(stage, history)
            assert told.tally.media_told == 1
            history = [*history, *told.response["output"], user(LONG)]


async def test_two_ends_are_weighed_as_what_they_hold_together() -> None:
    dialect = chatml()
    async with staged(ScriptedEngine(dialect, SCRIPT), dialect) as stage:
        sizes = []
        history, told = await loop(stage, 5)
        cache = cache_of(stage)
        for number in range(4):
            before = cache.bytes
            history = [*history, *told[-1].response["output"], user(f"More {number} {LONG}")]
            told.append(await send(stage, history))
            sizes.append(cache.bytes - before)
        # It grows by what is new in a turn, not by another history.
        assert max(sizes) < 1.2 * min(sizes)
        assert cache.bytes_of(OWNER) == cache.bytes
        # A fork adds what is its own.
        before = cache.bytes
        await send(stage, [*history[:-1], user("A fork.")])
        assert cache.bytes - before < 1.5 * max(sizes)


@pytest.mark.parametrize("way", ["shrink", "trim", "forget"])
async def test_nothing_is_left_of_what_is_forgotten(way: str) -> None:
    dialect = chatml()
    async with staged(ScriptedEngine(dialect, SCRIPT), dialect) as stage:
        cache = cache_of(stage)
        history, told = await loop(stage, 4, tools=TOOLS)
        for text in ("one", "two"):
            told.append(await send(stage, [*history[:-1], user(text)], tools=TOOLS))
        told.append(await send(stage, history, tools=TOOLS))
        if way == "shrink":
            while cache.bytes:
                before = cache.bytes
                cache.shrink(1)
                assert cache.bytes < before
        elif way == "trim":
            cache.trim(OWNER, 0)
        else:
            for turn in told:
                await cache.forget(OWNER, turn.response["id"])
        assert (cache.bytes, cache.bytes_of(OWNER)) == (0, 0)
        assert (await send(stage, history, tools=TOOLS)).tally.items_validated == len(history)


async def test_tools_in_another_spelling_are_the_same_tools() -> None:
    dialect = chatml()
    async with staged(ScriptedEngine(dialect, SCRIPT), dialect, checks_rendering=True) as stage:
        history, told = await loop(stage, 2, tools=TOOLS)
        usual = told[-1].tally.tokens_tokenized
        respelt = [dict(reversed(tool.items())) for tool in TOOLS]
        history = [*history, *told[-1].response["output"], user(LONG)]
        again = await send(stage, history, tools=respelt)
        assert again.tally.tool_decodes == 0
        assert again.tally.tokens_tokenized <= usual + 3
        changed = [{**TOOLS[0], "description": "Another one."}]
        other = await send(stage, history, tools=changed)
        assert other.tally.tool_decodes == 1
        assert other.tally.tokens_tokenized > 3 * usual
