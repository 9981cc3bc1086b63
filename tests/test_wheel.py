"""Do the wheels have everything that a server needs, apart from their dependencies?

They are built as `make dist` builds them and installed into environments outside the checkout, which borrow the
libraries of the tests. `make test-install` does it in empty environments, with pip, pipx and uvx.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
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
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of both distributions, by name."""
    folder = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    run(*build, cwd=ROOT)
    run(*build, cwd=ROOT / "segue-server")
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has both."""
    environment = tmp_path_factory.mktemp("whole") / "environment"
    return install(environment, *wheels.values(), libraries=Path(sysconfig.get_path("purelib")))


def install(environment: Path, *wheels: Path, libraries: Path) -> Path:
    """The programs of a new environment with these wheels, which borrows the libraries in a folder."""
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment.parent)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
    run(*pip, "--no-deps", "--no-index", "--no-compile", *wheels, cwd=environment.parent)
    found = Path(run(python, "-c", "import segue; print(segue.__file__)", cwd=environment.parent))
    assert found.is_relative_to(environment)
    # A folder that a .pth file names is searched, but its own .pth files, the checkout's among them, are not read.
    (found.parents[1] / "borrowed.pth").write_text(f"{libraries}\n")
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


def test_source_archives_build_the_same_wheels(wheels: dict[str, Path], tmp_path: Path) -> None:
    for name, project in {"segue": ROOT, "segue_server": ROOT / "segue-server"}.items():
        run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=project)
        archive = f"{name}-{__version__}"
        with tarfile.open(tmp_path / f"{archive}.tar.gz") as packed:
            packed.extractall(tmp_path, filter="data")
        again = tmp_path / name
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", again]
        run(*build, cwd=tmp_path / archive)
        (built,) = again.glob("*.whl")
        assert built.read_bytes() == wheels[name].read_bytes()
