"""What do the wire types look like to a machine? Every one of them as JSON Schema, under its name.

In: the structs of `wire/`, nothing else. Out: named schemas that refer to each other, for the documents that
`openapi/pages` serves. A type that is both received and sent is there twice: as it is accepted, and with
`Written` before its name as we write it, where every field that we always send is required and null is left out.

The structs keep some fields raw, because their bytes are passed on unread. `RAW` says what those bytes are; a test
names the raw fields of which we know nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TypeAlias

import msgspec

from segue.wire import items, requests, response
from segue.wire.cache import CacheReport
from segue.wire.codec import STREAM_ID
from segue.wire.events import EVENT_TYPES, ErrorBody
from segue.wire.tools import ToolDefinition

SchemaValue: TypeAlias = (
    "dict[str, SchemaValue] | list[SchemaValue] | str | int | float | bool | None"
)
Schema: TypeAlias = dict[str, SchemaValue]
Schemas: TypeAlias = dict[str, Schema]

REF = "#/components/schemas/"

# What a client may send; its other types are reached from here.
TAKEN = (
    requests.Create,
    items.ItemValue,
    ToolDefinition,
    requests.SteerFrame,
    requests.AppendFrame,
    requests.NewConversation,
    requests.AddedItems,
)
# What we may send beside items.
SENT = (
    response.Response,
    reduce(or_, EVENT_TYPES),
    ErrorBody,
    response.ItemList,
    response.ModelCard,
    response.ModelList,
    response.Deleted,
    response.TextEcho,
    response.CompactionWindow,
    response.InputTokens,
    response.ConversationObject,
    response.ConversationDeleted,
    CacheReport,
)
# The items that a response may hold.
WRITTEN: tuple[type[items.Body], ...] = (
    items.Message,
    items.Reasoning,
    items.FunctionCall,
    items.CustomToolCall,
    items.ShellCall,
    items.LocalShellCall,
    items.ApplyPatchCall,
    items.ToolSearchCall,
    items.ToolSearchOutput,
    items.Compaction,
)
# Fields that are optional only for clients, where an item has them (docs/protocol.md 3).
ALWAYS_SENT = ("id", "status", "execution", "arguments")
NEVER_SENT = {"Reasoning.status"}
# Parts that we write are whole too.
WRITTEN_PARTS = {"OutputText": ("annotations", "logprobs")}
# Parts of which there is only one kind: a client that leaves the type out is understood.
SINGLE = ("LocalShellAction",)
# Null is a value of its own here: the server searched, so there is no call to answer.
NULL_IS_SENT = {"ToolSearchCall.call_id", "ToolSearchOutput.call_id"}


def ref(name: str) -> Schema:
    """A pointer to a named schema."""
    return {"$ref": REF + name}


def _list_of(name: str) -> Schema:
    return {"type": "array", "items": ref(name)}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
CHOICES: list[SchemaValue] = ["none", "auto", "required"]

# What the bytes of a raw field are, by `Type.field` or, where it is the same in every type, by `field`.
RAW: dict[str, Schema] = {
    "Create.input": {"anyOf": [STRING, _list_of("InputItem"), {"type": "null"}]},
    "Create.stream_id": {"type": "string", "pattern": f"^{STREAM_ID.pattern[:-2]}$"},
    "Create.tools": _or_null(_list_of("Tool")),
    "SteerFrame.input": {"anyOf": [STRING, _list_of("InputItem")]},
    "SteerFrame.stream_id": {"not": {}, "description": "The target's lane counts."},
    "AppendFrame.input": _list_of("InputItem"),
    "NewConversation.items": _list_of("InputItem"),
    "AddedItems.items": _list_of("InputItem"),
    "Response.instructions": _or_null(STRING),
    "Response.output": _list_of("OutputItem"),
    "Response.text": ref("TextEcho"),
    "Response.tool_choice": {"anyOf": [{"enum": CHOICES}, ref("ToolChoiceName")]},
    "Response.tools": _list_of("Tool"),
    "TextEcho.format": ref("TextFormat"),
    "ItemList.data": _list_of("ListedItem"),
    "CompactionWindow.output": _list_of("ListedItem"),
    "response": ref("Response"),
    "item": ref("OutputItem"),
    "schema": _or_null(OBJECT),
    "parameters": _or_null(OBJECT),
    "output_schema": _or_null(OBJECT),
    "logprobs": OBJECTS,
    "annotations": OBJECTS,
    "annotation": OBJECT,
    "ShellOutputDelta.delta": OBJECT,
    "ShellEnvironment.network_policy": OBJECT,
    "Skill.source": OBJECT,
    "Skill.version": {"type": ["string", "integer", "null"]},
    "ShellOutputDone.output": OBJECTS,
    "McpListTools.tools": OBJECTS,
    "variables": _or_null(OBJECT),
}
# Sections of the contract mean nothing to readers of the documents.
_SECTION = re.compile(r" \((?:docs/)?(?:protocol|product|hazards)\.md[^)]*\)")


def schemas() -> Schemas:
    """Every wire type by name, and the unions `InputItem`, `OutputItem`, `ListedItem`, `Tool` and `Event`."""
    (_, item, tool, *_), taken = _generate(TAKEN)
    taken |= {name: _untagged(taken[name]) for name in SINGLE}
    (_, event, *_), sent = _generate((*SENT, *WRITTEN))
    always = {kind.__name__: _always_sent(kind) for kind in WRITTEN} | WRITTEN_PARTS
    names = {name: f"Written{name}" if name in taken else name for name in sent}
    written = {
        names[name]: _as_sent(name, schema, always.get(name)) for name, schema in sent.items()
    }
    unions: Schemas = {
        "Item": item,
        "OutputItem": {"anyOf": [ref(names[kind.__name__]) for kind in WRITTEN]},
        "Tool": tool,
        "Event": event,
    }
    return {**taken, **_pointing(written, names), **unions, **_loose_forms(taken)}


def _always_sent(kind: type[items.Body]) -> tuple[str, ...]:
    own = [field for field in ALWAYS_SENT if field in kind.__struct_fields__]
    return tuple(field for field in own if f"{kind.__name__}.{field}" not in NEVER_SENT)


def event_names() -> dict[str, str]:
    """The schema of each event that we may send, by the event's type."""
    return {str(kind.__struct_config__.tag): kind.__name__ for kind in EVENT_TYPES}


def _generate(kinds: Iterable[object]) -> tuple[tuple[Schema, ...], Schemas]:
    """The library's schemas, with raw fields filled in and without section numbers."""
    whole, parts = msgspec.json.schema_components(kinds, ref_template=REF + "{name}")
    return whole, {name: _filled_in(name, schema) for name, schema in parts.items()}


def _filled_in(name: str, schema: Schema) -> Schema:
    fields, _ = _fields(schema)
    filled: Schema = {field: _raw(name, field, schema) for field, schema in fields.items()}
    words = schema.get("description")
    rest: Schema = {} if words is None else {"description": _SECTION.sub("", str(words))}
    return {**schema, **rest, "properties": filled}


def _fields(schema: Schema) -> tuple[Schema, list[SchemaValue]]:
    """The fields of an object, and the names of the required ones."""
    fields, required = schema["properties"], schema.get("required", [])
    assert isinstance(fields, dict)
    assert isinstance(required, list)
    return fields, required


def _raw(name: str, field: str, generated: SchemaValue) -> SchemaValue:
    """What a raw field holds; the library knows only that it is raw, or a list of raws."""
    precise = RAW.get(f"{name}.{field}") or (RAW.get(field) if _is_open(generated) else None)
    if precise is None:
        return generated
    return _or_null(precise) if _takes_null(generated) and not _takes_null(precise) else precise


def _takes_null(schema: SchemaValue) -> bool:
    match schema:
        case {"anyOf": list(kinds)}:
            return {"type": "null"} in kinds
        case _:
            return False


def _is_open(schema: SchemaValue) -> bool:
    """Whether the generated schema says nothing about what is inside."""
    match schema:
        case {"anyOf": list(kinds)}:
            return any(map(_is_open, kinds))
        case {"items": inner}:
            return _is_open(inner)
        case dict():
            return not schema.keys() - {"default"}
        case _:
            return False


def _as_sent(name: str, schema: Schema, always: Sequence[str] | None) -> Schema:
    """A type as we write it: fields with a default are always there. Of items and parts, which name the fields that
    are there `always`, an absent field is left out rather than null."""
    fields, required = _fields(schema)
    sent: Schema = {}
    defaults: list[str] = []
    for field, inner in fields.items():
        assert isinstance(inner, dict)
        defaults += [field] if "default" in inner else []
        kept: Schema = {key: value for key, value in inner.items() if key != "default"}
        keeps_null = always is None or f"{name}.{field}" in NULL_IS_SENT
        sent[field] = kept if keeps_null else _without_null(kept)
    if "sequence_number" in fields:
        sent["stream_id"] = {**STRING, "description": "The lane, if the request named one."}
    if name == "Message":
        parts: list[SchemaValue] = [ref("OutputText"), ref("Refusal")]
        sent["content"] = {"type": "array", "items": {"anyOf": parts}}
    names: list[SchemaValue] = [*dict.fromkeys([*map(str, required), *defaults, *(always or ())])]
    return {**schema, "properties": sent, "required": names}


def _without_null(schema: Schema) -> Schema:
    match schema:
        case {"anyOf": list(kinds)}:
            left = [kind for kind in kinds if kind != {"type": "null"}]
            only = left[0]
            return only if len(left) == 1 and isinstance(only, dict) else {**schema, "anyOf": left}
        case _:
            return schema


def _pointing(written: Schemas, names: Mapping[str, str]) -> Schemas:
    """The same schemas, with pointers to types as we write them."""
    text = msgspec.json.encode(written).decode()
    text = re.sub(rf'(?<="{REF})\w+(?=")', lambda name: names.get(name[0], name[0]), text)
    pointing: Schemas = msgspec.json.decode(text)
    return pointing


def _loose_forms(taken: Schemas) -> Schemas:
    """What clients may write instead of a tagged item, and what lists make of an item."""
    easy: list[SchemaValue] = [ref("EasyMessage"), ref("EasyReference")]
    return {
        "EasyMessage": _untyped(taken["Message"]),
        "EasyReference": {**_untyped(taken["ItemReference"]), "required": ["id"]},
        "InputItem": {"anyOf": [ref("Item"), *easy]},
        "ListedItem": {"allOf": [ref("Item"), {"type": "object", "required": ["id", "type"]}]},
    }


def _untagged(schema: Schema) -> Schema:
    """The same where the type may be left out."""
    _, required = _fields(schema)
    return {**schema, "required": [field for field in required if field != "type"]}


def _untyped(schema: Schema) -> Schema:
    """The same without its type, or with a null in its place."""
    fields, _ = _fields(schema)
    return {**_untagged(schema), "properties": {**fields, "type": {"type": "null"}}}
