"""Holds what a server sent against the types of the newest clients: every field, strictly, and nothing that they lack.

The file named on the command line has pairs of a kind and a value; what is wrong with them is printed. Only the types
of the kinds that occur are imported: that is what takes time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pydantic


def responses() -> dict[str, Any]:
    from openai.pagination import SyncPage
    from openai.types import Model
    from openai.types import responses as types

    return {
        "Response": types.Response,
        "sse": types.ResponseStreamEvent,
        "socket": types.ResponsesServerEvent,
        "ItemList": types.ResponseItemList,
        "CompactionWindow": types.CompactedResponse,
        "InputTokens": types.InputTokenCountResponse,
        "ModelCard": Model,
        "ModelList": SyncPage[Model],
    }


def chat() -> dict[str, Any]:
    from openai.types import ErrorObject
    from openai.types import chat as types

    return {
        "chat answer": types.ChatCompletion,
        "chat event": types.ChatCompletionChunk,
        "chat error": ErrorObject,
    }


def messages() -> dict[str, Any]:
    from anthropic import types
    from anthropic.pagination import SyncPage
    from anthropic.types import beta

    return {
        "messages answer": types.Message,
        "messages event": types.RawMessageStreamEvent,
        "messages count": types.MessageTokensCount,
        "messages model": types.ModelInfo,
        "messages models": SyncPage[types.ModelInfo],
        "messages error": types.ErrorResponse,
        "messages beta answer": beta.BetaMessage,
        "messages beta event": beta.BetaRawMessageStreamEvent,
        "messages beta count": beta.BetaMessageTokensCount,
        "messages beta error": types.ErrorResponse,
    }


APIS: dict[str, Callable[[], dict[str, Any]]] = {"chat": chat, "messages": messages}


@cache
def types_of(api: str) -> dict[str, Any]:
    return APIS.get(api, responses)()


@cache
def adapter(kind: str) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(types_of(kind.partition(" ")[0])[kind])


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
    shapes = json.loads(Path(sys.argv[-1]).read_text())
    wrong: list[str] = []
    extra: set[str] = set()
    for kind, value in shapes:
        try:
            found = adapter(kind).validate_json(json.dumps(value), strict=True)
        except pydantic.ValidationError as error:
            # Every member of a union complains; those that were meant say something other than a wrong type.
            said = [one for one in error.errors() if one["type"] != "literal_error"]
            meant = [(one["loc"], one["msg"]) for one in (said or error.errors())[-3:]]
            wrong.append(f"{kind} {value.get('type', value.get('object'))}: {meant}")
            continue
        if getattr(found, "type", None) != value.get("type"):
            wrong.append(f"{kind} {value.get('type')} was taken for {type(found).__name__}")
        extra.update(unknown(found, kind))
    print(json.dumps({"wrong": sorted(set(wrong)), "extra": sorted(extra), "seen": len(shapes)}))


main()
