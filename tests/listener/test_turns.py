"""A client that did not read is brought up to date, or comes back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from segue.listener.subscribers import SseSubscriber
from segue.listener.turns import _catch_up
from segue.memory.budget import Unread
from segue.responses.routes import write_sse
from segue.turn.notices import Cancel
from segue.turn.running import Running
from segue.wire.events import Event
from tests.pipeline import OWNER, Listener, Stage, staged
from tests.support import until


async def follower(stage: Stage) -> tuple[SseSubscriber, Running]:
    subscriber = SseSubscriber(write_sse, 1 << 20, Unread())
    return subscriber, await stage.start(None, cast(Listener, subscriber), input="Hi.")


async def catch_up(stage: Stage, subscriber: SseSubscriber, after: int) -> None:
    subscriber.missed_after = after
    exchange, services = SimpleNamespace(owner=OWNER), SimpleNamespace(runner=stage.runner)
    await _catch_up(cast(Any, exchange), cast(Any, services), subscriber, after)


async def test_client_that_misses_the_end_of_a_turn_which_no_log_has_is_cut(tmp_path: Path) -> None:
    """The server looked again for ever."""
    async with staged(tmp_path / "turns.db") as stage:
        subscriber, running = await follower(stage)
        await until(lambda: not stage.runner.registry.running)
        stage.runner.registry.remove_ended(OWNER, running.id)
        await stage.records.log.append(OWNER, running.id, [Event("response.created", 0, b"{}")])
        await catch_up(stage, subscriber, 0)
        assert subscriber.is_lost


async def test_client_that_has_missed_nothing_goes_on(tmp_path: Path) -> None:
    async with staged(tmp_path / "turns.db", tokens_per_s=1) as stage:
        subscriber, running = await follower(stage)
        await catch_up(stage, subscriber, running.last)
        assert (subscriber.missed_after, subscriber.is_lost) == (None, False)
        running.notify(Cancel())
