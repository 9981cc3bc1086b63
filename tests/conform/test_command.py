"""How does a person run the suite, and what is written?"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from segue_conform.case import Case, Need, Result
from segue_conform.command import main
from segue_conform.report import Report, as_badge, as_page, as_text
from segue_conform.suite import CASES
from segue_conform.target import Target
from tests.support import WAIT_S, served_process

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


async def test_server_that_ends_its_connections_is_asked_on_new_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each answers one request and is closed at the next, as servers do that keep connections for a while."""

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        words = ["--url", f"http://127.0.0.1:{port}", "--only", "responses.create.whole"]
        assert await asyncio.to_thread(main, words) == 1
    printed = capsys.readouterr().out
    assert "connection broke" not in printed
    assert "absent   must    responses.create.whole" in printed


def test_exit_status_says_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(CASES)
    assert main([]) == 2
    assert main(["--url", "http://127.0.0.1:1", "--only", "no.such"]) == 2
    assert main(["--url", "http://127.0.0.1:1", "--model", "m"]) == 2
    assert "does not answer" in capsys.readouterr().err


def test_orders_to_a_terminal_are_shown_and_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://x\x1b]52;c;YQ=="]) == 2
    assert "http://x\\x1b]52;c;YQ==" in capsys.readouterr().err


def test_words_name_the_command_that_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    """`segue conform` is not there where only the suite is installed."""
    with pytest.raises(SystemExit):
        main(["--help"])
    main([])
    main(["--url", "http://127.0.0.1:1", "--only", "no.such"])
    main(["--url", "http://127.0.0.1:1", "--model", "m"])
    said = "".join(capsys.readouterr())
    assert "segue-conform upstream --port 9999" in said
    assert "segue conform" not in said
    assert not any("segue conform" in need.value for need in Need)


def test_report_that_cannot_be_written_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What came of the cases is printed all the same."""
    words = ["--only", "responses.create.models", "--html", str(tmp_path / "none" / "report.html")]
    with served_process(*ARGUMENTS, cwd=tmp_path) as served:
        assert main(["--url", served.url, *words]) == 2
    printed = capsys.readouterr()
    assert "1 of 1 passed" in printed.out
    assert "report.html cannot be written: No such file or directory" in printed.err


def test_port_of_the_upstream_that_is_taken_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["upstream", "--port", port]) == 2
    said = capsys.readouterr()
    assert f"port {port} on 127.0.0.1 cannot be used: Address already in use" in said.err
    assert said.out == ""


def test_reader_of_a_pipe_that_leaves_gets_no_traceback() -> None:
    """As `segue-conform list | head` does."""
    command = [
        sys.executable,
        "-c",
        "from segue_conform.command import main; raise SystemExit(main())",
    ]
    with subprocess.Popen([*command, "list"], stdout=PIPE, stderr=PIPE, bufsize=0) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=WAIT_S) == 1


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "localhost", "ftp://localhost", "http://"])
def test_address_without_its_scheme_is_said(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--url", url], ["--url", "http://localhost:1", "--upstream", url]):
        assert main(words) == 2
        assert f"'{url}' is no address such as http://127.0.0.1:8080" in capsys.readouterr().err


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
