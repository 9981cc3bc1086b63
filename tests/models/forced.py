"""Is a forced call held to the words in which the model's own template writes it?

The judge writes a call; what it writes must be what a forced answer begins with, and then what the structural tag
allows, as llguidance decides. What the tag must forbid is tried with a value of another type.
"""

from __future__ import annotations

import json
import re

import msgspec

from segue.seams.model import Grammar, Scene
from segue.vocabularies.vocabulary import Own
from segue.wire.requests import ToolChoiceName
from tests.contracts.dialect import message
from tests.models.cells import calls_of
from tests.models.talk import FIRST, Absent, Called, Model, Talk, tools
from tests.readers.following import is_accepted

WHOLE = Called(
    "search",
    {
        "filter": {"kind": "new", "sizes": [1, 2.5]},
        "tags": ["a", "b c"],
        "limit": 3,
        "ratio": 0.5,
        "is_dry": True,
        "text": 'Say "hi", {then} <go>.\nAnd [so] on',
    },
)
LEAST = Called("search", {"filter": {}})


# What ends a thought, before a call.
THOUGHT_ENDS = re.compile(
    r".*(?:</(?:seed:|mm:)?think(?::opensource)?>|<\|close\|>think<\|sep\|>|<channel\|>|\[/THINK\]"
    r"|<\|END_THINKING\|>|<\|channel\|>analysis<\|message\|><\|end\|><\|start\|>assistant)\s*",
    re.DOTALL,
)


def check(model: Model) -> None:
    """`AssertionError` where a call that the template writes could not be forced."""
    if not model.takes_tools:
        raise Absent("its template has no words for calls")
    for call in (WHOLE, LEAST):
        for choice in (ToolChoiceName(type="function", name="search"), "required"):
            _check(model, call, choice)


def _check(model: Model, call: Called, choice: object) -> None:
    _, sampled = calls_of(model, call, thought="")
    head = msgspec.structs.replace(Talk(model).head, tool_choice=choice, tools=tools())
    scene = Scene(head, None, (message("user", FIRST),), can_constrain=True, can_follow_tags=True)
    rendered = model.dialect.render(scene)
    said = _in_json(model.judge.shown(sampled), call)
    begun = THOUGHT_ENDS.sub("", model.judge.shown(rendered.lead))
    if model.family.declares_otherwise:
        said = said.replace("commentary json", "commentary <|constrain|>json")
    assert begun in said, f"begins with {begun!r}, but the template has {said[:300]!r}"
    is_held = isinstance(rendered.schema, Grammar)
    assert begun or is_held or said.startswith("{"), f"nothing leads to {said[:300]!r}"
    if not isinstance(rendered.schema, Grammar):
        # The family's own format is JSON after these words.
        return
    rest = said[said.index(begun) + len(begun) :]
    if not begun:
        rest = THOUGHT_ENDS.sub("", rest)
    vocabulary = model.dialect._bound.vocabulary
    ids = vocabulary.ids(Own(rest))
    while ids and (ids[-1] in model.dialect.stops or not vocabulary.bytes_of(ids[-1]).strip()):
        if is_accepted(rendered.schema, vocabulary, ids):
            return
        ids = ids[:-1]
    assert is_accepted(rendered.schema, vocabulary, ids), f"forbids {rest[:400]!r} after {begun!r}"


def _in_json(said: str, call: Called) -> str:
    """Objects and lists that a template writes in Python's notation are forced as JSON, which is read as well."""
    for value in call.arguments.values():
        if isinstance(value, dict | list):
            said = said.replace(str(value), json.dumps(value))
    return said
