"""Whatever tools a request offers, a call that comes back by a name is the call of the tool that has this name.

Each set goes through the border (`decode_tools`, hosted tools), which refuses what could not be told apart.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from segue.dialects.messages import MessagesDialect
from segue.errors import InvalidRequest
from segue.readers.offers import callable_offers, opened_call
from segue.seams.model import Delta, Deltas, Ids, ItemOpened, Parsed, Scene
from segue.seams.prompt import Head
from segue.wire.codec import decode_item, decode_tools
from segue.wire.effects import NO_EFFECTS, apply_effects
from segue.wire.tools import FunctionTool, Offer, Tools
from tests.readers.test_formats import ids_of, reader, vocabulary
from tests.readers.written import WRITTEN

LONG = "a" * 60
# Few letters, so that names are often alike once they are cut or respelled.
plain = st.text("ab_-", min_size=1, max_size=4) | st.sampled_from(
    [LONG, f"{LONG}_list", f"{LONG}_lists", f"{LONG * 2}ab", "tool_search", "shell", "a__b", "functions"]
)  # fmt: skip
# As the protocol of remote servers allows them.
remote = plain | st.text("ab_-./", min_size=1, max_size=6)
functions = st.fixed_dictionaries({"type": st.sampled_from(["function", "custom"]), "name": plain})
deferred = functions.map(lambda tool: {**tool, "defer_loading": True})
namespaces = st.fixed_dictionaries(
    {
        "type": st.just("namespace"),
        "name": plain,
        "tools": st.lists(functions, min_size=1, max_size=3),
    }
)
builtins = st.sampled_from([{"type": "tool_search"}, {"type": "shell"}, {"type": "apply_patch"}])
definitions = st.lists(functions | deferred | namespaces | builtins, max_size=6)
hosted = st.lists(st.tuples(plain, remote, st.booleans()), max_size=3)


def offered(given_tools: list[Any], remote_tools: list[tuple[str, str, bool]]) -> Tools:
    """The tools of a request, with those of remote servers."""
    tools, _ = decode_tools(json.dumps(given_tools).encode(), None)
    return tools.with_hosted(
        [
            Offer(
                FunctionTool(name=name), label, "", "mcp", "server", needs_approval=needs_approval
            )
            for label, name, needs_approval in remote_tools
        ]
    )


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """A request that was accepted, and tools that an item has brought."""
    brought = draw(definitions)
    item = {"type": "additional_tools", "role": "developer", "tools": brought}
    try:
        tools = offered(draw(definitions), draw(hosted))
        items = [decode_item(json.dumps(item).encode(), "input[0]")]
    except InvalidRequest:
        reject()
    return Scene(Head(tools=tools), None, (), effects=apply_effects(NO_EFFECTS, items))


def meant(scene: Scene) -> dict[str, Offer]:
    """By each name the tool that has it first."""
    found: dict[str, Offer] = {}
    for offer in callable_offers(scene):
        found.setdefault(offer.qualified_name, offer)
    return found


def opened(parsed: list[Parsed]) -> list[ItemOpened]:
    return [part for part in parsed if isinstance(part, ItemOpened)]


@pytest.mark.parametrize("label", ["", "a b", 'a"b', "a>b", "a\nb", "é", "a" * 129])
def test_label_that_no_notation_could_hold_is_refused(label: str) -> None:
    server = {"type": "mcp", "server_label": label, "server_url": "https://a.example"}
    with pytest.raises(InvalidRequest, match="server_label") as refused:
        offered([server], [])
    assert (refused.value.code, refused.value.param) == ("invalid_value", "tools[0].server_label")
    assert offered([server | {"server_label": "a.example"}], []).definitions


SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@SETTINGS
@given(scene=scenes())
def test_chat_endpoint_gets_each_tool_once_and_its_call_comes_back(scene: Scene) -> None:
    dialect = MessagesDialect()
    names = dialect.names(scene)
    tools = meant(scene)
    called = {name: names(name) for name in tools}
    assert len(set(called.values())) == len(tools)
    for name, offer in tools.items():
        parsed = dialect.reader(scene).feed(
            Deltas((Delta(call_index=0, call_name=called[name], call_arguments="{}"),))
        )
        assert opened(parsed) == [opened_call(offer)]


@pytest.mark.parametrize("format", WRITTEN)
@settings(SETTINGS, max_examples=20)
@given(scene=scenes())
def test_family_delivers_each_call_to_the_tool_that_it_names(format: str, scene: Scene) -> None:
    words = vocabulary(format, is_special=True)
    for name, offer in meant(scene).items():
        text = WRITTEN[format].calls((name, {"input": "a"}))
        reading = reader(format, words, scene)
        parsed = reading.feed(Ids(ids_of(format, text, words))) + reading.close(is_cut=False)
        assert opened(parsed) == [opened_call(offer)], name
