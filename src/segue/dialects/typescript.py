"""How are tools declared to gpt-oss? As functions of TypeScript in namespaces.

In: tools with their JSON schemas. Out: the text of the section `# Tools`, letter for letter as the family's own library
writes it, odd places of comments included, because that is what the model was trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from segue.dialects.offers import parameters_of
from segue.wire.tools import Offer

# The namespace of tools that stand in none.
FUNCTIONS = "functions"

Json = dict[str, object]


def tools_section(tools: Iterable[Offer]) -> str:
    """All tools by namespace."""
    spaces: dict[str, list[str]] = {}
    for tool in tools:
        spaces.setdefault(tool.namespace or FUNCTIONS, []).append(_declaration(tool))
    return "\n\n".join(["# Tools", *(_namespace(name, spaces[name]) for name in sorted(spaces))])


def _namespace(name: str, declarations: Sequence[str]) -> str:
    inside = "\n".join(declarations)
    return f"## {name}\n\nnamespace {name} {{\n\n{inside}\n}} // namespace {name}"


def _declaration(offer: Offer) -> str:
    description = offer.tool.description
    lines = _lines(description) if isinstance(description, str) else []
    comment = "".join(f"// {line}\n" for line in lines)
    parameters = parameters_of(offer.tool)
    taken = "" if parameters is None else f"_: {_type(parameters, '')}"
    return f"{comment}type {offer.tool.name} = ({taken}) => any;\n"


def _lines(text: str) -> list[str]:
    """As Rust cuts them: at newlines only, with nothing behind the last."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def _type(schema: object, indent: str) -> str:
    if not isinstance(schema, dict):
        return "any"
    variants = schema.get("oneOf")
    if isinstance(variants, list):
        return "".join(f"\n{indent} | {_variant(one, indent)}" for one in variants)
    kind = schema.get("type")
    if isinstance(kind, list):
        names = [one for one in kind if isinstance(one, str)]
        return " | ".join("number" if one == "integer" else one for one in names)
    match kind:
        case "object":
            return _object(schema, indent)
        case "string":
            listed = schema.get("enum")
            named = [f'"{one}"' for one in listed if isinstance(one, str)] if listed else []
            return " | ".join(named) if listed else "string"
        case "number" | "integer":
            return "number"
        case "boolean":
            return "boolean"
        case "array":
            return f"{_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
        case _:
            return "any"


def _object(schema: Json, indent: str) -> str:
    description = _text(schema, "description")
    out = "" if description is None else f"{indent}// {description}\n"
    out += "{\n"
    required = schema.get("required")
    properties = schema.get("properties")
    for key, value in (properties if isinstance(properties, dict) else {}).items():
        is_required = isinstance(required, list) and key in required
        out += _property(f"{key}{'' if is_required else '?'}", value, indent)
    return f"{out}{indent}}}"


def _property(name: str, schema: object, indent: str) -> str:
    if not isinstance(schema, dict):
        return f"{indent}{name}: any,\n"
    out = ""
    title, description = _text(schema, "title"), _text(schema, "description")
    if title is not None:
        out += f"{indent}// {title}\n{indent}//\n"
    variants = schema.get("oneOf")
    if description is not None and not isinstance(variants, list):
        out += f"{indent}// {description}\n"
    examples = schema.get("examples")
    if isinstance(examples, list) and examples:
        shown = [f'{indent}// - "{one}"\n' for one in examples if isinstance(one, str)]
        out += f"{indent}// Examples:\n{''.join(shown)}"
    if isinstance(variants, list):
        return out + _variants(name, schema, variants, indent)
    kind = _nullable(schema, _type(schema, indent + "    "))
    return f"{out}{indent}{name}: {kind},{_remark(_default(schema))}\n"


def _variants(name: str, schema: Json, variants: Sequence[object], indent: str) -> str:
    description, default = _text(schema, "description"), _default(schema)
    first = _text(variants[0], "description") if variants else None
    out = "" if description in (None, first) else f"{indent}// {description}\n"
    out += "" if default is None else f"{indent}// {default}\n"
    out += f"{indent}{name}:\n"
    for n, variant in enumerate(variants):
        remark = _text(variant, "description")
        is_said = description is not None and (n == 0 or remark == description)
        remarks = (None if is_said else remark, _default(variant))
        kind = _nullable(variant, _type(variant, indent + "   "))
        out += f"{indent} | {kind}{_remark(*remarks)}\n"
    return f"{out}{indent},\n"


def _variant(schema: object, indent: str) -> str:
    kind = _nullable(schema, _type(schema, indent + "   "))
    # Here, unlike elsewhere, the default of an enumeration is quoted too.
    return kind + _remark(_text(schema, "description"), _default(schema, is_quoted=True))


def _nullable(schema: object, kind: str) -> str:
    is_nullable = isinstance(schema, dict) and schema.get("nullable") is True
    return f"{kind} | null" if is_nullable and "null" not in kind else kind


def _default(schema: object, *, is_quoted: bool = False) -> str | None:
    if not isinstance(schema, dict) or "default" not in schema:
        return None
    default = schema["default"]
    if not isinstance(default, str):
        return f"default: {msgspec.json.encode(default).decode()}"
    is_bare = schema.get("enum") and not is_quoted
    return f"default: {default}" if is_bare else f'default: "{default}"'


def _remark(*texts: str | None) -> str:
    remark = " ".join(text for text in texts if text is not None)
    return f" // {remark}" if remark else ""


def _text(schema: object, key: str) -> str | None:
    found = schema.get(key) if isinstance(schema, dict) else None
    return found if isinstance(found, str) else None
