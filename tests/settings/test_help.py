"""Every setting is a flag that `--help` explains."""

from __future__ import annotations

import re

import pytest

from segue_cli.cli import main, parse
from segue_cli.commands.settings_help import COMMON, FLAGS


def shown(capsys: pytest.CaptureFixture[str], flag: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["serve", flag])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_common_settings_and_help_all_every_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few, every = shown(capsys, "--help"), shown(capsys, "--help-all")
    for name in FLAGS:
        flag = f"  --{name.replace('_', '-')} "
        assert flag in every
        assert (flag in few) == (name in COMMON), name
    assert len(re.findall("^  -", few, re.MULTILINE)) <= 40
    for text in (few, every):
        assert "none)" not in text
        assert text.startswith("usage: segue serve [FLAGS]\n")


def test_switch_needs_no_value() -> None:
    for words, value in (
        (["--websocket"], "true"),
        (["--no-websocket"], "false"),
        (["--websocket", "false"], "false"),
        (["--websocket=true", "--port", "1"], "true"),
        ([], None),
    ):
        assert parse(["serve", *words]).websocket == value


def test_commands_with_flags_of_serve_name_it_instead_of_repeating_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    text = capsys.readouterr().out
    assert "All flags of `segue serve`" in text
    assert "--port" not in text
    assert parse(["doctor", "--port", "1"]).port == "1"


def test_command_tells_what_is_wrong_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "many"]) == 2

    told = capsys.readouterr().err
    assert told.startswith("segue: ")
    assert "port" in told
