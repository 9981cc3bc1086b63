"""Completion scripts, in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from segue_cli.cli import VERBS, main

ENGINES = {"embedded", "scripted", "llamacpp", "vllm", "sglang", "chat"}
# What is typed, and some of what must be offered.
LINES = [
    ("", set(VERBS)),
    ("se", {"serve", "seals"}),
    ("serve --no-web", {"--no-websocket"}),
    ("serve --engine ", ENGINES),
    ("serve --port 1 --engine v", {"vllm"}),
    ("serve --tls-cert cert", {"cert.pem"}),
    ("doctor --por", {"--port"}),
    ("keys ", {"create", "list", "revoke"}),
    ("keys create --sc", {"--scopes"}),
    ("completion ", {"bash", "zsh", "fish"}),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cert.pem").touch()
    return tmp_path


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def run(folder: Path, *command: str) -> list[str]:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_bash_completes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    for line, _ in LINES:
        words = " ".join(f"'{word}'" for word in ("segue", *line.split(" ")))
        text += f"\nCOMP_WORDS=({words})\nCOMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        text += "COMPREPLY=(); _segue; echo ${COMPREPLY[@]}\n"
    (folder / "complete.sh").write_text(text)
    for (line, wanted), offered in zip(LINES, run(folder, "bash", "complete.sh"), strict=True):
        assert wanted <= set(offered.split()), line
        typed = line.rpartition(" ")[2]
        assert all(word.startswith(typed) for word in offered.split()), line


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "segue.fish").write_text(script("fish", capsys))
    asked = "; echo END; ".join(f"complete -C 'segue {line}'" for line, _ in LINES)
    printed = "\n".join(run(folder, "fish", "--private", "-c", f"source segue.fish; {asked}"))
    for (line, wanted), offered in zip(LINES, printed.split("END"), strict=True):
        assert wanted <= {row.split("\t")[0] for row in offered.splitlines()}, line


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The function is called as the completion system would; what it offers is printed instead."""
    text = "compdef() { :; }; _files() { print -l -- *.pem; }\n"
    text += "compadd() { shift; print -r -- $@; }\n" + script("zsh", capsys)
    for line, _ in LINES:
        words = " ".join(f"'{word}'" for word in ("segue", *line.split(" ")))
        text += f"\nwords=({words}); CURRENT=$#words; print -r -- OFFERED $(_segue)\n"
    (folder / "complete.zsh").write_text(text)
    offered = [row for row in run(folder, "zsh", "-f", "complete.zsh") if row.startswith("OFFERED")]
    for (line, wanted), row in zip(LINES, offered, strict=True):
        assert wanted <= set(row.split()), line
