"""Holds what a server sent against the types of the newest client: every field, strictly, and nothing that they lack.

The file named on the command line has pairs of a kind and a value; what is wrong with them is printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pydantic
from openai.pagination import SyncPage
from openai.types import Model
from openai.types.responses import (
    CompactedResponse,
    InputTokenCountResponse,
    Response,
    ResponseItemList,
    ResponsesServerEvent,
    ResponseStreamEvent,
)

TYPES: dict[str, pydantic.TypeAdapter[Any]] = {
    "Response": pydantic.TypeAdapter(Response),
    "sse": pydantic.TypeAdapter(ResponseStreamEvent),
    "socket": pydantic.TypeAdapter(ResponsesServerEvent),
    "ItemList": pydantic.TypeAdapter(ResponseItemList),
    "CompactionWindow": pydantic.TypeAdapter(CompactedResponse),
    "InputTokens": pydantic.TypeAdapter(InputTokenCountResponse),
    "ModelCard": pydantic.TypeAdapter(Model),
    "ModelList": pydantic.TypeAdapter(SyncPage[Model]),
}


def unknown(value: object, path: str) -> list[str]:
    """The fields that the client has no name for, wherever they are."""
    found: list[str] = []
    if isinstance(value, pydantic.BaseModel):
        found += [f"{path}.{name}" for name in value.model_extra or {}]
        for name in type(value).model_fields:
            found += unknown(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for one in value:
            found += unknown(one, f"{path}[]")
    return found


def main() -> None:
    """Validate, and tell."""
    shapes = json.loads(Path(sys.argv[2]).read_text())
    wrong: list[str] = []
    extra: set[str] = set()
    for kind, value in shapes:
        try:
            found = TYPES[kind].validate_python(value, strict=True)
        except pydantic.ValidationError as error:
            # Every member of a union complains; those that were meant say something other than a wrong type.
            said = [one for one in error.errors() if one["type"] != "literal_error"]
            meant = [(one["loc"], one["msg"]) for one in said[-3:]]
            wrong.append(f"{kind} {value.get('type', value.get('object'))}: {meant}")
            continue
        if getattr(found, "type", None) != value.get("type"):
            wrong.append(f"{kind} {value.get('type')} was taken for {type(found).__name__}")
        extra.update(unknown(found, kind))
    print(json.dumps({"wrong": sorted(set(wrong)), "extra": sorted(extra), "seen": len(shapes)}))


main()
