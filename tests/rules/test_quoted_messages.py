"""Does the program say what the page on troubleshooting quotes?

People search that page for what they see. In its tables with the column "you see", a quotation of several words must be
part of a text in the code: placeholders, numbers, paths and words in quotation marks count as values, which may differ.
Made-up pages show that the rule can fail.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"

# What differs from case to case, and stands for it on both sides.
VALUE = re.compile(r"'[^']*'|\S*/\S*|\b[\d.]+\b|\bsmollm2\b|…")


def shape(text: str) -> str:
    """The text without its values."""
    return " ".join(VALUE.sub("…", text).split())


def quotations(page: str) -> Iterator[str]:
    """What the tables say that a person sees, where it is more than a word."""
    for table in re.findall(r"^\| you see .*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE):
        for row in table.splitlines():
            yield from (one for one in re.findall(r"`([^`]+)`", row.split("|")[1]) if " " in one)


def texts(code: str) -> Iterator[str]:
    """All strings, with a mark in place of each placeholder."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.JoinedStr):
            parts = (one.value if isinstance(one, ast.Constant) else "…" for one in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def unknown(page: str, codes: list[str]) -> list[str]:
    """Quotations that are no part of any text."""
    known = [shape(text) for code in codes for text in texts(code)]
    return [
        one for one in quotations(page) if not any(shape(one).strip("… ") in text for text in known)
    ]


def test_every_quoted_message_is_in_the_code() -> None:
    codes = [path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")]
    assert unknown(PAGE.read_text("utf-8"), codes) == []


def test_message_that_the_program_never_says_is_found() -> None:
    page = """| you see | why | do |
|---|---|---|
| `port 80 is in use on 10.0.0.1`, `slow` | x | `never looked at` |
| `smollm2 is not here yet` | x | y |
"""
    code = 'port = f"port: port {number} is in use on {host}. Choose another one."'
    assert unknown(page, [code]) == ["smollm2 is not here yet"]
