"""What would satisfy this JSON schema? A small, deterministic example, for the engine that plays a script.

In: a schema as decoded JSON, from a client: it may be anything. Out: a value, or None for a schema that cannot be
followed. Types, `required`, `enum`, `const`, `default`, bounds, `format`, local references, `allOf`, `anyOf` and
`oneOf` are followed; other keywords (`pattern`, `not`, `multipleOf`, `uniqueItems`, …) are ignored.
"""

from __future__ import annotations

from math import inf

import msgspec
from msgspec import Struct

# Schemas may refer to themselves, and clients may send anything: no deeper, no more steps, nothing larger than this.
DEPTH_MAX = 24
STEPS_MAX = 10_000
ITEMS_MAX = 64
CHARS_MAX = 10_000
# Deeper than this the last alternative is taken instead of the first: as a rule it is `null`, and ends a recursion.
FIRST_DEPTH_MAX = 6

FORMATS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "someone@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


class _Schema(Struct, rename="camel"):
    """A schema without references and alternatives."""

    type: str | list[str] = ""
    properties: dict[str, object] = {}
    required: list[str] = []
    additional_properties: object = None
    items: object = None
    min_items: int = 0
    format: str = ""
    min_length: int = 0
    max_length: int = CHARS_MAX
    minimum: int | float = -inf
    maximum: int | float = inf
    exclusive_minimum: int | float = -inf
    exclusive_maximum: int | float = inf


def example(schema: object) -> object:
    """A value that the schema allows, as short as it can be."""
    try:
        return _Writer(schema).write(schema, "value", 0)
    except (OverflowError, msgspec.ValidationError):
        return None


class _Writer:
    """Writes values for the parts of one schema."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._steps = 0

    def write(self, schema: object, name: str, depth: int) -> object:
        """A value for this part; strings consist of its name."""
        self._steps += 1
        if depth > DEPTH_MAX or self._steps > STEPS_MAX:
            return None
        match schema:
            case {"$ref": str() as reference, **rest}:
                return self.write(_merged(self._follow(reference), rest), name, depth + 1)
            case {"allOf": [first, *others], **rest}:
                return self.write(_merged(first, {**rest, "allOf": others}), name, depth + 1)
            case {"const": value} | {"default": value} | {"enum": [value, *_]}:
                return value
            case {"anyOf": [_, *_] as options, **rest} | {"oneOf": [_, *_] as options, **rest}:
                option = options[0 if depth <= FIRST_DEPTH_MAX else -1]
                return self.write(_merged(option, rest), name, depth + 1)
            case dict():
                return self._write_type(msgspec.convert(schema, _Schema), name, depth + 1)
            case _:
                return name

    def _write_type(self, schema: _Schema, name: str, depth: int) -> object:
        match _type(schema):
            case "object":
                known, others = schema.properties, schema.additional_properties
                return {
                    key: self.write(known.get(key, others), key, depth) for key in schema.required
                }
            case "array":
                count = min(schema.min_items, ITEMS_MAX)
                return [self.write(schema.items, name, depth) for _ in range(count)]
            case "integer" | "number" as kind:
                return _number(schema, is_integer=kind == "integer")
            case "boolean":
                return True
            case "null":
                return None
            case _:
                text = FORMATS.get(schema.format, name)
                return text.ljust(min(schema.min_length, CHARS_MAX), "x")[: schema.max_length]

    def _follow(self, reference: str) -> object:
        """The part of the same document that a local reference names."""
        node = self._root
        for step in filter(None, reference.removeprefix("#").split("/")):
            key = step.replace("~1", "/").replace("~0", "~")
            node = node.get(key) if isinstance(node, dict) else None
        return node


def _merged(first: object, second: dict[object, object]) -> dict[object, object]:
    """Both schemas in one: lists and properties are joined, of other keywords the second counts."""
    if not isinstance(first, dict):
        return second
    merged = first | second
    for key in first.keys() & second.keys():
        mine, theirs = first[key], second[key]
        if isinstance(mine, dict) and isinstance(theirs, dict):
            merged[key] = mine | theirs
        elif isinstance(mine, list) and isinstance(theirs, list):
            merged[key] = mine + theirs
    return merged


def _type(schema: _Schema) -> str:
    """The type that the schema names, or that its other keywords belong to."""
    if isinstance(schema.type, list):
        return next((kind for kind in schema.type if kind != "null"), "null")
    if not schema.type and (schema.properties or schema.required):
        return "object"
    return schema.type


def _number(schema: _Schema, *, is_integer: bool) -> int | float:
    """One, or a number at a bound, beside an exclusive bound, or halfway."""
    low = max(schema.minimum, schema.exclusive_minimum)
    high = min(schema.maximum, schema.exclusive_maximum)
    if is_integer:
        low, high = -(-low // 1), high // 1
    for value in (1, low, low + 1, high, high - 1, (low + high) / 2):
        is_open = schema.exclusive_minimum < value < schema.exclusive_maximum
        if is_open and schema.minimum <= value <= schema.maximum:
            return int(value) if is_integer else value
    return 1
