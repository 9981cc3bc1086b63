"""Servers that lie to a command: no traceback, no order to the terminal, no key for another server, no endless wait."""

from __future__ import annotations

import io
import resource
import subprocess
import sys

import pytest

from segue_cli.cli import main
from segue_cli.client import conversation, talk
from segue_cli.commands.doctor import check_server, refuses_key
from tests.client.liars import MODELS, Liar, frame, lying, ok


@pytest.fixture(autouse=True)
def nothing_is_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())


STATUS = b"HTTP/1.1 200 OK\r\n"
MEMORY_BYTES_MAX = 1024 * 1024 * 1024

UNREAD = {
    "no HTTP": Liar(b"\x1b]0;owned\x07 what\r\n\r\n"),
    "no number": Liar(b"HTTP/1.1 \x1b]0;owned\x07 x\r\n\r\n"),
    "long line": Liar(b"HTTP/1.1 200 " + b"\x1b" * 100_000 + b"\r\n\r\n"),
    "many headers": Liar(STATUS + b"".join(b"x%d: y\r\n" % n for n in range(200)) + b"\r\n"),
    "cut off": Liar(STATUS + b"content-length: 1000\r\n\r\n{}"),
    "bad chunk": Liar(STATUS + b"transfer-encoding: chunked\r\n\r\n\x1b\r\n"),
    "no UTF-8": Liar(ok(b'{"data":[{"id":"\xff\x1b"}]}')),
    "deep": Liar(ok(b'{"data":[],"x":' + b"[" * 200_000)),
    "types": Liar(ok(b'{"data":"\\u001b"}')),
}


@pytest.mark.parametrize("name", UNREAD)
def test_person_reads_in_words_that_a_server_cannot_be_read(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with lying(UNREAD[name]) as liar:
        assert main(["ask", "Hello", "--url", liar.url]) == 2
        assert not any(check.is_ok for check in check_server(talk.RunningServer(f"{liar.url}/v1")))
    printed = capsys.readouterr()
    assert "no answer from a server" in printed.err
    assert "\x1b" not in printed.err


ENDLESS = {
    "head": Liar(STATUS + b"x: ", b" "),
    "dribbled body": Liar(STATUS + b"\r\n", b" "),
    "interim answers": Liar(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_person_does_not_wait_for_a_server_that_never_ends(name: str) -> None:
    with lying(ENDLESS[name]) as liar, pytest.raises(talk.NotReachable):
        talk.RunningServer(liar.url).ask("/v1/models", wait_s=0.5)


def test_endless_body_takes_little_memory() -> None:
    """A process that may take a gigabyte says it in words."""
    with lying(Liar(STATUS + b"\r\n", b" " * 1_000_000)) as liar:
        asked = subprocess.run(
            [sys.executable, "-m", "segue_cli.cli", "ask", "Hello", "--url", liar.url],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX,) * 2),
        )
    assert asked.returncode == 2
    assert b"no answer from a server" in asked.stderr
    assert b"Traceback" not in asked.stderr


def test_key_does_not_follow_a_redirect(capsys: pytest.CaptureFixture[str]) -> None:
    with lying(Liar(ok(MODELS))) as thief:
        head = b"HTTP/1.1 302 Found\r\nlocation: %b/stolen\r\n\r\n" % thief.url.encode()
        with lying(Liar(head)) as liar:
            assert main(["ask", "Hello", "--url", liar.url, "--key", "sk-secret"]) == 2
            assert not refuses_key(liar.url, "sk-engine")
    assert "answered 302" in capsys.readouterr().err
    assert thief.heads == []


@pytest.mark.parametrize("verb", ["explain", "ask", "doctor"])
def test_commands_say_that_a_body_is_not_what_they_asked_for(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"explain": ["resp_1"], "ask": ["--json", "Hello"], "doctor": ["--traffic"]}
    for body in (b"no", b'{"id":5}', b"\xff", b'{"data":[{"id":"m"}],"id":"\xff"}'):
        with lying(Liar(ok(body))) as liar:
            assert main([verb, *words[verb], "--url", liar.url]) == 2
        assert "segue: " in capsys.readouterr().err


@pytest.mark.parametrize("text", [b"no", b"[1]", b'{"type":"error","error":{"code":5}}', b"\x1b"])
def test_person_reads_in_words_that_an_event_cannot_be_read(
    text: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with lying(Liar(b"", frames=frame(text))) as liar:
        assert main(["ask", "Hello", "--url", liar.url]) == 2
    assert "did not answer with events" in capsys.readouterr().err


def test_answer_without_an_end_is_given_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "ANSWER_CHARS_MAX", 100_000)
    delta = frame(b'{"type":"response.output_text.delta","delta":"a"}')
    with lying(Liar(b"", frames_again=delta * 100)) as liar:
        assert main(["ask", "Hello", "--url", liar.url]) == 2
    assert "does not end its answer" in capsys.readouterr().err


def test_long_words_of_a_server_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    body = b'{"error":{"message":"%b"}}' % (b"x" * 1_000_000)
    head = b"HTTP/1.1 500 no\r\ncontent-length: %d\r\n\r\n" % len(body)
    with lying(Liar(head + body)) as liar:
        assert main(["ask", "Hello", "--url", liar.url]) == 2
    assert len(capsys.readouterr().err) < 3_000
    with lying(Liar(ok(b'{"data":[{"id":"%b"}]}' % (b"m" * 1_000_000)))) as liar:
        assert main(["ask", "Hello", "--url", liar.url]) == 2
    assert len(capsys.readouterr().err) < 3_000
