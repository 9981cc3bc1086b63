"""Several workers look like one: what is counted is added up, what is listed is listed together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from segue.seams.engine_status import EngineStatus
from segue_dashboard.feed import Feed, Sources
from segue_dashboard.history import RecentTurns
from segue_dashboard.together import together
from segue_dashboard.views import (
    CONNECTIONS_LISTED_MAX,
    FULLEST,
    CacheUse,
    ConnectionRow,
    Connections,
    Picture,
    RefusalCount,
    RunningRow,
    Totals,
    Viewer,
)
from tests.dashboard.made import settled

ANNA = Viewer("anna", is_operator=True)


def picture(number: int, **changed: Any) -> Picture:
    row = ConnectionRow(f"c{number}", 0.0, 1, number, 0, 1, 1)
    fields: dict[str, Any] = {
        "totals": Totals(turns=number, reused=10 * number),
        "connections": Connections(2, 3, number, 1, f"{number}0", [row]),
        "running_count": 1,
        "running": [RunningRow(f"resp_{number}", None, "m", 10 - number)],
        "memory": [CacheUse("turns", number, 100), CacheUse(FULLEST, number, 50)],
        "replicas": [EngineStatus("m", "a", number == 2, 1, None)],
        "refusals": [RefusalCount("http", "x", number, float(number))],
        "backlog": number,
        "lag_ms": float(number),
    }
    return Picture(**fields | changed)


def test_counts_are_added_and_lists_are_joined() -> None:
    both = together([picture(1), picture(2)])
    assert (both.totals.turns, both.totals.reused) == (3, 30)
    assert (both.connections.count, both.connections.lanes, both.connections.cells) == (
        4,
        6,
        "1020",
    )
    assert [row.id for row in both.connections.rows] == ["c2", "c1"]
    assert (both.running_count, [row.id for row in both.running]) == (2, ["resp_2", "resp_1"])
    assert both.memory == [CacheUse("turns", 3, 200), CacheUse(FULLEST, 2, 50)]
    assert both.replicas == [EngineStatus("m", "a", True, 2, None)]
    assert [(one.count, one.at_ms) for one in both.refusals] == [(3, 2.0)]
    assert (both.backlog, both.lag_ms) == (3, 2.0)


def test_key_that_may_not_see_the_process_sees_it_nowhere() -> None:
    bare = {"memory": (), "replicas": (), "refusals": (), "backlog": None, "lag_ms": None}
    both = together([picture(1, **bare), picture(2, **bare)])
    assert (both.memory, both.replicas, both.refusals, both.backlog) == ([], [], [], None)
    assert both.lag_ms is None


def test_lists_of_many_workers_keep_their_limits() -> None:
    assert (
        len(together([picture(n) for n in range(200)]).connections.rows) == CONNECTIONS_LISTED_MAX
    )


def make_feed(worker: str, others: Mapping[str, Feed]) -> Feed:
    async def ask(question: bytes) -> Mapping[str, bytes]:
        return {name: await feed.answer(question) for name, feed in others.items()}

    async def probe() -> dict[str, bool]:
        return {}

    return Feed(
        RecentTurns(),
        Sources(
            models=lambda: ["scripted"],
            sessions=lambda: (),
            runnings=lambda: (),
            memory=lambda: [],
            probe=probe,
            replicas=lambda checks: [],
            backlog=lambda: 0,
            lag_ms=lambda: 0.0,
            ask=ask,
            worker=worker,
        ),
    )


async def test_watcher_hears_turns_of_all_workers_once() -> None:
    there = make_feed("there", {})
    here = make_feed("here", {"there": there})
    there.history.observe(settled("resp_before"))
    with here.watching(ANNA) as watcher:
        first = msgspec.json.decode(await watcher.update() or b"")
        assert [turn["id"] for turn in first["turns"]] == ["resp_before"]
        here.history.observe(settled("resp_1"))
        there.history.observe(settled("resp_2"))
        there.history.observe(settled("resp_foreign", owner="bert"))
        update = msgspec.json.decode(await watcher.update() or b"")
        assert [turn["id"] for turn in update["turns"]] == ["resp_1", "resp_2"]
        assert update["picture"]["totals"]["turns"] == 4
        assert await watcher.update() is None
