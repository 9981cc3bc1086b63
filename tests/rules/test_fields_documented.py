"""Does docs/fields.md say of every request field what becomes of it, and is that so?

A field is refused, or else a request with it goes through; an ignored one leaves no trace but an echo.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from segue.turn.checks import UNSUPPORTED
from segue.wire.requests import Create
from tests.support import MODEL, fetch, serving

PAGE = Path(__file__).parents[2] / "docs" / "fields.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (?:(.*) )?\|$", re.MULTILINE)
FIELDS = {field.encode_name for field in msgspec.structs.fields(Create)}
# What the contract knows and `Create` does not: it is skipped without a look.
UNKNOWN = {"image", "access_programs", "multi_agent"}
# For each ignored field a value that would change something if it were honoured.
ASKED: dict[str, Any] = {
    "stream_options": {"include_obfuscation": True},
    "prompt_cache_retention": "24h",
    "safety_identifier": "someone",
    "user": "someone",
    "moderation": {"model": "m"},
    "image": {"context_compression": "enabled"},
    "access_programs": {"cyber": "standard"},
    "client_metadata": {"a": "b"},
    "multi_agent": {"enabled": True},
}
# What differs between any two responses.
OWN = {"id", "created_at", "completed_at", "output"}


def rows() -> dict[str, tuple[str, str]]:
    """What becomes of each field on the page, and how far."""
    found = ROW.findall(PAGE.read_text("utf-8"))
    assert len({name for name, _, _ in found}) == len(found), "a field stands there twice"
    return {name: (fate, words) for name, fate, words in found}


def with_fate(fate: str) -> set[str]:
    return {name for name, (one, _) in rows().items() if one == fate}


def test_every_field_is_on_the_page_and_nothing_else_is() -> None:
    assert set(rows()) == FIELDS | UNKNOWN
    assert not UNKNOWN & FIELDS


def test_every_field_has_one_of_three_fates() -> None:
    assert {fate for fate, _ in rows().values()} == {"honoured", "ignored", "refused"}


def test_refused_fields_are_those_that_the_server_refuses() -> None:
    assert with_fate("refused") == set(UNSUPPORTED)


def test_every_ignored_field_is_tried() -> None:
    assert set(ASKED) == with_fate("ignored")


async def test_ignored_fields_change_nothing_but_their_echo() -> None:
    """One field at a time, on one server; the output is compared without its ids."""
    echoed = {name for name, (_, words) in rows().items() if words.startswith("echoed")}
    body = {"model": MODEL, "input": "Hello.", "store": False}
    async with serving() as served:
        plain = (await fetch(served, "POST", "/v1/responses", body)).json
        for name, value in ASKED.items():
            answer = await fetch(served, "POST", "/v1/responses", {**body, name: value})
            assert answer.status == 200, name
            changed = {key for key in plain if answer.json[key] != plain[key]} - OWN
            assert changed == ({name} if name in echoed else set()), name
            assert contents(answer.json) == contents(plain), name


def contents(response: dict[str, Any]) -> list[object]:
    return [item["content"] for item in response["output"]]
