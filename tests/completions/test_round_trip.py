"""An answer goes out as a completion and comes back as a message: it is known as what the model wrote."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from segue.completions.answer import encode_completion
from segue.completions.messages import translate
from segue.completions.request import AnswerForm
from segue.resent.answers import answer_length
from segue.turn.decide import End
from segue.wire.codec import decode_item
from segue.wire.items import Item
from tests.completions.test_stream import play

ARGUMENTS = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)
WROTE = st.one_of(
    st.tuples(st.just("message"), st.text(min_size=1, max_size=5).map(lambda text: [text])),
    st.tuples(st.just("reasoning"), st.text(min_size=1, max_size=5).map(lambda text: [text])),
    st.tuples(st.just("function"), ARGUMENTS.map(lambda value: [json.dumps(value)])),
    st.tuples(st.just("custom"), st.text(max_size=5).map(lambda text: [text])),
)


def returned(message: dict[str, Any]) -> list[Item]:
    """The items of a message as the next request has them."""
    found = translate(json.dumps(message).encode(), "messages[1]", is_newest=False, is_custom=False)
    return [decode_item(item, "input[1]") for item in found.items]


def respelt(message: dict[str, Any]) -> dict[str, Any]:
    """As clients that parse the arguments write it."""
    calls = [dict(call) for call in message.get("tool_calls", ())]
    for call in calls:
        if "function" in call:
            arguments = json.loads(call["function"]["arguments"])
            spelt = json.dumps(arguments, separators=(",", ":"), sort_keys=True)
            call["function"] = {**call["function"], "arguments": spelt}
    return {**message, **({"tool_calls": calls} if calls else {})}


@given(st.lists(WROTE, min_size=1, max_size=5))
def test_answer_that_comes_back_is_known_whatever_its_order(
    wrote: list[tuple[str, list[str]]],
) -> None:
    _, response = play(wrote, set(), End("completed"))
    sampled = [decode_item(raw, "output") for raw in response.output]
    whole = json.loads(encode_completion(response, AnswerForm()))
    message = whole["choices"][0]["message"]
    thoughtless = {name: one for name, one in message.items() if name != "reasoning_content"}
    asked = decode_item(b'{"type":"message","role":"user","content":"And?"}', "input[9]")
    for spelling in (message, respelt(message), thoughtless):
        items = returned(spelling)
        if spelling is thoughtless and all(kind == "reasoning" for kind, _ in wrote):
            continue
        assert answer_length(sampled, [*items, asked]) == len(items), spelling
