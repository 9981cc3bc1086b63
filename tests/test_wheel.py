"""Do the wheels have everything that a server needs, apart from their dependencies?

They are built as `make dist` builds them and installed into environments outside the checkout, which borrow the
libraries of the tests. `make test-install` does it in empty environments, with pip, pipx and uvx.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from base64 import b64encode
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from segue import __version__
from segue.server.models import SCRIPTED_VOCABULARY
from tests.engines.fakes.vllm import FakeVllm
from tests.support import fetch, loaded_modules, served_process

ROOT = Path(__file__).parents[1]
SCRIPTED = ("--engine", "scripted", "--store", "memory")


def run(*command: str | Path, cwd: Path) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of all distributions, by name."""
    folder = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    run(*build, cwd=ROOT)
    for part in ("segue-server", "segue-conform", "segue-vllm"):
        run(*build, cwd=ROOT / part)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has them all."""
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
        unit = run(segue, "deploy", "write", "systemd", "-o", "-", cwd=tmp_path)
        assert unit == (ROOT / "deploy" / "segue.service").read_text().strip()
    store = f"sqlite:///{tmp_path}/segue.db"
    assert "sk-segue-" in run(
        segue, *["keys", "create", "--name", "first", "--store"], store, cwd=tmp_path
    )


def test_source_archives_build_the_same_wheels(wheels: dict[str, Path], tmp_path: Path) -> None:
    projects = {
        "segue": ROOT,
        "segue_server": ROOT / "segue-server",
        "segue_conform": ROOT / "segue-conform",
        "segue_vllm": ROOT / "segue-vllm",
    }
    for name, project in projects.items():
        run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=project)
        archive = f"{name}-{__version__}"
        with tarfile.open(tmp_path / f"{archive}.tar.gz") as packed:
            packed.extractall(tmp_path, filter="data")
        again = tmp_path / name
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", again]
        run(*build, cwd=tmp_path / archive)
        (built,) = again.glob("*.whl")
        assert built.read_bytes() == wheels[name].read_bytes()


# --- a server in front of vLLM: one URL, no hosted tool ----------------------------------------------------

# What it installs. One more is a decision (docs/decisions/0001-dependencies.md).
LIBRARIES = {
    "cryptography",
    "fastokens",
    "httptools",
    "jinja2",
    "msgspec",
    "prometheus-client",
    "python-multipart",
    "tokenizers",
    "uvicorn",
    "uvloop",
    "websockets",
    "zstandard",
}
# What it loads to answer a request: of its libraries (fastokens is for long texts), of ours, and which rooms.
LIBRARIES_LOADED = {
    "_cffi_backend",
    "click",
    "cryptography",
    "httptools",
    "jinja2",
    "markupsafe",
    "msgspec",
    "prometheus_client",
    "tokenizers",
    "uvicorn",
    "uvloop",
    "websockets",
    "zstandard",
}
OURS_LOADED = {"segue", "segue_cli", "segue_dashboard"}
ROOMS_LOADED = {
    *("aio", "errors", "framing", "ids", "limits", "printable", "rests", "settings"),
    *("wire", "seams", "session", "turn", "process", "memory", "accounts", "resent"),
    *(
        "vocabularies",
        "schemas",
        "readers",
        "derivation",
        "dialects",
        "border",
        "engines",
        "seals",
        "stores",
    ),
    *("engine_sessions", "budgets"),
    *(
        "listener",
        "responses",
        "messages",
        "completions",
        "passthrough",
        "files",
        "server",
        "observe",
        "reports",
    ),
}
SERVE = "serve --engine scripted --store memory"
# The words of a command -> what is refused, the package that is missing, and what brings it.
MISSING: dict[str, tuple[str, str, str]] = {
    "serve": ("engine", "segue_embedded", "segue"),
    "serve --engine scripted --store postgresql://127.0.0.1:1/x": (
        "--store",
        "asyncpg",
        "postgres",
    ),
    f"{SERVE} --fetch public": ("--fetch", "aiohttp", "web"),
    f"{SERVE} --search-url http://127.0.0.1:1/{{query}}": ("--search-url", "aiohttp", "web"),
    f"{SERVE} --otel-endpoint http://127.0.0.1:1": ("--otel-endpoint", "aiohttp", "web"),
    f"{SERVE} --guard moderation --guard-url http://127.0.0.1:1": ("--guard", "aiohttp", "web"),
    f"{SERVE} --mcp-hosts 127.0.0.1": ("mcp", "mcp", "mcp"),
    f"{SERVE} --files-url s3://bucket": ("--files-url", "obstore", "s3"),
    "chat": ("chat", "rich", "segue"),
    "models list": ("models", "rich", "segue"),
    "bench": ("bench", "segue_bench", "segue"),
    "fleet up": ("fleet", "segue_fleet", "segue"),
    "conform": ("conform", "segue_conform", "segue"),
}


def needed(wheel: Path) -> list[Requirement]:
    """What a wheel needs, without its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    return without_extras(line.partition(": ")[2] for line in lines if line[:13] == "Requires-Dist")


def without_extras(texts: Iterable[str]) -> list[Requirement]:
    found = map(Requirement, texts)
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def borrow(requirements: Sequence[Requirement], folder: Path) -> None:
    """Links to these libraries of the tests and to all that they need, and to nothing else."""
    names, todo = set[str](), [one.name for one in requirements]
    while todo:
        name = canonicalize_name(todo.pop())
        if name not in names:
            names.add(name)
            todo += [one.name for one in without_extras(metadata.requires(name) or ())]
    site = Path(sysconfig.get_path("purelib"))
    files = [file for name in names for file in metadata.files(name) or ()]
    for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
        (folder / top).symlink_to(site / top)


@pytest.fixture(scope="module")
def lean(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the server and its libraries alone."""
    folder = tmp_path_factory.mktemp("lean")
    libraries = folder / "libraries"
    libraries.mkdir()
    borrow(needed(wheels["segue_server"]), libraries)
    return install(folder / "environment", wheels["segue_server"], libraries=libraries)


def test_server_needs_twelve_libraries(wheels: dict[str, Path]) -> None:
    assert {one.name for one in needed(wheels["segue_server"])} == LIBRARIES


async def test_server_in_front_of_vllm_loads_what_it_uses(lean: Path, tmp_path: Path) -> None:
    async with FakeVllm() as fake, AsyncExitStack() as stack:
        flags = ("--engine", "vllm", "--engine-url", fake.url, "--model", "fake")
        opening = served_process(
            *flags,
            *("--tokenizer", SCRIPTED_VOCABULARY, "--store", "memory"),
            cwd=tmp_path,
            environment={"PYTHONPROFILEIMPORTTIME": "1"},
            program=[str(lean / "segue-server")],
        )
        served = await asyncio.to_thread(stack.enter_context, opening)
        body = {"model": "fake", "input": "Hello", "stream": True}
        answer = await fetch(served, "POST", "/v1/responses", body)
        assert b"response.completed" in answer.body
    names = loaded_modules(served)
    packages = {name.split(".")[0] for name in names}
    borrowed = {path.name.split(".")[0] for path in (lean.parents[1] / "libraries").iterdir()}
    assert packages & borrowed - {"typing_extensions"} == LIBRARIES_LOADED
    assert {name for name in packages if name.split("_")[0] == "segue"} == OURS_LOADED
    assert {name.split(".")[1] for name in names if name.startswith("segue.")} == ROOMS_LOADED


@pytest.mark.parametrize("words", MISSING)
def test_missing_library_is_named_with_what_installs_it(
    lean: Path, tmp_path: Path, words: str
) -> None:
    done = subprocess.run(
        [lean / "segue-server", *words.split()],
        cwd=tmp_path,
        # Another server may have the usual port.
        env={**os.environ, "SEGUE_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    subject, package, source = MISSING[words]
    assert done.returncode == 2
    wanted = "segue" if source == "segue" else f"segue-server[{source}]"
    # There is no pip in this environment.
    install = f"uv pip install --python {lean / 'python'} '{wanted}'"
    line = f"segue: {subject}: the package '{package}' is not installed. Run: {install}"
    assert line in done.stderr.splitlines()


async def test_server_alone_operates_itself_and_reads_no_pdf(lean: Path, tmp_path: Path) -> None:
    """What an operator needs is there without rich; what is not there is left out of the help."""
    segue, store = lean / "segue-server", f"sqlite:///{tmp_path}/segue.db"
    listed = run(segue, "--help", cwd=tmp_path)
    assert "usage: segue-server COMMAND" in listed
    assert not re.search(r"^  (bench|chat|fleet|models) ", listed, re.MULTILINE)
    run(segue, "completion", "bash", cwd=tmp_path)
    run(segue, "keys", "create", "--name", "first", "--store", store, cwd=tmp_path)
    assert "first" in run(segue, "keys", "list", "--store", store, cwd=tmp_path)
    assert "No problems" in run(segue, "doctor", "--port", "0", *SCRIPTED, cwd=tmp_path)
    run(segue, "backup", "here.backup", "--store", store, cwd=tmp_path)
    data = f"data:application/pdf;base64,{b64encode(b'%PDF-1.7').decode()}"
    part = {"type": "input_file", "filename": "a.pdf", "file_data": data}
    body = {"model": "scripted", "input": [{"role": "user", "content": [part]}]}
    with served_process(*SCRIPTED, cwd=tmp_path, program=[str(segue)]) as served:
        refused = await fetch(served, "POST", "/v1/responses", body)
    assert refused.status == 400
    assert b"pip install 'segue-server[pdf]'" in refused.body
