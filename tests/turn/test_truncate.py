"""Dropping the oldest items, as values and through the product."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from segue.turn.resolve import pair_calls
from segue.turn.truncate import truncate
from segue.turn.values import Head, Round, Scene, id_array
from segue.wire.codec import decode_item
from segue.wire.items import Item, call_of
from tests.support import MODEL, fetch, serving


def item(**fields: object) -> Item:
    return decode_item(json.dumps(fields).encode(), "input[0]")


def user(text: str) -> Item:
    return item(role="user", content=text)


def call(number: int) -> Item:
    return item(type="function_call", call_id=f"call_{number}", name="f", arguments="{}")


def output(number: int, text: str) -> Item:
    return item(type="function_call_output", call_id=f"call_{number}", output=text)


@given(st.lists(st.text(max_size=50), min_size=1, max_size=8), st.floats(0.01, 0.99))
def test_no_output_outlives_its_call_and_the_last_item_stays(
    texts: list[str], share: float
) -> None:
    first, *rest = texts
    rounds = [Round((user(first),), (call(0),), (id_array([1]),), did_sample=True)]
    for number, text in enumerate(rest):
        wrote = (call(number + 1),)
        rounds.append(Round((output(number, text),), wrote, (id_array([1]),), did_sample=True))
    last = output(len(rest), "last"), user("and now?")
    short = truncate(Scene(Head(), None, last, tuple(rounds)), share)
    items = [one for kept in short.rounds for one in (*kept.given, *kept.wrote)]
    assert pair_calls({}, [*items, *short.given]) == {}
    assert short.given[-1] == last[-1]
    for kept in short.rounds:
        assert len(kept.ids) == len(kept.wrote)
        assert kept.did_sample == bool(kept.wrote)
        assert all(call_of(one.value) for one in kept.wrote)


def test_tools_and_settings_that_items_have_brought_stay() -> None:
    added = item(type="additional_tools", tools=[{"type": "function", "name": "f"}])
    effort = item(type="configuration_update", reasoning={"effort": "low"})
    given = (added, user("old " * 100), effort, user("old " * 100), user("now"))

    short = truncate(Scene(Head(), None, given), 0.99)

    assert short.given == (added, effort, given[-1])


async def test_client_that_allows_truncation_is_answered_from_the_newest_items() -> None:
    history = [{"role": "user", "content": f"number {n} " * 40} for n in range(60)]
    body = {"model": MODEL, "input": history, "store": False}
    async with serving(context_tokens=2_000) as served:
        refused = await fetch(served, "POST", "/v1/responses", body)
        assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")
        answered = await fetch(served, "POST", "/v1/responses", {**body, "truncation": "auto"})
        assert answered.json["status"] == "completed"
        assert answered.json["usage"]["input_tokens"] <= 1_800
        assert "number 59" in answered.json["output"][0]["content"][0]["text"]
