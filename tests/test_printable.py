"""What reaches a terminal is text, and JSON stays JSON."""

from __future__ import annotations

import ast
import io
import json
import unicodedata
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from segue.printable import cell, printable, printable_name, say, shown_address

SOURCE = Path(__file__).parents[1] / "src"
# Who prints otherwise, and why: a child that answers its parent, and colours of our own around words that were checked.
PRINTING = {
    "segue/printable.py": 1,
    "segue/sandbox/interpreter.py": 1,
    "segue/documents/pdf_worker.py": 1,
    "segue_cli/commands/doctor.py": 1,
}
HOSTILE = [
    "\x1b]52;c;cm0gLXJmIH4=\x07",
    "\x1b[2J\x1b[1;1Hroot#",
    "\x9b31m",
    "over\rwritten",
    "\u202egnp.exe",
    "a\u2066b\u2069",
    "in\u200bvisible\ufeff",
    "".join(chr(0xE0000 + ord(letter)) for letter in "hidden"),
    "\ud800 half",
    "[link=http://evil.example]bank[/link] [bold]x",
    "\\[red]x",
]
hostile = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=5), max_size=6).map("".join)


def is_harmless(text: str) -> bool:
    """Nothing that a terminal obeys, or that turns or hides what is read. Joiners are letters of some languages."""
    return not any(
        (unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") and one not in "\t\n")
        or (
            unicodedata.bidirectional(one)
            in ("BN", "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI")
            and unicodedata.category(one) == "Cf"
            and one not in "\u200c\u200d\xad"
        )
        for one in text
    )


def test_control_characters_are_written_as_json_writes_them() -> None:
    every = "".join(map(chr, range(0x100))) + "\u2028\u2029 ünï \U0001f985"
    shown = printable(every)
    assert all(one.isprintable() or one in "\t\n\xa0\xad" for one in shown)
    assert "\\u001b" in shown
    assert "\r" not in shown
    assert printable("plain\ttext\nünï") == "plain\ttext\nünï"
    assert printable(shown) == shown


def test_json_means_the_same() -> None:
    text = json.dumps({"a": "\x7f\x9b\u2028", "b": ["ü"]}, ensure_ascii=False, indent=1)
    assert json.loads(printable(text)) == json.loads(text)


def test_everything_is_printed_by_one_function() -> None:
    """What prints by itself is listed above; the conformance suite is a program of its own and imports nothing."""
    found: dict[str, int] = {}
    for path in SOURCE.rglob("*.py"):
        if path.is_relative_to(SOURCE / "segue_conform"):
            continue
        calls = [one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Call)]
        count = sum(isinstance(one.func, ast.Name) and one.func.id == "print" for one in calls)
        if count:
            found[str(path.relative_to(SOURCE))] = count
    assert found == PRINTING


@given(hostile)
def test_no_text_gives_orders_to_a_terminal(text: str) -> None:
    out = io.StringIO()
    say(text, file=out)
    out.getvalue().encode()
    assert is_harmless(out.getvalue())
    assert printable(printable(text)) == printable(text)
    name = printable_name(text)
    assert "\n" not in name
    assert is_harmless(name)


@given(hostile)
def test_cell_of_a_table_is_words_and_nothing_else(text: str) -> None:
    """Neither an order to the terminal nor one to the library that draws the table."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=2_000)
    table = Table("name", box=None, show_header=False)
    table.add_row(cell(text))
    console.print(table)
    assert "\x1b" not in out.getvalue()
    assert "evil.example" in out.getvalue() or "evil.example" not in text


@given(hostile)
def test_text_that_was_shown_can_be_read_back_from_json(text: str) -> None:
    text = text.replace("\r", "").encode("utf-8", "ignore").decode()
    assert json.loads(printable(json.dumps({"a": text}, ensure_ascii=False))) == {"a": text}


def test_address_of_an_engine_is_shown_without_its_password() -> None:
    assert shown_address("https://user:secret@h:1/v1") == "https://h:1/v1"
    assert shown_address("http://h:1") == "http://h:1"
