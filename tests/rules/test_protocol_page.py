"""docs/protocol.md has every path, field, event, item and tool, and says of each what Segue does.

The tables are written from the wire types and the routes: `python -m tests.rules.test_protocol_page` brings them up to
date. The last column is written by hand and kept; a row that has none fails here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from segue.openapi.pages import CLIENT_EVENTS, OPERATIONS
from segue.openapi.schema import REF, schemas
from segue.wire.events import EVENT_TYPES
from segue.wire.items import HostedOutput, ItemValue
from segue.wire.tools import ToolDefinition

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
TABLE = r"(<!-- {name} -->\n)(.*?)(<!-- end -->)"
ROW = re.compile(r"^\| (?P<key>`[^|]+?`) \|(?:.*\|)? (?P<words>[^|]*) \|$", re.MULTILINE)
PLACES = {"type", "sequence_number", "stream_id"}


def short(schema: dict[str, Any]) -> str:
    """The kind of a field in a few signs."""
    if "$ref" in schema:
        return str(schema["$ref"].removeprefix(REF).removeprefix("Written"))
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(short(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {short(schema.get('items', {}))}"
    return str(schema.get("type", "any JSON"))


def tag(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


def keys(schema: dict[str, Any]) -> str:
    """The keys of a struct beside those that all have; optional ones with a question mark."""
    names = [name for name in schema["properties"] if name not in PLACES]
    required = schema["required"]
    return ", ".join(f"`{name}`" + ("" if name in required else "?") for name in names) or "–"


def rows() -> dict[str, Iterator[tuple[str, ...]]]:
    """The rows of each table without their last column, which is kept."""
    found: dict[str, Any] = schemas()
    response = found["Response"]["properties"]
    return {
        "paths": ((f"`{name}`",) for name in OPERATIONS),
        "response": ((f"`{name}`", short(one)) for name, one in response.items()),
        "asked": ((f"`{name}`", f"`{kind}`") for name, kind in CLIENT_EVENTS.items()),
        "events": ((f"`{tag(one)}`", keys(found[one.__name__])) for one in EVENT_TYPES),
        "items": ((f"`{tag(one)}`",) for one in get_args(ItemValue) if one is not HostedOutput),
        "tools": ((f"`{tag(one)}`",) for one in get_args(ToolDefinition)),
    }


def filled(page: str) -> str:
    """The page with its tables as they must be."""
    for name, table in rows().items():
        between = re.compile(TABLE.format(name=name), re.DOTALL)
        place = between.search(page)
        assert place, f"docs/protocol.md has no place for {name}"
        words = {found["key"]: found["words"] for found in ROW.finditer(place[2])}
        head = "\n".join(place[2].splitlines()[:2])
        lines = [f"| {' | '.join(row)} | {words.get(row[0], '')} |" for row in table]
        text = "\n".join([head, *lines, ""])
        page = page[: place.start(2)] + text + page[place.end(2) :]
    return page


def test_tables_are_those_of_the_wire_types() -> None:
    page = PAGE.read_text("utf-8")
    assert filled(page) == page, (
        "run `python -m tests.rules.test_protocol_page`, then add the words"
    )


def test_every_row_has_words() -> None:
    bare = [found["key"] for found in ROW.finditer(PAGE.read_text("utf-8")) if not found["words"]]
    assert bare == []


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")
