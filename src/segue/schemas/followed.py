"""How large does a schema become in the library that holds an engine to it?

Such libraries write a list with `minItems` or `maxItems` out, item by item, and what `allOf` or a keyword beside `$ref`
joins with another part once for each place; and they walk down from part to part on the stack of their process. Few
have a limit on the way. In: a schema or a grammar of a job. Out: about how many parts it would be written out to, and
how many parts lead to each other, so that it can be refused before an engine has taken the memory or has ended. Linear
in the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec

from segue.schemas.json_schema import UNIONS, JsonSchema, listed
from segue.seams.model import Grammar

# llama.cpp's library takes up to 3 KB for each, for as long as a job runs. It gives up at about 50,000, when they are
# written.
UNROLLED_MAX = 20_000
# A part that is joined with another one takes as much as this many items.
JOINED = 4
# Parts in each other, references followed: people write some dozens. At 2,000 to 3,000 llama.cpp's library ends its
# process.
LEVELS_MAX = 1_000
# These change nothing about the part that they stand in.
BESIDE = {"$defs", "definitions", "$schema", "$id", "$comment", "x-guidance"}
BESIDE |= {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
IN_LARK = re.compile(r"%json\s*")


def can_be_followed(held: bytes | Grammar) -> bool:
    """Whether an engine may be asked to follow this."""
    total = 0.0
    for schema in schemas_in(held):
        total += unrolled(schema)
        if total > UNROLLED_MAX or levels(schema) > LEVELS_MAX:
            return False
    return True


def schemas_in(held: bytes | Grammar) -> Iterator[object]:
    """The schema, or those in a grammar or in a structural tag."""
    if isinstance(held, bytes):
        yield msgspec.json.decode(held)
    elif held.syntax == "structural_tag":
        left: list[object] = [msgspec.json.decode(held.definition)["format"]]
        while left:
            match left.pop():
                case {"type": "json_schema", "json_schema": schema}:
                    yield schema
                case {"elements": list() as inner}:
                    left += inner
                case {"content": inner}:
                    left.append(inner)
                case _:
                    pass
    elif held.syntax != "regex":
        # A number may have any number of digits.
        decoder = json.JSONDecoder(parse_int=float)
        for found in IN_LARK.finditer(held.definition):
            try:
                yield decoder.raw_decode(held.definition, found.end())[0]
            except (ValueError, RecursionError):
                # The library cannot read it, either.
                continue


def unrolled(schema: object) -> float:
    """About how many parts would be written out; more than `UNROLLED_MAX` may be any number."""
    try:
        return _Unrolled(schema).count(schema)
    except RecursionError:
        return UNROLLED_MAX + 1


class _Unrolled:
    """Counts the parts of one schema, each once."""

    def __init__(self, root: object) -> None:
        self._schema = JsonSchema(root)
        # By identity, and whether it is joined with another part.
        self._known: dict[tuple[int, bool], float] = {}

    def count(self, part: object, *, is_joined: bool = False) -> float:
        if isinstance(part, list):
            return sum(map(self.count, part))
        if not isinstance(part, dict):
            return 0
        key = id(part), is_joined
        if key not in self._known:
            # What contains itself is not written out.
            self._known[key] = 0
            self._known[key] = min(self._count(part, is_joined), UNROLLED_MAX + 1)
        return self._known[key]

    def _count(self, part: dict[str, object], is_joined: bool) -> float:
        bounds = (part.get("minItems"), part.get("maxItems"))
        total = max((bound for bound in bounds if isinstance(bound, int | float)), default=0)
        total += len(listed(part, "prefixItems"))
        is_joined = is_joined or len(part.keys() - BESIDE) > 1
        if is_joined and (target := self._schema.at(part.get("$ref"))) is not None:
            total += JOINED + self.count(target, is_joined=True)
        for word, inner in part.items():
            if word in UNIONS and isinstance(inner, list):
                is_each = is_joined or (word == "allOf" and len(inner) > 1)
                total += sum(self.count(schema, is_joined=is_each) for schema in inner)
            else:
                total += self.count(inner)
        return total


def levels(schema: object) -> int:
    """How many parts stand in each other at most, where what is referred to stands in the part that refers to it.

    Parts that lead to each other are one component (Tarjan's): a walk through it comes to each part that is referred to
    once, and from there goes down as far as that part is high.
    """
    if not isinstance(schema, dict):
        return 0
    try:
        walk = _Levels(schema)
    except RecursionError:
        return LEVELS_MAX + 1
    walk.run(schema)
    return walk.found[id(schema)]


class _Part:
    """A part on the way down."""

    def __init__(self, value: object, number: int, inner: Iterator[tuple[object, bool]]) -> None:
        self.value = value
        self.number = self.lowest = number
        self.inner = inner
        # How deep it goes below its component, and whether something refers to it.
        self.below = 0
        self.is_target = False


class _Levels:
    """Walks one schema, each part once."""

    def __init__(self, root: object) -> None:
        self._schema = JsonSchema(root)
        # By identity: how high parts are without references, and, of those that are done, how deep they go.
        self._heights: dict[int, int] = {}
        self._measure(root)
        self.found: dict[int, int] = {}
        # Parts whose component is not whole yet, in the order in which they were found; and the way to the last one.
        self._open: dict[int, _Part] = {}
        self._way: list[_Part] = []

    def _measure(self, value: object) -> int:
        if not isinstance(value, dict | list):
            return 0
        inner = value.values() if isinstance(value, dict) else value
        height = self._heights[id(value)] = 1 + max(map(self._measure, inner), default=0)
        return height

    def run(self, root: object) -> None:
        self._enter(root)
        while self._way:
            part = self._way[-1]
            following = next(part.inner, None)
            if following is None:
                self._leave(self._way.pop())
            else:
                self._follow(part, *following)

    def _enter(self, value: object) -> _Part:
        part = _Part(value, len(self.found) + len(self._open), self._inner(value))
        self._open[id(value)] = part
        self._way.append(part)
        return part

    def _inner(self, value: object) -> Iterator[tuple[object, bool]]:
        """What stands in a part, and with True what it refers to."""
        for inner in value.values() if isinstance(value, dict) else value:  # type: ignore[attr-defined]
            if isinstance(inner, dict | list):
                yield inner, False
        target = self._schema.at(value.get("$ref")) if isinstance(value, dict) else None
        if isinstance(target, dict | list):
            yield target, True

    def _follow(self, part: _Part, value: object, is_reference: bool) -> None:
        if (depth := self.found.get(id(value))) is not None:
            part.below = max(part.below, depth)
            return
        inner = self._open.get(id(value))
        if inner is None:
            inner = self._enter(value)
        else:
            part.lowest = min(part.lowest, inner.number)
        inner.is_target = inner.is_target or is_reference

    def _leave(self, part: _Part) -> None:
        if part.lowest == part.number:
            members = [self._open.popitem()[1]]
            while members[-1] is not part:
                members.append(self._open.popitem()[1])
            depth = self._inside(members) + max(member.below for member in members)
            self.found.update((id(member.value), depth) for member in members)
        if not self._way:
            return
        above = self._way[-1]
        if (depth_below := self.found.get(id(part.value))) is not None:
            above.below = max(above.below, depth_below)
        else:
            above.lowest = min(above.lowest, part.lowest)

    def _inside(self, members: list[_Part]) -> int:
        """How far a walk may go in a component: down from where it comes in, and from each part that is referred to."""
        if len(members) == 1:
            return 1
        heights = [self._heights[id(member.value)] for member in members]
        targets = (self._heights[id(member.value)] for member in members if member.is_target)
        return max(heights) + sum(targets)
