"""A watcher hears everything new once, as one message, and nothing where nothing changed."""

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from segue.errors import TooMany
from segue.responses.websocket import SessionStatus
from segue.seams.engine_status import EngineStatus
from segue_dashboard.feed import IDLE_S, TICK_S, TURNS_MAX, WATCHERS_MAX, Feed, Sources, Watcher
from segue_dashboard.history import OWNERS_MAX, REFUSALS_MAX, RING_MAX, RecentTurns
from segue_dashboard.views import CacheUse, Viewer
from tests.dashboard.made import glance, settled

ANNA = Viewer("anna", is_operator=False)
OPERATOR = Viewer("operator", is_operator=True)
WAIT_S = 5


async def answers() -> dict[str, bool]:
    return {"engine:scripted": True}


def make_feed(probe: Any = answers) -> Feed:
    return Feed(
        RecentTurns(),
        Sources(
            models=lambda: ["scripted"],
            sessions=lambda: (),
            runnings=lambda: (),
            memory=lambda: [CacheUse("turns", 1, 2)],
            probe=probe,
            replicas=lambda checks: [
                EngineStatus("scripted", name, up) for name, up in checks.items()
            ],
            backlog=lambda: 0,
            lag_ms=lambda: 1.25,
        ),
    )


async def told(watcher: Watcher) -> dict[str, Any] | None:
    data = await watcher.update()
    return None if data is None else msgspec.json.decode(data)


async def test_turns_are_told_once_and_then_there_is_silence() -> None:
    feed = make_feed()
    with feed.watching(ANNA) as watcher:
        assert await told(watcher) is not None, "the first picture"
        feed.history.observe(settled("resp_1"))
        feed.history.observe(settled("resp_2", parent="resp_1"))

        update = await told(watcher)

        assert update is not None
        assert [turn["id"] for turn in update["turns"]] == ["resp_1", "resp_2"]
        assert update["turns"][1]["parent"] == "resp_1"
        assert update["picture"]["totals"]["reused"] == 16
        assert await told(watcher) is None


async def test_page_that_comes_late_hears_the_recent_past() -> None:
    feed = make_feed()
    for number in range(RING_MAX + 50):
        feed.history.observe(settled(f"resp_{number}"))

    with feed.watching(ANNA) as watcher:
        update = await told(watcher)

    assert update is not None
    assert len(update["turns"]) == TURNS_MAX
    assert update["turns"][-1]["id"] == f"resp_{RING_MAX + 49}"
    assert update["missed"] == RING_MAX - TURNS_MAX
    assert update["picture"]["totals"]["turns"] == RING_MAX + 50


async def test_key_never_hears_of_another_owners_turns() -> None:
    feed = make_feed()
    with feed.watching(ANNA) as watcher:
        await told(watcher)
        feed.history.observe(settled("resp_foreign", owner="bert"))
        feed.history.note_refusal("http", "invalid_json", "req_1")

        assert await told(watcher) is None


async def test_operator_hears_totals_and_no_conversations() -> None:
    feed = make_feed()
    with feed.watching(OPERATOR) as watcher:
        feed.history.observe(settled("resp_foreign", owner="bert", status="failed"))
        feed.history.note_refusal("http", "invalid_json", "req_1")
        feed.history.note_refusal("http", "invalid_json", "req_1")

        update = await told(watcher)

    assert update is not None
    assert update["turns"] == []
    assert update["picture"]["totals"]["failed"] == 1
    assert [(one["code"], one["count"]) for one in update["picture"]["refusals"]] == [
        ("invalid_json", 2)
    ]
    assert update["picture"]["memory"] == [{"name": "turns", "bytes": 1, "bytes_max": 2}]


async def test_key_sees_neither_caches_nor_engines_of_the_process() -> None:
    feed = make_feed()
    with feed.watching(ANNA) as watcher:
        update = await told(watcher)

    assert update is not None
    picture = update["picture"]
    assert (picture["memory"], picture["replicas"], picture["backlog"]) == ([], [], None)
    assert picture["lag_ms"] is None


async def test_engine_that_does_not_answer_does_not_hold_the_feed_up() -> None:
    asked = asyncio.Event()

    async def silent() -> dict[str, bool]:
        asked.set()
        await asyncio.Event().wait()
        return {}

    feed = make_feed(silent)
    with feed.watching(OPERATOR) as watcher:
        assert await told(watcher) is not None
        await asyncio.wait_for(asked.wait(), WAIT_S)
        feed.history.observe(settled())
        assert await told(watcher) is not None


async def test_engines_are_told_once_they_have_answered() -> None:
    done = asyncio.Event()

    async def probe() -> dict[str, bool]:
        done.set()
        return {"scripted": False}

    feed = make_feed(probe)
    with feed.watching(OPERATOR) as watcher:
        await told(watcher)
        await asyncio.wait_for(done.wait(), WAIT_S)
        await asyncio.sleep(0)
        update = await told(watcher)

    assert update is not None
    assert [one["is_up"] for one in update["picture"]["replicas"]] == [False]


async def test_engine_check_that_breaks_is_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken() -> dict[str, bool]:
        raise RuntimeError("no")

    feed = make_feed(broken)
    with feed.watching(OPERATOR) as watcher:
        await told(watcher)
        for _ in range(3):
            await asyncio.sleep(0)

    assert "health check of the engines failed" in caplog.text


async def test_watchers_are_limited_and_places_come_back() -> None:
    feed = make_feed()
    open_pages = [feed.watching(ANNA) for _ in range(WATCHERS_MAX)]
    for page in open_pages:
        page.__enter__()

    with pytest.raises(TooMany), feed.watching(ANNA):
        pass
    open_pages.pop().__exit__(None, None, None)
    with feed.watching(ANNA) as watcher:
        assert b"hello" in watcher.hello()
    for page in open_pages:
        page.__exit__(None, None, None)


def test_watchers_ask_often_only_while_something_happens() -> None:
    feed = make_feed()
    assert feed.pause_s == IDLE_S
    feed.history.observe(settled())
    assert feed.pause_s == TICK_S


def test_what_is_remembered_has_a_limit() -> None:
    feed = make_feed()
    for number in range(OWNERS_MAX + 5):
        feed.history.observe(settled(owner=f"owner{number}"))
    for number in range(REFUSALS_MAX + 5):
        feed.history.note_refusal("http", f"code{number}", "req_1")

    assert len(feed.history._owners) == OWNERS_MAX
    assert len(feed.history._refusals) == REFUSALS_MAX
    assert len(feed.history._ring) == RING_MAX


async def test_connections_are_looked_at_once_for_all_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However slow the machine is, the next look is later than all pages.
    monkeypatch.setattr("segue_dashboard.feed.SURVEY_PART", 1e6)
    looks = 0

    def sessions() -> list[SessionStatus]:
        nonlocal looks
        looks += 1
        return [glance(number, running=number % 3) for number in range(2_000)]

    feed = make_feed()
    feed = Feed(feed.history, replace(feed._sources, sessions=sessions))
    with ExitStack() as pages:
        watchers = [pages.enter_context(feed.watching(ANNA)) for _ in range(16)]
        watchers += [pages.enter_context(feed.watching(OPERATOR)) for _ in range(16)]
        updates = await asyncio.gather(*(told(watcher) for watcher in watchers))
        counts = {update["picture"]["connections"]["count"] for update in updates if update}
    assert counts == {2_000}
    assert looks == 1
