"""Reports of many turns become a few sentences, the dearest first."""

from __future__ import annotations

from typing import Any

import msgspec

from segue.reports.advice import SORTED, Traffic, add_up, advise, unnamed
from segue.wire.cache import CacheReport, Place
from segue_cli.client.traffic import CALM, told


def report(number: int, **fields: Any) -> CacheReport:
    base: dict[str, Any] = {"model": "m", "verdict": "hit", "input_tokens": 12_000}
    return CacheReport(response_id=f"resp_{number}", **{**base, **fields})


def lossy(number: int, reason: Any, lost: int, place: Place | None = None) -> CacheReport:
    fields = {"verdict": "prompt_changed", "reason": reason, "lost_tokens": lost, "place": place}
    return report(number, lost_ms=100.0, **fields)


TOOLS = Place("tools", 0, "search", change="reordered")
CLOCK = Place("instructions", character=10)


def test_dearest_comes_first_and_says_what_helps() -> None:
    rows = [("codex", lossy(n, "tools_changed", 11_200, TOOLS)) for n in range(9, 5, -1)]
    rows += [("codex", report(5)), ("bot", lossy(4, "input_changed", 300, CLOCK))]
    advice = advise([add_up(rows)])
    assert (advice.turns, advice.lost_tokens, advice.input_tokens) == (6, 45_100, 72_000)
    first, second = advice.costs
    assert (first.client, first.turns, first.of_turns) == ("codex", 4, 5)
    assert (first.lost_tokens, first.response_id) == (44_800, "resp_9")
    assert "in 4 of 5 turns: 11,200 tokens each, 44,800 in all" in first.words
    assert SORTED in first.advice
    assert "'search'" in first.advice
    assert "line 1, character 10" in second.advice
    lines = "\n".join(told(advice))
    assert "last hour: 6 turns, 72,000 tokens of prompts" in lines
    assert "1. codex, model m: the tools changed" in lines
    assert "see: segue explain resp_9" in lines


def test_workers_add_up_and_travel_as_bytes() -> None:
    one = add_up([("bot", lossy(1, "input_changed", 300, CLOCK))])
    other = add_up([("bot", lossy(2, "input_changed", 500, CLOCK)), ("", report(3))])
    encoded = msgspec.msgpack.encode(other)
    advice = advise([one, msgspec.msgpack.decode(encoded, type=Traffic)])
    assert (advice.turns, len(advice.costs)) == (3, 1)
    assert (advice.costs[0].lost_tokens, advice.costs[0].of_turns) == (800, 2)


def test_turns_of_others_count_without_their_names() -> None:
    added = Place("tools", 0, "search", change="added")
    rows = [("codex", unnamed(lossy(n, "tools_changed", 100, added))) for n in (3, 2)]
    (cost,) = advise([add_up(rows)]).costs
    assert (cost.lost_tokens, cost.response_id) == (200, "")
    assert cost.advice.startswith("A tool was added. Send all tools")
    assert not any("explain" in line for line in told(advise([add_up(rows)])))
    # Of its own turns an owner gets the newest, in whichever worker it ran.
    own = add_up([("codex", lossy(1, "tools_changed", 100, added))])
    (cost,) = advise([add_up(rows), own]).costs
    assert (cost.lost_tokens, cost.response_id) == (300, "resp_1")
    assert cost.advice.startswith("The tool 'search' was added.")


def test_calm_hour_says_so() -> None:
    assert list(told(advise([add_up([("bot", report(1))])])))[-1] == CALM
