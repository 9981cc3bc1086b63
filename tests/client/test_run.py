"""`segue run`: an agent with the server, its key and its model, and a server of its own where none answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from segue_cli.client.clients import CLIENTS
from segue_cli.client.run import AGENTS
from tests.clients.agents import AIDER, CODEX, NODE, NPM_MORE, clean
from tests.clients.coders import ALONE, end_leftovers

RUN_S_MAX = 100


def segue(
    folder: Path, *words: str, path: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`segue run` in a folder, with the programs of another one."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    # Not below the folder for temporary files: Codex does not like that.
    own = {"HOME": str(home), "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": os.getcwd()}
    return subprocess.run(
        [sys.executable, "-m", "segue_cli.cli", "run", *words],
        cwd=folder,
        env={
            **clean(os.environ),
            "PATH": f"{path}:{NODE.parent}:/usr/bin:/bin",
            **ALONE,
            **own,
            **environment,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )


# How each agent is asked one question.
WORDS = {
    "claude": ("-p",),
    "opencode": ("run",),
    "pi": ("--no-session", "-p"),
    "cline": (),
    "qwen": ("-p",),
    "cn": ("-p",),
    "aider": ("--yes-always", "--no-check-update", "--message"),
}


def script(folder: Path) -> str:
    path = folder / "script.json"
    path.write_text(json.dumps({"turns": [{"text": "Hello from the script."}]}))
    return str(path)


def test_codex_runs_on_a_server_of_its_own_that_ends_with_it(tmp_path: Path) -> None:
    flags = ("--engine", "scripted", "--script", script(tmp_path))
    words = ("exec", "--skip-git-repo-check", "say hello")
    ran = segue(tmp_path, *flags, "codex", *words, path=CODEX.parent)
    assert ran.returncode == 0, ran.stderr
    assert "Hello from the script." in ran.stdout
    url = ran.stderr.partition("started a server at ")[2].partition(",")[0]
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5)
    assert not (tmp_path / "home" / ".codex").exists()


def test_agent_gets_server_key_and_model_and_its_status_is_passed_on(
    locked: tuple[str, str], tmp_path: Path
) -> None:
    """A stand-in for the agent says what it was started with."""
    program = tmp_path / "bin" / "codex"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\ncat "$CODEX_HOME/config.toml"\necho "# $SEGUE_KEY $*"\nexit 7\n')
    program.chmod(0o755)
    url, key = locked
    words = ("--url", url, "--key", key, "--model", "other", "codex", "exec", "--json", "hi")
    ran = segue(tmp_path, *words, path=program.parent)
    assert ran.returncode == 7, ran.stderr
    assert f"# {key} exec --json hi" in ran.stdout
    settings = tomllib.loads(ran.stdout)
    assert settings["model"] == "other"
    assert settings["model_providers"]["segue"]["env_key"] == "SEGUE_KEY"
    assert settings["model_providers"]["segue"]["base_url"] == f"{url}/v1"


def test_claude_code_gets_the_server_and_one_model_for_every_call(
    locked: tuple[str, str], tmp_path: Path
) -> None:
    """A stand-in for the agent says what it was started with; a key for another server is not sent along."""
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nenv\necho "words=$*"\n')
    program.chmod(0o755)
    url, key = locked
    words = ("--url", url, "--key", key, "--model", "other", "claude", "-p", "hi")
    ran = segue(tmp_path, *words, path=program.parent, ANTHROPIC_API_KEY="sk-ant-of-the-person")
    assert ran.returncode == 0, ran.stderr
    got = dict(line.split("=", 1) for line in ran.stdout.splitlines() if "=" in line)
    assert got["words"] == "-p hi"
    assert got["ANTHROPIC_BASE_URL"] == url
    assert (got["ANTHROPIC_AUTH_TOKEN"], got["ANTHROPIC_API_KEY"]) == (key, "")
    assert {text for name, text in got.items() if name.endswith("_MODEL")} == {"other"}


def test_what_cannot_be_started_is_said(tmp_path: Path) -> None:
    empty = tmp_path / "none"
    for words, said in {
        (
            "codex",
        ): "codex is not installed, or not in PATH. Install it: npm install -g @openai/codex",
        (
            "claude-code",
        ): "claude is not installed, or not in PATH. Install it: npm install -g @anthropic-ai/claude-code",
        ("emacs",): "choose from codex, claude, opencode, pi, cline, qwen, cn, aider",
    }.items():
        ran = segue(tmp_path, *words, path=empty)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert said in ran.stderr


def test_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    flags = ("--engine", "scripted", "--script", "none.json")
    ran = segue(tmp_path, *flags, "codex", "exec", "hi", path=CODEX.parent)
    assert ran.returncode == 2
    assert "the server did not start" in ran.stderr
    assert "none.json" in ran.stderr


@pytest.mark.clients
@pytest.mark.parametrize(
    "agent, api",
    [(agent, api) for agent in WORDS for api in CLIENTS[AGENTS[agent].client].apis],
)
def test_other_agents_run_too(agent: str, api: str, tmp_path: Path) -> None:
    flags = ("--engine", "scripted", "--script", script(tmp_path), "--api", api)
    path = AIDER.parent if agent == "aider" else NPM_MORE / ".bin"
    try:
        ran = segue(tmp_path, *flags, agent, *WORDS[agent], "say hello", path=path)
    finally:
        end_leftovers(tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "Hello from the script." in ran.stdout
