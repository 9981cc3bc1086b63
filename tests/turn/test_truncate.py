"""Dropping the oldest items, as values and through the product."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from segue.seams.history import Round
from segue.seams.model import Scene
from segue.seams.prompt import Head, id_array
from segue.turn.compact import truncate
from segue.turn.resolve import pair_calls
from segue.wire.codec import decode_item
from segue.wire.items import Item
from segue.wire.kinds import call_of
from tests.support import MODEL, fetch, serving


def item(**fields: object) -> Item:
    return decode_item(json.dumps(fields).encode(), "input[0]")


def user(text: str) -> Item:
    return item(role="user", content=text)


def parsed() -> Item:
    return item(role="assistant", content="Well.")


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


# What one step of a history does: somebody asks, or so many tools are called beside each other.
steps = st.lists(st.one_of(st.just(0), st.integers(1, 3)), min_size=1, max_size=6)


@given(steps, st.integers(1, 3), st.floats(0.01, 0.99), st.booleans(), st.data())
def test_outputs_that_end_a_history_stay_with_their_calls_and_the_question(
    before: list[int], last: int, share: float, is_resent: bool, data: st.DataObject
) -> None:
    sizes = st.integers(0, 300)
    rounds, given, number = [], [user("first " * data.draw(sizes))], 0
    for calls in [*before, last]:
        wrote = tuple(call(number + one) for one in range(calls))
        rounds.append(Round(tuple(given), wrote or (parsed(),), did_sample=True))
        given = [output(number + one, "x" * data.draw(sizes)) for one in range(calls)]
        given = data.draw(st.permutations(given)) if given else [user("go on " * data.draw(sizes))]
        number += calls
    if is_resent:
        whole = [one for past in rounds for one in (*past.given, *past.wrote)]
        rounds, given = [], [*whole, *given]
    scene = Scene(Head(), None, tuple(given), tuple(rounds))

    for _ in range(3):
        scene = truncate(scene, share)
        kept = [one for past in scene.history() for one in (*past.given, *past.wrote)]
        kept += scene.given
        assert pair_calls({}, kept) == {}
        raws = [one.raw for one in kept]
        assert raws[-last:] == [one.raw for one in given[-last:]]
        everything = [one for past in rounds for one in (*past.given, *past.wrote)] + given
        questions = [one for one in everything if one.raw.startswith(b'{"role": "user"')]
        assert questions[-1].raw in raws


async def test_client_whose_last_output_does_not_fit_is_told_so() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    history = [
        {"role": "user", "content": "Please compare the two files."},
        {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "call_2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "alpha " * 3_500},
        {"type": "function_call_output", "call_id": "call_2", "output": "beta " * 200},
    ]
    body = {"model": MODEL, "input": history, "tools": [tool], "truncation": "auto"}
    async with serving(context_tokens=4_000, check_rendering=True) as served:
        answered = await fetch(served, "POST", "/v1/responses", body)
        assert answered.json["usage"]["input_tokens"] > 3_700
        history[-1]["output"] = "beta " * 2_000
        refused = await fetch(served, "POST", "/v1/responses", body)
        assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")


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
