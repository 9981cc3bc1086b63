"""What would satisfy this JSON schema? A small, deterministic example, for the engine that plays a script.

In: a schema as decoded JSON, from a client: it may be anything. Out: a value, or None for a schema that cannot be
followed. Types, `required`, `enum`, `const`, `default`, `minimum`, `maximum`, lengths, local references and the first
choice of `anyOf`, `oneOf` and `allOf` are followed; other keywords are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf

import msgspec
from msgspec import Struct

from segue.schemas.json_schema import UNIONS, JsonSchema, listed, properties_of

# Schemas may refer to themselves, and clients may send anything: no deeper, no more steps, nothing larger than this.
DEPTH_MAX = 24
STEPS_MAX = 10_000
# Copied keywords and names that take as long as a step.
COPIES_A_STEP = 16
ITEMS_MAX = 64
PROPERTIES_MAX = 1_000
CHARS_MAX = 10_000
# Deeper than this the last choice is taken instead of the first: as a rule it is `null`, and ends a recursion.
FIRST_DEPTH_MAX = 6
# A string is the name of its field, but a shell command of an agent is one that exists everywhere.
WORDS = {
    "cmd": "ls",
    "command": "ls",
    "commands": "ls",
    "script": "ls",
    "path": ".",
    "directory": ".",
}


class _Schema(Struct, rename="camel"):
    """A schema without references and choices."""

    type: str | list[str] = ""
    properties: dict[str, object] = {}
    required: list[str] = []
    items: object = None
    min_items: int = 0
    max_items: int = ITEMS_MAX
    min_length: int = 0
    max_length: int = CHARS_MAX
    minimum: int | float = -inf
    maximum: int | float = inf


def example(schema: object, words: Mapping[str, str] | None = None) -> object:
    """A value that the schema allows, as short as it can be. Strings are the name of their property, or its `words`."""
    try:
        return _Writer(schema, {**WORDS, **(words or {})}).write(schema, "value", 0)
    except (OverflowError, msgspec.ValidationError):
        return None


class _Writer:
    """Writes values for the parts of one schema."""

    def __init__(self, root: object, words: Mapping[str, str]) -> None:
        self._schema = JsonSchema(root)
        self._words = words
        self._steps = 0

    def write(self, schema: object, name: str, depth: int) -> object:
        """A value for this part; strings consist of its name or its `words`."""
        copied = len(properties_of(schema)) + (len(schema) if isinstance(schema, dict) else 0)
        copied += sum(len(listed(schema, word)) for word in ("required", *UNIONS))
        self._steps += 1 + copied // COPIES_A_STEP
        if depth > DEPTH_MAX or self._steps > STEPS_MAX:
            return None
        match schema:
            case {"const": value} | {"default": value} | {"enum": [value, *_]}:
                return value
            case {"$ref": str() as reference, **rest}:
                choice = self._schema.at(reference)
            case (
                {"anyOf": [*choices], **rest}
                | {"oneOf": [*choices], **rest}
                | {"allOf": [*choices], **rest}
            ) if choices:
                choice = choices[0 if depth <= FIRST_DEPTH_MAX else -1]
            case dict():
                return self._write_type(msgspec.convert(schema, _Schema), name, depth + 1)
            case _:
                return name
        return self.write((choice if isinstance(choice, dict) else {}) | rest, name, depth + 1)

    def _write_type(self, schema: _Schema, name: str, depth: int) -> object:
        kind = schema.type or ("object" if schema.required else "string")
        kinds = kind if isinstance(kind, list) else [kind]
        match next((kind for kind in kinds if kind != "null"), "null"):
            case "null":
                return None
            case "boolean":
                return True
            case "integer" | "number" as kind:
                number = min(max(1, schema.minimum), schema.maximum)
                return ceil(number) if kind == "integer" else number
            case "array":
                least = max(schema.min_items, 1 if name in self._words else 0)
                count = range(min(least, ITEMS_MAX, schema.max_items))
                return [self.write(schema.items, name, depth) for _ in count]
            case "object":
                properties = schema.properties
                required = schema.required[:PROPERTIES_MAX]
                return {key: self.write(properties.get(key), key, depth) for key in required}
            case _:
                text = self._words.get(name, name)
                return text.ljust(min(schema.min_length, CHARS_MAX), "x")[: schema.max_length]
