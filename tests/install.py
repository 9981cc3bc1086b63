"""How far is it from the wheels to an answer? By pip, pipx and uvx, each in an empty environment outside the checkout.

`make test-install` builds the wheels and runs this. Ours come from the folder, all others from the package index. Each
way ends with a request that is answered by the scripted engine. Then `segue serve` is started on a terminal, where it
asks whether to download the small model, and that model answers. The last way installs the server alone. Prints the
time from the wheels to the answer (the model: after the installation), and what a person has typed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from segue import __version__
from tests.support import ServedProcess, fetch, served_process

SCRIPTED = ("--engine", "scripted", "--store", "memory")
INSTALL_S_MAX = 900
ANSWER_S_MAX = 300
# What a server in front of an engine does without.
NOT_FOR_A_SERVER = {"segue", "aiohttp", "asyncpg", "mcp", "pypdf", "rich", "tomlkit", "xllamacpp"}


class Person:
    """Somebody with an empty home and the wheels in it, who types commands there."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.typed: list[str] = []
        kept = ("PATH", "LANG", "SSL_CERT_FILE")
        settings = {
            name: value
            for name, value in os.environ.items()
            if name in kept or name.startswith(("PIP_", "UV_"))
        }
        self.environment = {
            **_index_for_uv(),
            **settings,
            "HOME": str(home),
            "PATH": f"{home}/.local/bin:{settings['PATH']}",
        }

    def types(self, line: str) -> str:
        """Run a line of shell as typed; what it printed."""
        self.typed.append(line)
        done = subprocess.run(
            line,
            shell=True,
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=INSTALL_S_MAX,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    async def is_answered(self, program: str) -> None:
        """Start a server with the scripted engine, and ask it."""
        self.typed.append(f"{program} serve {shlex.join(SCRIPTED)}")
        words = shlex.split(program)
        with served_process(
            *SCRIPTED, cwd=self.home, environment=self.environment, program=words
        ) as served:
            await _ask(served, "scripted")


def _index_for_uv() -> dict[str, str]:
    """uv does not read pip's configuration: the same indexes, by uv's names, and searched as pip does."""
    names = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX"}
    said = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for line in _pip("config", "list").splitlines():
        name, _, value = line.partition("=")
        if variable := names.get(name.rpartition(".")[2]):
            said[variable] = value.strip("'")
    return said


def _pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def _ask(served: ServedProcess, model: str) -> None:
    body = {"model": model, "input": "Say hello.", "max_output_tokens": 16}
    answer = await fetch(served, "POST", "/v1/responses", body)
    assert answer.status == 200, answer.body
    assert msgspec.json.decode(answer.body)["output"], answer.body


async def by_pip(person: Person) -> str:
    person.types(f"{shlex.quote(sys.executable)} -m venv env")
    person.types(f"env/bin/pip install -q --find-links . segue=={__version__}")
    assert person.types("env/bin/segue --version").strip() == f"segue {__version__}"
    person.typed.pop()
    await person.is_answered("env/bin/segue")
    return "env/bin/segue"


async def by_pipx(person: Person) -> str:
    person.types(f"pipx install --quiet --pip-args='--find-links .' segue=={__version__}")
    await person.is_answered("segue")
    return "segue"


async def by_uvx(person: Person) -> str:
    program = f"uvx --quiet --find-links . segue@{__version__}"
    await person.is_answered(program)
    return program


async def server_by_pip(person: Person) -> str:
    person.types(f"{shlex.quote(sys.executable)} -m venv env")
    person.types(f"env/bin/pip install -q --find-links . segue-server=={__version__}")
    await person.is_answered("env/bin/segue-server")
    installed = person.types("env/bin/pip list --format=freeze --disable-pip-version-check")
    person.typed.pop()
    assert not NOT_FOR_A_SERVER & {line.partition("==")[0] for line in installed.split()}
    return "env/bin/segue-server"


def on_a_terminal(person: Person, program: str) -> str:
    """`segue serve` finds no weights, asks, downloads them, and serves them."""
    person.typed += [f"{program} serve", "Enter"]
    words = [*shlex.split(program), "serve", "--port", "0", "--store", "memory"]
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(person.home)
        os.execvpe(words[0], words, person.environment)
    printed, end = "", time.monotonic() + ANSWER_S_MAX
    try:
        while not (up := re.search(r" at (http://\S+)/v1", printed)):
            assert time.monotonic() < end, printed
            new = os.read(terminal, 65_536).decode(errors="replace")
            printed += new
            # The better model is declined, the small one is wanted.
            if re.search(r"\[[Yy]/[Nn]\] $", printed):
                os.write(terminal, b"\n")
        served = ServedProcess(up[1], None, [])  # type: ignore[arg-type]
        asyncio.run(_ask(served, "smollm2"))
    finally:
        os.kill(process, 15)
        os.waitpid(process, 0)
        os.close(terminal)
    return printed


WAYS = {"pip": by_pip, "pipx": by_pipx, "uvx": by_uvx, "server": server_by_pip}


def try_way(name: str, wheels: Path, *, has_model: bool) -> None:
    with tempfile.TemporaryDirectory(prefix=f"segue-{name}-") as folder:
        home = Path(folder)
        for wheel in wheels.glob("*.whl"):
            shutil.copy(wheel, home)
        person = Person(home)
        began = time.monotonic()
        program = asyncio.run(WAYS[name](person))
        _tell(name, person.typed, time.monotonic() - began)
        if has_model and name != "server":
            person.typed.pop()
            began = time.monotonic()
            assert "Download 98 MB?" in on_a_terminal(person, program)
            _tell(f"{name}, small model", person.typed, time.monotonic() - began)


def _tell(way: str, typed: Sequence[str], took_s: float) -> None:
    print(f"{way}: an answer after {took_s:.1f} s and {len(typed)} things typed")
    for line in typed:
        print(f"    {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path, help="the folder of both")
    parser.add_argument("--way", choices=WAYS, action="append", help="only this one")
    parser.add_argument("--no-model", action="store_true", help="do not download the small model")
    options = parser.parse_args()
    for name in options.way or WAYS:
        if name in ("pipx", "uvx") and shutil.which(name) is None:
            print(f"{name}: not tried, it is not installed here")
            continue
        try_way(name, options.wheels.resolve(), has_model=not options.no_model)


if __name__ == "__main__":
    main()
