"""What does a JSON schema say that a client has sent?

In: a schema as decoded JSON, of any shape: a keyword may have any value, a part may refer to itself, and there may be
as many parts as a tool may have. Out: what its parts are and refer to. Nothing here raises because of what a schema
contains, and everything is linear in its size: what was found of a part is remembered.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

OBJECT: dict[str, object] = {"type": "object"}
TEXT, ANY = frozenset(("string",)), frozenset(("any",))
NAMES: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
JSON_TYPES = frozenset(NAMES.values())
UNIONS = ("anyOf", "oneOf", "allOf")
# Unions in unions and references to references that are followed; people write two or three.
UNION_DEPTH_MAX = 64
NOT_BACK = UNION_DEPTH_MAX + 1
# Those that people write have some dozens.
REFERENCE_CHARS_MAX = 1_000
# What one grammar may say again of what several arguments refer to: more than real tools have, and written in
# milliseconds.
COPIED_CHARS_MAX = 256 * 1024


def listed(part: object, word: str) -> list[object]:
    """The list that this keyword has."""
    found = part.get(word) if isinstance(part, dict) else None
    return found if isinstance(found, list) else []


def properties_of(part: object) -> dict[str, object]:
    """The properties of an object, by name."""
    found = part.get("properties") if isinstance(part, dict) else None
    return found if isinstance(found, dict) else {}


def required_of(part: object) -> frozenset[str]:
    """The names that an object must have."""
    return frozenset(name for name in listed(part, "required") if isinstance(name, str))


def refers(schema: object) -> bool:
    """Whether it refers to a part of itself."""
    match schema:
        case dict():
            return "$ref" in schema or any(refers(inner) for inner in schema.values())
        case list():
            return any(refers(inner) for inner in schema)
        case _:
            return False


def moved(schema: object, place: str) -> Any:
    """The same schema with its references to itself at their new place."""
    match schema:
        case dict():
            found = {key: moved(inner, place) for key, inner in schema.items()}
            target = schema.get("$ref")
            if isinstance(target, str) and target.startswith("#"):
                found["$ref"] = place + target[1:]
            return found
        case list():
            return [moved(inner, place) for inner in schema]
        case _:
            return schema


def _own_types(part: dict[str, object]) -> set[str]:
    """What a part says by itself."""
    said = part.get("type")
    named = [said] if isinstance(said, str) else listed(part, "type")
    found = {name for name in named if isinstance(name, str)}
    found.update(NAMES[kind] for kind in set(map(type, listed(part, "enum"))))
    if "const" in part:
        found.add(NAMES[type(part["const"])])
    return found


class CopyBudget:
    """How much may still be written again, because several parts refer to it."""

    def __init__(self) -> None:
        self.chars = COPIED_CHARS_MAX


class JsonSchema:
    """One schema, and what was found out about its parts."""

    def __init__(self, root: object) -> None:
        """What is no schema of an object allows any object."""
        self.root = root if isinstance(root, dict) else OBJECT
        # By the identity of a part, all of which the root holds.
        self._types: dict[int, frozenset[str]] = {}
        self._open: dict[int, bool] = {}
        # While types are found: how far up a part leads back, and those that wait for a part above them.
        self._depths: dict[int, int] = {}
        self._circle: list[int] = []

    def at(self, reference: object) -> object:
        """The part that `$ref` means; None: there is none in this schema."""
        if not isinstance(reference, str) or len(reference) > REFERENCE_CHARS_MAX:
            return None
        if reference[:2] not in ("#", "#/"):
            return None
        part: object = self.root
        for step in reference.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(part, list):
                is_index = name.isdecimal() and int(name) < len(part)
                part = part[int(name)] if is_index else None
            else:
                part = part.get(name) if isinstance(part, dict) else None
        return part

    def types(self, part: object) -> frozenset[str]:
        """What a value of this part may be, in the words of JSON schema; a string where nothing is said."""
        return self._types_of(part) or TEXT

    def known_types(self, part: object) -> list[str]:
        """The same where JSON knows them all; none where it may be anything."""
        found = self._types_of(part)
        return sorted(found) if found <= JSON_TYPES and not self._is_open(part, 0) else []

    def _types_of(self, part: object) -> frozenset[str]:
        return self._visit(part, 0)[0]

    def _visit(self, part: object, depth: int) -> tuple[frozenset[str], int]:
        """What this part and those that it leads to say, and how far up the way here it leads back. Parts that lead to
        each other say the same, and are known together, when the first of them is (Tarjan's components)."""
        if not isinstance(part, dict) or depth > UNION_DEPTH_MAX:
            return frozenset(), NOT_BACK
        key, start, back = id(part), len(self._circle), depth
        if (known := self._types.get(key)) is not None:
            return known, NOT_BACK
        if (above := self._depths.get(key)) is not None:
            return frozenset(), above
        self._depths[key] = depth
        found = _own_types(part)
        choices = [choice for word in UNIONS for choice in listed(part, word)]
        for inner in (*choices, self.at(part.get("$ref"))):
            said, up = self._visit(inner, depth + 1)
            found |= said
            back = min(back, up)
        self._circle.append(key)
        if back < depth:
            self._depths[key] = back
            return frozenset(found), back
        types = frozenset(found)
        for member in self._circle[start:]:
            self._types[member] = types
            del self._depths[member]
        del self._circle[start:]
        return types, NOT_BACK

    def _is_open(self, part: object, depth: int) -> bool:
        """Whether a value may be of types that are not named; so is a part that says it by itself only."""
        if not isinstance(part, dict) or depth > UNION_DEPTH_MAX:
            return True
        if (known := self._open.get(id(part))) is not None:
            return known
        self._open[id(part)] = True
        ways = [
            [self._is_open(choice, depth + 1) for choice in listed(part, word)]
            for word in ("anyOf", "oneOf")
        ]
        narrowed = [self._is_open(inner, depth + 1) for inner in listed(part, "allOf")]
        if "$ref" in part:
            narrowed.append(self._is_open(self.at(part["$ref"]), depth + 1))
        is_open = (
            not _own_types(part)
            and all(narrowed)
            and all(any(choices) for choices in ways if choices)
        )
        self._open[id(part)] = is_open
        return is_open

    def alone(self, part: object, budget: CopyBudget) -> object:
        """A part that stands for itself: what it refers to comes with it. Where the budget is used up, it says only
        which types it may be."""
        if not isinstance(part, dict) or not refers(part):
            return part if isinstance(part, dict | bool) else {}
        # What is referred to, by its new name. It may refer to more, which is added meanwhile.
        names: dict[str, str] = {}
        targets: list[str] = []

        def copied(value: object) -> Any:
            texts = value if isinstance(value, dict) else [value]
            budget.chars -= 8 + sum(len(text) for text in texts if isinstance(text, str))
            if budget.chars < 0:
                return {}
            if isinstance(value, list):
                return [copied(inner) for inner in value]
            if not isinstance(value, dict):
                return value
            found = {key: copied(inner) for key, inner in value.items()}
            target = value.get("$ref")
            if isinstance(target, str) and self.at(target) is not None:
                if target not in names:
                    names[target] = f"part{len(names)}"
                    targets.append(target)
                found["$ref"] = f"#/$defs/{names[target]}"
            return found

        whole = copied(part)
        parts = {names[target]: copied(self.at(target)) for target in targets}
        if budget.chars >= 0:
            return {**whole, "$defs": parts}
        types = self.known_types(part)
        return {"type": types} if types else {}
