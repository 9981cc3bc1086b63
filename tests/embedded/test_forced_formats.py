"""A REAL model under the grammar of another family's calls: whatever the model, what it writes is read as a call.

SmolLM2 has none of these marks as tokens; to it they are text.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import msgspec
import pytest

from segue.readers.call_tags import form_of
from segue.readers.forced import lead_of
from segue.readers.formats import FORMATS
from segue.readers.text_reader import TextReader
from segue.seams.model import Ids, ItemOpened, ItemText, Sampling, Scene
from segue.seams.prompt import Head
from segue.wire.requests import ToolChoiceName
from segue.wire.tools import FunctionTool
from segue_embedded.embedded import EmbeddedEngine
from tests.contracts.dialect import tools_of
from tests.contracts.engine import Bench, chatml
from tests.contracts.turns import said
from tests.embedded.test_embedded import engine, ids_of, sampled

__all__ = ["engine"]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "is_dry": {"type": "boolean"},
        "at": {"type": "object", "properties": {"hour": {"enum": [1, 2]}}, "required": ["hour"],
               "additionalProperties": False},
    },
    "required": ["city", "days", "is_dry"],
    "additionalProperties": False,
}  # fmt: skip
FORMAT_NAMES = [
    "hermes",
    "xml",
    "minimax-m2",
    "dsml",
    "glm",
    "kimi-k2",
    "deepseek-v3",
    "gemma4",
    "pythonic",
]
TOOLS = tools_of(
    FunctionTool(name="get_weather", parameters=msgspec.Raw(json.dumps(SCHEMA).encode())),
    FunctionTool(name="get_time", parameters=msgspec.Raw(json.dumps(SCHEMA).encode())),
)


# One format of each kind in every run; the others take half a minute.
EVERY_RUN = ("xml", "glm", "kimi-k2")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EVERY_RUN else pytest.mark.reliability)
        for name in FORMAT_NAMES
    ],
)
async def test_forced_call_is_read_in_every_format(engine: EmbeddedEngine, name: str) -> None:
    dialect = chatml()
    bound = dialect._bound
    format = next(row for row in FORMATS if row.name == name)
    for choice in (ToolChoiceName(type="function", name="get_time"), "required"):
        head = Head(tools=TOOLS, tool_choice=choice)  # type: ignore[arg-type]
        scene = Scene(head, None, (said("Weather?"),), can_constrain=True, can_follow_tags=True)
        chunks, schema = lead_of(form_of(format, ""), scene, bound.vocabulary)
        lead = bound.vocabulary.ids(*chunks)
        plain = dialect.render(Scene(Head(), None, (said("Weather?"),)))
        job = msgspec.structs.replace(
            Bench(engine, dialect).job(),
            prompt=plain.context.plus(plain.cue + lead),
            scene=scene,
            schema=schema,
            sampling=Sampling(seed=1),
            output_tokens_max=120,
        )
        reader = TextReader(bound, scene, format=format)
        parsed = reader.feed(Ids(lead)) + reader.feed(Ids(ids_of(await sampled(engine, job))))
        parsed += reader.close(is_cut=False)
        opened = [one for one in parsed if isinstance(one, ItemOpened)]
        text = "".join(one.text for one in parsed if isinstance(one, ItemText))
        assert [one.kind for one in opened] == ["function"], text
        assert opened[0].name in ("get_time", "get_weather")
        jsonschema.validate(json.loads(text), SCHEMA)
