"""The checker that the other scenarios rely on sees every broken rule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.events import check_turn, told_alike
from tests.support import MODEL, WEATHER, fetch, serving

Events = list[dict[str, Any]]


def _at(events: Events, kind: str) -> dict[str, Any]:
    return next(event for event in events if event["type"] == kind)


def _drop(kind: str) -> Callable[[Events], None]:
    def breaks(events: Events) -> None:
        events.remove(_at(events, kind))
        for number, event in enumerate(events):
            event["sequence_number"] = number

    return breaks


def _change(kind: str, path: str, value: object) -> Callable[[Events], None]:
    def breaks(events: Events) -> None:
        *steps, last = path.split(".")
        node = _at(events, kind)
        for step in steps:
            node = node[step]
        node[last] = value

    return breaks


def _swap(one: str, two: str) -> Callable[[Events], None]:
    def breaks(events: Events) -> None:
        first, second = events.index(_at(events, one)), events.index(_at(events, two))
        events[first], events[second] = events[second], events[first]
        for number, event in enumerate(events):
            event["sequence_number"] = number

    return breaks


def _repeat_the_end(events: Events) -> None:
    events.append({**events[-1], "sequence_number": len(events)})


BREAKS: dict[str, Callable[[Events], None]] = {
    "created is missing": _drop("response.created"),
    "in_progress is missing": _drop("response.in_progress"),
    "an item is not added": _drop("response.output_item.added"),
    "a part is not added": _drop("response.content_part.added"),
    "a delta is missing": _drop("response.output_text.delta"),
    "a text is not done": _drop("response.output_text.done"),
    "a part is not done": _drop("response.content_part.done"),
    "an item is not done": _drop("response.output_item.done"),
    "the end is missing": _drop("response.completed"),
    "the end is told twice": _repeat_the_end,
    "a number has a gap": _change("response.completed", "sequence_number", 99),
    "the response id changes": _change("response.completed", "response.id", "resp_1"),
    "the item id changes": _change("response.output_item.done", "item.id", "msg_1"),
    "a delta names another item": _change("response.output_text.delta", "item_id", "msg_1"),
    "a delta differs": _change("response.output_text.delta", "delta", "?"),
    "the snapshot differs": _change("response.completed", "response.output", []),
    "a number is null": _change("response.created", "response.temperature", None),
    "a number is a flag": _change("response.completed", "response.usage.total_tokens", True),
    "a sum is wrong": _change("response.completed", "response.usage.total_tokens", 1),
    "logprobs are missing": _change("response.output_text.delta", "logprobs", None),
    "a status is wrong": _change("response.completed", "response.status", "failed"),
    "a lane appears": _change("response.completed", "stream_id", "a"),
    "done comes before its text": _swap("response.output_text.done", "response.content_part.done"),
}


@pytest.fixture
async def told() -> Events:
    async with serving() as served:
        body = {"model": MODEL, "input": "Hello", "tools": [WEATHER], "tool_choice": "none"}
        return (await fetch(served, "POST", "/v1/responses", {**body, "stream": True})).events


async def test_checker_sees_every_broken_rule(told: Events) -> None:
    check_turn(told)
    unseen = []
    for name, breaks in BREAKS.items():
        broken = copy.deepcopy(told)
        breaks(broken)
        try:
            check_turn(broken)
        except (AssertionError, KeyError, StopIteration):
            continue
        unseen.append(name)
    assert unseen == []


async def test_tellings_are_alike_only_if_nothing_but_ids_and_times_differs(told: Events) -> None:
    other = copy.deepcopy(told)
    assert told_alike(other) == told_alike(told)
    _at(other, "response.output_text.done")["text"] = "?"
    assert told_alike(other) != told_alike(told)
