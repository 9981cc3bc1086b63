"""A person gets the files of deploy/ without a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue_cli.cli import main
from segue_cli.commands.deploy import FILES

DEPLOY = Path(__file__).parents[2] / "deploy"
# What is made from a checkout, and nowhere else.
OF_THE_CHECKOUT = {"Containerfile", "image.sh"}


def test_every_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {path.relative_to(DEPLOY).as_posix() for path in DEPLOY.rglob("*") if path.is_file()}
    kept = {path for path in files if not path.startswith("site/")} - OF_THE_CHECKOUT
    assert {file.path for file in FILES.values()} == kept
    assert main(["deploy", "list"]) == 0
    listed = capsys.readouterr().out
    for name, file in FILES.items():
        assert name in listed
        assert main(["deploy", "write", name, "-o", f"{name}.copy"]) == 0
        assert (tmp_path / f"{name}.copy").read_bytes() == (DEPLOY / file.path).read_bytes()


def test_file_that_exists_is_replaced_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "segue.service"
    there.write_text("mine")
    assert main(["deploy", "write", "systemd"]) == 2
    assert "segue.service: this file exists" in capsys.readouterr().err
    assert there.read_text() == "mine"
    assert main(["deploy", "write", "systemd", "--force"]) == 0
    assert there.read_text() == (DEPLOY / "segue.service").read_text()
    assert main(["deploy", "write", "nginx", "-o", "missing/nginx.conf"]) == 2
    assert "missing/nginx.conf: cannot be written" in capsys.readouterr().err
    assert main(["deploy", "write", "nginx", "-o", "-"]) == 0
    assert capsys.readouterr().out == (DEPLOY / "nginx.conf").read_text()
