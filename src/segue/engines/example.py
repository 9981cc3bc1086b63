"""What would satisfy this JSON schema? A small, deterministic example, for the engine that plays a script.

Of several alternatives the first that comes to an end is taken. `pattern`, `not` and conditions are not read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
Schema = Mapping[str, JsonValue]

# Schemas may refer to themselves, and clients may send anything: no deeper, no more steps, nothing larger than this.
DEPTH_MAX = 12
STEPS_MAX = 10_000
ITEMS_MAX = 64
LETTERS_MAX = 10_000

LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems")
UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")

FORMATS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "email": "someone@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


class Endless(Exception):
    """This way does not end, or not soon enough."""


def example(schema: JsonValue, name: str = "value") -> JsonValue:
    """A value that the schema allows, as short as it can be; None if there is none within reach."""
    try:
        return _Writer(schema).write(schema, name, 0)
    except (Endless, OverflowError):
        return None


class _Writer:
    """Writes values for the parts of one schema."""

    def __init__(self, root: JsonValue) -> None:
        self._root = root
        self._steps = 0

    def write(self, schema: JsonValue, name: str, depth: int) -> JsonValue:
        """A value for this part; strings take its name."""
        self._steps += 1
        if depth > DEPTH_MAX or self._steps > STEPS_MAX:
            raise Endless
        whole = self._resolved(schema)
        for key in ("const", "default"):
            if key in whole:
                return whole[key]
        match whole:
            case {"enum": [first, *_]}:
                return first
            case {"anyOf": [_, *_] as options}:
                return self._write_one_of(_without(whole, "anyOf"), options, name, depth)
            case {"oneOf": [_, *_] as options}:
                return self._write_one_of(_without(whole, "oneOf"), options, name, depth)
            case _:
                return self._write_kind(whole, name, depth)

    def _write_one_of(
        self, rest: Schema, options: list[JsonValue], name: str, depth: int
    ) -> JsonValue:
        for option in options:
            try:
                return self.write(_merged(rest, self._resolved(option)), name, depth + 1)
            except Endless:
                continue
        raise Endless

    def _write_kind(self, schema: Schema, name: str, depth: int) -> JsonValue:
        match _kind(schema):
            case "object":
                return self._write_object(schema, depth)
            case "array":
                return self._write_array(schema, name, depth)
            case "integer":
                return _number(schema, is_integer=True)
            case "number":
                return _number(schema, is_integer=False)
            case "boolean":
                return True
            case "null":
                return None
            case _:
                return _string(schema, name)

    def _write_object(self, schema: Schema, depth: int) -> JsonValue:
        properties, required = schema.get("properties"), schema.get("required")
        known = properties if isinstance(properties, dict) else {}
        names = required if isinstance(required, list) else []
        others = schema.get("additionalProperties")
        return {
            name: self.write(known.get(name, others), name, depth + 1)
            for name in names
            if isinstance(name, str)
        }

    def _write_array(self, schema: Schema, name: str, depth: int) -> JsonValue:
        least, first = schema.get("minItems"), schema.get("prefixItems")
        parts = first if isinstance(first, list) else []
        count = min(least, ITEMS_MAX) if isinstance(least, int) else 0
        values: list[JsonValue] = []
        for index in range(count):
            part = parts[index] if index < len(parts) else schema.get("items")
            value = self.write(part, name, depth + 1)
            if schema.get("uniqueItems") is True and value in values:
                value = _another(value, self._resolved(part), index)
            values.append(value)
        return values

    def _resolved(self, schema: JsonValue, depth: int = 0) -> Schema:
        """The schema with what it refers to and what it is made of written into it."""
        whole: Schema = schema if isinstance(schema, dict) else {}
        for _ in range(DEPTH_MAX):
            self._steps += 1
            if depth > DEPTH_MAX or self._steps > STEPS_MAX:
                raise Endless
            match whole:
                case {"$ref": str() as reference}:
                    whole = _merged(_without(whole, "$ref"), self._follow(reference))
                case {"allOf": [*parts]}:
                    whole = _without(whole, "allOf")
                    for part in parts:
                        whole = _merged(whole, self._resolved(part, depth + 1))
                case _:
                    return whole
        raise Endless

    def _follow(self, reference: str) -> Schema:
        """The part of the same document that a local reference names."""
        node = self._root
        for step in reference.removeprefix("#").strip("/").split("/"):
            if not step:
                continue
            key = step.replace("~1", "/").replace("~0", "~")
            node = node.get(key) if isinstance(node, dict) else None
        return node if isinstance(node, dict) else {}


def _without(schema: Schema, key: str) -> Schema:
    return {name: value for name, value in schema.items() if name != key}


def _merged(one: Schema, other: Schema) -> dict[str, JsonValue]:
    """What satisfies both, where that is a matter of properties and bounds."""
    merged: dict[str, JsonValue] = {**one, **other}
    for key in one.keys() & other.keys():
        match one[key], other[key]:
            case (dict() as mine, dict() as theirs) if key == "properties":
                merged[key] = mine | theirs
            case (list() as mine, list() as theirs) if key == "required":
                merged[key] = mine + [name for name in theirs if name not in mine]
            case (int() | float() as mine, int() | float() as theirs) if key in LOWER:
                merged[key] = max(mine, theirs)
            case (int() | float() as mine, int() | float() as theirs) if key in UPPER:
                merged[key] = min(mine, theirs)
            case _:
                pass
    return merged


def _kind(schema: Schema) -> JsonValue:
    """The type that the schema names, or that its other words belong to."""
    kind = schema.get("type")
    if isinstance(kind, list):
        return next((one for one in kind if one != "null"), "null")
    if kind is not None:
        return kind
    if schema.keys() & {"properties", "required"}:
        return "object"
    if schema.keys() & {"items", "prefixItems"}:
        return "array"
    return "number" if schema.keys() & {*LOWER[:2], *UPPER[:2], "multipleOf"} else "string"


def _number(schema: Schema, *, is_integer: bool) -> int | float:
    """One, or what is nearest to it between the bounds."""
    low, high = _bound(schema, "minimum", 1), _bound(schema, "maximum", -1)
    if low > high and not is_integer:
        # The bounds are open and less than one apart on each side.
        return (_bound(schema, "minimum", 0) + _bound(schema, "maximum", 0)) / 2
    value = min(max(1, low), high)
    step = schema.get("multipleOf") or (1 if is_integer else 0)
    if isinstance(step, int | float) and step > 0:
        value = -(-value // step) * step
        value = value if value <= high else high // step * step
    return int(value) if is_integer and math.isfinite(value) else value


def _bound(schema: Schema, name: str, inside: int) -> int | float:
    """The bound of this name or its exclusive twin, which is passed by `inside`; infinite if there is none."""
    found: list[int | float] = []
    closed, opened = schema.get(name), schema.get(f"exclusive{name.capitalize()}")
    if isinstance(closed, int | float):
        found.append(closed)
    if isinstance(opened, int | float):
        found.append(opened + inside)
    if name == "minimum":
        return max(found, default=-math.inf)
    return min(found, default=math.inf)


def _string(schema: Schema, name: str) -> str:
    wanted = schema.get("format")
    text = FORMATS.get(wanted, name) if isinstance(wanted, str) else name
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int):
        text = text.ljust(min(least, LETTERS_MAX), "x")
    return text[:most] if isinstance(most, int) and most >= 0 else text


def _another(value: JsonValue, schema: Schema, index: int) -> JsonValue:
    """A value beside this one, for lists that want no two alike."""
    choices, step = schema.get("enum"), schema.get("multipleOf", 1)
    match value:
        case _ if isinstance(choices, list):
            return choices[index % len(choices)]
        case bool():
            return not value
        case int() | float() if isinstance(step, int | float):
            return value + index * step
        case str():
            return f"{value}{index}"
        case _:
            return value
