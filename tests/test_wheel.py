"""Does the wheel have everything that a server needs, apart from its dependencies?

It is built as `make dist` builds it and installed into an environment outside the checkout, which borrows the libraries
of the tests. `make test-install` does it in empty environments, with pip, pipx and uvx.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import msgspec
import pytest

from segue import __version__
from tests.support import fetch, served_process

ROOT = Path(__file__).parents[1]
SCRIPTED = ("--engine", "scripted", "--store", "memory")


def run(*command: str | Path, cwd: Path) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = folder / "environment"
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
    run(*pip, "--no-deps", "--no-index", "--no-compile", wheel, cwd=folder)
    found = Path(run(python, "-c", "import segue; print(segue.__file__)", cwd=folder))
    assert found.is_relative_to(environment)
    # A folder that a .pth file names is searched, but its own .pth files, the checkout's among them, are not read.
    (found.parents[1] / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


async def test_wheel_serves_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    segue = installed / "segue"
    assert run(segue, "--version", cwd=tmp_path) == f"segue {__version__}"
    with served_process(*SCRIPTED, cwd=tmp_path, program=[str(segue)]) as served:
        body = {"model": "scripted", "input": "Hello"}
        answer = await fetch(served, "POST", "/v1/responses", body)
        assert answer.status == 200
        assert msgspec.json.decode(answer.body)["status"] == "completed"
        # Files beside the code: pages, snippets, and below the SQL that makes a database.
        page = await fetch(served, "GET", "/", headers={"accept": "text/html"})
        assert b"<html" in page.body
        snippet = run(segue, "connect", "curl", "--url", served.url, cwd=tmp_path)
        assert "curl" in snippet
    store = f"sqlite:///{tmp_path}/segue.db"
    assert "sk-segue-" in run(
        segue, *["keys", "create", "--name", "first", "--store"], store, cwd=tmp_path
    )
