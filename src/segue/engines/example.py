"""What would satisfy this JSON schema? A small, deterministic example, for the engine that plays a script."""

from __future__ import annotations

from collections.abc import Mapping

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]

# Schemas may refer to themselves; below this depth only what must be there is written.
DEPTH_MAX = 8


def example(schema: JsonValue, name: str = "value") -> JsonValue:
    """A value that the schema allows, as short as it can be."""
    return _example(schema, schema, name, 0)


def _example(schema: JsonValue, root: JsonValue, name: str, depth: int) -> JsonValue:
    if not isinstance(schema, dict) or depth > DEPTH_MAX:
        return None if depth > DEPTH_MAX else name
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    match schema:
        case {"enum": [first, *_]}:
            return first
        case {"$ref": str() as reference}:
            return _example(_follow(reference, root), root, name, depth + 1)
        case {"anyOf": [first, *_]} | {"oneOf": [first, *_]}:
            return _example(first, root, name, depth + 1)
        case {"allOf": [*parts]}:
            merged: dict[str, JsonValue] = {}
            for part in parts:
                value = _example(part, root, name, depth + 1)
                merged |= value if isinstance(value, dict) else {}
            return merged
        case _:
            pass
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((one for one in kind if one != "null"), "null")
    match kind:
        case "object":
            return _object(schema, root, depth)
        case "array":
            return _array(schema, root, name, depth)
        case "integer" | "number":
            return _number(schema)
        case "boolean":
            return True
        case "null":
            return None
        case None if "properties" in schema:
            return _object(schema, root, depth)
        case _:
            return _string(schema, name)


def _object(schema: Mapping[str, JsonValue], root: JsonValue, depth: int) -> JsonValue:
    properties = schema.get("properties")
    required = schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    return {
        name: _example(properties.get(name), root, name, depth + 1)
        for name in required
        if isinstance(name, str)
    }


def _array(schema: Mapping[str, JsonValue], root: JsonValue, name: str, depth: int) -> JsonValue:
    least = schema.get("minItems")
    count = least if isinstance(least, int) else 0
    return [_example(schema.get("items"), root, name, depth + 1) for _ in range(min(count, 64))]


def _number(schema: Mapping[str, JsonValue]) -> JsonValue:
    step = schema.get("multipleOf")
    least = schema.get("minimum")
    above = schema.get("exclusiveMinimum")
    most = schema.get("maximum")
    value: int | float = 1
    if isinstance(least, int | float):
        value = max(value, least)
    if isinstance(above, int | float):
        value = max(value, above + 1)
    if isinstance(most, int | float):
        value = min(value, most)
    if isinstance(step, int | float) and step:
        value = -(-value // step) * step
    return value


def _string(schema: Mapping[str, JsonValue], name: str) -> JsonValue:
    formats = {
        "date": "2026-01-01",
        "date-time": "2026-01-01T00:00:00Z",
        "time": "00:00:00Z",
        "email": "someone@example.com",
        "uri": "https://example.com/",
        "uuid": "00000000-0000-4000-8000-000000000000",
    }
    wanted = schema.get("format")
    text = formats.get(wanted, name) if isinstance(wanted, str) else name
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int):
        text = text.ljust(min(least, 10_000), "x")
    return text[:most] if isinstance(most, int) else text


def _follow(reference: str, root: JsonValue) -> JsonValue:
    """The part of the same document that a local reference names."""
    node = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        if not step:
            continue
        node = (
            node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
        )
    return node
