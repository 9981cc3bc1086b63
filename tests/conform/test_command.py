"""How does a person run the suite, and what is written?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from segue_conform.case import Case, Result
from segue_conform.command import main
from segue_conform.report import Report, as_badge, as_page, as_text
from segue_conform.suite import CASES
from segue_conform.target import Target
from tests.support import served_process

ARGUMENTS = ("--engine", "scripted", "--store", "memory", "--port", "0")


def test_person_reads_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html", "badge")}
    wanted = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    with served_process(*ARGUMENTS, cwd=tmp_path) as served:
        only = ["--only", "responses.create", "--only", "responses.calls"]
        assert main(["--url", served.url, *only, *wanted]) == 0
    printed = capsys.readouterr().out
    assert "model scripted" in printed
    assert "not run: what needs the scripted upstream" in printed
    report = json.loads(files["json"].read_text())
    assert report["holds"]
    assert report["counts"]["must"] == {"passed": 15, "not run": 7}
    assert "Conformance of" in files["html"].read_text()
    assert "15 of 22 must" in files["badge"].read_text()


def test_exit_status_says_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CASES)
    assert main([]) == 2
    assert main(["--url", "http://127.0.0.1:1", "--only", "no.such"]) == 2
    assert main(["--url", "http://127.0.0.1:1", "--model", "m"]) == 2
    assert "does not answer" in capsys.readouterr().err


async def _never(target: Target) -> None:
    raise AssertionError


def test_what_a_server_says_is_shown_and_not_run() -> None:
    case = Case("responses.create.odd", "a claim", "must", "a source", _never)
    why = "HTTP 400: '<script>alert(1)</script>'"
    report = Report("http://<b>", "<m>\x1b]52;c;x", "now", "1", [Result(case, "failed", why)])
    assert not report.holds
    assert "<script>" not in as_page(report)
    assert "&lt;script&gt;" in as_page(report)
    assert why in as_text(report, False)
    assert "\x1b" not in as_text(report, False)
    assert "0 of 1 must" in as_badge(report)
