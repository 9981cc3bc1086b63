"""What happens when a reader types what a page says?

In: the steps of pages. They are run in one folder that is empty at first, one after the other, as in one terminal (the
folder and exported variables carry over), with `segue` and the official clients on PATH. The first surprise is raised:
another exit status than 0, nothing printed, an expected line that is missing, a traceback, a program in the background
that ends or never gets ready. Everything that was started is ended.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.documents.pages import Step

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients" / "bin"
NODE_MODULES = ROOT / ".cache" / "npm-agents" / "node_modules"
STEP_S_MAX = 60.0
LOOK_S = 0.02
# What a program on PATH really is. pip finds the clients installed and asks no index.
PROGRAMS = {
    "segue": [str(ROOT / ".venv" / "bin" / "segue")],
    "python": [str(CLIENTS / "python"), "-W", "error"],
    "pip": [str(CLIENTS / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"],
    "node": [str(CLIENTS / "node"), "--no-warnings"],
    "codex": [str(NODE_MODULES / ".bin" / "codex")],
    "websocat": [str(CLIENTS / "websocat")],
}
RUNNERS = {"sh": "bash -euo pipefail", "python": "python", "js": "node"}
SUFFIX = {"sh": "sh", "python": "py", "js": "mjs"}


class Surprise(Exception):
    """A page promised something else than what happened."""


@dataclass
class Player:
    """One reader: a folder, a terminal, and what runs in other terminals."""

    folder: Path
    environment: dict[str, str]
    replaced: Mapping[str, str]
    is_verbose: bool = False
    printed: str = ""
    _background: list[tuple[Step, subprocess.Popen[bytes], Path]] = field(default_factory=list)
    _count: int = 0

    def play(self, steps: Iterable[Step]) -> int:
        """Run these; how many were run."""
        ran = 0
        for step in steps:
            if "expect" in step.marks:
                self._expect(step)
            elif name := step.marks.get("file"):
                (self.work / name).write_text(self._changed(step))
            elif step.is_run:
                self._run(step)
                ran += 1
        return ran

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def _changed(self, step: Step) -> str:
        text = step.text
        if change := step.marks.get("replace"):
            old, _, new = change.partition(" with ")
            if old not in text:
                raise Surprise(f"{step.place}: '{old}', which is to be replaced, is not there")
            text = text.replace(old, new)
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return text

    def _run(self, step: Step) -> None:
        self._count += 1
        script = self.folder / f"step-{self._count}.{SUFFIX[step.language]}"
        script.write_text(self._changed(step))
        output = self.folder / f"step-{self._count}.out"
        started = time.monotonic()
        typed = self.folder / f"step-{self._count}.in"
        typed.write_text(step.marks.get("input", "") + "\n")
        with output.open("wb") as out, typed.open("rb") as keyboard:
            process = subprocess.Popen(
                ["bash", "-c", self._terminal(step, script)],
                cwd=self.work,
                env=self.environment,
                stdin=keyboard,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._background.append((step, process, output))
        status = self._wait(step, process, output)
        self.printed = output.read_text("utf-8", "replace")
        if self.is_verbose:
            print(f"--- {step.place} ({time.monotonic() - started:.1f} s)\n{self.printed}")
        if "until" not in step.marks:
            self._background.pop()
            self._judge(step, status)

    def _terminal(self, step: Step, script: Path) -> str:
        """A command for bash that takes over what earlier steps exported, and leaves what this one did."""
        state = shlex.quote(str(self.folder / "state"))
        file = shlex.quote(str(script))
        if step.language != "sh":
            return f"[ ! -f {state} ] || . {state}; exec {RUNNERS[step.language]} {file}"
        keep = (
            f'{{ export -p; echo cd $(printf %q "$PWD"); }} > {state}.new; mv {state}.new {state}'
        )
        if "until" in step.marks:
            return f"[ ! -f {state} ] || . {state}; exec {RUNNERS['sh']} {file}"
        return f"[ ! -f {state} ] || . {state}; set -euo pipefail; . {file}; {keep}"

    def _wait(self, step: Step, process: subprocess.Popen[bytes], output: Path) -> int | None:
        """Until it has ended, or has printed what it is to print."""
        until = step.marks.get("until")
        deadline = time.monotonic() + STEP_S_MAX
        while (status := process.poll()) is None:
            if until and until in output.read_text("utf-8", "replace"):
                return None
            if time.monotonic() > deadline:
                raise Surprise(f"{step.place}: not done after {STEP_S_MAX:.0f} s\n{_tail(output)}")
            time.sleep(LOOK_S)
        if until:
            raise Surprise(f"{step.place}: ended with {status} before '{until}'\n{_tail(output)}")
        return status

    def _judge(self, step: Step, status: int | None) -> None:
        promised = int(step.marks.get("exit", 0))
        if status != promised:
            raise Surprise(
                f"{step.place}: exit status {status}, not {promised}\n{self.printed[-4000:]}"
            )
        if "Traceback (most recent call last)" in self.printed:
            raise Surprise(f"{step.place}: a traceback\n{self.printed[-4000:]}")
        if not self.printed.strip() and "quiet" not in step.marks:
            raise Surprise(f"{step.place}: nothing was printed")

    def _expect(self, step: Step) -> None:
        """Line by line; what is printed between them does not matter."""
        lines = [line.strip() for line in self._changed(step).splitlines() if line.strip()]
        printed = self._printed_now()
        at = 0
        for line in lines:
            pattern = ".*?".join(re.escape(part) for part in re.split(r"\s*…\s*", line))
            found = re.compile(re.sub(r"(?:\\\s)+|\s+", r"\\s+", pattern)).search(printed, at)
            if found is None:
                raise Surprise(f"{step.place}: not printed: {line}\nbut:\n{printed[-4000:]}")
            at = found.end()

    def _printed_now(self) -> str:
        """What the last step has printed by now: a program in the background may have gone on."""
        if self._background and self._count == int(self._background[-1][2].stem[5:]):
            self.printed = self._background[-1][2].read_text("utf-8", "replace")
        return self.printed

    def end(self) -> None:
        """End what still runs; a program that ended badly, or logged a traceback, is a surprise."""
        wrong = []
        for step, process, output in reversed(self._background):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            try:
                status = process.wait(STEP_S_MAX)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
            said = output.read_text("utf-8", "replace")
            if status not in (0, -signal.SIGTERM) or "Traceback (most recent" in said:
                wrong.append(f"{step.place}: ended with {status}\n{said[-4000:]}")
        self._background.clear()
        if wrong:
            raise Surprise("\n".join(wrong))


def _tail(output: Path) -> str:
    return output.read_text("utf-8", "replace")[-4000:]


def free_port() -> int:
    """A port of the loopback address that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@contextmanager
def playing(
    folder: Path,
    programs: Mapping[str, list[str]] | None = None,
    environment: Mapping[str, str] | None = None,
    replaced: Mapping[str, str] | None = None,
    is_verbose: bool = False,
) -> Iterator[Player]:
    """A reader with an empty folder whose server has a port of its own."""
    port = free_port()
    for name in ("work", "bin", "home"):
        (folder / name).mkdir()
    for name, command in {**PROGRAMS, **(programs or {})}.items():
        file = folder / "bin" / name
        file.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        file.chmod(0o755)
    variables = {
        "PATH": f"{folder / 'bin'}:{CLIENTS}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder / "home"),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "COLUMNS": "100",
        "PIP_NO_INDEX": "1",
        "SEGUE_PORT": str(port),
        "SEGUE_URL": f"http://127.0.0.1:{port}",
        "SEGUE_ENGINE": "scripted",
        "SEGUE_MODEL": "smollm2",
        **(environment or {}),
    }
    ports = {":8080": f":{port}", "--port 8080": f"--port {port}", "port = 8080": f"port = {port}"}
    # Modules of a js block are looked up from where its file is.
    (folder / "node_modules").symlink_to(NODE_MODULES)
    player = Player(folder, variables, {**ports, **(replaced or {})}, is_verbose)
    try:
        yield player
    except BaseException:
        try:
            player.end()
        except Surprise as also:
            print(also)
        raise
    player.end()
