"""Commands that talk to a server with keys: the key is sent, and what the server says is said in plain words."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tomllib

import pytest

from segue_cli.cli import main
from segue_cli.client.clients import CLIENTS
from segue_cli.client.talk import RunningServer, ServerRefused
from tests.support import WAIT_S

Said = tuple[int, str, str]


class Commands:
    """Runs commands against the server."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._url, self._capsys = url, capsys

    def __call__(self, verb: str, *words: str) -> Said:
        status = main([verb, *words, "--url", self._url])
        printed = self._capsys.readouterr()
        return status, printed.out, printed.err


@pytest.fixture
def segue(locked: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(locked[0], capsys)


def test_missing_key_is_named_as_such(segue: Commands) -> None:
    status, out, err = segue("connect", "python")
    assert (status, out) == (2, "")
    assert "needs an API key" in err
    assert "SEGUE_KEY" in err
    assert "no answer" not in err
    assert "the variable MINE is not set" in segue("connect", "python", "--key-env", "MINE")[2]


def test_wrong_key_is_named_as_such(segue: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "from --key: it is wrong" in segue("chat", "--key", "sk-segue-wrong")[2]
    monkeypatch.setenv("MINE", "sk-segue-wrong")
    said = segue("connect", "codex", "--key-env", "MINE")[2]
    assert "from the variable MINE: it is wrong" in said


def test_key_is_taken_from_where_it_is(
    segue: Commands, locked: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snippets read it from the same variable, and never contain it."""
    key = locked[1]
    status, out, err = segue("connect", "python", "--key", key)
    assert (status, 'os.environ.get("SEGUE_KEY", "none")' in out) == (0, True)
    assert "Put the API key into the environment variable SEGUE_KEY" in err
    for name, words in (
        ("MINE", ("--key-env", "MINE")),
        ("SEGUE_KEY", ()),
        ("OPENAI_API_KEY", ()),
    ):
        monkeypatch.setenv(name, key)
        for client in CLIENTS:
            status, out, err = segue("connect", client, *words)
            # Zed derives the name of the variable from the name of the provider.
            assert (status, name in out or client == "zed", key in out) == (0, True, False), client
        block = tomllib.loads(segue("connect", "codex", "--print", *words)[1])
        assert block["model_providers"]["segue"]["env_key"] == name
        monkeypatch.delenv(name)


def test_model_that_is_not_served_is_said_with_those_that_are(
    segue: Commands, locked: tuple[str, str]
) -> None:
    status, out, err = segue("connect", "python", "--key", locked[1], "--model", "nope")
    assert (status, out) == (2, "")
    assert "'nope' is not served" in err
    assert "agent, gpt-5.5, other" in err
    assert segue("connect", "python", "--key", locked[1], "--model", "gpt-5.5")[0] == 0


def test_person_chats_with_a_key_and_changes_the_model(
    segue: Commands, locked: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEGUE_KEY", locked[1])
    lines = ["Hello", "/models", "/model nope", "/model other", "/model", "Again", "/foo", "/quit"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    status, out, err = segue("chat", "--markdown")
    assert (status, "first token" in err) == (0, True)
    assert "You said: Hello" in out
    assert "* agent\n" in out
    assert "'nope' is not served" in out
    assert "The model is still agent" in out
    assert "The model is now other." in out
    assert "The model is other." in out
    assert "You said: Again" in out
    assert "There is no command /foo." in out
    assert "/models" in out.partition("/foo")[2]


def test_lines_can_be_edited_and_fetched_again(locked: tuple[str, str]) -> None:
    """On a terminal: Up fetches the last question, arrow keys move in it, an interrupt drops a line, Ctrl-D exits."""
    url, key = locked
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "segue_cli.cli", "chat", "--url", url, "--key", key]
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen(command, env=environment, stdin=end, stdout=end, stderr=end)
    try:
        assert shows(terminal, "for help.*> ")
        os.write(terminal, b"Hello\r")
        assert shows(terminal, "You said: Hello\r\n.*first token.*> ")
        os.write(terminal, b"\x1b[A\x1b[D\x1b[DXX\r")
        assert shows(terminal, "You said: HelXXlo\r\n.*first token.*> ")
        assert any(interrupted(process, terminal) for _ in range(10))
        os.write(terminal, b"\x04")
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait(WAIT_S)
        os.close(terminal)
        os.close(end)


def interrupted(process: subprocess.Popen[bytes], terminal: int) -> bool:
    """Whether an interrupt is noticed: between the prompt and the wait for a key Python does not see it."""
    process.send_signal(signal.SIGINT)
    return shows(terminal, "/quit or Ctrl-D exits.*> ", wait_s=1)


def shows(terminal: int, pattern: str, wait_s: float = WAIT_S) -> bool:
    """Whether the terminal shows this before it falls silent."""
    shown = ""
    while not re.search(pattern, shown, re.DOTALL):
        if not select.select([terminal], [], [], wait_s)[0]:
            return False
        shown += os.read(terminal, 4096).decode()
    return True


def test_other_errors_keep_the_servers_words(locked: tuple[str, str]) -> None:
    server = RunningServer(f"{locked[0]}/v1", locked[1])
    with pytest.raises(ServerRefused, match=r"answered 404: .*resp_none") as caught:
        server.ask("/v1/responses/resp_none")
    assert caught.value.status == 404


def test_named_model_needs_no_running_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["connect", "python", "--url", "http://127.0.0.1:1", "--model", "m"]) == 0
    printed = capsys.readouterr()
    assert 'model="m"' in printed.out
    assert "not checked" in printed.err


def test_url_comes_from_the_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEGUE_PORT", "1")
    assert main(["chat"]) == 2
    assert "http://127.0.0.1:1:" in capsys.readouterr().err
