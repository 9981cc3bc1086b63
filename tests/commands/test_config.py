"""`segue config`: every problem with its place, and where each value comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from segue_cli.cli import main

Printed = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEGUE_CONFIG")


def test_problems_of_the_file_in_this_folder_are_printed_with_their_lines(capsys: Printed) -> None:
    Path("segue.toml").write_text('port = "x"\nprot = 1\n')
    assert main(["config", "check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "segue.toml, line 1: port: 'x' is not a whole number from 0 to 65535.",
        "segue.toml, line 2: prot: 'prot' is not a setting. Did you mean port?",
        "segue.toml: 2 problems.",
    ]


def test_repairs_of_0_2_are_refused_by_name(capsys: Printed) -> None:
    Path("segue.toml").write_text("[[repairs]]\nknown = 'timestamp'\n")
    assert main(["config", "check"]) == 1
    problem, _ = capsys.readouterr().out.splitlines()
    assert problem == "segue.toml, line 1: repairs: 'repairs' is not a setting."


def test_problems_as_json(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    Path("other.toml").write_text("\ntps = -1\n")
    monkeypatch.setenv("SEGUE_AUHT", "off")
    assert main(["config", "check", "other.toml", "--workers", "0", "--json"]) == 1
    place = "other.toml, line 2"
    file = {"setting": "tps", "place": place, "file": "other.toml", "line": 2, "level": "error"}
    found = json.loads(capsys.readouterr().out)
    assert [{**row, "message": ""} for row in found] == [
        {**file, "message": ""},
        {**file, "message": "", "setting": "workers", "place": "--workers", "file": None, "line": None},
        {**file, "message": "", "setting": "", "place": "SEGUE_AUHT", "file": None, "line": None, "level": "warning"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [("port =\n", 1, "this is not TOML"), ('\nconfig = "x"', None, "cannot name another")],
)
def test_file_that_is_not_read_is_a_problem_too(
    text: str, line: int | None, told: str, capsys: Printed
) -> None:
    Path("segue.toml").write_text(text)
    assert main(["config", "check", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)
    assert (problem["file"], problem["line"]) == ("segue.toml", line)
    assert told in problem["message"]
    assert main(["config", "check", "absent.toml"]) == 1
    assert "absent.toml cannot be read: No such file" in capsys.readouterr().out


def test_what_a_start_would_miss_is_a_problem(capsys: Printed) -> None:
    Path("segue.toml").write_text(
        'script = "absent.json"\n[[models]]\nname = "a"\naliases = ["b"]\nengine = "vllm"\n'
        '[[models]]\nname = "b"\nengine = "scripted"\n'
    )
    assert main(["config", "check"]) == 1
    assert capsys.readouterr().out.splitlines()[:3] == [
        "segue.toml, line 2: models: two models are called 'b'.",
        "engine_url: engine 'vllm' of a needs a URL.",
        "segue.toml, line 1: script: there is no file or folder absent.json.",
    ]


def test_good_settings_have_no_problems(capsys: Printed) -> None:
    assert main(["config", "check"]) == 0
    assert "no settings file): no problems." in capsys.readouterr().out
    Path("segue.toml").write_text("port = 1\n")
    assert main(["config", "check"]) == 0
    assert capsys.readouterr().out == "segue.toml: no problems.\n"
    assert main(["config", "check", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_each_value_is_shown_with_its_origin_and_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    Path("segue.toml").write_text(
        'tps = 5\nguard_key = "s3cret"\n[[mcp]]\nlabel = "m"\nurl = "http://x"\n'
        'headers = { Authorization = "s3cret" }\n[[models]]\nname = "a"\nengine_key = "s3cret"\n'
    )
    monkeypatch.setenv("SEGUE_STORE", "postgresql://me:s3cret@db/x")
    assert main(["config", "show", "--port", "7", "--json"]) == 0
    printed = capsys.readouterr().out
    shown = json.loads(printed)
    assert "s3cret" not in printed
    assert shown["port"] == {"value": 7, "from": "--port"}
    assert shown["store"] == {"value": "postgresql://me:…@db/x", "from": "SEGUE_STORE"}
    assert shown["tps"] == {"value": 5.0, "from": "segue.toml, line 1"}
    assert shown["guard_key"] == {"value": "(hidden)", "from": "segue.toml, line 2"}
    assert shown["host"] == {"value": "127.0.0.1", "from": "default"}
    assert shown["mcp"]["from"] == "segue.toml, line 3"
    assert shown["models"]["value"] == [{"name": "a", "engine_key": "(hidden)"}]
    assert main(["config", "show"]) == 0
    printed = capsys.readouterr().out
    assert "s3cret" not in printed
    assert "settings file: segue.toml" in printed
    assert main(["config", "show", "--port", "x"]) == 2


def test_changed_settings_alone(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    Path("segue.toml").write_text("port = 81\n")
    monkeypatch.setenv("SEGUE_TPS", "0")
    assert main(["config", "show", "--changed", "--json", "--workers", "2"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "port": {"value": 81, "from": "segue.toml, line 1"},
        "workers": {"value": 2, "from": "--workers"},
        "tps": {"value": 0.0, "from": "SEGUE_TPS"},
    }
