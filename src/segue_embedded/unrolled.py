"""How large does a JSON schema become in the grammar library of llama.cpp?

The library writes a list with `minItems` or `maxItems` out, item by item, and what `allOf` or a keyword beside `$ref`
joins with another part is written once for each place; there is no limit on the way. In: a schema or a grammar of a
job. Out: about how many parts it would be written out to, so that it can be refused before it has taken the memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec

from segue.engines.llamacpp import llguidance
from segue.schemas.json_schema import UNIONS, JsonSchema, listed
from segue.seams.model import Grammar

# Each takes up to 3 KB for as long as the job runs. The library itself gives up at about 50,000, when they are written.
UNROLLED_MAX = 20_000
# A part that is joined with another one takes as much as this many items.
JOINED = 4
# These change nothing about the part that they stand in.
BESIDE = {"$defs", "definitions", "$schema", "$id", "$comment", "x-guidance"}
BESIDE |= {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
IN_LARK = re.compile(r"%json\s*")


def unrolled(held: bytes | Grammar) -> float:
    """About how many parts the library would write out; more than `UNROLLED_MAX` may be any number."""
    try:
        return sum(_Unrolled(schema).count(schema) for schema in _schemas(held))
    except RecursionError:
        return UNROLLED_MAX + 1


def _schemas(held: bytes | Grammar) -> Iterator[object]:
    """The schema, or those in a grammar."""
    if isinstance(held, bytes):
        yield msgspec.json.decode(held)
    elif held.syntax != "regex":
        text = llguidance(held)
        # A number may have any number of digits.
        decoder = json.JSONDecoder(parse_int=float)
        for found in IN_LARK.finditer(text):
            try:
                yield decoder.raw_decode(text, found.end())[0]
            except ValueError:
                # The library cannot read it, either.
                continue


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
