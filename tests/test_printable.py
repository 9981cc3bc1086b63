"""What reaches a terminal is text, and JSON stays JSON."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from segue.printable import printable, shown_address

REMOTE = Path(__file__).parents[1] / "src" / "segue_cli" / "remote"


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


def test_commands_that_talk_to_a_server_print_by_one_function() -> None:
    for path in REMOTE.glob("*.py"):
        calls = [one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Call)]
        names = [one.func.id for one in calls if isinstance(one.func, ast.Name)]
        assert names.count("print") == (path.name == "talk.py"), path.name


def test_address_of_an_engine_is_shown_without_its_password() -> None:
    assert shown_address("https://user:secret@h:1/v1") == "https://h:1/v1"
    assert shown_address("http://h:1") == "http://h:1"
