"""A call whose input is held to a grammar: our words around it, the model's inside, in every family."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from segue.seams.history import Turn
from segue.seams.model import Grammar, Ids, Scene
from segue.seams.prompt import Head, id_array
from segue.wire.requests import ToolChoiceName
from segue.wire.tools import CustomTool, NamespaceTool
from tests.contracts import dialect as contract
from tests.contracts.dialect import DialectCase, Heard, cold, flat, message, tools_of, turn_after
from tests.contracts.test_dialects import MAKERS

LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
TOOL = CustomTool(name="run", format=msgspec.Raw(msgspec.json.encode(LARK)))
CHOICE = ToolChoiceName(type="custom", name="run")
SCENE = Scene(
    Head(tools=tools_of(NamespaceTool(name="sh", tools=[TOOL])), tool_choice=CHOICE),
    None,
    (message("user", "Run it."),),
    can_constrain=True,
)
few = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module", params=MAKERS)
def family(request: pytest.FixtureRequest) -> DialectCase:
    return MAKERS[request.param]()


@few
@given(data=st.data(), is_cut=st.booleans(), is_stopped=st.booleans())
def test_input_is_read_as_it_was_sampled(
    family: DialectCase, data: st.DataObject, is_cut: bool, is_stopped: bool
) -> None:
    text = data.draw(contract.texts(*family.marks, '"}', "\n"))
    rendered = family.dialect.render(SCENE)
    assert rendered.schema == Grammar("lark", "start: /.+/")
    stop = [min(family.dialect.stops)] if is_stopped else []
    ids = [*rendered.lead, *family.vocabulary.encode(text), *stop]

    parsed = contract.read(family.dialect, SCENE, [ids], is_cut=is_cut)

    is_left = is_cut and not is_stopped
    assert contract.heard(parsed) == [Heard("custom", text, "run", "sh", is_cut=is_left)]
    sampled = ids[: len(ids) - len(stop)]
    assert contract.all_ids(parsed)[: len(sampled)] == sampled
    assert contract.read(family.dialect, SCENE, [[id] for id in ids], is_cut=is_cut) == parsed


def test_next_prompt_goes_on_behind_the_input(family: DialectCase) -> None:
    rendered = family.dialect.render(SCENE)
    sampled = rendered.lead + family.vocabulary.encode('say "hi"\n')
    past: Turn = turn_after(family.dialect, SCENE, sampled.tolist())
    answer = contract.item("custom_tool_call_output", call_id="c", output="done")
    following = replace(SCENE, past=past, given=(answer,))

    warm = family.dialect.render(following)

    seen = flat(rendered.context) + rendered.cue + sampled
    assert flat(warm.prompt)[: len(seen)] == seen
    assert flat(family.dialect.render(cold(following)).prompt) == flat(warm.prompt)


def test_engine_that_is_held_to_nothing_writes_json(family: DialectCase) -> None:
    scene = replace(SCENE, can_constrain=False)
    assert family.dialect.render(scene).schema is None
    written = family.dialect.write(
        [contract.item("custom_tool_call", call_id="c", name="run", namespace="sh", input='a"b')]
    )

    heard = contract.heard(contract.read(family.dialect, scene, [written]))

    assert heard == [Heard("custom", 'a"b', "run", "sh")]


def test_model_that_says_nothing_has_called_nothing(family: DialectCase) -> None:
    """Not even the beginning was read: the engine broke off before it."""
    parsed = contract.read(family.dialect, SCENE, [])
    assert contract.heard(parsed) == []
    assert id_array(contract.all_ids(parsed))
    assert family.dialect.reader(SCENE).feed(Ids([])) == []
