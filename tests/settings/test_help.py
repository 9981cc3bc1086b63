"""Every setting is a flag that `--help` explains."""

from __future__ import annotations

import pytest

from segue.settings.help import FLAGS
from segue_cli.cli import main, parse


def test_help_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "--help"])

    assert left.value.code == 0
    text = capsys.readouterr().out
    for name in FLAGS:
        assert f"--{name.replace('_', '-')}" in text
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
