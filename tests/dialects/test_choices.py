"""What `tool_choice` forbids is never a call, and where calls may not be parallel there is one at most."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue.dialects.messages import MessagesDialect
from segue.errors import EngineFailed
from segue.seams.model import Delta, Deltas, Ids, Scene
from segue.seams.prompt import Head
from segue.wire.requests import ToolChoiceName
from tests.contracts import dialect as contract
from tests.contracts.dialect import TOOLS, DialectCase, call, custom_call, message
from tests.contracts.test_dialects import MAKERS

ONLY_LOOK = ToolChoiceName(
    type="allowed_tools", mode="auto", tools=[ToolChoiceName(type="function", name="look")]
)
NONE = Scene(Head(tools=TOOLS, tool_choice="none"), None, ())
SOME = Scene(Head(tools=TOOLS, tool_choice=ONLY_LOOK), None, ())
SINGLE = Scene(Head(tools=TOOLS, parallel_tool_calls=False), None, ())
CALLS = ("function", "custom")
few = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module", params=MAKERS)
def family(request: pytest.FixtureRequest) -> DialectCase:
    return MAKERS[request.param]()


@few
@given(data=st.data())
def test_no_choice_is_broken_whatever_is_sampled(family: DialectCase, data: st.DataObject) -> None:
    ids = data.draw(contract.sampled_ids(family))
    for scene in (NONE, SOME, SINGLE):
        parsed = contract.read(family.dialect, scene, [ids])
        calls = [one for one in contract.heard(parsed) if one.kind in CALLS]
        if scene is NONE:
            assert not calls
        elif scene is SOME:
            assert all(one.name == "look" for one in calls)
        else:
            assert len(calls) <= 1
        if scene is not SINGLE:
            assert contract.all_ids(parsed)[: len(ids)] == ids
        one_by_one = contract.read(family.dialect, scene, [[id] for id in ids])
        assert one_by_one == parsed


def test_forbidden_call_is_text(family: DialectCase) -> None:
    """Nothing is hidden: what the model wrote is there to read."""
    ids = family.dialect.write([custom_call("patch", "add"), call("look", '{"q": "x"}')])
    for scene in (NONE, SOME):
        heard = contract.heard(contract.read(family.dialect, scene, [ids]))
        assert heard[0].kind == "message"
        assert "add" in heard[0].text
        kinds = [one.kind for one in heard]
        assert ("function" in kinds) == (scene is SOME and "look" not in heard[0].text)


def test_allowed_call_is_one(family: DialectCase) -> None:
    ids = family.dialect.write([call("look", '{"q": "x"}')])

    heard = contract.heard(contract.read(family.dialect, SOME, [ids]))

    assert [(one.kind, one.name, one.text) for one in heard] == [("function", "look", '{"q": "x"}')]


def test_reader_says_when_one_call_is_enough(family: DialectCase) -> None:
    """What follows is not read, and is no part of history."""
    items = [message("assistant", "Well."), call("look", '{"q": "1"}'), call("look", '{"q": "2"}')]
    ids = family.dialect.write(items).tolist()
    reader = family.dialect.reader(SINGLE)
    count = next((n for n, id in enumerate(ids) if reader.feed(Ids([id])) and reader.is_over), None)

    assert count is not None
    assert reader.is_over
    assert reader.feed(Ids(ids[count + 1 :])) == []
    parsed = contract.read(family.dialect, SINGLE, [ids])
    heard = contract.heard(parsed)
    assert [(one.kind, one.is_cut) for one in heard] == [("message", False), ("function", False)]
    assert '"1"' in heard[1].text
    assert len(contract.all_ids(parsed)) < len(ids) + 2
    parallel = contract.heard(contract.read(family.dialect, contract.OFFERING, [ids]))
    assert [one.kind for one in parallel] == ["message", "function", "function"]


def test_endpoint_that_calls_what_it_may_not_has_failed() -> None:
    for scene, name in ((NONE, "look"), (SOME, "patch"), (SOME, "unknown")):
        reader = MessagesDialect().reader(scene)
        with pytest.raises(EngineFailed, match="not allowed"):
            reader.feed(Deltas((Delta(call_index=0, call_name=name, call_arguments="{}"),)))


def test_endpoint_that_calls_twice_is_heard_once() -> None:
    reader = MessagesDialect().reader(SINGLE)
    first = Delta(call_index=0, call_name="look", call_arguments="{}")
    second = Delta(call_index=1, call_name="look", call_arguments='{"q": "2"}')
    parsed = reader.feed(Deltas((first, second)))
    parsed += reader.feed(Deltas((Delta(text="And more."),)))
    assert reader.is_over

    heard = contract.heard(parsed + reader.close(is_cut=True))

    assert [(one.kind, one.text, one.is_cut) for one in heard] == [("function", "{}", False)]
